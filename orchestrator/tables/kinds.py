"""Rows that may stand in one tuned table: of one kind, of chips that it tells apart, of one image and tuner version.

AITER stops at a kernel that it does not have. So a table holds rows of AITER's kernels or of our own tuners', never
both. The kernel's name says which; if it is of no known pattern, the row's record of provenance does. A row of unknown
kind goes with either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestrator.errors import TunedDBError
from orchestrator.tables.faults import listed
from orchestrator.tables.policy import Newcomer
from orchestrator.tables.tuned import GFX_OF_CU_NUM, KERNEL_NAMES, NULLS, Place, Table, TableRow
from worker.families import backend_of, kernel_of_aiter, tuner_of
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

if TYPE_CHECKING:
    from orchestrator.tables.records import Record

Kind = Literal["aiter", "own", ""]
FIELD = "kind"
"""The field of a record of provenance."""
SHOWN = 5
OWNER = {"aiter": "AITER's", "own": "gemmfleet's own"}


@lru_cache(50_000)
def kind_by_names(libtype: str, *names: str) -> Kind:
    """The kind by a row's libtype and kernel names, "" where it is unknown."""
    there = [n for n in names if n not in NULLS]
    if libtype.lower() == "replay" or any(tuner_of(n) for n in there):
        return "own"
    if any(kernel_of_aiter(n) for n in there):
        return "aiter"
    return "aiter" if there and libtype and backend_of("", {"libtype": libtype}) else ""


def kind_of(cells: Mapping[str, str]) -> Kind:
    """The kind of a row by its cells."""
    return kind_by_names(cells.get("libtype", ""), *(cells.get(n, "") for n in KERNEL_NAMES))


def kind_in(facts: Mapping[str, object]) -> Kind:
    """The kind of a row by the fields of its record."""
    kind = facts.get(FIELD)
    if kind in ("aiter", "own"):
        return "own" if kind == "own" else "aiter"
    found = recorded_tuner(str(facts.get("tuner") or "").partition(" ")[0]).produces
    return "own" if found == "configs" else found  # AITER's dispatch has none of these names either


def describe_own(cells: Mapping[str, str]) -> str:
    """The owner of a row of our tuners, for a sentence."""
    name = next((cells[n] for n in KERNEL_NAMES if tuner_of(cells.get(n, ""))), "")
    return f"{name[:80]} is a kernel of gemmfleet's tuner {tuner_of(name)}" if name else "is a kernel of our own tuners"


def other_name(path: Path, word: str) -> Path:
    """A file for rows of the other kind than a table's: beside it, but in no folder whose tables AITER merges."""
    return (Path() if in_aiter(path) else path.parent) / f"{path.stem}_{word}{path.suffix or '.csv'}"


def in_aiter(path: Path) -> bool:
    """True where a table lies in a folder whose tables AITER merges by itself."""
    return path.parent.name in ("configs", "model_configs")


def rows_by_kind(table: Table, known: Mapping[Place, Record]) -> dict[Kind, list[TableRow]]:
    """The rows of a table by kind, in order. `known`: the records of its rows."""
    out: dict[Kind, list[TableRow]] = {}
    names = [table.header.index(n) for n in KERNEL_NAMES if n in table.header]
    libtype = table.header.index("libtype") if "libtype" in table.header else None
    for row in table.rows:
        kind = kind_by_names("" if libtype is None else row.cells[libtype], *[row.cells[i] for i in names])
        if not kind and (record := known.get(row.place)):
            kind = kind_in({"tuner": record.tuner, **(record.document() if f'"{FIELD}":' in record.line else {})})
        out.setdefault(kind, []).append(row)
    return out


def kind_of_table(table: Table, known: Mapping[Place, Record]) -> tuple[Kind, list[TableRow]]:
    """The kind of a table, with its rows of that kind. Raises TunedDBError where it has rows of both."""
    found = rows_by_kind(table, known)
    own, aiter = found.get("own", []), found.get("aiter", [])
    if own and aiter:
        raise TunedDBError([
            f"{table.path}: holds rows of AITER's ({len(aiter)}) and of gemmfleet's own tuners ({len(own)}):"
            " AITER stops at the latter",
            *own_rows(table, own),
            "delete these rows, or take an older version of the table (db undo)",
        ])  # fmt: skip
    return ("own", own) if own else ("aiter", aiter) if aiter else ("", [])


def own_rows(table: Table, rows: Sequence[TableRow]) -> list[str]:
    """The first rows of our own tuners, by file and line."""
    return listed((f"{table.path}:{r.line}: {describe_own(table.cells(r))}" for r in rows), SHOWN)


