"""Number and order of a backend's runs, and the mean of those that agree. Pure; controller and worker share it.

A *run* is one timing of one backend on one shape (a median of many calls). The rule is the runbook's: three runs,
their mean, stable if they lie within 5 % of it; else up to two more, and the three that agree best count.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

RUNS, EXTRA, WITHIN = 3, 2, 0.05
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Rule:
    """`runs` that have to agree `within` (max less min over mean), and how many `extra` may be taken for that."""

    runs: int = RUNS
    extra: int = EXTRA
    within: float = WITHIN


@dataclass(frozen=True, slots=True)
class RunMean:
    """Result of the runs. `us` is the mean of the `used` runs that agree best, `spread` their (max - min) / mean."""

    us: float
    spread: float
    used: int
    taken: int
    status: str
    """`ok`, `unstable` (no `runs` of them agree), `short` (fewer runs than the rule wants)."""


def mean_of_runs(values: Sequence[float], rule: Rule = Rule()) -> RunMean:
    """Mean of the runs that agree best, of runs in microseconds in any order. Raises ValueError for none."""
    if not values:
        raise ValueError("no run was taken")
    ordered = sorted(values)
    if len(ordered) < rule.runs:
        return RunMean(_mean(ordered), spread(ordered), len(ordered), len(ordered), "short")
    windows = [ordered[i : i + rule.runs] for i in range(len(ordered) - rule.runs + 1)]
    best = min(windows, key=spread)
    status = "ok" if spread(best) <= rule.within else "unstable"
    return RunMean(_mean(best), spread(best), len(best), len(ordered), status)


def wants_more(values: Sequence[float], rule: Rule = Rule()) -> bool:
    """Whether another run is to be taken: too few, or they do not agree and there is one left."""
    if len(values) < rule.runs:
        return True
    return len(values) < rule.runs + rule.extra and mean_of_runs(values, rule).status != "ok"


def rounds(
    taken: Mapping[Name, Sequence[float]], pairs: Mapping[Name, Hashable], rule: Rule, rng: random.Random
) -> Iterator[list[Name]]:
    """The order of each round, drawn anew; `taken` is filled by the caller between rounds.

    Who is no longer in `taken` is left out. Names that share a value of `pairs` (one backend in two environments) take
    their extra runs together, so that run i of one always has its partner.
    """
    while True:
        short = {pairs[n] for n, values in taken.items() if wants_more(values, rule)}
        order = [n for n in taken if pairs[n] in short and len(taken[n]) < rule.runs + rule.extra]
        if not order:
            return
        rng.shuffle(order)
        yield order


def spread(values: Sequence[float]) -> float:
    """(max - min) / mean; 0 for a single value."""
    return (max(values) - min(values)) / _mean(values) if values else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
