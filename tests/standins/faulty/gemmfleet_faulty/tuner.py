"""Tuner `faulty`: the tuner `replay` with real faults, for tests.

ReplayOptions beyond those of `replay`:

- `faults`: a list; each does to the process what its name says, none is a returned error;
- `times`: by slot, microseconds of its timed canary (compute, memory), or a text that it raises; [] or absent: none;
- `blocklist`: path of the list of candidates that faulted, instead of a file of the node folder.

A shape that runs alone goes on without a candidate that faulted, as the tuner `aiter` does it.

A fault is a mapping:

- `kind`: hold (waits, with signs of life, until the file `until` of the node folder is there), abort (SIGABRT),
  stop (SIGSTOP), oom (allocates until it is killed or MemoryError), truncate (half a record in the slot's file,
  then SIGKILL to agent and itself), kill_worker (SIGKILL to its agent), hang, exit
  (with `code`), error (an exception), lie (breaks the protocol), wrong (every result is off), no_candidate,
  sick_canary;
- `match`: columns of the shape's key, and/or shape, attempt, group, slot, node: a value or a list of values; all must
  agree. sick_canary knows slot and node only. With kernelName, kernelId, splitK or libtype it is one candidate's: the
  fault (abort or exit) happens in a process of its own, as AITER's does;
- `times`: how often (default: always), counted over processes in a folder of the node, or in `counters`;
- `after_rows`: rows that come first; `deaf`: SIGINT is ignored; `grandchild`: leaves a process in its group;
- `how`: what sick_canary does: `wrong` (the default), or a violent kind;
- `guard`: false lets `oom` go beyond 128 MiB more than the process has (for a test that limits it by a cgroup).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from worker.process import exit_words
from worker.protocol import BlockedRecord, NodePaths, Row, Spec, SpecShape, is_wanted
from worker.tuners.aiter.blocked import BlockedCandidates, BlockedEntry, CandidateId, SlotIdentity, slot_identity
from worker.tuners.base import Emit, Place, TunerFault
from worker.tuners.replay import SLICE_S, ReplayOptions, ReplayTuner, conclude, identity, measure, pause

VIOLENT = ("abort", "stop", "oom", "truncate", "kill_worker", "hang", "exit", "error", "lie")
SOFT = ("hold", "wrong", "no_candidate", "sick_canary")


@dataclass(frozen=True, slots=True)
class Fault:
    """One requested fault; see the module's docstring."""

    kind: str
    match: Mapping[str, Any] = field(default_factory=dict)
    times: int | None = None
    after_rows: int = 0
    code: int = 3
    deaf: bool = False
    grandchild: bool = False
    how: str = "wrong"
    guard: bool = True
    counters: str = ""
    until: str = "released"

    def __post_init__(self) -> None:
        """Raises ValueError on an unknown kind: a test that asks for nothing would pass."""
        if self.kind not in (*VIOLENT, *SOFT) or self.how not in (*VIOLENT, "wrong"):
            raise ValueError(f"bad fault: {self}")

    @property
    def of_candidates(self) -> bool:
        """Return whether it happens to single candidates."""
        return not {"kernelName", "kernelId", "splitK", "libtype"}.isdisjoint(self.match)

    def strikes(self, facts: Mapping[str, Any], place: Place) -> bool:
        """Return whether it happens now, to the shape (or canary) of these facts; count it if so."""
        for name, wanted in self.match.items():
            if str(facts.get(name)) not in map(str, wanted if isinstance(wanted, list) else [wanted]):
                return False
        return self.times is None or self._count(place, self.times)

    def held(self, place: Place) -> bool:
        """Return whether a `hold` still keeps its shape."""
        return self.kind == "hold" and not (folder_of(place) / self.until).exists()

    def _count(self, place: Place, times: int) -> bool:
        """One more time, unless it was `times` before; by a file, so that it outlives whom it kills."""
        folder = Path(self.counters) if self.counters else folder_of(place) / "replay"
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=8).hexdigest()
        with open(folder / name, "ab") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            if os.fstat(f.fileno()).st_size >= times:
                return False
            f.write(b".")
        return True


def folder_of(place: Place) -> Path:
    """The node's folder, or this one without a node."""
    return place.node_dir or Path.cwd()


def strike(fault: Fault, place: Place) -> None:
    """Do it. Returns only after `stop` and `lie`, whose false message the caller sends."""
    kind = fault.how if fault.kind == "sick_canary" else fault.kind
    if fault.deaf:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if fault.grandchild:
        _leave_grandchild(place)
    print(f"replay: {kind} of process {os.getpid()}", flush=True)
    if kind == "abort":
        os.abort()
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "oom":
        _exhaust_memory(fault.guard)
    elif kind == "hang":
        while True:
            time.sleep(3600)
    elif kind == "exit":
        os._exit(fault.code)
    elif kind == "error":
        raise RuntimeError("replay: an error that is no shape's fault")
    elif kind in ("truncate", "kill_worker"):
        if kind == "truncate":
            with open(NodePaths(folder_of(place)).events(place.slot), "ab", buffering=0) as f:
                f.write(b'{"type":"row","t":%.3f,"attempt":"torn","shape":1,"row":{"us":1.0,"kern' % time.time())
        os.kill(place.agent_pid, signal.SIGKILL)
        time.sleep(5)  # the kernel ends us with our agent
        os.kill(os.getpid(), signal.SIGKILL)


