"""The configs of a problem of AITER's: legal ones without doubles, with their estimated times.

The values are those of the 171 files of gfx950 at e4048607a5 (1,277 buckets); `worker/tuners/search/space.py` makes
configs of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from worker.triton_configs.kinds import ConfigKind
from worker.tuners.common.problem import Problem
from worker.tuners.search.space import Space, fits_device, launch_identity
from worker.tuners.search.target import Target
from worker.tuners.search.tile_config import TileConfig
from worker.tuners.search.time_model import estimate_us

CompleteConfig = Callable[[dict[str, Any]], dict[str, Any]]
"""Values as AITER rewrites them for the problem (`Wrapper.complete_config`)."""

KNOBS: dict[str, tuple[Any, ...]] = {
    "BLOCK_SIZE_M": (4, 8, 16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (64, 128, 256, 512, 1024),
    "GROUP_SIZE_M": (1, 2, 4, 8, 16),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (1, 2, 3),
    "waves_per_eu": (0, 1, 2, 4, 6, 8),
    "matrix_instr_nonkdim": (16, 32),
    "cache_modifier": (None, ".cg"),
    "NUM_KSPLIT": (1, 2, 3, 4, 7, 8, 14, 16),
}
KNOBS_OF_CUDA: dict[str, tuple[Any, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256, 512),
    "num_stages": (2, 3, 4, 5),
    "waves_per_eu": (0,),  # read by AMD's compiler alone
}
"""NVIDIA's loads are further from its multiprocessors than AMD's; its files are nobody's but the user's."""
MOST_SPLIT_BYTES = 256 << 20
"""Bytes of the partial sums of all splits."""
WEIGHTS: dict[str, tuple[float, ...]] = {
    "hip": (0.151, 0.229, 0.801, 0.365, 0.18, 0.022, -0.04, 0.233, 0.611),
    "cuda": (0.03, 0, 0, 0, 0, 0, 0, 0, 0),
}
"""Weights of `traits`. Those of AMD were fitted to half of AITER's files of gfx950, see
benchmarks/results/aiter-triton.md; AITER ships none for NVIDIA."""
DEFAULT_GROUP = 8


def space_of(kind: ConfigKind, problem: Problem, target: Target, complete_config: CompleteConfig) -> Space:
    """The configs of a problem of a kind."""
    knobs = legal_values(kind, target)
    plain = {}
    if "GROUP_SIZE_M" in knobs:
        plain["GROUP_SIZE_M"] = DEFAULT_GROUP
    if 2 in knobs.get("waves_per_eu", ()):
        plain["waves_per_eu"] = 2
    return Space(
        knobs=knobs,
        plain=plain,
        is_legal=lambda config: is_legal(kind, problem, config, target),
        estimate=lambda config: estimate(problem, config, target),
        identity=lambda config: launch_identity(problem, complete_config(config.values)),
    )


def legal_values(kind: ConfigKind, target: Target) -> dict[str, tuple[Any, ...]]:
    """Values of each key that a kind's files hold for a chip, in the files' order of keys."""
    values = dict(KNOBS)
    if target.backend == "cuda":
        values |= KNOBS_OF_CUDA
    if "blockscale" in kind.name:
        values["BLOCK_SIZE_K"] = (128,)
    elif "a4w4" in kind.name or "a16w4" in kind.name:
        values["BLOCK_SIZE_K"] = (256, 512, 1024)
    required = kind.required_on(str(target.arch))
    return {key: legal for key, legal in values.items() if key in required}


def estimate(problem: Problem, config: TileConfig, target: Target) -> float:
    """Microseconds by the search's model, corrected for what AITER's shipped files prefer."""
    weights = WEIGHTS[target.backend]
    correction = sum(weight * trait for weight, trait in zip(weights, traits(problem, config), strict=True))
    return estimate_us(problem, config.knobs, target) * math.exp(correction)


def traits(problem: Problem, config: TileConfig) -> tuple[float, ...]:
    """Traits that the model is corrected by: distance from 4 warps, more than 4, one stage, three, log2 of a step's 128
    bytes, of the splits and of the tile, how far the tile is from a square, and that there are splits."""
    knobs = config.knobs
    above_4_warps = math.log2(knobs.num_warps) - 2
    return (
        abs(above_4_warps),
        max(0.0, above_4_warps),
        float(knobs.num_stages == 1),
        float(knobs.num_stages == 3),
        math.log2(knobs.block_k * problem.bits / 1024),
        math.log2(knobs.split_k),
        math.log2(knobs.block_m * knobs.block_n),
        abs(math.log2(knobs.block_n / knobs.block_m)),
        float(knobs.split_k > 1),
    )


def is_legal(kind: ConfigKind, problem: Problem, config: TileConfig, target: Target) -> bool:
    """False for a config that cannot be a good one for the problem, or does not run, before anything is compiled."""
    if not fits_device(problem, config, target):
        return False
    knobs = config.knobs
    if knobs.split_k > 1:
        has_less_than_a_step = problem.k // knobs.split_k < knobs.block_k
        split_bytes = 4 * problem.b * problem.m * problem.n * knobs.split_k
        if knobs.block_k > problem.k or has_less_than_a_step or split_bytes > MOST_SPLIT_BYTES:
            return False
    elif knobs.block_k > 2 * problem.k:
        return False
    return least_shared_bytes(kind, problem, config, target) <= target.shared_bytes


def least_shared_bytes(kind: ConfigKind, problem: Problem, config: TileConfig, target: Target) -> int:
    """Bytes of shared memory that the compiler takes for the operands at least; it may pad rows, and add scales.

    On AMD a loop of one stage has one operand there at a time; one warp may load it into registers. So has one of one
    step in AITER's kernels with scales along K, where the number of steps is a constant. Of a pipelined one every stage
    is there with asynchronous copies; else all but one, which is in registers. Shuffled W may stay in registers, as may
    all but one stage of an X beside it; X that is quantised between load and product is there once.
    """
    knobs = config.knobs
    x_bytes = knobs.block_m * knobs.block_k * problem.bits // 8
    w_bytes = knobs.block_n * knobs.block_k * problem.bits // 8
    if target.backend != "hip":
        return knobs.num_stages * (x_bytes + w_bytes)
    if kind.shuffled_w:
        w_bytes = 0
    has_one_step = problem.scale in ("block", "mx") and problem.k <= knobs.split_k * knobs.block_k
    if knobs.num_stages == 1 or has_one_step:
        return max(x_bytes, w_bytes) if knobs.num_warps > 1 else 0
    if kind.shuffled_w and not target.async_copy:
        return x_bytes
    stages = knobs.num_stages if target.async_copy else knobs.num_stages - 1
    if kind.quantises_x:
        return x_bytes + stages * w_bytes
    return stages * (x_bytes + w_bytes)
