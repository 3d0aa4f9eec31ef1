"""Shapes through as many processes of AITER as it takes, so that a fault costs one candidate where possible.

A group that faults goes back to the scheduler, which lets the shape in flight run alone. A shape that runs alone and
loses a candidate goes on without it if the slot proves healthy: the others are measured, and the faulty one is
recorded with a reproduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from worker.protocol import SHAPE_VERDICTS, SpecShape
from worker.text import plural
from worker.tuners.aiter.drive.blocklist import MAX_FAULTS, REPRO, LeftOut, write_repro
from worker.tuners.aiter.drive.run import ProcessResult, run_shapes
from worker.tuners.aiter.drive.session import TuningContext
from worker.tuners.aiter.drive.warmup import Warmup, failure
from worker.tuners.aiter.known_issues.catalogue import diagnose
from worker.tuners.base import Emit, TunerFault


@dataclass(slots=True)
class Attempts:
    """The processes of one attempt; each has a folder of its own below `folder`."""

    context: TuningContext
    warmup: Warmup
    emit: Emit
    folder: Path
    canary: Callable[[], tuple[bool, float, str]]
    _processes: int = field(default=0, init=False)

    def tune(
        self, shapes: Sequence[SpecShape], *, isolate: bool, only: Sequence[tuple[str, ...]] | None = None
    ) -> None:
        """Tune every shape to its end. Raises TunerFault with the shape to blame in flight, where that is known.

        `isolate`: a candidate that ends the process of a single shape is left out, and the shape goes on. `only`: the
        candidates of the one shape that are to be measured, whatever the blocklist has of them.
        """
        left_out = LeftOut(
            {} if only is not None else self.warmup.blocklist.in_force(self.context.family.name),
            only=None if only is None else frozenset(only),
        )
        most = MAX_FAULTS if only is None else len(only)
        left = list(shapes)
        faults = 0
        while left:
            self._processes += 1
            result = run_shapes(self.context, left, self.folder / f"aiter-{self._processes}", self.emit, left_out)
            left = [s for s in left if s.id in result.left]
            if not left:
                return
            if result.end.how == "done":
                raise TunerFault(
                    "error", _explained(result, f"AITER ended without a word on {plural(len(left), 'shape')}")
                )
            if result.end.how == "error" and self._is_verdict(result):
                left = [s for s in left if s.id != result.current]
                continue
            faults += 1
            more = self._isolated(result, left_out) if isolate and len(shapes) == 1 and faults <= most else None
            if more is None:
                if result.current is not None:
                    for row in result.partial:  # measured is measured
                        self.emit.row(result.current, row)
                raise TunerFault(*self._fault(result, faults))
            left_out = more

    def _isolated(self, result: ProcessResult, left_out: LeftOut) -> LeftOut | None:
        """Candidates to leave out next, the one at work among them and recorded; None where that is unknown. Raises
        TunerFault if the slot fails its canary."""
        step = result.end.step
        if step is None or step.candidate in left_out.entries or result.current is None:
            return None
        ok, _, text = self.canary()
        entry = self.warmup.entry(self.context, result, canary=ok)
        self.warmup.blocklist.note(entry)
        if not ok:
            raise TunerFault(result.end.how, f"{result.end.detail}; after it the canary failed: {text}")
        repro = write_repro(self.folder / REPRO, result.files, result.argv, result.env, result.cwd, entry)
        made = left_out.and_(entry, f"attempts/{self.folder.name}/{REPRO}/{repro.name}")
        print(f"gemmfleet: candidate {entry.candidate.describe()} is left out ({made.why(step.candidate)})", flush=True)
        self.emit.parked(result.current)
        return made

    def _is_verdict(self, result: ProcessResult) -> bool:
        """Settle the shape in flight if AITER's error is a verdict on it; True if so."""
        found = diagnose(result.end.output, result.end.status)
        if found is None or result.current is None or self.context.strategy.batch > 1:
            return False
        if found.issue.blames != "shape" or found.issue.reason not in SHAPE_VERDICTS:
            return False
        self.emit.failed(result.current, str(found.issue.reason), found.detail())
        return True

    def _fault(self, result: ProcessResult, faults: int) -> tuple[str, str]:
        outcome, text = failure(result, "")
        if result.end.step is not None:
            self.warmup.blocklist.note(self.warmup.entry(self.context, result, canary=False))
        if faults > 1:
            text = f"{text}; the {faults}. candidate of this shape that ended its process"
        return outcome, text


def _explained(result: ProcessResult, text: str) -> str:
    found = diagnose(result.end.output, result.end.status)
    return f"{text}: {found.detail()}" if found is not None else text
