"""Tuner `faulty`: the tuner `replay` with real faults, for tests.

Options beyond those of `replay`:

- `faults`: see gemmfleet_faulty.faults;
- `times`: by slot, microseconds of its timed canary (compute, memory), or a text that it raises; [] or absent: none;
- `blocklist`: path of the list of candidates that faulted, instead of a file of the node folder.

A shape that runs alone goes on without a candidate that faulted, as the tuner `aiter` does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gemmfleet_faulty.faults import VIOLENT, Fault, strike, strike_apart
from worker.protocol import Row, Spec, SpecShape, Withheld, is_wanted
from worker.tuners.aiter.blocklist import Blocklist, BlocklistEntry, SlotIdentity, slot_identity
from worker.tuners.aiter.blocklist import CandidateId as Lost
from worker.tuners.base import Emit, Place, TunerFault
from worker.tuners.replay import SLICE_S, Options, ReplayTuner, conclude, identity, measure, pause


@dataclass(frozen=True, slots=True)
class FaultyOptions(Options):
    """Options of a replay with faults; see the module's docstring."""

    faults: tuple[Fault, ...] = ()
    blocklist: str = ""
    times: Mapping[str, list[float] | str] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> FaultyOptions:
        """Raises ValueError on what it does not know: a test that asks for nothing would pass."""
        if unknown := [n for n in raw if n not in {f.name for f in fields(cls)}]:
            raise ValueError(f"faulty has no option {', '.join(unknown)}")
        return cls(**{**raw, "faults": tuple(Fault.parse(f) for f in raw.get("faults", ()))})


class FaultyTuner(ReplayTuner):
    """Deterministic but for its faults."""

    def __init__(self) -> None:
        super().__init__()
        self._where: SlotIdentity | None = None

    def parse(self, raw: Mapping[str, Any]) -> FaultyOptions:
        return FaultyOptions.parse(raw)

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        super().configure(options, place)
        if isinstance(self.options, FaultyOptions) and self.options.times.get(place.slot):
            self.timed_canary_s, self.time_canary = 1e-9, self._time_canary

    def _time_canary(self) -> tuple[float, float]:
        assert isinstance(self.options, FaultyOptions)
        times = self.options.times[self.place.slot]
        if isinstance(times, str):
            raise RuntimeError(times)
        return times[0], times[1]

    def small_product(self, n: int) -> int:
        total = super().small_product(n)
        facts = {"slot": self.place.slot, "node": self.place.node}
        for fault in _faults(self.options):
            if fault.kind == "sick_canary" and fault.strikes(facts, self.place):
                strike(fault, self.place)
                total += 1
        return total

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        self.judge(spec)
        return super().tune(spec, emit)

    def judge(self, spec: Spec) -> None:
        self._blocklist(self.options).judge(spec.refuted, spec.confirmed)

    def tune_shape(self, spec: Spec, shape: SpecShape, options: Options, emit: Emit) -> None:
        only = spec.only_of(shape.id)
        candidates = [c for c in self.candidates(shape.key) if is_wanted(only, c.get("kernelName", ""))]
        fault = self._fault(spec, shape, options)
        while fault is not None and fault.held(self.place):
            pause(SLICE_S, emit)
        rows: list[Row] = []
        tried = Tried(spec, shape, self._blocklist(options))
        for n, candidate in enumerate(candidates):
            if tried.leaves_out(candidate):
                continue
            self._strike(fault, n, shape, emit)
            if how := self._candidate_faults(spec, shape, options, candidate):
                pause(options.seconds_per_shape / len(candidates), emit)
                emit.row(shape.id, {**candidate, "us": -1.0, "status": "error", "detail": how})
                tried.lose(candidate, how, self.canary)
                continue
            spoilt = _spoilt(candidate, fault.kind if fault else "")
            rows.append(measure(spoilt, len(candidates), shape, spec.err_ratio, options, emit))
        self._strike(fault, len(candidates), shape, emit)
        conclude(shape, rows, len(candidates), emit, withheld=tried.withheld)

    def _blocklist(self, options: Options) -> Blocklist:
        folder = (self.place.node_dir or Path.cwd()) / "replay"
        other = options.blocklist if isinstance(options, FaultyOptions) else ""
        if self._where is None:  # asks the GPU
            self._where = slot_identity(self.place, "replay")
        return Blocklist(Path(other) if other else folder / "blocklist.jsonl", self._where)

    def _candidate_faults(self, spec: Spec, shape: SpecShape, options: Options, row: Row) -> str:
        """Exit of the candidate's process in words, "" where it does not fault."""
        facts = {**self._facts(spec, shape), **row}
        faults = (f for f in _faults(options) if f.of_candidates)
        fault = next((f for f in faults if f.strikes(facts, self.place)), None)
        return strike_apart(fault, self.place) if fault else ""

    def _facts(self, spec: Spec, shape: SpecShape) -> dict[str, Any]:
        number = spec.attempt.rpartition("-")[2]
        facts = {**shape.key, "shape": shape.id, "attempt": spec.attempt, "attempt_number": number}
        return {**facts, "group": spec.group, "slot": self.place.slot, "node": self.place.node}

    def _fault(self, spec: Spec, shape: SpecShape, options: Options) -> Fault | None:
        facts = self._facts(spec, shape)
        faults = (f for f in _faults(options) if f.kind != "sick_canary" and not f.of_candidates)
        return next((f for f in faults if f.strikes(facts, self.place)), None)

    def _strike(self, fault: Fault | None, rows: int, shape: SpecShape, emit: Emit) -> None:
        """Let a violent fault happen once so many rows are out."""
        if fault is None or fault.kind not in VIOLENT or fault.after_rows != rows:
            return
        strike(fault, self.place)
        if fault.kind == "lie":
            emit.tuned(shape.id + 1_000_000, {"us": 1.0})


