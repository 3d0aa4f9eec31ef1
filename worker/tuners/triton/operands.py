"""Operands of a problem for our Triton kernels: copies that timing rotates over, the float32 reference, the check.

The X that is checked (`draw` 0) is used in no timed call, so what a kernel leaves unwritten cannot hold an earlier
right answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.tuners.common.operands import (
    CHUNK_BYTES,
    copies,
    draw_bias,
    draw_w,
    draw_x,
    error_ratio,
    float_of,
    form_of,
    generator,
    poison,
    widen,
)
from worker.tuners.common.problem import SCALE_BLOCK, Problem


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
    """Least memory of a shape: operands, output, reference, and float32 blocks of both operands."""
    wide = 4 * p.b * p.m * p.k + min(4 * p.b * p.n * p.k, CHUNK_BYTES + 4 * p.k)
    return p.x_bytes + p.w_bytes + p.scale_bytes + p.out_bytes + 4 * p.b * p.m * p.n + wide


def make(p: Problem, device: torch.device, seed: int, draw: int = 0, weights: Operands | None = None) -> Operands:
    """Draw the operands. W depends on (seed, group_key) only; `weights` shares it with another problem of the group.

    Raises UnsupportedError where this torch lacks the format.
    """
    if weights is None:
        rows = generator(device, seed, "W", p.group_key)
        w, w_scale = draw_w(p, rows)
        bias = draw_bias(p, rows)
    else:
        w, w_scale, bias = weights.w, weights.w_scale, weights.bias
    x, x_scale = draw_x(p, generator(device, seed, "X", p, draw))
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
    out = torch.empty(form_of(p, p.m, p.n), dtype=float_of(p.outdtype), device=device)
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
    return out.view(form_of(p, p.m, p.n))


def check(out: torch.Tensor, right: torch.Tensor) -> float:
    """Share of elements beyond the tolerance of AITER's checkAllclose (1e-2 + 1e-2 * |ref|); NaN counts as wrong."""
    n = right.shape[-1]
    return error_ratio(out.view(-1, n), right.view(-1, n))


def _some(o: Operands, b: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of one batch's W with their scales; `start` is a multiple of the scale block."""
    p, scale = o.problem, o.w_scale
    w = o.w.view(p.b, p.n, -1)[b, start:end]
    if scale is None or p.scale == "tensor":
        return w, scale
    if p.scale == "block":
        return w, scale[start // SCALE_BLOCK : -(-end // SCALE_BLOCK)]
    return w, scale.view(p.b, p.n, -1)[b, start:end].reshape((-1,) if p.scale == "row" else (w.shape[0], -1))
