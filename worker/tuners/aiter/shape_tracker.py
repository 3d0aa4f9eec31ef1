"""State of the shapes of one process of AITER, from its lines, journal and files, and their verdicts as they come.

AITER takes the shapes in the order of its input, on one GPU one after the other. A shape that is measured while its
batch goes on is parked: its row comes with the batch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from worker.protocol import Row, SpecShape, Withheld
from worker.tuners.aiter.blocklist import LeftOut
from worker.tuners.aiter.command import ProcessFiles
from worker.tuners.aiter.harvest import Harvest, ShapeVerdict, shape_verdict
from worker.tuners.aiter.progress import (
    CandidateJournal,
    JournalStep,
    LineEvent,
    ShapeKeys,
    journal_row,
    key_cells,
)
from worker.tuners.aiter.session import TuningContext
from worker.tuners.base import Emit
from worker.tuners.common.rows import is_fatal

WRITTEN_WITHIN_S = 2.0
UNSOUND_K = (
    "K is not a multiple of 256, and this AITER lays out the scales of such K wrongly past 32 rows, also for its "
    "production kernels; v0.1.14 and newer have it right"
)
OUT_OF_MEMORY = re.compile(r"out of memory", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CandidateOutcomes:
    """A shape's candidates beside their rows: the winner's identity, requested ones that ran, ones left out."""

    winner: tuple[str, ...] | None = None
    ran: tuple[tuple[str, ...], ...] = ()
    withheld: tuple[Withheld, ...] = ()


class ShapesInFlight:
    """Reports the shapes of one process to the agent. `current`: the shape in flight."""

    def __init__(self, shapes: Sequence[SpecShape], emit: Emit) -> None:
        self._order = [s.id for s in shapes]
        self._emit = emit
        self._waiting = list(self._order)
        self._parked: list[int] = []
        self.current: int | None = None

    @property
    def left(self) -> list[int]:
        """Shapes without a verdict, in their order."""
        return [s for s in self._order if s == self.current or s in self._parked or s in self._waiting]

    def settled(self, shape: int) -> bool:
        return shape not in self.left

    def place(self, shape: int) -> int:
        """Its number in the input, from 0."""
        return self._order.index(shape)

    def begin(self, shape: int) -> None:
        """Put the shape in flight; the one before is measured."""
        if shape == self.current or self.settled(shape):
            return
        self.park()
        if shape in self._parked:
            self._parked.remove(shape)
        else:
            self._waiting.remove(shape)
        self._emit.started(shape)
        self.current = shape

    def park(self) -> None:
        """Park the shape in flight: it is measured, its verdict comes later."""
        if self.current is not None:
            self._emit.parked(self.current)
            self._parked.append(self.current)
            self.current = None

    def advance(self) -> None:
        """Begin the next of the input, where none is in flight."""
        if self.current is None and self._waiting:
            self.begin(self._waiting[0])

    def settle(self, shape: int, rows: Sequence[Row], verdict: ShapeVerdict, known: CandidateOutcomes) -> None:
        """Report the shape's rows and its verdict."""
        if self.settled(shape):
            return
        if shape in self._waiting:
            self.begin(shape)
        for row in rows:
            self._emit.row(shape, row)
        if verdict.winner is not None:
            self._emit.tuned(
                shape, verdict.winner, candidate=known.winner, ran=known.ran,
                withheld=known.withheld,
            )  # fmt: skip
        else:
            self._emit.failed(shape, verdict.reason, verdict.detail, ran=known.ran, withheld=known.withheld)
        if shape == self.current:
            self.current = None
        else:
            self._parked.remove(shape)


