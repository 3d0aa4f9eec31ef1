"""The operands of a problem: seeded inputs, copies that timing rotates over, the float32 reference, and the check.

The distribution is the torch tuner's (worker/tuners/torch/operands.py): 256 even levels, W shrunk by a power of two so
that an output element has a standard deviation near 1 whatever K is; scales are drawn around their mean. The X that is
checked (`draw` 0) is used in no timed call, so what a kernel leaves unwritten cannot hold an earlier right answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from worker.tuners.common.formats import dtype_of, unpack_codes
from worker.tuners.common.key_cells import UnsupportedError
from worker.tuners.torch.check import error_ratio, poison
from worker.tuners.torch.operands import E2M1_RMS, MX_EXPONENTS, MX_RMS, UNIFORM, copies, generator
from worker.tuners.triton.problem import MX_GROUP, SCALE_BLOCK, Problem

CHUNK_BYTES = 256 << 20
"""float32 W is made in blocks of about so much for the reference."""


@dataclass(frozen=True, slots=True)
class Operands:
    """Contiguous tensors of one problem. x [B, M, K] and w [B, N, K], without B where the family has none.

    MXFP4 holds two elements a byte: [M, K/2]. Scales: `row` [B, M] and [B, N]; `tensor` [1]; `block` [M, K/128] and
    [N/128, K/128], rounded up; `mx` uint8 [M, K/32] and [N, K/32]. bias [N] has the operands' format.
    """

    problem: Problem
    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor | None
    w_scale: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        found = (self.x, self.w, self.x_scale, self.w_scale, self.bias)
        return tuple(t for t in found if t is not None)

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return sum(t.nbytes for t in self.tensors)


def needed_bytes(p: Problem) -> int:
    """What a shape takes at the very least: operands, output, reference, and float32 blocks of both operands."""
    wide = 4 * p.b * p.m * p.k + min(4 * p.b * p.n * p.k, CHUNK_BYTES + 4 * p.k)
    return p.x_bytes + p.w_bytes + p.scale_bytes + p.out_bytes + 4 * p.b * p.m * p.n + wide


def make(p: Problem, device: torch.device, seed: int, draw: int = 0, weights: Operands | None = None) -> Operands:
    """Draw the operands. W depends on (seed, group_key) only; `weights` shares it with another problem of the group.

    Raises UnsupportedError where this torch lacks the format.
    """
    if weights is None:
        rows = generator(device, seed, "W", p.group_key)
        w, w_scale = _rows(p, p.n, _shrink(p), device, rows, blocked=True)
        bias = _levels((p.n,), device, rows).to(_float(p.dtype)).mul_(2.0**-7) if p.bias else None
    else:
        w, w_scale, bias = weights.w, weights.w_scale, weights.bias
    x, x_scale = _rows(p, p.m, 0, device, generator(device, seed, "X", p, draw), blocked=False)
    return Operands(p, x, w, x_scale, w_scale, bias)


def rotation(o: Operands, span: int, available: int) -> list[Operands]:
    """Copies of operands that together span `span` bytes, as far as half of `available` goes; the first is `o`."""
    count = max(1, min(copies(o.nbytes, span), available // 2 // max(1, o.nbytes)))
    return [o] + [_clone(o) for _ in range(count - 1)]


def _clone(o: Operands) -> Operands:
    def twin(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.clone()

    return Operands(o.problem, o.x.clone(), o.w.clone(), twin(o.x_scale), twin(o.w_scale), twin(o.bias))


def out_like(p: Problem, device: torch.device) -> torch.Tensor:
    """An output [B, M, N] (without B where the family has none), filled with NaN."""
    out = torch.empty(_form(p, p.m, p.n), dtype=_float(p.outdtype), device=device)
    poison([out])
    return out


def reference(o: Operands) -> torch.Tensor:
    """[B, M, N] in float32: both operands dequantised to float32, multiplied, bias added."""
    p = o.problem
    x = widen(p, o.x, o.x_scale, blocked=False).view(p.b, p.m, p.k)
    out = torch.empty(p.b, p.m, p.n, dtype=torch.float32, device=x.device)
    step = max(SCALE_BLOCK, CHUNK_BYTES // (4 * p.k) // SCALE_BLOCK * SCALE_BLOCK)
    for b in range(p.b):
        for n in range(0, p.n, step):
            rows, scale = _some(o, b, n, n + step)
            out[b, :, n : n + step] = x[b] @ widen(p, rows, scale, blocked=True).t()
    if o.bias is not None:
        out += o.bias.float()
    return out.view(_form(p, p.m, p.n))


def check(out: torch.Tensor, right: torch.Tensor) -> float:
    """Share of elements beyond the tolerance of AITER's checkAllclose (1e-2 + 1e-2 * |ref|); NaN counts as wrong."""
    n = right.shape[-1]
    return error_ratio(out.view(-1, n), right.view(-1, n))


