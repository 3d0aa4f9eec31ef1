"""Runs one AITER process, and follows it to its end.

We end the process early if it cannot go on: a candidate's process is dead, it prints a known issue that ends processes,
it makes no progress, or a shape takes too long. AITER itself would wait (for ever, before 2025-12-30) or drop all
candidates of the shape. `tracker.py` knows the shapes.
"""

from __future__ import annotations

import csv
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.families import legal_cells
from worker.process import Child, OutputLog, Splitter, Stopwatch, cpu_seconds, exit_words, is_alive
from worker.protocol import SHAPE_VERDICTS, Row, SpecShape
from worker.text import clean, plural
from worker.tuners.aiter.blocked import CandidateChoice
from worker.tuners.aiter.known_issues import Diagnosis, diagnose, ends_process
from worker.tuners.aiter.launch import BLOCKED, LOG, UNTUNED
from worker.tuners.aiter.repro import command
from worker.tuners.aiter.rows import JournalStep
from worker.tuners.aiter.session import Job
from worker.tuners.aiter.tracker import ShapeTracker
from worker.tuners.base import Emit, TunerFault

TICK_S = 0.1
COMPILER_SEARCH_S = 1.0
"""After this many seconds of silence we look for a running compiler."""
LAST_WORDS_S = 1.0
"""After the first sign of a fault, the rest of its output (and of a core dump) may take this many seconds."""
STOP_S = 5.0
KEPT_LINES = 40
COMPILERS = ("ninja", "clang", "hipcc", "cc1plus", "ld.lld", "lld", "llc", "amdclang", "g++", "c++", "cmake")


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """End of a process: `how` (done, fault, hang, oom or error), its text, its status, the candidate at work if known,
    and the last lines that it printed.

    `left`: shapes without a verdict. `current`: the shape in flight; `partial`: what was measured of it.
    """

    how: str
    detail: str
    status: int | None = None
    step: JournalStep | None = None
    output: str = ""
    left: tuple[int, ...] = ()
    current: int | None = None
    partial: tuple[Row, ...] = ()

    @property
    def known(self) -> Diagnosis | None:
        """The known issue that explains it best."""
        return diagnose(f"{self.output}\n{self.detail}", self.status)

    def told(self, when: str = "") -> str:
        """Text of the failure. `when`: on which shape of gemmfleet's own, "" for a user's."""
        text = f"{self.detail} ({when})" if when else self.detail
        known = self.known
        if known is not None:
            more = known.detail(text, own_shape=bool(when))
            return f"{text}: {more}" if more else text
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return f"{text}: last line of its output: {lines[-1][:300]}" if lines else text


