"""One process of AITER from start to end, followed live, and the script that shows its fault again.

It is ended early where it cannot go on: a candidate's process is dead, AITER reports that one died, nothing moves any
more, a shape takes longer than it may. AITER itself would wait (for ever, before 2025-12-30) or drop all candidates of
the shape.
"""

from __future__ import annotations

import csv
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from worker.families import legal_cells
from worker.process import Child, OutputLog, Splitter, Stopwatch, cpu_seconds, exit_words, is_alive
from worker.protocol import Row, SpecShape
from worker.protocol.blocklist import BlocklistEntry
from worker.protocol.paths import AITER_CLEARED, AITER_SWITCHES
from worker.text import clean, plural
from worker.tuners.aiter.blocklist import LeftOut
from worker.tuners.aiter.command import ProcessFiles, argv
from worker.tuners.aiter.progress import CandidateJournal, JournalStep, parse_line
from worker.tuners.aiter.session import AiterImage, TuningContext
from worker.tuners.aiter.shape_tracker import ShapeTracker
from worker.tuners.base import Emit, TunerFault

TICK_S = 0.1
COMPILER_SEARCH_S = 1.0
"""Seconds of silence after which a compiler is looked for even where no build was announced."""
LAST_WORDS_S = 1.0
"""Seconds from the first sign of a fault in which the rest of its output (and of a core dump's) may come."""
STOP_S = 5.0
KEPT_LINES = 40
REPRO = "repro"
"""Below an attempt's folder, where the controller looks for it."""
REPRO_TIMEOUT_S = 120
_SHOWN_ENV = (
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "AITER_JIT_DIR", "GPU_ARCHS",
    "CU_NUM",
)  # fmt: skip
COMPILERS = ("ninja", "clang", "hipcc", "cc1plus", "ld.lld", "lld", "llc", "amdclang", "g++", "c++", "cmake")


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """End of a process: `how` (done, fault, hang, oom or error), its text, status, and the candidate at work, if known.

    `output`: the last lines that it printed, for the catalogue of known issues.
    """

    how: str
    detail: str
    status: int | None
    step: JournalStep | None
    output: str


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """A process that ended, with what is needed to run it again.

    `left`: shapes without a verdict. `current`: the shape in flight; `partial`: what was measured of it.
    """

    end: ProcessEnd
    left: tuple[int, ...]
    current: int | None
    files: ProcessFiles
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    partial: tuple[Row, ...] = ()


