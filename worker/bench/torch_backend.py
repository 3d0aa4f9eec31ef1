"""The backend `torch` of a bench: the library GEMM that torch calls, such as one of cuBLAS, hipBLASLt or oneDNN."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from worker.bench.case import BLOCK8, MX4, ROW8, ROW16, Case
from worker.bench.measuring import BoundCase, Call, Inputs
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.torch.variants import mx_types, op


class TorchBackend:
    """One operator per format; what this torch or device lacks is `unsupported`."""

    def load(self) -> dict[str, Any]:
        return {}

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        if case.format not in (ROW16, ROW8, BLOCK8, MX4) or (case.b and case.format != ROW16):
            raise UnsupportedError(f"torch has no library product for {case.family}")
        if case.format == ROW16:
            name, make = "bmm" if case.b else "addmm" if case.bias else "mm", _sixteen
        elif case.dtype == "int8":
            name, make = "int_mm", _int8
        else:
            name = {ROW8: "scaled_mm_rowwise", BLOCK8: "scaled_mm_blockwise", MX4: "scaled_mm_mxfp4"}[case.format]
            make = _scaled
        op("_scaled_mm" if make is _scaled else "_int_mm")
        if case.format == MX4:
            mx_types(gpu=torch.cuda.is_available())
        return BoundCase(name, f"torch_{name}", make)


def _sixteen(inputs: Inputs, out: torch.Tensor) -> Call:
    x, w = inputs.x, inputs.w.transpose(-1, -2)
    low = out if out.dtype is x.dtype else torch.empty_like(out, dtype=x.dtype)
    product = partial(torch.bmm if inputs.case.b else torch.mm, x, w, out=low)
    if inputs.bias is not None:
        product = partial(torch.addmm, inputs.bias, x, w, out=low)
    return product if low is out else lambda: out.copy_(product())


def _int8(inputs: Inputs, out: torch.Tensor) -> Call:
    """The integer product and the scaling of its result."""
    x, w, (xs, ws), call = inputs.x, inputs.w.t(), inputs.scales, op("_int_mm")
    sums = torch.empty(out.shape, dtype=torch.int32, device=out.device)
    half = torch.empty(out.shape, dtype=torch.float32, device=out.device)

    def whole() -> torch.Tensor:
        call(x, w, out=sums)
        torch.mul(sums, xs, out=half)
        return torch.mul(half, ws.t(), out=out)

    return whole


def _scaled(inputs: Inputs, out: torch.Tensor) -> Call:
    """The library applies the scales in its epilogue: by rows, by blocks of 128x128 (torch 2.8 and later, sm_90 and
    later), or MXFP4 scales as they are (hipBLASLt on gfx950)."""
    x, w, (xs, ws) = inputs.x, inputs.w.t(), inputs.scales
    if inputs.case.format == MX4:
        fp4, e8 = mx_types(gpu=torch.cuda.is_available())
        x, w, xs, ws = x.view(fp4), inputs.w.view(fp4).t(), xs.view(e8), ws.view(e8)
    else:  # for blocks, the library wants the scales of a column next to each other
        xs, ws = xs.t().contiguous().t() if inputs.case.format == BLOCK8 else xs, ws.t()
    return partial(op("_scaled_mm"), x, w, scale_a=xs, scale_b=ws, out_dtype=out.dtype, out=out)
