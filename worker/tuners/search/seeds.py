"""Configs that a search tries first, as they may be good: those of files, and winners of this run for near shapes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from worker.tuners.search.tile_config import TileConfig

NEAREST_FILES = 6
"""Files of other sizes whose entry for M is a seed."""
NEAREST_WINNERS = 4
"""Winners of this run that are seeds."""


def size_distance(sizes: Sequence[int], others: Sequence[int]) -> float:
    """Distance of two shapes: log2 of the ratios of their sizes, added up; 0 for a size that is not named."""
    return sum(abs(math.log2(size / other)) for size, other in zip(sizes, others, strict=True) if size)


class Seeds(ABC):
    """Configs that are tried first, as they may be good."""

    def __init__(self) -> None:
        self._winners: dict[tuple[int, ...], TileConfig] = {}  # of this run, by the sizes of their problems

    @abstractmethod
    def sizes(self, problem: Any) -> tuple[int, ...]:
        """Sizes by which problems are near to each other."""

    @abstractmethod
    def configs_of_files(self, problem: Any) -> list[TileConfig]:
        """Configs of files that may be good for a problem, the most promising first."""

    def add_winner(self, problem: Any, config: TileConfig) -> None:
        """Keep a winner for problems like it."""
        self._winners[self.sizes(problem)] = config

    def seeds_of(self, problem: Any) -> list[TileConfig]:
        """The configs of files, then winners of this run for the nearest problems."""
        sizes = self.sizes(problem)
        nearest = sorted(self._winners, key=lambda others: size_distance(others, sizes))[:NEAREST_WINNERS]
        winners = [self._winners[others] for others in nearest]
        return list(dict.fromkeys([*self.configs_of_files(problem), *winners]))
