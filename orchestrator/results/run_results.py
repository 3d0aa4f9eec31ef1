"""The results of a run, read once from its ledger: what its files, its merge and the page of its end are made from.

At the end of a run the controller reads them for the run's files (`export.py`), and the command for the merge and the
page (`run_end.py`). The live page reads the ledger itself, new rows only (`report/measured.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.ledger.blocked import BlockedCandidate
from orchestrator.ledger.reader import Counts, LedgerReader, ProfileRow, ShapeState, SlotInfo
from orchestrator.planning.worth import Gain, Worth, measure_gain
from worker.families import Family

WORTHS = "worths"
"""Key of the ledger's meta data: the worth of each shape, by id, in a run with --by-value."""


def worths_of(ledger: LedgerReader) -> dict[int, Worth]:
    """The worth of each shape in a run with --by-value; {} for any other run."""
    return {int(shape): Worth(*worth) for shape, worth in ledger.meta(WORTHS, {}).items()}


@dataclass(frozen=True, slots=True)
class RunResults:
    """The results of a run, as its ledger is when `read` is called. Winners and failed shapes are held here. The
    candidates are too many for that: they are read from `ledger`, which stays open as long as somebody needs them.

    `noisy`: the spread of each noisy winner, by shape; unconfirmed winners are left out. `unconfirmed`: shapes whose
    winner rests on one slot's evidence, with the candidates that were blocked there. `slots`: the latest that the
    workers of each slot reported.
    """

    ledger: LedgerReader
    family: Family
    counts: Counts
    winners: Sequence[ProfileRow]
    noisy: Mapping[int, float]
    failed: Sequence[ShapeState]
    unconfirmed: Sequence[tuple[ShapeState, Sequence[BlockedCandidate]]]
    slots: Sequence[SlotInfo]

    @classmethod
    def read(cls, ledger: LedgerReader) -> RunResults:
        """Read the results as of one moment, even if a controller writes meanwhile."""
        with ledger.snapshot():
            winners = ledger.winners()
            return cls(
                ledger,
                ledger.family,
                ledger.counts(),
                winners,
                ledger.noisy(winners),
                ledger.failed(),
                ledger.unconfirmed(),
                ledger.slots(),
            )

    def spread_of(self, winner: ProfileRow) -> float | None:
        """The spread of a winner's times, None if its tuner measures none. That of a noisy winner covers the time that
        it had at first, too."""
        return self.noisy.get(winner.shape) or winner.row.get("spread")

    def won(self) -> Gain | None:
        """The gain of a run with --by-value so far; None for any other run."""
        worths = worths_of(self.ledger)
        if not worths:
            return None
        times = {winner.shape: winner.us for winner in self.winners}
        return measure_gain(worths, times, [shape.id for shape in self.failed])
