"""The configs that the search for a file of an engine tries first.

`EngineTuner` makes one `EngineSeeds` for a run. The search asks it for the seeds of each problem before it chooses
candidates, and gives it the winners (`worker/tuners/search/seeds.py`). For M = 64 the seeds of files are, in order:

    the entry that serves M = 64, the entries above and below it       from the layer's own file
    the engine's default
    the entry that serves M = 64 in each of the NEAREST_FILES files    of this device and kind, of other sizes

Imports neither torch nor triton.
"""

from __future__ import annotations

import re
from glob import escape
from typing import TYPE_CHECKING

from worker.tuners.search.seeds import NEAREST_FILES, Seeds, size_distance
from worker.tuners.search.tile_config import TileConfig, Values, tile_config

if TYPE_CHECKING:
    from worker.tuners.engines.source import EngineSource, LayerProblem


class EngineSeeds(Seeds):
    """Configs that an engine has for a layer, and others that may be good for it."""

    def __init__(self, source: EngineSource) -> None:
        super().__init__()
        self.source = source
        self._engine = source.engine()

    def sizes(self, problem: LayerProblem) -> tuple[int, ...]:
        """M and the sizes in the name of the layer's file."""
        return (problem.m, *self._file_sizes(problem))

    def configs_of_files(self, problem: LayerProblem) -> list[TileConfig]:
        """Today's config, its neighbours in the file, the default, those of the nearest files of this device."""
        configs: list[Values] = [self._engine.config(problem.layer, problem.m)]
        configs += self._neighbours_in_file(problem)
        configs.append(self.source.default_config(problem))
        for sizes in self._nearest_sizes(problem):
            layer = self.source.with_sizes(problem.layer, sizes)
            configs.append(self._engine.config(layer, problem.m))
        return [tile_config(values, self.source.prefix) for values in configs]

    def _neighbours_in_file(self, problem: LayerProblem) -> list[Values]:
        """The entries above and below the one that serves M."""
        table = self._engine.table(problem.layer) or {}
        keys = sorted(table)
        if not keys:
            return []
        nearest = min(range(len(keys)), key=lambda i: abs(keys[i] - problem.m))
        neighbours = keys[nearest + 1 : nearest + 2] + keys[max(0, nearest - 1) : nearest]
        return [self._engine.config(problem.layer, key) for key in neighbours]

    def _nearest_sizes(self, problem: LayerProblem) -> list[tuple[int, ...]]:
        """The sizes of the NEAREST_FILES other files that come nearest to those of the layer's own."""
        sizes = self._file_sizes(problem)
        by_distance = sorted(
            self._sizes_of_other_files(problem), key=lambda others: (size_distance(sizes, others), others)
        )
        return by_distance[:NEAREST_FILES]

    def _sizes_of_other_files(self, problem: LayerProblem) -> set[tuple[int, ...]]:
        """Sizes in the names of the files that are there for layers of the kind on this device."""
        head, mark, rest = self._engine.file_name(problem.layer).partition(",device_name")
        pattern = re.sub(r"\d+", "*", head) + escape(mark + rest)
        sizes: set[tuple[int, ...]] = set()
        for folder in self._engine.folders(problem.layer):
            sizes |= {_sizes_in_name(path.name) for path in folder.glob(pattern)}
        return sizes

    def _file_sizes(self, problem: LayerProblem) -> tuple[int, ...]:
        return _sizes_in_name(self._engine.file_name(problem.layer))


def _sizes_in_name(name: str) -> tuple[int, ...]:
    """Sizes in the name of a file, (E, N) or (N, K): `N=2112,K=7168,device_name=...` has (2112, 7168)."""
    return tuple(map(int, re.findall(r"\d+", name.partition(",device_name")[0])))
