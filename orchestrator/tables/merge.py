"""Merge newcomers into a tuned table: one champion per key, judged once against the incumbent; compare two tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.command_hints import command
from orchestrator.errors import TunedDBError
from orchestrator.tables.journal import LOCK_WAIT_S, locked, replace, tidy
from orchestrator.tables.kinds import (
    OWNER,
    Facts,
    check_versions,
    current_records,
    kind_in,
    kind_of_table,
    new_record,
    other_name,
    read_records,
    refuse_other_rows,
    spread_of,
    stale,
)
from orchestrator.tables.policy import (
    ACTIONS,
    Action,
    Incumbent,
    Judged,
    MergeRow,
    Newcomer,
    NewcomerPool,
    Policy,
    identity,
    incumbent,
)
from orchestrator.tables.textfiles import csv_text
from orchestrator.tables.tuned import (
    KERNEL_NAMES,
    TAG,
    Place,
    Table,
    TableRow,
    file_order,
    kernel_of,
    key_dict,
    key_order,
    read_table,
)
from worker import without_gc
from worker.families import Family
from worker.text import and_more
from worker.tuners.catalog import recorded_tuner


@dataclass(frozen=True, slots=True)
class MergeReport:
    """A merge, row by row. `backup` is the old file where it was changed, `created` whether there was none."""

    path: str
    rows: tuple[MergeRow, ...]
    backup: str | None
    created: bool
    notes: tuple[str, ...]
    policy: Policy = "noise"

    def count(self, action: Action) -> int:
        """Number of rows with this outcome."""
        return sum(1 for r in self.rows if r.action == action)

    @property
    def changed(self) -> bool:
        """True where the merge changed the file."""
        return any(r.action in ("added", "replaced") for r in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The document of merge.json."""
        return {**asdict(self), "counts": {a: self.count(a) for a in ACTIONS}}


def merge(
    newcomers: Iterable[Mapping[str, Any]],
    into: Path,
    family: Family,
    *,
    profile: Iterable[Mapping[str, Any]] = (),
    facts: Facts | None = None,
    policy: Policy = "noise",
    err_ratio: float | None = None,
    allow_mixed: bool = False,
    dry_run: bool = False,
    lock_wait_s: float = LOCK_WAIT_S,
) -> MergeReport:
    """Merge rows (by the names of `family.tuned_header`, and `spread` where known) into the table at `into`.

    Per key (gfx, cu_num, the family's columns) the newcomer with the lowest us challenges the incumbent
    (`policy.decide`). `profile`: rows that were measured beside the newcomers (`NewcomerPool.take`). Header,
    column order and every untouched row of the file stay as they are; a new file gets the family's header. The rows
    are then in the order in which AITER's tuners would leave them. The old file is kept as `<name>.<number>.<UTC>.bak`.
    Nothing is written where nothing changes. What cannot be a row (see
    `champions`) is reported as rejected. `facts` are written into the records beside the table. `err_ratio`: the
    largest share of wrong elements of a newcomer, None for any. `allow_mixed`: images and tuner versions that are known
    may differ. `dry_run`: report what would change, and write nothing. Raises TunedDBError; the table is then as
    it was.
    """
    target = Path(os.path.realpath(into))
    if not target.parent.is_dir():
        raise TunedDBError(f"{into}: there is no folder {target.parent}; make it first")
    try:
        # a merge makes many small objects and no cycles: looking for some takes a fifth of its time
        with locked(target, lock_wait_s), without_gc():
            if not dry_run:
                tidy(target)
            return _merged(
                newcomers, into, target, family, profile, facts, policy, err_ratio, allow_mixed=allow_mixed,
                dry_run=dry_run,
            )  # fmt: skip
    except OSError as e:
        raise TunedDBError(f"{into}: cannot be written (nothing of it is lost): {e.strerror or e}") from e


