"""A config of a Triton GEMM as a JSON file holds it: a candidate of the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from worker.families import CONFIG
from worker.triton_configs.config_file import spell_values
from worker.triton_configs.kinds import REQUIRED
from worker.tuners.search.time_model import TileKnobs

Values = Mapping[str, Any]
"""A config's values as they stand in the JSON file: `{"BLOCK_SIZE_M": 16, ..., "num_warps": 4}`."""


@dataclass(frozen=True)
class TileConfig:
    """A config's values in the order of a file's keys. `caller`: the operator that runs them, "" for the usual one.
    `prefix`: the beginning of its name, which tells the tuner."""

    items: tuple[tuple[str, Any], ...]
    caller: str = ""
    prefix: str = CONFIG

    @property
    def values(self) -> dict[str, Any]:
        """The values as they stand in the JSON file."""
        return dict(self.items)

    def number(self, key: str, default: int = 1) -> int:
        """A whole number of the config."""
        value = self.values.get(key)
        return value if isinstance(value, int) else default

    @property
    def split_k(self) -> int:
        return self.number("NUM_KSPLIT")

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Value that decides between two configs of the same speed: the lower one wins."""
        return self.split_k, self.number("num_stages"), self.number("waves_per_eu", 0)

    @property
    def name(self) -> str:
        """`config_16x64x256_g1_k4_w4_s2_eu2_mfma16_cg`, further keys behind it. ASCII, no commas."""
        caller = f"_in_{self.caller}" if self.caller else ""
        return (self.prefix + spell_values(self.values) + caller)[:160]

    @cached_property
    def knobs(self) -> TileKnobs:
        """The knobs by which its time is estimated. A search asks for those of thousands of configs, each ten times."""
        return TileKnobs(
            block_m=max(1, self.number("BLOCK_SIZE_M", 128)),
            block_n=max(1, self.number("BLOCK_SIZE_N", 128)),
            block_k=max(1, self.number("BLOCK_SIZE_K", 128)),
            group_m=max(1, self.number("GROUP_SIZE_M")),
            split_k=max(1, self.split_k),
            num_warps=max(1, self.number("num_warps", 4)),
            num_stages=max(1, self.number("num_stages", 2)),
            waves_per_eu=self.number("waves_per_eu", 0),
            matrix_instr_nonkdim=self.number("matrix_instr_nonkdim", 0),
            kpack=self.number("kpack"),
        )

    @property
    def features(self) -> tuple[float, ...]:
        """The config as a point: neighbours differ by one step of one knob."""
        has_cache_modifier = bool(self.values.get("cache_modifier"))
        return (*self.knobs.features, 0.5 if has_cache_modifier else 0.0)


def tile_config(values: Values, prefix: str = CONFIG) -> TileConfig:
    """A candidate of a file's values; keys in the order of shipped files, further ones behind."""
    known_keys = [key for key in REQUIRED if key in values]
    other_keys = [key for key in values if key not in REQUIRED]
    return TileConfig(tuple((key, values[key]) for key in (*known_keys, *other_keys)), prefix=prefix)
