"""vLLM's block-FP8 linear layer: one kernel, one file for each (N, K)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from worker.bench.case import BLOCK8, Case
from worker.bench.measuring import Inputs, needed_bytes
from worker.families import ENGINE
from worker.triton_configs.engine import Engine, Launch, Layer, replaced
from worker.tuners.common.problem import SCALE_BLOCK, UnsupportedError, fp8_of, size_of
from worker.tuners.search.bucket import Point, weighted_sum
from worker.tuners.search.model import accumulators, estimate_us
from worker.tuners.search.source import Target
from worker.tuners.search.tiles import SHAPING, Space, TileConfig, Values, fits
from worker.tuners.vllm.source import LEAST_SUMS, LayerProblem, Op, Operands, warps_factor

BLOCK = (SCALE_BLOCK, SCALE_BLOCK)
FIRST_BYTES = 1 << 31  # for a tensor of this size or more, AMD's chips get other code
KNOBS: dict[str, tuple[Any, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128),
    "GROUP_SIZE_M": (1, 8, 16, 32, 64),
}
OF_BACKEND: dict[str, dict[str, tuple[Any, ...]]] = {
    "cuda": {"num_warps": (2, 4, 8, 16), "num_stages": (1, 2, 3, 4, 5, 6)},
    "hip": {
        "num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3), "waves_per_eu": (0, 1, 2, 4),
        "matrix_instr_nonkdim": (16, 32),
    },
}  # fmt: skip
"""vLLM's own space (rows from 16, columns from 32, steps of 64 and 128, 4 and 8 warps, 2 to 5 stages), and what the
kernel takes beyond it."""
DEFAULT_GROUP = 16


def knobs_of(target: Target) -> dict[str, tuple[Any, ...]]:
    """Values of each key that the kernel takes on a chip."""
    found = {**KNOBS, **OF_BACKEND[target.backend]}
    return {**found, "kpack": (1, 2)} if target.arch == "gfx942" else found


class Linear(Op[LayerProblem]):
    """The op. Its winner has the least time of the workload's calls."""

    name = "linear"
    labels = searched = ("",)

    def cost(self, points: Sequence[Point], us: Sequence[float], least: Sequence[float]) -> float:
        return weighted_sum(points, us, least)

    def problem(self, family: str, key: Mapping[str, int | str], gfx: str, label: str) -> LayerProblem:
        m, n, k = (size_of(key, c) for c in "MNK")
        return LayerProblem(family, 1, m, n, k, fp8_of(gfx), layer=Layer("linear", n, k, dtype="fp8_w8a8", block=BLOCK))

    def at(self, p: LayerProblem, m: int, label: str) -> LayerProblem:
        return replace(p, m=m)

    def sibling(self, layer: Layer, sizes: Sequence[int]) -> Layer:
        n, k = sizes
        return replace(layer, n=n, k=k)

    def default(self, engine: Engine, p: LayerProblem) -> Values:
        x, w = (torch.empty(rows, p.k, dtype=torch.float8_e4m3fn, device="meta") for rows in (p.m, p.n))
        xs, ws = (torch.empty(rows, -(-p.k // SCALE_BLOCK), device="meta") for rows in (p.m, -(-p.n // SCALE_BLOCK)))
        default: Values = self._launch(engine, None, {"x": x, "w": w, "xs": xs, "ws": ws}, x).named
        return default

    def space(self, p: LayerProblem, target: Target) -> Space:
        knobs = knobs_of(target)
        plain = {k: v[0] for k, v in knobs.items() if k not in SHAPING} | {"GROUP_SIZE_M": DEFAULT_GROUP}
        return Space(
            knobs, plain, lambda c: is_legal(p, c, target),
            lambda c: estimate_us(p, c.knobs, target) * warps_factor(c, target), lambda c: identity(p, c), ENGINE,
        )  # fmt: skip

    def alike(self, p: LayerProblem) -> LayerProblem:
        if p.m == 1 or max(p.x_bytes, p.out_bytes) >= FIRST_BYTES:
            return p
        return replace(p, m=16 if p.m % 16 == 0 else 17)

    def needed_bytes(self, p: LayerProblem) -> int:
        return needed_bytes(_case(p))

    def inputs(self, p: LayerProblem, device: torch.device, seed: int, draw: int) -> Inputs:
        return Inputs.make(_case(p), device, seed, draw)

    def operands(self, engine: Engine, inputs: Inputs) -> Operands:
        xs, ws = inputs.scales
        with replaced(torch.accelerator, {"empty_cache": lambda: None}):  # where it is compiled there may be none
            w = engine.fp8._maybe_pad_fp8_weight(inputs.w)
        return {"x": inputs.x, "w": w, "xs": xs, "ws": ws}

    def launches(
        self, engine: Engine, p: LayerProblem, values: Values, operands: Operands, out: torch.Tensor
    ) -> list[Launch]:
        return [self._launch(engine, dict(values), operands, out)]

    def _launch(self, engine: Engine, values: Values | None, operands: Operands, out: torch.Tensor) -> Launch:
        """The engine's launch with these values (None: its default), which writes `out`."""
        module, made = engine.fp8, []
        look_up = {"get_w8a8_block_fp8_configs": lambda *_: None if values is None else {1: values}}
        x, w, xs, ws = (operands[name] for name in ("x", "w", "xs", "ws"))
        with replaced(module, look_up):
            found = engine.launches(
                self.name,
                lambda: made.append(module.w8a8_triton_block_scaled_mm(x, w, xs, ws, list(BLOCK), out.dtype)),
            )
        if len(found) != 1:
            raise UnsupportedError(f"{engine.project} {engine.version} starts {len(found)} kernels for a linear layer")
        return found[0]._replace(args=tuple(out if a is made[0] else a for a in found[0].args))


def _case(p: LayerProblem) -> Case:
    return Case(p.family, BLOCK8, p.m, p.n, p.k, dtype=p.dtype, outdtype=p.outdtype)


def is_legal(p: LayerProblem, c: TileConfig, target: Target) -> bool:
    """False for what gives wrong results or cannot be a good one; what it needs of shared memory the compiler says."""
    x = c.knobs
    one_scale = SCALE_BLOCK % x.block_k == 0 or p.k <= SCALE_BLOCK  # the kernel takes one scale a step
    least = (x.num_stages - 1) * (x.block_m + x.block_n) * x.block_k  # a pipeline may keep one stage in registers
    busy = accumulators(x, target) >= LEAST_SUMS
    return one_scale and busy and fits(p, c, target) and least <= target.shared_bytes


def identity(p: LayerProblem, c: TileConfig) -> object:
    """Equal for configs that start the same kernel alike: one row of tiles has no order."""
    values = c.values
    if p.m <= c.get("BLOCK_SIZE_M"):
        values["GROUP_SIZE_M"] = 1
    return tuple(sorted((k, str(v)) for k, v in values.items()))
