"""The tuner `replay`, for tests: it answers with recorded or made-up rows. Its options:

- `recording`: a CSV of rows with the key columns of each shape and the names of protocol.Row, or `synthetic` (the
  default; `candidates`: how many);
- `seconds_per_shape`: how long a shape takes;
- `start_seconds`: duration of `open`;
- `gfx`, `cu_num`: the device to pose as.

The node sets them (NodeConfig.options, or its `replay`), and a spec may override them (`options["replay"]`).
"""

from __future__ import annotations

import csv
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.text import did_you_mean, plural
from worker.tuners.catalog import CostGuess, TunerSpec

if TYPE_CHECKING:
    from worker.protocol import Row, Spec, SpecShape
    from worker.tuners.base import Emit, Place

Key = Mapping[str, int | str]
SLICE_S = 0.1
"""Seconds between signs of life."""
_CANARY_N = 12
_MOST_FLOPS_PER_US = 500e6
"""Made-up kernels are no faster than 500 TFLOPS,"""
_LEAST_US = 2.0
"""nor than this."""
_KINDS: dict[str, type[float] | type[int] | type[str]] = {
    "us": float,
    "errRatio": float,
    "kernelId": int,
    "splitK": int,
    "kernelName": str,
    "libtype": str,
    "status": str,
}


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay; see the module's docstring."""

    recording: str = "synthetic"
    candidates: int = 4
    seconds_per_shape: float = 0.0
    start_seconds: float = 0.0
    gfx: str = ""
    cu_num: int = 0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> ReplayOptions:
        """Raises ValueError for an unknown option."""
        legal = [f.name for f in fields(cls)]
        for name in raw.keys() - legal:
            unknown = f"unknown option {name!r}{did_you_mean(name, legal)} (there are {', '.join(legal)})"
            raise ValueError(f"bad options for the tuner replay: {unknown}")
        return cls(**raw)


def recorded(path: Path) -> Callable[[Key], list[Row]]:
    """Candidates from a CSV: the rows that agree in every key column that it has. Raises OSError, ValueError."""
    with open(path, encoding="utf-8-sig", newline="") as f:
        rows = list(csv.DictReader(f))

    def candidates(key: Key) -> list[Row]:
        return [_row(raw) for raw in rows if _agrees(raw, key)]

    return candidates


def _agrees(raw: Mapping[str, str], key: Key) -> bool:
    return all(raw[column] == str(value) for column, value in key.items() if column in raw)


def _row(raw: Mapping[str, str]) -> Row:
    row: Row = {name: kind(raw[name]) for name, kind in _KINDS.items() if raw.get(name)}
    return {"us": -1.0, "status": "ok" if row.get("us", -1.0) > 0 else "error", **row}


def synthetic(count: int) -> Callable[[Key], list[Row]]:
    """Candidates made from a hash of the key, always the same `count`, the last one unsupported."""

    def candidates(key: Key) -> list[Row]:
        from worker.families import SYNTHETIC

        text = json.dumps(key, sort_keys=True).encode()
        operations = flops(key)
        rows: list[Row] = []
        for i in range(count):
            digest = hashlib.blake2b(text, digest_size=8, salt=b"%d" % i).digest()
            slowness = int.from_bytes(digest[:4], "big") / 2**32
            error = int.from_bytes(digest[4:], "big") / 2**32
            row: Row = {"kernelId": i, "splitK": 0, "kernelName": f"{SYNTHETIC}{i:02d}", "libtype": "replay"}
            if i and i == count - 1:
                row |= {"us": -1.0, "status": "unsupported", "detail": "made up"}
            else:
                us = round(max(_LEAST_US, operations / _MOST_FLOPS_PER_US) * (1 + slowness), 4)
                row |= {"us": us, "status": "ok", "errRatio": round(error / 100, 4), "spread": round(error / 50, 4)}
                row |= {"samples": 101, "tflops": round(operations / us / 1e6, 2)}
            rows.append(row)
        return rows

    return candidates


def flops(key: Key) -> float:
    """2*M*N*K*B of a shape; 0 where it has no such columns."""
    try:
        return 2.0 * int(key["M"]) * int(key["N"]) * int(key["K"]) * int(key.get("B", 1))
    except (KeyError, ValueError):
        return 0.0


