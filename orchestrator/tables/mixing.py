"""The rows that may stand in one tuned table.

AITER stops at a kernel that it does not have, so a table holds rows of AITER's kernels or of our own tuners', never
both; a row of unknown kind goes with either. Rows of chips that the table does not tell apart do not mix, nor do those
of several images or tuner versions. A merge asks `refuse_other_rows` and then `check_versions`; `check_db` and
`not_for_aiter` say before a run what its merge would say at its end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from orchestrator.command_hints import command
from orchestrator.errors import TunedDBError
from orchestrator.files.faults import listed
from orchestrator.tables.keys import GFX_OF_CU_NUM, Place
from orchestrator.tables.newcomers import Newcomer
from orchestrator.tables.provenance import Record, current_records, read_records
from orchestrator.tables.row_kernels import (
    KERNEL_NAMES,
    MAX_NAME,
    OWNER,
    KernelKind,
    describe_own,
    kernel_of,
    kind_by_names,
    kind_of_record,
    kind_of_row,
)
from orchestrator.tables.table import Table, TableRow, read_table
from worker.families import Family
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

MAX_EXAMPLES = 5
"""Most rows that a message names."""

Chip = tuple[str, ...]
"""(gfx, cu_num) as text: a place begins so."""


def rows_by_kind(table: Table, known: Mapping[Place, Record]) -> dict[KernelKind, list[TableRow]]:
    """The rows of a table by kind, in order. `known`: the records of its rows."""
    rows: dict[KernelKind, list[TableRow]] = {}
    name_columns = [table.header.index(name) for name in KERNEL_NAMES if name in table.header]
    libtype_column = table.header.index("libtype") if "libtype" in table.header else None
    for row in table.rows:
        libtype = "" if libtype_column is None else row.cells[libtype_column]
        kind = kind_by_names(libtype, *[row.cells[i] for i in name_columns])
        if not kind and (record := known.get(row.place)):
            kind = kind_of_record(record.document)
        rows.setdefault(kind, []).append(row)
    return rows


def kind_of_table(table: Table, known: Mapping[Place, Record]) -> tuple[KernelKind, list[TableRow]]:
    """The kind of a table, with its rows of that kind. Raises TunedDBError where it has rows of both."""
    rows = rows_by_kind(table, known)
    own = rows.get("own", [])
    aiter = rows.get("aiter", [])
    if own and aiter:
        what = (
            f"{table.path}: holds rows of AITER's ({len(aiter)}) and of gemmfleet's own tuners ({len(own)}):"
            " AITER stops at the latter"
        )
        way_out = "delete these rows, or take an older version of the table (db undo)"
        raise TunedDBError([what, *list_own_rows(table, own), way_out])
    if own:
        return "own", own
    return ("aiter", aiter) if aiter else ("", [])


def list_own_rows(table: Table, rows: Sequence[TableRow]) -> list[str]:
    """The first rows of our own tuners, by file and line."""
    return listed((f"{table.path}:{row.line}: {describe_own(table.cells(row))}" for row in rows), MAX_EXAMPLES)


def refuse_other_rows(
    table: Table, known: Mapping[Place, Record], best: Sequence[Newcomer], by_facts: Callable[[Newcomer], KernelKind]
) -> None:
    """Refuse newcomers that cannot stand in a table: those of a gfx that a table without a gfx column cannot tell from
    others, those of another kind than its rows, and newcomers of both kinds.

    `by_facts`: the kind of a newcomer by its record, if its kernel names leave it open. Raises TunedDBError, with rows
    and the way out.
    """
    if "gfx" not in table.header:
        _refuse_unclear_chips(table, best)
    table_kind, _ = kind_of_table(table, known)
    by_kind: dict[KernelKind, list[Newcomer]] = {}
    for new in best:
        by_kind.setdefault(kind_of_row(new.cells) or by_facts(new), []).append(new)
    expected = table_kind or ("aiter" if "aiter" in by_kind else "own")
    wrong: KernelKind = "own" if expected == "aiter" else "aiter"
    if wrong not in by_kind or not (table_kind or expected in by_kind):
        return
    what = "is given rows of AITER's and of gemmfleet's own tuners"
    if table_kind:
        what = f"is a table of {OWNER[table_kind]} kernels"
    rows = by_kind[wrong]
    refusal = (
        f"{table.path}: {what}, and {plural(len(rows), 'newcomer is', 'newcomers are')} of {OWNER[wrong]} kernels:"
        " AITER stops at a name that it has no kernel of, so a table is never both"
    )
    examples = listed((f"{new.place}: {new.kernel[:100]}" for new in rows), MAX_EXAMPLES)
    way_out = f"merge them into a table of their own, such as {table_beside(table.path, wrong)}"
    raise TunedDBError([refusal, *examples, way_out])


def _refuse_unclear_chips(table: Table, best: Sequence[Newcomer]) -> None:
    """Raise TunedDBError for newcomers whose gfx is not the one that AITER takes their cu_num for."""
    unclear = set()
    for new in best:
        gfx, cu_num, *_ = new.key
        if gfx != GFX_OF_CU_NUM.get(int(cu_num)):
            unclear.add(f"{gfx} with cu_num {cu_num}")
    if unclear:
        raise TunedDBError(
            f"{table.path}:1: has no gfx column, so rows of {', '.join(sorted(unclear))} cannot be distinguished from"
            " others in it; give the table a gfx column, or merge into another file"
        )


def table_beside(path: Path, word: str) -> Path:
    """A file for rows of the other kind than a table's: beside it, but in no folder whose tables AITER merges."""
    folder = Path() if is_merged_by_aiter(path) else path.parent
    return folder / f"{path.stem}_{word}{path.suffix or '.csv'}"


