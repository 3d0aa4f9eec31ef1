"""Seconds until a run ends, as a range: before its start by what is known of such runs, then by the run itself.

One factor is not known: how much slower or faster this machine is than the cost model thinks. It is taken as
log-normal. Before the start only the model speaks (`spread`); every group that is over, and every one that is under way
for longer than it should be, makes it better known.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CERTAIN = 1.645
"""Standard deviations to each side: nine of ten truths lie between `low_s` and `high_s`."""
NOISE = 0.35
"""Standard deviation of the log of one group's time over its estimate, before this run shows its own."""
NOISE_WEIGHT = 4.0
"""Weight of NOISE, in groups of the run."""
MOST_SCHEDULED = 4096
"""Number of groups above which their end is computed from sums."""
LEAST_S = 1.0
"""Lower bound of the time left while something is under way."""


@dataclass(frozen=True, slots=True)
class Range:
    """Seconds: most likely `mid_s`; nine times of ten between the other two."""

    low_s: float
    mid_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A group that a slot works on.

    `estimate_s`: of the whole group, with its set-up. `done_s`: of that what is behind it, by the same estimate (0
    while nothing of it is settled). `took_s`: seconds from its start until its last shape was settled. `since_s`:
    seconds since then (since its start where nothing is settled).
    """

    estimate_s: float
    done_s: float
    took_s: float
    since_s: float
    next_s: float = 0.0
    """Estimate of the shape in flight, with the set-up where nothing is settled; 0: not known."""


class Measured:
    """Groups that are over, as sums of their (estimate, measured) seconds: a run has many."""

    __slots__ = ("count", "estimated", "log", "log2", "measured", "squared")

    def __init__(self, pairs: Iterable[tuple[float, float]] = ()) -> None:
        self.count, self.estimated, self.measured, self.squared = 0, 0.0, 0.0, 0.0
        self.log, self.log2 = 0.0, 0.0
        for estimate, took in pairs:
            self.add(estimate, took)

    def add(self, estimate: float, took: float) -> None:
        """Add a group; one without an estimate or a time says nothing."""
        if estimate <= 0 or took <= 0:
            return
        log = math.log(took / estimate)
        self.count += 1
        self.estimated += estimate
        self.measured += took
        self.squared += estimate * estimate
        self.log += log
        self.log2 += log * log

    def __add__(self, other: Measured) -> Measured:
        out = Measured()
        for name in self.__slots__:
            setattr(out, name, getattr(self, name) + getattr(other, name))
        return out


def seconds_left(
    waiting: Sequence[float],
    slots: int,
    *,
    spread: float,
    over: Measured | Iterable[tuple[float, float]] = (),
    running: Sequence[UnderWay] = (),
    start: Range | None = None,
) -> Range | None:
    """Seconds until the last group is over; None where nothing is left to be done.

    `waiting`: estimates (set-up included) of the groups that nobody works on. `slots`: those that take work, or soon
    will. `spread`: the factor, 1 or more, by which the model's estimate of a whole run may be off to either side
    (CostModel.spread). `over`: (estimate, measured) seconds of the groups that are over, each for what it settled.
    `start`: seconds until an idle slot can begin, while slots are still being prepared.
    """
    if not waiting and not running:
        return None
    factor, known, noise = _factor(over if isinstance(over, Measured) else Measured(over), running, spread)
    off = math.sqrt(known * known + noise * noise * max(1, slots) / (len(waiting) + len(running) + slots))
    begins = start or Range(0.0, 0.0, 0.0)
    low, mid, high = (
        max(LEAST_S, at + _end(waiting, running, slots, factor * math.exp(shift * off), shift))
        for at, shift in ((begins.low_s, -CERTAIN), (begins.mid_s, 0.0), (begins.high_s, CERTAIN))
    )
    return Range(low, mid, high)


def _factor(over: Measured, running: Sequence[UnderWay], spread: float) -> tuple[float, float, float]:
    """(measured over estimated seconds, standard deviation of its log, that of a single group)."""
    prior = max(1e-3, math.log(max(1.0, spread)) / CERTAIN)
    factor = _posterior(over + Measured((u.done_s, u.took_s) for u in running), prior)[0]
    # an overdue shape in flight is evidence as well: it takes at least the time so far
    return _posterior(over + Measured(_so_far(u, factor) for u in running), prior)


def _so_far(u: UnderWay, factor: float) -> tuple[float, float]:
    late = u.done_s + _next(u), u.took_s + u.since_s
    return late if late[1] > factor * late[0] else (u.done_s, u.took_s)


def _posterior(seen: Measured, prior: float) -> tuple[float, float, float]:
    """(factor, standard deviation of its log, that of a single group)."""
    if not seen.count:
        return 1.0, prior, NOISE
    ratio = math.log(seen.measured / seen.estimated)
    count = seen.estimated * seen.estimated / seen.squared
    scatter = max(0.0, seen.log2 - 2.0 * ratio * seen.log + seen.count * ratio * ratio)
    noise = math.sqrt((NOISE_WEIGHT * NOISE * NOISE + scatter) / (NOISE_WEIGHT + seen.count))
    weight, before = count / (noise * noise), 1.0 / (prior * prior)
    return math.exp(ratio * weight / (weight + before)), 1.0 / math.sqrt(weight + before), noise


def _next(u: UnderWay) -> float:
    return u.next_s or (u.estimate_s - u.done_s)


def _end(waiting: Sequence[float], running: Sequence[UnderWay], slots: int, factor: float, shift: float) -> float:
    """Seconds until the last group is over, each taking `factor` times its estimate, the longest first."""
    busy = sorted(_rest(u, factor, shift) for u in running)
    slots = max(1, slots, len(busy))
    free = [0.0] * (slots - len(busy)) + busy
    last = free[-1]
    if len(waiting) > MOST_SCHEDULED:
        total = factor * sum(waiting)
        return max(last, (sum(free) + total) / slots + total / len(waiting), factor * max(waiting))
    for seconds in sorted(waiting, reverse=True):
        at = heapq.heappop(free) + factor * seconds
        heapq.heappush(free, at)
        last = max(last, at)
    return last


def _rest(u: UnderWay, factor: float, shift: float) -> float:
    """Seconds that a group under way still takes: the longer it is overdue, the longer."""
    current = factor * _next(u)
    later = factor * max(0.0, u.estimate_s - u.done_s - _next(u))
    overdue = u.since_s * 0.2 * math.exp(shift)
    return max(current - u.since_s, overdue, 0.0) + later
