"""Candidates for a16w16: 16- or 32-bit floats in, float32 accumulation in the library, `outdtype` out.

Layouts of W: `nk` as stored (N rows of K, used as a transposed view), `kn` transposed ahead, `f32` kept as float32,
`packed` in oneDNN's own blocked order. Preparing W ahead is not in the time; all else is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.tuners.common.device import Operand, Run
from worker.tuners.common.problem import Problem
from worker.tuners.torch.candidate import Variant, Workspace, epilogue, op, parts

SPLITS = (2, 4, 8)


def variants(p: Problem, gpu: bool) -> list[Variant]:
    """The table, the most promising first. Numbers are part of kernelId: never reuse one."""
    size = 4 if p.dtype == "float32" else 2
    low = p.dtype != "float32"
    partial = size * p.m * p.n
    table = [
        Variant(1, "linear_wnk", "nk", linear, every_mode=True),
        Variant(2, "mm_wnk", "nk", mm_nk, every_mode=gpu),
        Variant(3, "mm_wkn", "kn", mm_kn, every_mode=True),
    ]
    if not gpu:
        table.insert(1, Variant(4, "linear_wpacked", "packed", packed, every_mode=True))
        if p.m == 1:
            table.append(Variant(5, "mv_wnk", "nk", mv))
    if p.bias:
        table.append(Variant(6, "addmm_wkn", "kn", addmm_kn))
    deep = [s for s in SPLITS if p.k >= 64 * s]
    table += [
        Variant(10 + s, f"addmm_wnk_chain{s}", "nk", chain(s), every_mode=s == 2 and not gpu, split_k=s)
        for s in deep[:2]
    ]
    table += [
        Variant(20 + s, f"mm_wnk_splitk{s}", "nk", split_mm(s), split_k=s, buffer_bytes=s * partial) for s in deep
    ]
    table += [
        Variant(30 + s, f"bmm_wkn_splitk{s}", "kn", split_bmm(s, kn=True), split_k=s, buffer_bytes=s * partial)
        for s in (deep if gpu else deep[1:2])
        if p.k % s == 0
    ]
    if gpu:
        table += [
            Variant(40 + s, f"bmm_wnk_splitk{s}", "nk", split_bmm(s, kn=False), split_k=s, buffer_bytes=s * partial)
            for s in deep
            if p.k % s == 0
        ]
    if low:
        cast = 4 * (p.m * p.k + p.m * p.n)
        table.append(Variant(50, "mm_wnk_f32stored", "f32", stored_f32, buffer_bytes=cast))
        table.append(Variant(51, "mm_wnk_f32upcast", "nk", upcast_f32, buffer_bytes=cast + 4 * p.n * p.k))
    if gpu and p.outdtype == "float32" and low:
        table.append(Variant(52, "mm_wnk_outf32", "nk", mm_out_f32))
    return table


def linear(workspace: Workspace) -> Run:
    low = workspace.output(workspace.dtype)
    last = epilogue(workspace, low, bias=False)
    bias, call = workspace.bias, op("_C._nn.linear")

    def run(x: Operand, w: Operand) -> torch.Tensor:
        call(x[0], w[0], bias, out=low)
        return last()

    return run


def mm_nk(workspace: Workspace) -> Run:
    low = workspace.output(workspace.dtype)
    last = epilogue(workspace, low)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        torch.mm(x[0], w[0].t(), out=low)
        return last()

    return run


def mm_kn(workspace: Workspace) -> Run:
    low = workspace.output(workspace.dtype)
    last = epilogue(workspace, low)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        torch.mm(x[0], w[0], out=low)
        return last()

    return run


def addmm_kn(workspace: Workspace) -> Run:
    low = workspace.output(workspace.dtype)
    last = epilogue(workspace, low, bias=False)
    bias = workspace.bias
    assert bias is not None

    def run(x: Operand, w: Operand) -> torch.Tensor:
        torch.addmm(bias, x[0], w[0], out=low)
        return last()

    return run


def mv(workspace: Workspace) -> Run:
    """M = 1 as a matrix times a vector."""
    low = workspace.output(workspace.dtype)
    last = epilogue(workspace, low)
    row = low[0]

    def run(x: Operand, w: Operand) -> torch.Tensor:
        torch.mv(w[0], x[0][0], out=row)
        return last()

    return run


def packed(workspace: Workspace) -> Run:
    """W in the blocked order that oneDNN would otherwise make on each call. The operator makes its own output."""
    call = op("ops.mkldnn._linear_pointwise")
    cast = None if workspace.dtype is workspace.outdtype else workspace.output()
    bias = workspace.bias

    def run(x: Operand, w: Operand) -> torch.Tensor:
        low: torch.Tensor = call(x[0], w[0], bias, "none", [], "")
        return low if cast is None else cast.copy_(low)

    return run


def chain(count: int) -> Callable[[Workspace], Run]:
    """K in parts, one after the other, each added to the output in place."""

    def make(workspace: Workspace) -> Run:
        low = workspace.output(workspace.dtype)
        last = epilogue(workspace, low)
        (start, end), *rest = parts(workspace.problem.k, count)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            torch.mm(x[0][:, start:end], w[0][:, start:end].t(), out=low)
            for a, b in rest:
                torch.addmm(low, x[0][:, a:b], w[0][:, a:b].t(), out=low)
            return last()

        return run

    return make


def split_mm(count: int) -> Callable[[Workspace], Run]:
    """K in parts, each to its own partial product, summed at the end; W stays as it is."""

    def make(workspace: Workspace) -> Run:
        low = workspace.output(workspace.dtype)
        last = epilogue(workspace, low)
        p = workspace.problem
        ranges = parts(p.k, count)
        partial = workspace.empty(len(ranges), p.m, p.n, dtype=workspace.dtype)
        slots = [(a, b, partial[i]) for i, (a, b) in enumerate(ranges)]

        def run(x: Operand, w: Operand) -> torch.Tensor:
            for a, b, slot in slots:
                torch.mm(x[0][:, a:b], w[0][:, a:b].t(), out=slot)
            torch.sum(partial, 0, out=low)
            return last()

        return run

    return make


def split_bmm(count: int, kn: bool) -> Callable[[Workspace], Run]:
    """K in equal parts as one batched product, then a sum."""

    def make(workspace: Workspace) -> Run:
        low = workspace.output(workspace.dtype)
        last = epilogue(workspace, low)
        p = workspace.problem
        depth = p.k // count
        partial = workspace.empty(count, p.m, p.n, dtype=workspace.dtype)

        def run(x: Operand, w: Operand) -> torch.Tensor:
            left = x[0].view(p.m, count, depth).transpose(0, 1)
            right = w[0].view(count, depth, p.n) if kn else w[0].view(p.n, count, depth).permute(1, 2, 0)
            torch.bmm(left, right, out=partial)
            torch.sum(partial, 0, out=low)
            return last()

        return run

    return make


def stored_f32(workspace: Workspace) -> Run:
    """W kept as float32: memory for speed where the CPU is slow at 16-bit types."""
    low = workspace.output(torch.float32)
    last = epilogue(workspace, low)
    x32 = workspace.empty(workspace.problem.m, workspace.problem.k, dtype=torch.float32)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        torch.mm(x32.copy_(x[0]), w[0].t(), out=low)
        return last()

    return run


def upcast_f32(workspace: Workspace) -> Run:
    """Both operands to float32 within the call."""
    low = workspace.output(torch.float32)
    last = epilogue(workspace, low)
    p = workspace.problem
    x32 = workspace.empty(p.m, p.k, dtype=torch.float32)
    w32 = workspace.empty(p.n, p.k, dtype=torch.float32)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        torch.mm(x32.copy_(x[0]), w32.copy_(w[0]).t(), out=low)
        return last()

    return run


def mm_out_f32(workspace: Workspace) -> Run:
    """float32 output straight from 16-bit operands."""
    out = workspace.output()
    bias = workspace.bias

    def run(x: Operand, w: Operand) -> torch.Tensor:
        torch.mm(x[0], w[0].t(), out_dtype=torch.float32, out=out)
        return out if bias is None else out.add_(bias)

    return run