def strike_apart(fault: Fault, place: Place) -> str:
    """Do it in a process of its own; how that ended."""
    pid = os.fork()
    if pid == 0:
        try:
            strike(fault, place)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return f"its process {exit_words(os.waitstatus_to_exitcode(status))}"


def _exhaust_memory(guard: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if guard and soft == resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**27, hard))
    held: list[bytearray] = []
    while True:
        block = bytearray(16 * 2**20)
        block[::4096] = b"\1" * (len(block) // 4096)  # touched, or the kernel would not give it
        held.append(block)


def _leave_grandchild(place: Place) -> None:
    """Fork one that sleeps, with all our pipes open, as a tuner's pool of processes would be left."""
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)


@dataclass(frozen=True)
class FaultyOptions(ReplayOptions):
    """ReplayOptions of a replay with faults; see the module's docstring."""

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
        self._blocked().take_verdicts(spec.refuted, spec.confirmed)

    def tune_shape(self, spec: Spec, shape: SpecShape, options: ReplayOptions, emit: Emit) -> None:
        candidates, asked = self.candidates(shape.key), spec.only_of(shape.id)
        candidates = [c for c in candidates if is_wanted(asked, c.get("kernelName", ""))]
        facts = {**shape.key, "shape": shape.id, "attempt": spec.attempt, "group": spec.group}
        facts |= {"slot": self.place.slot, "node": self.place.node}
        of_shape = (f for f in self.faulty.faults if f.kind != "sick_canary" and not f.of_candidates)
        fault = next((f for f in of_shape if f.strikes(facts, self.place)), None)
        while fault is not None and fault.held(self.place):
            pause(SLICE_S, emit)
        key = tuple(f"{k}={v}" for k, v in shape.key.items())
        known = {c.ident: e for c, e in self._blocked().in_force(spec.family).items() if c.key == key}
        blocked: list[BlockedRecord] = []
        rows: list[Row] = []
        for n, candidate in enumerate(candidates):
            if entry := known.get(identity(candidate)):
                blocked.append(entry.to_record("blocklist"))
                continue
            self._strike(fault, n, shape, emit)
            of_it = (f for f in self.faulty.faults if f.of_candidates)
            if own := next((f for f in of_it if f.strikes({**facts, **candidate}, self.place)), None):
                pause(options.seconds_per_shape / len(candidates), emit)
                how = strike_apart(own, self.place)
                emit.row(shape.id, {**candidate, "us": -1.0, "status": "error", "detail": how})
                blocked.append(self._lose(spec, CandidateId(key, identity(candidate)), how))
                continue
            spoilt = _spoilt(candidate, fault.kind if fault else "")
            rows.append(measure(spoilt, len(candidates), shape, spec.err_ratio, options, emit))
        self._strike(fault, len(candidates), shape, emit)
        conclude(shape, rows, len(candidates), emit, blocked=blocked)

    def _blocked(self) -> BlockedCandidates:
        own = folder_of(self.place) / "replay" / "blocklist.jsonl"
        self._where = self._where or slot_identity(self.place, "replay")  # asks the GPU
        return BlockedCandidates(Path(self.faulty.blocklist or own), self._where)

    def _strike(self, fault: Fault | None, rows: int, shape: SpecShape, emit: Emit) -> None:
        """Let a violent fault happen once so many rows are out."""
        if fault is None or fault.kind not in VIOLENT or fault.after_rows != rows:
            return
        strike(fault, self.place)
        if fault.kind == "lie":
            emit.tuned(shape.id + 1_000_000, {"us": 1.0})

    def _lose(self, spec: Spec, lost: CandidateId, how: str) -> BlockedRecord:
        """A candidate that faulted: written down and left out, if the slot proves well. Raises TunerFault."""
        if len(spec.shapes) > 1:
            raise TunerFault("fault", f"candidate {lost.ident[0]}: {how}")
        (ok, _, words), stored = self.canary(), self._blocked()
        if not ok:
            raise TunerFault("fault", f"{how}; after it the canary failed: {words}")
        entry = BlockedEntry(stored.where, spec.family, lost, "fault", how, time.time())
        stored.append(entry.as_json())
        return entry.to_record("attempt")


def _spoilt(row: Row, kind: str) -> Row:
    """The row as the soft faults make it: `wrong` puts a third of a result off."""
    if kind == "no_candidate":
        return {**row, "us": -1.0, "status": "error", "detail": "replay: no_candidate"}
    return {**row, "errRatio": 0.3438} if kind == "wrong" and row["us"] > 0 else row
