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
    EVEN_K: tl.constexpr, DESC: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """out[B, M, N] = X @ W^T with scales and bias. Grid: (programs, 1, 1)."""
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN) * B
    walk(tiles, x, w, out, bias, xs, ws, M, N, K, group_m, BM, BN, BK, SCALE, BIAS, HALVES, EVEN_K, DESC, INT)


@triton.jit
def walk(
    end, x, w, out, bias, xs, ws,
    M, N, K, group_m,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, HALVES: tl.constexpr,
    EVEN_K: tl.constexpr, DESC: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """The tiles below `end`, over all programs in turn."""
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    blocks = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), end, tl.num_programs(0), flatten=DESC):
        batch = tile // tiles
        tile_m, tile_n = tile_of(tile % tiles, M, N, group_m, BM, BN)
        acc = tl.zeros((BM, BN), tl.int32 if INT else tl.float32)
        for block in range(blocks):
            a = load(x, batch, tile_m * BM, block * BK, M, K, BM, BK, EVEN_K, DESC)
            b = load(w, batch, tile_n * BN, block * BK, N, K, BN, BK, EVEN_K, DESC)
            acc = multiply(a, b, acc, False)
        finish(acc.to(tl.float32), out, bias, xs, ws, batch, tile_m, tile_n, M, N, BM, BN, SCALE, BIAS, HALVES)
