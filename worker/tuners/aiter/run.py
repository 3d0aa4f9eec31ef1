"""Runs one AITER process, and follows it to its end.

tuner.py calls `run_shapes` for each process, and decides by the `ProcessEnd` what to do with the shapes that have no
verdict. tracker.py knows the shapes.

We end the process early if it cannot go on: a candidate's process is dead, it prints a known issue that ends processes,
it makes no progress, or a shape takes too long. AITER itself would wait (for ever, before 2025-12-30) or drop all
candidates of the shape.
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
from worker.tuners.aiter.choice import CandidateChoice
from worker.tuners.aiter.journal import JournalStep
from worker.tuners.aiter.known_issues import Diagnosis, diagnose, ends_process
from worker.tuners.aiter.launch import BLOCKED, LOG, UNTUNED
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
    """The end of a process, and what it leaves."""

    how: str
    """done, fault, hang, oom or error."""
    detail: str
    status: int | None = None
    """Its exit status, -N for a signal; None if we ended it."""
    step: JournalStep | None = None
    """The candidate at work, if one is to blame and it is known."""
    output: str = ""
    """The last lines that it printed."""
    remaining: tuple[int, ...] = ()
    """Shapes without a verdict."""
    current: int | None = None
    """The shape in flight."""
    partial: tuple[Row, ...] = ()
    """Rows measured of that shape."""

    @property
    def known(self) -> Diagnosis | None:
        """The known issue that explains it best."""
        return diagnose(f"{self.output}\n{self.detail}", self.status)

    def describe(self, when: str = "") -> str:
        """Text of the failure. `when`: on which shape of gemmfleet's own, "" for a user's."""
        text = f"{self.detail} ({when})" if when else self.detail
        known = self.known
        if known is not None:
            return f"{text}: {known.detail(text, own_shape=bool(when))}"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return f"{text}: last line of its output: {lines[-1][:300]}" if lines else text


def run_shapes(job: Job, shapes: Sequence[SpecShape], folder: Path, emit: Emit, choice: CandidateChoice) -> ProcessEnd:
    """Tune the shapes in one process, in a new folder of its own. Raises OSError, ValueError, and TunerFault if AITER
    names another chip: rows are looked up by gfx and cu_num."""
    folder.mkdir(parents=True)
    _write_untuned(job, shapes, folder / UNTUNED)
    choice.write(folder / BLOCKED)
    tracker = ShapeTracker(job, shapes, folder, choice, emit)
    log = OutputLog(folder / LOG)
    with log.open() as printed:
        process = Child(job.command(folder), env=job.env(folder), cwd=job.image.tree.root, out=printed.fileno())
    end = _Follower(job, tracker, emit, log).follow(process)
    if job.image.seen_by_torch:
        _check_chip(job, tracker)
    return end


def _write_untuned(job: Job, shapes: Sequence[SpecShape], path: Path) -> None:
    """The script's input. Raises ValueError for a cell that is not legal: AITER evaluates some of them."""
    rows = [legal_cells(job.family, shape.key) for shape in shapes]
    with open(path, "w", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(job.family.to_aiter(job.columns))
        for row in rows:
            writer.writerow([row.get(column, "") for column in job.columns])


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
        self._tracker = tracker
        self._emit = emit
        self._log = log
        self._lines = Splitter()
        self._fatal_at: float | None = None
        self._quiet_for = 0.0
        """Seconds without a sign of progress."""
        self._shape_for = 0.0
        """Seconds that the shape in flight has taken."""
        self._compiler_cpu = 0.0
        """CPU seconds of its compilers when we looked last."""
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
            self._quiet_for += seconds
            self._shape_for += seconds
            if self._tracker.current != shape:
                shape = self._tracker.current
                self._shape_for = seconds
                moved = True
            if moved:
                self._quiet_for = 0.0
            elif self._quiet_for - seconds >= COMPILER_SEARCH_S and self._compiles(process):
                self._quiet_for = 0.0
                self._shape_for = 0.0
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
        if self._shape_s and self._shape_for > self._shape_s:
            return "hang", f"the shape took longer than {self._shape_s:g} s (--tuner-timeout)"
        if self._quiet_for > self._quiet_limit_s:
            return "hang", f"no sign of progress for {self._quiet_limit_s:g} s"
        return None

    def _look_for_dead_candidates(self) -> None:
        tracker = self._tracker
        dead = [step for step in tracker.at_work() if not is_alive(step.pid)]
        if not dead:
            return
        if tracker.read() and dead[0] not in tracker.at_work():
            return  # the candidate had ended, and its process after it
        tracker.set_fatal("fault", f"the process of candidate {dead[0].candidate.describe()} died")

    def _compiles(self, process: Child) -> bool:
        """True if a compiler of its tree is at work: a build may print nothing for minutes."""
        compilers = [pid for pid, name in process.members().items() if name.startswith(COMPILERS)]
        before = self._compiler_cpu
        self._compiler_cpu = cpu_seconds(compilers)
        return bool(compilers) and self._compiler_cpu != before

    def _end(self, status: int | None, why: tuple[str, str] | None, output: str) -> ProcessEnd:
        """The end, once all is settled that can be; the shape to blame is in flight then.

        `why`: how and why we ended it, None if it ended by itself.
        """
        tracker = self._tracker
        diagnosis = diagnose(output, None)
        reason = ""
        if diagnosis is not None and diagnosis.issue.rank != "remark":
            reason = diagnosis.issue.reason
        at_work = tracker.at_work()
        step = at_work[0] if at_work else None
        why = why or tracker.fatal
        if why is not None:
            status = None  # it would be that of our own signal
        how, text = self._outcome(status, why, reason, step)
        chip = diagnosis.line if diagnosis is not None and reason == "unsupported" else ""
        excuse = tracker.settle_all(has_finished=how == "done", chip=chip, no_kernel=reason in SHAPE_VERDICTS)
        if excuse is not None:
            how, text = excuse
        blames_image = diagnosis is not None and diagnosis.blames_image
        if how not in ("fault", "hang") or blames_image:
            step = None  # no candidate is blocked for it
        return ProcessEnd(
            how=how,
            detail=text,
            status=status,
            step=step,
            output=output,
            remaining=tuple(tracker.remaining),
            current=tracker.current,
            partial=tuple(tracker.rows_in_flight()),
        )

    def _outcome(
        self, status: int | None, why: tuple[str, str] | None, reason: str, step: JournalStep | None
    ) -> tuple[str, str]:
        """(how, text). Our own reason to end it comes first, then a signal, then shapes without a result.

        `reason`: of the known issue in its output, "" if there is none.
        """
        if why is not None:
            how, text = why
            candidate = step.candidate.describe() if step is not None else ""
            return how, text if candidate in text else f"{text}, at candidate {candidate}"
        if status is not None and status < 0:
            return "fault", f"AITER's process {exit_words(status)}"
        without_result = self._tracker.without_result()
        if without_result and reason not in SHAPE_VERDICTS and (status or reason):
            count = plural(len(without_result), "shape")
            return "error", f"AITER ended with status {status}, {count} without a result"
        return "done", ""
