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
_CANARY_N = 12
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
class Options:
    """Options of a replay; see the module's docstring."""

    recording: str = "synthetic"
    candidates: int = 4
    seconds_per_shape: float = 0.0
    start_seconds: float = 0.0
    gfx: str = ""
    cu_num: int = 0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError naming every option that there is not."""
        known = [f.name for f in fields(cls)]
        for name in raw.keys() - known:
            near, there = did_you_mean(name, known), ", ".join(known)
            raise ValueError(f"bad options for the tuner replay: unknown option {name!r}{near} (there are {there})")
        return cls(**raw)


def recorded(path: Path) -> Callable[[Key], list[Row]]:
    """Candidates from a CSV: the rows that agree in every key column that it has. Raises OSError, ValueError."""
    with open(path, encoding="utf-8-sig", newline="") as f:
        rows = list(csv.DictReader(f))

    def candidates(key: Key) -> list[Row]:
        mine = [r for r in rows if all(r[c] == str(v) for c, v in key.items() if c in r)]
        return [_row(r) for r in mine]

    return candidates


def _row(raw: Mapping[str, str]) -> Row:
    row: Row = {name: kind(raw[name]) for name, kind in _KINDS.items() if raw.get(name)}
    return {"us": -1.0, "status": "ok" if row.get("us", -1.0) > 0 else "error", **row}


def synthetic(count: int) -> Callable[[Key], list[Row]]:
    """Candidates made from a hash of the key, always the same `count`, the last one unsupported."""

    def candidates(key: Key) -> list[Row]:
        from worker.families import SYNTHETIC

        text, ops = json.dumps(key, sort_keys=True).encode(), flops(key)
        out: list[Row] = []
        for i in range(count):
            draw = hashlib.blake2b(text, digest_size=8, salt=b"%d" % i).digest()
            a, b = int.from_bytes(draw[:4], "big") / 2**32, int.from_bytes(draw[4:], "big") / 2**32
            row: Row = {"kernelId": i, "splitK": 0, "kernelName": f"{SYNTHETIC}{i:02d}", "libtype": "replay"}
            if i and i == count - 1:
                row |= {"us": -1.0, "status": "unsupported", "detail": "made up"}
            else:
                us = round(max(2.0, ops / 500e6) * (1 + a), 4)  # no faster than 500 TFLOPS or 2 us
                row |= {"us": us, "status": "ok", "errRatio": round(b / 100, 4), "spread": round(b / 50, 4)}
                row |= {"samples": 101, "tflops": round(ops / us / 1e6, 2)}
            out.append(row)
        return out

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

        self._raw: Mapping[str, Any] = {}
        self.place = Place()
        self.options = Options()
        self.candidates: Callable[[Key], list[Row]] = synthetic(4)

    def parse(self, raw: Mapping[str, Any]) -> Options:
        """Options of the node or a spec. Raises ValueError."""
        return Options.parse(raw)

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        self._raw = options.get("replay", options)
        self.place = place
        self.options = self.parse(self._raw)

    def open(self) -> dict[str, Any]:
        from worker.device import identify

        time.sleep(self.options.start_seconds)
        self._load(self.options)
        here = identify()
        gfx, cu_num = self.options.gfx or here["gfx"], self.options.cu_num or int(here["cu_num"] or 1)
        device = f"replay of {self.options.recording}"
        return {"gfx": gfx, "cu_num": cu_num, "device": device, "versions": {"replay": "1"}}

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
        from worker.protocol import is_wanted

        candidates, only = self.candidates(shape.key), spec.only_of(shape.id)
        chosen = [c for c in candidates if is_wanted(only, *identity(c)[::2])]
        rows = [measure(c, len(candidates), shape, spec.err_ratio, options, emit) for c in chosen]
        conclude(shape, rows, len(candidates), emit)

    def _load(self, options: Options) -> None:
        made_up = options.recording == "synthetic"
        self.candidates = synthetic(options.candidates) if made_up else recorded(Path(options.recording))


def measure(row: Row, count: int, shape: SpecShape, err_ratio: float, options: Options, emit: Emit) -> Row:
    """Let a candidate's time pass and emit its row. `count`: candidates of the shape."""
    from worker.protocol import is_wrong

    pause(options.seconds_per_shape / count, emit)
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
    """Cells that identify a candidate among the others of its shape, on every slot."""
    return (str(row.get("kernelName", "")), str(row.get("kernelId", "")), str(row.get("splitK", "")))


def pause(seconds: float, emit: Emit) -> None:
    """Wait this many seconds, and give signs of life."""
    until = time.monotonic() + seconds
    while seconds > 0 and (left := until - time.monotonic()) > 0:
        time.sleep(min(SLICE_S, left))
        emit.alive()


SPEC = TunerSpec(
    name="replay",
    tuner_class="worker.tuners.replay:ReplayTuner",
    parse_options=Options.parse,
    cost_guess=CostGuess(0.001, 0.01, 0.0, 0.0, 1.0),
)
