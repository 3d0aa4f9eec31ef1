"""What is left of a run, in words."""

from __future__ import annotations

from orchestrator.status import duration

WIDE = 1.6
"""A range whose ends are further apart than that is given as one."""


def left_words(low_s: float, mid_s: float, high_s: float) -> str:
    """`about 2 min 05 s`, or `1 min 10 s to 4 min 00 s` where nobody knows better."""
    if high_s > WIDE * low_s:
        low, high = duration(_round(low_s)), duration(_round(high_s))
        return f"{low} to {high}" if low != high else f"about {low}"
    return f"about {duration(_round(mid_s))}"


def _round(seconds: float) -> float:
    """Whole minutes where seconds mean nothing."""
    s = max(1.0, seconds)
    return s if s < 120 else round(s / 5) * 5 if s < 600 else round(s / 60) * 60
