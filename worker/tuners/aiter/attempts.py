"""Shapes through as many processes of AITER as it takes: what a fault costs is one candidate where that can be had.

A group that faults goes back to the scheduler, which lets the shape in flight run alone. A shape that runs alone and
loses a candidate goes on without it, if the slot proves healthy: the others are measured, and the one is written down
with a reproduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from worker.protocol import SHAPE_VERDICTS, SpecShape
from worker.tuners.aiter.catalogue import diagnose
from worker.tuners.aiter.command import Facts
from worker.tuners.aiter.families import AiterFamily
from worker.tuners.aiter.options import Options
from worker.tuners.aiter.ready import Ready, broke_off
from worker.tuners.aiter.salvage import MAX_FAULTS, Blocked, known, note, write_repro
from worker.tuners.aiter.session import Limits, Process, Session
from worker.tuners.aiter.watch import Candidate
from worker.tuners.base import Emit, TunerFault


@dataclass(slots=True)
class Attempts:
    """The processes of one attempt; each has a folder of its own below `folder`."""

    session: Session
    ready: Ready
    family: AiterFamily
    facts: Facts
    options: Options
    limits: Limits
    emit: Emit
    folder: Path
    canary: Callable[[], tuple[bool, float, str]]
    _processes: int = field(default=0, init=False)

    def tune(self, shapes: Sequence[SpecShape], *, batch: int, salvage: bool) -> None:
        """Every shape to its end. Raises TunerFault with the guilty shape in flight, where that is known."""
        blocked: dict[Candidate, str] = dict(known(self.ready.store.blocklist, self.family.name))
        left = list(shapes)
        faults = 0
        while left:
            self._processes += 1
            done = self.session.run(
                self.family, self.facts, left, self.folder / f"aiter-{self._processes}", self.emit, self.limits,
                self.options, batch=batch, blocked=blocked,
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
            if not (salvage and len(shapes) == 1 and faults <= MAX_FAULTS and self._salvaged(done, blocked)):
                if done.current is not None:
                    for row in done.partial:  # measured is measured
                        self.emit.row(done.current, row)
                raise TunerFault(*self._fault(done, faults))

    def _salvaged(self, done: Process, blocked: dict[Candidate, str]) -> bool:
        """Write the candidate down and leave it out from now on; False where it is not known or the slot is sick."""
        step = done.ended.step
        if step is None or step.candidate in blocked or done.current is None:
            return False
        ok, _, words = self.canary()
        entry = self._entry(done, canary=ok)
        note(self.ready.store.blocklist, entry)
        if not ok:
            raise TunerFault(done.ended.how, f"{done.ended.detail}; after it the canary failed: {words}")
        repro = write_repro(self.ready.store.repro, done.files, done.argv, done.env, done.cwd, entry)
        why = f"{entry.outcome}: {entry.detail}; to see it again: {repro.name} (docs/aiter-driver.md)"
        print(f"gemmfleet: candidate {entry.candidate.describe()} is left out ({why})", flush=True)
        self.emit.parked(done.current)
        blocked[step.candidate] = why
        return True

    def _entry(self, done: Process, *, canary: bool) -> Blocked:
        assert done.ended.step is not None
        image = self.session.image
        outcome, words = broke_off(done, "")
        return Blocked(
            image.digest or image.key, image.gfx, self.family.name, done.ended.step.candidate, outcome, words, canary
        )

    def _is_verdict(self, done: Process, batch: int) -> bool:
        """Whether AITER's error is a verdict on the shape in flight, which then has its end."""
        found = diagnose(done.ended.text, done.ended.status)
        if found is None or done.current is None or batch > 1:
            return False
        if found.whose != "shape" or found.reason not in SHAPE_VERDICTS:
            return False
        self.emit.failed(done.current, str(found.reason), found.detail())
        return True

    def _fault(self, done: Process, faults: int) -> tuple[str, str]:
        outcome, words = broke_off(done, "")
        if done.ended.step is not None:
            note(self.ready.store.blocklist, self._entry(done, canary=False))
        if faults > 1:
            words = f"{words}; the {faults}. candidate of this shape that ended its process"
        return outcome, words

    def _told(self, done: Process, words: str) -> str:
        found = diagnose(done.ended.text, done.ended.status)
        return f"{words}: {found.detail()}" if found is not None else words
