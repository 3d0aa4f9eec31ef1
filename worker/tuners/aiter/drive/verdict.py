"""The verdict on one shape, from what AITER wrote about it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from worker.families import Family
from worker.protocol import Row
from worker.tuners.aiter.drive.harvest import best, is_winner


@dataclass(frozen=True, slots=True)
class Verdict:
    """A winner, or a reason (of SHAPE_VERDICTS) and words."""

    winner: Row | None
    reason: str = ""
    detail: str = ""


def judge(
    family: Family,
    tuned: Row | None,
    candidates: Sequence[Row],
    limit: float,
    *,
    hipblaslt_ratio: float | None = None,
    chip: str = "",
    wrong: int = 0,
    left_out: int = 0,
) -> Verdict:
    """AITER's own winner where it is sound, else the best of its candidates, else why there is none.

    `chip`: AITER's words where it says that the family is not for this chip. `wrong`: how many candidates' comparison
    raised, which have no time in AITER's files. `left_out`: how many were not tried, as they had faulted before.
    """
    if tuned is not None and is_winner(tuned, limit):
        return Verdict(tuned)
    if not family.two_stages:  # its winner is a pair of stages, which a profile row is not
        made = best(candidates, limit, hipblaslt_ratio=hipblaslt_ratio)
        if made is not None:
            why = "AITER named no winner" if tuned is None else f"AITER's own winner cannot be ({_fault(tuned, limit)})"
            return Verdict({**made, "detail": f"chosen among AITER's measured candidates: {why}"})
    if chip:
        return Verdict(None, "unsupported", chip)
    measured = [r for r in candidates if r["us"] > 0]
    if tuned is not None and not candidates:
        return Verdict(None, "no_candidate", f"AITER's winner cannot be ({_fault(tuned, limit)})")
    if not candidates:
        return Verdict(None, "no_candidate", "AITER found no kernel that takes the shape")
    if measured:
        least = min((r.get("errRatio", math.inf) for r in measured), default=math.inf)
        shown = f"{least:.3g}" if math.isfinite(least) else "unknown"
        words = f"{len(measured)} of {len(candidates)} candidates ran, none is right: the least error is {shown}"
        return Verdict(None, "wrong_result", f"{words}, the limit {limit:g}")
    if wrong:
        words = f"{wrong} of {len(candidates)} candidates ran and computed wrong values (AITER tells no error of them)"
        return Verdict(None, "wrong_result", words)
    lost = sum(1 for r in candidates if r.get("status") == "error") - left_out
    cannot = len(candidates) - lost - left_out
    parts = [f"{cannot} cannot take the shape", f"{lost} crashed, hung or raised"]
    parts += [f"{left_out} were left out, for they had faulted before"] if left_out else []
    return Verdict(None, "no_candidate", f"none of {len(candidates)} candidates ran: {', '.join(parts)}")


def _fault(row: Row, limit: float) -> str:
    if row["us"] <= 0:
        return "it has no time"
    if row.get("errRatio", 1.0) > limit:
        return f"its error is {row.get('errRatio', math.nan):g}, the limit {limit:g}"
    return "it names no kernel"