def _merged(
    newcomers: Iterable[Mapping[str, Any]], into: Path, target: Path, family: Family,
    profile: Iterable[Mapping[str, Any]], facts: Facts | None, policy: Policy, err_ratio: float | None, *,
    allow_mixed: bool, dry_run: bool,
) -> MergeReport:  # fmt: skip
    """The merge while nobody else writes to the table. Its objects are gone before garbage is collected again."""
    before = target.stat() if target.exists() else None
    table, records = read_table(target, family) if before else _empty(target, family), read_records(target)
    known, there = current_records(table, records), {r.place: r for r in table.rows}

    def old(place: Place) -> Incumbent | None:
        row, spread = there.get(place), spread_of(known.get(place))
        return incumbent(table.cells(row), row.us, family.name, str(target), row.line, spread) if row else None

    pool = NewcomerPool(family, old, err_ratio)
    pool.take(newcomers)
    pool.take(profile, beside=True)
    every = pool.champions()
    untagged = [n for n in every if n.tag and TAG not in table.header]  # AITER counts it to the key
    best = [n for n in every if not n.tag or TAG in table.header]
    refuse_other_rows(table, known, best, lambda n: kind_in(facts(n)) if facts else "")
    judged = [pool.judge(n, policy) for n in best]
    writes = [j for j in judged if j.action in ("added", "replaced")]
    fresh = {j.new.place: new_record(j.new, family, facts(j.new) if facts else {}) for j in writes}
    notes = [*table.notes, *pool.notes()]
    if writes and (facts or records):
        notes += check_versions(into, known, there, fresh, allowed=allow_mixed)
    notes += [text] if (text := stale(table.path, records, known)) else []
    why = f"it has the {TAG} {{}}, and the table has no such column"
    rows = [_row(j, family) for j in judged] + pool.rejected
    for n in untagged:
        rows.append(MergeRow("rejected", key_dict(n.key, family), None, n.us, "", n.kernel, why.format(n.tag)))
    parts = _parts(table, writes) if writes else {}
    if parts and [p for p in parts if p in there] != [*there]:
        notes.append(f"{into}: its rows were in another order than AITER's tuners leave them in: all are sorted")
    backup = None
    if writes and not dry_run:
        left = {p: record for p, record in records.items() if p not in fresh} | (fresh if facts else {})
        lines = [left[place].line + "\n" for place in parts if place in left]
        whole = [t if t.endswith(("\n", "\r")) else t + table.newline for t in (table.parts[0], *parts.values())]
        backup = replace(table.path, whole, lines, before)
    created = bool(writes) and before is None and not dry_run
    return MergeReport(str(into), tuple(rows), str(backup) if backup else None, created, tuple(notes), policy)


def _empty(path: Path, family: Family) -> Table:
    return Table(path, family, family.tuned_header, (",".join(family.aiter_header) + "\n",), (), ())


def _row(j: Judged, family: Family) -> MergeRow:
    key = key_dict(j.new.key, family) | ({TAG: j.new.tag} if j.new.tag else {})
    old_us, kernel = j.old.time.us if j.old and j.old.time else None, kernel_of(j.old.cells) if j.old else ""
    rival_us = j.rival.us if j.rival else None
    return MergeRow(j.action, key, old_us, j.new.us, kernel, j.new.kernel, j.why, j.judged, rival_us)


def _parts(table: Table, writes: Sequence[Judged]) -> dict[Place, str]:
    """The lines of the new file by place, in their order."""
    lines = {r.place: (r.key, table.parts[r.part]) for r in table.rows}
    lines |= {j.new.place: (j.new.key, line_of(table.header, j.new, table.family, table.newline)) for j in writes}
    order = file_order(table.family, table.header)
    return {place: line for place, (_, line) in sorted(lines.items(), key=lambda e: order(e[1][0]))}


def line_of(header: Sequence[str], new: Newcomer, family: Family, end: str = "\n") -> str:
    """A newcomer as a line of a table, its key as AITER spells it."""
    return csv_line({**new.cells, **{k: str(v) for k, v in key_dict(new.key, family).items()}}, header, end)


def csv_line(cells: Mapping[str, str], header: Sequence[str], end: str = "\n") -> str:
    """Cells by column as a line."""
    return csv_text([cells.get(n, "") for n in header]).removesuffix("\n") + end


