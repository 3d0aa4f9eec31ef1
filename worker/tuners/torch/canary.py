"""A small GEMM with a known integer answer.

H is the Hadamard matrix of Sylvester, of order n: H[i, k] = (-1)^popcount(i & k). Its rows are orthogonal, so with the
rows of a second copy shifted by s, H @ shifted^T is n where i = (j + s) mod n, else 0: each element a sum of n terms of
1 and -1 that must cancel exactly. All of it is exact in bfloat16 and float32.
"""

from __future__ import annotations

import torch

from worker.tuners.common.measure import Policy, measure
from worker.tuners.torch.candidate import Operand
from worker.tuners.torch.device import Device

SHIFT = 3


def canary(device: Device, size: int) -> tuple[bool, float, str]:
    """(every element right, microseconds of a bfloat16 product, detail). `size` is a power of two up to 256."""
    h = hadamard(size)
    want = size * torch.roll(torch.eye(size), -SHIFT, dims=1)
    us = -1.0
    for dtype in (torch.float32, torch.bfloat16):
        a = h.to(dtype).to(device.torch)
        b = torch.roll(h, -SHIFT, dims=0).to(dtype).to(device.torch)
        out = torch.full((size, size), float("nan"), dtype=dtype, device=device.torch)

        def run(x: Operand, w: Operand, out: torch.Tensor = out) -> torch.Tensor:
            return torch.mm(x[0], w[0].t(), out=out)

        run((a,), (b,))
        wrong = int((out.float().cpu() != want).sum())
        if wrong:
            return False, -1.0, f"{wrong} of {size * size} elements of a {size}x{size}x{size} {dtype} product are wrong"
        us = measure(device.timer(run, [(a,)], [(b,)], device.modes()[0]), Policy(), 0.2).us
    device.leave()
    return True, round(us, 4), f"{size}x{size}x{size} product exact in float32 and bfloat16"


def hadamard(size: int) -> torch.Tensor:
    """[size, size] of 1 and -1 in float32."""
    h = torch.ones(1, 1)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h
