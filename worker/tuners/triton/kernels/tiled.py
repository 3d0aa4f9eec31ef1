"""One program a tile, or a part of a tile's K: the kernel for few and medium-sized tiles."""

import triton
import triton.language as tl

from worker.tuners.triton.kernels.parts import finish, is_last, leave, load, multiply, spread, sum_parts, tile_of


@triton.jit
def tiled(
    x, w, w_side, out, out_side, bias, xs, ws, partial, count,
    M, N, K, group_m, splits,
    BM: tl.constexpr, BN: tl.constexpr, SIDE: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr, AT_ONCE: tl.constexpr, SWAP: tl.constexpr,
    EVEN_K: tl.constexpr, DESC: tl.constexpr, STORE: tl.constexpr, XCDS: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """out[B, M, N] = X @ W^T with scales and bias. Grid: (tiles, splits, B).

    A tile has BN columns and `SIDE` more beside them, with sums of their own: so it can be 160 columns wide.
    `SCALE` "block": X has a scale per row and 128 of K, W per 128 rows and 128 of K; BK is 128 then, BN divides 128.
    `AT_ONCE` parts of split-K are in flight together while they are summed. `INT` sums in int32.
    """
    WIDE: tl.constexpr = BN + SIDE
    tiles = tl.num_programs(0)
    program = spread(tl.program_id(0), tiles, XCDS)
    batch = tl.program_id(2)
    tile_m, tile_n = tile_of(program, M, N, group_m, BM, WIDE)
    row, column = tile_m * BM, tile_n * WIDE
    blocks = tl.cdiv(K, BK)
    # A way around the loop over K, which the compiler sees unless it is told that there is none, has the assembler
    # run the matrix instructions one after the other (ptxas C7515: a sixth to a third of the speed).
    first, last = 0, tl.maximum(blocks, 1)
    split = tl.program_id(1)
    if SPLIT:
        first = split * blocks // splits
        last = (split + 1) * blocks // splits
        tl.assume(first < last)
    zeros = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.int32 if INT else tl.float32)
    acc = zeros
    beside = tl.zeros((BM, SIDE if SIDE else 16), zeros.dtype)
    for block in range(first, last):
        a = load(x, batch, row, block * BK, M, K, BM, BK, EVEN_K, DESC)
        b = load(w, batch, column, block * BK, N, K, BN, BK, EVEN_K, DESC)
        if SCALE == "block":
            of_x = tl.load(xs + tl.minimum(row + tl.arange(0, BM), M - 1) * blocks + block)
            of_w = tl.load(ws + (column // 128) * blocks + block)
            product = multiply(a, b, zeros, SWAP)
            acc += product * (of_x * of_w)[None, :] if SWAP else product * (of_x * of_w)[:, None]
        else:
            acc = multiply(a, b, acc, SWAP)
        if SIDE:
            c = load(w_side, batch, column + BN, block * BK, N, K, SIDE, BK, EVEN_K, DESC)
            beside = multiply(a, c, beside, SWAP)
    result = acc.to(tl.float32)
    if SWAP:
        result = tl.trans(result)
    rest = beside.to(tl.float32)
    if SPLIT:
        unit = batch * tiles + program
        parts = partial + unit.to(tl.int64) * splits * (BM * WIDE)
        leave(parts + split * (BM * WIDE), result, BM, BN)
        if SIDE:
            leave(parts + split * (BM * WIDE) + BM * BN, rest, BM, SIDE)
        if is_last(count + unit, splits):
            result = sum_parts(parts, splits, BM * WIDE, BM, BN, AT_ONCE)
            finish(result, out, xs, ws, bias, batch, row, column, M, N, BM, BN, SCALE, BIAS, STORE)
            if SIDE:
                rest = sum_parts(parts + BM * BN, splits, BM * WIDE, BM, SIDE, AT_ONCE)
                finish(rest, out_side, xs, ws, bias, batch, row, column + BN, M, N, BM, SIDE, SCALE, BIAS, STORE)
    else:
        finish(result, out, xs, ws, bias, batch, row, column, M, N, BM, BN, SCALE, BIAS, STORE)
        if SIDE:
            finish(rest, out_side, xs, ws, bias, batch, row, column + BN, M, N, BM, SIDE, SCALE, BIAS, STORE)
