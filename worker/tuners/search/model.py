"""An analytic model of a Triton GEMM: time, shared memory, registers, occupancy by its knobs; and the order of trials.

Pure: without clock or device.

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

Measurements correct an estimate: the log of measured over estimated is a residual, and a candidate's residual is
guessed from those measured near it,

    guess(i)      = (sum_j w_ij r_j + PULL * median r) / (sum_j w_ij + PULL),   w_ij = exp(-|f_i - f_j|^2 / 2)
    likely(i)     = estimate_i * exp(guess(i))
    optimistic(i) = estimate_i * exp(guess(i) - KAPPA * s / sqrt(1 + sum_j w_ij))

with f the candidate's features and s the spread of the residuals. (A Nadaraya-Watson regression with
a lower confidence bound.) The next candidate is the one of the least optimistic time. The search stops when no
candidate that is left could win by more than GAIN even by its optimistic time, and the last `patience` measured
brought nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.tuners.common.problem import MX_GROUP, Problem
from worker.tuners.search.source import Target

LAUNCH = 1.7  # us between two nodes of a graph
LATENCY = 1.3  # us from asking for a step to multiplying it, under load
MMA_SYNC = 0.21  # share of the bfloat16 peak that tiles below wgmma's 64 rows reach; 8 bits are widened to 16 there
PORT = 60  # bytes a clock from the second-level cache into a multiprocessor (64 at best)
MEMORY = 0.89  # share of the stated bandwidth that is reached
FLIGHT = 0.26  # us that a byte is in flight where too few are to fill the bandwidth
END = 2.6  # time of writing a tile over that of its bytes at a multiprocessor's share of the bandwidth
# us of the counter's round trip, us a part, and the share of the bandwidth that parts are moved at.
SPLIT, PART, PARTS = 0.75, 0.13, 0.47
MAX_REGISTERS = {"cuda": 255, "hip": 512}
"""32-bit registers one lane can address (CUDA C Programming Guide, table 'Technical Specifications'; on CDNA 256
vector and 256 accumulation registers)."""
OTHER_REGISTERS = 40  # registers of addresses and loop state beside the accumulator, seen on sm_90
BARRIERS = 1024  # bytes for mbarriers and alignment between buffers


@dataclass(frozen=True, slots=True)
class Knobs:
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


def estimate_us(p: Problem, c: Knobs, target: Target) -> float:
    """Microseconds of one call, launch included. Wrong by tens of percent; made to compare candidates."""
    rows, columns = -(-p.m // c.block_m), -(-p.n // c.block_n)
    programs = rows * columns * p.b * c.split_k
    blocks = -(-p.k // c.block_k)
    steps = -(-blocks // c.split_k)
    resident = max(1, min(occupancy(p, c, target), -(-programs // target.sms)))
    slots = target.sms * resident
    waves = -(-programs // slots)
    bandwidth = target.memory_gbs * 1e3
    step = max(
        resident * _math_us(p, c, target),
        resident * _shared_us(p, c, target),
        resident * stage_bytes(p, c) / (PORT * target.clock_ghz * 1e3),
        LATENCY / max(1, c.num_stages - 1),
    )
    end = LATENCY + END * c.block_m * c.block_n * p.out_size * resident / (bandwidth / target.sms)
    busy = waves * steps * step + end * waves
    flying = min(programs, slots) * stage_bytes(p, c) * max(1, c.num_stages - 1)
    memory = LATENCY + _memory_bytes(p, c, target, rows, columns) / min(bandwidth * MEMORY, flying / FLIGHT)
    split = 0.0
    if c.split_k > 1:
        parts = 8.0 * programs * c.block_m * c.block_n
        split = SPLIT + PART * c.split_k + parts / (bandwidth * PARTS)
    return LAUNCH + max(busy, memory) + split


def _math_us(p: Problem, c: Knobs, target: Target) -> float:
    """One step's matrix instructions on a multiprocessor alone."""
    m, n = c.block_m, c.block_n
    dtype = "bfloat16" if p.scale == "mx" and not target.native_mx else p.dtype
    rate = target.peak(dtype) * 1e6 / target.sms
    if target.backend == "cuda" and m < 64:
        rate = target.peak("bfloat16") * 1e6 * MMA_SYNC / target.sms
    time = 2 * m * n * c.block_k / rate
    if p.scale == "block":  # each sum is scaled: one multiply-add a sum, 128 lanes a clock
        time += m * n / (128 * target.clock_ghz * 1e3)
    if p.scale == "mx" and not target.native_mx:  # widening takes some eight operations an element
        time += 8 * (m + n) * c.block_k / (128 * target.clock_ghz * 1e3)
    return time


