"""One program a multiprocessor, which goes on to further tiles: loads of the next tile run under the last one's end."""

import triton
import triton.language as tl

from worker.tuners.triton.kernels.parts import load, multiply, scaled, tile_of, write


@triton.jit
def persistent(
    x, w, out, bias, xs, ws,
    M, N, K, B, group_m,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, HALVES: tl.constexpr,
    EVEN_K: tl.constexpr, DESC: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """out[B, M, N] = X @ W^T with scales and bias. Grid: (programs, 1, 1).

    `HALVES` writes the two halves of a tile's columns one after the other, which halves the shared memory it takes.
    """
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    blocks = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), tiles * B, tl.num_programs(0), flatten=DESC):
        batch = tile // tiles
        tile_m, tile_n = tile_of(tile % tiles, M, N, group_m, BM, BN)
        acc = tl.zeros((BM, BN), tl.int32 if INT else tl.float32)
        for block in range(blocks):
            a = load(x, batch, tile_m * BM, block * BK, M, K, BM, BK, EVEN_K, DESC)
            b = load(w, batch, tile_n * BN, block * BK, N, K, BN, BK, EVEN_K, DESC)
            acc = multiply(a, b, acc, False)
        rows = tile_m * BM + tl.arange(0, BM)
        result = acc.to(tl.float32)
        if HALVES:
            HALF: tl.constexpr = BN // 2
            left, right = tl.split(tl.permute(tl.reshape(result, (BM, 2, HALF)), (0, 2, 1)))
            columns = tile_n * BN + tl.arange(0, HALF)
            left = scaled(left, xs, ws, bias, batch, rows, columns, M, N, SCALE, BIAS)
            write(out, left, batch, rows, columns, M, N)
            right = scaled(right, xs, ws, bias, batch, rows, columns + HALF, M, N, SCALE, BIAS)
            write(out, right, batch, rows, columns + HALF, M, N)
        else:
            columns = tile_n * BN + tl.arange(0, BN)
            result = scaled(result, xs, ws, bias, batch, rows, columns, M, N, SCALE, BIAS)
            write(out, result, batch, rows, columns, M, N)
