"""Rows of our own tuners' candidates: rates and rounding. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from worker.protocol import Row
from worker.text import plural
from worker.tuners.common.problem import Problem

DETAIL = 300
"""Characters of a detail at most."""


def row_of(
    p: Problem, tuner: str, kernel: str, kernel_id: int, split_k: int, status: str, us: float = -1.0,
    err: float = 1.0, spread: float = 0.0, samples: int = 0, detail: str = "",
) -> Row:  # fmt: skip
    """A candidate's row; `us` is -1 where it has no time, and its rates are 0 then."""
    timed = us > 0
    return Row(
        kernelId=kernel_id,
        splitK=split_k,
        us=round(us, 4) if timed else -1.0,
        kernelName=kernel,
        libtype=tuner,
        tflops=figure(p.flops / us / 1e6) if timed else 0.0,
        bw=figure(p.moved_bytes / us / 1e3) if timed else 0.0,
        errRatio=0.0 if err == 0 else max(1e-6, round(err, 6)) if math.isfinite(err) else 1.0,
        status=status,
        spread=round(spread, 4),
        samples=samples,
        detail=short(detail),
    )


def figure(value: float) -> float:
    """Two decimals, as AITER has them, from 10 up; four significant digits below."""
    return round(value, 2) if value >= 10 else float(f"{value:.4g}")


def short(text: str) -> str:
    """The first line, cut."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= DETAIL else line[: DETAIL - 3] + "..."


def why_no_winner(rows: Sequence[Row], limit: float) -> tuple[str, str]:
    """Reason and detail of a shape none of whose candidates may win; `limit` is that of errRatio."""
    by = {s: [r for r in rows if r["status"] == s] for s in ("wrong", "unsupported", "oom", "error", "timeout")}
    counts = ", ".join(f"{len(v)} {s}" for s, v in by.items() if v)
    if by["wrong"]:
        least = min(r["errRatio"] for r in by["wrong"])
        detail = f"of {plural(len(rows), 'candidate')}: {counts}; the least errRatio is {least:g}, the limit {limit:g}"
        return "wrong_result", detail
    reason = "unsupported" if rows and len(by["unsupported"]) == len(rows) else "no_candidate"
    first = f"; {rows[0]['kernelName']}: {rows[0]['detail']}" if rows else ""
    return reason, f"of {plural(len(rows), 'candidate')}: {counts or 'none ran'}{first}"