def is_merged_by_aiter(path: Path) -> bool:
    """True where a table lies in a folder whose tables AITER merges by itself."""
    return path.parent.name in ("configs", "model_configs")


def check_versions(
    path: Path,
    known: Mapping[Place, Record],
    old_places: Collection[Place],
    new: Mapping[Place, Record],
    *,
    allowed: bool,
) -> list[str]:
    """Notes on the images and tuner versions that a table gets.

    `old_places`: of the table's rows; `known`: the records of those that are known; `new`: the records of the rows to
    write. Only chips that `new` has rows of are looked at. A field that no row has is not noted. Raises TunedDBError if
    images or tuner versions are known on both sides and differ, unless that is `allowed`.
    """
    chips = {_chip_of(place) for place in new}
    kept_places = [place for place in old_places if place not in new and _chip_of(place) in chips]
    faults: list[str] = []
    unknown_fields: dict[str, list[str]] = {}  # by the rows whose versions are not known
    way_out = "merge into a table of their own, or give --allow-mixed to `db merge`"
    for field, words in (("image", "images"), ("tuner", "tuner versions")):
        old_versions = _versions_by_chip(field, kept_places, known)
        new_versions = _versions_by_chip(field, new, new)
        for chip in sorted(chips):
            old = set(old_versions[chip]) - {""}
            coming = set(new_versions[chip]) - {""}
            if len(coming) > 1:
                way_out = "give --allow-mixed to `db merge`"  # a table of their own would mix them as well
            if len(coming) > 1 or (old and not coming <= old):
                faults.append(f"{path}: {words} would mix on {_describe_mix(chip, old, coming)}")
        rows = [*_count_unknown("new", new_versions), *_count_unknown("old", old_versions)]
        if rows and (_has_known(old_versions) or _has_known(new_versions)):
            unknown_fields.setdefault(" and ".join(rows), []).append(field)
    if faults and not allowed:
        raise TunedDBError([*faults, way_out])
    return [*faults, *(_note_on_trust(path, rows, fields) for rows, fields in unknown_fields.items())]


def _chip_of(place: Place) -> Chip:
    return tuple(place.split(",", 2)[:2])


def _versions_by_chip(field: str, places: Iterable[Place], records: Mapping[Place, Record]) -> dict[Chip, Counter[str]]:
    """The number of rows of each version, by chip; "" counts the rows whose version is not known."""
    versions: dict[Chip, Counter[str]] = defaultdict(Counter)
    for place in places:
        record = records.get(place)
        versions[_chip_of(place)][record.text(field) if record else ""] += 1
    return versions


def _has_known(versions: Mapping[Chip, Counter[str]]) -> bool:
    return any(set(counts) - {""} for counts in versions.values())


def _describe_mix(chip: Chip, old: set[str], coming: set[str]) -> str:
    gfx, cu_num = chip
    where = gfx if cu_num == "0" else f"{gfx} with cu_num {cu_num}"
    if old:
        return f"{where}: the table's rows are of {_name_some(old)}, the newcomers of {_name_some(coming)}"
    return f"{where}: the newcomers are of {_name_some(coming)}"


def _name_some(versions: Iterable[str]) -> str:
    return and_more([version[:80] for version in sorted(versions)], 3)


def _count_unknown(word: str, versions: Mapping[Chip, Counter[str]]) -> list[str]:
    """`3 of 5 new rows`, if the version of any is not known."""
    unknown = sum(counts[""] for counts in versions.values())
    if not unknown:
        return []
    rows = sum(counts.total() for counts in versions.values())
    return [f"{unknown} of {plural(rows, f'{word} row')}"]


def _note_on_trust(path: Path, rows: str, fields: Sequence[str]) -> str:
    verb = "is" if len(fields) == 1 else "are"
    return f"{path}: the {' and the '.join(fields)} of {rows} {verb} not known: that they match is taken on trust"


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
    kind, rows = kind_of_table(table, current_records(table, read_records(db)))
    if kind and writes and kind != writes:
        name = kernel_of(table.cells(rows[0]))[:MAX_NAME]
        what = (
            f"--db {db}: is a table of {OWNER[kind]} kernels (line {rows[0].line}: {name}), and the tuner {tuner}"
            f" writes {OWNER[writes]}: AITER stops at a name that it has no kernel of, so a table is never both"
        )
        raise TunedDBError([what, f"use a table of their own: --db {table_beside(db, tuner)}"])


def not_for_aiter(tuner: str, nodes: Iterable[tuple[str, str | None]]) -> list[str]:
    """A warning where AMD GPUs, (node, gfx) each, are about to be tuned by a tuner that AITER loads nothing of."""
    amd = [node for node, gfx in nodes if (gfx or "").startswith("gfx")]
    if not amd or recorded_tuner(tuner).produces != "own":
        return []
    return [
        f"warning: {and_more(amd, 4)}: AMD GPUs, and the tuner {tuner} measures kernels of gemmfleet's own: AITER"
        " loads nothing of its table; --tuner aiter writes AITER's"
    ]
