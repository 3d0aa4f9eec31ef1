"""Rows for the replay tuner: from a recorded profile (JSONL or CSV), or made up from the shape's key.

A recorded row holds the shape's key columns and the results under the names of AITER's tables or of
protocol.Row; `seconds`, where it has it, is how long the candidate took to measure.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.families.backends import SYNTHETIC
from worker.protocol import Row

Key = Mapping[str, int | str]

_ALIASES = {"solidx": "kernelId", "err_ratio": "errRatio"}
_INTS = ("kernelId", "splitK", "samples")
_FLOATS = ("us", "tflops", "bw", "errRatio", "spread")
_TEXTS = ("kernelName", "libtype", "status", "detail")
_CALLS = 111
"""Calls of a kernel when AITER measures it: 10 to warm up, 101 timed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row and the seconds its measuring took."""

    row: Row
    seconds: float


class Recording:
    """Recorded rows by shape. `facts`: gfx, cu_num of the recording, where it has them."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = [{_ALIASES.get(k, k): _cell(v) for k, v in r.items() if k} for r in rows]
        self._columns = set(self._rows[0]) if self._rows else set()
        self._by_columns: dict[tuple[str, ...], dict[tuple[str, ...], list[Mapping[str, Any]]]] = {}
        first = self._rows[0] if self._rows else {}
        self.facts = {k: first[k] for k in ("gfx", "cu_num") if first.get(k)}

    def candidates(self, key: Key) -> list[Candidate]:
        """Recorded rows of a shape: the rows that agree in every key column that the recording has."""
        columns = tuple(sorted(c for c in key if c in self._columns))
        index = self._by_columns.get(columns)
        if index is None:
            index = self._by_columns[columns] = {}
            for row in self._rows:
                index.setdefault(tuple(str(row.get(c)) for c in columns), []).append(row)
        return [_candidate(r, key) for r in index.get(tuple(str(key[c]) for c in columns), ())]


def load(path: Path) -> Recording:
    """A recording from a .csv file or JSON lines. Raises OSError, ValueError."""
    with open(path, encoding="utf-8-sig", newline="") as f:
        if path.suffix == ".csv":
            return Recording(csv.DictReader(f, skipinitialspace=True))
        return Recording([json.loads(line) for line in f if line.strip()])


def synthetic(count: int) -> Callable[[Key], list[Candidate]]:
    """Candidates made from a hash of the key, always the same `count`, the last one unsupported."""

    def candidates(key: Key) -> list[Candidate]:
        text = json.dumps(key, sort_keys=True).encode()
        floor = max(2.0, flops(key) / 500e6)  # no faster than 500 TFLOPS or 2 us
        out: list[Candidate] = []
        for i in range(count):
            draw = hashlib.blake2b(text, digest_size=8, salt=b"%d" % i).digest()
            a, b = int.from_bytes(draw[:4], "big") / 2**32, int.from_bytes(draw[4:], "big") / 2**32
            row: Row = {"kernelId": i, "splitK": 0, "kernelName": f"{SYNTHETIC}{i:02d}", "libtype": "replay"}
            if i and i == count - 1:
                row |= {"us": -1.0, "status": "unsupported", "detail": "made up"}
            else:
                us = round(floor * (1 + a), 4)
                row |= {"us": us, "status": "ok", "errRatio": round(b / 100, 4), "spread": round(b / 50, 4)}
                row |= {"samples": 101, "tflops": round(flops(key) / us / 1e6, 2), "bw": bandwidth(key, us)}
            out.append(Candidate(row, max(0.0, row["us"]) * _CALLS / 1e6))
        return out

    return candidates


def flops(key: Key) -> float:
    """2*M*N*K*B of a shape; 0 where it has no such columns."""
    try:
        return 2.0 * int(key["M"]) * int(key["N"]) * int(key["K"]) * int(key.get("B", 1))
    except (KeyError, ValueError):
        return 0.0


def bandwidth(key: Key, us: float) -> float:
    """GB/s of two-byte operands read once and an output of two bytes written once."""
    try:
        m, n, k, b = (int(key.get(c, 1)) for c in "MNKB")
    except ValueError:
        return 0.0
    return round(2.0 * b * (m * k + k * n + m * n) / us / 1e3, 2)


def _candidate(raw: Mapping[str, Any], key: Key) -> Candidate:
    row: Row = {}
    for name in _FLOATS:
        if (number := _number(raw.get(name))) is not None:
            row[name] = number  # type: ignore[literal-required]
    for name in _INTS:
        if (number := _number(raw.get(name))) is not None:
            row[name] = int(number)  # type: ignore[literal-required]
    for name in _TEXTS:
        if raw.get(name):
            row[name] = str(raw[name])  # type: ignore[literal-required]
    us = row.get("us", -1.0)
    if us <= 0:
        row["us"] = -1.0
        row.setdefault("status", "error")
    else:
        row.setdefault("tflops", round(flops(key) / us / 1e6, 2))
        row.setdefault("status", "ok")
    seconds = _number(raw.get("seconds"))
    return Candidate(row, max(0.0, row["us"]) * _CALLS / 1e6 if seconds is None else max(0.0, seconds))


def _cell(value: Any) -> Any:
    text = value.strip() if isinstance(value, str) else value
    return None if text in ("", "Null", "nan", "None") else text


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
