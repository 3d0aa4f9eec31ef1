"""Follows one AITER process live from start to end, and writes the script that reproduces its fault.

We end the process early if it cannot go on: a candidate's process is dead, it prints a known issue that ends processes,
it makes no progress, or a shape takes too long. AITER itself would wait (for ever, before 2025-12-30) or drop all
candidates of the shape.
"""

from __future__ import annotations

import csv
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.families import legal_cells
from worker.process import Child, OutputLog, Splitter, Stopwatch, cpu_seconds, exit_words, is_alive
from worker.protocol import SHAPE_VERDICTS, Row, SpecShape
from worker.text import clean, plural
from worker.tuners.aiter.blocklist import BlocklistEntry, LeftOut
from worker.tuners.aiter.known_issues import Diagnosis, diagnose, ends_process
from worker.tuners.aiter.launch import LEFT_OUT, LOG, PROFILE, TUNED, UNTUNED, argv, is_switch
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
REPRO = "repro"
"""The folder in an attempt's folder where the controller looks for the script."""
REPRO_TIMEOUT_S = 120
_SHOWN_ENV = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "AITER_JIT_DIR")
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
        last = next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "")
        more = f"last line of its output: {last[:300]}" if last else ""
        if found := self.known:
            more = found.detail(text, own_shape=bool(when))
        return f"{text}: {more}" if more else text


