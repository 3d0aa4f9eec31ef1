"""The ways in which the tuner torch computes a GEMM, by family.

- a16w16: a product of 16- or 32-bit floats, then the bias and a cast to `outdtype`.
- a8w8: out[m, n] = (sum over k of X[m, k] * W[n, k]) * xs[m] * ws[n]. The operands are int8 or fp8. Both are exact in
  bfloat16, so a product of dequantised operands loses nothing.
- a4w4_blockscale: MXFP4 operands (two e2m1 a byte, an e8m0 scale per 32 along K). They are exact in bfloat16 too.

Most variants do the same three steps: bring X into the type that the library multiplies, multiply it by W as it is
stored, finish the output. All three are timed. Bringing the constant W into its layout (search.py) is not; a variant
with `predequant` in its name keeps W as bfloat16, which takes more memory. Variants that never won where we measured
are gone (benchmarks/results/torch-tuner.md).

A candidate is a variant with a number of CPU threads, and has an id that never changes. `candidates_of` lists those of
a machine. search.py calls `Variant.make(workspace)` for each, which allocates the candidate's buffers and returns the
function that computes the product. To add a variant, write the function that makes it, and an entry with a new number
in the table of its family (`variants`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch

from worker.families import TORCH
from worker.text import byte_words
from worker.tuners.common.device import Device, Operand, Run
from worker.tuners.common.operands import float_of, unpack_codes
from worker.tuners.common.problem import Problem, UnsupportedError

COUNTS = 10_000
"""kernelId = number of the variant * COUNTS + threads."""
BUFFER_SHARE = 0.9
"""Share of the free memory that a candidate's buffers may take."""


