"""Differences of two tuned tables: rows by key, kernels, times, columns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.tables.tuned import TAG, Table, TableRow, kernel_of, key_dict, key_order, read_table
from orchestrator.tuned_db.merge_policy import identity
from worker.families import Family


@dataclass(frozen=True, slots=True)
class Side:
    """A row: its kernel, its time in microseconds (None: it has none)."""

    kernel: str
    us: float | None


@dataclass(frozen=True, slots=True)
class DiffRow:
    """`change`: added, gone, kernel (another one), us (the same kernel with another time), cells (anything else).

    `speedup` = time in A / time in B; above 1 B is faster. `cells`: the other columns that differ.
    """

    change: str
    key: dict[str, int | str]
    a: Side | None
    b: Side | None
    speedup: float | None
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diff:
    a: str
    b: str
    family: str
    columns_gone: tuple[str, ...]
    columns_added: tuple[str, ...]
    rows: tuple[DiffRow, ...]
    same: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "counts": self.counts()}

    def counts(self) -> dict[str, int]:
        """Rows by change, and those that are the same."""
        changes = ("added", "gone", "kernel", "us", "cells")
        return {c: sum(1 for r in self.rows if r.change == c) for c in changes} | {"same": self.same}


def diff(a: Path, b: Path, family: Family) -> Diff:
    """Rows in the order of their keys. Raises TunedDBError for a table that cannot be read."""
    left, right = read_table(a, family), read_table(b, family)
    of_a, of_b = ({r.place: r for r in t.rows} for t in (left, right))
    rows = []
    for place, any_row in sorted({**of_a, **of_b}.items(), key=lambda p: (key_order(p[1].key), p[1].tag)):
        row = _row(any_row, of_a.get(place), of_b.get(place), left, right, family)
        if row is not None:
            rows.append(row)
    gone = tuple(n for n in left.header if n not in right.header)
    added = tuple(n for n in right.header if n not in left.header)
    same = len({**of_a, **of_b}) - len(rows)
    return Diff(str(a), str(b), family.name, gone, added, tuple(rows), same, (*left.notes, *right.notes))


def _row(
    any_row: TableRow, a: TableRow | None, b: TableRow | None, left: Table, right: Table, family: Family
) -> DiffRow | None:
    key = key_dict(any_row.key, family) | ({TAG: any_row.tag} if any_row.tag else {})
    ca = left.cells(a) if a else {}
    cb = right.cells(b) if b else {}
    side_a = Side(kernel_of(ca), a.us) if a else None
    side_b = Side(kernel_of(cb), b.us) if b else None
    if a is None or b is None:
        return DiffRow("gone" if a else "added", key, side_a, side_b, None, ())
    skip = {"gfx", "cu_num", *family.key_names, TAG, "us", "kernelName", "kernelName1", "kernelName2"}
    cells = tuple(n for n in left.header if n in cb and n not in skip and ca[n] != cb[n])
    speedup = a.us / b.us if a.us and b.us else None
    if identity(ca, family.name) != identity(cb, family.name):
        return DiffRow("kernel", key, side_a, side_b, speedup, cells)
    if a.us != b.us:
        return DiffRow("us", key, side_a, side_b, speedup, cells)
    return DiffRow("cells", key, side_a, side_b, speedup, cells) if cells else None
