"""The record of one measured M of a config file: what a worker sends, a ledger keeps, and `cutting.py` cuts.

    {"file": {"file": "N=2112,K=7168,....json", "layer": {...}, "device": {...}, "project": "vllm", ...},
     "m": 96, "label": "", "count": 1.0,
     "times": [[{"BLOCK_SIZE_M": 64, ...}, 17.5, 17.5, 0.0],      the config that the file gives this M today
               [{"BLOCK_SIZE_M": 16, ...}, 14.1, 14.2, 0.0]]}     each: values, us, at most us, errRatio

A worker emits one for each M and routing as soon as it is measured (record type `point_timed`, at most MOST_CONFIGS
configs). Gemmfleet 0.3 does not know the type: its controller counts such a record as a bad one and goes on, and it
ignores the ledger's table of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from worker.triton_configs.cutting import MeasuredPoint

MOST_CONFIGS = 64
"""Configs of one record at most: it stays far below the limit of a record."""
MOST_M = 1 << 24


def name_of_config(values: Mapping[str, Any]) -> str:
    """The name that a config has in points: the same text for the same values."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


class ConfigTime(NamedTuple):
    """A config's time at a point. `us`: -1 where it does not run or is wrong; `high_us`: what it may be at most beside
    today's (95 %); `err_ratio`: the share of wrong elements."""

    values: dict[str, Any]
    us: float
    high_us: float
    err_ratio: float

    @property
    def name(self) -> str:
        """Its name in points."""
        return name_of_config(self.values)


@dataclass(frozen=True, slots=True)
class PointRecord:
    """One M of a file under one routing. `file`: what is the same in all records of a file (see above); `times`:
    today's config first."""

    file: dict[str, Any]
    m: int
    label: str
    count: float
    times: Sequence[ConfigTime]

    @classmethod
    def from_document(cls, raw: Any) -> PointRecord:
        """The record in a document. Raises ValueError for one that no measurement can have made."""
        try:
            times = [
                ConfigTime(dict(values), float(us), float(high), float(err)) for values, us, high, err in raw["times"]
            ]
            record = cls(dict(raw["file"]), int(raw["m"]), str(raw["label"]), float(raw["count"]), times)
        except (TypeError, KeyError, OverflowError) as e:
            raise ValueError(f"not the record of a measured M: {e}") from e
        if not 1 <= record.m <= MOST_M or not 1 <= len(times) <= MOST_CONFIGS:
            raise ValueError("M or the number of configs is out of range")
        numbers = [record.count, *(number for time in times for number in time[1:])]
        if not all(math.isfinite(number) for number in numbers) or record.count < 0:
            raise ValueError("a count or time is not a number")
        return record

    def to_document(self) -> dict[str, Any]:
        """The document of the record; times to a tenth of a nanosecond."""
        times = [
            [time.values, round(time.us, 4), round(time.high_us, 4), round(time.err_ratio, 6)] for time in self.times
        ]
        return {"file": self.file, "m": self.m, "label": self.label, "count": self.count, "times": times}

    @property
    def today(self) -> ConfigTime:
        """The config that the file gives this M today."""
        return self.times[0]

    @property
    def point(self) -> MeasuredPoint:
        """The times of the configs that are right, for the cut."""
        right = [time for time in self.times if time.us > 0]
        return MeasuredPoint(
            m=self.m,
            label=self.label,
            count=self.count,
            today=self.today.name,
            us={time.name: time.us for time in right},
            high_us={time.name: time.high_us for time in right},
        )


def values_of(records: Sequence[PointRecord]) -> Mapping[str, dict[str, Any]]:
    """The values of all configs of records, by name."""
    return {time.name: time.values for record in records for time in record.times}
