"""One process of AITER from start to end, read live: what it prints, what the journal says, what its files hold.

It ends early where it cannot go on: a candidate's process is dead, AITER says that one died, nothing moves any more, a
shape takes longer than it may. AITER itself would wait (for ever, before 2025-12-30) or give all candidates of the
shape up.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from worker.protocol import Row, SpecShape
from worker.tuners.aiter.command import Files
from worker.tuners.aiter.families import AiterFamily
from worker.tuners.aiter.flight import Flight
from worker.tuners.aiter.harvest import HIPBLASLT_RATIO, Harvest
from worker.tuners.aiter.lines import Event, Keys, cells, parse
from worker.tuners.aiter.process import AiterProcess, alive, busy_s
from worker.tuners.aiter.verdict import judge
from worker.tuners.aiter.watch import Journal, Step, journal_row
from worker.tuners.base import Emit

TICK_S = 0.1
MAX_STEP_S = 1.0
"""A turn counts for at most so long: a machine that slept is nobody's hang."""
LAST_WORDS_S = 1.0
"""After the first sign of a fault, for the rest of its words (and a core dump's) to come."""
KEPT_LINES = 40
POISONED = re.compile(r"illegal memory access|unspecified launch failure|AcceleratorError|hipErrorIllegal\w+")
"""A candidate's error after which its process is of no use: all that it runs next fails too."""
OUT_OF_MEMORY = re.compile(r"out of memory", re.IGNORECASE)
COMPILERS = ("ninja", "clang", "hipcc", "cc1plus", "ld.lld", "lld", "llc", "amdclang", "g++", "c++", "cmake")


@dataclass(frozen=True, slots=True)
class Job:
    """What one process is to do. `quiet_s`: no sign of progress for so long is a hang; `shape_s`: a shape may take so
    long (0: any time); `grace_s`: from SIGINT to SIGKILL."""

    family: AiterFamily
    shapes: Sequence[SpecShape]
    columns: tuple[str, ...]
    files: Files
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    batch: int
    err_ratio: float
    quiet_s: float
    shape_s: float = 0.0
    grace_s: float = 5.0
    watched: bool = False
    hipblaslt_rule: bool = False
    names: dict[str, str] = field(default_factory=dict)
    """Kernel names by number, as far as they are known from earlier processes."""
    blocked: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    """Candidates that are left out (by what the journal calls them), and why."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended: `done`, `fault`, `hang`, `oom` or `error`; the words for it; the candidate at work, if known."""

    how: str
    detail: str
    status: int | None
    step: Step | None
    text: str
    """What it printed last, for the catalogue of known faults."""


