"""A config of a Triton GEMM as a JSON file holds it, a candidate of the search; and the configs of one problem.

Knobs that shape the kernel (tile, K step, warps, stages, split-K) are combined; the others (order of tiles, waves,
instruction, cache modifier) are varied one at a time around the combinations that the model names first and around
every seed.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.families import CONFIG
from worker.triton_configs.kinds import REQUIRED
from worker.triton_configs.resolve import spelled
from worker.tuners.common.problem import Problem
from worker.tuners.search.model import MAX_REGISTERS, Knobs, accumulators
from worker.tuners.search.source import Target

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A config's values in the order of a file's keys. `caller`: the operator that runs them, "" for the usual one.
    `begins`: the beginning of its name, which tells the tuner."""

    items: tuple[tuple[str, Any], ...]
    caller: str = ""
    begins: str = CONFIG

    @property
    def values(self) -> dict[str, Any]:
        """The values as they stand in the JSON file."""
        return dict(self.items)

    def get(self, key: str, default: int = 1) -> int:
        """A whole number of the config."""
        found = dict(self.items).get(key)
        return found if isinstance(found, int) else default

    @property
    def split_k(self) -> int:
        return self.get("NUM_KSPLIT")

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Value that decides between two configs of the same speed: the lower one wins."""
        return self.split_k, self.get("num_stages"), self.get("waves_per_eu", 0)

    @property
    def name(self) -> str:
        """`config_16x64x256_g1_k4_w4_s2_eu2_mfma16_cg`, further keys behind it. ASCII, no commas."""
        caller = f"_in_{self.caller}" if self.caller else ""
        return (self.begins + spelled(dict(self.items)) + caller)[:160]

    @property
    def knobs(self) -> Knobs:
        """The knobs by which its time is estimated."""
        m, n, k = (max(1, self.get(f"BLOCK_SIZE_{x}", 128)) for x in "MNK")
        return Knobs(
            m, n, k,
            max(1, self.get("GROUP_SIZE_M")), max(1, self.split_k), num_warps=max(1, self.get("num_warps", 4)),
            num_stages=max(1, self.get("num_stages", 2)), waves_per_eu=self.get("waves_per_eu", 0),
            matrix_instr_nonkdim=self.get("matrix_instr_nonkdim", 0), kpack=self.get("kpack"),
        )  # fmt: skip

    @property
    def features(self) -> tuple[float, ...]:
        """The config as a point: neighbours differ by one step of one knob."""
        return (*self.knobs.features, 0.5 * bool(dict(self.items).get("cache_modifier")))


def config_of(values: Values, begins: str = CONFIG) -> TileConfig:
    """A candidate of a file's values; keys in the order of shipped files, further ones behind."""
    ordered = [k for k in REQUIRED if k in values]
    items = tuple((k, values[k]) for k in (*ordered, *(k for k in values if k not in ordered)))
    return TileConfig(items, begins=begins)


NEAREST, NEAREST_WON = 6, 4  # files of other sizes whose entry for M is a seed, and winners of this run


def away(one: Sequence[int], other: Sequence[int]) -> float:
    """Distance of two shapes: ratios of their sizes, 0 for a size that is not named."""
    return sum(abs(math.log2(x / y)) for x, y in zip(one, other, strict=True) if x)


SHAPING = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages", "NUM_KSPLIT")
ROOTS = 16  # the best combinations by the model, this many, have their other knobs varied
MOST_ACCUMULATORS = {"cuda": 128, "hip": 256}  # registers of a lane for the sums; beyond them everything else spills
MOST_PROGRAMS = 1 << 18  # of a launch


