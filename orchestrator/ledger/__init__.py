"""Ledger: the run's SQLite database of journal and measurements (docs/reference/files.md)."""

from __future__ import annotations

from orchestrator.ledger.ingest import Chunk, Ingest, split_lines
from orchestrator.ledger.reader import (
    Counts,
    LedgerReader,
    LeftOut,
    ProfileRow,
    Replay,
    Report,
    ShapeState,
    SlotInfo,
    reconcile,
)
from orchestrator.ledger.writer import Ledger

__all__ = [
    "Chunk",
    "Counts",
    "Ingest",
    "Ledger",
    "LedgerReader",
    "LeftOut",
    "ProfileRow",
    "Replay",
    "Report",
    "ShapeState",
    "SlotInfo",
    "reconcile",
    "split_lines",
]