class Tried:
    """Faults of a shape's candidates: those that faulted are left out where the shape runs `alone`."""

    def __init__(self, spec: Spec, shape: SpecShape, blocklist: Blocklist) -> None:
        self._family, self._list, self._alone = spec.family, blocklist, len(spec.shapes) == 1
        self._key = tuple(f"{k}={v}" for k, v in shape.key.items())
        self._known = {c.ident: e for c, e in blocklist.in_force(spec.family).items() if c.key == self._key}
        self.withheld: list[Withheld] = []

    def leaves_out(self, row: Row) -> bool:
        """Return whether the candidate faulted here before, and note that it is withheld."""
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
        entry = BlocklistEntry(self._list.where, self._family, lost, "fault", how, ok, time.time())
        self._list.note(entry)
        if not ok:
            raise TunerFault("fault", f"{how}; after it the canary failed: {words}")
        self.withheld.append(entry.withheld("attempt"))


def _faults(options: Options) -> tuple[Fault, ...]:
    return options.faults if isinstance(options, FaultyOptions) else ()


def error_ratio(got: list[float], reference: list[float]) -> float:
    """The share of elements beyond atol 1e-2 + rtol 1e-2 of the reference, AITER's measure of a result."""
    off = sum(abs(g - r) > 1e-2 + 1e-2 * abs(r) for g, r in zip(got, reference, strict=True))
    return off / len(reference)


def _spoilt(row: Row, kind: str) -> Row:
    """The row as the soft faults make it: `wrong` puts a third of a small result off and measures that."""
    if kind == "no_candidate":
        return {**row, "us": -1.0, "status": "error", "detail": "replay: no_candidate"}
    if kind == "wrong" and row["us"] > 0:
        reference = [float(i) for i in range(64)]
        got = [v if i % 3 else v + 1 + abs(v) for i, v in enumerate(reference)]
        return {**row, "errRatio": round(error_ratio(got, reference), 4)}
    return row