def run_shapes(
    context: TuningContext, shapes: Sequence[SpecShape], folder: Path, emit: Emit, left_out: LeftOut
) -> ProcessResult:
    """Tune the shapes in one process, in a new folder of its own. Raises OSError, ValueError, and TunerFault where
    AITER names another chip."""
    files = ProcessFiles(folder)
    folder.mkdir(parents=True)
    rows = [legal_cells(context.family, s.key) for s in shapes]
    with open(files.untuned, "w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(context.family.to_aiter(context.columns))
        out.writerows([row.get(c, "") for c in context.columns] for row in rows)
    left_out.write(files.blocked)
    words = argv(
        context.family, context.script, context.options, files,
        batch=context.strategy.batch, err_ratio=context.limits.err_ratio,
    )  # fmt: skip
    command, env = (sys.executable, *words), context.env(files)
    tracker = ShapeTracker(context, shapes, files, left_out, emit)
    log = OutputLog(files.log)
    with log.open() as printed:
        process = Child(command, env=env, cwd=context.image.cwd, out=printed.fileno())
    end = _Follower(context, tracker, emit, log).follow(process)
    _check_chip(context.image, tracker.devices)
    flight = tracker.flight
    return ProcessResult(
        end, tuple(flight.left), flight.current, files, command, env, context.image.cwd, tuple(tracker.partial())
    )


def _check_chip(image: AiterImage, devices: set[tuple[str, str]]) -> None:
    """Compare AITER's chip with the slot's: rows are looked up by gfx and cu_num. Raises TunerFault if they differ."""
    ours = (image.gfx, str(image.device.get("cu_num")))
    for gfx, cu_num in devices if image.seen_by_torch else ():
        if (gfx or ours[0], cu_num or ours[1]) != ours:
            text = f"AITER writes rows for gfx {gfx or 'unnamed'} and cu_num {cu_num}"
            raise TunerFault("error", f"{text}, and this slot is {ours[0]} with {ours[1]}")


class _Follower:
    """Watches one process to its end; its output goes to the slot's log as well."""

    def __init__(self, context: TuningContext, tracker: ShapeTracker, emit: Emit, log: OutputLog) -> None:
        self._shape_s = context.options.tuner_timeout
        self._quiet_limit_s = context.options.tuner_timeout or context.limits.quiet_s
        self._grace_s = context.limits.grace_s
        self._tracker = tracker
        self._emit = emit
        self._log, self._lines = log, Splitter()
        self._fatal_at: float | None = None
        self._quiet = self._of_shape = self._busy = 0.0
        self._shape: int | None = None
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)

    def follow(self, process: Child) -> ProcessEnd:
        """Follow it. KeyboardInterrupt ends it by SIGINT, then by force, and is let through."""
        try:
            self._tracker.flight.advance()
            why = self._until_end(process)
            printed = list(self._tail)  # what it prints of our own signal is beside the point
            if why is not None:
                process.stop(min(self._grace_s, STOP_S) if why[0] == "hang" else 0.0)
            self._read()
            end = self._end(process.returncode, why, "\n".join(printed if why else self._tail))
        finally:
            process.stop(self._grace_s * 0.8)
        return self._settled(end)

    def _until_end(self, process: Child) -> tuple[str, str] | None:
        """(how, text) where it is to be ended, None where it ended by itself."""
        watch = Stopwatch()
        while process.returncode is None:
            moved = self._read()
            step = watch.turn()
            if self._tracker.flight.current not in (None, self._shape):  # another shape began
                self._shape, self._of_shape, moved = self._tracker.flight.current, 0.0, True
            self._quiet = 0.0 if moved or self._compiles(process) else self._quiet + step
            self._of_shape = 0.0 if self._tracker.building else self._of_shape + step
            self._emit.alive()  # hangs are ours to find: the agent's watchdog does not know the candidate
            if why := self._why_end(time.monotonic()):
                self._read()
                return why
            time.sleep(TICK_S)
        return None

    def _read(self) -> bool:
        """Take in what is new; True if there was anything."""
        output = self._log.read(mirror=1)
        lines = self._lines.feed(output)
        self._tail.extend(lines)
        events = [e for e in map(parse_line, lines) if e is not None]
        return self._tracker.feed(events) or bool(output)

    def _why_end(self, now: float) -> tuple[str, str] | None:
        tracker = self._tracker
        if tracker.fatal is None and (step := _orphan(tracker.journal)):
            tracker.set_fatal("fault", f"the process of candidate {step.candidate.describe()} died")
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
        if not self._tracker.building and self._quiet < COMPILER_SEARCH_S:
            return False
        compilers = [pid for pid, name in process.members().items() if name.startswith(COMPILERS)]
        before, self._busy = self._busy, cpu_seconds(compilers)
        return bool(compilers) and self._busy != before

    def _end(self, status: int | None, why: tuple[str, str] | None, output: str) -> ProcessEnd:
        step, why = self._tracker.at_work(), why or self._tracker.fatal
        if why is not None:
            named = step.candidate.describe() if step else ""
            at = f", at candidate {named}" if named not in why[1] else ""
            return ProcessEnd(why[0], why[1] + at, None, step, output)  # the status would be that of our own signal
        if status is not None and status < 0:
            return ProcessEnd("fault", f"AITER's process {exit_words(status)}", status, step, output)
        left = self._tracker.unreported()
        if self._tracker.error or (left and (status or 0) > 0):
            text = (
                self._tracker.error
                or f"AITER ended with status {status}, {plural(len(left), 'shape')} without a result"
            )
            return ProcessEnd("error", text, status, None, output)
        return ProcessEnd("done", "", status, None, output)

    def _settled(self, end: ProcessEnd) -> ProcessEnd:
        """The end, once all is settled that can be; the shape to blame is in flight then."""
        tracker, flight = self._tracker, self._tracker.flight
        tracker.settle_all(whole=end.how == "done")
        short = [s for s in flight.left if s in tracker.out_of_memory]
        if tracker.culprit is not None and tracker.culprit.shape is not None:
            flight.begin(tracker.culprit.shape)
        elif short and end.how == "done":
            flight.begin(short[0])
            return replace(end, how="oom", detail="all candidates of the shape ran out of memory")
        return end


