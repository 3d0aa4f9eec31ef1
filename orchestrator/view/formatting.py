"""Times as text for people: a time of day, a duration, the time that is left, and the time that a run has worked.

The page of a run has its own short forms, made in the browser: `lasting` in templates/report/figures.js.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from worker.text import and_more

UNCERTAIN = 1.6
"""If the ends of an estimate are further apart than this factor, we show a range."""


def clock(t: float) -> str:
    """Time of day on the controller's clock."""
    return time.strftime("%H:%M:%S", time.localtime(t))


def duration(seconds: float | None) -> str:
    """Duration as text: 8 s, 2 min 05 s, 3 h 10 min."""
    if seconds is None:
        return "unknown"
    s = max(0, round(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60:02d} s"
    return f"{s // 3600} h {s % 3600 // 60:02d} min"


def describe_time_left(low_s: float, mid_s: float, high_s: float) -> str:
    """`about 2 min 05 s`, or `1 min 10 s to 4 min 00 s` if the estimate is uncertain."""
    if high_s <= UNCERTAIN * low_s:
        return f"about {duration(_round_estimate(mid_s))}"
    low = duration(_round_estimate(low_s))
    high = duration(_round_estimate(high_s))
    return f"about {low}" if low == high else f"{low} to {high}"


def _round_estimate(seconds: float) -> float:
    """Round to 5 s from 2 min on, and to a minute from 10 min on: an estimate knows no more."""
    if seconds < 120:
        return max(1.0, seconds)
    step = 5 if seconds < 600 else 60
    return round(seconds / step) * step


def describe_uncounted_wait(awaited: Sequence[str]) -> str:
    """`, not counting the wait for n1 and the queue of pool`, behind an estimate; "" if nothing is awaited."""
    return f", not counting the wait for {and_more(awaited, 3)}" if awaited else ""


def describe_work_time(sessions: Sequence[Sequence[float]]) -> str:
    """`1 min 30 s`, or `1 min 30 s (over 3 sessions from Nov 21 18:02 to Nov 22 09:14)`; "" before the first one."""
    if not sessions:
        return ""
    worked = duration(sum(end - start for start, end in sessions))
    if len(sessions) == 1:
        return worked
    return f"{worked} (over {len(sessions)} sessions from {_date(sessions[0][0])} to {_date(sessions[-1][1])})"


def _date(t: float) -> str:
    return time.strftime("%b %d %H:%M", time.localtime(t))
