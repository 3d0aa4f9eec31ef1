"""Tracks the shapes that one AITER process measures, and reports their rows and verdicts to the agent.

The shim's records (journal.py) and AITER's CSV files (tables.py) are the only sources of progress. AITER takes the
shapes in the order of its input, on one GPU one after the other, and writes its files after each batch. So once a
candidate of a later batch begins, the shapes of the earlier batches are over, and what the files do not have of them
will not come; but AITER may just be writing them anew (`Tables.are_whole`). A shape goes this way; `remaining` are
those that are not settled:

    waiting -> in flight (`current`) -> parked, if another begins before its batch is written -> settled

run.py calls `read` again and again while the process runs, and `settle_all` once when it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from worker.protocol import Row, SpecShape
from worker.tuners.aiter.choice import BLOCKED_BEFORE, CandidateChoice
from worker.tuners.aiter.journal import Journal, JournalStep, step_row
from worker.tuners.aiter.known_issues import CANDIDATE_WARNING, diagnose
from worker.tuners.aiter.launch import JOURNAL, PROFILE, TUNED
from worker.tuners.aiter.session import Job, say
from worker.tuners.aiter.tables import Tables
from worker.tuners.aiter.verdict import ShapeVerdict, shape_verdict
from worker.tuners.base import Emit
from worker.tuners.common.problem import is_fatal

UNSOUND_K = (
    "K is not a multiple of 256, and this AITER lays out the scales of such K wrongly past 32 rows, also for its "
    "production kernels; v0.1.14 and newer have it right"
)


class ShapeTracker:
    """The state of the shapes of one process."""

    def __init__(
        self, job: Job, shapes: Sequence[SpecShape], folder: Path, choice: CandidateChoice, emit: Emit
    ) -> None:
        self._job = job
        self._folder = folder
        self._choice = choice
        self._emit = emit
        self._keys = {shape.id: shape.key for shape in shapes}
        self.tables = Tables(job.family, job.columns, self._keys, job.err_ratio)
        """The rows that AITER wrote."""
        self._journal = Journal(folder / JOURNAL, job.columns, self._keys)
        self._order = list(self._keys)
        self._parked: set[int] = set()
        self._batch = -1
        """Number of the latest batch that a candidate began of."""
        self._moved_at = time.monotonic()
        self._excuses: dict[int, tuple[str, str]] = {}
        """Shapes whose failed candidates say nothing about them: the outcome of the attempt, and its text."""
        self._chip = ""
        """AITER's message that the family is not for this chip."""
        self.remaining = list(self._order)
        """Shapes without a verdict."""
        self.current: int | None = None
        """The shape in flight."""
        self.fatal: tuple[str, str] | None = None
        """The outcome and the text, once the process cannot go on."""
        self.culprit: JournalStep | None = None
        """The candidate whose error spoilt the process for those after it."""

    def read(self) -> bool:
        """Take in what is new in the shim's records and the files; True if there was anything."""
        steps = self._journal.read()
        for step in steps:
            if step.shape is not None:
                self._take(step, step.shape)
        has_news = self.tables.read(self._folder / TUNED, self._folder / PROFILE) or bool(steps)
        for shape in list(self.remaining):
            is_lacking = self._is_over(shape) and self.tables.are_whole
            if shape in self.tables.tuned or is_lacking:
                self._settle(shape)
        waiting = [shape for shape in self.remaining if shape not in self._parked]
        if self.current is None and waiting:
            self.begin(waiting[0])
        return has_news

    def _take(self, step: JournalStep, shape: int) -> None:
        now = time.monotonic()
        batch = self._batch_of(shape)
        if step.event == "begin" and batch > self._batch:
            say(f"set-up of batch {batch + 1}: {now - self._moved_at:.1f} s")
        self._moved_at = now
        self._batch = max(self._batch, batch)
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
        """Note that the process cannot go on; the first reason stays. `how`: fault or hang."""
        self.fatal = self.fatal or (how, detail)

    def begin(self, shape: int) -> None:
        """Put the shape in flight; the one before is measured, its verdict comes later."""
        if shape == self.current or shape not in self.remaining:
            return
        if self.current is not None:
            self._emit.parked(self.current)
            self._parked.add(self.current)
        self._parked.discard(shape)
        self._emit.started(shape)
        self.current = shape

    def at_work(self) -> list[JournalStep]:
        """The candidates that began and did not end, the last first; before them the one that spoilt its process."""
        steps = [step for step in reversed(self._journal.open.values()) if step.shape is not None]
        return [self.culprit, *steps] if self.culprit else steps

    def without_result(self) -> list[int]:
        """Shapes that AITER has written nothing of, and is not through with."""
        return [shape for shape in self.remaining if not self._is_in_files(shape) and not self._is_over(shape)]

    def settle_all(self, *, has_finished: bool, chip: str = "", no_kernel: bool = False) -> tuple[str, str] | None:
        """Settle what is known when the process has ended; if it broke off (`has_finished` False), only what is in the
        files.

        `chip`: AITER's message that the family is not for this chip. `no_kernel`: AITER reported shapes that no kernel
        takes. Returns outcome and text if the failed candidates of a shape say nothing about it; it is in flight then.
        """
        self._chip = chip
        for shape in list(self.remaining):
            is_done = shape in self._journal.ended or chip or no_kernel or self._is_over(shape)
            if self._is_in_files(shape) or (has_finished and is_done):
                self._settle(shape)
        if self.culprit is not None and self.culprit.shape is not None:
            self.begin(self.culprit.shape)
            return None
        excused = [shape for shape in self.remaining if shape in self._excuses]
        if not excused or not has_finished:
            return None
        self.begin(excused[0])
        return self._excuses[excused[0]]

    def rows_in_flight(self) -> list[Row]:
        """Rows measured of the shape in flight when the process broke off."""
        return self._journal_rows(self.current) if self.current is not None else []

    def _batch_of(self, shape: int) -> int:
        return self._order.index(shape) // self._job.batch

    def _is_over(self, shape: int) -> bool:
        return self._batch_of(shape) < self._batch

    def _is_in_files(self, shape: int) -> bool:
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
            self.begin(shape)  # the agent takes rows and verdicts of begun shapes only
        for row in rows:
            self._emit.row(shape, row)
        self._report(shape, verdict)
        self.remaining.remove(shape)
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
            blocked=len([row for row in rows if row.get("detail", "").startswith(BLOCKED_BEFORE)]),
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
        """Report the verdict, with the winner's identity and the blocked candidates that the records name."""
        steps = [step for step in self._journal.ended.get(shape, []) if step.candidate.ident]
        blocked = [self._choice.blocked_record(step.candidate) for step in steps if step.event == "blocked"]
        records = [candidate for candidate in blocked if candidate is not None]
        winner = verdict.winner
        if winner is None:
            self._emit.failed(shape, verdict.reason, verdict.detail, blocked=records)
            return
        identity = None
        for step in steps:
            if step.event == "end" and self._is_of_row(step, winner):
                identity = step.candidate.ident
                break
        self._emit.tuned(shape, winner, candidate=identity, blocked=records)

    def _is_of_row(self, step: JournalStep, row: Row) -> bool:
        """True if a record is of this row. A winner of fmoe is a pair of stages, and has no record."""
        measured = self._row_of(step)
        return abs(measured["us"] - row["us"]) < 1e-3 and _kernel(measured) == _kernel(row) and "kernelId" in row

    def _rows(self, shape: int) -> list[Row]:
        """The shape's candidates: of the profile, else of the shim's records."""
        rows = self.tables.candidates(shape)
        for row in rows:
            self._job.names.learn(row)
        journal_rows = self._journal_rows(shape)
        why_blocked = {}
        for step in self._journal.ended.get(shape, []):
            if step.event == "blocked":
                why_blocked[_kernel(self._row_of(step))] = self._choice.why_blocked(step.candidate)
        for row in rows:
            if row["us"] <= 0 and _kernel(row) in why_blocked:
                row["detail"] = why_blocked[_kernel(row)]
        if self._choice.only:  # AITER counts what was not requested as crashed
            requested = {_kernel(row) for row in journal_rows}
            rows = [row for row in rows if row["us"] > 0 or _kernel(row) in requested]
        if not rows:
            return journal_rows
        if self._job.family.two_stages:  # AITER lists only the right kernels, as pairs
            rows += [row for row in journal_rows if row.get("status") != "ok"]
        return rows

    def _journal_rows(self, shape: int) -> list[Row]:
        """Rows of the shim's records, for a shape whose profile was never written; blocked ones with the reason."""
        rows = [self._row_of(step) for step in self._journal.ended.get(shape, []) if step.event != "skipped"]
        for row in rows:
            if row["us"] > 0 and not self._job.family.two_stages:  # the records have no rate
                row["tflops"] = round(self._job.family.flops(self._keys[shape]) / row["us"] / 1e6, 4)
        return rows

    def _row_of(self, step: JournalStep) -> Row:
        why = self._choice.why_blocked(step.candidate) if step.event == "blocked" else ""
        return step_row(self._job.family, step, self._job.err_ratio, self._job.names, why)


def _kernel(row: Row) -> tuple[object, ...]:
    """The columns that name the kernel of a row among those of one shape."""
    return row.get("kernelId"), row.get("splitK"), row.get("libtype")
