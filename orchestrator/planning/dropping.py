"""Leaving out what the tuned DB has already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.shapes import Shape
from orchestrator.tables.tuned import read_table
from worker.families import Family


class Dropped(NamedTuple):
    """`todo` and `skipped` together are the shapes given, each in their order; `notes` are sentences for people."""

    todo: list[Shape]
    skipped: list[Shape]
    notes: list[str]


def drop_tuned(
    shapes: Sequence[Shape], family: Family, db: Path | None, gfx: str, cu_num: int, *, retune: bool = False
) -> Dropped:
    """Split shapes by whether `db` has their key for this gfx and cu_num with a time above 0 (exact match).

    No `db`, or `retune`: nothing is skipped. Raises TunedDBError for a file that is no tuned table of the
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
    there = {
        r.key[2 : 2 + len(family.key_names)]
        for r in table.rows
        if r.key[:2] == (gfx, cu_num) and r.us is not None and not r.tag
    }
    if table.rows and not any(r.key[:2] == (gfx, cu_num) for r in table.rows):
        has = sorted({f"{r.key[0] or '?'}/{r.key[1]}" for r in table.rows})
        notes.append(
            f"{db} has no row for {gfx} with cu_num {cu_num} (it has {', '.join(has[:6])}): nothing is skipped"
        )
    skipped = [s for s in todo if s.key in there]
    return Dropped([s for s in todo if s.key not in there], skipped, notes)
