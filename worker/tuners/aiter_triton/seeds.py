"""Configs of a tree to begin a search with: what a shape gets today, what lies beside it, what similar shapes got.

On AITER's own tables the winner of a held-out shape is among the first eight configs of its nearest neighbours in 82 to
96 % of the cases; so these come before the model's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worker.triton_configs.files import Bucket, ConfigFileError
from worker.triton_configs.kinds import ConfigKind
from worker.triton_configs.lint import shipped
from worker.triton_configs.resolve import Resolved, ResolveError, Resolver, bucket_for
from worker.tuners.aiter_triton.config import AiterConfig, config_of, portable

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
