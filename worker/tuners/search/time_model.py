"""An analytic model of a Triton GEMM: time, shared memory, registers and occupancy by its knobs.

`estimate_us` decides the order in which candidates are compiled and measured; `ranker.py` corrects it by what was
measured. Pure: without clock or device.

One step along K of one program loads (BM + BN) BK elements and multiplies BM BN BK. A multiprocessor runs `r`
programs at a time and needs for a step of each the longest of

    math     2 BM BN BK r / (peak / sms)           below 64 rows the slower MMA_SYNC of the bfloat16 peak
    shared   (BM + BN BM/64) BK bytes r / 128 B per clock        each 64 rows read W's block again
    load     (BM + BN) BK bytes r / PORT bytes per clock
    latency  LATENCY / (stages - 1)                hidden by the loads in flight

so that a program of S steps takes LATENCY + S step + END times the writing of its tile, and the whole the larger of

    waves    waves * program, waves = programs / (sms * r), rounded up
    memory   LATENCY + (X rereads + W rereads + out) / min(MEMORY bandwidth, bytes in flight / FLIGHT)

plus LAUNCH; split-K adds SPLIT + PART splits + writing and reading its parts at PARTS of the bandwidth. W is read again
for each group of tile rows, X for each column of tiles, as far as half the cache does not hold them.

Rates of shared memory and matrix instructions are the vendors'. The constants in capitals were fitted to 648
measurements of 18 shapes on an H200; on other chips they are a first guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from worker.tuners.common.problem import MX_GROUP, Problem
from worker.tuners.search.target import Target

LAUNCH = 1.7
"""us between two nodes of a graph."""
LATENCY = 1.3
"""us from asking for a step to multiplying it, under load."""
MMA_SYNC = 0.21
"""Share of the bfloat16 peak that tiles below wgmma's 64 rows reach; 8 bits are widened to 16 there."""
WGMMA_ROWS = 64
SHARED_BYTES_PER_CLOCK = 128
PORT = 60
"""Bytes a clock from the second-level cache into a multiprocessor (64 at best)."""
MEMORY = 0.89
"""Share of the stated bandwidth that is reached."""
FLIGHT = 0.26
"""us that a byte is in flight where too few are to fill the bandwidth."""
END = 2.6
"""Time of writing a tile over that of its bytes at a multiprocessor's share of the bandwidth."""
SPLIT = 0.75
"""us of the counter's round trip of split-K."""
PART = 0.13
"""us a part of split-K."""
PARTS = 0.47
"""Share of the bandwidth that parts are moved at."""
MAX_REGISTERS = {"cuda": 255, "hip": 512}
"""32-bit registers one lane can address (CUDA C Programming Guide, table 'Technical Specifications'; on CDNA 256
vector and 256 accumulation registers)."""
OTHER_REGISTERS = 40
"""Registers of addresses and loop state beside the accumulator, seen on sm_90."""
BARRIERS = 1024
"""Bytes for mbarriers and alignment between buffers."""
MOST_THREADS = 2048
MOST_PROGRAMS = 16
"""Threads and programs that a multiprocessor runs at most."""


@dataclass(frozen=True, slots=True)
class TileKnobs:
    """The knobs of a Triton GEMM by which its time is estimated. The last three are AMD's."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    split_k: int
    num_warps: int
    num_stages: int
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    kpack: int = 1

    @property
    def features(self) -> tuple[float, ...]:
        """The knobs as a point: a step of one knob is a distance of about 1."""
        return (
            math.log2(self.block_m), math.log2(self.block_n), math.log2(self.block_k), 0.25 * math.log2(self.group_m),
            math.log2(self.split_k), math.log2(self.num_warps), 0.5 * self.num_stages, 0.5 * self.waves_per_eu,
            self.matrix_instr_nonkdim / 16, 0.5 * self.kpack,
        )  # fmt: skip


def estimate_us(problem: Problem, knobs: TileKnobs, target: Target) -> float:
    """Microseconds of one call, launch included. Wrong by tens of percent; made to compare candidates."""
    rows = -(-problem.m // knobs.block_m)
    columns = -(-problem.n // knobs.block_n)
    programs = rows * columns * problem.b * knobs.split_k
    resident = max(1, min(occupancy(problem, knobs, target), -(-programs // target.sms)))
    slots = target.sms * resident
    waves = -(-programs // slots)
    blocks = -(-problem.k // knobs.block_k)
    steps = -(-blocks // knobs.split_k)
    stages_in_flight = max(1, knobs.num_stages - 1)
    loaded_bytes = stage_bytes(problem, knobs)
    step_us = max(
        resident * _math_us(problem, knobs, target),
        resident * _shared_us(problem, knobs, target),
        resident * loaded_bytes / (PORT * target.clock_ghz * 1e3),
        LATENCY / stages_in_flight,
    )
    bandwidth = target.memory_gbs * 1e3  # bytes a us
    tile_bytes = knobs.block_m * knobs.block_n * problem.out_size
    end_us = LATENCY + END * tile_bytes * resident / (bandwidth / target.sms)
    waves_us = waves * steps * step_us + end_us * waves
    flying_bytes = min(programs, slots) * loaded_bytes * stages_in_flight
    memory_bytes = _memory_bytes(problem, knobs, target, rows, columns)
    memory_us = LATENCY + memory_bytes / min(bandwidth * MEMORY, flying_bytes / FLIGHT)
    split_us = 0.0
    if knobs.split_k > 1:
        part_bytes = 8.0 * programs * knobs.block_m * knobs.block_n  # written and read in float32
        split_us = SPLIT + PART * knobs.split_k + part_bytes / (bandwidth * PARTS)
    return LAUNCH + max(waves_us, memory_us) + split_us


def _math_us(problem: Problem, knobs: TileKnobs, target: Target) -> float:
    """One step's matrix instructions on a multiprocessor alone."""
    m = knobs.block_m
    n = knobs.block_n
    is_widened = problem.scale == "mx" and not target.native_mx
    rate = target.peak("bfloat16" if is_widened else problem.dtype) * 1e6 / target.sms
    if target.backend == "cuda" and m < WGMMA_ROWS:
        rate = target.peak("bfloat16") * 1e6 * MMA_SYNC / target.sms
    us = 2 * m * n * knobs.block_k / rate
    lanes_per_us = 128 * target.clock_ghz * 1e3
    if problem.scale == "block":  # each sum is scaled: one multiply-add a sum, 128 lanes a clock
        us += m * n / lanes_per_us
    if is_widened:  # some eight operations an element
        us += 8 * (m + n) * knobs.block_k / lanes_per_us
    return us


