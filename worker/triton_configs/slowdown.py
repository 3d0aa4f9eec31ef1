"""The rule by which a new config counts as slower than today's: one for tuners, merges and benchmarks."""

from __future__ import annotations

FACTOR = 1.005
"""A time may grow by this factor, and by SLACK_US more: the timer's noise."""
SLACK_US = 0.5
IGNORED_US = 4.0
"""Below this time the timer's noise decides, so nothing counts."""


def is_slower(old_us: float, new_us: float) -> bool:
    """True where an M counts as made slower: above 1.005 x old + 0.5 us. Below 4 us nothing counts."""
    return max(old_us, new_us) >= IGNORED_US and new_us > FACTOR * old_us + SLACK_US
