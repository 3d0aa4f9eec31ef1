"""Follows one AITER process live: the state of its shapes, their verdicts, and the script that reproduces its fault.

The shim's records and the CSV files are the only sources of progress. AITER takes the shapes in the order of its input,
on one GPU one after the other, and writes its files after each batch. So once a candidate of a later batch begins, the
shapes of the earlier batches are over, and what the files do not have of them will not come. A shape that is measured
while its batch goes on is parked: its row comes with the batch.

We end the process early if it cannot go on: a candidate's process is dead, it prints a known issue that ends processes,
it makes no progress, or a shape takes too long. AITER itself would wait (for ever, before 2025-12-30) or drop all
candidates of the shape.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from worker.families import legal_cells
from worker.process import Child, OutputLog, Splitter, Stopwatch, cpu_seconds, exit_words, is_alive
from worker.protocol import SHAPE_VERDICTS, Row, SpecShape
from worker.text import clean, plural
from worker.tuners.aiter.blocklist import BlocklistEntry, CandidateId, LeftOut
from worker.tuners.aiter.environment import is_switch
from worker.tuners.aiter.known_issues import CANDIDATE_WARNING, Diagnosis, diagnose, ends_process
from worker.tuners.aiter.launch import JOURNAL, LEFT_OUT, LOG, PROFILE, TUNED, UNTUNED, argv
from worker.tuners.aiter.rows import JournalStep, Keys, ShapeKeys, ShapeVerdict, Tables, shape_verdict, step_row
from worker.tuners.aiter.session import Job, say
from worker.tuners.base import Emit, TunerFault
from worker.tuners.common.problem import is_fatal

UNSOUND_K = (
    "K is not a multiple of 256, and this AITER lays out the scales of such K wrongly past 32 rows, also for its "
    "production kernels; v0.1.14 and newer have it right"
)
READ_AT_ONCE = 4 * 1024 * 1024
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


class Journal:
    """The shim's records, read as they come. `open`: the candidate at work, by process; `ended`: by shape."""

    def __init__(self, path: Path, columns: tuple[str, ...], shapes: Keys) -> None:
        self._path, self._keys = path, ShapeKeys(columns, shapes)
        self._at, self._rest = 0, b""
        self.open: dict[int, JournalStep] = {}
        self.ended: dict[int, list[JournalStep]] = {}

    def read(self) -> list[JournalStep]:
        """The steps since the last call."""
        try:
            with open(self._path, "rb") as f:
                f.seek(self._at)
                data = f.read(READ_AT_ONCE)
        except FileNotFoundError:
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        steps = [s for s in map(self._parse, lines) if s is not None]
        for s in steps:
            self.open.pop(s.pid, None)
            if s.event == "begin":
                self.open[s.pid] = s
            elif s.shape is not None:
                self.ended.setdefault(s.shape, []).append(s)
        return steps

    def _parse(self, line: bytes) -> JournalStep | None:
        try:
            raw = json.loads(line)
            candidate = CandidateId(tuple(map(str, raw["key"])), tuple(map(str, raw["candidate"])))
            us, err, said = float(raw.get("us", -1)), float(raw.get("err", 1)), clean(str(raw.get("said", "")), 1000)
            return JournalStep(
                str(raw["event"]), self._keys.of_values(candidate.key), candidate, int(raw["pid"]), us, err, said
            )
        except (ValueError, KeyError, TypeError):
            return None