@dataclass(frozen=True, slots=True)
class Space:
    """The configs of one problem. `knobs`: legal values by key, in the order of a file's keys; `plain`: what the knobs
    that are not combined have in combinations, where it is not the first; `identity`: equal for configs that start the
    same kernel alike."""

    knobs: Mapping[str, tuple[Any, ...]]
    plain: Values
    is_legal: Callable[[TileConfig], bool]
    estimate: Callable[[TileConfig], float]
    identity: Callable[[TileConfig], object]
    begins: str = CONFIG

    def candidates(self, seeds: Iterable[TileConfig] = (), most: int = 0) -> list[TileConfig]:
        """Legal configs without doubles in the model's order, at most `most` (0: all). Seeds, legal or not, are not
        among them, but the configs that differ from one in one knob are."""
        ordered = self.order(self.distinct(c for c in self._combined() if self.is_legal(c)))
        near = [v for c in seeds for v in self._variations(c)]
        other = [v for c in ordered[:ROOTS] for v in self._variations(c, shaping=False)]
        varied = self.distinct(v for v in (*near, *other) if self.is_legal(v))
        rest = ordered[: max(most // 2, most - len(varied))] if most else ordered
        found = self.distinct([*rest, *varied])
        return self.order(found[:most] if most else found)

    def distinct(self, found: Iterable[TileConfig]) -> list[TileConfig]:
        """Configs without doubles: of those that start the same kernel alike the first."""
        out: dict[object, TileConfig] = {}
        for c in found:
            out.setdefault(self.identity(c), c)
        return list(out.values())

    def order(self, found: Iterable[TileConfig]) -> list[TileConfig]:
        """Configs by the estimate, the fastest first."""
        return sorted(found, key=lambda c: (self.estimate(c), c.name))

    def _combined(self) -> Iterator[TileConfig]:
        names = [k for k in SHAPING if k in self.knobs]
        plain = {k: v[0] for k, v in self.knobs.items() if k not in SHAPING} | dict(self.plain)
        for chosen in itertools.product(*(self.knobs[k] for k in names)):
            yield config_of({**plain, **dict(zip(names, chosen, strict=True))}, self.begins)

    def _variations(self, c: TileConfig, *, shaping: bool = True) -> Iterator[TileConfig]:
        """Configs that differ from one by another value of one knob: shaping ones by a step, the others by any."""
        for key, legal in self.knobs.items():
            now = c.values.get(key)
            near: list[Any] = []
            if key not in SHAPING:
                near = [v for v in legal if v != now]
            elif shaping and now in legal:
                at = legal.index(now)
                near = [*legal[max(0, at - 1) : at], *legal[at + 1 : at + 2]]
            for value in near:
                yield config_of({**c.values, key: value}, self.begins)


class Seeds(ABC):
    """Configs that are tried first, as they may be good."""

    def __init__(self) -> None:
        self._won: dict[tuple[int, ...], TileConfig] = {}  # winners of this run by what `sizes` says of their problems

    @abstractmethod
    def sizes(self, p: Any) -> tuple[int, ...]:
        """Sizes by which problems are near to each other."""

    @abstractmethod
    def there(self, p: Any) -> list[TileConfig]:
        """Configs of files that may be good for a problem, the most promising first."""

    def won(self, p: Any, config: TileConfig) -> None:
        """Keep a winner for problems like it."""
        self._won[self.sizes(p)] = config

    def of(self, p: Any) -> list[TileConfig]:
        """The configs of files, then winners of this run for the nearest problems."""
        near = sorted(self._won, key=lambda at: away(at, self.sizes(p)))[:NEAREST_WON]
        return list(dict.fromkeys([*self.there(p), *(self._won[at] for at in near)]))


def same_as(p: Problem, values: Values) -> object:
    """Equal for values that start the same kernel alike: there is no order of tiles where there is one row of them, or
    split-K, which has an order of its own."""
    unordered = p.m <= (values.get("BLOCK_SIZE_M") or 1) or (values.get("NUM_KSPLIT") or 1) > 1
    return tuple(sorted((k, str(v)) for k, v in {**values, **({"GROUP_SIZE_M": 1} if unordered else {})}.items()))


def fits(p: Problem, c: TileConfig, target: Target) -> bool:
    """False for a tile that is twice the output, more programs than a launch should have, or more registers than a lane
    or a multiprocessor has."""
    x, sums = c.knobs, accumulators(c.knobs, target)
    tiles = p.b * -(-p.m // x.block_m) * -(-p.n // x.block_n)
    return not (
        x.block_m >= 2 * max(16, p.m)
        or x.block_n >= 2 * max(32, p.n)
        or tiles * x.split_k > MOST_PROGRAMS
        or sums > MOST_ACCUMULATORS[target.backend]
        or sums + 32 > MAX_REGISTERS[target.backend]
        or (sums + 32) * x.num_warps * target.warp_size > target.registers
    )
