"""The 8-bit products of a8w8.py: integer, fp8, weight-only, and dequantise-then-multiply."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from worker.tuners.common.device import Operand, Run
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.torch.candidate import Bench, op, parts

BLOCK = 256
"""Rows of W dequantised at a time by the `nchunk` candidates: a block fits a core's L2 cache."""
INT_MM_MIN_ROWS = 17
"""torch._int_mm on CUDA takes M > 16 only."""

Scale = Callable[[torch.Tensor, Operand, Operand], torch.Tensor]


def scaling(bench: Bench) -> Scale:
    """From the unscaled product (any type) to the bfloat16 output, with a float32 step between."""
    out = bench.output()
    half = bench.output(torch.float32)

    def scale(acc: torch.Tensor, x: Operand, w: Operand) -> torch.Tensor:
        torch.mul(acc, x[1][:, None], out=half)
        return torch.mul(half, w[1], out=out)

    return scale


def int_mm(kn: bool) -> Callable[[Bench], Run]:
    def make(bench: Bench) -> Run:
        call = _int_mm(bench)
        acc, scale = bench.output(torch.int32), scaling(bench)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            call(x[0], w[0] if kn else w[0].t(), out=acc)
            return scale(acc, x, w)

        return run

    return make


def int_mm_split(count: int) -> Callable[[Bench], Run]:
    """Integer partial products: their sum is exact whatever the order."""

    def make(bench: Bench) -> Run:
        call = _int_mm(bench)
        p = bench.problem
        ranges = parts(p.k, count)
        partial = bench.empty(len(ranges), p.m, p.n, dtype=torch.int32)
        acc, scale = bench.output(torch.int32), scaling(bench)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            for i, (a, b) in enumerate(ranges):
                call(x[0][:, a:b], w[0][a:b], out=partial[i])
            torch.sum(partial, 0, dtype=torch.int32, out=acc)
            return scale(acc, x, w)

        return run

    return make


def int_mm_padded(bench: Bench) -> Run:
    """X padded to 32 rows within the call, for devices whose integer product wants more rows than there are."""
    p = bench.problem
    if p.m >= INT_MM_MIN_ROWS:
        raise UnsupportedError(f"M is {p.m}: nothing to pad")
    call = op("_int_mm")
    padded = bench.empty(32, p.k, dtype=torch.int8)
    acc, scale = bench.empty(32, p.n, dtype=torch.int32), scaling(bench)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        padded.zero_()
        padded[: p.m].copy_(x[0])
        call(padded, w[0].t(), out=acc)
        return scale(acc[: p.m], x, w)

    return run


def weight_int8(bench: Bench) -> Run:
    """torch's weight-only int8 product: bfloat16 X, int8 W, scales of W in bfloat16. Makes its own output."""
    call = op("_weight_int8pack_mm")
    p = bench.problem
    if p.k % 32 or p.n % 16:  # it reads past the end of ragged rows (seen: a segmentation fault with N 7, K 33)
        raise UnsupportedError(f"torch._weight_int8pack_mm is safe for K % 32 = 0 and N % 16 = 0 only, not {p.n}x{p.k}")
    low = bench.empty(bench.problem.m, bench.problem.k, dtype=torch.bfloat16)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        out: torch.Tensor = call(low.copy_(x[0]), w[0], w[1].bfloat16())
        return out.mul_(x[1][:, None])

    return run


def scaled_mm_rows(bench: Bench, fast: bool = False) -> Run:
    """fp8 product with the scales in the library's epilogue."""
    call = op("_scaled_mm")
    out = bench.output()

    def run(x: Operand, w: Operand) -> torch.Tensor:
        call(x[0], w[0].t(), scale_a=x[1][:, None], scale_b=w[1][None, :], out_dtype=torch.bfloat16,
             use_fast_accum=fast, out=out)  # fmt: skip
        return out

    return run


def scaled_mm_rows_fast(bench: Bench) -> Run:
    """The same with the tensor cores' shorter accumulation."""
    return scaled_mm_rows(bench, fast=True)