class ShapeTracker:
    """Tracks the shapes of one process by lines, journal and files, and settles them through `flight`.

    `fatal`: how and why the process cannot go on, once that is known. `culprit`: the candidate whose error spoilt it.
    """

    def __init__(
        self,
        context: TuningContext,
        shapes: Sequence[SpecShape],
        files: ProcessFiles,
        left_out: LeftOut,
        emit: Emit,
    ) -> None:
        self._context = context
        self._files = files
        self._left_out = left_out
        self._shapes = {s.id: s.key for s in shapes}
        self._keys = ShapeKeys(context.columns, self._shapes)
        self._harvest = Harvest(context.family, context.columns, self._shapes, context.limits.err_ratio)
        self._decided: set[int] = set()
        self._over_since: dict[int, float] = {}
        self._batches = 0
        self._chip = ""
        self.journal = CandidateJournal(files.journal, context.columns, self._shapes)
        self.flight = ShapesInFlight(shapes, emit)
        self.building = False
        self.error = ""
        self.fatal: tuple[str, str] | None = None
        self.culprit: JournalStep | None = None
        self.out_of_memory: set[int] = set()
        """Shapes of which a candidate ran out of memory."""

    @property
    def devices(self) -> set[tuple[str, str]]:
        """(gfx, cu_num) of the rows that AITER wrote."""
        return self._harvest.devices

    def feed(self, events: Sequence[LineEvent]) -> bool:
        """Take in printed lines, then what is new in journal and files; True if these had anything new."""
        for event in events:
            self._take(event)
        steps = self.journal.new()
        for step in steps:
            if step.event == "begin" and step.shape is not None:
                self.flight.begin(step.shape)
        found = self._harvest.read(self._files.tuned, self._files.profile)
        if found or events or self._over_since:
            self._settle_ready()
        return found or bool(steps)

    def set_fatal(self, how: str, detail: str) -> None:
        """The process cannot go on; the first reason stays."""
        self.fatal = self.fatal or (how, detail)

    def at_work(self) -> JournalStep | None:
        """The candidate that had begun and not ended, or whose error spoilt its process."""
        if self.culprit is not None:
            return self.culprit
        self.journal.read()
        return next((s for s in self.journal.open if s.shape is not None), None)

    def unreported(self) -> list[int]:
        """Shapes that AITER has reported nothing of."""
        return [s for s in self.flight.left if self._harvest.tuned(s) is None and s not in self._decided]

    def settle_all(self, *, whole: bool) -> None:
        """Settle at the end what the files hold; of a process that broke off, only what AITER had decided."""
        for shape in self.flight.left:
            known = self._harvest.tuned(shape) is not None or self._harvest.candidates(shape)
            if known or (whole and (shape in self._decided or self._chip)):
                self._settle(shape)

    def partial(self) -> list[Row]:
        """Rows measured of the shape in flight, where the process broke off."""
        current = self.flight.current
        return self._journal_rows(current) if current is not None else []

    # --- lines --------------------------------------------------------------------------------------------------

    def _take(self, event: LineEvent) -> None:
        kind = event.kind
        if kind in ("jit_start", "jit_end"):
            self.building = kind == "jit_start"
        elif kind in ("tuned", "refused"):
            shape = self._keys.find(event.key, named=event.named)
            if shape is not None:
                self._decided.add(shape)
        elif kind in ("batch", "nothing"):
            self._batches = max(self._batches + 1, event.count)
            self._decided.update(s for s in self._shapes if self._batch_is_over(s))
        elif kind == "chip":
            self._chip = event.text
        elif kind in ("fault", "mapping", "retry", "timeout"):
            self.set_fatal("hang" if kind == "timeout" else "fault", event.text)
        elif kind == "candidate":
            self._candidate(event.text)
        elif kind in ("error", "jit_failed"):
            self.error = self.error or event.text

    def _candidate(self, text: str) -> None:
        """Take in a candidate that could not run: expected, unless its error spoils the candidates after it."""
        if is_fatal(text) or "AcceleratorError" in text:
            if self.fatal is None:
                self.journal.read()
                self.culprit = self.journal.named_in(text)
            self.set_fatal("fault", text)
        elif OUT_OF_MEMORY.search(text):
            shape = self._of_info(text)
            self.out_of_memory.update(s for s in (shape,) if s is not None)

    def _of_info(self, text: str) -> int | None:
        """The shape of the candidate that a line names by its info."""
        named, key = key_cells(text.partition("info:")[2])
        return self._keys.find(key, named=named)

    def _batch_is_over(self, shape: int) -> bool:
        """True if the profile of the shape's batch is complete."""
        return self.flight.place(shape) < self._batches * max(1, self._context.strategy.batch)

    # --- verdicts -----------------------------------------------------------------------------------------------

    def _settle_ready(self) -> None:
        """Settle what AITER decided and wrote. A shape without a row waits a moment: the file may be half written."""
        now = time.monotonic()
        for shape in self.flight.left:
            over = shape in self._decided and self._batch_is_over(shape)
            if over and self._harvest.tuned(shape) is None:
                over = now - self._over_since.setdefault(shape, now) > WRITTEN_WITHIN_S
            if over or self._harvest.tuned(shape) is not None:
                self._settle(shape)
        self.flight.advance()

    def _settle(self, shape: int) -> None:
        if self.culprit is not None and shape == self.culprit.shape:
            return  # what its candidates did after that one means nothing
        rows, tuned = self._rows(shape), self._harvest.tuned(shape)
        verdict = shape_verdict(
            self._context.family, tuned, rows, self._context.limits.err_ratio, chip=self._chip,
            left_out=sum(r.get("detail", "").startswith("left out: ") for r in rows),
        )  # fmt: skip
        if verdict.winner is None:
            if verdict.reason == "no_candidate" and shape in self.out_of_memory:
                return  # more memory may be free elsewhere: no verdict
            step = self._context.family.aiter.pads_k_to
            if step and int(self._shapes[shape]["K"]) % step and not self._context.image.findings.k256_sound:
                verdict = replace(verdict, detail=f"{verdict.detail}; {UNSOUND_K}")
            if self.fatal is not None:  # AITER counts what a dead process did not do as failed
                return
        self.flight.settle(shape, rows, verdict, self._candidates(shape, verdict.winner))

    def _candidates(self, shape: int, winner: Row | None) -> CandidateOutcomes:
        """The journal's record of the shape's candidates beside their times."""
        steps = [s for s in self.journal.ended.get(shape, []) if s.candidate.ident]
        ended = [s for s in steps if s.event == "end"]
        first = next((s for s in ended if winner is not None and self._is(s, winner)), None)
        withheld = [self._left_out.withheld(s.candidate) for s in steps if s.event == "blocked"]
        ran = dict.fromkeys(s.candidate.ident for s in ended) if self._left_out.only else {}
        best = first.candidate.ident if first else None
        return CandidateOutcomes(best, tuple(ran), tuple(w for w in withheld if w))

    def _is(self, step: JournalStep, row: Row) -> bool:
        """True if a step of the journal is this row. A winner of fmoe is a pair of stages, and no step."""
        mine = self._journal_row(step)
        return abs(mine["us"] - row["us"]) < 1e-3 and _same(mine) == _same(row) and "kernelId" in row

    def _rows(self, shape: int) -> list[Row]:
        """The shape's candidates: of the profile, else of the journal."""
        rows = self._harvest.candidates(shape)
        for row in rows:
            self._context.names.learn(row)
        journal = self._journal_rows(shape)
        left_out = {_same(r): r["detail"] for r in journal if r.get("detail")}
        for row in rows:
            if row["us"] <= 0 and _same(row) in left_out:
                row["detail"] = left_out[_same(row)]
        if self._left_out.only:  # AITER counts what was not requested as crashed
            known = {_same(r) for r in journal}
            rows = [r for r in rows if r["us"] > 0 or _same(r) in known]
        if rows and self._context.family.two_stages:  # AITER lists the right kernels alone, as pairs
            return [*rows, *(r for r in journal if r.get("status") != "ok")]
        return rows or journal

    def _journal_rows(self, shape: int) -> list[Row]:
        """Rows from the journal, for a shape whose profile was never written; blocked candidates with the reason."""
        out = []
        for step in self.journal.ended.get(shape, []):
            if step.event == "skipped":
                continue
            why = self._left_out.why(step.candidate) if step.event == "blocked" else ""
            out.append(_rated(self._journal_row(step, why), self._shapes[shape]))
        return out

    def _journal_row(self, step: JournalStep, detail: str = "") -> Row:
        context = self._context
        return journal_row(context.family, step, context.limits.err_ratio, context.names, detail)


def _rated(row: Row, key: Mapping[str, int | str]) -> Row:
    """The row with its rate, which the journal does not have."""
    if row["us"] > 0 and "tflops" not in row and all(c in key for c in ("M", "N", "K")):
        operations = 2.0 * int(key["M"]) * int(key["N"]) * int(key["K"]) * int(key.get("B", 1))
        row["tflops"] = round(operations / row["us"] / 1e6, 4)
    return row


def _same(row: Row) -> tuple[object, ...]:
    return row.get("kernelId"), row.get("splitK"), row.get("libtype")
