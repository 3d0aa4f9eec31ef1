"""The order in which a problem's candidates are measured, and when to stop.

Measurements correct the estimates (`time_model.py`): the log of measured over estimated is a residual, and a
candidate's residual is guessed from those measured near it,

    guess(i)      = (sum_j w_ij r_j + PULL * median r) / (sum_j w_ij + PULL),   w_ij = exp(-|f_i - f_j|^2 / 2)
    likely(i)     = estimate_i * exp(guess(i))
    optimistic(i) = estimate_i * exp(guess(i) - KAPPA * s / sqrt(1 + sum_j w_ij))

with f the candidate's features and s the spread of the residuals. (A Nadaraya-Watson regression with a lower confidence
bound.) The next candidate is the one of the least optimistic time. The search stops when no candidate that is left
could win by more than GAIN even by its optimistic time, and the last `patience` measured brought nothing. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PULL = 0.5
"""Weight of the median residual against one measured candidate of the same features."""
KAPPA = 1.0
"""Spreads that an optimistic time lies below the likely one, where nothing near was measured."""
LEAST_SPREAD = 0.05
PRIOR = 0.5
"""Weight of a residual that a neighbouring shape measured."""
GAIN = 0.01
"""A smaller improvement does not count."""
SIGMAS_IN_MEDIAN_DEVIATION = 1.4826
"""Standard deviation of normal noise over its median absolute deviation."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """Rule for when a search stops."""

    at_least: int = 24  # candidates measured before it may stop
    patience: int = 16
    at_most: int = 64
    all: bool = False  # exhaustive: stop only when every candidate was tried


class CandidateRanker:
    """The candidates of one shape, by their index. A measured candidate costs one pass over those that are left."""

    def __init__(self, estimates: Sequence[float], features: Sequence[Sequence[float]], rules: StopRules) -> None:
        self.rules = rules
        self.us: dict[int, float] = {}  # times of the measured
        self.best_us = math.inf
        self._estimates = estimates
        self._features = features
        self._first: dict[int, int] = {}  # rank of those that come first
        self._last: set[int] = set()
        self._left = set(range(len(estimates)))
        self._residuals: list[float] = []
        self._weights = [0.0] * len(estimates)  # by candidate, of the residuals measured near it
        self._weighted_residuals = [0.0] * len(estimates)
        self._measured_until_best = 0
        # kept until something changes
        self._optimistic_us: dict[int, float] | None = None
        self._order: list[int] | None = None

    def put_first(self, indexes: Sequence[int]) -> None:
        """Put these before all others, in this order (winners of earlier runs)."""
        self._first = {i: rank for rank, i in enumerate(indexes)}
        self._order = None

    def put_last(self, i: int) -> None:
        """Put a candidate behind all others; it keeps no search going."""
        if i not in self._first:
            self._last.add(i)
            self._order = None

    def learn_from(self, neighbour: CandidateRanker) -> None:
        """Take the residuals of a neighbouring shape for a first guess."""
        for j, us in neighbour.us.items():
            self._add_residual(neighbour._features[j], math.log(us / neighbour._estimates[j]), PRIOR)

    def add_time(self, i: int, us: float) -> None:
        """A candidate was measured."""
        self._left.discard(i)
        self.us[i] = us
        self._add_residual(self._features[i], math.log(us / self._estimates[i]), 1.0)
        if us < self.best_us * (1 - GAIN):
            self._measured_until_best = len(self.us)
        self.best_us = min(self.best_us, us)

    def drop(self, i: int) -> None:
        """A candidate will have no time."""
        self._left.discard(i)
        self._order = None

    def order(self) -> list[int]:
        """Candidates left, the most promising first."""
        if self._order is None:
            times = self._optimistic_times()
            behind_first = len(self._first)
            self._order = sorted(
                self._left, key=lambda i: (self._first.get(i, behind_first), i in self._last, times[i], i)
            )
        return self._order

    def is_done(self) -> bool:
        """True if all were tried or the most that may be, or if no candidate left can win."""
        if self.rules.all or not self._left:
            return not self._left
        if len(self.us) >= self.rules.at_most:
            return True
        if len(self.us) < max(self.rules.at_least, self._measured_until_best + self.rules.patience):
            return False
        if not self._left.isdisjoint(self._first):
            return False
        times = self._optimistic_times()
        return all(times[i] >= self.best_us * (1 - GAIN) for i in self._left - self._last)

    def _add_residual(self, features: Sequence[float], residual: float, weight: float) -> None:
        self._residuals.append(residual)
        for i in self._left:
            near = weight * _nearness(self._features[i], features)
            self._weights[i] += near
            self._weighted_residuals[i] += near * residual
        self._optimistic_us = None
        self._order = None

    def _optimistic_times(self) -> dict[int, float]:
        """Optimistic times of the candidates left (and of some that were dropped since)."""
        if self._optimistic_us is None:
            median = 0.0
            spread = 0.0
            if self._residuals:
                median = statistics.median(self._residuals)
                deviation = statistics.median(abs(residual - median) for residual in self._residuals)
                spread = max(LEAST_SPREAD, SIGMAS_IN_MEDIAN_DEVIATION * deviation)
            self._optimistic_us = {}
            for i in self._left:
                guess = (self._weighted_residuals[i] + PULL * median) / (self._weights[i] + PULL)
                margin = KAPPA * spread / math.sqrt(1 + self._weights[i])
                self._optimistic_us[i] = self._estimates[i] * math.exp(guess - margin)
        return self._optimistic_us


def _nearness(a: Iterable[float], b: Iterable[float]) -> float:
    return math.exp(-sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / 2)
