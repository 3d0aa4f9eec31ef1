"""Two known kernels, timed alike on every GPU, by which slots are compared: one is compute-bound, one memory-bound.

Each runs at the clock that the GPU can sustain. The times say which GPU is slow; no candidate's time is ever scaled by
them.
"""

from __future__ import annotations

import torch

from worker.tuners.common.device import Device, Operand, Run
from worker.tuners.common.measure import SamplingPolicy, measure

SIZE, CPU_SIZE = 4096, 512
"""M, N and K of the product: bfloat16 on a GPU, float32 on a CPU."""
COPIED, CPU_COPIED = 1 << 30, 64 << 20
"""Bytes of the copy's source: more than four times the last-level cache (MI300 and MI355X: 256 MB)."""
POLICY = SamplingPolicy(min_sample_s=0.01, min_samples=5, max_samples=5, settle_s=0.05)
CAP_S = 2.0


def timed_canary(device: Device) -> tuple[float, float]:
    """Microseconds of a product of random matrices and of a copy; -1 each where the memory has no room for them."""
    size, copied = (SIZE, COPIED) if device.gpu else (CPU_SIZE, CPU_COPIED)
    if device.available() < 4 * copied:
        return -1.0, -1.0
    draw = torch.Generator(device=device.torch).manual_seed(0)
    dtype = torch.bfloat16 if device.gpu else torch.float32
    try:
        a, b = (torch.rand(size, size, generator=draw, device=device.torch).sub_(0.5).to(dtype) for _ in range(2))
        product = torch.empty(size, size, dtype=dtype, device=device.torch)
        compute = _us(device, lambda x, w: torch.mm(x[0], w[0], out=product), (a,), (b,))
        source = torch.ones(copied, dtype=torch.uint8, device=device.torch)
        return compute, _us(device, lambda x, w: w[0].copy_(x[0]), (source,), (torch.empty_like(source),))
    finally:
        device.leave()


def _us(device: Device, run: Run, x: Operand, w: Operand) -> float:
    timer = device.timer(run, [x], [w], device.modes()[0])
    return round(measure(timer, POLICY, CAP_S).us, 4)
