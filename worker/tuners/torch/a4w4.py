"""Candidates for a4w4_blockscale: MXFP4 operands (e2m1, two a byte, an e8m0 scale per 32 along K), bfloat16 out.

Few libraries multiply MXFP4 directly, so most candidates dequantise and multiply: they differ in the method (a table
over bytes, over nibbles, bit arithmetic), in the type (bfloat16, float32), and in the amount at a time (all of W,
blocks of rows that stay in the cache, parts of K). Dequantising both operands is within the time. W is the exception
where the name has `predequant`: such a candidate keeps W dequantised, four times the memory (eight in float32) for
speed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.tuners.common.device import Operand, Run
from worker.tuners.common.formats import Unpacker, unpack_bits, unpack_codes
from worker.tuners.common.problem import MX_GROUP, Problem
from worker.tuners.torch.candidate import Variant, Workspace, epilogue, mx_types, op

BLOCKS = (64, 256)
K_PARTS = 4
BF16, F32 = torch.bfloat16, torch.float32


def variants(p: Problem, gpu: bool) -> list[Variant]:
    """The table, the most promising first. Numbers are part of kernelId: never reuse one."""

    def cost(rows: int, k: int, dtype: torch.dtype) -> int:
        return Unpacker.bytes(rows, k, dtype) + Unpacker.bytes(p.m, p.k, dtype) + 4 * p.m * p.n

    def extra(factor: int) -> int:
        return factor * (p.m + p.n) * p.k + 4 * p.m * p.n

    table = [
        Variant(1, "lut256_bf16_wnk", "nk", whole(BF16), every_mode=not gpu, buffer_bytes=cost(p.n, p.k, BF16)),
        Variant(2, "lut256_f32_wnk", "nk", whole(F32), buffer_bytes=cost(p.n, p.k, F32)),
    ]
    table += [
        Variant(10 + i, f"lut256_bf16_wnk_nchunk{rows}", "nk", blocks(rows), every_mode=not gpu and i == 1,
                buffer_bytes=cost(rows, p.k, BF16))
        for i, rows in enumerate(BLOCKS)
        if p.n > rows
    ]  # fmt: skip
    if p.k >= MX_GROUP * K_PARTS:
        part = -(-p.k // K_PARTS) + MX_GROUP
        table.append(Variant(20, f"lut256_bf16_wnk_kchunk{K_PARTS}", "nk", k_parts, split_k=K_PARTS,
                             buffer_bytes=cost(p.n, part, BF16)))  # fmt: skip
    table.append(Variant(30, "predequant_bf16_wnk", "bf16", predequant(BF16), every_mode=True, buffer_bytes=extra(1)))
    if gpu:
        table.append(Variant(40, "bits_bf16_wnk", "nk", bits, buffer_bytes=extra(16)))
    else:
        table.append(Variant(31, "predequant_bf16_wpacked", "packed", predequant_packed, every_mode=True,
                             buffer_bytes=extra(1)))  # fmt: skip
    table += [
        Variant(32, "predequant_f32_wnk", "f32", predequant(F32), buffer_bytes=extra(1)),
        Variant(41, "lut16_bf16_wnk", "nk", nibbles, buffer_bytes=extra(12)),
        Variant(50, "scaled_mm_mxfp4_wnk", "nk", scaled_mm),
    ]
    return table


def unpacker(workspace: Workspace, rows: int, k: int, dtype: torch.dtype) -> Unpacker:
    made = Unpacker(rows, k, dtype, workspace.device)
    workspace.own(made.index, made.values)
    return made


def whole(dtype: torch.dtype) -> Callable[[Workspace], Run]:
    """All of W dequantised by byte, then one product."""

    def make(workspace: Workspace) -> Run:
        p = workspace.problem
        of_x, of_w = unpacker(workspace, p.m, p.k, dtype), unpacker(workspace, p.n, p.k, dtype)
        low = workspace.output(dtype)
        last = epilogue(workspace, low)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            torch.mm(of_x(x[0], x[1]), of_w(w[0], w[1]).t(), out=low)
            return last()

        return run

    return make


def blocks(rows: int) -> Callable[[Workspace], Run]:
    """W a block of rows at a time, so that it is still in the cache when it is multiplied."""

    def make(workspace: Workspace) -> Run:
        p = workspace.problem
        of_x, of_w = unpacker(workspace, p.m, p.k, BF16), unpacker(workspace, rows, p.k, BF16)
        out = workspace.output()

        def run(x: Operand, w: Operand) -> torch.Tensor:
            left = of_x(x[0], x[1])
            for n in range(0, p.n, rows):
                torch.mm(left, of_w(w[0][n : n + rows], w[1][n : n + rows]).t(), out=out[:, n : n + rows])
            return out

        return run

    return make


def k_parts(workspace: Workspace) -> Run:
    """A part of K at a time, added to a float32 output."""
    p = workspace.problem
    groups = p.k // MX_GROUP
    step = -(-groups // K_PARTS)
    ranges = [(g, min(groups, g + step)) for g in range(0, groups, step)]
    of_x, of_w = unpacker(workspace, p.m, step * MX_GROUP, BF16), unpacker(workspace, p.n, step * MX_GROUP, BF16)
    total, product, out = workspace.output(F32), workspace.output(BF16), workspace.output()
    half = MX_GROUP // 2

    def run(x: Operand, w: Operand) -> torch.Tensor:
        total.zero_()
        for a, b in ranges:
            left = of_x(x[0][:, half * a : half * b], x[1][:, a:b])
            right = of_w(w[0][:, half * a : half * b], w[1][:, a:b])
            torch.mm(left, right.t(), out=product)
            total.add_(product)
        return out.copy_(total)

    return run


def nibbles(workspace: Workspace) -> Run:
    """All of W dequantised by nibble."""
    out = workspace.output()

    def run(x: Operand, w: Operand) -> torch.Tensor:
        torch.mm(unpack_codes(x[0], x[1], BF16), unpack_codes(w[0], w[1], BF16).t(), out=out)
        return out

    return run


def bits(workspace: Workspace) -> Run:
    """All of W dequantised by moving bits; no table."""
    out = workspace.output()

    def run(x: Operand, w: Operand) -> torch.Tensor:
        torch.mm(unpack_bits(x[0], x[1]), unpack_bits(w[0], w[1]).t(), out=out)
        return out

    return run


def predequant(dtype: torch.dtype) -> Callable[[Workspace], Run]:
    """W kept dequantised; X is dequantised within the call."""

    def make(workspace: Workspace) -> Run:
        of_x = unpacker(workspace, workspace.problem.m, workspace.problem.k, dtype)
        low = workspace.output(dtype)
        last = epilogue(workspace, low)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            torch.mm(of_x(x[0], x[1]), w[0].t(), out=low)
            return last()

        return run

    return make


def predequant_packed(workspace: Workspace) -> Run:
    """W kept dequantised and in oneDNN's own order. The operator makes its own output."""
    call = op("ops.mkldnn._linear_pointwise")
    of_x = unpacker(workspace, workspace.problem.m, workspace.problem.k, BF16)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        out: torch.Tensor = call(of_x(x[0], x[1]), w[0], None, "none", [], "")
        return out

    return run


def scaled_mm(workspace: Workspace) -> Run:
    """The library's own MXFP4 product: hipBLASLt on gfx950 takes the scales as they are."""
    fp4, e8 = mx_types(gpu=workspace.gpu)
    call = op("_scaled_mm")
    out = workspace.output()

    def run(x: Operand, w: Operand) -> torch.Tensor:
        call(x[0].view(fp4), w[0].view(fp4).t(), scale_a=x[1].view(e8), scale_b=w[1].view(e8), out_dtype=BF16, out=out)
        return out

    return run
