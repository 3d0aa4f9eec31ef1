"""The ranges of M of one config file, cut from measured times (`cut_ranges`). Pure.

A tuner of an engine's files measures the same configs at many M of a file. One measured M under one routing is a
`MeasuredPoint`; the points of all attempts are united (`unite_points`), and then cut (`cut_ranges`): each range of M
gets one config, or keeps what it has today.

    points at M = 1, 2, 4, 8      ->   CutRange(1, 2, "a")   CutRange(4, 8, "")
                                       M = 3 lies between two ranges, and "" keeps today's: neither changes

`worker/tuners/engines/engine_file.py` cuts to see where one more M should be measured, and to choose the config of a
shape; `orchestrator/configs/cut_winners.py` cuts to write the file.

What holds for every result:
- A range begins and ends at a measured M, and what was measured within is close enough (`are_neighbours`).
- Its config is slower than today's at no M that was measured, by the rule of `slowdown.py`.
- The order of the points does not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from worker.triton_configs.slowdown import is_slower

KEY_PRICE = 0.01
"""One more range has to save this share of one M's time: less is within the noise of a measurement (H200)."""
NEIGHBOUR_RATIO = 2
LEAST_TILE = 16
"""M with no measured M in between belong to one range if the larger is at most NEIGHBOUR_RATIO times the smaller, as
usual keys are. M of a linear layer do so as well if both are within one smallest tile; of a mixture of experts not,
because there each further token brings experts of its own."""
MOST_REGRET = 10.0
"""The regret where today's config does not run: more than any time, and finite, so that sums can be compared."""
KEEP = ""
"""Stands for today's config, whatever it is at an M."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """Times of configs that were measured side by side at one M under one routing.

    `label`: the routing of a mixture of experts, else "". `count`: calls of the workload, 0 for an M that it does not
    have. `today`: the name of the config that the file gives this M now. `us`: microseconds by the config's name, for
    each that gave a right result; `high_us`: what its time may be at most beside today's (95 %).
    """

    m: int
    label: str
    count: float
    today: str
    us: Mapping[str, float]
    high_us: Mapping[str, float]

    @property
    def today_us(self) -> float:
        """Time of today's config; infinite where it does not run or is wrong."""
        return self.us.get(self.today, math.inf)

    def allows(self, config: str) -> bool:
        """True for a config that is right here, and not slower than today's."""
        return config in self.us and not is_slower(self.today_us, self.high_us[config])


class CutRange(NamedTuple):
    """A range of M, both ends measured, with its config; KEEP if it stays as it is."""

    first: int
    last: int
    config: str

    def holds(self, m: int) -> bool:
        """True for an M of the range."""
        return self.first <= m <= self.last


def unite_points(points: Iterable[MeasuredPoint]) -> list[MeasuredPoint]:
    """One point for each M and routing, ascending, from those of all attempts in whatever order.

    A config that two attempts measured at an M has the longer of its times, and today's config the shorter: GPUs
    differ by some percent, and nothing may become slower on either.
    """
    by_place: dict[tuple[int, str], list[MeasuredPoint]] = {}
    for point in points:
        by_place.setdefault((point.m, point.label), []).append(point)
    return [_unite(by_place[place]) for place in sorted(by_place)]


def _unite(same_place: Sequence[MeasuredPoint]) -> MeasuredPoint:
    """One point of those of one M and routing."""
    today = min(point.today for point in same_place)
    us: dict[str, float] = {}
    high_us: dict[str, float] = {}
    for name in sorted({name for point in same_place for name in point.us}):
        measured = [point for point in same_place if name in point.us]
        choose = min if name == today else max
        us[name] = choose(point.us[name] for point in measured)
        high_us[name] = choose(point.high_us[name] for point in measured)
    count = max(point.count for point in same_place)
    return replace(same_place[0], count=count, today=today, us=us, high_us=high_us)


def cut_ranges(points: Sequence[MeasuredPoint], *, gaps_cost: bool = True) -> list[CutRange]:
    """The ranges of a file, ascending. `points`: of one file, united (`unite_points`).

    The sum of the regrets of all M is least, with KEY_PRICE added for each range of a new config. An M's regret is the
    share of time that its config takes longer than the fastest one measured there; of several routings the largest.
    Every M counts once, those of the workload once more by their share of its time.

    `gaps_cost`: where two ranges meet, the M between them that were not measured keep today's config, so they count as
    one more M with today's regret. Without it the ranges are those that more measurements may make possible.
    """
    labels = {point.label for point in points}
    by_m: dict[int, list[MeasuredPoint]] = {}
    for point in points:
        by_m.setdefault(point.m, []).append(point)
    # an M that a killed attempt measured at some of the routings only proves nothing
    complete = {m: by_m[m] for m in sorted(by_m) if len(by_m[m]) == len(labels)}
    weights = _weights(complete)
    ranges: list[CutRange] = []
    for ms in _connected(list(complete), max(labels, default="")):
        regrets = [_weighted_regrets(complete[m], weights[m]) for m in ms]
        gap_costs = [0.0] * len(ms)
        if gaps_cost:
            gap_costs = _costs_of_gaps(ms, regrets)
        ranges += _ranges_of(ms, _cheapest_configs(regrets, gap_costs))
    return ranges


