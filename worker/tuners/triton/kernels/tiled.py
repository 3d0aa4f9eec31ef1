"""One program a tile, or a part of a tile's K: the kernel for few and middle-sized tiles."""

import triton
import triton.language as tl

from worker.tuners.triton.kernels.parts import load, multiply, scaled, spread, sum_split, tile_of, write


@triton.jit
def tiled(
    x, w, out, bias, xs, ws, partial, count,
    M, N, K, group_m, splits,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr, AT_ONCE: tl.constexpr, SWAP: tl.constexpr,
    EVEN_K: tl.constexpr, DESC: tl.constexpr, XCDS: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """out[B, M, N] = X @ W^T with scales and bias. Grid: (tiles, splits, B).

    `SCALE` "block": X has a scale per row and 128 of K, W per 128 rows and 128 of K; BK is 128 then, BN divides 128.
    `AT_ONCE` parts of split-K are in flight together while they are summed. `INT` sums in int32.
    """
    tiles = tl.num_programs(0)
    program = spread(tl.program_id(0), tiles, XCDS)
    batch = tl.program_id(2)
    tile_m, tile_n = tile_of(program, M, N, group_m, BM, BN)
    blocks = tl.cdiv(K, BK)
    # A way around the loop over K, which the compiler sees unless it is told that there is none, has the assembler
    # run the matrix instructions one after the other (ptxas C7515: a sixth to a third of the speed).
    first, last = 0, tl.maximum(blocks, 1)
    split = tl.program_id(1)
    if SPLIT:
        first = split * blocks // splits
        last = (split + 1) * blocks // splits
        tl.assume(first < last)
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    zeros = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.int32 if INT else tl.float32)
    acc = zeros
    for block in range(first, last):
        a = load(x, batch, tile_m * BM, block * BK, M, K, BM, BK, EVEN_K, DESC)
        b = load(w, batch, tile_n * BN, block * BK, N, K, BN, BK, EVEN_K, DESC)
        if SCALE == "block":
            of_x = tl.load(xs + tl.minimum(rows, M - 1) * blocks + block)
            of_w = tl.load(ws + (tile_n * BN // 128) * blocks + block)
            product = multiply(a, b, zeros, SWAP)
            acc += product * (of_x * of_w)[None, :] if SWAP else product * (of_x * of_w)[:, None]
        else:
            acc = multiply(a, b, acc, SWAP)
    result = acc.to(tl.float32)
    if SWAP:
        result = tl.trans(result)
    if SPLIT:
        done, result = sum_split(result, partial, count, batch * tiles + program, split, splits, BM, BN, AT_ONCE)
        if done:
            result = scaled(result, xs, ws, bias, batch, rows, columns, M, N, SCALE, BIAS)
            write(out, result, batch, rows, columns, M, N)
    else:
        result = scaled(result, xs, ws, bias, batch, rows, columns, M, N, SCALE, BIAS)
        write(out, result, batch, rows, columns, M, N)
