"""The backends of a bench by name, and those that call AITER's own entry points, of any date.

`aiter` is the tuned dispatch, `aiter-triton` and `aiter-bmm-...` are the Triton wrappers, `aiter-gluon` the wrappers in
Gluon; torch_backend.py has `torch`. measuring.py calls `load` once in the backend's process, then `bind` for each case.

Modules of AITER moved: on 2026-01-07 the Triton wrappers went from aiter/ops/triton/ to
aiter/ops/triton/gemm/{basic,batched}/. Both places are tried. AITER's own functions shuffle weights and scales for the
dispatch beforehand; that time does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.aiter_tree.scratch_tree import ScratchTree
from worker.bench.config_set import config_read, tree_with_configs
from worker.bench.measuring import Backend, BoundCase, Call
from worker.bench.torch_backend import TorchBackend
from worker.families import FAMILIES
from worker.protocol.bench import BenchOptions
from worker.protocol.paths import AITER_ROOT_ENV
from worker.triton_configs.resolve import CONFIGS
from worker.tuners.common.calls import arguments_of, find_function
from worker.tuners.common.case import BLOCK8, MX4, ROW8, Case
from worker.tuners.common.device import Device
from worker.tuners.common.inputs import Inputs, Operands, plain_operands, stored_operands
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
GLUON_FOLDER = "aiter/ops/triton/gluon"
GLUON_CHIP = "gfx950"


def make_backend(name: str, options: BenchOptions, device: Device) -> Backend:
    """The backend with that name (worker.families.BENCHED)."""
    if name == "torch":
        return TorchBackend()
    if name == "aiter":
        return Dispatch()
    if name == "aiter-gluon":
        return Gluon(options.gluon, device)
    return AiterTriton(name, options.sides[0].configs)


class AiterTriton:
    """AITER's Triton wrappers: by the family's name (aiter-triton), or one batched kernel (aiter-bmm-...)."""

    def __init__(self, name: str, config_set: str | None) -> None:
        """`config_set`: its text (config_set.py), "" for the tree's own configs, None if sets are not compared."""
        self._name = name
        self._config_set = config_set
        self._root = Path()

    def load(self) -> dict[str, Any]:
        tree = chosen_tree()
        if self._config_set:
            tree = tree_with_configs(tree, self._config_set, Path.cwd() / "aiter-with-configs")
        self._root = tree.root
        return {"aiter": enter_tree(tree)}

    def bind(self, case: Case) -> BoundCase:
        names = BATCHED_OPS.get(self._name) or FAMILIES[case.family].aiter.triton_ops
        folder = "batched" if names[0].startswith("batched") else "basic"
        places = []
        for name in names:
            module = name.removesuffix("_preshuffle")
            places.append((f"aiter.ops.triton.gemm.{folder}.{module}", name))
            places.append((f"aiter.ops.triton.{module}", name))
        function, path = find_function(places)
        prepare = _preshuffled_operands if path.endswith("_preshuffle") else plain_operands
        bound = bind_function(function, path, case, prepare)
        if self._config_set is None:
            return bound
        return replace(bound, config=config_read(self._root, bound.op, case))


class Gluon:
    """The wrappers of aiter/ops/triton/gluon, which AITER has since v0.1.11 (2026-01-21)."""

    def __init__(self, overlay: Mapping[str, str], device: Device) -> None:
        """`overlay`: files of --gluon-from, texts by their path, that are laid over a copy of the tree."""
        self._overlay = overlay
        self._device = device
        self._root = Path()

    def load(self) -> dict[str, Any]:
        tree = chosen_tree()
        if not self._overlay:
            self._root = tree.root
            return {"aiter": enter_tree(tree)}
        try:
            tree = ScratchTree.with_files(tree, Path.cwd() / "aiter-with-gluon", self._overlay)
        except OSError as e:
            raise UnavailableError(f"the files of --gluon-from cannot be overlaid: {e}") from e
        self._root = tree.root
        digests = {rel: hashlib.sha256(text.encode()).hexdigest()[:16] for rel, text in self._overlay.items()}
        return {"aiter": enter_tree(tree), "gluon": digests}

    def bind(self, case: Case) -> BoundCase:
        """Before anything is imported, check that the kernel's file and a configuration for it are there."""
        op = GLUON_OPS.get(case.family)
        if op is None:
            raise UnsupportedError(f"AITER has no Gluon kernel for {case.family}; it has {', '.join(GLUON_OPS)}")
        gfx = str(self._device.info().get("gfx", ""))
        if self._device.gpu and gfx != GLUON_CHIP:
            raise UnavailableError(f"AITER's Gluon kernels are for {GLUON_CHIP}; this is {gfx}")
        file = f"{GLUON_FOLDER}/{op}.py"
        if not (self._root / file).is_file():
            raise UnavailableError(f"this AITER has no {file} (it came with v0.1.11); --gluon-from overlays")
        if not self._has_config(op):
            raise UnavailableError(
                f"there is no configuration of {op} for Gluon below {CONFIGS}; --gluon-from overlays"
            )
        function, path = find_function([(f"aiter.ops.triton.gluon.{op}", op)])
        return bind_function(function, path, case, plain_operands)

    def _has_config(self, op: str) -> bool:
        """A config has the kernel's name, or a folder of its own: the place changed twice."""
        name = f"GEMM-{op.removeprefix('gemm_').upper()}"
        for path in (self._root / CONFIGS).rglob("*.json"):
            if "gluon" in path.parts and (name in path.name or op in path.parts):
                return True
        return False


