"""Candidates for a8w8: int8 or fp8 operands, a float32 scale per row of X and per row of W, bfloat16 out.

out[m, n] = (sum over k of X[m, k] * W[n, k]) * xs[m] * ws[n]. int8 and both fp8 formats are exact in bfloat16, so the
dequantising candidates lose nothing before the product. Scaling is always within the time. Dequantising W is too,
unless the name has `predequant`: such a candidate keeps W dequantised, more memory for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from worker.tuners.common.device import Operand, Run
from worker.tuners.common.problem import Problem, UnsupportedError
from worker.tuners.torch.candidate import Variant, Workspace, op, parts

BLOCK = 256
"""Rows of W dequantised at a time by the `nchunk` candidates: a block fits a core's L2 cache."""
INT_MM_MIN_ROWS = 17
"""torch._int_mm on CUDA takes M > 16 only."""

Scale = Callable[[torch.Tensor, Operand, Operand], torch.Tensor]


def variants(p: Problem, gpu: bool) -> list[Variant]:
    """The table, the most promising first. Numbers are part of kernelId: never reuse one."""
    int8 = p.dtype == "int8"
    acc = 8 * p.m * p.n
    nk, mk = p.n * p.k, p.m * p.k
    table: list[Variant] = []
    if int8:
        table += [
            Variant(1, "int_mm_wnk", "nk", int_mm(kn=False), every_mode=True, buffer_bytes=acc),
            Variant(2, "int_mm_wkn", "kn", int_mm(kn=True), every_mode=True, buffer_bytes=acc),
        ]
        table += [
            Variant(10 + s, f"int_mm_wkn_splitk{s}", "kn", int_mm_split(s), split_k=s, buffer_bytes=acc * (s + 1))
            for s in (2, 4)
            if p.k >= 64 * s
        ]
        if gpu:
            table.append(Variant(3, "int_mm_wnk_pad32", "nk", int_mm_padded, buffer_bytes=acc + 32 * (p.k + 4 * p.n)))
        else:
            table.append(Variant(4, "weight_int8pack_wnk", "nk", weight_int8, every_mode=True, buffer_bytes=2 * mk))
    else:
        table.append(Variant(20, "scaled_mm_rowwise_wnk", "nk", scaled_mm_rows))
        if gpu:
            table.append(Variant(21, "scaled_mm_rowwise_fastacc_wnk", "nk", scaled_mm_rows_fast))
            table.append(Variant(22, "scaled_mm_tensor_wnk", "nk", scaled_mm_tensor, every_mode=True, buffer_bytes=acc))
        table.append(Variant(36, "deq_lut_bf16_wnk_nchunk", "nk", deq_lut_blocks, every_mode=not gpu,
                             buffer_bytes=2 * mk + 6 * BLOCK * p.k + acc))  # fmt: skip
        table.append(Variant(37, "deq_lut_bf16_wnk", "nk", deq_lut, buffer_bytes=2 * mk + 6 * nk + acc))
    table += [
        Variant(30, "predequant_bf16_wnk", "bf16", predequant(torch.bfloat16), every_mode=True,
                buffer_bytes=2 * mk + acc),
        Variant(31, "deq_bf16_wnk", "nk", deq(torch.bfloat16), buffer_bytes=2 * (mk + nk) + acc),
        Variant(32, "deq_bf16_wnk_nchunk", "nk", deq_blocks, every_mode=int8 and not gpu,
                buffer_bytes=2 * (mk + BLOCK * p.k) + acc),
        Variant(33, "deq_f32_wnk", "nk", deq(torch.float32), buffer_bytes=4 * (mk + nk) + acc),
        Variant(34, "predequant_f32_wnk", "f32", predequant(torch.float32), buffer_bytes=4 * mk + acc),
    ]  # fmt: skip
    if not gpu:
        table.append(
            Variant(35, "predequant_bf16_wpacked", "packed", predequant_packed, every_mode=True, buffer_bytes=2 * mk)
        )
    return table


def scaling(workspace: Workspace) -> Scale:
    """Convert the unscaled product (any type) to the bfloat16 output, with a float32 step between."""
    out = workspace.output()
    half = workspace.output(torch.float32)

    def scale(acc: torch.Tensor, x: Operand, w: Operand) -> torch.Tensor:
        torch.mul(acc, x[1][:, None], out=half)
        return torch.mul(half, w[1], out=out)

    return scale


def int_mm(kn: bool) -> Callable[[Workspace], Run]:
    def make(workspace: Workspace) -> Run:
        call = _int_mm(workspace)
        acc, scale = workspace.output(torch.int32), scaling(workspace)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            call(x[0], w[0] if kn else w[0].t(), out=acc)
            return scale(acc, x, w)

        return run

    return make


def int_mm_split(count: int) -> Callable[[Workspace], Run]:
    """Integer partial products: their sum is exact whatever the order."""

    def make(workspace: Workspace) -> Run:
        call = _int_mm(workspace)
        p = workspace.problem
        ranges = parts(p.k, count)
        partial = workspace.empty(len(ranges), p.m, p.n, dtype=torch.int32)
        acc, scale = workspace.output(torch.int32), scaling(workspace)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            for i, (a, b) in enumerate(ranges):
                call(x[0][:, a:b], w[0][a:b], out=partial[i])
            torch.sum(partial, 0, dtype=torch.int32, out=acc)
            return scale(acc, x, w)

        return run

    return make