def check_db(db: Path, family: Family, tuner: str) -> None:
    """Raise TunedDBError where the merge at the run's end would be refused for what is known now."""
    writes = recorded_tuner(tuner).produces
    if writes == "configs":
        raise TunedDBError(
            f"--db {db}: the tuner {tuner} writes config files, and no table names them; run it without --db, then: "
            + command("configs merge RUN --into TREE")
        )
    if not db.parent.is_dir():
        raise TunedDBError(f"--db {db}: there is no folder {db.parent}; make it first: mkdir -p {db.parent}")
    if not db.exists():
        return
    if not db.is_file():
        raise TunedDBError(f"--db {db}: is not a file; name the table itself, such as {db / family.tuned_csv}")
    table = read_table(db, family)
    has, rows = kind_of_table(table, current_records(table, read_records(db)))
    if has and writes and has != writes:
        name = kernel_of(table.cells(rows[0]))[:80]
        raise TunedDBError([
            f"--db {db}: is a table of {OWNER[has]} kernels (line {rows[0].line}: {name}), and the tuner {tuner} writes"
            f" {OWNER[writes]}: AITER stops at a name that it has no kernel of, so a table is never both",
            f"use a table of their own: --db {other_name(db, tuner)}",
        ])  # fmt: skip


def not_for_aiter(tuner: str, nodes: Iterable[tuple[str, str | None]]) -> list[str]:
    """A warning where AMD GPUs, (node, gfx) each, are about to be tuned by a tuner that AITER loads nothing of."""
    amd = [node for node, gfx in nodes if (gfx or "").startswith("gfx")]
    if not amd or recorded_tuner(tuner).produces != "own":
        return []
    return [
        f"warning: {and_more(amd, 4)}: AMD GPUs, and the tuner {tuner} measures kernels of gemmfleet's own: AITER"
        " loads nothing of its table; --tuner aiter writes AITER's"
    ]


CHANGES = ("added", "gone", "kernel", "us", "cells")


def diff(a: Path, b: Path, family: Family) -> dict[str, Any]:
    """Two tables compared: the document of `db diff --json`, its rows in the order of their keys.

    A row's `change`: added, gone, kernel (another one), us (the same kernel with another time), cells (anything else).
    `speedup` = time in A / time in B. Raises TunedDBError for a table that cannot be read.
    """
    left, right = read_table(a, family), read_table(b, family)
    of_a, of_b = ({r.place: r for r in t.rows} for t in (left, right))
    every = {**of_a, **of_b}
    ordered = sorted(every, key=lambda p: (key_order(every[p].key), every[p].tag))
    rows = [r for p in ordered if (r := _difference(every[p], of_a.get(p), of_b.get(p), left, right))]
    counts = {c: sum(r["change"] == c for r in rows) for c in CHANGES} | {"same": len(every) - len(rows)}
    return {
        "a": str(a), "b": str(b), "family": family.name,
        "columns_gone": [n for n in left.header if n not in right.header],
        "columns_added": [n for n in right.header if n not in left.header],
        "rows": rows, "same": counts["same"], "notes": [*left.notes, *right.notes], "counts": counts,
    }  # fmt: skip


def _difference(
    row: TableRow, a: TableRow | None, b: TableRow | None, left: Table, right: Table
) -> dict[str, Any] | None:
    name, skip = left.family.name, {"gfx", "cu_num", *left.family.key_names, TAG, "us", *KERNEL_NAMES}
    ca, cb = left.cells(a) if a else {}, right.cells(b) if b else {}
    cells = [n for n in left.header if n in ca and n in cb and n not in skip and ca[n] != cb[n]]
    change, speedup = "gone" if a else "added", None
    if a and b:
        other = identity(ca, name) != identity(cb, name)
        change = "kernel" if other else "us" if a.us != b.us else "cells" if cells else ""
        speedup = a.us / b.us if a.us and b.us else None
    sides = {s: {"kernel": kernel_of(c), "us": r.us} if r else None for s, r, c in (("a", a, ca), ("b", b, cb))}
    key = key_dict(row.key, left.family) | ({TAG: row.tag} if row.tag else {})
    return {"change": change, "key": key, **sides, "speedup": speedup, "cells": cells} if change else None
