"""The state of the shapes that one AITER process measures, and their verdicts.

The shim's records and the CSV files are the only sources of progress. AITER takes the shapes in the order of its input,
on one GPU one after the other, and writes its files after each batch. So once a candidate of a later batch begins, the
shapes of the earlier batches are over, and what the files do not have of them will not come. A shape that is measured
while its batch goes on is parked: its row comes with the batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from worker.protocol import Row, SpecShape
from worker.text import clean
from worker.tuners.aiter.blocked import CandidateChoice, CandidateId
from worker.tuners.aiter.known_issues import CANDIDATE_WARNING, diagnose
from worker.tuners.aiter.launch import JOURNAL, PROFILE, TUNED
from worker.tuners.aiter.rows import JournalStep, Keys, ShapeKeys, ShapeVerdict, Tables, shape_verdict, step_row
from worker.tuners.aiter.session import Job, say
from worker.tuners.base import Emit
from worker.tuners.common.problem import is_fatal

UNSOUND_K = (
    "K is not a multiple of 256, and this AITER lays out the scales of such K wrongly past 32 rows, also for its "
    "production kernels; v0.1.14 and newer have it right"
)
READ_AT_ONCE = 4 * 1024 * 1024


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
        """The step of a record, such as `{"event": "end", "pid": 7, "key": [...], "candidate": [...], "us": 9.1,
        "err": 0.0, "said": ""}`; None if the line is no record."""
        try:
            raw = json.loads(line)
            candidate = CandidateId(tuple(map(str, raw["key"])), tuple(map(str, raw["candidate"])))
            return JournalStep(
                event=str(raw["event"]),
                shape=self._keys.of_values(candidate.key),
                candidate=candidate,
                pid=int(raw["pid"]),
                us=float(raw.get("us", -1)),
                err=float(raw.get("err", 1)),
                said=clean(str(raw.get("said", "")), 1000),
            )
        except (ValueError, KeyError, TypeError):
            return None


class ShapeTracker:
    """Tracks the shapes of one process, and reports them to the agent.

    `current`: the shape in flight. `fatal`: how and why the process cannot go on, once that is known. `culprit`: the
    candidate whose error spoilt the process for those after it. `tables`: the rows that AITER wrote.
    """

    def __init__(
        self, job: Job, shapes: Sequence[SpecShape], folder: Path, choice: CandidateChoice, emit: Emit
    ) -> None:
        self._job, self._folder, self._choice, self._emit = job, folder, choice, emit
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
        has_news = self.tables.read(self._folder / TUNED, self._folder / PROFILE) or bool(steps)
        if has_news:
            for shape in list(self.left):
                if shape in self.tables.tuned or self._is_over(shape):
                    self._settle(shape)
        if self.current is None:
            waiting = [shape for shape in self.left if shape not in self._parked]
            if waiting:
                self.begin(waiting[0])
        return has_news

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
        rows = self._rows(shape)
        verdict = self._judge(shape, rows)
        if verdict is None:
            return
        in_flight = self.current
        if shape not in self._parked:
            self.begin(shape)
        for row in rows:
            self._emit.row(shape, row)
        self._report(shape, verdict)
        self.left.remove(shape)
        self._parked.discard(shape)
        if shape == self.current:
            self.current = None
        if in_flight is not None:  # AITER passed over this one, and is at that one
            self.begin(in_flight)

    def _judge(self, shape: int, rows: Sequence[Row]) -> ShapeVerdict | None:
        """The verdict; None if what happened says nothing about the shape."""
        verdict = shape_verdict(
            self._job.family,
            self.tables.tuned.get(shape),
            rows,
            self._job.err_ratio,
            chip=self._chip,
            blocked=len([row for row in rows if row.get("detail", "").startswith("left out: ")]),
        )
        if verdict.winner is not None:
            return verdict
        if self.fatal is not None:  # AITER counts what a dead process did not do as failed
            return None
        if verdict.reason == "no_candidate" and shape in self._excuses:
            return None  # more memory may be free elsewhere, or another image works
        if self._has_unsound_scales(shape):
            return replace(verdict, detail=f"{verdict.detail}; {UNSOUND_K}")
        return verdict

    def _has_unsound_scales(self, shape: int) -> bool:
        step = self._job.family.aiter.pads_k_to
        return bool(step) and int(self._keys[shape]["K"]) % step != 0 and not self._job.image.findings.k256_sound

    def _report(self, shape: int, verdict: ShapeVerdict) -> None:
        """The verdict with what the records have of the candidates beside their times."""
        steps = [step for step in self._journal.ended.get(shape, []) if step.candidate.ident]
        blocked = [self._choice.blocked_record(step.candidate) for step in steps if step.event == "blocked"]
        records = [candidate for candidate in blocked if candidate is not None]
        winner = verdict.winner
        if winner is None:
            self._emit.failed(shape, verdict.reason, verdict.detail, blocked=records)
            return
        measured = [step.candidate.ident for step in steps if step.event == "end" and self._is(step, winner)]
        self._emit.tuned(shape, winner, candidate=measured[0] if measured else None, blocked=records)

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
        reasons = {_same(self._step_row(s)): self._choice.why_blocked(s.candidate) for s in blocked}
        for row in rows:
            if row["us"] <= 0 and _same(row) in reasons:
                row["detail"] = reasons[_same(row)]
        if self._choice.only:  # AITER counts what was not requested as crashed
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
        why = self._choice.why_blocked(step.candidate) if step.event == "blocked" else ""
        return step_row(self._job.family, step, self._job.err_ratio, self._job.names, why)


def _same(row: Row) -> tuple[object, ...]:
    return row.get("kernelId"), row.get("splitK"), row.get("libtype")