def run_shapes(job: Job, shapes: Sequence[SpecShape], folder: Path, emit: Emit, left_out: LeftOut) -> ProcessEnd:
    """Tune the shapes in one process, in a new folder of its own. Raises OSError, ValueError, and TunerFault if AITER
    names another chip: rows are looked up by gfx and cu_num."""
    folder.mkdir(parents=True)
    rows = [legal_cells(job.family, s.key) for s in shapes]
    with open(folder / UNTUNED, "w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(job.family.to_aiter(job.columns))
        out.writerows([row.get(c, "") for c in job.columns] for row in rows)
    left_out.write(folder / LEFT_OUT)
    tracker, log = ShapeTracker(job, shapes, folder, left_out, emit), OutputLog(folder / LOG)
    with log.open() as printed:
        process = Child(command(job, folder), env=job.env(folder), cwd=job.image.tree.root, out=printed.fileno())
    end = _Follower(job, tracker, emit, log).follow(process)
    ours = (job.image.gfx, str(job.image.device.get("cu_num")))
    for gfx, cu_num in tracker.tables.devices if job.image.seen_by_torch else ():
        if (gfx or ours[0], cu_num or ours[1]) != ours:
            text = f"AITER writes rows for gfx {gfx or 'unnamed'} and cu_num {cu_num}"
            raise TunerFault("error", f"{text}, and this slot is {ours[0]} with {ours[1]}")
    return end


def command(job: Job, folder: Path) -> list[str]:
    """The command line of a process that has its files in a folder."""
    words = argv(job.family, job.script, job.options, folder, batch=job.batch, err_ratio=job.err_ratio)
    return [sys.executable, *words]


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
        watch, shape = Stopwatch(), None
        while process.returncode is None:
            moved, step = self._read(), watch.turn()
            builds = not moved and self._quiet >= COMPILER_SEARCH_S and self._compiles(process)
            if self._tracker.current != shape:
                shape, self._of_shape, moved = self._tracker.current, 0.0, True
            self._quiet = 0.0 if moved or builds else self._quiet + step
            self._of_shape = 0.0 if builds else self._of_shape + step
            self._emit.alive()  # we look for hangs ourselves: the agent's watchdog does not know the candidate
            if why := self._why_end(time.monotonic()):
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
        tracker = self._tracker
        dead = [s for s in tracker.at_work() if not is_alive(s.pid)] if tracker.fatal is None else []
        if dead and tracker.read() and dead[0] not in tracker.at_work():
            dead = []  # it had ended, and its process after it
        if dead:
            tracker.set_fatal("fault", f"the process of candidate {dead[0].candidate.describe()} died")
        if tracker.fatal is not None:
            self._fatal_at = self._fatal_at or now
            return tracker.fatal if now - self._fatal_at > LAST_WORDS_S else None
        if self._shape_s and self._of_shape > self._shape_s:
            return "hang", f"the shape took longer than {self._shape_s:g} s (--tuner-timeout)"
        if self._quiet > self._quiet_limit_s:
            return "hang", f"no sign of progress for {self._quiet_limit_s:g} s"
        return None

    def _compiles(self, process: Child) -> bool:
        """True if a compiler of its tree is at work: a build may print nothing for minutes."""
        compilers = [pid for pid, name in process.members().items() if name.startswith(COMPILERS)]
        before, self._busy = self._busy, cpu_seconds(compilers)
        return bool(compilers) and self._busy != before

    def _end(self, status: int | None, why: tuple[str, str] | None, output: str) -> ProcessEnd:
        """The end, once all is settled that can be; the shape to blame is in flight then."""
        tracker, found = self._tracker, diagnose(output, None)
        reason = found.issue.reason if found and found.issue.rank != "remark" else ""
        step, left = next(iter(tracker.at_work()), None), tracker.unknown()
        how, text = "done", ""
        if why := why or tracker.fatal:
            named, status = step.candidate.describe() if step else "", None  # it would be that of our own signal
            how, text = why[0], why[1] + (f", at candidate {named}" if named not in why[1] else "")
        elif status is not None and status < 0:
            how, text = "fault", f"AITER's process {exit_words(status)}"
        elif left and reason not in SHAPE_VERDICTS and (status or reason):
            how, text = "error", f"AITER ended with status {status}, {plural(len(left), 'shape')} without a result"
        chip = found.line if found and reason == "unsupported" else ""
        if tracker.settle_all(whole=how == "done", chip=chip, refused=reason in SHAPE_VERDICTS):
            how, text = "oom", "all candidates of the shape ran out of memory"
        at_work = step if how in ("fault", "hang") else None
        return ProcessEnd(
            how, text, status, at_work, output, tuple(tracker.left), tracker.current, tuple(tracker.partial())
        )


def write_repro(job: Job, folder: Path, entry: BlocklistEntry, into: Path) -> Path:
    """A folder below `into` with the one-row CSV of a process and the command that shows its fault; its path.

    The command is AITER's own, without our additions. It measures all candidates of the shape, including this one.
    """
    name = "-".join([entry.family, *entry.candidate.key[-4:], *entry.candidate.ident[:2]])
    target = into / "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:120]
    target.mkdir(parents=True, exist_ok=True)
    (target / UNTUNED).write_text((folder / UNTUNED).read_text())
    env, moved = job.env(), {str(folder / n): f'"$here/{n}"' for n in (UNTUNED, TUNED, PROFILE)}
    switches = sorted(n for n in {*os.environ, *env} if is_switch(n))
    shown = [n for n in dict.fromkeys((*_SHOWN_ENV, *switches)) if env.get(n)]
    words = command(job, folder)
    if "--timeout" in words:  # a limit that a person can wait for
        words[words.index("--timeout") + 1] = str(REPRO_TIMEOUT_S)
    lines = [
        "#!/bin/sh",
        f"# {entry.outcome} of {entry.candidate.describe()} on {job.image.gfx}, to be run in its image on its node:",
        f"# image {entry.where.image}, slot {entry.where.slot}, driver {entry.where.driver or 'unknown'}",
        *(f"# {line}" for line in clean(entry.detail, 500).splitlines()),
        "# where AITER waits for ever for a process that died, end it with Ctrl-C",
        'here=$(cd -- "$(dirname -- "$0")" && pwd) || exit 1',
        f'rm -f -- "$here/{TUNED}" "$here/{PROFILE}"',
        f"cd -- {shlex.quote(str(job.image.tree.root))} || exit 1",
        "export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1",
        *(f"export {n}={shlex.quote(env[n])}" for n in shown),
        *(f"unset {n}" for n in switches if n not in shown),
        "exec " + " ".join(moved.get(w) or shlex.quote(w) for w in words),
    ]
    script = target / "reproduce.sh"
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o700)
    return target
