"""Split a table with rows of AITER's and of our own tuners, as 0.1.0 could make one, into two."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import TunedDBError
from orchestrator.tables.tuned import Table, TableRow, read_table
from orchestrator.tuned_db import versions
from orchestrator.tuned_db.compatibility import rows_by_kind
from orchestrator.tuned_db.kinds import other_name
from orchestrator.tuned_db.records import Records, current_records, read_records, records_path
from orchestrator.userfiles import write_atomic
from worker.families import Family


@dataclass(frozen=True, slots=True)
class Split:
    """`path` keeps `stayed` rows, `into` got `moved`; `backup`: the table as it was."""

    path: str
    into: str
    moved: int
    stayed: int
    records_moved: int
    backup: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def split(table: Path, family: Family, into: Path | None, lock_wait_s: float) -> Split:
    """Move the rows of our own tuners with their records into `into` (default: a new file beside the table).

    The old table is kept, and `db undo` gives it back. A split that was cut off between the two files can be given
    again. Raises TunedDBError; the table is then as it was.
    """
    target = Path(os.path.realpath(table))
    if not target.is_file():
        raise TunedDBError(f"{table}: there is no such table")
    try:
        with versions.locked(target, lock_wait_s):
            return _split(table, target, family, into)
    except OSError as e:
        raise TunedDBError(f"{table}: cannot be split (nothing of it is lost): {e.strerror or e}") from e


def _split(table: Path, target: Path, family: Family, into: Path | None) -> Split:
    before = target.stat()
    read, records = read_table(target, family), read_records(target)
    found = rows_by_kind(read, current_records(read.header, {r.place: r for r in read.rows}, records))
    own = found.get("own", [])
    if not own or "aiter" not in found:
        whose = "gemmfleet's own" if own else "AITER's"
        raise TunedDBError(f"{table}: nothing to split: no two of its rows are of different kinds (they are {whose})")
    places = {r.place for r in own}
    moved, theirs = _text(read, own), _lines(records, [r.place for r in own])
    to = _place(target, into, moved)
    created = not to.exists()
    try:
        if theirs:
            write_atomic(records_path(to), lambda f: f.writelines(theirs), like=before)
        write_atomic(to, lambda f: f.writelines(moved), like=before)
        left = [p for i, p in enumerate(read.parts) if i not in {r.part for r in own}]
        stay = [record.line + "\n" for place, record in records.by_place.items() if place not in places]
        backup = versions.replace(target, left, stay, before)
    except BaseException:
        if created:
            to.unlink(missing_ok=True)
            records_path(to).unlink(missing_ok=True)
        raise
    return Split(str(table), str(to), len(own), len(read.rows) - len(own), len(theirs), str(backup))


def _place(target: Path, into: Path | None, moved: Sequence[str]) -> Path:
    """The file for the rows that move. Raises TunedDBError where another table is there."""
    text = "".join(moved)
    default = other_name(target, "own")
    if into is None and not (default.exists() and _holds(default, text)):
        return other_name(target, "own", fresh=True)
    to = into or default
    if not to.parent.is_dir():
        raise TunedDBError(f"--into {to}: there is no folder {to.parent}; make it first")
    if os.path.realpath(to) == str(target):
        raise TunedDBError(f"--into {to}: is the table itself")
    if to.exists() and not _holds(to, text):
        raise TunedDBError(f"--into {to}: is there already; name a new file, and merge the two afterwards")
    return to


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.stat().st_size == len(text.encode()) and path.read_bytes() == text.encode()


def _text(table: Table, rows: Sequence[TableRow]) -> list[str]:
    parts = [table.parts[0], *(table.parts[r.part] for r in rows)]
    return [p if p.endswith(("\n", "\r")) else p + table.newline for p in parts]


def _lines(records: Records, places: Sequence[str]) -> list[str]:
    return [records.by_place[p].line + "\n" for p in places if p in records.by_place]
