"""Stream-K: every program has the same number of steps along K, whatever the number of tiles.

Osama, Merrill, Cecka, Garland, Owens: Stream-K, PPoPP 2023. The last tiles are one row of steps, cut evenly between the
programs; a tile that lies across a cut is summed by the last of its programs. Tiles before them (`whole`, as many for
each program) are a persistent kernel's, so at most two tiles a program travel in parts. No program waits for another.
"""

import triton
import triton.language as tl

from worker.tuners.triton.kernels.parts import finish, load, multiply, tile_of
from worker.tuners.triton.kernels.persistent import walk


@triton.jit
def stream(
    x, w, out, bias, xs, ws, partial, count,
    M, N, K, B, group_m, whole,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, HALVES: tl.constexpr,
    EVEN_K: tl.constexpr, DESC: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """out[B, M, N] = X @ W^T with scales and bias. Grid: (programs, 1, 1), no more programs than streamed steps.

    partial [programs, 2, BM, BN]: the part of a tile that another program began, and of one that it began itself.
    """
    if WHOLE:
        walk(whole, x, w, out, bias, xs, ws, M, N, K, group_m, BM, BN, BK, SCALE, BIAS, HALVES, EVEN_K, DESC, INT)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    blocks = tl.cdiv(K, BK)
    steps = (tiles * B - whole) * blocks
    first = program * steps // programs
    end = (program + 1) * steps // programs
    for tile in range(first // blocks, tl.cdiv(end, blocks)):
        batch = (whole + tile) // tiles
        tile_m, tile_n = tile_of((whole + tile) % tiles, M, N, group_m, BM, BN)
        start = tl.maximum(first - tile * blocks, 0)
        stop = tl.minimum(end - tile * blocks, blocks)
        tl.assume(start < stop)
        acc = tl.zeros((BM, BN), tl.int32 if INT else tl.float32)
        for block in range(start, stop):
            a = load(x, batch, tile_m * BM, block * BK, M, K, BM, BK, EVEN_K, DESC)
            b = load(w, batch, tile_n * BN, block * BK, N, K, BN, BK, EVEN_K, DESC)
            acc = multiply(a, b, acc, False)
        result = acc.to(tl.float32)
        done = stop - start == blocks
        if not done:
            # step s is program ((s + 1) * programs - 1) // steps's
            head = ((tile * blocks + 1) * programs - 1) // steps
            tail = ((tile + 1) * blocks * programs - 1) // steps
            done, result = sum_parts(result, partial, count + tile, program, head, tail, BM, BN)
        if done:
            finish(result, out, bias, xs, ws, batch, tile_m, tile_n, M, N, BM, BN, SCALE, BIAS, HALVES)


@triton.jit
def sum_parts(acc, partial, counter, program, head, tail, BM: tl.constexpr, BN: tl.constexpr):
    """(is this program the last of `head` to `tail`, the sum of their parts).

    Added in order of the programs, so that the bits do not depend on who is last. As a + b is b + a, the first two need
    not write their own part when all others are there already; with two programs a tile that is the usual case, since
    a program begins with what another one begins with last.
    """
    others = tail - head
    next_one = head + 1
    done = (tl.atomic_add(counter, 0, sem="acq_rel", scope="gpu") == others) & (program <= next_one)
    tl.debug_barrier()
    second = head + next_one - program
    if not done:
        tl.store(part(partial, program, head, BM, BN), acc, cache_modifier=".cg")
        tl.debug_barrier()
        done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == others
        tl.debug_barrier()
        second = next_one
        if done:
            acc = tl.load(part(partial, head, head, BM, BN), cache_modifier=".cg")
    if done:
        acc += tl.load(part(partial, second, head, BM, BN), cache_modifier=".cg")
        for other in range(head + 2, tail + 1):
            acc += tl.load(part(partial, other, head, BM, BN), cache_modifier=".cg")
        tl.store(counter, 0)
    return done, acc


@triton.jit
def part(partial, program, head, BM: tl.constexpr, BN: tl.constexpr):
    """Where a program leaves its part of the tile that `head` began."""
    slot = 2 * program + tl.where(program == head, 1, 0)
    inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    return partial + slot.to(tl.int64) * (BM * BN) + inside
