"""Judges a shape by its rows: AITER's winner, the best of its candidates, or the reason why there is no winner.

tracker.py calls `shape_verdict` when AITER is through with a shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from worker.families import Family
from worker.protocol import Row
from worker.text import plural


@dataclass(frozen=True, slots=True)
class ShapeVerdict:
    """A winner, or a reason (one of SHAPE_VERDICTS) and a detail."""

    winner: Row | None
    reason: str = ""
    detail: str = ""


def shape_verdict(
    family: Family, tuned: Row | None, candidates: Sequence[Row], limit: float, *, chip: str = "", blocked: int = 0
) -> ShapeVerdict:
    """AITER's own winner if it is valid, else the best of its candidates, else the reason why there is no winner.

    `tuned`: the row of AITER's tuned table. `limit`: the largest errRatio. `chip`: AITER's message that the family is
    not for this chip, if any. `blocked`: how many candidates were not tried because they had faulted before.
    """
    if tuned is not None and not _flaw(tuned, limit):
        return ShapeVerdict(tuned)
    no_winner = "AITER named no winner"
    if tuned is not None:
        no_winner = f"AITER's own winner cannot be ({_flaw(tuned, limit)})"
    best = None if family.two_stages else _best(candidates, limit)  # no profile row of fmoe is a pair of stages
    if best is not None:
        return ShapeVerdict({**best, "detail": f"chosen among AITER's measured candidates: {no_winner}"})
    if chip:
        return ShapeVerdict(None, "unsupported", chip)
    if not candidates and tuned is not None:
        return ShapeVerdict(None, "no_candidate", f"AITER's winner cannot be ({_flaw(tuned, limit)})")
    if not candidates:
        return ShapeVerdict(None, "no_candidate", "AITER found no kernel that takes the shape")
    if family.two_stages:
        candidates = _of_failed_stages(candidates)
        if not candidates:
            return ShapeVerdict(None, "no_candidate", "each stage has right kernels, but no two of one block_m")
    return _failure(candidates, limit, blocked)


def _best(candidates: Sequence[Row], limit: float) -> Row | None:
    """The fastest correct row, the first of equals."""
    valid = [row for row in candidates if row.get("status") == "ok" and not _flaw(row, limit)]
    return min(valid, key=lambda row: row["us"]) if valid else None


def _of_failed_stages(candidates: Sequence[Row]) -> list[Row]:
    """Without the rows of a stage that has a right kernel: the other one is why there is no winner."""
    working_stages = {_stage(row) for row in candidates if row.get("status") == "ok"} - {0}
    return [row for row in candidates if _stage(row) not in working_stages]


def _failure(candidates: Sequence[Row], limit: float, blocked: int) -> ShapeVerdict:
    count = plural(len(candidates), "candidate")
    measured = [row for row in candidates if any(row.get(column, -1) > 0 for column in ("us", "us1", "us2"))]
    if measured:
        least = min(row.get("errRatio", math.inf) for row in measured)
        least_text = f"{least:.3g}" if math.isfinite(least) else "unknown"
        detail = f"{len(measured)} of {count} ran, none is right: the least error is {least_text}, the limit {limit:g}"
        return ShapeVerdict(None, "wrong_result", detail)
    errors = len([row for row in candidates if row.get("status") == "error"])
    blocked = min(blocked, errors)
    detail = f"none of {count} ran: {len(candidates) - errors} cannot take the shape,"
    detail += f" {errors - blocked} crashed, hung or raised"
    if blocked:
        detail += f", {blocked} were left out, for they had faulted before"
    return ShapeVerdict(None, "no_candidate", detail)


def _stage(row: Row) -> int:
    """1 or 2 for a stage measured alone, 0 for a pair or for one kernel that does both."""
    has_first = bool(row.get("kernelName1"))
    has_second = bool(row.get("kernelName2"))
    if row.get("run_1stage") or has_first == has_second:
        return 0
    return 1 if has_first else 2


def _flaw(row: Row, limit: float) -> str:
    """The reason why a row cannot be a shape's winner, "" if it can."""
    if row["us"] <= 0:
        return "it has no time"
    if row.get("errRatio", 1.0) > limit:
        return f"its error is {row.get('errRatio', math.nan):g}, the limit {limit:g}"
    return "" if row["kernelName"] else "it names no kernel"
