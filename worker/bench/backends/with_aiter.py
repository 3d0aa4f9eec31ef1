"""Backends `aiter` (the tuned dispatch) and `aiter-triton`: AITER's own entry points, whatever their date.

Modules moved: Triton wrappers from aiter/ops/triton/ to aiter/ops/triton/gemm/{basic,batched}/ on 2026-01-07. Weights
and scales of the dispatch are shuffled ahead by AITER's own functions, which is not in the time.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.bench.backends.config_sets import applied, config_read
from worker.bench.backends.inputs import Inputs
from worker.bench.backends.measuring import BoundCase, Call
from worker.bench.case import BLOCK8, MX4, PRE4, PRE8, ROW8, Case
from worker.families import FAMILIES
from worker.protocol.paths import AITER_ROOT_ENV
from worker.tuners.common.calls import arguments_of, find_function
from worker.tuners.common.problem import UnavailableError, UnsupportedError

BATCHED_OPS = {
    "aiter-bmm-bf16": ("batched_gemm_bf16",),
    "aiter-bmm-a8w8": ("batched_gemm_a8w8",),
    "aiter-bmm-a8w8-prequant": ("batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant",),
    "aiter-bmm-afp4wfp4": ("batched_gemm_afp4wfp4",),
    "aiter-bmm-a16wfp4": ("batched_gemm_a16wfp4", "batched_gemm_afp4wfp4_pre_quant"),
}
"""Names of the wrappers by backend, the newest first; those of `aiter-triton` are the family's."""


class AiterTriton:
    """AITER's Triton wrappers: by the family's name (aiter-triton), or one batched kernel (aiter-bmm-...).

    `configs`: a config set to read, "" for the tree's own, None where sets are not compared.
    """

    def __init__(self, name: str, configs: str | None = None) -> None:
        self._name, self._configs = name, configs
        self._root = Path()

    def load(self) -> dict[str, Any]:
        tree = chosen()
        if self._configs:
            tree = applied(tree, self._configs, Path.cwd() / "aiter-with-configs")
        self._root = tree.root
        return {"aiter": enter(tree)}

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        ops = BATCHED_OPS.get(self._name) or FAMILIES[case.family].aiter.triton_ops
        folder = "batched" if ops[0].startswith("batched") else "basic"
        modules = [(f"{p}.{op.removesuffix('_preshuffle')}", op) for op in ops for p in (f".gemm.{folder}", "")]
        function, where = find_function([(f"aiter.ops.triton{module}", op) for module, op in modules])
        made = bound(function, where, case, _blocks_preshuffled if where.endswith("_preshuffle") else plain)
        return made if self._configs is None else replace(made, config=config_read(self._root, made.op, case))


class Dispatch:
    """gemm_a4w4 and its like, with the table in force that AITER_CONFIG_... names (or the image's own)."""

    def load(self) -> dict[str, Any]:
        return {"aiter": enter()}

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        function, where = find_function([FAMILIES[case.family].aiter.operator])
        shuffled = "bpreshuffle" in case.family
        prepare: Callable[[Inputs], dict[str, Any]] = plain
        if case.format == MX4:
            prepare = _mx_shuffled
        elif shuffled and case.format == BLOCK8:
            prepare = _blocks_shuffled
        elif shuffled:
            prepare = _shuffled
        elif case.format == ROW8 and not case.b:
            prepare = _as_stored
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

    op = where.rsplit(".", 1)[-1] if "tgemm" not in where else "tgemm.mm"
    return BoundCase(op, where, make)


def _as_stored(inputs: Inputs) -> dict[str, Any]:
    return {**plain(inputs), "ws": inputs.ws}


def _shuffle_weight() -> Callable[..., Any]:
    return find_function([("aiter.ops.shuffle", "shuffle_weight")])[0]


def _shuffled(inputs: Inputs) -> dict[str, Any]:
    return {**_as_stored(inputs), "w": _shuffle_weight()(inputs.w, layout=(16, 16))}


def _blocks_shuffled(inputs: Inputs) -> dict[str, Any]:
    """The scales of X lie transposed in memory under their own form."""
    assert inputs.xs is not None
    xs = inputs.xs.t().contiguous().view(*inputs.xs.shape)
    return {**_shuffled(inputs), "xs": xs}


def _blocks_preshuffled(inputs: Inputs) -> dict[str, Any]:
    """As `_blocks_shuffled`, W in the rows that Triton's kernel reads."""
    n, k = inputs.w.shape
    made = _blocks_shuffled(inputs)
    return {**made, "w": made["w"].reshape(n // 16, 16 * k)}


def _mx_shuffled(inputs: Inputs) -> dict[str, Any]:
    """W in 16x16 tiles, both scales shuffled (and padded) by AITER; its own types where it has them."""
    scale, _ = find_function([("aiter.utility.fp4_utils", "e8m0_shuffle")])
    dtypes: Any = None
    with contextlib.suppress(UnavailableError):
        dtypes, _ = find_function([("aiter", "dtypes"), ("aiter.utility", "dtypes")])
    fp4 = getattr(dtypes, "fp4x2", torch.uint8)
    e8 = getattr(dtypes, "fp8_e8m0", torch.uint8)
    assert inputs.xs is not None
    assert inputs.ws is not None
    if inputs.w.shape[0] % 16:
        raise UnsupportedError(f"N is {inputs.case.n}; AITER shuffles W in tiles of 16 rows")
    x, w = inputs.x.view(fp4), inputs.w.view(fp4)
    return {
        "x": x,
        "w": _shuffle_weight()(w, layout=(16, 16)),
        "xs": scale(inputs.xs.view(e8)),
        "ws": scale(inputs.ws.view(e8)),
        "bias": None,
    }


def chosen() -> Tree:
    """The tree that the inventory names, else the one that is imported, else one in a usual place.

    Raises UnavailableError.
    """
    try:
        return choose(os.environ.get(AITER_ROOT_ENV, ""))[0]
    except NotATreeError as e:
        raise UnavailableError(str(e)) from e


def enter(tree: Tree | None = None) -> dict[str, Any]:
    """Have `import aiter` mean this tree; its root, version and commit. Raises UnavailableError."""
    tree = tree or chosen()
    if torch.version.hip is None:
        os.environ.setdefault("AITER_TRITON_ONLY", "1")  # without ROCm nothing else of it can be imported
    sys.path.insert(0, str(tree.root))
    return {"root": str(tree.root), "version": tree.version, "commit": tree.commit}