class Dispatch:
    """gemm_a4w4 and its like, with the table in force that AITER_CONFIG_... names (or the image's own)."""

    def load(self) -> dict[str, Any]:
        return {"aiter": enter_tree(chosen_tree())}

    def bind(self, case: Case) -> BoundCase:
        function, path = find_function([FAMILIES[case.family].aiter.operator])
        if case.format == MX4:
            return bind_function(function, path, case, _mx_shuffled_operands, pads_rows=True)
        prepare = plain_operands
        if "bpreshuffle" in case.family:
            prepare = _blocks_shuffled_operands if case.format == BLOCK8 else _shuffled_operands
        elif case.format == ROW8 and not case.b:
            prepare = stored_operands
        return bind_function(function, path, case, prepare)


def bind_function(
    function: Callable[..., Any],
    path: str,
    case: Case,
    prepare: Callable[[Inputs], Operands],
    *,
    pads_rows: bool = False,
) -> BoundCase:
    """Bind a case to a function of AITER's, found at `path` (`package.module.name`).

    `pads_rows`: it writes an output whose rows are padded to a multiple of 32, if it is handed one.
    """

    def make(inputs: Inputs, out: torch.Tensor) -> Call:
        written = out
        if pads_rows and case.m % 32:
            written = out.new_full((-(-case.m // 32) * 32, case.n), float("nan"))
        available = {**prepare(inputs), "dtype": out.dtype, "out": written}
        if pads_rows:
            available["bpreshuffle"] = True
        arguments = arguments_of(function, available)

        def call() -> torch.Tensor:
            returned = function(**arguments)
            result: torch.Tensor = written if returned is None else returned
            return result[: case.m] if pads_rows else result

        return call

    op = "tgemm.mm" if "tgemm" in path else path.rsplit(".", 1)[-1]
    return BoundCase(op, path, make)


def _shuffled_operands(inputs: Inputs) -> Operands:
    """W in tiles."""
    return {**stored_operands(inputs), "w": _tiled(inputs.w)}


def _tiled(w: torch.Tensor) -> Any:
    """W in tiles of 16x16, by AITER."""
    shuffle_weight, _ = find_function([("aiter.ops.shuffle", "shuffle_weight")])
    return shuffle_weight(w, layout=(16, 16))


def _blocks_shuffled_operands(inputs: Inputs) -> Operands:
    """W in tiles; the scales of X lie transposed in memory under their own form."""
    xs, _ = inputs.scales
    return {**_shuffled_operands(inputs), "xs": xs.t().contiguous().view(*xs.shape)}


def _preshuffled_operands(inputs: Inputs) -> Operands:
    """Like `_blocks_shuffled_operands`, but with W in the row layout that Triton's kernel reads."""
    n, k = inputs.w.shape
    operands = _blocks_shuffled_operands(inputs)
    operands["w"] = operands["w"].reshape(n // 16, 16 * k)
    return operands


def _mx_shuffled_operands(inputs: Inputs) -> Operands:
    """W in 16x16 tiles, both scales shuffled (and padded) by AITER, in AITER's own types if it has them."""
    shuffle_scale, _ = find_function([("aiter.utility.fp4_utils", "e8m0_shuffle")])
    dtypes: Any = None
    with contextlib.suppress(UnavailableError):
        dtypes, _ = find_function([("aiter", "dtypes"), ("aiter.utility", "dtypes")])
    code_type = getattr(dtypes, "fp4x2", torch.uint8)
    scale_type = getattr(dtypes, "fp8_e8m0", torch.uint8)
    xs, ws = inputs.scales
    if inputs.w.shape[0] % 16:
        raise UnsupportedError(f"N is {inputs.case.n}; AITER shuffles W in tiles of 16 rows")
    return {
        "x": inputs.x.view(code_type),
        "w": _tiled(inputs.w.view(code_type)),
        "xs": shuffle_scale(xs.view(scale_type)),
        "ws": shuffle_scale(ws.view(scale_type)),
    }


def chosen_tree() -> Tree:
    """The tree that the inventory names, else the one that is imported, else one in a usual place.

    Raises UnavailableError.
    """
    try:
        return choose(os.environ.get(AITER_ROOT_ENV, ""))[0]
    except NotATreeError as e:
        raise UnavailableError(str(e)) from e


def enter_tree(tree: Tree) -> dict[str, Any]:
    """Have `import aiter` mean this tree; return its root, version and commit."""
    if torch.version.hip is None:
        os.environ.setdefault("AITER_TRITON_ONLY", "1")  # without ROCm nothing else of it can be imported
    sys.path.insert(0, str(tree.root))
    return {"root": str(tree.root), "version": tree.version, "commit": tree.commit}
