"""Reconciliation: whether the ledger adds up (laws 1 to 3)."""

from __future__ import annotations

from orchestrator.ledger.reader import LedgerReader
from worker.text import plural

UNFINISHED = ("planned", "preparing", "running", "interrupted", "cancelled")

_CHECKS = (
    (
        "shape {0} is tuned by {1} without a valid row of that attempt",
        """SELECT s.id, s.attempt FROM shapes s LEFT JOIN rows r ON r.id=s.row WHERE s.state='tuned'
           AND (r.id IS NULL OR r.shape<>s.id OR r.attempt<>s.attempt OR r.winner<>1)""",
    ),
    (
        "shape {0} is pending but in no group that is still whole",
        """SELECT s.id FROM shapes s LEFT JOIN groups g ON g.id=s.grp
           WHERE s.state='pending' AND (g.id IS NULL OR g.split_at IS NOT NULL)""",
    ),
    (
        "shape {0} is failed without a reason",
        "SELECT id FROM shapes WHERE state='failed' AND coalesce(reason, '')=''",
    ),
    (
        "row {0} is of shape {1}, which is not in the group of its attempt {2}",
        """SELECT r.id, r.shape, r.attempt FROM rows r LEFT JOIN attempts a ON a.id=r.attempt
           LEFT JOIN members m ON m.grp=a.grp AND m.shape=r.shape WHERE m.shape IS NULL""",
    ),
)


def reconcile(ledger: LedgerReader) -> list[str]:
    """What does not add up, in words; [] where asked = tuned + skipped + failed (+ pending while not finished)."""
    faults = [words.format(*found) for words, sql in _CHECKS for found in ledger.query(sql)]
    counts = ledger.counts()
    if counts.total != counts.settled + counts.running + counts.pending:
        faults.append(f"{plural(counts.total, 'shape')} requested, but {counts}")
    if ledger.state not in UNFINISHED and counts.settled != counts.total:
        open_ = plural(counts.total - counts.settled, "shape is", "shapes are")
        faults.append(f"the run is {ledger.state}, but {open_} not settled")
    return faults
