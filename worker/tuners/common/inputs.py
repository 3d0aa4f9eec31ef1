"""The operands of one case: drawn from a seed, copied, and multiplied in float32 as the reference.

A bench uses them for each backend (worker/bench/measuring.py); the tuners aiter-triton and vllm use them for the same
formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from worker.tuners.common.case import BLOCK8, MX4, PRE4, PRE8, ROW8, ROW16, Case
from worker.tuners.common.operands import (
    draw_bias,
    draw_rows,
    float_of,
    generator,
    levels,
    unpack_codes,
    w_exponent,
    widen_rows,
)
from worker.tuners.common.problem import MX_GROUP

SCALE_KINDS = {
    ROW16: ("none", "none"),
    ROW8: ("row", "row"),
    BLOCK8: ("block", "block"),
    MX4: ("mx", "mx"),
    PRE8: ("none", "tensor"),
    PRE4: ("none", "mx"),
}
"""The kinds of scales (worker/tuners/common/problem.py, Problem.scale) of X and of W, by format."""


Scale = torch.Tensor | None


@dataclass(slots=True)
class Inputs:
    """One set of operands. In batched families, B is the first dimension of every tensor."""

    case: Case
    x: torch.Tensor
    """[M, K], or [M, K/2] bytes for MXFP4."""
    w: torch.Tensor
    """[N, K], or [N, K/2] bytes for MXFP4."""
    xs: Scale = None
    """Scales of X: [M, 1] float32 (one a row), [M, K/128] float32 (blocks), [M, K/32] bytes of e8m0 (MXFP4)."""
    ws: Scale = None
    """Scales of W: [N, 1], [N/128, K/128], [N, K/32] likewise, or one number [1] for the whole tensor."""
    bias: torch.Tensor | None = None
    """[N]"""

    @classmethod
    def make(cls, case: Case, device: torch.device, seed: int, draw: int) -> Inputs:
        """Draw one set. The same (seed, case, draw) gives the same values; another `draw` gives others."""
        numbers = generator(device, seed, case, draw)
        x, xs = _draw_x(case, numbers)
        w, ws = _draw_w(case, numbers)
        bias = None
        if case.bias:
            bias = draw_bias(case.n, case.dtype, numbers)
        return cls(case, x, w, xs, ws, bias)

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both scales of a format that has them."""
        assert self.xs is not None
        assert self.ws is not None
        return self.xs, self.ws

    def copy(self) -> Inputs:
        """The same values in other memory."""
        tensors: dict[str, Any] = {name: tensor.clone() for name, tensor in self._tensors()}
        return replace(self, **tensors)

    def output(self) -> torch.Tensor:
        """[M, N] ([B, M, N]) filled with NaN."""
        case = self.case
        sizes = _sizes(case, case.m, case.n)
        return torch.full(sizes, math.nan, dtype=float_of(case.outdtype), device=self.x.device)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._tensors())

    def reference(self) -> torch.Tensor:
        """[M, N] ([B * M, N]) in float32 from operands widened to float32."""
        if not self.case.b:
            product = self._product(self.x, self.xs, self.w, self.ws)
            return product if self.bias is None else product.add_(self.bias.float())
        x_scales = self._scales_by_batch(self.xs)
        w_scales = self._scales_by_batch(self.ws)
        return torch.cat([self._product(self.x[i], x_scales[i], self.w[i], w_scales[i]) for i in range(self.case.b)])

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Operands and scales with their names. The bias is left out: it is small, and no copy of it is needed."""
        for name in ("x", "w", "xs", "ws"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def _product(self, x: torch.Tensor, xs: Scale, w: torch.Tensor, ws: Scale) -> torch.Tensor:
        """One product in float32: the meaning of the format, by the plain path."""
        x_kind, w_kind = SCALE_KINDS[self.case.format]
        k = self.case.k
        wide_x = widen_rows(x_kind, k, x, _flat_scale(x_kind, xs))
        wide_w = widen_rows(w_kind, k, w, _flat_scale(w_kind, ws), blocked=True)
        return wide_x @ wide_w.t()

    def _scales_by_batch(self, scale: Scale) -> list[Scale]:
        """The scales of each product of a batch; one number [1] counts for all of them."""
        if scale is None or scale.dim() == 1:
            return [scale] * self.case.b
        return list(scale)


Operands = dict[str, Any]
"""Operands by role (calls.py, ROLES): x, w, xs, ws (scales, or None) and bias."""


def stored_operands(inputs: Inputs) -> Operands:
    """Operands as they were drawn."""
    return {"x": inputs.x, "w": inputs.w, "xs": inputs.xs, "ws": inputs.ws, "bias": inputs.bias}


def plain_operands(inputs: Inputs) -> Operands:
    """Operands as AITER's Triton wrappers take them: the row scales of W lie along N."""
    operands = stored_operands(inputs)
    if inputs.ws is not None and inputs.case.format == ROW8:
        operands["ws"] = inputs.ws.transpose(-1, -2).contiguous()
    return operands


def needed_bytes(case: Case) -> int:
    """Least memory of a case: operands twice, output, and float32 of everything for the reference."""
    return 2 * case.moved_bytes + 4 * (case.m * case.k + case.n * case.k + max(1, case.b) * case.m * case.n)


def _sizes(case: Case, *sizes: int) -> tuple[int, ...]:
    return (case.b, *sizes) if case.b else sizes


def _draw_x(case: Case, numbers: torch.Generator) -> tuple[torch.Tensor, Scale]:
    sizes = _sizes(case, case.m)
    if case.format == PRE4:
        # quantised to MXFP4 within the call: values that MXFP4 holds exactly
        codes, scale = draw_rows("mx", case.dtype, sizes, case.k, 0, numbers)
        assert scale is not None
        flat = unpack_codes(codes.view(-1, case.k // 2), scale.view(-1, case.k // MX_GROUP), torch.bfloat16)
        return flat.view(*sizes, case.k), None
    kind = SCALE_KINDS[case.format][0]
    dtype = "bfloat16" if case.format == PRE8 else case.dtype
    x, scale = draw_rows(kind, dtype, sizes, case.k, 0, numbers)
    return x, _column_scale(kind, scale)


def _draw_w(case: Case, numbers: torch.Generator) -> tuple[torch.Tensor, Scale]:
    sizes = _sizes(case, case.n)
    exponent = w_exponent(case.k, mx=case.format in (MX4, PRE4))
    if case.format == PRE8:
        one_scale = torch.full((1,), 2.0 ** (exponent - 7), device=numbers.device)
        return levels((*sizes, case.k), numbers), one_scale
    kind = SCALE_KINDS[case.format][1]
    w, scale = draw_rows(kind, case.dtype, sizes, case.k, exponent, numbers, blocked=True)
    return w, _column_scale(kind, scale)


def _column_scale(kind: str, scale: Scale) -> Scale:
    """Scales as AITER's functions take them: a row scale is a column [R, 1], not [R]."""
    return scale[..., None] if kind == "row" and scale is not None else scale


def _flat_scale(kind: str, scale: Scale) -> Scale:
    """The reverse of `_column_scale`."""
    return scale[..., 0] if kind == "row" and scale is not None else scale
