"""Inputs of a case, drawn here: nothing of a backend's test code is used (its generators change with the date).

X and W are uniform over the levels of their format, scaled by powers of two so that an output element has a standard
deviation near 1 (as worker/tuners/common/operands.py does). Everything is drawn on the device. bfloat16 X that a
backend quantises to MXFP4 itself is drawn from what MXFP4 can hold, so that an honest backend is exact up to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from worker.bench.case import MX4, PRE4, PRE8, ROW8, ROW16, Case
from worker.tuners.common.formats import unpack_codes
from worker.tuners.common.operands import MX_EXPONENTS, float_of, generator, levels, w_exponent
from worker.tuners.common.problem import MX_GROUP, SCALE_BLOCK


@dataclass(slots=True)
class Inputs:
    """One set of operands. Batched ones have B in front of every form.

    x [M, K] ([M, K/2] bytes for MXFP4), w [N, K] likewise; xs, ws: scales as a row scale [R, 1] float32, a block scale
    ([M, K/128] and [N/128, K/128]) float32, e8m0 bytes [R, K/32], or one number [1]; None where the format has none.
    """

    case: Case
    x: torch.Tensor
    w: torch.Tensor
    xs: torch.Tensor | None = None
    ws: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @classmethod
    def make(cls, case: Case, device: torch.device, seed: int, turn: int) -> Inputs:
        """Draw one set by (seed, case, turn)."""
        draw = generator(device, seed, case, turn)
        x, xs = _operand(case, "x", case.m, 0, draw)
        w, ws = _operand(case, "w", case.n, w_exponent(case.k, mx=case.format in (MX4, PRE4)), draw)
        bias = levels((case.n,), draw).to(float_of(case.dtype)).mul_(2.0**-7) if case.bias else None
        return cls(case, x, w, xs, ws, bias)

    def copy(self) -> Inputs:
        """The same values in other memory."""
        again = {n: t.clone() for n in ("x", "w", "xs", "ws") if (t := getattr(self, n)) is not None}
        return replace(self, **again)

    def output(self) -> torch.Tensor:
        """[M, N] ([B, M, N]) filled with NaN."""
        c = self.case
        form = (c.b, c.m, c.n) if c.b else (c.m, c.n)
        return torch.full(form, math.nan, dtype=float_of(c.outdtype), device=self.x.device)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.x, self.w, self.xs, self.ws) if t is not None)

    def reference(self) -> torch.Tensor:
        """[M, N] ([B * M, N]) in float32 from operands widened to float32."""
        c = self.case
        if not c.b:
            out = _wide(self.x, self.xs, c.k) @ _wide(self.w, self.ws, c.k).t()
            return out if self.bias is None else out.add_(self.bias.float())
        xs, ws = ([None] * c.b if s is None else [s] * c.b if s.dim() == 1 else list(s) for s in (self.xs, self.ws))
        parts = [_wide(self.x[i], xs[i], c.k) @ _wide(self.w[i], ws[i], c.k).t() for i in range(c.b)]
        return torch.cat(parts)


def needed_bytes(case: Case) -> int:
    """Least memory of a case: operands twice, output, and float32 of everything for the reference."""
    wide = 4 * (case.m * case.k + case.n * case.k + max(1, case.b) * case.m * case.n)
    return 2 * case.moved_bytes + wide


def _wide(t: torch.Tensor, scale: torch.Tensor | None, k: int) -> torch.Tensor:
    """Rows in float32, scales applied: the meaning of the format, by the plain path."""
    if scale is None:
        return t.float()
    if scale.dtype is torch.uint8:
        return unpack_codes(t, scale, torch.float32)
    if scale.dim() == 1 or (scale.shape[-1] == 1 and scale.shape[0] == t.shape[0]):
        return t.float() * scale
    rows = SCALE_BLOCK if scale.shape[0] != t.shape[0] else 1
    each = scale.repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return t.float() * (each.repeat_interleave(rows, 0)[: t.shape[0]] if rows > 1 else each)


def _operand(
    c: Case, side: str, rows: int, exponent: int, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    count = max(1, c.b) * rows
    form = (c.b, rows) if c.b else (rows,)
    if c.format == MX4 or (c.format == PRE4):
        codes = levels((count, c.k // 2), draw).view(torch.uint8)
        picked = levels((count, c.k // MX_GROUP), draw).view(torch.uint8) & 3
        scale = picked + (127 + MX_EXPONENTS[0] + exponent)
        if c.format == PRE4 and side == "x":
            return unpack_codes(codes, scale, torch.bfloat16).view(*form, c.k), None
        return codes.view(*form, -1), scale.view(*form, -1)
    drawn = levels((*form, c.k), draw)
    if c.format == ROW16 or (c.format == PRE8 and side == "x"):
        return drawn.to(float_of(c.dtype if c.format == ROW16 else "bfloat16")).mul_(2.0 ** (exponent - 7)), None
    eight = drawn if c.dtype == "int8" else drawn.to(torch.bfloat16).mul_(2.0**-7).to(float_of(c.dtype))
    size = 2.0 ** (exponent - (7 if c.dtype == "int8" else 0))
    if c.format == PRE8:
        return eight, torch.full((1,), size, device=draw.device)
    if c.format == ROW8:
        return eight, _factors((*form, 1), size, draw)
    across = rows if side == "x" else -(-rows // SCALE_BLOCK)
    return eight, _factors((across, -(-c.k // SCALE_BLOCK)), size, draw)


def _factors(form: tuple[int, ...], size: float, draw: torch.Generator) -> torch.Tensor:
    return torch.rand(form, device=draw.device, generator=draw).add_(0.5).mul_(size)
