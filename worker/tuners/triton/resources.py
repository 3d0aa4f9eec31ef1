"""What a candidate takes of a multiprocessor, estimated before it is compiled.

Shared memory is an upper bound (tests compare it with what the compiler reports); registers are a lower one.
"""

from __future__ import annotations

from worker.tuners.common.problem import MX_GROUP, Problem
from worker.tuners.triton.candidate import Candidate
from worker.tuners.triton.target import Target

MAX_REGISTERS = {"cuda": 255, "hip": 512}
"""32-bit registers one lane can address (CUDA C Programming Guide, table 'Technical Specifications'; on CDNA 256
vector and 256 accumulation registers)."""
OTHER_REGISTERS = 40
"""Registers of addresses and loop state beside the accumulator, seen on sm_90."""
STORED = 128 * 128
"""Elements of a tile from which on it is written through a descriptor."""
BARRIERS = 1024
"""Bytes for mbarriers and alignment between buffers."""


def stage_bytes(p: Problem, c: Candidate) -> int:
    """Bytes of X and W that one step along K loads."""
    return (c.block_m + c.width) * c.block_k * p.bits // 8


def shared_bytes(p: Problem, c: Candidate, target: Target) -> int:
    """Upper bound of a program's shared memory.

    The pipeline holds `num_stages` steps; ROCm pads its rows (by up to 1/32, seen on gfx950). Where MXFP4 has
    no instruction, wgmma reads W widened to bfloat16. A tile on its way out takes its size, padded where it
    goes as float32: instead of the pipeline where the loop has ended, beside it in a persistent kernel.
    """
    pipeline = c.num_stages * stage_bytes(p, c)
    if p.scale == "mx":
        pipeline += c.num_stages * (c.block_m + c.block_n) * c.block_k // MX_GROUP
        if not target.native_mx and c.block_m >= 64:
            pipeline += 2 * c.block_n * c.block_k
    if p.scale == "block":
        pipeline += 4 * c.block_m  # a step's scales on their way to the sums
    if target.backend == "hip":
        pipeline += pipeline // 32
    size = 4 if c.split_k > 1 or c.swap else p.out_size
    tile = c.block_m * c.width * size
    if size == 4:
        tile += tile // 8
    if c.persistent:
        return pipeline + (tile // 2 if halves(p, c) else tile) + BARRIERS
    return max(pipeline, tile) + BARRIERS


def halves(p: Problem, c: Candidate) -> bool:
    """Whether a persistent kernel writes a tile in two halves.

    Where the columns of a tile are shared by warps, or the output is float32, the compiler gains nothing by it.
    """
    return c.persistent and c.block_n >= 256 and 16 * c.num_warps <= c.block_m and p.out_size < 4


def stores(p: Problem, c: Candidate) -> bool:
    """Whether a tile is written through a tensor descriptor: large tiles, whose rows start at multiples of 16 bytes.

    A descriptor cuts off what lies beyond the last row, so there must be no other batch behind it.
    """
    large = c.block_m * c.block_n >= STORED and not c.swap
    return c.descriptor and large and p.b == 1 and p.n * p.out_size % 16 == 0


def accumulators(c: Candidate, target: Target) -> int:
    """Registers a lane needs for the tile's sums."""
    return c.block_m * c.width // (c.num_warps * target.warp_size)


def registers(p: Problem, c: Candidate, target: Target) -> int:
    """Registers a lane needs, at least. A product that is scaled before it is added is a second accumulator."""
    return accumulators(c, target) * (2 if p.scale == "block" else 1) + OTHER_REGISTERS


def occupancy(p: Problem, c: Candidate, target: Target) -> int:
    """Programs of a candidate that a multiprocessor runs at the same time, at least 1."""
    lanes = c.num_warps * target.warp_size
    by_shared = target.shared_sm_bytes // max(1, shared_bytes(p, c, target))
    by_registers = target.registers // max(1, lanes * registers(p, c, target))
    return max(1, min(by_shared, by_registers, 2048 // lanes, 16))
