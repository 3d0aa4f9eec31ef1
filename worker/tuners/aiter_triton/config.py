"""Config of one of AITER's Triton GEMMs as a candidate: the values of a bucket, and the name that spells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.families.backends import CONFIG
from worker.triton_configs.files import spelled
from worker.triton_configs.kinds import REQUIRED, ConfigKind
from worker.tuners.search.model import Knobs

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AiterConfig:
    """A bucket's values, in AITER's order of keys. `caller`: the operator that runs them, "" for the kind's wrapper."""

    items: tuple[tuple[str, Any], ...]
    caller: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """As the JSON file holds them."""
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
        """Of two that are equally fast the lower one wins."""
        return self.split_k, self.get("num_stages"), self.get("waves_per_eu", 0)

    @property
    def name(self) -> str:
        """`config_16x64x256_g1_k4_w4_s2_eu2_mfma16_cg`, further keys behind it. ASCII, no commas."""
        caller = f"_in_{self.caller}" if self.caller else ""
        return (CONFIG + spelled(dict(self.items)) + caller)[:160]

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
        """As a point: neighbours differ by one step of one knob."""
        return (*self.knobs.features, 0.5 * bool(dict(self.items).get("cache_modifier")))


def config_of(values: Values) -> AiterConfig:
    """A candidate of a bucket's values; keys in the order of shipped files, further ones behind."""
    ordered = [k for k in REQUIRED if k in values]
    return AiterConfig(tuple((k, values[k]) for k in (*ordered, *(k for k in values if k not in ordered))))


def portable(values: Values, kind: ConfigKind, arch: str) -> dict[str, Any]:
    """The tuned keys of another bucket's values that a chip takes: unknown ones belong to that bucket."""
    return {k: v for k, v in values.items() if k in REQUIRED and kind.takes(k, arch)}
