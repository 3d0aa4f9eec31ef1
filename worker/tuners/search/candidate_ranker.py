"""Order of the candidates and the end of a search: its policy, pure, without clock or device.

A candidate begins with an estimate in microseconds (its source's). Measurements correct it: the log of
measured over estimated is a residual, and a candidate's residual is guessed from those measured near it,

    guess(i)      = (sum_j w_ij r_j + PULL * median r) / (sum_j w_ij + PULL),   w_ij = exp(-|f_i - f_j|^2 / 2)
    likely(i)     = estimate_i * exp(guess(i))
    optimistic(i) = estimate_i * exp(guess(i) - KAPPA * s / sqrt(1 + sum_j w_ij))

with f the candidate's features and s the spread of the residuals. (A Nadaraya-Watson regression with
a lower confidence bound.) The next candidate is the one of the least optimistic time. The search stops when no
candidate that is left could win by more than GAIN even by its optimistic time, and the last `patience` measured
brought nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PULL = 0.5
"""Weight of the median residual against one measured candidate of the same features."""
KAPPA = 1.0
SPREAD_AT_LEAST = 0.05
PRIOR = 0.5
"""Weight of a residual that a neighbouring shape measured."""
GAIN = 0.01
"""An improvement below this is none."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """Rule for when a search stops."""

    at_least: int = 24
    """Candidates measured before it may stop."""
    patience: int = 16
    at_most: int = 64
    all: bool = False
    """Exhaustive: stop only when every candidate was tried."""


class CandidateRanker:
    """The candidates of one shape, by their index. A measured candidate costs one pass over those that are left."""

    def __init__(self, estimates: Sequence[float], features: Sequence[Sequence[float]], rules: StopRules) -> None:
        self._estimates, self._features, self.rules = estimates, features, rules
        self._first: dict[int, int] = {}
        self._last: set[int] = set()
        self._left = set(range(len(estimates)))
        self._residuals: list[float] = []
        self._weight = [0.0] * len(estimates)
        self._sum = [0.0] * len(estimates)
        self._optimistic: dict[int, float] | None = None
        self._order: list[int] | None = None
        self.us: dict[int, float] = {}
        self._best_at = 0
        self.best = math.inf

    def first(self, indexes: Sequence[int]) -> None:
        """Put these before all others, in this order (winners of earlier runs)."""
        self._first = {i: rank for rank, i in enumerate(indexes)}
        self._order = None

    def last(self, i: int) -> None:
        """Put a candidate behind all others; it keeps no search going."""
        if i not in self._first:
            self._last.add(i)
            self._order = None

    def learn(self, other: CandidateRanker) -> None:
        """Take the residuals of a neighbouring shape for a first guess."""
        for j, residual in other.residuals().items():
            self._add(other._features[j], residual, PRIOR)

    def residuals(self) -> dict[int, float]:
        """Log of measured over estimated, by index."""
        return {i: math.log(us / self._estimates[i]) for i, us in self.us.items()}

    def measured(self, i: int, us: float) -> None:
        """A candidate's time."""
        self._left.discard(i)
        self.us[i] = us
        self._add(self._features[i], math.log(us / self._estimates[i]), 1.0)
        if us < self.best * (1 - GAIN):
            self._best_at = len(self.us)
        self.best = min(self.best, us)

    def failed(self, i: int) -> None:
        """A candidate that has no time."""
        self._left.discard(i)
        self._order = None

    def order(self) -> list[int]:
        """Candidates left, the most promising first."""
        if self._order is None:
            times, last = self._times(), len(self._first)
            self._order = sorted(self._left, key=lambda i: (self._first.get(i, last), i in self._last, times[i], i))
        return self._order

    def stop_reason(self) -> str:
        """Reason to stop, "" while the search goes on."""
        if not self._left:
            return "all were tried"
        if self.rules.all:
            return ""
        if len(self.us) >= self.rules.at_most:
            return f"{self.rules.at_most} were measured"
        if len(self.us) < self.rules.at_least or len(self.us) - self._best_at < self.rules.patience:
            return ""
        if any(i in self._left for i in self._first):
            return ""
        times = self._times()
        if any(self._could_win(times[i]) for i in self._left - self._last):
            return ""
        return "no candidate left can win"

    def _could_win(self, us: float) -> bool:
        return us < self.best * (1 - GAIN)

    def _add(self, at: Sequence[float], residual: float, weight: float) -> None:
        self._residuals.append(residual)
        for i in self._left:
            w = weight * _near(self._features[i], at)
            self._weight[i] += w
            self._sum[i] += w * residual
        self._optimistic = self._order = None

    def _times(self) -> dict[int, float]:
        """Optimistic times of the candidates left (and of some that have failed since)."""
        if self._optimistic is None:
            median = statistics.median(self._residuals) if self._residuals else 0.0
            off = statistics.median(abs(r - median) for r in self._residuals) if self._residuals else 0.0
            spread = max(SPREAD_AT_LEAST, 1.4826 * off) if self._residuals else 0.0
            self._optimistic = {
                i: self._estimates[i]
                * math.exp(
                    (self._sum[i] + PULL * median) / (self._weight[i] + PULL)
                    - KAPPA * spread / math.sqrt(1 + self._weight[i])
                )
                for i in self._left
            }
        return self._optimistic


def _near(a: Iterable[float], b: Iterable[float]) -> float:
    return math.exp(-sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / 2)
