"""Shapes through as many processes of AITER as it takes: what a fault costs is one candidate where that can be had.

A group that faults goes back to the scheduler, which lets the shape in flight run alone. A shape that runs alone and
loses a candidate goes on without it, if the slot proves healthy: the others are measured, and the one is written down
with a reproduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from worker.families import Family
from worker.protocol import SHAPE_VERDICTS, SpecShape
from worker.tuners.aiter.drive.blocklist import MAX_FAULTS, REPRO, LeftOut, write_repro
from worker.tuners.aiter.drive.command import Facts
from worker.tuners.aiter.drive.session import Limits, Process, Session
from worker.tuners.aiter.drive.warmup import Ready, broke_off
from worker.tuners.aiter.known_issues.catalogue import diagnose
from worker.tuners.aiter.options import Options
from worker.tuners.base import Emit, TunerFault


@dataclass(slots=True)
class Attempts:
    """The processes of one attempt; each has a folder of its own below `folder`."""

    session: Session
    ready: Ready
    family: Family
    facts: Facts
    options: Options
    limits: Limits
    emit: Emit
    folder: Path
    canary: Callable[[], tuple[bool, float, str]]
    _processes: int = field(default=0, init=False)

    def tune(
        self,
        shapes: Sequence[SpecShape],
        *,
        batch: int,
        salvage: bool,
        only: Sequence[tuple[str, ...]] | None = None,
    ) -> None:
        """Every shape to its end. Raises TunerFault with the guilty shape in flight, where that is known.

        `only`: the candidates of the one shape that are to be measured, whatever the blocklist has of them.
        """
        left_out = LeftOut(
            {} if only is not None else self.ready.blocklist.in_force(self.family.name),
            only=None if only is None else frozenset(only),
        )
        most = MAX_FAULTS if only is None else len(only)
        left = list(shapes)
        faults = 0
        while left:
            self._processes += 1
            done = self.session.run(
                self.family, self.facts, left, self.folder / f"aiter-{self._processes}", self.emit, self.limits,
                self.options, batch=batch, left_out=left_out,
            )  # fmt: skip
            left = [s for s in left if s.id in done.left]
            if not left:
                return
            if done.ended.how == "done":
                raise TunerFault("error", self._told(done, f"AITER ended without a word on {len(left)} shapes"))
            if done.ended.how == "error" and self._is_verdict(done, batch):
                left = [s for s in left if s.id != done.current]
                continue
            faults += 1
            more = self._salvaged(done, left_out) if salvage and len(shapes) == 1 and faults <= most else None
            if more is None:
                if done.current is not None:
                    for row in done.partial:  # measured is measured
                        self.emit.row(done.current, row)
                raise TunerFault(*self._fault(done, faults))
            left_out = more

    def _salvaged(self, done: Process, left_out: LeftOut) -> LeftOut | None:
        """With the candidate left out and written down; None where it is not known. Raises TunerFault if the slot is
        sick."""
        step = done.ended.step
        if step is None or step.candidate in left_out.entries or done.current is None:
            return None
        ok, _, words = self.canary()
        entry = self.ready.entry(self.family, done, canary=ok)
        self.ready.blocklist.note(entry)
        if not ok:
            raise TunerFault(done.ended.how, f"{done.ended.detail}; after it the canary failed: {words}")
        repro = write_repro(self.folder / REPRO, done.files, done.argv, done.env, done.cwd, entry)
        made = left_out.and_(entry, f"attempts/{self.folder.name}/{REPRO}/{repro.name}")
        print(f"gemmfleet: candidate {entry.candidate.describe()} is left out ({made.why(step.candidate)})", flush=True)
        self.emit.parked(done.current)
        return made

    def _is_verdict(self, done: Process, batch: int) -> bool:
        """Whether AITER's error is a verdict on the shape in flight, which then has its end."""
        found = diagnose(done.ended.text, done.ended.status)
        if found is None or done.current is None or batch > 1:
            return False
        if found.issue.blames != "shape" or found.issue.reason not in SHAPE_VERDICTS:
            return False
        self.emit.failed(done.current, str(found.issue.reason), found.detail())
        return True

    def _fault(self, done: Process, faults: int) -> tuple[str, str]:
        outcome, words = broke_off(done, "")
        if done.ended.step is not None:
            self.ready.blocklist.note(self.ready.entry(self.family, done, canary=False))
        if faults > 1:
            words = f"{words}; the {faults}. candidate of this shape that ended its process"
        return outcome, words

    def _told(self, done: Process, words: str) -> str:
        found = diagnose(done.ended.text, done.ended.status)
        return f"{words}: {found.detail()}" if found is not None else words
