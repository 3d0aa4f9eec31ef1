"""Limits of a run by value: how much of the expected gain is won, and how many hours of slots are used."""

from __future__ import annotations

import time
from collections.abc import Mapping

from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunConfig
from orchestrator.planning.roofline import Won, Worth, won

WORTHS = "worths"
"""Key of the ledger's value with the worth of each shape by its id."""


def worths_of(ledger: LedgerReader) -> dict[int, Worth]:
    """The worth of each shape of a run by value, {} of any other run."""
    return {int(i): Worth(*w) for i, w in ledger.meta(WORTHS, {}).items()}


def won_so_far(ledger: LedgerReader, of: Mapping[int, Worth]) -> Won:
    """Gain of the run."""
    return won(of, {w.shape: w.us for w in ledger.winners()}, [s.id for s in ledger.failed()])


_US = "SELECT us FROM rows WHERE attempt=? AND shape=? AND winner=1 ORDER BY id LIMIT 1"


class Limits:
    """The limits of a run; `reached` names the one that is, "" while none is."""

    def __init__(self, ledger: LedgerReader, config: RunConfig) -> None:
        self._ledger, self._state = ledger, ledger.replayed
        self._until, self._hours = config.until_gain, config.gpu_hours
        self._worths = worths_of(ledger)
        self._us: dict[int, float] = {}
        """Time of each winner: they are read one by one as they come."""
        self._seen = (-1, -1)
        self._share = 0.0

    def reached(self) -> str:
        """Read what was measured so far."""
        state = self._state
        if self._hours is not None:
            now, begun = time.time(), [a for a in state.attempts.values() if a.started_at is not None]
            used = sum((now if a.ended_at is None else a.ended_at) - (a.started_at or now) for a in begun) / 3600.0
            if used >= self._hours:
                return f"{used:.3g} of {self._hours:g} GPU hours are used (--gpu-hours)"
        if self._until is not None and self._worths:
            if (state.tuned, state.failed) != self._seen:
                self._seen = (state.tuned, state.failed)
                for s in state.shapes.values():
                    if s.state == "tuned" and s.id not in self._us:
                        self._us[s.id] = self._ledger.query(_US, (s.attempt, s.id))[0][0]
                failed = [s.id for s in state.shapes.values() if s.state == "failed"]
                self._share = won(self._worths, self._us, failed).share
            if self._share >= self._until:
                return f"{self._share:.1%} of the expected gain is won (--until-gain {self._until:.4g})"
        return ""
