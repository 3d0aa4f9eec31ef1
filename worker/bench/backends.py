"""The backends of a bench by name. Here are those of AITER, its own entry points of any date: `aiter` (the tuned
dispatch), `aiter-triton` and `aiter-gluon`. `torch_backend.py` has the other.

Modules moved: on 2026-01-07 the Triton wrappers went from aiter/ops/triton/ to aiter/ops/triton/gemm/{basic,batched}/.
AITER's own functions shuffle the weights and scales for the dispatch beforehand; that time does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.aiter_tree.scratch_tree import ScratchTree
from worker.bench.case import BLOCK8, MX4, PRE4, PRE8, ROW8, Case
from worker.bench.measuring import Backend, BoundCase, Call, Inputs
from worker.bench.torch_backend import TorchBackend
from worker.families import FAMILIES
from worker.protocol.bench import Options
from worker.protocol.paths import AITER_ROOT_ENV
from worker.triton_configs.config_file import spell_values
from worker.triton_configs.kinds import BY_NAME, KINDS
from worker.triton_configs.resolve import CONFIGS, GEMMS, Resolver
from worker.triton_configs.tree_files import plan_file
from worker.tuners.common.calls import arguments_of, find_function
from worker.tuners.common.device import Device
from worker.tuners.common.problem import UnavailableError, UnsupportedError

BATCHED_OPS = {
    "aiter-bmm-bf16": ("batched_gemm_bf16",),
    "aiter-bmm-a8w8": ("batched_gemm_a8w8",),
    "aiter-bmm-a8w8-prequant": ("batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant",),
    "aiter-bmm-afp4wfp4": ("batched_gemm_afp4wfp4",),
    "aiter-bmm-a16wfp4": ("batched_gemm_a16wfp4", "batched_gemm_afp4wfp4_pre_quant"),
}
"""Names of the wrappers by backend, the newest first. For `aiter-triton` the family names them."""
GLUON_OPS = {f.name: f.aiter.gluon_op for f in FAMILIES.values() if f.aiter.gluon_op}
GLUON, GLUON_CHIP = "aiter/ops/triton/gluon", "gfx950"


def make_backend(name: str, options: Options, device: Device) -> Backend:
    """The backend with that name (worker.families.BENCHED)."""
    made: dict[str, Backend] = {
        "torch": TorchBackend(),
        "aiter": Dispatch(),
        "aiter-gluon": Gluon(options.gluon, device),
    }
    return made.get(name) or AiterTriton(name, options.sides[0].configs)


class AiterTriton:
    """AITER's Triton wrappers: by the family's name (aiter-triton), or one batched kernel (aiter-bmm-...).

    `configs`: a config set to read, "" for the tree's own, None where sets are not compared.
    """

    def __init__(self, name: str, configs: str | None) -> None:
        self._name, self._configs = name, configs
        self._root = Path()

    def load(self) -> dict[str, Any]:
        tree = chosen()
        if self._configs:
            tree = with_configs(tree, self._configs, Path.cwd() / "aiter-with-configs")
        self._root = tree.root
        return {"aiter": enter(tree)}

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        ops = BATCHED_OPS.get(self._name) or FAMILIES[case.family].aiter.triton_ops
        folder = "batched" if ops[0].startswith("batched") else "basic"
        modules = [(f"{p}.{op.removesuffix('_preshuffle')}", op) for op in ops for p in (f".gemm.{folder}", "")]
        function, where = find_function([(f"aiter.ops.triton{module}", op) for module, op in modules])
        made = bound(function, where, case, _blocks_preshuffled if where.endswith("_preshuffle") else plain)
        return made if self._configs is None else replace(made, config=config_read(self._root, made.op, case))


class Gluon:
    """The wrappers of aiter/ops/triton/gluon, there from v0.1.11 (2026-01-21) on, or `overlay`: files laid over a copy.

    Before anything is imported: is the kernel's file there, and a configuration for it.
    """

    def __init__(self, overlay: Mapping[str, str], device: Device) -> None:
        self._overlay, self._device = overlay, device
        self._root = Path()

    def load(self) -> dict[str, Any]:
        tree = chosen()
        if self._overlay:
            try:
                tree = ScratchTree.with_files(tree, Path.cwd() / "aiter-with-gluon", self._overlay)
            except OSError as e:
                raise UnavailableError(f"the files of --gluon-from cannot be overlaid: {e}") from e
        self._root = tree.root
        files = {rel: hashlib.sha256(t.encode()).hexdigest()[:16] for rel, t in self._overlay.items()}
        return {"aiter": enter(tree)} | ({"gluon": files} if files else {})

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        op = GLUON_OPS.get(case.family)
        if op is None:
            raise UnsupportedError(f"AITER has no Gluon kernel for {case.family}; it has {', '.join(GLUON_OPS)}")
        gfx = str(self._device.info().get("gfx", ""))
        if self._device.gpu and gfx != GLUON_CHIP:
            raise UnavailableError(f"AITER's Gluon kernels are for {GLUON_CHIP}; this is {gfx}")
        if not (self._root / GLUON / f"{op}.py").is_file():
            raise UnavailableError(f"this AITER has no {GLUON}/{op}.py (it came with v0.1.11); --gluon-from overlays")
        if not self._has_config(op):
            lacks = f"there is no configuration of {op} for Gluon below {CONFIGS}"
            raise UnavailableError(f"{lacks}; --gluon-from overlays")
        return bound(*find_function([(f"aiter.ops.triton.gluon.{op}", op)]), case)

    def _has_config(self, op: str) -> bool:
        """A config has the kernel's name, or a folder of its own: the place changed twice."""
        name = f"GEMM-{op.removeprefix('gemm_').upper()}"
        configs = [path for path in (self._root / CONFIGS).rglob("*.json") if "gluon" in path.parts]
        return any(name in path.name or op in path.parts for path in configs)


