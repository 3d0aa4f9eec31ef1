"""Steps that the kernels share: which tile a program has, loading, the sum over split-K, and writing out."""

import triton
import triton.language as tl


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
