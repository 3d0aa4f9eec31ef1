"""Rows of Triton candidates. Needs neither torch nor triton."""

from __future__ import annotations

import math
import zlib

from worker.protocol import Row
from worker.tuners.torch.rows import figure, short
from worker.tuners.triton.candidate import Candidate
from worker.tuners.triton.problem import Problem


def row(
    c: Candidate, p: Problem, status: str, us: float, err: float = 1.0, spread: float = 0.0, samples: int = 0,
    detail: str = "",
) -> Row:  # fmt: skip
    """A candidate's row; `us` is -1 where there is no time. kernelId is a hash of the name, which says everything."""
    timed = us > 0
    return Row(
        kernelId=zlib.crc32(c.name.encode()) & 0x7FFFFFFF,
        splitK=c.split_k if c.split_k > 1 else 0,
        us=round(us, 4) if timed else -1.0,
        kernelName=c.name,
        libtype="triton",
        tflops=figure(p.flops / us / 1e6) if timed else 0.0,
        bw=figure(p.moved_bytes / us / 1e3) if timed else 0.0,
        errRatio=0.0 if err == 0 else max(1e-6, round(err, 6)) if math.isfinite(err) else 1.0,
        status=status,
        spread=round(spread, 4),
        samples=samples,
        detail=short(detail),
    )
