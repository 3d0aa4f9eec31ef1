"""Two tuned tables compared, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.tables.keys import CHIP_COLUMNS, TAG, key_order, key_with_tag
from orchestrator.tables.row_kernels import KERNEL_NAMES, identity, kernel_of
from orchestrator.tables.table import Table, TableRow, read_table
from worker.families import Family

CHANGES = ("added", "gone", "kernel", "us", "cells")


def diff(a: Path, b: Path, family: Family) -> dict[str, Any]:
    """Two tables compared: the document of `db diff --json`, its rows in the order of their keys.

    A row's `change`: added, gone, kernel (another one), us (the same kernel with another time), cells (anything else).
    `speedup` = time in A / time in B. Raises TunedDBError for a table that cannot be read.
    """
    left = read_table(a, family)
    right = read_table(b, family)
    left_rows = {row.place: row for row in left.rows}
    right_rows = {row.place: row for row in right.rows}
    every = {**left_rows, **right_rows}
    rows = []
    for place in sorted(every, key=lambda place: (key_order(every[place].key), every[place].tag)):
        row = _compare(left, left_rows.get(place), right, right_rows.get(place))
        if row["change"]:
            key = key_with_tag(every[place].key, every[place].tag, family)
            rows.append({"change": row.pop("change"), "key": key, **row})
    same = len(every) - len(rows)
    counts = {change: sum(row["change"] == change for row in rows) for change in CHANGES}
    return {
        "a": str(a),
        "b": str(b),
        "family": family.name,
        "columns_gone": [name for name in left.header if name not in right.header],
        "columns_added": [name for name in right.header if name not in left.header],
        "rows": rows,
        "same": same,
        "notes": [*left.notes, *right.notes],
        "counts": {**counts, "same": same},
    }


def _compare(left: Table, a: TableRow | None, right: Table, b: TableRow | None) -> dict[str, Any]:
    """The rows of one key in both tables: what changed ("" if nothing), both sides, the cells that differ."""
    a_cells = left.cells(a) if a else {}
    b_cells = right.cells(b) if b else {}
    apart = {*CHIP_COLUMNS, *left.family.key_names, TAG, "us", *KERNEL_NAMES}
    common = [name for name in left.header if name in a_cells and name in b_cells and name not in apart]
    cells = [name for name in common if a_cells[name] != b_cells[name]]
    change = ""
    speedup = None
    if a is None or b is None:
        change = "gone" if a else "added"
    else:
        if a.us and b.us:
            speedup = a.us / b.us
        if identity(a_cells, left.family.name) != identity(b_cells, left.family.name):
            change = "kernel"
        elif a.us != b.us:
            change = "us"
        elif cells:
            change = "cells"
    return {"change": change, "a": _side(a, a_cells), "b": _side(b, b_cells), "speedup": speedup, "cells": cells}


def _side(row: TableRow | None, cells: dict[str, str]) -> dict[str, Any] | None:
    return {"kernel": kernel_of(cells), "us": row.us} if row else None