def refuse_other_rows(
    table: Table, known: Mapping[Place, Record], best: Sequence[Newcomer], by_facts: Callable[[Newcomer], Kind]
) -> None:
    """Refuse newcomers that cannot stand in a table: those of another kind than its rows, newcomers of both kinds, and
    those of a gfx that a table without a gfx column cannot tell from others.

    `by_facts`: the kind of a newcomer by its record, if its kernel names leave it open. Raises TunedDBError, with rows
    and the way out.
    """
    odd = {f"{n.key[0]} with cu_num {n.key[1]}" for n in best if GFX_OF_CU_NUM.get(int(n.key[1])) != n.key[0]}
    if odd and "gfx" not in table.header:
        raise TunedDBError(
            f"{table.path}:1: has no gfx column, so rows of {', '.join(sorted(odd))} cannot be distinguished from"
            " others in it; give the table a gfx column, or merge into another file"
        )
    (kind, _), by = kind_of_table(table, known), dict[Kind, list[Newcomer]]()
    for new in best:
        by.setdefault(kind_of(new.cells) or by_facts(new), []).append(new)
    wrong: Kind = "own" if kind == "aiter" or (not kind and "aiter" in by) else "aiter"
    rest = by.get("aiter" if wrong == "own" else "own")
    if wrong not in by or not (kind or rest):
        return
    what = f"is a table of {OWNER[kind]} kernels" if kind else "is given rows of AITER's and of gemmfleet's own tuners"
    raise TunedDBError([
        f"{table.path}: {what}, and {plural(len(by[wrong]), 'newcomer is', 'newcomers are')} of {OWNER[wrong]} kernels:"
        " AITER stops at a name that it has no kernel of, so a table is never both",
        *listed((f"{n.place}: {n.kernel[:100]}" for n in by[wrong]), SHOWN),
        f"merge them into a table of their own, such as {other_name(table.path, wrong)}",
    ])  # fmt: skip


def check_versions(
    path: Path, there: Mapping[Place, Record], places: Collection[Place], new: Mapping[Place, Record], *, allowed: bool
) -> list[str]:
    """Notes on the images and tuner versions that a table gets. `places`: its old rows; `there`: the records of those
    that are known; `new`: the records of the rows to write.

    Raises TunedDBError where image or tuner version are known on both sides and differ, unless that is `allowed`.
    """
    chips = {tuple(place.split(",", 2)[:2]) for place in new}
    begin = tuple(f"{gfx},{cu}," for gfx, cu in chips)
    olds = (p for p in places if p.startswith(begin) and p not in new)
    sides = [Counter(_versions(p, r.get(p)) for p in some) for some, r in ((olds, there), (new, new))]
    faults, unknown = list[str](), dict[str, list[str]]()
    for at, field, words in ((2, "image", "images"), (3, "tuner", "tuner versions")):
        for chip in sorted(chips):
            has, comes = ({known[at] for known in side if known[:2] == chip} - {""} for side in sides)
            if len(comes) > 1 or (has and comes - has):
                what = f"{path}: {words} would mix on {chip[0]}{f' with cu_num {chip[1]}' if chip[1] != '0' else ''}: "
                what += f"the table's rows are of {_named(has)}, the newcomers of" if has else "the newcomers are of"
                faults.append(f"{what} {_named(comes)}")
        rows = [
            f"{unnamed} of {plural(side.total(), f'{word} row')}"
            for side, word in zip(reversed(sides), ("new", "old"), strict=True)
            if (unnamed := sum(n for known, n in side.items() if not known[at]))
        ]
        if rows:
            unknown.setdefault(" and ".join(rows), []).append(field)
    if faults and not allowed:
        raise TunedDBError([*faults, "merge into a table of their own, or give --allow-mixed"])
    notes = [
        f"{path}: the {' and the '.join(fields)} of {rows} {'is' if len(fields) == 1 else 'are'} not known:"
        " that they match is taken on trust"
        for rows, fields in unknown.items()
    ]
    return [*faults, *notes]


def _versions(place: Place, record: Record | None) -> tuple[str, str, str, str]:
    """gfx, cu_num, image and tuner version, "" for what is not known."""
    gfx, cu_num, _ = place.split(",", 2)
    return gfx, cu_num, record.image if record else "", record.tuner if record else ""


def _named(values: Iterable[str]) -> str:
    return and_more([v[:80] for v in sorted(values)], 3)