def scaled_mm_tensor(bench: Bench) -> Run:
    """fp8 product with scale 1, scales applied after it."""
    call = op("_scaled_mm")
    acc, scale = bench.output(torch.bfloat16), scaling(bench)
    one = torch.ones((), device=bench.device)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        call(x[0], w[0].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, out=acc)
        return scale(acc, x, w)

    return run


def deq(dtype: torch.dtype) -> Callable[[Bench], Run]:
    """Both operands to `dtype` by the library's cast, then its product."""

    def make(bench: Bench) -> Run:
        p = bench.problem
        xd, wd = bench.empty(p.m, p.k, dtype=dtype), bench.empty(p.n, p.k, dtype=dtype)
        acc, scale = bench.output(dtype), scaling(bench)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            torch.mm(xd.copy_(x[0]), wd.copy_(w[0]).t(), out=acc)
            return scale(acc, x, w)

        return run

    return make


def deq_blocks(bench: Bench) -> Run:
    """W dequantised a block of rows at a time, so that it is still in the cache when it is multiplied."""
    p = bench.problem
    xd, block = bench.empty(p.m, p.k, dtype=torch.bfloat16), bench.empty(BLOCK, p.k, dtype=torch.bfloat16)
    acc, scale = bench.output(torch.bfloat16), scaling(bench)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        xd.copy_(x[0])
        for n in range(0, p.n, BLOCK):
            rows = w[0][n : n + BLOCK]
            torch.mm(xd, block[: rows.shape[0]].copy_(rows).t(), out=acc[:, n : n + BLOCK])
        return scale(acc, x, w)

    return run


def deq_lut(bench: Bench) -> Run:
    """fp8 to bfloat16 by a table of 256: faster than the cast on CPUs."""
    return _deq_lut(bench, bench.problem.n)


def deq_lut_blocks(bench: Bench) -> Run:
    return _deq_lut(bench, BLOCK)


def predequant(dtype: torch.dtype) -> Callable[[Bench], Run]:
    """W kept dequantised (without its scales)."""

    def make(bench: Bench) -> Run:
        xd = bench.empty(bench.problem.m, bench.problem.k, dtype=dtype)
        acc, scale = bench.output(dtype), scaling(bench)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            torch.mm(xd.copy_(x[0]), w[0].t(), out=acc)
            return scale(acc, x, w)

        return run

    return make


def predequant_packed(bench: Bench) -> Run:
    """W kept dequantised and in oneDNN's own order. The operator makes its own output."""
    call = op("ops.mkldnn._linear_pointwise")
    xd, scale = bench.empty(bench.problem.m, bench.problem.k, dtype=torch.bfloat16), scaling(bench)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        return scale(call(xd.copy_(x[0]), w[0], None, "none", [], ""), x, w)

    return run


@cache
def fp8_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256] the values of the codes of an fp8 format in bfloat16."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.bfloat16).to(device)


def _deq_lut(bench: Bench, rows: int) -> Run:
    p = bench.problem
    table = fp8_table(bench.dtype, bench.device)
    xd = bench.empty(p.m, p.k, dtype=torch.bfloat16)
    index = bench.empty(rows * p.k, dtype=torch.int32)
    block = bench.empty(rows * p.k, dtype=torch.bfloat16)
    acc, scale = bench.output(torch.bfloat16), scaling(bench)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        xd.copy_(x[0])
        codes = w[0].view(torch.uint8)
        for n in range(0, p.n, rows):
            part = codes[n : n + rows]
            at, values = index[: part.numel()], block[: part.numel()]
            at.view(part.shape).copy_(part)
            torch.index_select(table, 0, at, out=values)
            torch.mm(xd, values.view(part.shape).t(), out=acc[:, n : n + rows])
        return scale(acc, x, w)

    return run


def _int_mm(bench: Bench) -> Callable[..., torch.Tensor]:
    if bench.gpu and bench.problem.m < INT_MM_MIN_ROWS:
        raise UnsupportedError(f"torch._int_mm on a GPU takes M from {INT_MM_MIN_ROWS}, M is {bench.problem.m}")
    call: Callable[..., torch.Tensor] = op("_int_mm")
    return call
