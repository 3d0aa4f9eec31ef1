"""Buckets of M: which one an M of the workload belongs to, which config a bucket gets, and which configs of the tree a
search begins with. Pure policy.

The seeds are what a shape gets today, what lies beside it, and what similar shapes got. On AITER's own tables the
winner of a held-out shape is among the first eight configs of its nearest neighbours in 82 to 96 % of the cases; so
these come before the model's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.triton_configs.kinds import ConfigKind
from worker.triton_configs.lint import shipped
from worker.triton_configs.resolve import (
    Bucket,
    ConfigFileError,
    Resolved,
    ResolveError,
    Resolver,
    bound_of,
    bucket_for,
    slower,
)
from worker.tuners.aiter_triton.space import AiterConfig, config_of, portable

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


NEAREST, NEAREST_WON = 6, 4
"""Files of other (N, K) whose bucket for M is tried, and winners of this run."""


def _away(one: Sequence[int], other: Sequence[int]) -> float:
    """Distance of two shapes: ratios of their sizes, 0 for a size that is not named."""
    return sum(abs(math.log2(x / y)) for x, y in zip(one, other, strict=True) if x)


class Seeds:
    """Seeds of one kind in one tree for one chip."""

    def __init__(self, root: Path, arch: str, kind: ConfigKind) -> None:
        """Raises ResolveError where the tree has no loader that is known, or no default of the kind."""
        self._tree, self._kind = Resolver(root, arch), kind
        self._arch = arch
        self._place = self._tree.place(kind.config, kind.backend)
        self.bounds = self._tree.bounds(kind)
        there = [f for f in shipped(self._tree)[0] if f.kind is kind and f.path.parent == self._place.folder]
        self._others = {f.path: (f.named[0] or 0, *f.named[1:]) for f in there if f.named}
        """(B or 0, N, K) of the kind's other files by their path."""
        self._won: dict[tuple[int, ...], AiterConfig] = {}
        """Winners of this run by (M, B, N, K)."""

    def today(self, m: int, n: int, k: int, b: int | None) -> Resolved:
        """The bucket that a shape gets. Raises ResolveError, ConfigFileError, OSError."""
        return self._tree.config_for(self._kind, m, n, k, b)

    def won(self, m: int, n: int, k: int, b: int | None, config: AiterConfig) -> None:
        """Keep a winner for shapes like it."""
        self._won[m, b or 1, n, k] = config

    def of(self, m: int, n: int, k: int, b: int | None) -> list[AiterConfig]:
        """Configs to try first, the most promising first: today's, its neighbours in the file, the default's for M,
        then those of the nearest (N, K), and winners of this run for the nearest shapes."""
        found: list[Bucket] = []
        with contextlib.suppress(ResolveError, ConfigFileError, OSError):
            today = self.today(m, n, k, b)
            found.append(today.values)
            buckets = self._tree.read(today.path).buckets
            names = list(buckets)
            at = names.index(today.bucket)
            found += [buckets[name] for name in (*names[at + 1 : at + 2], *names[max(0, at - 1) : at])]
        for path in (self._place.default, *self._nearest(n, k, b)):
            with contextlib.suppress(ResolveError, ConfigFileError, OSError):
                buckets = self._tree.read(path).buckets
                found.append(buckets[bucket_for(buckets, m, self.bounds)])
        made = [config_of(portable(values, self._kind, self._arch)) for values in found]
        made += [self._won[at] for at in sorted(self._won, key=lambda at: _away(at, (m, b or 1, n, k)))[:NEAREST_WON]]
        return [c for c in dict.fromkeys(made) if set(self.needed) <= set(c.values)]

    def bucket_with(self, more: Mapping[str, Any], m: int) -> str:
        """The bucket of M in the default file if it had these buckets too. Raises ResolveError, ConfigFileError,
        OSError."""
        return bucket_for({**self._tree.read(self._place.default).buckets, **more}, m, self.bounds)

    @property
    def needed(self) -> tuple[str, ...]:
        """Keys that a config of the kind must have on this chip."""
        return self._kind.required_on(self._arch)

    def _nearest(self, n: int, k: int, b: int | None) -> list[Path]:
        """Files of other shapes by the ratio of their sizes, the nearest first."""
        near = sorted(self._others, key=lambda path: (_away(self._others[path], (b or 1, n, k)), path.name))
        return near[:NEAREST]
