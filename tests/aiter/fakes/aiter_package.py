"""The package `aiter` with kernels that compute on the CPU, and fault where REAL_AITER_FAULTS says so.

REAL_AITER_FAULTS: JSON, a list of {"m": M, "kernel": kernelId or part of a name, "do": fault}.
"""

import json
import logging
import os
import signal
import sys
import time
from typing import Any

import torch

ROOT = os.environ["REAL_AITER_ROOT"]
logger = logging.getLogger("aiter")
if not logger.handlers:
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

from aiter.ops.enum import QuantType  # type: ignore[import-not-found]  # noqa: E402
from aiter.utility import dtypes  # type: ignore[import-not-found]  # noqa: E402

__all__ = ["QuantType", "dtypes", "logger"]

_FAULTS = json.loads(os.environ.get("REAL_AITER_FAULTS", "[]"))
with open(os.path.join(ROOT, "aiter/utility/fp4_utils.py")) as _f:
    _TRIMS = ":scaleN_valid]" in _f.read()


def compute_gemm_SplitK(*_: Any) -> int:
    return 1


def get_triton_quant(_: Any) -> Any:
    """A quantiser as the checkout's: scales padded to eight, cut only where that date cuts them."""

    def quant(x: Any, shuffle: bool = False) -> tuple[Any, Any]:
        m, k = x.shape
        valid = -(-k // 32)
        padded = -(-valid // 8) * 8
        groups = torch.nn.functional.pad(x.float(), (0, padded * 32 - k)).view(m, padded, 32)
        exponent = torch.log2(groups.abs().amax(-1).clamp(min=2**-100)).floor().clamp(-120, 120)
        scales = (exponent + 127 - 2).clamp(1, 254)
        steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        scaled = groups / torch.exp2(scales - 127).unsqueeze(-1)
        index = (scaled.abs().unsqueeze(-1) - steps).abs().argmin(-1).to(torch.uint8)
        index = (index | ((scaled < 0).to(torch.uint8) << 3)).view(m, padded * 32)[:, :k]
        packed = index[:, ::2] | (index[:, 1::2] << 4)
        columns = valid if _TRIMS and not shuffle else padded
        return packed.contiguous(), scales.to(torch.uint8)[:, :columns].contiguous()

    return quant


def _fault(m: int, kernel: str) -> str:
    for f in _FAULTS:
        if f.get("m") in (None, m) and (f["kernel"] == "*" or str(f["kernel"]) == kernel):
            return str(f["do"])
    return ""


def _product(x: Any, w: Any, x_scales: Any, w_scales: Any, out: Any, kernel: str) -> Any:
    from aiter.utility import fp4_utils

    m = x.shape[0]
    do = _fault(m, kernel)
    sys.stdout.flush()
    if do == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if do == "memory_fault":
        os.write(2, b"Memory access fault by GPU node-2 (Agent handle: 0x55) on address 0x7f3c2a400000. "
                    b"Reason: Unknown.\n")  # fmt: skip
        os.abort()
    if do == "hang":
        time.sleep(1e6)
    if do == "unsupported":
        raise RuntimeError("This GEMM is not supported!")

    def plain(a: Any, scales: Any) -> Any:
        f = fp4_utils.mxfp4_to_f32(a)
        s = fp4_utils.e8m0_to_f32(scales[: f.shape[0]].repeat_interleave(32, dim=1))
        return f * s[:, : f.shape[1]]

    result = torch.mm(plain(x, x_scales), plain(w, w_scales).T).to(out.dtype)
    out[:m] = result * 3 if do == "wrong" else result
    return out


def gemm_a4w4_blockscale_tune(x: Any, w: Any, xs: Any, ws: Any, out: Any, kernel_id: int, split_k: int = 0) -> Any:
    return _product(x, w, xs, ws, out, str(kernel_id))


def gemm_a4w4_asm(x: Any, w: Any, xs: Any, ws: Any, out: Any, name: str, bias: Any = None, **_: Any) -> Any:
    return _product(x, w, xs, ws, out, name)
