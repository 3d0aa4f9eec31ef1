"""Ledger: the run's SQLite database of shapes, attempts, measurements and decisions (docs/reference/files.md)."""

from __future__ import annotations

from orchestrator.ledger.ingest import Ingest, split_lines
from orchestrator.ledger.model import (
    Attempt,
    Counts,
    FailedShape,
    GroupState,
    LeftOut,
    Offset,
    ProfileRow,
    ShapeState,
    SlotInfo,
    Unconfirmed,
)
from orchestrator.ledger.reader import LedgerReader, reconcile
from orchestrator.ledger.writer import Ledger

__all__ = [
    "Attempt",
    "Counts",
    "FailedShape",
    "GroupState",
    "Ingest",
    "Ledger",
    "LedgerReader",
    "LeftOut",
    "Offset",
    "ProfileRow",
    "ShapeState",
    "SlotInfo",
    "Unconfirmed",
    "reconcile",
    "split_lines",
]
