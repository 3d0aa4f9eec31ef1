"""Rows of candidates: rates and rounding. Needs no torch at run time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from worker.protocol import Row
from worker.tuners.common.measure import Measurement
from worker.tuners.torch.problem import Problem

if TYPE_CHECKING:
    from worker.tuners.torch.candidate import Candidate

DETAIL = 300
"""Characters of a detail at most."""


def failed_row(c: Candidate, status: str, detail: str, err: float = 1.0) -> Row:
    """A candidate without a time."""
    return _row(c, -1.0, err, 0.0, 0.0, Row(status=status, spread=0.0, samples=0, detail=short(detail)))


def measured_row(c: Candidate, p: Problem, m: Measurement, err: float, detail: str = "") -> Row:
    """A candidate that is right, with its time."""
    about = Row(status="ok", spread=round(m.spread, 4), samples=m.samples, detail=short(detail))
    return _row(c, round(m.us, 4), err, figure(p.flops / m.us / 1e6), figure(p.moved_bytes / m.us / 1e3), about)


def figure(value: float) -> float:
    """Two decimals, as AITER has them, from 10 up; four significant digits below."""
    return round(value, 2) if value >= 10 else float(f"{value:.4g}")


def short(text: str) -> str:
    """The first line, cut."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= DETAIL else line[: DETAIL - 3] + "..."


def _row(c: Candidate, us: float, err: float, tflops: float, bw: float, about: Row) -> Row:
    row = Row(
        kernelId=c.kernel_id,
        splitK=c.variant.split_k,
        us=us,
        kernelName=c.name,
        libtype="torch",
        tflops=tflops,
        bw=bw,
        errRatio=0.0 if err == 0 else max(1e-6, round(err, 6)) if math.isfinite(err) else 1.0,
    )
    row.update(about)
    return row
