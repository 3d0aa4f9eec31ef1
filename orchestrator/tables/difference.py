"""Two tuned tables compared, row by row, for `db diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.tables.keys import CHIP_COLUMNS, TAG, key_order, key_with_tag
from orchestrator.tables.row_kernels import KERNEL_NAMES, kernel_identity, kernel_of
from orchestrator.tables.table import Table, TableRow, read_table
from worker.families import Family

CHANGES = ("added", "gone", "kernel", "us", "cells")
"""The changes of a row: kernel: another kernel; us: the same kernel with another time; cells: any other cell."""


def diff(a: Path, b: Path, family: Family) -> dict[str, Any]:
    """Two tables compared: the document of `db diff --json`, its rows in the order of their keys.

    A row: `{"change": "us", "key": {...}, "a": {"kernel": "...", "us": 4.2}, "b": ..., "speedup": 1.1, "cells": []}`.
    `change` is one of CHANGES, `speedup` = time in A / time in B, `cells` names the other cells that differ. Raises
    TunedDBError for a table that cannot be read.
    """
    table_a = read_table(a, family)
    table_b = read_table(b, family)
    rows_a = {row.place: row for row in table_a.rows}
    rows_b = {row.place: row for row in table_b.rows}
    every_row = {**rows_a, **rows_b}
    places = sorted(every_row, key=lambda place: (key_order(every_row[place].key), every_row[place].tag))
    rows: list[dict[str, Any]] = []
    for place in places:
        row = _compare(table_a, rows_a.get(place), table_b, rows_b.get(place))
        if row["change"]:
            rows.append(row)
    same = len(places) - len(rows)
    changes = [row["change"] for row in rows]
    return {
        "a": str(a),
        "b": str(b),
        "family": family.name,
        "columns_gone": [name for name in table_a.header if name not in table_b.header],
        "columns_added": [name for name in table_b.header if name not in table_a.header],
        "rows": rows,
        "same": same,
        "notes": [*table_a.notes, *table_b.notes],
        "counts": {**{change: changes.count(change) for change in CHANGES}, "same": same},
    }


def _compare(table_a: Table, a: TableRow | None, table_b: Table, b: TableRow | None) -> dict[str, Any]:
    """The document of one place, which at least one table has a row of. Its change is "" if nothing differs."""
    family = table_a.family
    cells_a = table_a.cells(a) if a else {}
    cells_b = table_b.cells(b) if b else {}
    compared_apart = {*CHIP_COLUMNS, *family.key_names, TAG, "us", *KERNEL_NAMES}
    other_columns = [name for name in table_a.header if name in cells_a.keys() & cells_b.keys() - compared_apart]
    other_cells = [name for name in other_columns if cells_a[name] != cells_b[name]]
    change = ""
    if a is None:
        change = "added"
    elif b is None:
        change = "gone"
    elif kernel_identity(cells_a, family.name) != kernel_identity(cells_b, family.name):
        change = "kernel"
    elif a.us != b.us:
        change = "us"
    elif other_cells:
        change = "cells"
    row = a or b
    return {
        "change": change,
        "key": key_with_tag(row.key, row.tag, family) if row else {},
        "a": {"kernel": kernel_of(cells_a), "us": a.us} if a else None,
        "b": {"kernel": kernel_of(cells_b), "us": b.us} if b else None,
        "speedup": a.us / b.us if a and b and a.us and b.us else None,
        "cells": other_cells,
    }