def _shared_us(p: Problem, c: Knobs, target: Target) -> float:
    """Operands read from shared memory: W's block once for each 64 rows, X's once."""
    read = (c.block_m + c.block_n * max(1, c.block_m // 64)) * c.block_k * p.bits // 8
    return read / (128 * target.clock_ghz * 1e3)


def _memory_bytes(p: Problem, c: Knobs, target: Target, rows: int, columns: int) -> float:
    """Bytes from and to memory, with the operands that the cache does not hold until they are read again."""
    cache = target.l2_bytes * 0.5
    groups = -(-rows // c.group_m)
    w = p.w_bytes * (groups if p.w_bytes / p.b > cache else 1)
    group_rows = min(rows, c.group_m) * c.block_m * p.k * p.bits / 8
    x = p.x_bytes * (columns if group_rows > cache else 1)
    return x + w + p.out_bytes + p.scale_bytes


def stage_bytes(p: Problem, c: Knobs) -> int:
    """Bytes of X and W that one step along K loads."""
    return (c.block_m + c.block_n) * c.block_k * p.bits // 8


def shared_bytes(p: Problem, c: Knobs, target: Target) -> int:
    """Upper bound of a program's shared memory.

    The pipeline holds `num_stages` steps; ROCm pads its rows (by up to 1/32, seen on gfx950). Where MXFP4 has
    no instruction, wgmma reads W widened to bfloat16. A tile on its way out takes its size, padded where it
    goes as float32, instead of the pipeline, whose loop has ended.
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
    size = 4 if c.split_k > 1 else p.out_size
    tile = c.block_m * c.block_n * size
    if size == 4:
        tile += tile // 8
    return max(pipeline, tile) + BARRIERS


def accumulators(c: Knobs, target: Target) -> int:
    """Registers a lane needs for the tile's sums."""
    return c.block_m * c.block_n // (c.num_warps * target.warp_size)


def occupancy(p: Problem, c: Knobs, target: Target) -> int:
    """Programs of a candidate that a multiprocessor runs at the same time, at least 1.

    A product that is scaled before it is added is a second accumulator.
    """
    lanes = c.num_warps * target.warp_size
    registers = accumulators(c, target) * (2 if p.scale == "block" else 1) + OTHER_REGISTERS
    by_shared = target.shared_sm_bytes // max(1, shared_bytes(p, c, target))
    by_registers = target.registers // max(1, lanes * registers)
    return max(1, min(by_shared, by_registers, 2048 // lanes, 16))


PULL = 0.5  # weight of the median residual against one measured candidate of the same features
KAPPA = 1.0
SPREAD_AT_LEAST = 0.05
PRIOR = 0.5  # weight of a residual that a neighbouring shape measured
GAIN = 0.01  # a smaller improvement does not count


@dataclass(frozen=True, slots=True)
class StopRules:
    """Rule for when a search stops."""

    at_least: int = 24  # candidates measured before it may stop
    patience: int = 16
    at_most: int = 64
    all: bool = False  # exhaustive: stop only when every candidate was tried


class CandidateRanker:
    """The candidates of one shape, by their index. A measured candidate costs one pass over those that are left."""

    def __init__(self, estimates: Sequence[float], features: Sequence[Sequence[float]], rules: StopRules) -> None:
        self._estimates, self._features, self.rules = estimates, features, rules
        self._first: dict[int, int] = {}
        self._last: set[int] = set()
        self._left = set(range(len(estimates)))
        self._residuals: list[float] = []
        self._weight = [0.0] * len(estimates)
        self._sum = [0.0] * len(estimates)
        self._optimistic: dict[int, float] | None = None
        self._order: list[int] | None = None
        self.us: dict[int, float] = {}
        self._best_at = 0
        self.best = math.inf

    def first(self, indexes: Sequence[int]) -> None:
        """Put these before all others, in this order (winners of earlier runs)."""
        self._first = {i: rank for rank, i in enumerate(indexes)}
        self._order = None

    def last(self, i: int) -> None:
        """Put a candidate behind all others; it keeps no search going."""
        if i not in self._first:
            self._last.add(i)
            self._order = None

    def learn(self, other: CandidateRanker) -> None:
        """Take the residuals of a neighbouring shape for a first guess."""
        for j, us in other.us.items():
            self._add(other._features[j], math.log(us / other._estimates[j]), PRIOR)

    def measured(self, i: int, us: float) -> None:
        """A candidate's time."""
        self._left.discard(i)
        self.us[i] = us
        self._add(self._features[i], math.log(us / self._estimates[i]), 1.0)
        if us < self.best * (1 - GAIN):
            self._best_at = len(self.us)
        self.best = min(self.best, us)

    def failed(self, i: int) -> None:
        """A candidate that has no time."""
        self._left.discard(i)
        self._order = None

    def order(self) -> list[int]:
        """Candidates left, the most promising first."""
        if self._order is None:
            times, last = self._times(), len(self._first)
            self._order = sorted(self._left, key=lambda i: (self._first.get(i, last), i in self._last, times[i], i))
        return self._order

    def is_done(self) -> bool:
        """True if all were tried or the most that may be, or if no candidate left can win."""
        if self.rules.all or not self._left:
            return not self._left
        if len(self.us) >= self.rules.at_most:
            return True
        if len(self.us) < max(self.rules.at_least, self._best_at + self.rules.patience):
            return False
        if any(i in self._left for i in self._first):
            return False
        times = self._times()
        return not any(times[i] < self.best * (1 - GAIN) for i in self._left - self._last)

    def _add(self, at: Sequence[float], residual: float, weight: float) -> None:
        self._residuals.append(residual)
        for i in self._left:
            w = weight * _near(self._features[i], at)
            self._weight[i] += w
            self._sum[i] += w * residual
        self._optimistic = self._order = None

    def _times(self) -> dict[int, float]:
        """Optimistic times of the candidates left (and of some that have failed since)."""
        if self._optimistic is None:
            median = statistics.median(self._residuals) if self._residuals else 0.0
            off = statistics.median(abs(r - median) for r in self._residuals) if self._residuals else 0.0
            spread = max(SPREAD_AT_LEAST, 1.4826 * off) if self._residuals else 0.0
            self._optimistic = {
                i: self._estimates[i]
                * math.exp(
                    (self._sum[i] + PULL * median) / (self._weight[i] + PULL)
                    - KAPPA * spread / math.sqrt(1 + self._weight[i])
                )
                for i in self._left
            }
        return self._optimistic


def _near(a: Iterable[float], b: Iterable[float]) -> float:
    return math.exp(-sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / 2)
