"""Splits the shapes of a run into those to tune and those to skip, because the tuned table has a row of this chip.

controller/prepare.py calls `drop_tuned` before it plans, and `tuned_times` for a run by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.shapes.model import Key, Shape
from orchestrator.tables.keys import chip_name
from orchestrator.tables.table import Table, read_table
from worker.families import Family


class Dropped(NamedTuple):
    """Shapes split into `todo` and `skipped`, in their order. `notes`: sentences for the user."""

    todo: list[Shape]
    skipped: list[Shape]
    notes: list[str]


def drop_tuned(
    shapes: Sequence[Shape], family: Family, db: Path | None, gfx: str, cu_num: int, *, retune: bool = False
) -> Dropped:
    """Skip shapes whose key `db` has for exactly this gfx and cu_num, with a time above 0.

    Without `db`, or with `retune`, no shape is skipped. Raises TunedDBError if the file is not a tuned table of the
    family.
    """
    todo = list(shapes)
    if db is None:
        return Dropped(todo, [], [])
    if not db.exists():
        return Dropped(todo, [], [f"{db} does not exist yet: nothing is skipped, and it will be created"])
    table = read_table(db, family)
    notes = list(table.notes)
    if retune:
        return Dropped(todo, [], notes)
    chip = family.chip(gfx, cu_num)
    if table.rows and not any(row.key[:2] == chip for row in table.rows):
        has = sorted({chip_name(*row.key[:2]) for row in table.rows})
        wanted = f"{gfx} with cu_num {cu_num}" if chip[1] else gfx
        notes.append(f"{db} has no row for {wanted} (it has {', '.join(has[:6])}): nothing is skipped")
    times = _times(table, family, gfx, cu_num)
    skipped = [shape for shape in todo if shape.key in times]
    return Dropped([shape for shape in todo if shape.key not in times], skipped, notes)


def tuned_times(db: Path | None, family: Family, gfx: str, cu_num: int) -> dict[Key, float]:
    """Microseconds of a chip's rows in the table, by key; {} if there is no table. Raises TunedDBError."""
    return _times(read_table(db, family), family, gfx, cu_num) if db is not None and db.exists() else {}


def _times(table: Table, family: Family, gfx: str, cu_num: int) -> dict[Key, float]:
    chip = family.chip(gfx, cu_num)
    return {r.key[2:]: r.us for r in table.rows if r.key[:2] == chip and r.us is not None and not r.tag}
