"""The kind of a row's kernel, the rows that may stand in one tuned table, and the record of each row.

AITER stops at a kernel that it does not have. So a table holds rows of AITER's kernels or of our own tuners', never
both. The kernel's name says which; if it is of no known pattern, the row's record of provenance does. A row of unknown
kind goes with either. Rows of chips that the table does not tell apart, of several images or tuner versions do not mix.

The records lie in `<table>.provenance.jsonl`, one JSON object a line, one line a row. A record is current as long as
time and kernel of its row are the same; it is stale otherwise.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from orchestrator.errors import TunedDBError
from orchestrator.files.faults import listed
from orchestrator.files.read import MAX_BYTES, read_text
from orchestrator.tables.policy import NUMBERS, Newcomer, identity, split_of
from orchestrator.tables.tuned import GFX_OF_CU_NUM, KERNEL_NAMES, Place, Table, TableRow, kernel_of_stages, number_of
from worker.families import NULLS, Family, backend_of, kernel_of_aiter, tuner_of
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

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
            kind = kind_in(record.document)
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
    that are known; `new`: the records of the rows to write. A field that no row has is not noted.

    Raises TunedDBError where image or tuner version are known on both sides and differ, unless that is `allowed`.
    """
    chips = {tuple(place.split(",", 2)[:2]) for place in new}
    begins = [(chip, f"{','.join(chip)},") for chip in chips]
    sides = [
        Counter((*chip, *_versions(r.get(p))) for chip, begin in begins for p in some if p.startswith(begin))
        for some, r in (([p for p in places if p not in new], there), (new, new))
    ]
    faults, unknown, apart = list[str](), dict[str, list[str]](), "merge into a table of their own, or "
    for at, field, words in ((2, "image", "images"), (3, "tuner", "tuner versions")):
        for chip in sorted(chips):
            has, comes = ({known[at] for known in side if known[:2] == chip} - {""} for side in sides)
            if len(comes) > 1 or (has and comes - has):
                what = f"{path}: {words} would mix on {chip[0]}{f' with cu_num {chip[1]}' if chip[1] != '0' else ''}: "
                what += f"the table's rows are of {_named(has)}, the newcomers of" if has else "the newcomers are of"
                faults.append(f"{what} {_named(comes)}")
                apart = "" if len(comes) > 1 else apart
        rows = [
            f"{unnamed} of {plural(side.total(), f'{word} row')}"
            for side, word in zip(reversed(sides), ("new", "old"), strict=True)
            if (unnamed := sum(n for known, n in side.items() if not known[at]))
        ]
        if rows and any(known[at] for side in sides for known in side):
            unknown.setdefault(" and ".join(rows), []).append(field)
    if faults and not allowed:
        raise TunedDBError([*faults, f"{apart}give --allow-mixed to `db merge`"])
    notes = [
        f"{path}: the {' and the '.join(fields)} of {rows} {'is' if len(fields) == 1 else 'are'} not known:"
        " that they match is taken on trust"
        for rows, fields in unknown.items()
    ]
    return [*faults, *notes]


def _versions(record: Record | None) -> tuple[str, str]:
    """Image and tuner version, "" for what is not known."""
    return (record.text("image"), record.text("tuner")) if record else ("", "")


def _named(values: Iterable[str]) -> str:
    return and_more([v[:80] for v in sorted(values)], 3)


Facts = Callable[[Newcomer], Mapping[str, Any]]
"""The facts of a newcomer's measurement: the fields of its record (docs/reference/files.md)."""


class Record(NamedTuple):
    """A line, parsed and as it is."""

    place: str
    us: float | None
    document: Mapping[str, Any]
    line: str

    def text(self, name: str) -> str:
        """A field as text, "" where it is not known."""
        return str(self.document.get(name) or "")


def records_path(table: Path) -> Path:
    """The file beside a table."""
    return table.with_name(table.name + ".provenance.jsonl")


def read_records(table: Path) -> dict[Place, Record]:
    """The records beside a table; none where there is no file. Raises TunedDBError for a file that is none of ours."""
    path, out = records_path(table), dict[Place, Record]()
    text = read_text(path, MAX_BYTES, TunedDBError) if path.exists() else ""
    for n, line in enumerate(text.split("\n"), 1):
        if line := line.strip():
            try:
                record = _record(json.loads(line), line)
            except (ValueError, KeyError, TypeError, RecursionError) as e:
                what = "is not a record of a tuned row; mend the line, or move the file away and lose its records"
                raise TunedDBError(f"{path}:{n}: {what}") from e
            out[record.place] = record
    return out


def current_records(table: Table, records: Mapping[Place, Record]) -> dict[Place, Record]:
    """The records that say what their rows are now. The others are stale."""
    if not records:
        return {}
    at, out = {name: i for i, name in enumerate(table.header)}, dict[Place, Record]()
    texts: Callable[[tuple[str, ...]], tuple[str, ...]] = itemgetter(
        *(at.get(n, len(table.header)) for n in (*KERNEL_NAMES, *NUMBERS))
    )
    known: dict[tuple[str, ...], tuple[str, str]] = {}  # kernel and split by those cells: few are distinct
    for row in table.rows:
        record = records.get(row.place)
        if record is not None and record.us == row.us:
            cells = texts((*row.cells, ""))
            kernel, split = known.get(cells) or known.setdefault(cells, _kernel(cells))
            get = record.document.get
            if (get("kernel") or "") == kernel and (not kernel or str(get("split") or "") == split):
                out[row.place] = record
    return out


def _kernel(texts: tuple[str, ...]) -> tuple[str, str]:
    """Name and split of a kernel by the cells of KERNEL_NAMES and NUMBERS."""
    return kernel_of_stages(texts[: len(KERNEL_NAMES)]), split_of(texts[len(KERNEL_NAMES) :])


def stale(table: Path, records: Mapping[Place, Record], known: Mapping[Place, Record]) -> str:
    """A sentence on the records whose row has changed or gone; "" if all are current."""
    n, name = len(records) - len(known), records_path(table).name
    return f"{name}: {plural(n, 'record')} without a row: it is gone or was changed by hand" if n else ""


def spread_of(record: Record | None) -> float:
    """The relative spread in a record, 0 where none is known."""
    return max(0.0, number_of(str(record.document.get("spread"))) or 0.0) if record else 0.0


def new_record(new: Newcomer, family: Family, facts: Mapping[str, Any]) -> Record:
    """The record of a newcomer that is now a row. Unknown facts are left out."""
    kernel = identity(new.cells, family.name) or ("", "", "")
    document = {"key": new.place, "us": number_of(new.cells.get("us", "")), "kernel": kernel[1], "split": kernel[2]}
    document |= {name: str(facts.get(name) or "") for name in ("image", "tuner")}
    document |= {k: v for k, v in facts.items() if k not in document and v not in (None, "", {}, [])}
    document |= {FIELD: kind} if (kind := kind_of(new.cells) or kind_in(facts)) else {}
    return _record(document, json.dumps(document, separators=(",", ":"), ensure_ascii=False, default=str))


def _record(document: Mapping[str, Any], line: str) -> Record:
    us = document.get("us")
    return Record(document["key"], us if isinstance(us, float) else number_of(str(us)), document, line)
