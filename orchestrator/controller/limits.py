"""Limits of a run: a share of the expected gain (--until-gain), or the hours that its GPUs work (--gpu-hours).

The loop asks `reached` in each turn; at a limit it starts no new work, and drive.py skips the shapes that are left.
"""

from __future__ import annotations

import time

from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunConfig
from orchestrator.planning.worth import measure_gain
from orchestrator.results.run_results import worths_of

_US = "SELECT us FROM rows WHERE attempt=? AND shape=? AND winner=1 ORDER BY id LIMIT 1"
"""The microseconds of the winner of a shape from an attempt."""


class Limits:
    """The limits of a run with --until-gain or --gpu-hours."""

    def __init__(self, ledger: LedgerReader, config: RunConfig) -> None:
        self._ledger = ledger
        self._state = ledger.replayed
        self._until_gain = config.until_gain
        self._gpu_hours = config.gpu_hours
        self._worths = worths_of(ledger)
        self._us: dict[int, float] = {}
        """The time of each winner. Each is read once, when it arrives."""
        self._settled = (-1, -1)
        """(tuned, failed) when the share was computed last."""
        self._share = 0.0

    def reached(self) -> str:
        """Read the new results, and name the limit that they reach; "" if they reach none."""
        if self._gpu_hours is not None:
            hours = self._hours_used()
            if hours >= self._gpu_hours:
                return f"{hours:.3g} of {self._gpu_hours:g} GPU hours are used (--gpu-hours)"
        if self._until_gain is not None and self._worths:
            share = self._share_won()
            if share >= self._until_gain:
                return f"{share:.1%} of the expected gain is won (--until-gain {self._until_gain:.4g})"
        return ""

    def _hours_used(self) -> float:
        now = time.time()
        seconds = 0.0
        for attempt in self._state.attempts.values():
            if attempt.started_at is not None:
                ended_at = now if attempt.ended_at is None else attempt.ended_at
                seconds += ended_at - attempt.started_at
        return seconds / 3600.0

    def _share_won(self) -> float:
        state = self._state
        if (state.tuned, state.failed) != self._settled:
            self._settled = (state.tuned, state.failed)
            for shape in state.shapes.values():
                if shape.state == "tuned" and shape.id not in self._us:
                    self._us[shape.id] = self._ledger.query(_US, (shape.attempt, shape.id))[0][0]
            failed = [shape.id for shape in state.shapes.values() if shape.state == "failed"]
            self._share = measure_gain(self._worths, self._us, failed).share
        return self._share
