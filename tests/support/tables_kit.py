"""Rows of tables and of ledgers in the form that a merge takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.ledger.reader import LedgerReader
from orchestrator.results.export import tuned_columns
from orchestrator.tables.tuned import NULLS, read_table
from worker.families import Cell, Family


def read_newcomers(path: Path, family: Family) -> list[dict[str, str]]:
    """The rows of tuned.csv or profile.csv of a run, or of a table of AITER's; a key may come more than once."""
    table = read_table(path, family, doubled=True)
    return [{n: c for n, c in table.cells(r).items() if c not in NULLS} for r in table.rows]


def winners(ledger: LedgerReader) -> Iterator[dict[str, Cell]]:
    """The tuned rows of a run, each with its `spread` where known."""
    family = ledger.family
    for row in ledger.winners():
        spread: dict[str, Cell] = {"spread": row.row["spread"]} if "spread" in row.row else {}
        yield tuned_columns(row, family) | spread
