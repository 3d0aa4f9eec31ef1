"""vLLM's block-FP8 linear layer as a kernel source: one kernel, one file for each (N, K). Imports torch and triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from worker.families import ENGINE
from worker.triton_configs.engine_modules import replaced
from worker.triton_configs.engine_package import Layer
from worker.triton_configs.serving_engine import LINEAR_LOOKUP, KernelLaunch
from worker.tuners.common.case import BLOCK8, Case
from worker.tuners.common.inputs import Inputs, needed_bytes
from worker.tuners.common.problem import SCALE_BLOCK, UnsupportedError, fp8_of, size_of
from worker.tuners.engines.source import AMD_KNOBS, LEAST_SUMS, EngineSource, LayerProblem, Operands, warps_factor
from worker.tuners.search.space import Space, fits_device, launch_identity
from worker.tuners.search.target import Target
from worker.tuners.search.tile_config import TileConfig, Values
from worker.tuners.search.time_model import accumulators, estimate_us

BLOCK = (SCALE_BLOCK, SCALE_BLOCK)
LARGE_TENSOR_BYTES = 1 << 31
"""AMD's compiler treats a tensor of this size or more in another way."""
# vLLM's own space has rows from 16, columns from 32, steps of 64 and 128, 4 and 8 warps, 2 to 5 stages; the rest is
# what the kernel takes beyond it.
KNOBS: dict[str, tuple[Any, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128),
    "GROUP_SIZE_M": (1, 8, 16, 32, 64),
}
KNOBS_OF_BACKEND: dict[str, dict[str, tuple[Any, ...]]] = {
    "cuda": {"num_warps": (2, 4, 8, 16), "num_stages": (1, 2, 3, 4, 5, 6)},
    "hip": {"num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3), **AMD_KNOBS},
}
KNOBS_OF_CHIP: dict[int | str, dict[str, tuple[Any, ...]]] = {"gfx942": {"kpack": (1, 2)}}
DEFAULT_GROUP = 16


@dataclass(frozen=True, slots=True)
class LinearSource(EngineSource):
    """The block-FP8 linear layer: one kernel, one file for each (N, K)."""

    op = "linear"

    def problem(self, family: str, key: Mapping[str, int | str], gfx: str) -> LayerProblem:
        m, n, k = (size_of(key, column) for column in "MNK")
        return LayerProblem(family, 1, m, n, k, fp8_of(gfx), layer=Layer.from_key(key))

    def space(self, problem: LayerProblem, target: Target) -> Space:
        return Space(
            knobs={**KNOBS, **KNOBS_OF_BACKEND[target.backend], **KNOBS_OF_CHIP.get(target.arch, {})},
            plain={"GROUP_SIZE_M": DEFAULT_GROUP},
            is_legal=lambda config: is_legal(problem, config, target),
            estimate=lambda config: estimate_us(problem, config.knobs, target) * warps_factor(config, target),
            identity=lambda config: launch_identity(problem, config.values),
            prefix=ENGINE,
        )

    def compile_problem(self, problem: LayerProblem) -> LayerProblem:
        if problem.m == 1 or max(problem.x_bytes, problem.out_bytes) >= LARGE_TENSOR_BYTES:
            return problem
        # Triton specialises arguments that are 1, and those that 16 divides
        return replace(problem, m=16 if problem.m % 16 == 0 else 17)

    def needed_bytes(self, problem: LayerProblem) -> int:
        return needed_bytes(_case(problem))

    def inputs(self, problem: LayerProblem, device: torch.device, seed: int, draw: int) -> Inputs:
        return Inputs.make(_case(problem), device, seed, draw)

    def operands(self, inputs: Inputs) -> Operands:
        x_scales, w_scales = inputs.scales
        with replaced(torch.accelerator, {"empty_cache": lambda: None}):  # where it is compiled there may be none
            w = self.engine().fp8._maybe_pad_fp8_weight(inputs.w)
        return {"x": inputs.x, "w": w, "xs": x_scales, "ws": w_scales}

    def launches(
        self, problem: LayerProblem, values: Values, operands: Operands, out: torch.Tensor
    ) -> list[KernelLaunch]:
        engine = self.engine()
        tensors = [operands[name] for name in ("x", "w", "xs", "ws")]
        outputs: list[torch.Tensor] = []

        def multiply() -> None:
            outputs.append(engine.fp8.w8a8_triton_block_scaled_mm(*tensors, list(BLOCK), out.dtype))

        with replaced(engine.fp8, {LINEAR_LOOKUP: lambda *_: {1: dict(values)}}):
            launches = engine.launches("linear", multiply)
        if len(launches) != 1:
            count = len(launches)
            raise UnsupportedError(f"{engine.project} {engine.version} starts {count} kernels for a linear layer")
        # the launcher made an output of its own
        args = tuple(out if argument is outputs[0] else argument for argument in launches[0].args)
        return [launches[0]._replace(args=args)]


def _case(problem: LayerProblem) -> Case:
    return Case(problem.family, BLOCK8, problem.m, problem.n, problem.k, dtype=problem.dtype, outdtype=problem.outdtype)


def is_legal(problem: LayerProblem, config: TileConfig, target: Target) -> bool:
    """False for what gives wrong results or cannot be a good one; what it needs of shared memory the compiler says."""
    knobs = config.knobs
    # the kernel takes one scale a step
    if SCALE_BLOCK % knobs.block_k and problem.k > SCALE_BLOCK:
        return False
    if accumulators(knobs, target) < LEAST_SUMS or not fits_device(problem, config, target):
        return False
    stages_in_shared = knobs.num_stages - 1  # a pipeline may keep one stage in registers
    return stages_in_shared * (knobs.block_m + knobs.block_n) * knobs.block_k <= target.shared_bytes
