"""The M of a file that are worth a measurement beside the workload's. Pure.

`ms_within` names the M of a server within the ranges of the keys that were searched. `ms_to_close` looks at what was
measured and names the next ones: between two ranges of different configs the two neighbours between which the model of
times expects the faster one to change, and within a range an M at which it expects another config to be clearly faster.

Times go up in steps, one for each further wave of tiles over the device, so a config is overtaken where its own next
wave begins: behind a multiple of its BLOCK_SIZE_M.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.triton_configs.cutting import KEEP, CutRange, MeasuredPoint, are_neighbours
from worker.triton_configs.m_ranges import CAPTURE_SIZES, PREFILL_CHUNKS, USUAL_KEYS, ranges_served

STEP = 16
"""The fewest rows of a tile: waves begin behind a multiple of it."""
MOST_STARTS = 12
"""Starts of waves that are looked at between two measured M."""
NEAR_KEYS = 2
"""Winners of this many searches on either side of an M are measured there."""
RIVALS = 2
"""The fastest configs of an M that may be faster next to it."""
LOSS = 0.03
"""A config that is expected to lose this share to another is measured there."""

Estimate = Callable[[str, int], float]
"""The model's microseconds of a config, by its name, at an M; infinite for one that it does not know."""


def ms_within(keys: Sequence[int], last_m: int) -> tuple[list[int], list[list[int]]]:
    """The M to measure for the searched usual keys, up to `last_m`: those by which ranges hold together (the key and
    both ends of the range that it serves), then chunks of prefill and capture sizes in steps, from coarse to fine."""
    ranges = ranges_served(USUAL_KEYS)
    served = [(ranges[key][0], ranges[key][1] or last_m) for key in keys]
    frame = {*keys}
    for first, last in served:
        frame |= {first, last}
    steps = [PREFILL_CHUNKS, *(CAPTURE_SIZES[::step] for step in (4, 2, 1))]

    def is_served(m: int) -> bool:
        return any(first <= m <= last for first, last in served)

    return sorted(frame), [list(filter(is_served, step)) for step in steps]


@dataclass(frozen=True, slots=True)
class FileTimes:
    """The knowledge of a file: its points, its ranges and the model. M are compared at the first routing alone."""

    points: Sequence[MeasuredPoint]
    ranges: Sequence[CutRange]
    estimate: Estimate

    def config_at(self, point: MeasuredPoint) -> str:
        """The config that a measured M gets."""
        chosen = next((r.config for r in self.ranges if r.first <= point.m <= r.last), KEEP)
        return chosen if chosen != KEEP else point.today

    def expected_us(self, config: str, m: int, near: MeasuredPoint) -> float:
        """The time of a config at an M by its time at a point nearby, and the model's ratio between the two."""
        if config not in near.us:
            return math.inf
        return near.us[config] * self.estimate(config, m) / self.estimate(config, near.m)

    def expected_at(self, config: str, m: int) -> float:
        """The least time of a config at an M that its nearest measured M below and above let expect; 0 for one that was
        not measured."""
        measured = [point for point in self.points if config in point.us]
        below = max((point.m for point in measured if point.m <= m), default=0)
        above = min((point.m for point in measured if point.m > m), default=0)
        near = [point for point in measured if point.m in (below, above)]
        return min((self.expected_us(config, m, point) for point in near), default=0.0)


def nearest_keys(keys: Sequence[int], m: int) -> set[int]:
    """The searched keys nearest to an M, NEAR_KEYS on either side."""
    below = [key for key in keys if key <= m]
    above = [key for key in keys if key > m]
    return {*below[-NEAR_KEYS:], *above[:NEAR_KEYS]}


def ms_to_close(times: FileTimes) -> list[int]:
    """The next M to measure, those between two ranges first."""
    by_m = {point.m: point for point in reversed(times.points)}  # of several routings the first
    between: list[int] = []
    within: list[tuple[float, int]] = []
    for low, high in itertools.pairwise(by_m[m] for m in sorted(by_m)):
        if low.m + 1 == high.m or not are_neighbours(low.m, high.m, low.label):
            continue
        if times.config_at(low) != times.config_at(high):
            change = _expected_change(times, low, high)
            between += [change - 1, change]
        else:
            within.append(_largest_loss(times, low, high))
    lossy = [m for loss, m in sorted(within, reverse=True) if loss > LOSS]
    return [*between, *lossy]


def _wave_starts(low: int, high: int) -> list[int]:
    """First M of waves that may begin above `low` and up to `high`, at most MOST_STARTS of them, evenly."""
    starts = [m for m in range(low - low % STEP + STEP + 1, high + 1, STEP) if m > low]
    return starts[:: -(-len(starts) // MOST_STARTS)] if starts else []


def _expected_change(times: FileTimes, low: MeasuredPoint, high: MeasuredPoint) -> int:
    """The least M from which on the upper config is expected to be the faster one. Where that is the end of the gap
    (the model was wrong there, for the upper M was measured) the middle one of the starts of waves."""
    lower_config = times.config_at(low)
    upper_config = times.config_at(high)
    starts = _wave_starts(low.m, high.m - 1)
    change = high.m
    for m in reversed(starts):
        if times.expected_us(upper_config, m, high) > times.expected_us(lower_config, m, low):
            break
        change = m
    if change == high.m and starts:
        return starts[len(starts) // 2]
    return change


def _largest_loss(times: FileTimes, low: MeasuredPoint, high: MeasuredPoint) -> tuple[float, int]:
    """The largest share of time that the config of two neighbours is expected to lose between them, to today's or to
    the fastest of either, and the M."""
    config = times.config_at(low)
    rivals = {low.today, high.today}
    for point in (low, high):
        rivals |= set(sorted(point.us, key=lambda name: point.us[name])[:RIVALS])
    worst = (0.0, low.m)
    for m in _wave_starts(low.m, high.m - 1):
        fastest = min(times.expected_us(name, m, low) for name in rivals)
        worst = max(worst, (times.expected_us(config, m, low) / fastest - 1, m))
    return worst