class ReplayTuner:
    """Tuner that repeats a recording; deterministic."""

    def __init__(self) -> None:
        from worker.tuners.base import Place

        self._node_options: Mapping[str, Any] = {}
        self.place = Place()
        self.options = ReplayOptions()
        self.candidates: Callable[[Key], list[Row]] = synthetic(4)

    def parse(self, raw: Mapping[str, Any]) -> ReplayOptions:
        """Options of the node or a spec. Raises ValueError."""
        return ReplayOptions.parse(raw)

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        self._node_options = options.get("replay", options)
        self.place = place
        self.options = self.parse(self._node_options)

    def open(self) -> dict[str, Any]:
        from worker.device import identify

        time.sleep(self.options.start_seconds)
        self._load(self.options)
        here = identify()
        return {
            "gfx": self.options.gfx or here["gfx"],
            "cu_num": self.options.cu_num or int(here["cu_num"] or 1),
            "device": f"replay of {self.options.recording}",
            "versions": {"replay": "1"},
        }

    def canary(self) -> tuple[bool, float, str]:
        """A small product of whole numbers with a known sum, really computed."""
        n = _CANARY_N
        began = time.perf_counter()
        total = self.small_product(n)
        us = (time.perf_counter() - began) * 1e6
        known = n * (n * (n - 1) // 2) ** 2
        return total == known, us, f"sum {total}, known {known}"

    def small_product(self, n: int) -> int:
        """Sum over an n x n x n product of i * j."""
        return sum(i * j for i in range(n) for j in range(n) for _ in range(n))

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        options = self.options
        if "replay" in spec.options:
            options = self.parse({**self._node_options, **spec.options["replay"]})
            self._load(options)
        began = time.perf_counter()
        for shape in spec.shapes:
            emit.started(shape.id)
            self.tune_shape(spec, shape, options, emit)
        return {"measure": time.perf_counter() - began}

    def tune_shape(self, spec: Spec, shape: SpecShape, options: ReplayOptions, emit: Emit) -> None:
        """Rows and verdict of a shape that is started."""
        from worker.protocol import is_wanted

        candidates = self.candidates(shape.key)
        only = spec.only_of(shape.id)
        rows = []
        for candidate in candidates:
            name, _, split = identity(candidate)
            if is_wanted(only, name, split):
                rows.append(measure(candidate, len(candidates), shape, spec.err_ratio, options, emit))
        conclude(shape, rows, len(candidates), emit)

    def _load(self, options: ReplayOptions) -> None:
        if options.recording == "synthetic":
            self.candidates = synthetic(options.candidates)
        else:
            self.candidates = recorded(Path(options.recording))


def measure(row: Row, count: int, shape: SpecShape, err_ratio: float, options: ReplayOptions, emit: Emit) -> Row:
    """Let a candidate's time pass and emit its row. `count`: candidates of the shape."""
    from worker.protocol import is_wrong

    pause(options.seconds_per_shape / count, emit)
    if row["status"] == "ok" and is_wrong(row.get("errRatio", 0.0), err_ratio):
        row = {**row, "status": "wrong"}
    emit.row(shape.id, row)
    return row


def conclude(shape: SpecShape, rows: Sequence[Row], count: int, emit: Emit, **evidence: Any) -> None:
    """Emit the verdict on a shape by the rows of its `count` candidates."""
    best = min((row for row in rows if row["status"] == "ok"), key=lambda row: row["us"], default=None)
    wrong = len([row for row in rows if row["status"] == "wrong"])
    if best is not None:
        emit.tuned(shape.id, best, candidate=identity(best), **evidence)
    elif not count:
        emit.failed(shape.id, "unsupported", "the recording has no row of this shape")
    elif wrong:
        emit.failed(shape.id, "wrong_result", f"{wrong} of {plural(count, 'candidate')} off", **evidence)
    else:
        emit.failed(shape.id, "no_candidate", f"none of {plural(count, 'candidate')} ran", **evidence)


def identity(row: Row) -> tuple[str, ...]:
    """Cells that identify a candidate among the others of its shape, on every slot."""
    return (str(row.get("kernelName", "")), str(row.get("kernelId", "")), str(row.get("splitK", "")))


def pause(seconds: float, emit: Emit) -> None:
    """Wait this many seconds, and give signs of life."""
    until = time.monotonic() + seconds
    while seconds > 0:
        remaining = until - time.monotonic()
        if remaining <= 0:
            return
        time.sleep(min(SLICE_S, remaining))
        emit.alive()


SPEC = TunerSpec(
    name="replay",
    tuner_class="worker.tuners.replay:ReplayTuner",
    parse_options=ReplayOptions.parse,
    cost_guess=CostGuess(0.001, 0.01, 0.0, 0.0, 1.0),
)