def are_neighbours(low: int, high: int, label: str) -> bool:
    """True for M that are close enough to belong to one range without a measured M in between; `label`: of a point."""
    return high <= NEIGHBOUR_RATIO * low or (high <= LEAST_TILE and not label)


def _connected(ms: Sequence[int], label: str) -> list[list[int]]:
    """Ascending M in groups of neighbours."""
    groups: list[list[int]] = []
    for m in ms:
        if groups and are_neighbours(groups[-1][-1], m, label):
            groups[-1].append(m)
        else:
            groups.append([m])
    return groups


def _weights(by_m: Mapping[int, Sequence[MeasuredPoint]]) -> dict[int, float]:
    """The weight of each M: 1, and where the workload counts its calls also as many times its share of their time as
    there are M."""
    seconds: dict[int, float] = {}
    for m, points in by_m.items():
        least_us = min(min(point.us.values(), default=0.0) for point in points)
        seconds[m] = points[0].count * least_us
    has_counts = any(points[0].count not in (0, 1) for points in by_m.values())
    total = sum(seconds.values())
    if not has_counts or not total:
        return dict.fromkeys(by_m, 1.0)
    return {m: 1 + len(by_m) * share / total for m, share in seconds.items()}


def _weighted_regrets(points: Sequence[MeasuredPoint], weight: float) -> dict[str, float]:
    """The weighted regret at one M of each config that may serve it, and of KEEP."""
    regrets: dict[str, float] = {}
    for name in sorted(points[0].us):
        if all(point.allows(name) for point in points):
            regrets[name] = weight * max(_regret(point, point.us[name]) for point in points)
    regrets[KEEP] = weight * max(_regret(point, point.today_us) for point in points)
    return regrets


def _regret(point: MeasuredPoint, us: float) -> float:
    """The share of time that `us` is longer than the fastest config's; 0 where none was right."""
    if not point.us:
        return 0.0
    return min(MOST_REGRET, us / min(point.us.values()) - 1)


def _costs_of_gaps(ms: Sequence[int], regrets: Sequence[Mapping[str, float]]) -> list[float]:
    """The cost of a change of config before each M: today's regret in the gap below it, 0 where there is none."""
    costs = [0.0]
    for (low, low_regrets), (high, high_regrets) in itertools.pairwise(zip(ms, regrets, strict=True)):
        in_gap = (low_regrets[KEEP] + high_regrets[KEEP]) / 2
        costs.append(in_gap if high > low + 1 else 0.0)
    return costs


def _cheapest_configs(regrets: Sequence[Mapping[str, float]], gap_costs: Sequence[float]) -> list[str]:
    """The config of each M in order: the cheapest way through (Viterbi's algorithm), ties by name.

    Going on with a config costs its regret. Changing to another costs that of the gap before it, and KEY_PRICE for a
    new config; today's entries are there already.
    """
    names = sorted(set().union(*regrets))
    price = {name: KEY_PRICE if name != KEEP else 0.0 for name in names}
    costs = dict.fromkeys(names, math.inf)
    cheapest = 0.0
    cheapest_name = KEEP
    came_from: list[dict[str, str]] = []
    for regret, gap_cost in zip(regrets, gap_costs, strict=True):
        previous: dict[str, str] = {}
        new_costs: dict[str, float] = {}
        for name in names:
            changed = cheapest + price[name] + gap_cost
            stays = costs[name] <= changed
            previous[name] = name if stays else cheapest_name
            new_costs[name] = min(costs[name], changed) + regret.get(name, math.inf)
        came_from.append(previous)
        costs = new_costs
        cheapest_name = min(names, key=lambda name: (costs[name], name))
        cheapest = costs[cheapest_name]
    chosen = [cheapest_name]
    for previous in reversed(came_from[1:]):
        chosen.append(previous[chosen[-1]])
    return chosen[::-1]


def _ranges_of(ms: Sequence[int], configs: Sequence[str]) -> list[CutRange]:
    """Neighbouring M of the same config as one range."""
    ranges: list[CutRange] = []
    for config, group in itertools.groupby(zip(ms, configs, strict=True), key=lambda pair: pair[1]):
        served = [m for m, _ in group]
        ranges.append(CutRange(served[0], served[-1], config))
    return ranges