def with_configs(tree: Tree, text: str, folder: Path) -> Tree:
    """A scratch copy of the tree in `folder` that has a config set. Raises UnavailableError.

    A set is a JSON text (made by orchestrator/bench/request.py) with `named`, the words for people, and either `files`,
    by their path below AITER's configs, which replace all config files of GEMMs; or `winners` of a run ({kind, gfx,
    shape: [B, N, K] or null for the default file, buckets}), laid into the tree as a merge would.
    """
    made = json.loads(text)
    try:
        here = [] if "winners" in made else [p for where in GEMMS for p in (tree.root / CONFIGS).glob(where)]
        files = {str(CONFIGS / rel): text for rel, text in made.get("files", {}).items()}
        for w in made.get("winners", ()):
            shape = tuple(w["shape"]) if w["shape"] else None
            merged = plan_file(Resolver(tree.root, w["gfx"]), BY_NAME[w["kind"]], shape, w["buckets"])
            files[str(merged.target.relative_to(tree.root))] = merged.text
        return ScratchTree.with_files(tree, folder, files, [str(p.relative_to(tree.root)) for p in here])
    except (OSError, ValueError) as e:  # ResolveError and ConfigFileError among them
        raise UnavailableError(f"the config set {made['named']} does not fit {tree.root}: {e}") from e


def config_read(root: Path, op: str, case: Case) -> str:
    """`FILE BUCKET VALUES` of the config that a wrapper reads for a case: the file below AITER's configs, the values in
    a word. "" where it cannot be told. AITER must have been imported."""
    try:
        kind = next(k for k in KINDS if k.function == op)
        arch, _ = find_function([("aiter.ops.triton.utils._triton.arch_info", "get_arch")])
        found = Resolver(root, str(arch())).config_for(kind, case.m, case.n, case.k, case.b or None)
    except (StopIteration, UnavailableError, OSError, ValueError):
        return ""
    return f"{found.path.relative_to(root / CONFIGS)} {found.bucket} {spell_values(found.values)}"


class Dispatch:
    """gemm_a4w4 and its like, with the table in force that AITER_CONFIG_... names (or the image's own)."""

    def load(self) -> dict[str, Any]:
        return {"aiter": enter(chosen())}

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        function, where = find_function([FAMILIES[case.family].aiter.operator])
        if case.format == MX4:
            prepare = _mx_shuffled
        elif "bpreshuffle" in case.family:
            prepare = _blocks_shuffled if case.format == BLOCK8 else _shuffled
        else:
            prepare = _as_stored if case.format == ROW8 and not case.b else plain
        return bound(function, where, case, prepare, padded=case.format == MX4)


