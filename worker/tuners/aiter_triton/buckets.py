"""Buckets of M: which one an M of the workload belongs to, and which config a bucket gets. Pure policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.triton_configs.files import bound_of, slower

GAIN = 0.005
"""A weighted sum that is better by less than this share is no reason to change a file."""


@dataclass(frozen=True, slots=True)
class Point:
    """An M at which a bucket's configs are measured. `weight`: calls of the workload, 0 for a bound that is none of
    its M."""

    m: int
    weight: float


@dataclass(frozen=True, slots=True)
class BucketWork:
    """A bucket with the M that are measured for it, the most weighty first."""

    name: str
    points: tuple[Point, ...]


def bucket_of(m: int, bounds: Sequence[int], today: str) -> str:
    """The bucket that an M is tuned for: of the smallest bound that is not below it, also where the file has no such
    bucket; above the last bound today's."""
    return next((f"M_LEQ_{x}" for x in bounds if m <= x), today)


def plan(weights: Mapping[int, float], names: Mapping[int, str]) -> list[BucketWork]:
    """Buckets of a workload (M -> weight, M -> bucket), by their M ascending. Each is measured at its bound as well."""
    found: dict[str, dict[int, float]] = {}
    for m in sorted(weights):
        members = found.setdefault(names[m], {})
        members[m] = weights[m]
        side, bound = bound_of(names[m])
        if side != "any":
            members.setdefault(bound, weights.get(bound, 0.0))
    return [
        BucketWork(name, tuple(Point(m, w) for m, w in sorted(members.items(), key=lambda e: (-e[1], -e[0]))))
        for name, members in found.items()
    ]


def best(
    points: Sequence[Point], us: Mapping[int, Mapping[str, float]], today: Mapping[int, str]
) -> tuple[str, list[str]]:
    """(the winner, configs that beat it but slow an M down); "" as the winner keeps what is there.

    `us[m][config]`: microseconds at M, today's among them as far as it runs; `today[m]`: its config. The winner has the
    least weighted sum of those that were measured at every M and slow none down, and improves on today's.
    """
    everywhere = set.intersection(*(set(us.get(p.m, {})) for p in points))
    harmful = {
        c for c in everywhere for p in points
        if (old := us[p.m].get(today[p.m])) is not None and c != today[p.m] and slower(old, us[p.m][c])
    }  # fmt: skip
    weights = {p.m: p.weight if any(q.weight for q in points) else 1.0 for p in points}

    def cost(config_at: Mapping[int, str]) -> float:
        return sum(weights[p.m] * us[p.m].get(config_at[p.m], math.inf) for p in points if weights[p.m])

    costs = {c: cost({p.m: c for p in points}) for c in sorted(everywhere)}
    winner = min(everywhere - harmful, key=lambda c: (costs[c], c), default="")
    if winner and costs[winner] >= (1 - GAIN) * cost(today):
        winner = ""
    best_cost = costs[winner] if winner else cost(today)
    return winner, [c for c in costs if c in harmful and costs[c] < best_cost]
