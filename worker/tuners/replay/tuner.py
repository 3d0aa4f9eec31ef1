"""Tuner `replay`: answers from recorded or made-up rows, in recorded time; its options are in spec.py.

A recorded row holds the shape's key columns and the results under the names of AITER's tables or of protocol.Row;
`seconds`, where it has it, is how long the candidate took to measure.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.families import FAMILIES, SYNTHETIC
from worker.protocol import is_wrong
from worker.text import plural
from worker.tuners.base import Place
from worker.tuners.replay.spec import Options

if TYPE_CHECKING:
    from worker.protocol import Row, Spec, SpecShape
    from worker.tuners.base import Emit

Key = Mapping[str, int | str]

SLICE_S = 0.1
_CANARY_N = 12
_ALIASES = {
    **{c.aiter: c.name for f in FAMILIES.values() for c in f.columns if c.aiter},
    "solidx": "kernelId", "err_ratio": "errRatio",
}  # fmt: skip
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
    import hashlib

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
            row[name] = number
    for name in _INTS:
        if (number := _number(raw.get(name))) is not None:
            row[name] = int(number)
    for name in _TEXTS:
        if raw.get(name):
            row[name] = str(raw[name])
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


class ReplayTuner:
    """Tuner that repeats a recording; deterministic."""

    def __init__(self) -> None:
        self._raw: Mapping[str, Any] = {}
        self.place = Place()
        self.options = Options()
        self._recording: Recording | None = None
        self.candidates: Callable[[Key], list[Candidate]] = synthetic(4)

    def parse(self, raw: Mapping[str, Any]) -> Options:
        """Options of the node or a spec. Raises ValueError."""
        return Options.parse(raw)

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        self._raw = options.get("replay", options)
        self.place = place
        self.options = self.parse(self._raw)

    def open(self) -> dict[str, Any]:
        from worker.device.probe import identify

        time.sleep(self.options.start_seconds)
        source = self.options.recording
        self._load(self.options)
        here = identify()
        facts = self._recording.facts if self._recording else {}
        gfx = self.options.gfx or facts.get("gfx") or here["gfx"]
        cu_num = self.options.cu_num or int(facts.get("cu_num") or here["cu_num"] or 1)
        return {"gfx": gfx, "cu_num": cu_num, "device": f"replay of {source}", "versions": {"replay": "1"}}

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
            options = self.parse({**self._raw, **spec.options["replay"]})
            self._load(options)
        began = time.perf_counter()
        for shape in spec.shapes:
            emit.started(shape.id)
            self.tune_shape(spec, shape, options, emit)
        return {"measure": time.perf_counter() - began}

    def tune_shape(self, spec: Spec, shape: SpecShape, options: Options, emit: Emit) -> None:
        """Rows and verdict of a shape that is started."""
        candidates, only = self.candidates(shape.key), spec.only_of(shape.id)
        chosen = [c for c in candidates if only is None or only.has(identity(c.row), *_named(c.row))]
        rows = [measure(c, len(candidates), shape, spec.err_ratio, options, emit) for c in chosen]
        conclude(shape, rows, len(candidates), emit)

    def _load(self, options: Options) -> None:
        if options.recording == "synthetic":
            self._recording, self.candidates = None, synthetic(options.candidates)
        elif self._recording is None or options.recording != self.options.recording:
            self._recording = load(Path(options.recording))
            self.candidates = self._recording.candidates


def measure(candidate: Candidate, count: int, shape: SpecShape, err_ratio: float, options: Options, emit: Emit) -> Row:
    """Let the candidate's time pass and emit its row. `count`: candidates of the shape."""
    pause(duration_s(candidate, count, options), emit)
    row = candidate.row
    if row["status"] == "ok" and is_wrong(row.get("errRatio", 0.0), err_ratio):
        row = {**row, "status": "wrong"}
    emit.row(shape.id, row)
    return row


def conclude(shape: SpecShape, rows: Sequence[Row], count: int, emit: Emit, **evidence: Any) -> None:
    """Emit the verdict on a shape by the rows of its `count` candidates."""
    best = min((r for r in rows if r["status"] == "ok"), key=lambda r: r["us"], default=None)
    wrong = sum(r["status"] == "wrong" for r in rows)
    if best is not None:
        emit.tuned(shape.id, best, candidate=identity(best), **evidence)
    elif not count:
        emit.failed(shape.id, "unsupported", "the recording has no row of this shape")
    elif wrong:
        emit.failed(shape.id, "wrong_result", f"{wrong} of {plural(count, 'candidate')} off", **evidence)
    else:
        emit.failed(shape.id, "no_candidate", f"none of {plural(count, 'candidate')} ran", **evidence)


def identity(row: Row) -> tuple[str, ...]:
    """Cells that distinguish a candidate from the others of its shape, on every slot."""
    return (str(row.get("kernelName", "")), str(row.get("kernelId", "")), str(row.get("splitK", "")))


def _named(row: Row) -> tuple[str, str]:
    return row.get("kernelName", ""), str(row.get("splitK", 0))


def duration_s(candidate: Candidate, count: int, options: Options) -> float:
    """Seconds that measuring one of `count` candidates takes."""
    if options.seconds_per_shape is not None:
        return options.seconds_per_shape / count
    return candidate.seconds * options.scale


def pause(seconds: float, emit: Emit) -> None:
    """Let so much time pass, with signs of life."""
    until = time.monotonic() + seconds
    while seconds > 0 and (left := until - time.monotonic()) > 0:
        time.sleep(min(SLICE_S, left))
        emit.alive()
