"""Triton kernels: `tiled` (a program a tile, split-K), `persistent` (a program a multiprocessor), `mx` (operands with
e8m0 scales), all from the same steps. Imports triton.

Kernels are found by name, so that a launch plan is plain data and can go to another process.
"""

import triton
import triton.language as tl

# --- steps that the kernels share: which tile a program has, loading, the sum over split-K, and writing out ----------


@triton.jit
def spread(program, programs, XCDS: tl.constexpr):
    """Give neighbouring tiles to one die's cache: programs go to the dies in turn (gfx942, gfx950)."""
    if XCDS > 1:
        per = programs // XCDS
        even = per * XCDS
        program = tl.where(program < even, (program % XCDS) * per + program // XCDS, program)
    return program


@triton.jit
def tile_of(tile, M, N, group_m, BM: tl.constexpr, BN: tl.constexpr):
    """(row, column) of a tile. `group_m` rows of tiles are walked column by column, so that W's blocks are reused."""
    tiles_m = tl.cdiv(M, BM)
    width = group_m * tl.cdiv(N, BN)
    first = (tile // width) * group_m
    rows = tl.minimum(tiles_m - first, group_m)
    inside = tile % width
    return first + inside % rows, inside // rows


@triton.jit
def load(source, batch, first, k, ROWS, K, R: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr, DESC: tl.constexpr):
    """[R, BK] of an operand stored as rows of K. Rows beyond the end hold others' numbers, K beyond the end zeros."""
    if DESC:
        block = source.load([batch * ROWS + first, k])
    else:
        rows = tl.minimum(first + tl.arange(0, R), ROWS - 1)
        columns = tl.arange(0, BK)
        at = source + (batch.to(tl.int64) * ROWS + rows)[:, None] * K + (k + columns)[None, :]
        if EVEN_K:
            block = tl.load(at)
        else:
            block = tl.load(at, mask=(k + columns)[None, :] < K, other=0.0)
    return block


@triton.jit
def multiply(x, w, acc, SWAP: tl.constexpr):
    """acc + x @ w^T; swapped, acc^T + w @ x^T. Integers are summed as integers."""
    if SWAP:
        acc = tl.dot(w, tl.trans(x), acc, out_dtype=acc.dtype)
    else:
        acc = tl.dot(x, tl.trans(w), acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def leave(part, acc, BM: tl.constexpr, BN: tl.constexpr):
    """Write a program's part of a tile's sum."""
    inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(part + inside, acc, cache_modifier=".cg")


@triton.jit
def is_last(count, splits):
    """Count this program, which has left its part; whether it is the tile's last, by whom all parts are there.

    The release and acquire of the counter, with barriers around it, order the parts before the sum. The last one sets
    it back to zero for the next call.
    """
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == splits - 1
    tl.debug_barrier()
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def sum_parts(parts, splits, step, BM: tl.constexpr, BN: tl.constexpr, AT_ONCE: tl.constexpr):
    """All programs' parts, `step` elements apart, added in order of `split`: the result does not depend on the last."""
    inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, splits, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = inside < (splits - start - i) * (BM * BN)
            acc += tl.load(parts + (start + i) * step + inside, mask=there, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def finish(
    acc, out, xs, ws, bias, batch, row, column, M, N,
    BM: tl.constexpr, BN: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Scale a tile's sum in float32, add the bias, and write it from `row` and `column` on in the output's format.

    `SCALE` is "row", "tensor" or another word for none left. What lies beyond the edges is left out. `STORE` writes
    through a tensor descriptor, which needs a batch of one.
    """
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    if SCALE == "row":
        x = tl.load(xs + batch * M + rows, mask=rows < M, other=0.0)
        w = tl.load(ws + batch * N + columns, mask=columns < N, other=0.0)
        acc = acc * x[:, None] * w[None, :]
    elif SCALE == "tensor":
        acc = acc * (tl.load(xs) * tl.load(ws))
    if BIAS:
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if STORE:
        out.store([row, column], acc.to(out.dtype))
    else:
        at = out + (batch.to(tl.int64) * M + rows)[:, None] * N + columns[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def tiled(
    x, w, w_side, out, out_side, bias, xs, ws, partial, count,
    M, N, K, group_m, splits,
    BM: tl.constexpr, BN: tl.constexpr, SIDE: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr, AT_ONCE: tl.constexpr, SWAP: tl.constexpr,
    EVEN_K: tl.constexpr, DESC: tl.constexpr, STORE: tl.constexpr, XCDS: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """out[B, M, N] = X @ W^T with scales and bias, for few and medium-sized tiles. Grid: (tiles, splits, B).

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
    # A way around the loop over K, which the compiler sees unless `assume` rules it out, has the assembler
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


@triton.jit
def persistent(
    x, w, out, bias, xs, ws,
    M, N, K, B, group_m,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, HALVES: tl.constexpr,
    EVEN_K: tl.constexpr, DESC: tl.constexpr, STORE: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """out[B, M, N] = X @ W^T with scales and bias. Grid: (programs, 1, 1).

    A program goes on to further tiles: loads of the next one run under the last one's end.
    `HALVES` writes the two halves of a tile's columns one after the other, which halves the shared memory it takes.
    """
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    blocks = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), tiles * B, tl.num_programs(0), flatten=DESC):
        batch = tile // tiles
        tile_m, tile_n = tile_of(tile % tiles, M, N, group_m, BM, BN)
        row, column = tile_m * BM, tile_n * BN
        acc = tl.zeros((BM, BN), tl.int32 if INT else tl.float32)
        for block in range(blocks):
            a = load(x, batch, row, block * BK, M, K, BM, BK, EVEN_K, DESC)
            b = load(w, batch, column, block * BK, N, K, BN, BK, EVEN_K, DESC)
            acc = multiply(a, b, acc, False)
        result = acc.to(tl.float32)
        if HALVES:
            HALF: tl.constexpr = BN // 2
            left, right = tl.split(tl.permute(tl.reshape(result, (BM, 2, HALF)), (0, 2, 1)))
            finish(left, out, xs, ws, bias, batch, row, column, M, N, BM, HALF, SCALE, BIAS, STORE)
            finish(right, out, xs, ws, bias, batch, row, column + HALF, M, N, BM, HALF, SCALE, BIAS, STORE)
        else:
            finish(result, out, xs, ws, bias, batch, row, column, M, N, BM, BN, SCALE, BIAS, STORE)


@triton.jit
def mx(
    x, w, out, xs, ws, partial, count,
    M, N, K, group_m, splits,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, AT_ONCE: tl.constexpr, EVEN_K: tl.constexpr, XCDS: tl.constexpr,
):  # fmt: skip
    """out[M, N] = X @ W^T. X and W hold two e2m1 a byte, the even K in the low half; K counts elements.

    xs [M, K/32] and ws [N, K/32] hold e8m0 bytes. One instruction where the device has it, else bfloat16.
    Grid: (tiles, splits, 1).
    """
    batch = tl.program_id(2)
    program = spread(tl.program_id(0), tl.num_programs(0), XCDS)
    tile_m, tile_n = tile_of(program, M, N, group_m, BM, BN)
    blocks = tl.cdiv(K, BK)
    # A way around the loop over K, which the compiler sees unless `assume` rules it out, has the assembler
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


KERNELS = {"tiled": tiled, "persistent": persistent, "mx": mx}
