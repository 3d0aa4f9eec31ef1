"""Tuner `replay`: answers from recorded or made-up rows, in recorded time, with real faults. For tests.

Options, on the node (NodeConfig.options, or its `replay`) and on top of them in a spec (`options["replay"]`):

- `recording`: path of a .csv or .jsonl of profile rows, or `synthetic` (the default; `candidates`: how many);
- `seconds_per_shape`: instead of the recorded durations; `scale`: factor on the recorded ones (default 1);
- `start_seconds`: how long `open` takes;
- `gfx`, `cu_num`: the device to pose as, instead of the recording's;
- `faults`: see worker.tuners.replay.faults;
- `blocklist`: where candidates that faulted are kept, instead of a file of the node folder.

A shape that runs alone goes on without a candidate that faulted, as the tuner `aiter` does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from worker.device.probe import identify
from worker.protocol import Row, Spec, SpecShape, Withheld
from worker.tuners.aiter.drive.blocklist import Blocklist, Entry, Where, here
from worker.tuners.aiter.drive.progress import Candidate as Lost
from worker.tuners.base import Emit, Place, TunerFault
from worker.tuners.replay.faults import VIOLENT, Fault, strike, strike_apart
from worker.tuners.replay.recording import Candidate, Key, Recording, load, synthetic

SLICE_S = 0.1
_CANARY_N = 12


@dataclass(frozen=True, slots=True)
class Options:
    """What a replay is told; see the module's docstring."""

    recording: str = "synthetic"
    candidates: int = 4
    seconds_per_shape: float | None = None
    scale: float = 1.0
    start_seconds: float = 0.0
    gfx: str = ""
    cu_num: int = 0
    faults: tuple[Fault, ...] = ()
    blocklist: str = ""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError on what it does not know."""
        unknown = set(raw) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"replay has no option {', '.join(sorted(unknown))}")
        return cls(**{**raw, "faults": tuple(Fault.parse(f) for f in raw.get("faults", ()))})


class ReplayTuner:
    """Holds the recording; deterministic but for its faults."""

    def __init__(self) -> None:
        self._raw: Mapping[str, Any] = {}
        self._place = Place()
        self._options = Options()
        self._where: Where | None = None
        self._recording: Recording | None = None
        self._candidates: Callable[[Key], list[Candidate]] = synthetic(4)

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        self._raw = options.get("replay", options)
        self._place = place
        self._options = Options.parse(self._raw)

    def open(self) -> dict[str, Any]:
        time.sleep(self._options.start_seconds)
        source = self._options.recording
        self._load(self._options)
        here = identify()
        facts = self._recording.facts if self._recording else {}
        gfx = self._options.gfx or facts.get("gfx") or here["gfx"]
        cu_num = self._options.cu_num or int(facts.get("cu_num") or here["cu_num"] or 1)
        return {"gfx": gfx, "cu_num": cu_num, "device": f"replay of {source}", "versions": {"replay": "1"}}

    def canary(self) -> tuple[bool, float, str]:
        """A small product of whole numbers with a known sum, really computed."""
        n = _CANARY_N
        began = time.perf_counter()
        total = sum(i * j for i in range(n) for j in range(n) for _ in range(n))
        us = (time.perf_counter() - began) * 1e6
        known = n * (n * (n - 1) // 2) ** 2
        facts = {"slot": self._place.slot, "node": self._place.node}
        for fault in self._options.faults:
            if fault.kind == "sick_canary" and fault.strikes(facts, self._place):
                strike(fault, self._place)
                total += 1
        return total == known, us, f"sum {total}, known {known}"

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        options = self._options
        if "replay" in spec.options:
            options = Options.parse({**self._raw, **spec.options["replay"]})
            self._load(options)
        began = time.perf_counter()
        self.judge(spec)
        blocklist = self._blocklist(options)
        for shape in spec.shapes:
            self._tune_shape(spec, shape, options, emit, blocklist)
        return {"measure": time.perf_counter() - began}

    def judge(self, spec: Spec) -> None:
        self._blocklist(self._options).judge(spec.refuted, spec.confirmed)

    def _blocklist(self, options: Options) -> Blocklist:
        folder = (self._place.node_dir or Path.cwd()) / "replay"
        path = Path(options.blocklist) if options.blocklist else folder / "blocklist.jsonl"
        if self._where is None:  # asks the GPU
            self._where = here(self._place, "replay")
        return Blocklist(path, self._where)

    def _load(self, options: Options) -> None:
        if options.recording == "synthetic":
            self._recording, self._candidates = None, synthetic(options.candidates)
        elif self._recording is None or options.recording != self._options.recording:
            self._recording = load(Path(options.recording))
            self._candidates = self._recording.candidates

    def _tune_shape(self, spec: Spec, shape: SpecShape, options: Options, emit: Emit, blocklist: Blocklist) -> None:
        emit.started(shape.id)
        candidates, asked = self._candidates(shape.key), spec.only_of(shape.id)
        if asked is not None:
            candidates = [c for c in candidates if identity(c.row) in asked]
        fault = self._fault(spec, shape, options)
        while fault is not None and fault.held(self._place):
            pause(SLICE_S, emit)
        best: Row | None = None
        wrong = 0
        ran: list[tuple[str, ...]] = []
        tried = Tried(spec, shape, blocklist, alone=len(spec.shapes) == 1 or asked is not None)
        for n, candidate in enumerate(candidates):
            if tried.leaves_out(candidate.row):
                continue
            self._strike(fault, n, shape, emit)
            pause(_seconds(candidate, len(candidates), options), emit)
            if how := self._candidate_faults(spec, shape, options, candidate.row):
                emit.row(shape.id, {**candidate.row, "us": -1.0, "status": "error", "detail": how})
                tried.lose(candidate.row, how, self.canary)
                continue
            ran.append(identity(candidate.row))
            row = _judged(_spoilt(candidate.row, fault.kind if fault else ""), spec.err_ratio)
            emit.row(shape.id, row)
            wrong += row["status"] == "wrong"
            if row["status"] == "ok" and (best is None or row["us"] < best["us"]):
                best = row
        self._strike(fault, len(candidates), shape, emit)
        withheld = tried.withheld
        if best is not None:
            emit.tuned(shape.id, best, candidate=identity(best), ran=ran if asked else (), withheld=withheld)
        elif not candidates:
            emit.failed(shape.id, "unsupported", "the recording has no row of this shape")
        elif wrong:
            detail = f"{wrong} of {len(candidates)} candidates are off"
            emit.failed(shape.id, "wrong_result", detail, ran=ran if asked else (), withheld=withheld)
        else:
            detail = f"none of {len(candidates)} candidates ran"
            emit.failed(shape.id, "no_candidate", detail, ran=ran if asked else (), withheld=withheld)

    def _candidate_faults(self, spec: Spec, shape: SpecShape, options: Options, row: Row) -> str:
        """How the candidate's process ended, "" where it does not fault."""
        facts = {**self._facts(spec, shape), **row}
        fault = next((f for f in options.faults if f.of_candidates and f.strikes(facts, self._place)), None)
        return strike_apart(fault, self._place) if fault else ""

    def _facts(self, spec: Spec, shape: SpecShape) -> dict[str, Any]:
        number = spec.attempt.rpartition("-")[2]
        facts = {**shape.key, "shape": shape.id, "attempt": spec.attempt, "attempt_number": number}
        return {**facts, "group": spec.group, "slot": self._place.slot, "node": self._place.node}

    def _fault(self, spec: Spec, shape: SpecShape, options: Options) -> Fault | None:
        if not options.faults:
            return None
        facts = self._facts(spec, shape)
        faults = (f for f in options.faults if f.kind != "sick_canary" and not f.of_candidates)
        return next((f for f in faults if f.strikes(facts, self._place)), None)

    def _strike(self, fault: Fault | None, rows: int, shape: SpecShape, emit: Emit) -> None:
        """Let a violent fault happen once so many rows are out."""
        if fault is None or fault.kind not in VIOLENT or fault.after_rows != rows:
            return
        strike(fault, self._place)
        if fault.kind == "lie":
            emit.tuned(shape.id + 1_000_000, {"us": 1.0})


