"""The choice of one config for several points: `choose_config`. Pure; `bucket.py` measures the points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from worker.triton_configs.slowdown import is_slower

GAIN = 0.005
"""A file is changed only if the cost is better by at least this share."""


@dataclass(frozen=True, slots=True)
class Point:
    """A call at which configs are measured. `weight`: calls of the workload, 0 for a point that it does not have.
    `label`: what else than M tells it from others, such as the routing of a mixture of experts."""

    m: int
    weight: float
    label: str = ""


Cost = Callable[[Sequence[Point], Sequence[float], Sequence[float]], float]
"""(points, a config's us at each, the least us at each) -> what the winner has the least of."""


def weighted_sum(points: Sequence[Point], us: Sequence[float], least: Sequence[float]) -> float:
    """Time of the workload's calls; of all points where none is the workload's."""
    if not any(point.weight for point in points):
        return sum(us)
    return sum(point.weight * point_us for point, point_us in zip(points, us, strict=True) if point.weight)


def worst_regret(points: Sequence[Point], us: Sequence[float], least: Sequence[float]) -> float:
    """The largest ratio to the fastest config of a point."""
    return max(point_us / best_us for point_us, best_us in zip(us, least, strict=True))


def choose_config(
    points: Sequence[Point],
    us: Sequence[Mapping[str, float]],
    today: Sequence[str],
    high: Sequence[Mapping[str, float]] = (),
    cost: Cost = weighted_sum,
) -> tuple[str, list[str]]:
    """(the winner, configs that beat it but slow a point down); "" as the winner keeps what is there.

    By point: `us[i][config]` in microseconds, today's among them as far as it runs; `today[i]`: its config; `high`:
    what a config's time may be at most beside today's, where the noise is to count against it. The winner has the least
    cost of those that were measured everywhere, are faster than today's at a point and slower at none; and it improves
    on today's cost.
    """
    everywhere = set.intersection(*(set(times) for times in us))
    harmful: set[str] = set()
    faster: set[str] = set()
    for times, at_most, today_name in zip(us, high or us, today, strict=True):
        today_us = times.get(today_name)
        if today_us is None:  # today's does not run there: any config is better
            faster |= everywhere
            continue
        faster |= {name for name in everywhere if at_most[name] < today_us}
        harmful |= {name for name in everywhere if name != today_name and is_slower(today_us, at_most[name])}
    least = [min(times.values(), default=math.inf) for times in us]

    def cost_of(names: Sequence[str]) -> float:
        """Cost of a config for each point."""
        return cost(points, [times.get(name, math.inf) for times, name in zip(us, names, strict=True)], least)

    costs = {name: cost_of([name] * len(us)) for name in sorted(everywhere)}
    today_cost = cost_of(today)
    winner = min((everywhere & faster) - harmful, key=lambda name: (costs[name], name), default="")
    if winner and costs[winner] >= (1 - GAIN) * today_cost:
        winner = ""
    best_cost = costs[winner] if winner else today_cost
    return winner, [name for name in costs if name in harmful and costs[name] < best_cost]
