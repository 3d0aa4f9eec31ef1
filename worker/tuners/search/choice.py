"""The choice of one config for the points of a bucket (`choose_config`), which `bucket.py` has measured. It reads and
measures nothing itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.triton_configs.slowdown import is_slower

GAIN = 0.005
"""A bucket is changed only if its calls take less time by at least this share."""


@dataclass(frozen=True, slots=True)
class Point:
    """A call at which configs are measured."""

    m: int
    weight: float
    """Calls of the workload, 0 for a point that it does not have."""
    label: str = ""
    """The part of a point beside M, such as the routing of a mixture of experts."""


def choose_config(
    points: Sequence[Point], us: Sequence[Mapping[str, float]], today: Sequence[str]
) -> tuple[str, list[str]]:
    """Choose the config of a bucket: `("b", ["a"])` says that b is the winner, and that a would be better in all but
    slows a point down. An empty winner keeps what is there.

    Each sequence has an entry for each point, in the same order. `us`: microseconds by the config's name, of those that
    are right there; `today`: the name of the config that the point gets now.

    The winner was measured at every point, is faster than today's at one of them and slower at none. Of those it takes
    the least time, and at least the share GAIN less than today's.
    """
    everywhere = set.intersection(*(set(times) for times in us))
    harmful: set[str] = set()
    faster: set[str] = set()
    for times, today_name in zip(us, today, strict=True):
        today_us = times.get(today_name)
        if today_us is None:  # today's does not run there: any config is better
            faster |= everywhere
            continue
        faster |= {name for name in everywhere if times[name] < today_us}
        harmful |= {name for name in everywhere if name != today_name and is_slower(today_us, times[name])}
    total_us = {name: _weighted_sum(points, [times[name] for times in us]) for name in sorted(everywhere)}
    today_us_in_all = _weighted_sum(points, [times.get(name, math.inf) for times, name in zip(us, today, strict=True)])
    winner = min((everywhere & faster) - harmful, key=lambda name: (total_us[name], name), default="")
    if winner and total_us[winner] >= (1 - GAIN) * today_us_in_all:
        winner = ""
    best_us = total_us[winner] if winner else today_us_in_all
    return winner, [name for name in total_us if name in harmful and total_us[name] < best_us]


def _weighted_sum(points: Sequence[Point], us: Sequence[float]) -> float:
    """The time of the workload's calls; of all points where none is the workload's."""
    if not any(point.weight for point in points):
        return sum(us)
    return sum(point.weight * point_us for point, point_us in zip(points, us, strict=True) if point.weight)
