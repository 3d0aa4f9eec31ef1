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
from dataclasses import replace
from glob import escape
from typing import TYPE_CHECKING

from worker.triton_configs.engine_config_file import EngineConfigFile
from worker.triton_configs.engine_package import Layer
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
        return (problem.m, *problem.layer.sizes_in_name)

    def configs_of_files(self, problem: LayerProblem) -> list[TileConfig]:
        """Today's config, its neighbours in the file, the default, those of the nearest files of this device."""
        configs: list[Values] = [self._engine.config(problem.layer, problem.m)]
        configs += self._neighbours_in_file(problem)
        configs.append(self.source.default_config(problem))
        configs += [self._engine.config(layer, problem.m) for layer in self._nearest_layers(problem)]
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

    def _nearest_layers(self, problem: LayerProblem) -> list[Layer]:
        """The layers of the NEAREST_FILES files whose sizes come nearest to those of the layer."""
        sizes = problem.layer.sizes_in_name
        layers = sorted(
            self._layers_with_files(problem.layer),
            key=lambda other: (size_distance(sizes, other.sizes_in_name), other.sizes_in_name),
        )
        return layers[:NEAREST_FILES]

    def _layers_with_files(self, layer: Layer) -> set[Layer]:
        """Layers that differ from this one in the sizes of its file's name alone, and have a file on this device."""
        head, mark, rest = self._engine.file_name(layer).partition(",device_name")
        pattern = re.sub(r"\d+", "*", head) + escape(mark + rest)
        layers: set[Layer] = set()
        for folder in self._engine.folders(layer):
            for file in map(EngineConfigFile.from_path, folder.glob(pattern)):
                if file and layer.e:
                    layers.add(replace(layer, e=file.layer.e, n=file.layer.n))
                elif file:
                    layers.add(replace(layer, n=file.layer.n, k=file.layer.k))
        return layers
