"""One program a multiprocessor, which goes on to further tiles: loads of the next tile run under the last one's end."""

import triton
import triton.language as tl

from worker.tuners.triton.kernels.parts import finish, load, multiply, tile_of


@triton.jit
def persistent(
    x, w, out, bias, xs, ws,
    M, N, K, B, group_m,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, HALVES: tl.constexpr,
    EVEN_K: tl.constexpr, DESC: tl.constexpr, STORE: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """out[B, M, N] = X @ W^T with scales and bias. Grid: (programs, 1, 1).

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
