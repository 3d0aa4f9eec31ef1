"""Merge newcomers into a tuned table: one champion per key, judged once against the incumbent."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.errors import TunedDBError
from orchestrator.tables.tuned import TAG, Place, Table, TableRow, kernel_of, key_dict, read_table
from orchestrator.tuned_db import versions
from orchestrator.tuned_db.compatibility import (
    check_versions,
    refuse_other_chips,
    refuse_other_kind,
    without_misplaced_tags,
)
from orchestrator.tuned_db.kinds import kind_in
from orchestrator.tuned_db.merge_policy import (
    ACTIONS,
    MARGIN,
    Action,
    Basis,
    Decision,
    Identity,
    Newcomer,
    NewcomerPool,
    Policy,
    Time,
    decide,
    identity,
)
from orchestrator.tuned_db.records import Facts, Record, Records, current_records, new_record, read_records, spread_of
from worker import without_gc
from worker.families import Family
from worker.text import plural

LOCK_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class MergeRow:
    """The outcome of a newcomer. `key` holds gfx, cu_num and the family's columns; times are in microseconds.

    `judged` says against what; of `same profile`, `rival_us` is the time of the old kernel there.
    """

    action: Action
    key: dict[str, int | str]
    old_us: float | None
    new_us: float | None
    old_kernel: str
    new_kernel: str
    why: str
    judged: Basis = ""
    rival_us: float | None = None


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


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a merge. `margin`: the noise where none is known. `err_ratio`: the largest share of wrong elements
    of a newcomer, None for any. `allow_mixed`: images and tuner versions that are known may differ."""

    policy: Policy = "noise"
    margin: float = MARGIN
    err_ratio: float | None = None
    allow_mixed: bool = False


@dataclass(frozen=True, slots=True)
class _Decision:
    new: Newcomer
    old: TableRow | None
    rival: Time | None
    verdict: Decision

    @property
    def writes(self) -> bool:
        return self.verdict.action in ("added", "replaced")


def merge(
    newcomers: Iterable[Mapping[str, Any]],
    into: Path,
    family: Family,
    *,
    rules: Rules | None = None,
    profile: Iterable[Mapping[str, Any]] = (),
    facts: Facts | None = None,
    lock_wait_s: float = LOCK_WAIT_S,
) -> MergeReport:
    """Merge rows (by the names of `family.tuned_header`, and `spread` where known) into the table at `into`.

    Per key (gfx, cu_num, the family's columns) the newcomer with the lowest us challenges the incumbent
    (`merge_policy.decide`). `profile`: rows that were measured beside the newcomers (`NewcomerPool.take`). Header,
    column order and every untouched line of the file stay as they are; a new file gets the family's header. The old
    file is kept as `<name>.<UTC>.bak`. Nothing is written where nothing changes. What cannot be a row (see
    `champions`) is reported as rejected. `facts` are written into the records beside the table. Raises TunedDBError;
    the table is then as it was.
    """
    target = Path(os.path.realpath(into))
    if not target.parent.is_dir():
        raise TunedDBError(f"{into}: there is no folder {target.parent}; make it first")
    try:
        # a merge makes many small objects and no cycles: looking for some takes a fifth of its time
        with versions.locked(target, lock_wait_s), without_gc():
            return _merge(newcomers, profile, into, target, family, rules or Rules(), facts)
    except OSError as e:
        raise TunedDBError(f"{into}: cannot be written (nothing of it is lost): {e.strerror or e}") from e