def plain(inputs: Inputs) -> dict[str, Any]:
    """Operands as the Triton wrappers take them: the row scales of W lie along N."""
    ws = inputs.ws
    if ws is not None and inputs.case.format == ROW8:
        ws = ws.transpose(-1, -2).contiguous()
    return {"x": inputs.x, "w": inputs.w, "xs": inputs.xs, "ws": ws, "bias": inputs.bias}


def bound(
    function: Callable[..., Any],
    where: str,
    case: Case,
    prepare: Callable[[Inputs], dict[str, Any]] = plain,
    *,
    padded: bool = False,
) -> BoundCase:
    """The call of a function of AITER's. `padded`: its output has its rows padded to 32 where it is handed in."""

    def make(inputs: Inputs, out: torch.Tensor) -> Call:
        values = {**prepare(inputs), "dtype": out.dtype, "out": out, "bpreshuffle": True if padded else None}
        if case.format in (PRE8, PRE4):
            values["xs"] = None
        if padded and case.m % 32:
            values["out"] = out.new_full((-(-case.m // 32) * 32, case.n), float("nan"))
        arguments = arguments_of(function, values)

        def run() -> torch.Tensor:
            made = function(**arguments)
            made = values["out"] if made is None else made
            whole: torch.Tensor = made[: case.m] if padded else made
            return whole

        return run

    return BoundCase("tgemm.mm" if "tgemm" in where else where.rsplit(".", 1)[-1], where, make)


def _as_stored(inputs: Inputs) -> dict[str, Any]:
    return {**plain(inputs), "ws": inputs.ws}


def _tiled(w: torch.Tensor) -> Any:
    """W in tiles of 16x16, by AITER."""
    return find_function([("aiter.ops.shuffle", "shuffle_weight")])[0](w, layout=(16, 16))


def _shuffled(inputs: Inputs) -> dict[str, Any]:
    return {**_as_stored(inputs), "w": _tiled(inputs.w)}


def _blocks_shuffled(inputs: Inputs) -> dict[str, Any]:
    """The scales of X lie transposed in memory under their own form."""
    xs, _ = inputs.scales
    return {**_shuffled(inputs), "xs": xs.t().contiguous().view(*xs.shape)}


def _blocks_preshuffled(inputs: Inputs) -> dict[str, Any]:
    """Like `_blocks_shuffled`, but with W in the row layout that Triton's kernel reads."""
    n, k = inputs.w.shape
    made = _blocks_shuffled(inputs)
    return {**made, "w": made["w"].reshape(n // 16, 16 * k)}


def _mx_shuffled(inputs: Inputs) -> dict[str, Any]:
    """W in 16x16 tiles, both scales shuffled (and padded) by AITER, in AITER's own types if it has them."""
    scale, _ = find_function([("aiter.utility.fp4_utils", "e8m0_shuffle")])
    dtypes: Any = None
    with contextlib.suppress(UnavailableError):
        dtypes, _ = find_function([("aiter", "dtypes"), ("aiter.utility", "dtypes")])
    fp4, e8 = (getattr(dtypes, name, torch.uint8) for name in ("fp4x2", "fp8_e8m0"))
    xs, ws = inputs.scales
    if inputs.w.shape[0] % 16:
        raise UnsupportedError(f"N is {inputs.case.n}; AITER shuffles W in tiles of 16 rows")
    w = _tiled(inputs.w.view(fp4))
    return {"x": inputs.x.view(fp4), "w": w, "xs": scale(xs.view(e8)), "ws": scale(ws.view(e8)), "bias": None}


def chosen() -> Tree:
    """The tree that the inventory names, else the one that is imported, else one in a usual place.

    Raises UnavailableError.
    """
    try:
        return choose(os.environ.get(AITER_ROOT_ENV, ""))[0]
    except NotATreeError as e:
        raise UnavailableError(str(e)) from e


def enter(tree: Tree) -> dict[str, Any]:
    """Have `import aiter` mean this tree; its root, version and commit."""
    if torch.version.hip is None:
        os.environ.setdefault("AITER_TRITON_ONLY", "1")  # without ROCm nothing else of it can be imported
    sys.path.insert(0, str(tree.root))
    return {"root": str(tree.root), "version": tree.version, "commit": tree.commit}
