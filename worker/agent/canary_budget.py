"""Budget of the timed canaries of a slot: at most one percent of its time. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.01


@dataclass(slots=True)
class CanaryBudget:
    """`since`: seconds on some clock at which the slot began to work. `next_s`: what the next one is expected to take,
    None where the tuner has none. `closed`: one failed, and no other is tried.
    """

    since: float
    next_s: float | None = None
    spent_s: float = 0.0
    closed: bool = False

    def allows(self, now: float) -> bool:
        """True where another one would still be within SHARE of the time since `since`."""
        if self.closed or self.next_s is None:
            return False
        return self.spent_s + self.next_s <= SHARE * (now - self.since)

    def took(self, seconds: float) -> None:
        """Count one."""
        self.next_s = seconds
        self.spent_s += seconds
