"""Seeds of a search from AITER's files: what a shape gets today, what lies beside it, and what similar shapes got.

On AITER's own tables the winner of a held-out shape is among the first eight configs of its nearest neighbours in 82
to 96 % of the cases; so these come before the model's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.triton_configs.config_file import Bucket, ConfigFileError
from worker.triton_configs.kinds import REQUIRED, ConfigKind
from worker.triton_configs.resolve import Resolved, ResolveError, Resolver, bucket_for
from worker.triton_configs.tree_files import list_files
from worker.tuners.aiter_triton.problem import KindProblem
from worker.tuners.search.seeds import NEAREST_FILES, Seeds, size_distance
from worker.tuners.search.tile_config import TileConfig, Values, tile_config


def portable_values(values: Values, kind: ConfigKind, arch: str) -> dict[str, Any]:
    """The tuned keys of another bucket's values that a chip takes: unknown ones belong to that bucket."""
    return {key: value for key, value in values.items() if key in REQUIRED and kind.may_hold(key, arch)}


class AiterSeeds(Seeds):
    """Seeds of one kind in one tree for one chip."""

    def __init__(self, root: Path, arch: str, kind: ConfigKind) -> None:
        """Raises ResolveError where the tree has no loader that is known, or no default of the kind."""
        super().__init__()
        self._resolver = Resolver(root, arch)
        self._kind = kind
        self._arch = arch
        folder = self._resolver.folder_of(kind)
        self._default = folder.default
        self.bounds = self._resolver.bounds(kind)
        self._sizes_of_files: dict[Path, tuple[int, int, int]] = {}  # (B or 0, N, K) of the kind's other files
        for file in list_files(self._resolver)[0]:
            if file.kind is kind and file.path.parent == folder.folder and file.sizes:
                b, n, k = file.sizes
                self._sizes_of_files[file.path] = (b or 0, n, k)

    def today(self, problem: KindProblem) -> Resolved:
        """The bucket that a shape gets. Raises ResolveError, ConfigFileError, OSError."""
        return self._resolver.config_for(self._kind, problem.m, problem.n, problem.k, problem.case.b or None)

    def sizes(self, problem: KindProblem) -> tuple[int, ...]:
        return problem.m, problem.b, problem.n, problem.k

    def configs_of_files(self, problem: KindProblem) -> list[TileConfig]:
        """Today's, its neighbours in the file, the default's for M, then those of the nearest (N, K)."""
        buckets: list[Bucket] = []
        with contextlib.suppress(ResolveError, ConfigFileError, OSError):
            buckets += self._today_and_neighbours(problem)
        sizes = (problem.b, problem.n, problem.k)
        nearest = sorted(
            self._sizes_of_files, key=lambda path: (size_distance(self._sizes_of_files[path], sizes), path.name)
        )
        for path in (self._default, *nearest[:NEAREST_FILES]):
            with contextlib.suppress(ResolveError, ConfigFileError, OSError):
                in_file = self._resolver.read(path).buckets
                buckets.append(in_file[bucket_for(in_file, problem.m, self.bounds)])
        configs = [tile_config(portable_values(values, self._kind, self._arch)) for values in buckets]
        required = set(self._kind.required_on(self._arch))
        return [config for config in configs if required <= set(config.values)]

    def _today_and_neighbours(self, problem: KindProblem) -> list[Bucket]:
        """Today's bucket, then the ones behind and before it in its file."""
        today = self.today(problem)
        buckets = self._resolver.read(today.path).buckets
        names = list(buckets)
        place = names.index(today.bucket)
        neighbours = names[place + 1 : place + 2] + names[max(0, place - 1) : place]
        return [today.values, *(buckets[name] for name in neighbours)]

    def bucket_with(self, more: Mapping[str, Any], m: int) -> str:
        """The bucket of M in the default file if it had these buckets too. Raises ResolveError, ConfigFileError,
        OSError."""
        return bucket_for({**self._resolver.read(self._default).buckets, **more}, m, self.bounds)