def int_mm_padded(workspace: Workspace) -> Run:
    """X padded to 32 rows within the call, for devices whose integer product wants more rows than there are."""
    p = workspace.problem
    if p.m >= INT_MM_MIN_ROWS:
        raise UnsupportedError(f"M is {p.m}: nothing to pad")
    call = op("_int_mm")
    padded = workspace.empty(32, p.k, dtype=torch.int8)
    acc, scale = workspace.empty(32, p.n, dtype=torch.int32), scaling(workspace)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        padded.zero_()
        padded[: p.m].copy_(x[0])
        call(padded, w[0].t(), out=acc)
        return scale(acc[: p.m], x, w)

    return run


def weight_int8(workspace: Workspace) -> Run:
    """torch's weight-only int8 product: bfloat16 X, int8 W, scales of W in bfloat16. Makes its own output."""
    call = op("_weight_int8pack_mm")
    p = workspace.problem
    if p.k % 32 or p.n % 16:  # it reads past the end of ragged rows (seen: a segmentation fault with N 7, K 33)
        raise UnsupportedError(f"torch._weight_int8pack_mm is safe for K % 32 = 0 and N % 16 = 0 only, not {p.n}x{p.k}")
    low = workspace.empty(workspace.problem.m, workspace.problem.k, dtype=torch.bfloat16)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        out: torch.Tensor = call(low.copy_(x[0]), w[0], w[1].bfloat16())
        return out.mul_(x[1][:, None])

    return run


def scaled_mm_rows(workspace: Workspace, fast: bool = False) -> Run:
    """fp8 product with the scales in the library's epilogue."""
    call = op("_scaled_mm")
    out = workspace.output()

    def run(x: Operand, w: Operand) -> torch.Tensor:
        call(x[0], w[0].t(), scale_a=x[1][:, None], scale_b=w[1][None, :], out_dtype=torch.bfloat16,
             use_fast_accum=fast, out=out)  # fmt: skip
        return out

    return run


def scaled_mm_rows_fast(workspace: Workspace) -> Run:
    """The same with the tensor cores' shorter accumulation."""
    return scaled_mm_rows(workspace, fast=True)


def scaled_mm_tensor(workspace: Workspace) -> Run:
    """fp8 product with scale 1, scales applied after it."""
    call = op("_scaled_mm")
    acc, scale = workspace.output(torch.bfloat16), scaling(workspace)
    one = torch.ones((), device=workspace.device)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        call(x[0], w[0].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, out=acc)
        return scale(acc, x, w)

    return run


def deq(dtype: torch.dtype) -> Callable[[Workspace], Run]:
    """Both operands to `dtype` by the library's cast, then its product."""

    def make(workspace: Workspace) -> Run:
        p = workspace.problem
        xd, wd = workspace.empty(p.m, p.k, dtype=dtype), workspace.empty(p.n, p.k, dtype=dtype)
        acc, scale = workspace.output(dtype), scaling(workspace)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            torch.mm(xd.copy_(x[0]), wd.copy_(w[0]).t(), out=acc)
            return scale(acc, x, w)

        return run

    return make


def deq_blocks(workspace: Workspace) -> Run:
    """W dequantised a block of rows at a time, so that it is still in the cache when it is multiplied."""
    p = workspace.problem
    xd, block = workspace.empty(p.m, p.k, dtype=torch.bfloat16), workspace.empty(BLOCK, p.k, dtype=torch.bfloat16)
    acc, scale = workspace.output(torch.bfloat16), scaling(workspace)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        xd.copy_(x[0])
        for n in range(0, p.n, BLOCK):
            rows = w[0][n : n + BLOCK]
            torch.mm(xd, block[: rows.shape[0]].copy_(rows).t(), out=acc[:, n : n + BLOCK])
        return scale(acc, x, w)

    return run


def deq_lut(workspace: Workspace) -> Run:
    """fp8 to bfloat16 by a table of 256: faster than the cast on CPUs."""
    return _deq_lut(workspace, workspace.problem.n)


def deq_lut_blocks(workspace: Workspace) -> Run:
    return _deq_lut(workspace, BLOCK)


def predequant(dtype: torch.dtype) -> Callable[[Workspace], Run]:
    """W kept dequantised (without its scales)."""

    def make(workspace: Workspace) -> Run:
        xd = workspace.empty(workspace.problem.m, workspace.problem.k, dtype=dtype)
        acc, scale = workspace.output(dtype), scaling(workspace)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            torch.mm(xd.copy_(x[0]), w[0].t(), out=acc)
            return scale(acc, x, w)

        return run

    return make


def predequant_packed(workspace: Workspace) -> Run:
    """W kept dequantised and in oneDNN's own order. The operator makes its own output."""
    call = op("ops.mkldnn._linear_pointwise")
    xd, scale = workspace.empty(workspace.problem.m, workspace.problem.k, dtype=torch.bfloat16), scaling(workspace)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        return scale(call(xd.copy_(x[0]), w[0], None, "none", [], ""), x, w)

    return run


@cache
def fp8_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256] the values of the codes of an fp8 format in bfloat16."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.bfloat16).to(device)


def _deq_lut(workspace: Workspace, rows: int) -> Run:
    p = workspace.problem
    table = fp8_table(workspace.dtype, workspace.device)
    xd = workspace.empty(p.m, p.k, dtype=torch.bfloat16)
    index = workspace.empty(rows * p.k, dtype=torch.int32)
    block = workspace.empty(rows * p.k, dtype=torch.bfloat16)
    acc, scale = workspace.output(torch.bfloat16), scaling(workspace)

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


def _int_mm(workspace: Workspace) -> Callable[..., torch.Tensor]:
    if workspace.gpu and workspace.problem.m < INT_MM_MIN_ROWS:
        raise UnsupportedError(f"torch._int_mm on a GPU takes M from {INT_MM_MIN_ROWS}, M is {workspace.problem.m}")
    call: Callable[..., torch.Tensor] = op("_int_mm")
    return call
