"""Seconds until a run ends, as a range: before its start by what is known of such runs, then by the run itself.

One factor is not known: how much slower or faster this machine is than the cost model thinks. It is taken as
log-normal. Before the start only the model speaks (`spread`); every group that is over, and every one that is under way
for longer than it should be, makes it better known. `tune --plan` and `status` call `seconds_left`.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

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
OVERDUE = 0.2
"""A shape that is overdue takes about this share of its time so far longer."""


@dataclass(frozen=True, slots=True)
class Range:
    """Seconds: most likely `mid_s`; nine times of ten between the other two."""

    low_s: float
    mid_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A group that a slot works on."""

    estimate_s: float
    """Estimate of the whole group, with its set-up."""
    done_s: float
    """The part of the estimate that is behind it: 0 while nothing of it is settled."""
    took_s: float
    """Seconds from its start until its last shape was settled."""
    since_s: float
    """Seconds since then (since its start where nothing is settled)."""
    next_s: float = 0.0
    """Estimate of the shape in flight, with the set-up where nothing is settled; 0: not known."""


@dataclass(slots=True)
class FinishedGroups:
    """Groups that are over, as sums over all of them, because a run has many."""

    count: int = 0
    estimated: float = 0.0
    """Seconds that the model estimated for them."""
    measured: float = 0.0
    """Seconds that they took."""
    squared: float = 0.0
    """Squares of the estimates."""
    log: float = 0.0
    """Logarithms of measured over estimated."""
    log2: float = 0.0
    """Squares of these logarithms."""

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[float, float]]) -> FinishedGroups:
        """The sums over groups that ended, from their (estimated, measured) seconds."""
        groups = cls()
        for estimate, took in pairs:
            groups.add(estimate, took)
        return groups

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

    def __add__(self, other: FinishedGroups) -> FinishedGroups:
        return FinishedGroups(*map(operator.add, astuple(self), astuple(other)))


def seconds_left(
    waiting: Sequence[float],
    slots: int,
    *,
    spread: float,
    finished: FinishedGroups | None = None,
    running: Sequence[UnderWay] = (),
    start: Range | None = None,
) -> Range | None:
    """Seconds until the last group is over; None where nothing is left to be done.

    `waiting`: estimates (set-up included) of the groups that nobody works on. `slots`: those that take work, or soon
    will. `spread`: the factor, 1 or more, by which the model's estimate of a whole run may be off to either side
    (CostModel.spread). `finished`: the groups that are over, each for what it settled.
    `start`: seconds until an idle slot can begin, while slots are still being prepared.
    """
    if not waiting and not running:
        return None
    speed = _measure_speed(finished or FinishedGroups(), running, spread)
    # the noise of single groups evens out over the groups of a slot
    group_variance = speed.noise * speed.noise * max(1, slots) / (len(waiting) + len(running) + slots)
    deviation = math.sqrt(speed.deviation * speed.deviation + group_variance)
    if start is None:
        start = Range(0.0, 0.0, 0.0)

    def end(start_s: float, shift: float) -> float:
        factor = speed.factor * math.exp(shift * deviation)
        return max(LEAST_S, start_s + _seconds_of_groups(waiting, running, slots, factor, shift))

    return Range(end(start.low_s, -CERTAIN), end(start.mid_s, 0.0), end(start.high_s, CERTAIN))


class Speed(NamedTuple):
    """A machine's slowness beside the model. `factor`: measured over estimated seconds; `deviation`: the standard
    deviation of its log; `noise`: that of a single group."""

    factor: float
    deviation: float
    noise: float


def _measure_speed(finished: FinishedGroups, running: Sequence[UnderWay], spread: float) -> Speed:
    prior = max(1e-3, math.log(max(1.0, spread)) / CERTAIN)
    settled = FinishedGroups.from_pairs((group.done_s, group.took_s) for group in running)
    factor = _posterior(finished + settled, prior).factor
    # an overdue shape in flight is evidence as well: it takes at least the time so far
    so_far = FinishedGroups.from_pairs(_evidence_of(group, factor) for group in running)
    return _posterior(finished + so_far, prior)


def _evidence_of(group: UnderWay, factor: float) -> tuple[float, float]:
    """(estimated, measured) seconds of what a group under way shows: with the shape in flight if it is overdue."""
    estimated = group.done_s + _seconds_in_flight(group)
    so_far = group.took_s + group.since_s
    return (estimated, so_far) if so_far > factor * estimated else (group.done_s, group.took_s)


def _posterior(seen: FinishedGroups, prior: float) -> Speed:
    """The speed by a normal prior of its log (mean 0, deviation `prior`) and the groups that were seen."""
    if not seen.count:
        return Speed(1.0, prior, NOISE)
    ratio = math.log(seen.measured / seen.estimated)
    count = seen.estimated * seen.estimated / seen.squared  # long groups count more than short ones
    scatter = max(0.0, seen.log2 - 2.0 * ratio * seen.log + seen.count * ratio * ratio)
    noise = math.sqrt((NOISE_WEIGHT * NOISE * NOISE + scatter) / (NOISE_WEIGHT + seen.count))
    weight = count / (noise * noise)
    prior_weight = 1.0 / (prior * prior)
    factor = math.exp(ratio * weight / (weight + prior_weight))
    return Speed(factor, 1.0 / math.sqrt(weight + prior_weight), noise)


def _seconds_in_flight(group: UnderWay) -> float:
    """Estimate of the shape in flight; of all that is left where that is not known."""
    return group.next_s or (group.estimate_s - group.done_s)


def _seconds_of_groups(
    waiting: Sequence[float], running: Sequence[UnderWay], slots: int, factor: float, shift: float
) -> float:
    """Seconds until the last group is over, each taking `factor` times its estimate, the longest first."""
    busy = sorted(_seconds_left_of(group, factor, shift) for group in running)
    slots = max(1, slots, len(busy))
    free_at = [0.0] * (slots - len(busy)) + busy
    last = free_at[-1]
    if len(waiting) > MOST_SCHEDULED:
        total = factor * sum(waiting)
        return max(last, (sum(free_at) + total) / slots + total / len(waiting), factor * max(waiting))
    for seconds in sorted(waiting, reverse=True):
        end = heapq.heappop(free_at) + factor * seconds
        heapq.heappush(free_at, end)
        last = max(last, end)
    return last


def _seconds_left_of(group: UnderWay, factor: float, shift: float) -> float:
    """Seconds that a group under way still takes: the longer it is overdue, the longer."""
    in_flight = _seconds_in_flight(group)
    current = factor * in_flight
    later = factor * max(0.0, group.estimate_s - group.done_s - in_flight)
    overdue = group.since_s * OVERDUE * math.exp(shift)
    return max(current - group.since_s, overdue, 0.0) + later
