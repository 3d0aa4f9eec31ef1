"""The M of a file that are worth a measurement beside the workload's. Pure.

`EngineFile` calls `ms_within` once, for the M of a server within the ranges of the keys that were searched. Then it
calls `ms_to_close` again and again: it looks at what was measured so far, and names the next M.

    measured 64: config a, 128: config b    the two neighbours between which the model of times expects b to become the
                                            faster one, such as [95, 96]
    measured 64: config a, 128: config a    an M at which the model expects another config to be clearly faster

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
    frame: set[int] = set()
    served_ms: set[int] = set()
    for key in keys:
        first, last = ranges[key]
        last = last or last_m
        frame |= {first, key, last}
        served_ms |= set(range(first, last + 1))
    steps = [PREFILL_CHUNKS, CAPTURE_SIZES[::4], CAPTURE_SIZES[::2], CAPTURE_SIZES]
    return sorted(frame), [[m for m in step if m in served_ms] for step in steps]


@dataclass(frozen=True, slots=True)
class FileTimes:
    """The times of a file's configs that are known or expected: its points, and the model.

    M are compared at the first routing alone.
    """

    points: Sequence[MeasuredPoint]
    estimate: Estimate

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


def ms_to_close(times: FileTimes, ranges: Sequence[CutRange]) -> list[int]:
    """The next M to measure, those between two of the ranges first."""
    by_m = {point.m: point for point in reversed(times.points)}  # of several routings the first
    between: list[int] = []
    within: list[tuple[float, int]] = []
    for low, high in itertools.pairwise(by_m[m] for m in sorted(by_m)):
        if low.m + 1 == high.m or not are_neighbours(low.m, high.m, low.label):
            continue
        low_config = _config_at(ranges, low)
        high_config = _config_at(ranges, high)
        if low_config != high_config:
            change = _expected_change(times, low, low_config, high, high_config)
            between += [change - 1, change]
        else:
            within.append(_largest_loss(times, low, high, low_config))
    lossy = [m for loss, m in sorted(within, reverse=True) if loss > LOSS]
    return [*between, *lossy]


def _config_at(ranges: Sequence[CutRange], point: MeasuredPoint) -> str:
    """The config that a measured M gets."""
    for cut_range in ranges:
        if cut_range.holds(point.m) and cut_range.config != KEEP:
            return cut_range.config
    return point.today


def _wave_starts(low: int, high: int) -> list[int]:
    """First M of waves that may begin above `low` and up to `high`, at most MOST_STARTS of them, evenly."""
    behind_next_multiple = low - low % STEP + STEP + 1
    starts = list(range(behind_next_multiple, high + 1, STEP))
    stride = max(1, -(-len(starts) // MOST_STARTS))
    return starts[::stride]


def _expected_change(
    times: FileTimes, low: MeasuredPoint, low_config: str, high: MeasuredPoint, high_config: str
) -> int:
    """The least M from which on the upper config is expected to be the faster one. Where that is the end of the gap
    (the model was wrong there, for the upper M was measured) the middle one of the starts of waves."""
    starts = _wave_starts(low.m, high.m - 1)
    change = high.m
    for m in reversed(starts):
        if times.expected_us(high_config, m, high) > times.expected_us(low_config, m, low):
            break
        change = m
    if change == high.m and starts:
        return starts[len(starts) // 2]
    return change


def _largest_loss(times: FileTimes, low: MeasuredPoint, high: MeasuredPoint, config: str) -> tuple[float, int]:
    """The largest share of time that the config of two neighbours is expected to lose between them, to today's or to
    the fastest of either, and the M."""
    rivals = {low.today, high.today}
    for point in (low, high):
        rivals |= set(sorted(point.us, key=lambda name: point.us[name])[:RIVALS])
    worst = (0.0, low.m)
    for m in _wave_starts(low.m, high.m - 1):
        fastest = min(times.expected_us(name, m, low) for name in rivals)
        worst = max(worst, (times.expected_us(config, m, low) / fastest - 1, m))
    return worst
