"""Limits of a run by value: how much of the expected gain is won, and how many hours of slots are used."""

from __future__ import annotations

import time
from collections.abc import Mapping

from orchestrator.ledger import LedgerReader
from orchestrator.paths import RunConfig
from orchestrator.planning.value import Won, Worth, won
from orchestrator.run.view.work import Work

WORTHS = "worths"
"""Key of the ledger's value with the worth of each shape by its id."""


def worths_of(ledger: LedgerReader) -> dict[int, Worth]:
    """The worth of each shape of a run by value, {} of any other run."""
    return {int(i): Worth(*w) for i, w in ledger.meta(WORTHS, {}).items()}


def won_so_far(ledger: LedgerReader, of: Mapping[int, Worth]) -> Won:
    """Gain of the run."""
    tuned = dict(ledger.query("SELECT s.id, r.us FROM shapes s JOIN rows r ON r.id=s.row WHERE s.state='tuned'"))
    return won(of, tuned, [s.id for s in ledger.shapes("failed")])


class Limits:
    """The limits of a run; `reached` names the one that is, "" while none is."""

    def __init__(self, ledger: LedgerReader, config: RunConfig, work: Work) -> None:
        self._ledger, self._work = ledger, work
        self._until, self._hours = config.until_gain, config.gpu_hours
        self._worths = worths_of(ledger)
        self._seen = (-1, -1)
        self._share = 0.0

    def reached(self) -> str:
        """Read what was measured so far."""
        if self._hours is not None:
            now = time.time()
            begun = (a for a in self._work.attempts.values() if a.begun)
            used = sum((now if a.end is None else a.end) - a.start for a in begun) / 3600.0
            if used >= self._hours:
                return f"{used:.3g} of {self._hours:g} GPU hours are used (--gpu-hours)"
        if self._until is not None and self._worths:
            seen = (self._work.tuned, self._work.failed)
            if seen != self._seen:
                self._seen, self._share = seen, won_so_far(self._ledger, self._worths).share
            if self._share >= self._until:
                return f"{self._share:.1%} of the expected gain is won (--until-gain {self._until:.4g})"
        return ""
