"""The backend `torch` of a bench: the library GEMM that torch calls, such as one of cuBLAS, hipBLASLt or oneDNN.

backends.py makes it. There is one operator for each format; what this torch or device lacks is `unsupported`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from worker.bench.measuring import BoundCase, Call
from worker.tuners.common.case import BLOCK8, MX4, ROW8, ROW16, Case
from worker.tuners.common.inputs import Inputs
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.torch.variants import mx_types, op

SCALED_OPS = {ROW8: "scaled_mm_rowwise", BLOCK8: "scaled_mm_blockwise", MX4: "scaled_mm_mxfp4"}


class TorchBackend:
    """torch's own operators, with the scales applied by the library if it can."""

    def load(self) -> dict[str, Any]:
        return {}

    def bind(self, case: Case) -> BoundCase:
        if case.format == ROW16:
            if case.b:
                return BoundCase("bmm", "torch_bmm", _float_call)
            name = "addmm" if case.bias else "mm"
            return BoundCase(name, f"torch_{name}", _float_call)
        if case.b or case.format not in SCALED_OPS:
            raise UnsupportedError(f"torch has no library product for {case.family}")
        if case.dtype == "int8":
            op("_int_mm")
            return BoundCase("int_mm", "torch_int_mm", _int8_call)
        op("_scaled_mm")
        if case.format == MX4:
            mx_types(gpu=torch.cuda.is_available())
        name = SCALED_OPS[case.format]
        return BoundCase(name, f"torch_{name}", _scaled_call)


def _float_call(inputs: Inputs, out: torch.Tensor) -> Call:
    """The product in the operands' type, then a cast if the output has another."""
    x = inputs.x
    w = inputs.w.transpose(-1, -2)
    low = out if out.dtype is x.dtype else torch.empty_like(out, dtype=x.dtype)
    if inputs.bias is not None:
        product = partial(torch.addmm, inputs.bias, x, w, out=low)
    else:
        product = partial(torch.bmm if inputs.case.b else torch.mm, x, w, out=low)
    return product if low is out else lambda: out.copy_(product())


def _int8_call(inputs: Inputs, out: torch.Tensor) -> Call:
    """The integer product and the scaling of its result."""
    int_mm = op("_int_mm")
    x = inputs.x
    w = inputs.w.t()
    xs, ws = inputs.scales
    sums = torch.empty(out.shape, dtype=torch.int32, device=out.device)
    scaled_by_x = torch.empty(out.shape, dtype=torch.float32, device=out.device)

    def call() -> torch.Tensor:
        int_mm(x, w, out=sums)
        torch.mul(sums, xs, out=scaled_by_x)
        return torch.mul(scaled_by_x, ws.t(), out=out)

    return call


def _scaled_call(inputs: Inputs, out: torch.Tensor) -> Call:
    """The library applies the scales in its epilogue: by rows, by blocks of 128x128 (torch 2.8 and later, sm_90 and
    later), or MXFP4 scales as they are (hipBLASLt on gfx950)."""
    x = inputs.x
    w = inputs.w
    xs, ws = inputs.scales
    if inputs.case.format == MX4:
        code_type, scale_type = mx_types(gpu=torch.cuda.is_available())
        x = x.view(code_type)
        w = w.view(code_type)
        xs = xs.view(scale_type)
        ws = ws.view(scale_type)
    else:
        ws = ws.t()
    if inputs.case.format == BLOCK8:
        xs = xs.t().contiguous().t()  # the library wants the scales of a column next to each other
    return partial(op("_scaled_mm"), x, w.t(), scale_a=xs, scale_b=ws, out_dtype=out.dtype, out=out)
