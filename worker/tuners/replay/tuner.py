"""Tuner `replay`: answers from recorded or made-up rows, in recorded time.

Options, on the node (NodeConfig.options, or its `replay`) and on top of them in a spec (`options["replay"]`):

- `recording`: path of a .csv or .jsonl of profile rows, or `synthetic` (the default; `candidates`: how many);
- `seconds_per_shape`: instead of the recorded durations; `scale`: factor on the recorded ones (default 1);
- `start_seconds`: duration of `open`;
- `gfx`, `cu_num`: the device to pose as, instead of the recording's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from worker.device.probe import identify
from worker.protocol import Row, Spec, SpecShape
from worker.text import plural
from worker.tuners.base import Emit, Place
from worker.tuners.replay.recording import Candidate, Key, Recording, load, synthetic

SLICE_S = 0.1
_CANARY_N = 12


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a replay; see the module's docstring."""

    recording: str = "synthetic"
    candidates: int = 4
    seconds_per_shape: float | None = None
    scale: float = 1.0
    start_seconds: float = 0.0
    gfx: str = ""
    cu_num: int = 0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError naming every option that there is not."""
        known = [f.name for f in fields(cls)]
        if unknown := [n for n in raw if n not in known]:
            strange = ", ".join(map(repr, unknown))
            raise ValueError(
                f"bad options for the tuner replay: unknown option {strange} (there are {', '.join(known)})"
            )
        return cls(**raw)


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
        candidates = self.candidates(shape.key)
        rows = [measure(c, len(candidates), shape, spec.err_ratio, options, emit) for c in candidates]
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
    if row["status"] == "ok" and row.get("errRatio", 0.0) > err_ratio:
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
    """Cells that tell a candidate from the others of its shape, on every slot."""
    return (str(row.get("kernelName", "")), str(row.get("kernelId", "")), str(row.get("splitK", "")))


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
