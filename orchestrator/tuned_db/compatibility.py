"""Rows that may stand in one tuned table: never kernels of AITER's and of our tuners, never chips that its columns
do not distinguish, and images or tuner versions only where the user allows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from orchestrator.command_hints import command
from orchestrator.errors import TunedDBError
from orchestrator.tables.faults import listed
from orchestrator.tables.tuned import (
    GFX_OF_CU_NUM,
    KERNEL_NAMES,
    TAG,
    Place,
    Table,
    TableRow,
    kernel_of,
    key_dict,
    read_table,
)
from orchestrator.tuned_db.kinds import (
    FIELD,
    Kind,
    describe_own,
    kind_by_names,
    kind_in,
    kind_of,
    other_name,
)
from orchestrator.tuned_db.merge_policy import Newcomer, Rejected
from orchestrator.tuned_db.records import Record, known_records
from worker.families import Family
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

SHOWN = 5
_OWNER = {"aiter": "AITER's", "own": "gemmfleet's own"}
_VERSIONS = {"image": "images", "tuner": "tuner versions"}
"""The fields of records.KNOWN, in its order."""


class KindError(TunedDBError):
    """Rows of AITER's and of our own tuners in one table."""


class MixedError(TunedDBError):
    """The newcomers are known to be of another image or tuner version than the table's rows."""


def check_versions(
    path: Path, there: Mapping[Place, Record], places: Collection[Place], new: Mapping[Place, Record], *, allowed: bool
) -> list[str]:
    """Notes on the images and tuner versions that a table gets. `places`: its old rows; `there`: the records of those
    that are known; `new`: the records of the rows to write.

    Raises MixedError where image or tuner version are known on both sides and differ, unless that is `allowed`.
    """
    faults: list[str] = []
    unknown: dict[str, list[str]] = {}
    chips = {
        f"{gfx} with cu_num {cu}" if cu != "0" else gfx: f"{gfx},{cu},"
        for gfx, cu in {tuple(p.split(",", 2)[:2]) for p in new}
    }
    old = {
        chip: Counter([_versions(there.get(p)) for p in places if p.startswith(at) and p not in new])
        for chip, at in chips.items()
    }
    coming = {chip: Counter([_versions(r) for p, r in new.items() if p.startswith(at)]) for chip, at in chips.items()}
    for at, (field, words) in enumerate(_VERSIONS.items()):
        for chip in sorted(chips):
            has, comes = ({known[at] for known in side[chip]} - {""} for side in (old, coming))
            if len(comes) > 1 or (has and comes - has):
                what = f"{path}: {words} would mix on {chip}: "
                what += f"the table's rows are of {_named(has)}, the newcomers of" if has else "the newcomers are of"
                faults.append(f"{what} {_named(comes)}")
        sides = [
            f"{unknown_rows} of {plural(sum(map(Counter.total, side.values())), f'{word} row')}"
            for side, word in ((coming, "new"), (old, "old"))
            if (unknown_rows := sum(n for counts in side.values() for kind, n in counts.items() if not kind[at]))
        ]
        if sides:
            unknown.setdefault(" and ".join(sides), []).append(field)
    if faults and not allowed:
        raise MixedError([*faults, "merge into a table of their own, or give --allow-mixed"])
    notes = [
        f"{path}: the {' and the '.join(fields)} of {sides} {'is' if len(fields) == 1 else 'are'} not known:"
        " that they match is taken on trust"
        for sides, fields in unknown.items()
    ]
    return [*faults, *notes]


def _versions(record: Record | None) -> tuple[str, str]:
    """Image and tuner version, "" for what is not known."""
    return (record.image, record.tuner) if record else ("", "")


def _named(values: Iterable[str]) -> str:
    return and_more([v[:80] for v in sorted(values)], 3)


def without_misplaced_tags(
    table: Table, best: Sequence[Newcomer], family: Family
) -> tuple[list[Newcomer], list[Rejected]]:
    """AITER counts `_tag` to the key: a row with one has no place in a table without the column."""
    if TAG in table.header:
        return list(best), []
    bad = [
        Rejected(key_dict(n.key, family), n.us, n.kernel, f"it has the {TAG} {n.tag}, and the table has no such column")
        for n in best
        if n.tag
    ]
    return [n for n in best if not n.tag], bad


def refuse_other_chips(table: Table, best: Sequence[Newcomer]) -> None:
    """Refuse rows of another gfx than cu_num implies in a table without a gfx column. Raises TunedDBError."""
    if "gfx" in table.header:
        return
    odd = sorted({(str(n.key[0]), int(n.key[1])) for n in best if GFX_OF_CU_NUM.get(int(n.key[1])) != n.key[0]})
    if odd:
        which = ", ".join(f"{gfx} with cu_num {cu}" for gfx, cu in odd)
        raise TunedDBError(
            f"{table.path}:1: has no gfx column, so rows of {which} cannot be distinguished from others in it;"
            " give the table a gfx column, or merge into another file"
        )