def widen(p: Problem, rows: torch.Tensor, scale: torch.Tensor | None, *, blocked: bool) -> torch.Tensor:
    """Rows of an operand as float32, scales applied: the meaning of the format. `blocked` is W's side."""
    if p.scale == "mx":
        assert scale is not None
        return unpack_codes(rows, scale, torch.float32)
    wide = rows.float()
    if scale is None:
        return wide
    if p.scale != "block":
        return wide.mul_(scale[..., None] if p.scale == "row" else scale)
    by_column = scale.repeat_interleave(SCALE_BLOCK, dim=1)[:, : p.k]
    return wide.mul_(by_column.repeat_interleave(SCALE_BLOCK, dim=0)[: wide.shape[0]] if blocked else by_column)


def _some(o: Operands, b: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of one batch's W with their scales; `start` is a multiple of the scale block."""
    p, scale = o.problem, o.w_scale
    w = o.w.view(p.b, p.n, -1)[b, start:end]
    if scale is None or p.scale == "tensor":
        return w, scale
    if p.scale == "block":
        return w, scale[start // SCALE_BLOCK : -(-end // SCALE_BLOCK)]
    return w, scale.view(p.b, p.n, -1)[b, start:end].reshape((-1,) if p.scale == "row" else (w.shape[0], -1))


def _form(p: Problem, rows: int, columns: int) -> tuple[int, ...]:
    return (p.b, rows, columns) if p.family.startswith("batched") else (rows, columns)


def _rows(
    p: Problem, rows: int, exponent: int, device: torch.device, draw: torch.Generator, *, blocked: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`rows` rows of K elements of size about 2^exponent, with their scales."""
    if p.scale == "mx":
        codes = _levels((rows, p.k // 2), device, draw).view(torch.uint8)
        pick = _levels((rows, p.k // MX_GROUP), device, draw).view(torch.uint8) & 3
        return codes, pick + (127 + MX_EXPONENTS[0] + exponent)
    levels = _levels(_form(p, rows, p.k), device, draw)
    if p.scale == "none":
        return levels.to(_float(p.dtype)).mul_(2.0 ** (exponent - 7)), None
    form = (1,) if p.scale == "tensor" else _form(p, rows, 1)[:-1]
    if p.scale == "block":
        form = (-(-rows // SCALE_BLOCK) if blocked else rows, -(-p.k // SCALE_BLOCK))
    scale = torch.rand(form, device=device, generator=draw).add_(0.5).mul_(2.0**exponent)
    if p.dtype == "int8":
        return levels, scale.mul_(2.0**-7)
    return levels.to(torch.bfloat16).mul_(2.0**-7).to(_float(p.dtype)), scale


def _levels(form: tuple[int, ...], device: torch.device, draw: torch.Generator) -> torch.Tensor:
    """int8, uniform over all 256 values; eight at a time, since that is what a generator is fast at."""
    size = math.prod(form)
    words = torch.empty(-(-size // 8), dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=draw)
    return words.view(torch.int8)[:size].view(form)


def _shrink(p: Problem) -> int:
    """The power of two by which W is scaled so that an output element has a standard deviation near 1."""
    rms = UNIFORM if p.scale != "mx" else E2M1_RMS * MX_RMS
    return -round(math.log2(math.sqrt(p.k) * rms * rms))


def _float(name: str) -> torch.dtype:
    found = dtype_of(name)
    if found is None:
        raise UnsupportedError(f"torch {torch.__version__} has no type {name}")
    return found
