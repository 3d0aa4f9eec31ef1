"""Operands with a scale per 32 elements of K (MXFP4): one instruction where the device has it, else bfloat16."""

import triton
import triton.language as tl

from worker.tuners.triton.kernels.parts import finish, is_last, leave, spread, sum_parts, tile_of


@triton.jit
def mx(
    x, w, out, xs, ws, partial, count,
    M, N, K, group_m, splits,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, AT_ONCE: tl.constexpr, EVEN_K: tl.constexpr, XCDS: tl.constexpr,
):  # fmt: skip
    """out[M, N] = X @ W^T. X and W hold two e2m1 a byte, the even K in the low half; K counts elements.

    xs [M, K/32] and ws [N, K/32] hold e8m0 bytes. Grid: (tiles, splits, 1).
    """
    batch = tl.program_id(2)
    program = spread(tl.program_id(0), tl.num_programs(0), XCDS)
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
    row, column = tile_m * BM, tile_n * BN
    at_m = tl.minimum(row + tl.arange(0, BM), M - 1).to(tl.int64)
    at_n = tl.minimum(column + tl.arange(0, BN), N - 1).to(tl.int64)
    pairs = tl.arange(0, BK // 2)
    groups = tl.arange(0, BK // 32)
    acc = tl.zeros((BM, BN), tl.float32)
    for block in range(first, last):
        pair = block * (BK // 2) + pairs
        group = block * (BK // 32) + groups
        if EVEN_K:
            a = tl.load(x + at_m[:, None] * (K // 2) + pair[None, :])
            b = tl.load(w + at_n[:, None] * (K // 2) + pair[None, :])
            of_a = tl.load(xs + at_m[:, None] * (K // 32) + group[None, :])
            of_b = tl.load(ws + at_n[:, None] * (K // 32) + group[None, :])
        else:
            a = tl.load(x + at_m[:, None] * (K // 2) + pair[None, :], mask=pair[None, :] < K // 2, other=0)
            b = tl.load(w + at_n[:, None] * (K // 2) + pair[None, :], mask=pair[None, :] < K // 2, other=0)
            of_a = tl.load(xs + at_m[:, None] * (K // 32) + group[None, :], mask=group[None, :] < K // 32, other=127)
            of_b = tl.load(ws + at_n[:, None] * (K // 32) + group[None, :], mask=group[None, :] < K // 32, other=127)
        acc = tl.dot_scaled(a, of_a, "e2m1", tl.trans(b), of_b, "e2m1", acc)
    if SPLIT:
        parts = partial + program.to(tl.int64) * splits * (BM * BN)
        leave(parts + split * (BM * BN), acc, BM, BN)
        if is_last(count + program, splits):
            acc = sum_parts(parts, splits, BM * BN, BM, BN, AT_ONCE)
            finish(acc, out, xs, ws, None, batch, row, column, M, N, BM, BN, "mx", False, False)
    else:
        finish(acc, out, xs, ws, None, batch, row, column, M, N, BM, BN, "mx", False, False)
