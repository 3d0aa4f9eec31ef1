"""Merges newcomers into a tuned table, and undoes such a merge.

`tune --db` and `db merge` call `merge`. It reads the table, lets a `NewcomerPool` find the champion of each key and
judge it against the incumbent (`newcomers.py`, `decision.py`), refuses rows that must not stand in this table
(`mixing.py`), and replaces the table together with the records beside it. These two files are one state: the old state
is kept, and `undo` restores it (`orchestrator/files/history.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import TunedDBError
from orchestrator.files.history import FileHistory
from orchestrator.files.lock import LOCK_WAIT_S, locked
from orchestrator.files.write import csv_text
from orchestrator.tables.decision import ACTIONS, Action, MergePolicy
from orchestrator.tables.keys import TAG, Place, file_order, key_dict, key_with_tag
from orchestrator.tables.mixing import check_versions, refuse_other_rows
from orchestrator.tables.newcomers import Incumbent, Judged, MergeRow, Newcomer, NewcomerPool, make_incumbent
from orchestrator.tables.provenance import (
    Facts,
    Record,
    current_records,
    describe_stale,
    new_record,
    read_records,
    records_path,
    spread_of,
)
from orchestrator.tables.row_kernels import kernel_of, kind_of_record
from orchestrator.tables.table import Table, read_table
from worker import without_gc
from worker.families import Family


@dataclass(frozen=True, slots=True)
class MergeReport:
    """A merge, row by row."""

    path: str
    rows: tuple[MergeRow, ...]
    backup: str | None
    """The file in which the old table is kept; None if the table is new or was not changed."""
    created: bool
    """True if there was no table."""
    notes: tuple[str, ...]
    policy: MergePolicy = "noise"

    def count(self, action: Action) -> int:
        """Number of rows with this outcome."""
        return sum(1 for row in self.rows if row.action == action)

    @property
    def changed(self) -> bool:
        """True where the merge changed the file."""
        return any(row.action in ("added", "replaced") for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The document of merge.json."""
        return {**asdict(self), "counts": {action: self.count(action) for action in ACTIONS}}


def merge(
    newcomers: Iterable[Mapping[str, Any]],
    into: Path,
    family: Family,
    *,
    profile: Iterable[Mapping[str, Any]] = (),
    facts: Facts | None = None,
    policy: MergePolicy = "noise",
    err_ratio: float | None = None,
    allow_mixed: bool = False,
    dry_run: bool = False,
    lock_wait_s: float = LOCK_WAIT_S,
) -> MergeReport:
    """Merge rows (by the names of `family.tuned_header`, and `spread` where known) into the table at `into`.

    Per key (gfx, cu_num, the family's columns) the newcomer with the lowest us challenges the incumbent
    (`decision.decide`). `profile`: rows that were measured beside the newcomers (`NewcomerPool.add_rows`). Header,
    column order and every untouched row of the file stay as they are; a new file gets the family's header. The rows
    are then in the order in which AITER's tuners would leave them. The old file is kept as `<name>.<number>.<UTC>.bak`.
    Nothing is written where nothing changes. What cannot be a row (see `NewcomerPool.rejected`) is reported as
    rejected. `facts` are written into the records beside the table. `err_ratio`: the largest share of wrong elements of
    a newcomer, None for any. `allow_mixed`: images and tuner versions that are known may differ. `dry_run`: report what
    would change, and write nothing. Raises TunedDBError; the table is then as it was.
    """
    target = Path(os.path.realpath(into))
    if not target.parent.is_dir():
        raise TunedDBError(f"{into}: there is no folder {target.parent}; make it first")
    try:
        # a merge makes many small objects and no cycles: looking for some takes a fifth of its time
        with locked(target, lock_wait_s), without_gc():
            if not dry_run:
                history_of(target).clean_up()
            table_merge = TableMerge(target, into, family, facts, policy, allow_mixed=allow_mixed)
            return table_merge.run(newcomers, profile, err_ratio, dry_run=dry_run)
    except OSError as e:
        raise TunedDBError(f"{into}: cannot be written (nothing of it is lost): {e.strerror or e}") from e


