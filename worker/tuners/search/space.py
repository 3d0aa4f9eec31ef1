"""The configs of one problem.

Knobs that shape the kernel (tile, K step, warps, stages, split-K) are combined; the others (order of tiles, waves,
instruction, cache modifier) are varied one at a time around the combinations that the model names first and around
every seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.families import CONFIG
from worker.tuners.common.problem import Problem
from worker.tuners.search.target import Target
from worker.tuners.search.tile_config import TileConfig, Values, tile_config
from worker.tuners.search.time_model import MAX_REGISTERS, accumulators

SHAPING = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages", "NUM_KSPLIT")
ROOTS = 16
"""The best combinations by the model, this many, have their other knobs varied."""
MOST_ACCUMULATORS = {"cuda": 128, "hip": 256}
"""Registers of a lane for the sums; beyond them everything else spills."""
LEAST_OTHER_REGISTERS = 32
"""Registers that a lane needs beside the sums."""
MOST_PROGRAMS = 1 << 18
"""Programs that a launch should have at most."""
EXPLORED = 2.0
"""The model's times of two tiles may be off by this factor against each other (block FP8 on an H200: 1.5)."""


@dataclass(frozen=True, slots=True)
class Space:
    """The configs of one problem."""

    knobs: Mapping[str, tuple[Any, ...]]
    """Legal values by key, in the order of a file's keys."""
    plain: Values
    """Values that knobs have in combinations if they are not combined, and it is not their first legal one."""
    is_legal: Callable[[TileConfig], bool]
    estimate: Callable[[TileConfig], float]
    """The model's microseconds."""
    identity: Callable[[TileConfig], object]
    """Equal for configs that start the same kernel alike."""
    prefix: str = CONFIG
    """The beginning of the configs' names."""

    def candidates(self, seeds: Iterable[TileConfig] = (), most: int = 0) -> list[TileConfig]:
        """Legal configs without doubles in the model's order, at most `most` (0: all). Seeds, legal or not, are not
        among them, but the configs that differ from one in one knob are."""
        combined = self.order(self._legal(self._combinations()))
        variations: list[TileConfig] = []
        for seed in seeds:
            variations += self._variations(seed)
        for root in combined[:ROOTS]:
            variations += self._variations(root, shaping=False)
        varied = self._legal(variations)
        if not most:
            return self.order(self.distinct([*combined, *varied]))
        # at least half of them are combinations, however many variations there are
        best_combined = combined[: max(most // 2, most - len(varied))]
        return self.order(self.distinct([*best_combined, *varied])[:most])

    def distinct(self, configs: Iterable[TileConfig]) -> list[TileConfig]:
        """Configs without doubles: of those that start the same kernel alike the first."""
        by_identity: dict[object, TileConfig] = {}
        for config in configs:
            by_identity.setdefault(self.identity(config), config)
        return list(by_identity.values())

    def order(self, configs: Iterable[TileConfig]) -> list[TileConfig]:
        """Configs by the estimate, the fastest first."""
        return sorted(configs, key=lambda config: (self.estimate(config), config.name))

    def _legal(self, configs: Iterable[TileConfig]) -> list[TileConfig]:
        return self.distinct(config for config in configs if self.is_legal(config))

    def _combinations(self) -> Iterator[TileConfig]:
        """Each combination of the knobs of SHAPING, the others as in `plain` or at their first legal value."""
        combined_keys = [key for key in SHAPING if key in self.knobs]
        first_values = {key: legal[0] for key, legal in self.knobs.items() if key not in SHAPING}
        for combination in itertools.product(*(self.knobs[key] for key in combined_keys)):
            values = dict(zip(combined_keys, combination, strict=True))
            yield tile_config({**first_values, **self.plain, **values}, self.prefix)

    def _variations(self, config: TileConfig, *, shaping: bool = True) -> Iterator[TileConfig]:
        """Configs that differ from one by another value of one knob: shaping ones by a step, the others by any."""
        values = config.values
        for key, legal in self.knobs.items():
            now = values.get(key)
            others: list[Any] = []
            if key not in SHAPING:
                others = [value for value in legal if value != now]
            elif shaping and now in legal:
                place = legal.index(now)
                others = [*legal[max(0, place - 1) : place], *legal[place + 1 : place + 2]]
            for value in others:
                yield tile_config({**values, key: value}, self.prefix)


def best_of_each_tile(candidates: Sequence[TileConfig], us: Sequence[float]) -> list[int]:
    """Indexes of one config for each (BLOCK_SIZE_M, BLOCK_SIZE_N), the one of the least estimate (`us`); without those
    that would take EXPLORED times as long as the fastest.

    The model is wrong by a factor that many configs of a tile share, which only a measurement of one of them shows.
    """
    most_us = EXPLORED * min(us, default=0.0)
    best: dict[tuple[int, int], int] = {}
    for i in sorted(range(len(us)), key=lambda i: us[i]):
        knobs = candidates[i].knobs
        if us[i] < most_us:
            best.setdefault((knobs.block_m, knobs.block_n), i)
    return list(best.values())


def launch_identity(problem: Problem, values: Values) -> object:
    """Equal for values that start the same kernel alike: there is no order of tiles where there is one row of them, or
    split-K, which has an order of its own."""
    has_one_row = problem.m <= (values.get("BLOCK_SIZE_M") or 1)
    has_split_k = (values.get("NUM_KSPLIT") or 1) > 1
    values = dict(values)
    if has_one_row or has_split_k:
        values["GROUP_SIZE_M"] = 1
    return tuple(sorted((key, str(value)) for key, value in values.items()))


def fits_device(problem: Problem, config: TileConfig, target: Target) -> bool:
    """False for a tile that is twice the output, more programs than a launch should have, or more registers than a lane
    or a multiprocessor has."""
    knobs = config.knobs
    if knobs.block_m >= 2 * max(16, problem.m) or knobs.block_n >= 2 * max(32, problem.n):
        return False
    tiles = problem.b * -(-problem.m // knobs.block_m) * -(-problem.n // knobs.block_n)
    if tiles * knobs.split_k > MOST_PROGRAMS:
        return False
    sums = accumulators(knobs, target)
    registers = sums + LEAST_OTHER_REGISTERS
    if sums > MOST_ACCUMULATORS[target.backend] or registers > MAX_REGISTERS[target.backend]:
        return False
    return registers * knobs.num_warps * target.warp_size <= target.registers