def _orphan(journal: CandidateJournal) -> JournalStep | None:
    """A candidate whose process is dead."""
    dead = [s for s in journal.open if not is_alive(s.pid)]
    if dead:
        journal.read()  # it may have ended, and its process after it, since the last time
    return next((s for s in dead if s in journal.open), None)


def leave_out(
    left_out: LeftOut, result: ProcessResult, entry: BlocklistEntry, folder: Path, shown: str = "", of: str = ""
) -> LeftOut:
    """Candidates to leave out next, the one that ended this process among them, with a reproduction in `folder`.

    `shown`: what stands before the reproduction's name in texts; `of`: whose candidate it is, for the log.
    """
    made = left_out.and_(entry, shown + write_repro(folder, result, entry).name)
    name, why = entry.candidate.describe(), made.why(entry.candidate)
    print(f"gemmfleet: candidate {name}{of} is left out ({why})", flush=True)
    return made


def write_repro(folder: Path, result: ProcessResult, entry: BlocklistEntry) -> Path:
    """A folder with the one-row CSV and the command that shows the fault; its path.

    The command is AITER's own, without anything of ours: it measures all candidates of the shape and meets the one.
    """
    files, env = result.files, result.env
    name = "-".join([entry.family, *entry.candidate.key[-4:], *entry.candidate.ident[:2]])
    target = folder / "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:120]
    target.mkdir(parents=True, exist_ok=True)
    (target / "untuned.csv").write_text(files.untuned.read_text())
    moved = {str(files.untuned): "untuned.csv", str(files.tuned): "tuned.csv", str(files.profile): "profile.csv"}
    switches = sorted(n for n in {*os.environ, *env} if AITER_CLEARED.fullmatch(n) or AITER_SWITCHES.fullmatch(n))
    shown = [n for n in dict.fromkeys((*_SHOWN_ENV, *switches)) if env.get(n)]
    words = [f'"$here/{moved[w]}"' if w in moved else shlex.quote(w) for w in _impatient(result.argv)]
    lines = [
        "#!/bin/sh",
        f"# {entry.outcome} of {entry.candidate.describe()} on {entry.gfx}, to be run in its image on its node:",
        f"# image {entry.where.image}, slot {entry.where.slot}, driver {entry.where.driver or 'unknown'}",
        *(f"# {line}" for line in clean(entry.detail, 500).splitlines()),
        "# where AITER waits for ever for a process that died, end it with Ctrl-C",
        'here=$(cd -- "$(dirname -- "$0")" && pwd) || exit 1',
        'rm -f -- "$here/tuned.csv" "$here/profile.csv"',
        f"cd -- {shlex.quote(str(result.cwd))} || exit 1",
        "export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1",
        *(f"export {n}={shlex.quote(_without_ours(n, env[n]))}" for n in shown),
        *(f"unset {n}" for n in switches if n not in shown),
        "exec " + " ".join(words),
    ]
    script = target / "reproduce.sh"
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o700)
    return target


def _impatient(argv: Sequence[str]) -> list[str]:
    """The command with a limit that a person can wait for, where it has one."""
    words = list(argv)
    if "--timeout" in words:
        words[words.index("--timeout") + 1] = str(REPRO_TIMEOUT_S)
    return words


def _without_ours(name: str, value: str) -> str:
    if name != "PYTHONPATH":
        return value
    return os.pathsep.join(p for p in value.split(os.pathsep) if not p.endswith("/shim"))
