"""How long a candidate takes, estimated; candidates in the order in which they should be tried.

One step along K of one program loads (BM + BN) BK elements and multiplies BM BN BK. A multiprocessor runs `r`
programs at a time and needs for a step of each the longest of

    math     2 BM BN BK r / (peak / sms)           peak by format; half of it below the matrix instruction's rows
    shared   (BM BN/n + BN BM/64) BK bytes r / (128 B per clock)      wgmma reads its operands from shared memory
    load     (BM + BN) BK bytes r / (l2 / sms)
    latency  LATENCY / (stages - 1)                what is in flight hides it

so that a program of S steps takes LATENCY + S * step + END, and the whole the larger of

    waves * program        waves = programs / (sms * r), rounded up
    memory                 (X x rereads + W x rereads + out) / bandwidth

plus LAUNCH; split-K adds writing and reading its parts and one round trip of the counter (SYNC). W is read again for
each group of tile rows, X for each column of tiles, as far as the cache does not hold them.

Sources: rates of shared memory and matrix instructions are the vendors' (docs/triton-kernels.md); the constants were
fitted to measurements on an H200.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worker.tuners.triton.candidate import Candidate
from worker.tuners.triton.problem import Problem
from worker.tuners.triton.resources import occupancy, stage_bytes
from worker.tuners.triton.target import Target

LAUNCH = 2.0
"""us from the start of a graph's node to its first load, and from its last store to the next node."""
LATENCY = 0.9
"""us of a load from memory under load."""
SYNC = 1.5
"""us from a program's last part to the sum: barrier, counter, and the first part read back."""
REACHED = 0.9
"""Share of the stated bandwidth and peak that a good kernel reaches."""
L2_FACTOR = 1.6
"""Bandwidth of the second-level cache over that of memory."""


def estimate_us(p: Problem, c: Candidate, target: Target) -> float:
    """Microseconds of one call, launch included. Wrong by tens of percent; made to compare candidates."""
    rows, columns = -(-p.m // c.block_m), -(-p.n // c.block_n)
    tiles = rows * columns * p.b
    programs = tiles * c.split_k
    blocks = -(-p.k // c.block_k)
    steps = -(-blocks // c.split_k)
    resident = max(1, min(occupancy(p, c, target), -(-programs // target.sms)))
    waves = -(-programs // (target.sms * resident))
    step = max(
        resident * _math_us(p, c, target),
        resident * _shared_us(p, c, target),
        resident * stage_bytes(p, c) / (target.memory_gbs * 1e3 * L2_FACTOR / target.sms),
        LATENCY / max(1, c.num_stages - 1),
    )
    end = c.block_m * c.block_n * p.out_size * resident / (target.memory_gbs * 1e3 / target.sms)
    once = steps * step + (0.0 if c.persistent else LATENCY + end)
    compute = waves * once + (LATENCY + end if c.persistent else 0.0)
    memory = _memory_bytes(p, c, target, rows, columns) / (target.memory_gbs * 1e3 * REACHED)
    return LAUNCH + max(compute, memory) + _split_us(c, target, programs)


def order(
    p: Problem, target: Target, candidates: Iterable[Candidate], first: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Candidates by estimate, those of `first` (winners elsewhere) in front where they are among them."""
    legal = sorted(candidates, key=lambda c: (estimate_us(p, c, target), c.name))
    known = set(legal)
    front = [c for c in dict.fromkeys(first) if c in known]
    return front + [c for c in legal if c not in set(front)]


def _math_us(p: Problem, c: Candidate, target: Target) -> float:
    """One step's matrix instructions on a multiprocessor alone."""
    m, n = (c.block_n, c.block_m) if c.swap else (c.block_m, c.block_n)
    dtype = "bfloat16" if p.scale == "mx" and not target.native_mx else p.dtype
    rate = target.peak(dtype) * 1e6 * REACHED / target.sms
    if target.backend == "cuda" and m < 64:  # below wgmma's rows mma.sync: half the rate, 8 bits widened to 16
        rate = target.peak("int8" if dtype == "int8" else "bfloat16") * 1e6 / 2 / target.sms
    time = 2 * m * n * c.block_k / rate
    if p.scale == "block":  # each sum is scaled: one multiply-add a sum, 128 lanes a clock
        time += m * n / (128 * target.clock_ghz * 1e3)
    if p.scale == "mx" and not target.native_mx:  # widening takes some eight operations an element
        time += 8 * (m + n) * c.block_k / (128 * target.clock_ghz * 1e3)
    return time


def _shared_us(p: Problem, c: Candidate, target: Target) -> float:
    """Operands read from shared memory: W's block once for each 64 rows, X's once."""
    m, n = (c.block_n, c.block_m) if c.swap else (c.block_m, c.block_n)
    read = (m + n * max(1, m // 64)) * c.block_k * p.bits // 8
    return read / (128 * target.clock_ghz * 1e3)


def _memory_bytes(p: Problem, c: Candidate, target: Target, rows: int, columns: int) -> float:
    """Bytes from and to memory, with what the cache cannot keep until it is needed again."""
    cache = target.l2_bytes * 0.5
    groups = -(-rows // c.group_m)
    w = p.w_bytes * (groups if p.w_bytes / p.b > cache else 1)
    group_rows = min(rows, c.group_m) * c.block_m * p.k * p.bits / 8
    x = p.x_bytes * (columns if group_rows > cache else 1)
    return x + w + p.out_bytes + p.scale_bytes


def _split_us(c: Candidate, target: Target, programs: int) -> float:
    if c.split_k == 1:
        return 0.0
    parts = 2.0 * programs * c.block_m * c.block_n * 4
    return SYNC + parts / (target.memory_gbs * 1e3 * L2_FACTOR) + c.split_k // 8 * LATENCY
