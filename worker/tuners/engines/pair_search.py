"""The search for pairs at one point: a config of its own for each product of a mixture of experts (SGLang alone).

A pair's products share BLOCK_SIZE_M (`worker/triton_configs/pair.py`). So `EngineFile` lets `PairSearch.run` search
the products one after the other, each as it runs in a pair, after it has searched configs for both:

    up     at any BLOCK_SIZE_M                           {64x128: 21 us, 128x128: 22 us, 32x64: 25 us, ...}
    down   at the PAIRED_BLOCKS of the fastest ups       {64x64: 9 us, 128x64: 11 us, ...}
    join   the fastest pair of each BLOCK_SIZE_M         64x128 with 64x64, 128x128 with 128x64

The sum of both times only chooses the pair. `FileAtM` measures it as one call. Imports neither torch nor triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from worker.triton_configs.pair import BLOCK_SIZE_M, USE_TMA, join_pair, split_pair
from worker.tuners.search.bucket import PointTask
from worker.tuners.search.options import EXHAUSTIVE
from worker.tuners.search.problem_search import ProblemSearch, SearchContext, ShapeTask
from worker.tuners.search.ranker import StopRules
from worker.tuners.search.tile_config import TileConfig, tile_config

if TYPE_CHECKING:
    from worker.tuners.engines.source import EngineSource

PART_LIST = 300
"""Most candidates of one product of a pair."""
PART_SEARCH = StopRules(at_least=16, patience=12, at_most=40)
PAIRED_BLOCKS = 2
"""The second product is searched at this many BLOCK_SIZE_M, those of the fastest first products: these take most of the
time."""


@dataclass(frozen=True, slots=True)
class PairSearch:
    """The search for pairs at the point of a task, in whose shape's name it is measured.

    `file_configs`: the configs that the file has so far; the search of a product begins with their entries for it.
    `following`: the searches after this one, which are compiled meanwhile.
    """

    context: SearchContext
    source: EngineSource
    task: PointTask
    file_configs: Sequence[TileConfig]
    following: Sequence[ShapeTask]

    def run(self) -> list[TileConfig]:
        """Search both products, and join the fastest of each BLOCK_SIZE_M to a pair; [] if a product has none."""
        up_us = self._search_part("up", ())
        fastest_up = sorted(up_us, key=lambda config: up_us[config])
        blocks_m = list(dict.fromkeys(config.number(BLOCK_SIZE_M) for config in fastest_up))
        down_us = self._search_part("down", blocks_m[:PAIRED_BLOCKS])
        pairs = fastest_pairs(up_us, down_us)
        return [tile_config(join_pair(up.values, down.values), self.source.prefix) for up, down in pairs]

    def _search_part(self, part: str, blocks_m: Sequence[int]) -> dict[TileConfig, float]:
        """Microseconds of the right configs of one product; `blocks_m`: only of these BLOCK_SIZE_M, if any are
        given."""
        problem = replace(self.task.problem, part=part)
        space = self.source.space(problem, self.context.target)
        seeds = [entry_of_part(config, part) for config in self.file_configs]
        most = min(PART_LIST, self.context.options.max_candidates or PART_LIST)
        candidates = space.distinct([*seeds, *space.candidates(seeds, most)])
        if blocks_m:
            candidates = [config for config in candidates if config.number(BLOCK_SIZE_M) in blocks_m]
        us = [space.estimate(config) for config in candidates]
        task = self.context.make_task(self.task.shape, problem, candidates, us=us, quiet=True)
        if self.context.options.search != EXHAUSTIVE:
            task.ranker.rules = PART_SEARCH
        task.ranker.put_first([i for i, config in enumerate(candidates) if config in seeds])
        search = ProblemSearch(self.context, task, self.following)
        search.measure()
        return {candidates[i]: measurement.us for i, measurement in search.measured.items()}


def entry_of_part(config: TileConfig, part: str) -> TileConfig:
    """A product's own config as a candidate; the second product of a pair always loads through TMA."""
    up, down = split_pair(config.values)
    if part == "down":
        return tile_config({**down, USE_TMA: True}, config.prefix)
    return tile_config({**up, USE_TMA: bool(up.get(USE_TMA))}, config.prefix)


def fastest_pairs(
    up_us: Mapping[TileConfig, float], down_us: Mapping[TileConfig, float]
) -> list[tuple[TileConfig, TileConfig]]:
    """The pair (up, down) of the least sum of times for each BLOCK_SIZE_M that both have, the fastest first."""
    us_of_pair: dict[tuple[TileConfig, TileConfig], float] = {}
    for up, down in itertools.product(up_us, down_us):
        if up.number(BLOCK_SIZE_M) == down.number(BLOCK_SIZE_M):
            us_of_pair[up, down] = up_us[up] + down_us[down]
    fastest: dict[int, tuple[TileConfig, TileConfig]] = {}
    for up, down in sorted(us_of_pair, key=lambda pair: us_of_pair[pair]):
        fastest.setdefault(up.number(BLOCK_SIZE_M), (up, down))
    return list(fastest.values())