class ShapeTracker:
    """Tracks the shapes of one process, and reports them to the agent.

    `current`: the shape in flight. `fatal`: how and why the process cannot go on, once that is known. `culprit`: the
    candidate whose error spoilt the process for those after it. `tables`: the rows that AITER wrote.
    """

    def __init__(self, job: Job, shapes: Sequence[SpecShape], folder: Path, left_out: LeftOut, emit: Emit) -> None:
        self._job, self._folder, self._left_out, self._emit = job, folder, left_out, emit
        self._keys = {s.id: s.key for s in shapes}
        self.tables = Tables(job.family, job.columns, self._keys, job.err_ratio)
        self._journal = Journal(folder / JOURNAL, job.columns, self._keys)
        self._order = list(self._keys)
        self._parked: set[int] = set()
        self._batch, self._moved_at = -1, time.monotonic()
        self._excuses: dict[int, tuple[str, str]] = {}
        """Shapes whose failed candidates say nothing about them: the outcome of the attempt, and its text."""
        self._chip = ""
        self.left = list(self._order)
        self.current: int | None = None
        self.fatal: tuple[str, str] | None = None
        self.culprit: JournalStep | None = None

    def read(self) -> bool:
        """Take in what is new in the shim's records and the files; True if there was anything."""
        steps = self._journal.read()
        for step in steps:
            if step.shape is not None:
                self._take(step, step.shape)
        found = self.tables.read(self._folder / TUNED, self._folder / PROFILE)
        for shape in list(self.left) if found or steps else ():
            if shape in self.tables.tuned or self._is_over(shape):
                self._settle(shape)
        if self.current is None and (waiting := [s for s in self.left if s not in self._parked]):
            self.begin(waiting[0])
        return found or bool(steps)

    def _take(self, step: JournalStep, shape: int) -> None:
        if step.event == "begin" and self._batch_of(shape) > self._batch:
            say(f"set-up of batch {self._batch_of(shape) + 1}: {time.monotonic() - self._moved_at:.1f} s")
        self._moved_at = time.monotonic()
        self._batch = max(self._batch, self._batch_of(shape))
        if step.event == "begin":
            self.begin(shape)
        elif step.said:
            self._judge_error(step, shape)

    def _judge_error(self, step: JournalStep, shape: int) -> None:
        """A candidate raised. Memory that ran out and a broken image say nothing about the shape, and the process can
        go on. A fault of the GPU ends it."""
        known = diagnose(step.said.replace(CANDIDATE_WARNING, ""), None)
        if known is not None and known.issue.reason == "oom":
            self._excuses[shape] = "oom", "all candidates of the shape ran out of memory"
        elif known is not None and known.blames_image:
            self._excuses[shape] = "error", f"no candidate of the shape can run in this image: {step.said}"
        elif is_fatal(step.said) or "AcceleratorError" in step.said:
            self.culprit = self.culprit or step
            self.set_fatal("fault", step.said)

    def set_fatal(self, how: str, detail: str) -> None:
        """The process cannot go on; the first reason stays."""
        self.fatal = self.fatal or (how, detail)

    def begin(self, shape: int) -> None:
        """Put the shape in flight; the one before is measured, its verdict comes later."""
        if shape == self.current or shape not in self.left:
            return
        if self.current is not None:
            self._emit.parked(self.current)
            self._parked.add(self.current)
        self._parked.discard(shape)
        self._emit.started(shape)
        self.current = shape

    def at_work(self) -> list[JournalStep]:
        """The candidates that began and did not end, the last first; before them the one that spoilt its process."""
        culprit = [self.culprit] if self.culprit else []
        return culprit + [s for s in list(self._journal.open.values())[::-1] if s.shape is not None]

    def unknown(self) -> list[int]:
        """Shapes that AITER has written nothing of, and is not through with."""
        return [s for s in self.left if not self._is_known(s) and not self._is_over(s)]

    def settle_all(self, *, whole: bool, chip: str = "", refused: bool = False) -> tuple[str, str] | None:
        """Settle at the end what is known; of a process that broke off, only what is in the files.

        `chip`: AITER's message that the family is not for this chip. `refused`: AITER reported shapes that no kernel
        takes. Returns outcome and text if the failed candidates of a shape say nothing about it; it is in flight then.
        """
        self._chip = chip
        for shape in list(self.left):
            ended = shape in self._journal.ended or chip or refused or self._is_over(shape)
            if self._is_known(shape) or (whole and ended):
                self._settle(shape)
        excused = [s for s in self.left if s in self._excuses]
        if self.culprit is not None and self.culprit.shape is not None:
            self.begin(self.culprit.shape)
        elif excused and whole:
            self.begin(excused[0])
            return self._excuses[excused[0]]
        return None

    def partial(self) -> list[Row]:
        """Rows measured of the shape in flight when the process broke off."""
        return self._steps_as_rows(self.current) if self.current is not None else []

    def _batch_of(self, shape: int) -> int:
        return self._order.index(shape) // self._job.batch

    def _is_over(self, shape: int) -> bool:
        return self._batch_of(shape) < self._batch

    def _is_known(self, shape: int) -> bool:
        return shape in self.tables.tuned or bool(self.tables.candidates(shape))

    def _settle(self, shape: int) -> None:
        """Report the shape's rows and its verdict, if there is one."""
        if self.culprit is not None and shape == self.culprit.shape:
            return  # what its candidates did after that one means nothing
        family, tuned, rows = self._job.family, self.tables.tuned.get(shape), self._rows(shape)
        left_out = sum(r.get("detail", "").startswith("left out: ") for r in rows)
        verdict = shape_verdict(
            family, tuned, rows, self._job.err_ratio, chip=self._chip, left_out=left_out
        )  # fmt: skip
        if verdict.winner is None:
            if self.fatal is not None:  # AITER counts what a dead process did not do as failed
                return
            if verdict.reason == "no_candidate" and shape in self._excuses:
                return  # more memory may be free elsewhere, or another image works: no verdict
            step = family.aiter.pads_k_to
            if step and int(self._keys[shape]["K"]) % step and not self._job.image.findings.k256_sound:
                verdict = replace(verdict, detail=f"{verdict.detail}; {UNSOUND_K}")
        flight = self.current
        if shape not in self._parked:
            self.begin(shape)
        for row in rows:
            self._emit.row(shape, row)
        self._report(shape, verdict)
        self.left.remove(shape)
        self._parked.discard(shape)
        self.current = None if shape == self.current else self.current
        if flight is not None:  # AITER passed over this one, and is at that one
            self.begin(flight)

    def _report(self, shape: int, verdict: ShapeVerdict) -> None:
        """The verdict with what the records have of the candidates beside their times."""
        steps = [s for s in self._journal.ended.get(shape, []) if s.candidate.ident]
        blocked = (s.candidate for s in steps if s.event == "blocked")
        withheld = [w for candidate in blocked if (w := self._left_out.withheld(candidate))]
        if (winner := verdict.winner) is None:
            self._emit.failed(shape, verdict.reason, verdict.detail, withheld=withheld)
            return
        first = next((s.candidate.ident for s in steps if s.event == "end" and self._is(s, winner)), None)
        self._emit.tuned(shape, winner, candidate=first, withheld=withheld)

    def _is(self, step: JournalStep, row: Row) -> bool:
        """True if a record is this row. A winner of fmoe is a pair of stages, and no record."""
        mine = self._step_row(step)
        return abs(mine["us"] - row["us"]) < 1e-3 and _same(mine) == _same(row) and "kernelId" in row

    def _rows(self, shape: int) -> list[Row]:
        """The shape's candidates: of the profile, else of the shim's records."""
        rows = self.tables.candidates(shape)
        for row in rows:
            self._job.names.learn(row)
        ours = self._steps_as_rows(shape)
        blocked = [s for s in self._journal.ended.get(shape, []) if s.event == "blocked"]
        left_out = {_same(self._step_row(s)): self._left_out.why(s.candidate) for s in blocked}
        for row in rows:
            if row["us"] <= 0 and _same(row) in left_out:
                row["detail"] = left_out[_same(row)]
        if self._left_out.only:  # AITER counts what was not requested as crashed
            known = {_same(r) for r in ours}
            rows = [r for r in rows if r["us"] > 0 or _same(r) in known]
        if rows and self._job.family.two_stages:  # AITER lists the right kernels alone, as pairs
            return [*rows, *(r for r in ours if r.get("status") != "ok")]
        return rows or ours

    def _steps_as_rows(self, shape: int) -> list[Row]:
        """Rows of the shim's records, for a shape whose profile was never written; blocked ones with the reason."""
        rows = [self._step_row(s) for s in self._journal.ended.get(shape, []) if s.event != "skipped"]
        for row in rows:
            if row["us"] > 0 and not self._job.family.two_stages:  # the records have no rate
                row["tflops"] = round(self._job.family.flops(self._keys[shape]) / row["us"] / 1e6, 4)
        return rows

    def _step_row(self, step: JournalStep) -> Row:
        why = self._left_out.why(step.candidate) if step.event == "blocked" else ""
        return step_row(self._job.family, step, self._job.err_ratio, self._job.names, why)


def _same(row: Row) -> tuple[object, ...]:
    return row.get("kernelId"), row.get("splitK"), row.get("libtype")


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
        if excuse := tracker.settle_all(whole=how == "done", chip=chip, refused=reason in SHAPE_VERDICTS):
            how, text = excuse
        # no candidate is left out for a fault of the image
        at_work = step if how in ("fault", "hang") and not (found and found.blames_image) else None
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