def _merge(
    newcomers: Iterable[Mapping[str, Any]],
    profile: Iterable[Mapping[str, Any]],
    into: Path,
    target: Path,
    family: Family,
    rules: Rules,
    facts: Facts | None,
) -> MergeReport:
    before = target.stat() if target.exists() else None
    table = read_table(target, family) if before else _empty(target, family)
    there = {r.place: r for r in table.rows}
    pool = NewcomerPool(family, _kernels(table, there), rules.err_ratio)
    pool.take(newcomers)
    pool.take(profile, beside=True)
    best, untagged = without_misplaced_tags(table, pool.champions(), family)
    refuse_other_chips(table, best)
    records = read_records(target)
    known = current_records(table.header, there, records)
    refuse_other_kind(into, table, known, best, lambda n: kind_in(facts(n)) if facts else "")
    decisions = [_decide(table, n, there.get(n.place), pool, known.get(n.place), rules) for n in best]
    writes = [d for d in decisions if d.writes]
    fresh = {d.new.place: new_record(d.new, family, facts(d.new)) for d in writes} if facts else {}
    notes = [*table.notes, *pool.notes()]
    if writes and (fresh or records.by_place):
        blank = {d.new.place: fresh.get(d.new.place) or new_record(d.new, family, {}) for d in writes}
        notes += check_versions(into, known, there, blank, allowed=rules.allow_mixed)
    if stale := len(records.by_place) - len(known):
        notes.append(f"{records.path.name}: {plural(stale, 'record')} without a row: it is gone or was changed by hand")
    rejected = (MergeRow("rejected", r.key, None, r.us, "", r.kernel, r.why) for r in (*pool.rejected, *untagged))
    rows = (*(_row(d, table, family) for d in decisions), *rejected)
    backup = None
    if writes:
        places = [*there, *(d.new.place for d in writes if d.old is None)]
        written = {d.new.place for d in writes}
        left = {place: record for place, record in records.by_place.items() if place not in written}
        lines = Records(records.path, left | fresh).lines(places)
        backup = versions.replace(target, _parts(table, writes, family), lines, before)
    created = bool(writes) and before is None
    return MergeReport(str(into), rows, str(backup) if backup else None, created, tuple(notes), rules.policy)


def _empty(path: Path, family: Family) -> Table:
    return Table(path, family, family.tuned_header, (",".join(family.aiter_header) + "\n",), (), ())


def _kernels(table: Table, there: Mapping[Place, TableRow]) -> Callable[[Place], Identity | None]:
    """The kernel of the table's row of a place."""

    @cache
    def kernel(place: Place) -> Identity | None:
        row = there.get(place)
        return identity(table.cells(row), table.family.name) if row else None

    return kernel


def _decide(
    table: Table, new: Newcomer, old: TableRow | None, pool: NewcomerPool, record: Record | None, rules: Rules
) -> _Decision:
    time, rival = pool.times(new)
    figure = Time(old.us, spread_of(record)) if old and old.us is not None else None
    found = decide(
        figure,
        time,
        is_key=old is not None,
        rival=rival,
        policy=rules.policy,
        margin=rules.margin,
        same_kernel=pool.is_incumbent(new),
    )
    return _Decision(new, old, rival, found)


def _row(d: _Decision, table: Table, family: Family) -> MergeRow:
    key = key_dict(d.new.key, family) | ({TAG: d.new.tag} if d.new.tag else {})
    kernel = kernel_of(table.cells(d.old)) if d.old else ""
    v, old_us, rival_us = d.verdict, d.old.us if d.old else None, d.rival.us if d.rival else None
    return MergeRow(v.action, key, old_us, d.new.us, kernel, d.new.kernel, v.why, v.judged, rival_us)


def _parts(table: Table, writes: Sequence[_Decision], family: Family) -> list[str]:
    """The text of the new file."""
    parts = list(table.parts)
    for d in writes:
        line = _line(table, d.new, family)
        if d.old is not None:
            parts[d.old.part] = line
            continue
        if not parts[-1].endswith(("\n", "\r")):
            parts[-1] += table.newline
        parts.append(line)
    return parts


def _line(table: Table, new: Newcomer, family: Family) -> str:
    cells = {**new.cells, **{k: str(v) for k, v in key_dict(new.key, family).items()}}
    out = io.StringIO()
    csv.writer(out, lineterminator=table.newline).writerow([cells.get(n, "") for n in table.header])
    return out.getvalue()