def run_shapes(job: Job, shapes: Sequence[SpecShape], folder: Path, emit: Emit, choice: CandidateChoice) -> ProcessEnd:
    """Tune the shapes in one process, in a new folder of its own. Raises OSError, ValueError, and TunerFault if AITER
    names another chip: rows are looked up by gfx and cu_num."""
    folder.mkdir(parents=True)
    rows = [legal_cells(job.family, s.key) for s in shapes]
    with open(folder / UNTUNED, "w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(job.family.to_aiter(job.columns))
        out.writerows([row.get(c, "") for c in job.columns] for row in rows)
    choice.write(folder / BLOCKED)
    tracker = ShapeTracker(job, shapes, folder, choice, emit)
    log = OutputLog(folder / LOG)
    with log.open() as printed:
        process = Child(command(job, folder), env=job.env(folder), cwd=job.image.tree.root, out=printed.fileno())
    end = _Follower(job, tracker, emit, log).follow(process)
    if job.image.seen_by_torch:
        _check_chip(job, tracker)
    return end


def _check_chip(job: Job, tracker: ShapeTracker) -> None:
    """Raise TunerFault if AITER wrote rows for another chip than the slot's: rows are looked up by gfx and cu_num."""
    our_gfx = job.image.gfx
    our_cu_num = str(job.image.device.get("cu_num"))
    for gfx, cu_num in tracker.tables.devices:
        if (gfx or our_gfx, cu_num or our_cu_num) != (our_gfx, our_cu_num):
            rows = f"AITER writes rows for gfx {gfx or 'unnamed'} and cu_num {cu_num}"
            raise TunerFault("error", f"{rows}, and this slot is {our_gfx} with {our_cu_num}")


class _Follower:
    """Watches one process to its end; its output goes to the slot's log as well."""

    def __init__(self, job: Job, tracker: ShapeTracker, emit: Emit, log: OutputLog) -> None:
        self._shape_s = job.options.tuner_timeout
        self._quiet_limit_s = job.options.tuner_timeout or job.quiet_s
        self._grace_s = job.grace_s
        self._tracker, self._emit = tracker, emit
        self._log, self._lines = log, Splitter()
        self._fatal_at: float | None = None
        self._quiet = self._of_shape = self._busy = 0.0
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)

    def follow(self, process: Child) -> ProcessEnd:
        """Follow it. KeyboardInterrupt ends it by SIGINT, then by force, and is raised again."""
        try:
            why = self._until_end(process)
            printed = list(self._tail)  # leaves out its output about our own signal
            if why is not None:
                process.stop(min(self._grace_s, STOP_S) if why[0] == "hang" else 0.0)
            self._read()
            return self._end(process.returncode, why, "\n".join(printed if why else self._tail))
        finally:
            process.stop(self._grace_s * 0.8)

    def _until_end(self, process: Child) -> tuple[str, str] | None:
        """(how, text) if we must end it, None if it ended by itself."""
        watch = Stopwatch()
        shape: int | None = None
        while process.returncode is None:
            moved = self._read()
            seconds = watch.turn()
            self._quiet += seconds
            self._of_shape += seconds
            if self._tracker.current != shape:
                shape = self._tracker.current
                self._of_shape = seconds
                moved = True
            if moved:
                self._quiet = 0.0
            elif self._quiet - seconds >= COMPILER_SEARCH_S and self._compiles(process):
                self._quiet = 0.0
                self._of_shape = 0.0
            self._emit.alive()  # we look for hangs ourselves: the agent's watchdog does not know the candidate
            why = self._why_end(time.monotonic())
            if why is not None:
                self._read()
                return why
            time.sleep(TICK_S)
        return None

    def _read(self) -> bool:
        """Take in what is new; True if there was anything."""
        output = self._log.read(mirror=1)
        for line in self._lines.feed(output):
            self._tail.append(line)
            if (issue := ends_process(line)) is not None:
                self._tracker.set_fatal(issue.reason if issue.reason == "hang" else "fault", clean(line, 1000))
        return self._tracker.read() or bool(output)

    def _why_end(self, now: float) -> tuple[str, str] | None:
        """(how, text) if the process cannot go on."""
        tracker = self._tracker
        if tracker.fatal is None:
            self._look_for_dead_candidates()
        if tracker.fatal is not None:
            self._fatal_at = self._fatal_at or now
            return tracker.fatal if now - self._fatal_at > LAST_WORDS_S else None
        if self._shape_s and self._of_shape > self._shape_s:
            return "hang", f"the shape took longer than {self._shape_s:g} s (--tuner-timeout)"
        if self._quiet > self._quiet_limit_s:
            return "hang", f"no sign of progress for {self._quiet_limit_s:g} s"
        return None

    def _look_for_dead_candidates(self) -> None:
        tracker = self._tracker
        dead = [step for step in tracker.at_work() if not is_alive(step.pid)]
        if not dead:
            return
        if tracker.read() and dead[0] not in tracker.at_work():
            return  # it had ended, and its process after it
        tracker.set_fatal("fault", f"the process of candidate {dead[0].candidate.describe()} died")

    def _compiles(self, process: Child) -> bool:
        """True if a compiler of its tree is at work: a build may print nothing for minutes."""
        compilers = [pid for pid, name in process.members().items() if name.startswith(COMPILERS)]
        before, self._busy = self._busy, cpu_seconds(compilers)
        return bool(compilers) and self._busy != before

    def _end(self, status: int | None, why: tuple[str, str] | None, output: str) -> ProcessEnd:
        """The end, once all is settled that can be; the shape to blame is in flight then."""
        tracker = self._tracker
        diagnosis = diagnose(output, None)
        reason = ""
        if diagnosis is not None and diagnosis.issue.rank != "remark":
            reason = diagnosis.issue.reason
        at_work = tracker.at_work()
        step = at_work[0] if at_work else None

        # our own reason to end it comes first, then a signal, then a status with shapes that have no result
        how, text = "done", ""
        without_result = tracker.unknown()
        why = why or tracker.fatal
        if why is not None:
            how, text = why
            named = step.candidate.describe() if step is not None else ""
            if named not in text:
                text = f"{text}, at candidate {named}"
            status = None  # it would be that of our own signal
        elif status is not None and status < 0:
            how, text = "fault", f"AITER's process {exit_words(status)}"
        elif without_result and reason not in SHAPE_VERDICTS and (status or reason):
            how = "error"
            text = f"AITER ended with status {status}, {plural(len(without_result), 'shape')} without a result"

        chip = diagnosis.line if diagnosis is not None and reason == "unsupported" else ""
        excuse = tracker.settle_all(whole=how == "done", chip=chip, refused=reason in SHAPE_VERDICTS)
        if excuse is not None:
            how, text = excuse
        blames_image = diagnosis is not None and diagnosis.blames_image
        if how not in ("fault", "hang") or blames_image:
            step = None  # no candidate is left out for it
        return ProcessEnd(
            how=how,
            detail=text,
            status=status,
            step=step,
            output=output,
            left=tuple(tracker.left),
            current=tracker.current,
            partial=tuple(tracker.partial()),
        )