def rows_by_kind(table: Table, known: Mapping[str, Record]) -> dict[Kind, list[TableRow]]:
    """The rows of a table by kind, in order."""
    out: dict[Kind, list[TableRow]] = {}
    names = [table.header.index(n) for n in KERNEL_NAMES if n in table.header]
    libtype = table.header.index("libtype") if "libtype" in table.header else None
    for row in table.rows:
        cells = row.cells
        kind = kind_by_names("" if libtype is None else cells[libtype], *[cells[i] for i in names])
        out.setdefault(kind or _kind_in_record(known.get(row.place)), []).append(row)
    return out


def _kind_in_record(record: Record | None) -> Kind:
    if record is None:
        return ""
    return kind_in({"tuner": record.tuner, **(record.document() if f'"{FIELD}":' in record.line else {})})


def refuse_mixture(path: Path, table: Table, known: Mapping[str, Record]) -> Kind:
    """The kind of a table. Raises KindError where it has rows of both."""
    found = rows_by_kind(table, known)
    own = found.get("own", [])
    if own and "aiter" in found:
        raise KindError([
            f"{path}: holds rows of AITER's ({len(found['aiter'])}) and of gemmfleet's own tuners ({len(own)}):"
            " AITER stops at the latter",
            *listed((f"{path}:{r.line}: {describe_own(table.cells(r))}" for r in own), SHOWN),
            "delete these rows, or take an older version of the table (db undo)",
        ])  # fmt: skip
    return "own" if own else "aiter" if "aiter" in found else ""


def refuse_other_kind(
    path: Path,
    table: Table,
    known: Mapping[str, Record],
    best: Sequence[Newcomer],
    by_facts: Callable[[Newcomer], Kind],
) -> None:
    """Raise KindError, with rows and the way out, for newcomers of another kind than the table's or of both kinds.

    `by_facts`: the kind of a newcomer by its record, where its kernel names leave it open.
    """
    kind = refuse_mixture(path, table, known)
    by: dict[Kind, list[Newcomer]] = {}
    for new in best:
        by.setdefault(kind_of(new.cells) or by_facts(new), []).append(new)
    wrong: Kind = "own" if kind == "aiter" or (not kind and "aiter" in by) else "aiter"
    rest = by.get("aiter" if wrong == "own" else "own")
    if wrong not in by or not (kind or rest):
        return
    what = f"is a table of {_OWNER[kind]} kernels" if kind else "is given rows of AITER's and of gemmfleet's own tuners"
    raise KindError([
        f"{path}: {what}, and {plural(len(by[wrong]), 'newcomer is', 'newcomers are')} of {_OWNER[wrong]} kernels:"
        " AITER stops at a name that it has no kernel of, so a table is never both",
        *listed((f"{n.place}: {n.kernel[:100]}" for n in by[wrong]), SHOWN),
        f"merge them into a table of their own, such as {other_name(path, wrong)}",
    ])  # fmt: skip


def check_db(db: Path, family: Family, tuner: str) -> None:
    """Raise TunedDBError where the merge at the run's end would be refused for what is known now."""
    if recorded_tuner(tuner).produces == "configs":
        raise TunedDBError(
            f"--db {db}: the tuner {tuner} writes config files, and no table names them; run it without --db, then: "
            + command("configs merge RUN --into TREE")
        )
    if not db.parent.is_dir():
        raise TunedDBError(f"--db {db}: there is no folder {db.parent}; make it first: mkdir -p {db.parent}")
    if not db.exists():
        return
    if not db.is_file():
        raise TunedDBError(f"--db {db}: is no file; name the table itself, such as {db / family.tuned_csv}")
    table = read_table(db, family)
    known = known_records(table)
    has, writes = refuse_mixture(db, table, known), recorded_tuner(tuner).produces
    if not has or not writes or has == writes:
        return
    first = rows_by_kind(table, known)[has][0]
    name = kernel_of(table.cells(first))
    whose, what = ("AITER's", "gemmfleet's own kernels") if has == "aiter" else ("gemmfleet's own kernels", "AITER's")
    raise KindError([
        f"--db {db}: is a table of {whose} (line {first.line}: {name[:80]}), and the tuner {tuner} writes {what}:"
        " AITER stops at a name that it has no kernel of, so a table is never both",
        f"use a table of their own: --db {other_name(db, tuner)}",
    ])  # fmt: skip


def not_for_aiter(tuner: str, nodes: Iterable[tuple[str, str | None]]) -> list[str]:
    """A warning where AMD GPUs, (node, gfx) each, are about to be tuned by a tuner that AITER loads nothing of."""
    amd = [node for node, gfx in nodes if (gfx or "").startswith("gfx")]
    if not amd or recorded_tuner(tuner).produces != "own":
        return []
    return [
        f"warning: {and_more(amd, 4)}: AMD GPUs, and the tuner {tuner} measures kernels of gemmfleet's own: its table"
        " is none that AITER loads; --tuner aiter writes AITER's"
    ]