@dataclass(slots=True)
class Workspace:
    """A candidate's problem, device and buffers. The checker can poison the buffers."""

    problem: Problem
    device: torch.device
    bias: torch.Tensor | None
    free: int
    """Bytes that could be allocated when the candidate began."""
    buffers: list[torch.Tensor] = field(default_factory=list)

    @property
    def gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def wide(self) -> torch.dtype:
        """The type in which the library multiplies: the operands' own, or bfloat16 where they have 8 or 4 bits."""
        return float_of(self.problem.dtype) if self.problem.scale == "none" else torch.bfloat16

    @property
    def outdtype(self) -> torch.dtype:
        return float_of(self.problem.outdtype)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of the candidate's own; it is poisoned before the check. Raises MemoryError."""
        form = torch.empty(*shape, dtype=dtype, device="meta")
        needed = self.problem.out_bytes + sum(buffer.nbytes for buffer in (*self.buffers, form))
        if needed > BUFFER_SHARE * self.free:
            raise MemoryError(
                f"the candidate's buffers need {byte_words(needed)}, {byte_words(self.free)} are available"
            )
        self.buffers.append(torch.empty_like(form, device=self.device))
        return self.buffers[-1]

    def output(self, dtype: torch.dtype) -> torch.Tensor:
        """A buffer for the output [M, N]."""
        return self.empty(self.problem.m, self.problem.n, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute."""

    number: int
    """Part of kernelId: never given to another variant."""
    stem: str
    """Its name without prefix and threads."""
    layout: str
    """The form in which W is stored for it (operands.py): nk, kn, bf16 or packed."""
    make: Callable[[Workspace], Run]
    every_count: bool = False
    """It is tried with all counts of threads, not only with all cores."""
    split_k: int = 0
    """The number of parts of K, 0 if K is not split."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant with a number of CPU threads (0 on a GPU)."""

    variant: Variant
    threads: int

    @property
    def kernel_id(self) -> int:
        return self.variant.number * COUNTS + self.threads

    @property
    def name(self) -> str:
        return TORCH + self.variant.stem + (f"_t{self.threads}" if self.threads else "")

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Order of candidates that are equally fast; the lowest wins: fewer threads, then lower id."""
        return (self.threads, self.kernel_id)


def candidates_of(problem: Problem, device: Device, threads: Sequence[int] = ()) -> list[Candidate]:
    """Each variant with all cores, then those marked `every_count` with the other counts of threads."""
    table = variants(problem, device.gpu)
    all_cores, *other_counts = device.thread_counts(threads)
    candidates = [Candidate(variant, all_cores) for variant in table]
    for count in other_counts:
        candidates += [Candidate(variant, count) for variant in table if variant.every_count]
    return candidates


def op(path: str) -> Any:
    """`torch.<path>` or UnsupportedError: private operators come and go between versions of torch."""
    try:
        return attrgetter(path)(torch)
    except AttributeError as e:
        raise UnsupportedError(f"torch {torch.__version__} has no torch.{path}") from e


def mx_types(*, gpu: bool) -> tuple[torch.dtype, torch.dtype]:
    """torch's types of MXFP4 elements and scales. Raises UnsupportedError where its own product does not take them."""
    if not torch.version.hip or not gpu:
        raise UnsupportedError("torch multiplies MXFP4 itself only on an AMD GPU of gfx950 or later")
    return float_of("float4_e2m1fn_x2"), float_of("float8_e8m0fnu")


CHAIN = 2
"""Parts of K, which a CPU adds one after the other."""
LEAST_K = 64
"""Elements of K in a part at least."""
INT_MM_MIN_ROWS = 17
"""torch._int_mm on CUDA takes M > 16 only."""
BF16 = torch.bfloat16

Widen = Callable[[Operand], torch.Tensor]
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Finish = Callable[[torch.Tensor, Operand, Operand], torch.Tensor]


def variants(p: Problem, gpu: bool) -> list[Variant]:
    """The table of a problem, the most promising first."""
    if p.scale == "none":
        return _unscaled_variants(p, gpu)
    if p.scale == "row":
        return _row_scaled_variants(p, gpu)
    table = [WIDENED]
    if not gpu:
        table.append(Variant(31, "predequant_bf16_wpacked", "packed", WITH_BIAS, every_count=True))
    table.append(Variant(50, "scaled_mm_mxfp4_wnk", "nk", scaled_mm_mx))
    return table


def _unscaled_variants(p: Problem, gpu: bool) -> list[Variant]:
    table = [Variant(1, "linear_wnk", "nk", partial(product, linear, biased=True), every_count=True)]
    if not gpu:
        table.append(Variant(4, "linear_wpacked", "packed", WITH_BIAS, every_count=True))
    table.append(Variant(2, "mm_wnk", "nk", partial(product, mm_nk)))
    table.append(Variant(3, "mm_wkn", "kn", partial(product, mm_kn), every_count=True))
    if not gpu and p.m == 1:
        table.append(Variant(5, "mv_wnk", "nk", partial(product, mv)))
    if not gpu and p.k >= LEAST_K * CHAIN:
        in_parts = partial(product, chain)
        table.append(Variant(12, f"addmm_wnk_chain{CHAIN}", "nk", in_parts, every_count=True, split_k=CHAIN))
    return table


def _row_scaled_variants(p: Problem, gpu: bool) -> list[Variant]:
    table = []
    if p.dtype == "int8":
        table.append(Variant(1, "int_mm_wnk", "nk", partial(product, int_mm, raw=True), every_count=True))
        if not gpu:
            table.append(Variant(4, "weight_int8pack_wnk", "nk", weight_int8, every_count=True))
    else:
        table.append(Variant(20, "scaled_mm_rowwise_wnk", "nk", scaled_mm))
        if gpu:
            table.append(Variant(21, "scaled_mm_rowwise_fastacc_wnk", "nk", partial(scaled_mm, fast=True)))
    table.append(WIDENED)
    if not gpu:
        table.append(Variant(35, "predequant_bf16_wpacked", "packed", WITH_BIAS, every_count=True))
    return table


def product(
    make_multiply: Callable[[Workspace], Multiply], workspace: Workspace, *, biased: bool = False, raw: bool = False
) -> Run:
    """One product of the library. `biased`: it adds the bias itself. `raw`: it takes X in its stored type."""
    multiply = make_multiply(workspace)
    finish = finishing(workspace, biased=biased)
    widen = widening(workspace, raw=raw)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        return finish(multiply(widen(x), w[0]), x, w)

    return run


def widening(workspace: Workspace, *, raw: bool = False) -> Widen:
    """A step that brings X into the type `Workspace.wide`, or leaves it in its stored type (`raw`)."""
    p = workspace.problem
    if raw or p.scale == "none":
        return itemgetter(0)
    if p.scale == "mx":
        return lambda x: unpack_codes(x[0], x[1], BF16)
    buffer = workspace.empty(p.m, p.k, dtype=BF16)
    return lambda x: buffer.copy_(x[0])


def finishing(workspace: Workspace, *, biased: bool = False) -> Finish:
    """The step from the product to the output: the scales of a8w8; else the bias, and a cast where types differ."""
    if workspace.problem.scale == "row":
        scaled_by_x = workspace.output(torch.float32)
        out = workspace.output(workspace.outdtype)
        return lambda low, x, w: torch.mul(torch.mul(low, x[1][:, None], out=scaled_by_x), w[1], out=out)
    bias = None if biased else workspace.bias
    cast = None if workspace.wide is workspace.outdtype else workspace.output(workspace.outdtype)

    def finish(low: torch.Tensor, x: Operand, w: Operand) -> torch.Tensor:
        if bias is not None:
            low.add_(bias)
        return low if cast is None else cast.copy_(low)

    return finish


def linear(workspace: Workspace) -> Multiply:
    linear_op = op("_C._nn.linear")
    bias = workspace.bias
    low = workspace.output(workspace.wide)
    return lambda x, w: linear_op(x, w, bias, out=low)


def packed(workspace: Workspace) -> Multiply:
    """W in the blocked order that oneDNN would otherwise make on each call. The operator makes its own output."""
    linear_pointwise = op("ops.mkldnn._linear_pointwise")
    bias = workspace.bias
    return lambda x, w: linear_pointwise(x, w, bias, "none", [], "")


def mm_nk(workspace: Workspace) -> Multiply:
    low = workspace.output(workspace.wide)
    return lambda x, w: torch.mm(x, w.t(), out=low)


def mm_kn(workspace: Workspace) -> Multiply:
    low = workspace.output(workspace.wide)
    return lambda x, w: torch.mm(x, w, out=low)


def mv(workspace: Workspace) -> Multiply:
    """M = 1 as a matrix times a vector."""
    low = workspace.output(workspace.wide)
    row = low[0]

    def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        torch.mv(w, x[0], out=row)
        return low

    return multiply


def chain(workspace: Workspace) -> Multiply:
    """K in parts, one after the other, each added to the output in place."""
    low = workspace.output(workspace.wide)
    k = workspace.problem.k
    step = -(-k // CHAIN)
    step += -step % 8  # parts begin at whole vectors

    def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        torch.mm(x[:, :step], w[:, :step].t(), out=low)
        for begin in range(step, k, step):
            part = slice(begin, begin + step)
            torch.addmm(low, x[:, part], w[:, part].t(), out=low)
        return low

    return multiply


def int_mm(workspace: Workspace) -> Multiply:
    """The library's integer product; the sums are exact."""
    if workspace.gpu and workspace.problem.m < INT_MM_MIN_ROWS:
        raise UnsupportedError(f"torch._int_mm on a GPU takes M from {INT_MM_MIN_ROWS}, M is {workspace.problem.m}")
    int_mm_op = op("_int_mm")
    sums = workspace.output(torch.int32)
    return lambda x, w: int_mm_op(x, w.t(), out=sums)


def weight_int8(workspace: Workspace) -> Run:
    """torch's weight-only int8 product: bfloat16 X, int8 W, scales of W in bfloat16. Makes its own output."""
    p = workspace.problem
    int8pack_mm = op("_weight_int8pack_mm")
    if p.k % 32 or p.n % 16:  # it reads past the end of ragged rows (seen: a segmentation fault with N 7, K 33)
        raise UnsupportedError(f"torch._weight_int8pack_mm is safe for K % 32 = 0 and N % 16 = 0 only, not {p.n}x{p.k}")
    widen = widening(workspace)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        out: torch.Tensor = int8pack_mm(widen(x), w[0], w[1].bfloat16())
        return out.mul_(x[1][:, None])

    return run


def scaled_mm(workspace: Workspace, *, fast: bool = False) -> Run:
    """fp8 product with the scales in the library's epilogue. `fast`: the tensor cores' shorter accumulation."""
    multiply = partial(op("_scaled_mm"), out_dtype=BF16, use_fast_accum=fast)
    out = workspace.output(BF16)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        multiply(x[0], w[0].t(), scale_a=x[1][:, None], scale_b=w[1][None, :], out=out)
        return out

    return run


def scaled_mm_mx(workspace: Workspace) -> Run:
    """The library's own MXFP4 product: hipBLASLt on gfx950 takes the scales as they are."""
    fp4, e8 = mx_types(gpu=workspace.gpu)
    multiply = partial(op("_scaled_mm"), out_dtype=BF16)
    out = workspace.output(BF16)

    def run(x: Operand, w: Operand) -> torch.Tensor:
        multiply(x[0].view(fp4), w[0].view(fp4).t(), scale_a=x[1].view(e8), scale_b=w[1].view(e8), out=out)
        return out

    return run


WITH_BIAS = partial(product, packed, biased=True)
WIDENED = Variant(30, "predequant_bf16_wnk", "bf16", partial(product, mm_nk), every_count=True)
"""Operands that are widened to bf16 beforehand; part of each table with scales."""