class TableMerge:
    """A merge into one table, while nobody else writes to it; `run` once.

    Its objects are gone before garbage is collected again.
    """

    def __init__(
        self, target: Path, name: Path, family: Family, facts: Facts | None, policy: MergePolicy, *, allow_mixed: bool
    ) -> None:
        """`target`: the table's real path; `name`: as the user called it."""
        self.name = name
        self.family = family
        self.facts = facts
        self.policy = policy
        self.allow_mixed = allow_mixed
        self.before = target.stat() if target.exists() else None
        self.table = read_table(target, family) if self.before else _new_table(target, family)
        self.rows = {row.place: row for row in self.table.rows}
        self.records = read_records(target)
        self.known = current_records(self.table, self.records)  # those that say what their rows are now

    def run(
        self,
        newcomers: Iterable[Mapping[str, Any]],
        profile: Iterable[Mapping[str, Any]],
        err_ratio: float | None,
        *,
        dry_run: bool,
    ) -> MergeReport:
        """Judge the newcomers, and write the table if it changes."""
        pool = NewcomerPool(self.family, self._incumbent, err_ratio)
        pool.add_rows(newcomers)
        pool.add_rows(profile, beside=True)
        champions: list[Newcomer] = []
        for new in pool.champions():
            if new.tag and TAG not in self.table.header:
                pool.rejected.append(_reject_tag(new, self.family))
            else:
                champions.append(new)
        refuse_other_rows(self.table, self.known, champions, lambda new: kind_of_record(self._facts_of(new)))
        judged = [pool.judge(new, self.policy) for new in champions]
        rows = [_report_row(verdict, self.family) for verdict in judged] + pool.rejected
        notes = [*self.table.notes, *pool.notes()]
        written = [verdict.new for verdict in judged if verdict.action in ("added", "replaced")]
        new_records = {new.place: new_record(new, self.family, self._facts_of(new)) for new in written}
        if written and (self.facts or self.records):
            notes += check_versions(self.name, self.known, self.rows, new_records, allowed=self.allow_mixed)
        if stale := describe_stale(self.table.path, self.records, self.known):
            notes.append(stale)
        backup = None
        if written:
            lines = _lines_by_place(self.table, written)
            if [place for place in lines if place in self.rows] != [*self.rows]:
                notes.append(
                    f"{self.name}: its rows were in another order than AITER's tuners leave them in: all are sorted"
                )
            if not dry_run:
                backup = self._write(lines, new_records)
        created = bool(written) and self.before is None and not dry_run
        return MergeReport(str(self.name), tuple(rows), backup, created, tuple(notes), self.policy)

    def _incumbent(self, place: Place) -> Incumbent | None:
        row = self.rows.get(place)
        if row is None:
            return None
        return make_incumbent(self.table, row, str(self.table.path), spread_of(self.known.get(place)))

    def _facts_of(self, new: Newcomer) -> Mapping[str, Any]:
        return self.facts(new) if self.facts else {}

    def _write(self, lines: Mapping[Place, str], new_records: Mapping[Place, Record]) -> str | None:
        """Write table and records; return the path of the kept old table, None if there was none. Rows without facts
        lose their record."""
        records = {place: record for place, record in self.records.items() if place not in new_records}
        if self.facts:
            records |= new_records
        record_lines = [records[place].line + "\n" for place in lines if place in records]
        texts = {self.table.path: [self._with_end(line) for line in (self.table.parts[0], *lines.values())]}
        records_file = records_path(self.table.path)
        if record_lines or records_file.exists():
            texts[records_file] = record_lines
        kept = history_of(self.table.path).replace(texts, self.before)
        return str(kept) if kept else None

    def _with_end(self, line: str) -> str:
        """The line with its line end, which the last line of a file may lack."""
        return line if line.endswith(("\n", "\r")) else line + self.table.newline


def _new_table(path: Path, family: Family) -> Table:
    return Table(path, family, family.tuned_header, (",".join(family.aiter_header) + "\n",), (), ())


def _report_row(verdict: Judged, family: Family) -> MergeRow:
    new = verdict.new
    return MergeRow(
        action=verdict.action,
        key=key_with_tag(new.key, new.tag, family),
        old_us=verdict.old_time.us if verdict.old_time else None,
        new_us=new.us,
        old_kernel=kernel_of(verdict.old.cells) if verdict.old else "",
        new_kernel=new.kernel,
        why=verdict.why,
        judged=verdict.basis,
        rival_us=verdict.rival.us if verdict.rival else None,
    )


def _reject_tag(new: Newcomer, family: Family) -> MergeRow:
    """AITER counts the tag to the key."""
    why = f"it has the {TAG} {new.tag}, and the table has no such column"
    return MergeRow("rejected", key_dict(new.key, family), None, new.us, "", new.kernel, why)


def _lines_by_place(table: Table, written: Sequence[Newcomer]) -> dict[Place, str]:
    """The lines of the new file by place, in their order: the table's, with those of newcomers added or in place."""
    order = file_order(table.family, table.header)
    lines = {row.place: (order(row.key), table.parts[row.part]) for row in table.rows}
    for new in written:
        lines[new.place] = (order(new.key), newcomer_line(table.header, new, table.family, table.newline))
    return {place: line for place, (_, line) in sorted(lines.items(), key=lambda item: item[1][0])}


def newcomer_line(header: Sequence[str], new: Newcomer, family: Family, end: str = "\n") -> str:
    """A newcomer as a line of a table, its key as AITER spells it."""
    key = {name: str(value) for name, value in key_dict(new.key, family).items()}
    return csv_line({**new.cells, **key}, header, end)


def csv_line(cells: Mapping[str, str], header: Sequence[str], end: str = "\n") -> str:
    """Cells by column as a line."""
    return csv_text([cells.get(name, "") for name in header]).removesuffix("\n") + end


def history_of(table: Path) -> FileHistory:
    """The history of a table and its records."""
    return FileHistory(table, records_path(table))


def undo(table: Path) -> dict[str, Any]:
    """Restore the last kept state of a table and its records. The replaced table is kept as
    `<name>.<number>.<UTC>.undone`.

    Returns the document of `db undo`: `restored` is the kept file that is the table again, `aside` what was the table
    until now. `records` says `restored`, `removed` (that state had none) or `left` (none were kept with it, so today's
    stay). `left` is the number of states that can be undone still.

    Raises TunedDBError if nothing is kept, or if nothing can be written; the table is then as it was.
    """
    target = Path(os.path.realpath(table))
    if not target.is_file():
        raise TunedDBError(f"{table}: there is no such table")
    history = history_of(target)
    try:
        with locked(target):
            history.clean_up()
            undone = history.undo()
    except OSError as e:
        raise TunedDBError(f"{table}: cannot be undone (nothing of it is lost): {e.strerror or e}") from e
    if undone is None:
        raise TunedDBError(
            f"{table}: nothing to undo: no older state is kept beside it"
            f" ({target.name}.<number>.<UTC>.bak; a table's first merge has none)"
        )
    return {
        "path": str(table),
        "restored": str(undone.restored),
        "aside": str(undone.aside),
        "records": undone.companion,
        "left": undone.states_left,
    }
