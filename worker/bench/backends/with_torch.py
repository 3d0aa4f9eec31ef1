"""Backend `torch`: the library GEMM that torch calls (cuBLAS, hipBLASLt, oneDNN), and nothing else."""

from __future__ import annotations

from typing import Any

import torch

from worker.bench.backends.inputs import Inputs
from worker.bench.backends.measuring import BoundCase, Call
from worker.bench.case import BLOCK8, MX4, ROW8, ROW16, Case
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.torch.variants import mx_types, op


class TorchBackend:
    """One operator per format; what this torch or device lacks is `unsupported`."""

    def load(self) -> dict[str, Any]:
        return {}

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        makers = {ROW16: _sixteen, ROW8: _eight, BLOCK8: _blocks, MX4: _mx}
        if case.format not in makers or (case.b and case.format != ROW16):
            raise UnsupportedError(f"torch has no library product for {case.family}")
        return makers[case.format](case)


def _sixteen(case: Case) -> BoundCase:
    def make(inputs: Inputs, out: torch.Tensor) -> Call:
        x, w, bias = inputs.x, inputs.w.transpose(-1, -2), inputs.bias
        low = out if out.dtype is x.dtype else torch.empty_like(out, dtype=x.dtype)

        def mm() -> torch.Tensor:
            torch.mm(x, w, out=low)
            return out if low is out else out.copy_(low)

        def addmm() -> torch.Tensor:
            assert bias is not None
            torch.addmm(bias, x, w, out=low)
            return out if low is out else out.copy_(low)

        return (lambda: torch.bmm(x, w, out=out)) if case.b else mm if bias is None else addmm

    name = "bmm" if case.b else "addmm" if case.bias else "mm"
    return BoundCase(name, f"torch_{name}", make)


def _eight(case: Case) -> BoundCase:
    """int8: the integer product and the scaling of its result; fp8: the scales are in the library's epilogue."""
    integer = case.dtype == "int8"
    call = op("_int_mm" if integer else "_scaled_mm")

    def make(inputs: Inputs, out: torch.Tensor) -> Call:
        assert inputs.xs is not None
        assert inputs.ws is not None
        x, w, xs, ws = inputs.x, inputs.w.t(), inputs.xs, inputs.ws.t()
        acc = torch.empty(out.shape, dtype=torch.int32, device=out.device) if integer else out
        half = torch.empty(out.shape, dtype=torch.float32, device=out.device) if integer else out

        def scaled() -> torch.Tensor:
            call(x, w, scale_a=xs, scale_b=ws, out_dtype=out.dtype, out=out)
            return out

        def whole() -> torch.Tensor:
            call(x, w, out=acc)
            torch.mul(acc, xs, out=half)
            return torch.mul(half, ws, out=out)

        return whole if integer else scaled

    name = "int_mm" if integer else "scaled_mm_rowwise"
    return BoundCase(name, f"torch_{name}", make)


def _blocks(case: Case) -> BoundCase:
    """128x128 scales: in torch from 2.8 on, for GPUs of sm_90 and later."""
    call = op("_scaled_mm")

    def make(inputs: Inputs, out: torch.Tensor) -> Call:
        assert inputs.xs is not None
        assert inputs.ws is not None
        x, w, ws = inputs.x, inputs.w.t(), inputs.ws.t()
        xs = inputs.xs.t().contiguous().t()  # the library wants the scales of a column side by side

        def run() -> torch.Tensor:
            call(x, w, scale_a=xs, scale_b=ws, out_dtype=out.dtype, out=out)
            return out

        return run

    return BoundCase("scaled_mm_blockwise", "torch_scaled_mm_blockwise", make)


def _mx(case: Case) -> BoundCase:
    """hipBLASLt on gfx950 takes MXFP4 with its scales as they are."""
    fp4, e8 = mx_types(gpu=torch.cuda.is_available())
    call = op("_scaled_mm")

    def make(inputs: Inputs, out: torch.Tensor) -> Call:
        assert inputs.xs is not None
        assert inputs.ws is not None
        x, w, xs, ws = inputs.x.view(fp4), inputs.w.view(fp4).t(), inputs.xs.view(e8), inputs.ws.view(e8)

        def run() -> torch.Tensor:
            call(x, w, scale_a=xs, scale_b=ws, out_dtype=out.dtype, out=out)
            return out

        return run

    return BoundCase("scaled_mm_mxfp4", "torch_scaled_mm_mxfp4", make)
