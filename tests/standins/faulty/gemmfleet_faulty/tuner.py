"""Tuner `faulty`: the tuner `replay` with real faults, for tests.

Options beyond those of `replay`:

- `faults`: see gemmfleet_faulty.faults;
- `times`: by slot, microseconds of its timed canary (compute, memory), or a text that it raises; [] or absent: none;
- `blocklist`: path of the list of candidates that faulted, instead of a file of the node folder.

A shape that runs alone goes on without a candidate that faulted, as the tuner `aiter` does it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemmfleet_faulty.faults import VIOLENT, Fault, folder_of, strike, strike_apart
from worker.protocol import Row, Spec, SpecShape, Withheld, is_wanted
from worker.tuners.aiter.blocklist import Blocklist, BlocklistEntry, CandidateId, SlotIdentity, slot_identity
from worker.tuners.base import Emit, Place, TunerFault
from worker.tuners.replay import SLICE_S, Options, ReplayTuner, conclude, identity, measure, pause


@dataclass(frozen=True)
class FaultyOptions(Options):
    """Options of a replay with faults; see the module's docstring."""

    faults: tuple[Fault, ...] = ()
    blocklist: str = ""
    times: Mapping[str, list[float] | str] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> FaultyOptions:
        """Raises ValueError on what it does not know: a test that asks for nothing would pass."""
        made = super().parse({**raw, "faults": tuple(Fault(**f) for f in raw.get("faults", ()))})
        assert isinstance(made, FaultyOptions)
        return made


class FaultyTuner(ReplayTuner):
    """Deterministic but for its faults."""

    def __init__(self) -> None:
        super().__init__()
        self.faulty = FaultyOptions()
        self._where: SlotIdentity | None = None

    def parse(self, raw: Mapping[str, Any]) -> FaultyOptions:
        self.faulty = FaultyOptions.parse(raw)
        return self.faulty

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        super().configure(options, place)
        if self.faulty.times.get(place.slot):
            self.timed_canary_s, self.time_canary = 1e-9, self._time_canary

    def _time_canary(self) -> tuple[float, float]:
        times = self.faulty.times[self.place.slot]
        if isinstance(times, str):
            raise RuntimeError(times)
        return times[0], times[1]

    def small_product(self, n: int) -> int:
        total = super().small_product(n)
        facts = {"slot": self.place.slot, "node": self.place.node}
        for fault in self.faulty.faults:
            if fault.kind == "sick_canary" and fault.strikes(facts, self.place):
                strike(fault, self.place)
                total += 1
        return total

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        self.judge(spec)
        return super().tune(spec, emit)

    def judge(self, spec: Spec) -> None:
        self._blocklist().judge(spec.refuted, spec.confirmed)

    def tune_shape(self, spec: Spec, shape: SpecShape, options: Options, emit: Emit) -> None:
        candidates, asked = self.candidates(shape.key), spec.only_of(shape.id)
        candidates = [c for c in candidates if is_wanted(asked, c.get("kernelName", ""))]
        facts = {**shape.key, "shape": shape.id, "attempt": spec.attempt, "group": spec.group}
        facts |= {"slot": self.place.slot, "node": self.place.node}
        of_shape = (f for f in self.faulty.faults if f.kind != "sick_canary" and not f.of_candidates)
        fault = next((f for f in of_shape if f.strikes(facts, self.place)), None)
        while fault is not None and fault.held(self.place):
            pause(SLICE_S, emit)
        key = tuple(f"{k}={v}" for k, v in shape.key.items())
        known = {c.ident: e for c, e in self._blocklist().in_force(spec.family).items() if c.key == key}
        withheld: list[Withheld] = []
        rows: list[Row] = []
        for n, candidate in enumerate(candidates):
            if entry := known.get(identity(candidate)):
                withheld.append(entry.withheld("blocklist"))
                continue
            self._strike(fault, n, shape, emit)
            of_it = (f for f in self.faulty.faults if f.of_candidates)
            if own := next((f for f in of_it if f.strikes({**facts, **candidate}, self.place)), None):
                pause(options.seconds_per_shape / len(candidates), emit)
                how = strike_apart(own, self.place)
                emit.row(shape.id, {**candidate, "us": -1.0, "status": "error", "detail": how})
                withheld.append(self._lose(spec, CandidateId(key, identity(candidate)), how))
                continue
            spoilt = _spoilt(candidate, fault.kind if fault else "")
            rows.append(measure(spoilt, len(candidates), shape, spec.err_ratio, options, emit))
        self._strike(fault, len(candidates), shape, emit)
        conclude(shape, rows, len(candidates), emit, withheld=withheld)

    def _blocklist(self) -> Blocklist:
        own = folder_of(self.place) / "replay" / "blocklist.jsonl"
        self._where = self._where or slot_identity(self.place, "replay")  # asks the GPU
        return Blocklist(Path(self.faulty.blocklist or own), self._where)

    def _strike(self, fault: Fault | None, rows: int, shape: SpecShape, emit: Emit) -> None:
        """Let a violent fault happen once so many rows are out."""
        if fault is None or fault.kind not in VIOLENT or fault.after_rows != rows:
            return
        strike(fault, self.place)
        if fault.kind == "lie":
            emit.tuned(shape.id + 1_000_000, {"us": 1.0})

    def _lose(self, spec: Spec, lost: CandidateId, how: str) -> Withheld:
        """A candidate that faulted: written down and left out, if the slot proves well. Raises TunerFault."""
        if len(spec.shapes) > 1:
            raise TunerFault("fault", f"candidate {lost.ident[0]}: {how}")
        (ok, _, words), blocklist = self.canary(), self._blocklist()
        if not ok:
            raise TunerFault("fault", f"{how}; after it the canary failed: {words}")
        entry = BlocklistEntry(blocklist.where, spec.family, lost, "fault", how, time.time())
        blocklist.note(entry)
        return entry.withheld("attempt")


def _spoilt(row: Row, kind: str) -> Row:
    """The row as the soft faults make it: `wrong` puts a third of a result off."""
    if kind == "no_candidate":
        return {**row, "us": -1.0, "status": "error", "detail": "replay: no_candidate"}
    return {**row, "errRatio": 0.3438} if kind == "wrong" and row["us"] > 0 else row
