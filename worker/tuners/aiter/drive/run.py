"""One process of AITER from start to end, followed live.

It is ended early where it cannot go on: a candidate's process is dead, AITER says that one died, nothing moves any
more, a shape takes longer than it may. AITER itself would wait (for ever, before 2025-12-30) or give all candidates of
the shape up.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace

from worker.protocol import Row
from worker.tuners.aiter.drive.process import AiterProcess, alive, busy_s
from worker.tuners.aiter.drive.progress import Journal, Step, parse
from worker.tuners.aiter.drive.shape_tracker import Flight, Job, Picture
from worker.tuners.base import Emit

TICK_S = 0.1
MAX_STEP_S = 1.0
"""A turn counts for at most so long: a machine that slept is nobody's hang."""
LAST_WORDS_S = 1.0
"""After the first sign of a fault, for the rest of its words (and a core dump's) to come."""
STOP_S = 5.0
KEPT_LINES = 40
COMPILERS = ("ninja", "clang", "hipcc", "cc1plus", "ld.lld", "lld", "llc", "amdclang", "g++", "c++", "cmake")


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
        self._picture = Picture(job, emit, self._began)
        self._doomed_at: float | None = None
        self._quiet = self._of_shape = self._busy = 0.0
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def flight(self) -> Flight:
        return self._picture.flight

    @property
    def devices(self) -> set[tuple[str, str]]:
        """(gfx, cu_num) of the rows that AITER wrote."""
        return self._picture.devices

    def partial(self) -> list[Row]:
        """What was measured of the shape in flight, where the process broke off."""
        return self._picture.partial()

    def go(self) -> Ended:
        """Start it and follow it. KeyboardInterrupt ends it by SIGINT, then by force, and is let through."""
        process = AiterProcess(self._job.argv, self._job.env, self._job.cwd, self._job.files.log)
        try:
            self.flight.advance()
            why = self._follow(process)
            said = list(self._tail)  # what it says of our own signal is beside the point
            if why is not None:
                process.stop(min(self._job.grace_s, STOP_S) if why[0] == "hang" else 0.0)
            self._look(process)
            ended = self._ended(process.returncode, why, "\n".join(said if why else self._tail))
        finally:
            process.stop(self._job.grace_s * 0.8)
        return self._settled(ended)

    def _follow(self, process: AiterProcess) -> tuple[str, str] | None:
        """(how, words) where it is to be ended, None where it ended by itself."""
        before = time.monotonic()
        while process.returncode is None:
            moved = self._look(process)
            now = time.monotonic()
            step, before = min(now - before, MAX_STEP_S), now
            self._quiet = 0.0 if moved or self._compiles(process) else self._quiet + step
            self._of_shape = 0.0 if self._picture.building else self._of_shape + step
            self._emit.alive()  # the watch is ours: what is quiet for too long ends here
            if why := self._why_end(now):
                self._look(process)
                return why
            time.sleep(TICK_S)
        return None

    def _look(self, process: AiterProcess) -> bool:
        """Take in what is new; whether there was anything."""
        lines, output = process.read(self._mirror)
        self._tail.extend(lines)
        events = [e for e in map(parse, lines) if e is not None]
        return self._picture.take(events) or output

    def _began(self, shape: int) -> None:
        self._of_shape = self._quiet = 0.0

    def _why_end(self, now: float) -> tuple[str, str] | None:
        picture = self._picture
        if picture.doom is None and picture.journal is not None and (step := _orphan(picture.journal)):
            picture.condemn("fault", f"the process of candidate {step.candidate.describe()} died")
        if picture.doom is not None:
            self._doomed_at = self._doomed_at or now
            return picture.doom if now - self._doomed_at > LAST_WORDS_S else None
        limit = self._job.shape_s
        if limit and self._of_shape > limit:
            return "hang", f"the shape took longer than {limit:g} s (--tuner-timeout)"
        if self._quiet > self._job.quiet_s:
            return "hang", f"no sign of progress for {self._job.quiet_s:g} s"
        return None

    def _compiles(self, process: AiterProcess) -> bool:
        """Whether a compiler of its tree is at work: a build may say nothing for minutes."""
        if not self._picture.building and self._quiet < MAX_STEP_S:
            return False
        compilers = [pid for pid, name in process.tree().items() if name.startswith(COMPILERS)]
        before, self._busy = self._busy, busy_s(compilers)
        return bool(compilers) and self._busy != before

    # --- ends ---------------------------------------------------------------------------------------------------

    def _ended(self, status: int | None, why: tuple[str, str] | None, text: str) -> Ended:
        step, why = self._picture.at_work(), why or self._picture.doom
        if why is not None:
            named = step.candidate.describe() if step else ""
            at = f", at candidate {named}" if named not in why[1] else ""
            return Ended(why[0], why[1] + at, None, step, text)  # the status would tell of our own signal
        if status is not None and status < 0:
            return Ended("fault", f"AITER's process was ended by signal {-status}", status, step, text)
        left = self._picture.silent()
        if self._picture.error or (left and (status or 0) > 0):
            words = self._picture.error or f"AITER ended with status {status}, {len(left)} shapes without a result"
            return Ended("error", words, status, None, text)
        return Ended("done", "", status, None, text)

    def _settled(self, ended: Ended) -> Ended:
        """The end, once everything is settled that can be; the shape that is to blame is in flight then."""
        picture = self._picture
        picture.settle_all(whole=ended.how == "done")
        short = [s for s in self.flight.left if s in picture.short]
        if picture.guilty is not None and picture.guilty.shape is not None:
            self.flight.begin(picture.guilty.shape)
        elif short and ended.how == "done":
            self.flight.begin(short[0])
            return replace(ended, how="oom", detail="all candidates of the shape ran out of memory")
        return ended


def _orphan(journal: Journal) -> Step | None:
    """A candidate whose process is dead."""
    dead = [s for s in journal.open if not alive(s.pid)]
    if dead:
        journal.read()  # it may have ended, and its process after it, since the last time
    return next((s for s in dead if s in journal.open), None)
