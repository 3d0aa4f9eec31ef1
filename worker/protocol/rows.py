"""Rows: measured candidates as workers tell them."""

from __future__ import annotations

from typing import TypedDict


class Row(TypedDict, total=False):
    """One measured candidate. `us` is device time in microseconds, -1 where there is none.

    tflops = 2*M*N*K*B / us / 1e6; bw in GB/s of operands read once and output written once;
    errRatio = share of output elements beyond atol + rtol*|reference| (1e-2 each), as AITER measures it.
    """

    kernelId: int
    splitK: int
    us: float
    kernelName: str
    libtype: str
    tflops: float
    bw: float
    errRatio: float
    status: str
    """ok, wrong (errRatio beyond the limit), unsupported, error, oom or timeout"""
    spread: float
    """Half the interquartile range of the samples over their median."""
    samples: int
    detail: str


class BenchRow(Row, total=False):
    """One run of a backend (worker/bench), or why it has none (run 0, us -1, or the shape's verdict).

    `libtype` is the backend. Further statuses: unavailable (this backend cannot run here), fault (its process died),
    untimed (right, but no time was taken).
    """

    run: int
    """1, 2, ...: the round; equal numbers were measured side by side."""
    env: str
    """The software stack's name; "" where there is one only."""
    op: str
    """The operation by a name that is the same over dates and stacks."""
    timer: str


class FmoeRow(Row, total=False):
    """With the two stages that AITER's tuner of fused MoE writes."""

    block_m: int
    run_1stage: int
    xbf16: int
    flat: int
    us1: float
    us2: float
    kernelName1: str
    kernelName2: str
    err1: str
    err2: str