class Tried:
    """What became of a shape's candidates: those that faulted are left out where the shape runs `alone`."""

    def __init__(self, spec: Spec, shape: SpecShape, blocklist: Blocklist, *, alone: bool) -> None:
        self._family, self._list, self._alone = spec.family, blocklist, alone
        self._key = tuple(f"{k}={v}" for k, v in shape.key.items())
        known = {} if spec.only_of(shape.id) is not None else blocklist.in_force(spec.family)
        self._known = {c.ident: e for c, e in known.items() if c.key == self._key}
        self.withheld: list[Withheld] = []

    def leaves_out(self, row: Row) -> bool:
        """Whether the candidate faulted here before."""
        entry = self._known.get(identity(row))
        if entry is not None:
            self.withheld.append(entry.withheld("blocklist"))
        return entry is not None

    def lose(self, row: Row, how: str, canary: Callable[[], tuple[bool, float, str]]) -> None:
        """It faulted: written down and left out, if the slot proves well. Raises TunerFault."""
        if not self._alone:
            raise TunerFault("fault", f"candidate {row.get('kernelName')}: {how}")
        ok, _, words = canary()
        lost = Lost(self._key, identity(row))
        entry = Entry(self._list.where, self._family, lost, "fault", how, ok, time.time())
        self._list.note(entry)
        if not ok:
            raise TunerFault("fault", f"{how}; after it the canary failed: {words}")
        self.withheld.append(entry.withheld("attempt"))


def identity(row: Row) -> tuple[str, ...]:
    """What tells a candidate from the others of its shape, on every slot."""
    return (str(row.get("kernelName", "")), str(row.get("kernelId", "")), str(row.get("splitK", "")))


def pause(seconds: float, emit: Emit) -> None:
    """Let so much time pass, with signs of life."""
    until = time.monotonic() + seconds
    while seconds > 0 and (left := until - time.monotonic()) > 0:
        time.sleep(min(SLICE_S, left))
        emit.alive()


def error_ratio(got: list[float], reference: list[float]) -> float:
    """The share of elements beyond atol 1e-2 + rtol 1e-2 of the reference, AITER's measure of a result."""
    off = sum(abs(g - r) > 1e-2 + 1e-2 * abs(r) for g, r in zip(got, reference, strict=True))
    return off / len(reference)


def _seconds(candidate: Candidate, count: int, options: Options) -> float:
    if options.seconds_per_shape is not None:
        return options.seconds_per_shape / count
    return candidate.seconds * options.scale


def _spoilt(row: Row, kind: str) -> Row:
    """The row as the soft faults make it: `wrong` puts a third of a small result off and measures that."""
    if kind == "no_candidate":
        return {**row, "us": -1.0, "status": "error", "detail": "replay: no_candidate"}
    if kind == "wrong" and row["us"] > 0:
        reference = [float(i) for i in range(64)]
        got = [v if i % 3 else v + 1 + abs(v) for i, v in enumerate(reference)]
        return {**row, "errRatio": round(error_ratio(got, reference), 4)}
    return row


def _judged(row: Row, limit: float) -> Row:
    if row["status"] == "ok" and row.get("errRatio", 0.0) > limit:
        return {**row, "status": "wrong"}
    return row