class Run:
    """Follows one process to its end. After `go`, `flight.left` are the shapes that it left without a verdict."""

    def __init__(self, job: Job, emit: Emit, mirror: int | None = None) -> None:
        self._job = job
        self._emit = emit
        self._mirror = mirror
        keys = self._shape_keys = {s.id: s.key for s in job.shapes}
        self._keys = Keys(job.columns, keys)
        self._harvest = Harvest(job.family, job.columns, keys, job.err_ratio)
        self._journal = Journal(job.files.journal, job.columns, keys) if job.watched else None
        self.flight = Flight(job.shapes, emit, self._began)
        self._decided: set[int] = set()
        self._batches = 0
        self._chip = ""
        self._building = False
        self._dead: tuple[str, str, float] | None = None
        self._guilty: Step | None = None
        self._short: set[int] = set()
        self._error = ""
        self._quiet = self._of_shape = 0.0
        self._busy = 0.0
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)

    def go(self) -> Ended:
        """Start it and follow it. KeyboardInterrupt ends it by SIGINT, then by force, and is let through."""
        process = AiterProcess(self._job.argv, self._job.env, self._job.cwd, self._job.files.log)
        try:
            self.flight.advance()
            why = self._follow(process)
            said = list(self._tail)  # what it says of our own signal is beside the point
            if why is not None:
                process.stop(min(self._job.grace_s, 5.0) if why[0] == "hang" else 0.0)
            self._look(process)
            step = self._at_work()
            ended = self._ended(process.returncode, why, step, "\n".join(said if why else self._tail))
        finally:
            process.stop(self._job.grace_s * 0.8)
        self._settle_all(whole=ended.how == "done")
        short = [s for s in self.flight.left if s in self._short]
        if self._guilty is not None and self._guilty.shape is not None:
            self.flight.begin(self._guilty.shape)
        elif short and ended.how == "done":
            self.flight.begin(short[0])
            return replace(ended, how="oom", detail="all candidates of the shape ran out of memory")
        if ended.how == "done" and self._dead is not None:
            ended = replace(ended, how=self._dead[0], detail=self._dead[1], step=self._guilty)
        return ended

    # --- following ----------------------------------------------------------------------------------------------

    def _follow(self, process: AiterProcess) -> tuple[str, str] | None:
        """(how, words) where it is to be ended, None where it ended by itself."""
        before = time.monotonic()
        while process.returncode is None:
            moved = self._look(process)
            now = time.monotonic()
            step, before = min(now - before, MAX_STEP_S), now
            if moved or self._compiles(process):
                self._quiet = 0.0
            else:
                self._quiet += step
            self._of_shape = 0.0 if self._building else self._of_shape + step
            self._emit.alive()  # the watch is ours: what is quiet for too long ends here
            if why := self._why_end(now):
                self._look(process)
                return why
            time.sleep(TICK_S)
        return None

    def _look(self, process: AiterProcess) -> bool:
        """Take in what is new; whether there was anything."""
        lines, output = process.read(self._mirror)
        steps = self._journal.new() if self._journal else []
        for line in lines:
            self._tail.append(line)
            if event := parse(line):
                self._take(event)
        for step in steps:
            if step.event == "begin" and step.shape is not None:
                self.flight.begin(step.shape)
        found = self._harvest.read(self._job.files.tuned, self._job.files.profile)
        if found or lines:
            self._settle_ready()
        return output or bool(steps) or found

    def _take(self, event: Event) -> None:
        kind = event.kind
        if kind in ("jit_start", "jit_end"):
            self._building = kind == "jit_start"
        elif kind == "done" and self._journal is None and event.total == self._in_batch():
            self._done(event.number)
        elif kind in ("tuned", "refused"):
            shape = self._keys.find(event.key, named=event.named)
            if shape is not None:
                self._decided.add(shape)
        elif kind in ("batch", "nothing"):
            self._batches = max(self._batches + 1, event.count)
            done = self._batches * max(1, self._job.batch)
            self._decided.update(s for s in (self.flight.at(i) for i in range(done)) if s is not None)
        elif kind == "chip":
            self._chip = event.text
        elif kind in ("fault", "mapping", "retry", "timeout"):
            self._doom("hang" if kind == "timeout" else "fault", event.text)
        elif kind == "candidate":
            self._candidate(event.text)
        elif kind in ("error", "jit_failed"):
            self._error = self._error or event.text

    def _candidate(self, text: str) -> None:
        """A candidate that could not run: expected, but where it takes what comes after it along."""
        if POISONED.search(text):
            if self._journal is not None and self._dead is None:
                self._journal.read()
                self._guilty = self._journal.named_in(text)
            self._doom("fault", text)
        elif OUT_OF_MEMORY.search(text):
            named, key = cells(text.partition("info:")[2])
            shape = self._keys.find(key, named=named)
            self._short.update(s for s in (shape,) if s is not None)

    def _doom(self, how: str, words: str) -> None:
        if self._dead is None:
            self._dead = (how, words, time.monotonic())

    def _in_batch(self) -> int:
        """Shapes of the batch that is at work: where tasks are whole shapes, `[Done]` counts to this."""
        left = len(self._job.shapes) - self._batches * max(1, self._job.batch)
        return min(left, max(1, self._job.batch))

    def _done(self, number: int) -> None:
        """A whole shape is measured (a task of a grouped batch)."""
        first = self._batches * max(1, self._job.batch)
        after = self.flight.at(first + number + 1)
        if after is not None and number + 1 < self._in_batch():
            self.flight.begin(after)

    def _began(self, shape: int) -> None:
        self._of_shape = self._quiet = 0.0

    def _settle_ready(self) -> None:
        """What AITER decided and wrote."""
        for shape in self.flight.left:
            if self._harvest.tuned(shape) is not None or (shape in self._decided and self._batch_of(shape)):
                self._settle(shape)
        self.flight.advance()

    def _batch_of(self, shape: int) -> bool:
        """Whether the batch of the shape is over, so that its profile is whole."""
        return self.flight.place(shape) < self._batches * max(1, self._job.batch)

    def _settle(self, shape: int) -> None:
        if self._guilty is not None and shape == self._guilty.shape:
            return  # what its candidates did after that one says nothing
        rows = self._rows(shape)
        rule = HIPBLASLT_RATIO if self._job.hipblaslt_rule else None
        tuned = self._harvest.tuned(shape)
        tuned = _rated(tuned, self._shape_keys[shape]) if tuned is not None else None
        limit = self._job.err_ratio
        verdict = judge(self._job.family, tuned, rows, limit, hipblaslt_ratio=rule, chip=self._chip)
        if verdict.winner is None:
            if verdict.reason == "no_candidate" and shape in self._short:
                return  # more memory may be free elsewhere: no verdict
            if self._dead is not None:  # AITER counts what a dead process did not do as failed
                return
        self.flight.settle(shape, rows, verdict)

    def _rows(self, shape: int) -> list[Row]:
        """The shape's candidates: of the profile, else of the journal."""
        rows = [_rated(r, self._shape_keys[shape]) for r in self._harvest.candidates(shape)]
        if self._journal is None:
            return rows
        for row in rows:
            if row["kernelName"] and "kernelId" in row:
                self._job.names[str(row["kernelId"])] = row["kernelName"]
        journal = self._journal_rows(shape)
        left_out = {_same(r): r["detail"] for r in journal if r.get("detail")}
        for row in rows:
            if row["us"] <= 0 and _same(row) in left_out:
                row["detail"] = left_out[_same(row)]
        return rows or journal

    def _journal_rows(self, shape: int) -> list[Row]:
        """What the journal has of a shape whose profile was never written; a blocked one with the reason."""
        assert self._journal is not None
        job, out = self._job, []
        for step in self._journal.ended.get(shape, []):
            why = job.blocked.get(step.candidate.ident, "") if step.event == "blocked" else ""
            row = journal_row(job.family, step, job.err_ratio, job.names, why)
            out.append(_rated(row, self._shape_keys[shape]))
        return out

    @property
    def devices(self) -> set[tuple[str, str]]:
        """(gfx, cu_num) of the rows that AITER wrote."""
        return self._harvest.devices

    def partial(self) -> list[Row]:
        """What was measured of the shape in flight, where the process broke off."""
        current = self.flight.current
        return self._journal_rows(current) if current is not None and self._journal is not None else []

    # --- ends ---------------------------------------------------------------------------------------------------

    def _why_end(self, now: float) -> tuple[str, str] | None:
        if self._dead is not None:
            how, words, at = self._dead
            return (how, words) if now - at > LAST_WORDS_S else None
        if self._journal is not None and (step := self._orphan(self._journal)):
            self._doom("fault", f"the process of candidate {step.candidate.describe()} died")
            return None
        limit = self._job.shape_s
        if limit and self._of_shape > limit:
            return "hang", f"the shape took longer than {limit:g} s (--tuner-timeout)"
        if self._quiet > self._job.quiet_s:
            return "hang", f"no sign of progress for {self._job.quiet_s:g} s"
        return None

    @staticmethod
    def _orphan(journal: Journal) -> Step | None:
        """A candidate whose process is dead."""
        dead = [s for s in journal.open if not alive(s.pid)]
        if dead:
            journal.read()  # it may have ended, and its process after it, since the last time
        return next((s for s in dead if s in journal.open), None)

    def _compiles(self, process: AiterProcess) -> bool:
        """Whether a compiler of its tree is at work: a build may say nothing for minutes."""
        if not self._building and self._quiet < MAX_STEP_S:
            return False
        compilers = [pid for pid, name in process.tree().items() if name.startswith(COMPILERS)]
        before, self._busy = self._busy, busy_s(compilers)
        return bool(compilers) and self._busy != before

    def _at_work(self) -> Step | None:
        """The candidate that had begun and not ended, or whose error spoilt its process."""
        if self._journal is None or self._guilty is not None:
            return self._guilty
        self._journal.read()
        return next((s for s in self._journal.open if s.shape is not None), None)

    def _ended(self, status: int | None, why: tuple[str, str] | None, step: Step | None, text: str) -> Ended:
        if why is None and self._dead is not None:
            why = self._dead[:2]
        if why is not None:
            named = step.candidate.describe() if step else ""
            at = f", at candidate {named}" if named not in why[1] else ""
            return Ended(why[0], why[1] + at, status, step, text)
        if status is not None and status < 0:
            return Ended("fault", f"AITER's process was ended by signal {-status}", status, step, text)
        left = [s for s in self.flight.left if self._harvest.tuned(s) is None and s not in self._decided]
        if self._error or (left and (status or 0) > 0):
            words = self._error or f"AITER ended with status {status}, {len(left)} shapes without a result"
            return Ended("error", words, status, None, text)
        return Ended("done", "", status, None, text)

    def _settle_all(self, *, whole: bool) -> None:
        """At the end: what the files tell. Of a run that broke off, only what AITER had decided."""
        for shape in self.flight.left:
            known = self._harvest.tuned(shape) is not None or self._harvest.candidates(shape)
            if known or (whole and (shape in self._decided or self._chip)):
                self._settle(shape)


def _rated(row: Row, key: Mapping[str, int | str]) -> Row:
    """The row with the rate that AITER before 2025-09 does not write."""
    if row["us"] > 0 and "tflops" not in row and all(c in key for c in ("M", "N", "K")):
        operations = 2.0 * int(key["M"]) * int(key["N"]) * int(key["K"]) * int(key.get("B", 1))
        row["tflops"] = round(operations / row["us"] / 1e6, 4)
    return row


def _same(row: Row) -> tuple[object, ...]:
    return row.get("kernelId"), row.get("splitK"), row.get("libtype")