def _shared_us(problem: Problem, knobs: TileKnobs, target: Target) -> float:
    """Operands read from shared memory: W's block once for each 64 rows, X's once."""
    w_reads = max(1, knobs.block_m // WGMMA_ROWS)
    read_bytes = (knobs.block_m + knobs.block_n * w_reads) * knobs.block_k * problem.bits // 8
    return read_bytes / (SHARED_BYTES_PER_CLOCK * target.clock_ghz * 1e3)


def _memory_bytes(problem: Problem, knobs: TileKnobs, target: Target, rows: int, columns: int) -> float:
    """Bytes from and to memory, with the operands that the cache does not hold until they are read again."""
    cache = target.l2_bytes * 0.5
    w_bytes = problem.w_bytes
    if w_bytes / problem.b > cache:
        w_bytes *= -(-rows // knobs.group_m)
    x_bytes = problem.x_bytes
    if min(rows, knobs.group_m) * knobs.block_m * problem.k * problem.bits / 8 > cache:
        x_bytes *= columns
    return x_bytes + w_bytes + problem.out_bytes + problem.scale_bytes


def stage_bytes(problem: Problem, knobs: TileKnobs) -> int:
    """Bytes of X and W that one step along K loads."""
    return (knobs.block_m + knobs.block_n) * knobs.block_k * problem.bits // 8


def shared_bytes(problem: Problem, knobs: TileKnobs, target: Target) -> int:
    """Upper bound of a program's shared memory.

    The pipeline holds `num_stages` steps; ROCm pads its rows (by up to 1/32, seen on gfx950). Where MXFP4 has
    no instruction, wgmma reads W widened to bfloat16. A tile on its way out takes its size, padded where it
    goes as float32, instead of the pipeline, whose loop has ended.
    """
    pipeline = knobs.num_stages * stage_bytes(problem, knobs)
    if problem.scale == "mx":
        pipeline += knobs.num_stages * (knobs.block_m + knobs.block_n) * knobs.block_k // MX_GROUP
        if not target.native_mx and knobs.block_m >= WGMMA_ROWS:
            pipeline += 2 * knobs.block_n * knobs.block_k
    if problem.scale == "block":
        pipeline += 4 * knobs.block_m  # a step's scales on their way to the sums
    if target.backend == "hip":
        pipeline += pipeline // 32
    size = 4 if knobs.split_k > 1 else problem.out_size
    tile = knobs.block_m * knobs.block_n * size
    if size == 4:
        tile += tile // 8
    return max(pipeline, tile) + BARRIERS


def accumulators(knobs: TileKnobs, target: Target) -> int:
    """Registers a lane needs for the tile's sums."""
    return knobs.block_m * knobs.block_n // (knobs.num_warps * target.warp_size)


def occupancy(problem: Problem, knobs: TileKnobs, target: Target) -> int:
    """Programs of a candidate that a multiprocessor runs at the same time, at least 1.

    A product that is scaled before it is added is a second accumulator.
    """
    lanes = knobs.num_warps * target.warp_size
    sums = accumulators(knobs, target)
    if problem.scale == "block":
        sums *= 2
    by_shared = target.shared_sm_bytes // max(1, shared_bytes(problem, knobs, target))
    by_registers = target.registers // max(1, lanes * (sums + OTHER_REGISTERS))
    return max(1, min(by_shared, by_registers, MOST_THREADS // lanes, MOST_PROGRAMS))
