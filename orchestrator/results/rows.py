"""A ledger's rows as rows of a tuned table."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.ledger.model import ProfileRow
from orchestrator.ledger.reader import LedgerReader
from worker.families import Cell, Family


def tuned_columns(row: ProfileRow, family: Family) -> dict[str, Cell]:
    """The columns of `family.tuned_header`, in order; "" for what the row lacks."""
    key = dict(zip(family.key_names, row.key, strict=True))
    cu_num: Cell = "" if row.cu_num is None else row.cu_num
    return {"gfx": row.gfx, "cu_num": cu_num, **key, **family.row_to_columns(row.as_row())}


def winners(ledger: LedgerReader) -> Iterator[dict[str, Cell]]:
    """The tuned rows of a run, each with its `spread` where known: what `tuned_db.merge` takes."""
    family = ledger.family
    for row in ledger.winners():
        spread: dict[str, Cell] = {} if row.spread is None else {"spread": row.spread}
        yield tuned_columns(row, family) | spread
