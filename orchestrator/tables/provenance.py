"""The record of each row of a tuned table: where it was measured, by what, from which image.

The records lie in `<table>.provenance.jsonl`, one JSON object a line, one line a row, such as

    {"key": "gfx950,256,1,64,128", "us": 4.2, "kernel": "...", "split": "0/0/0", "image": "...", "tuner": "...", ...}

A record is current as long as time and kernel of its row are the same; it is stale otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.errors import TunedDBError
from orchestrator.files.read import MAX_BYTES, read_text
from orchestrator.tables.keys import Place, number_of
from orchestrator.tables.newcomers import Newcomer
from orchestrator.tables.row_kernels import (
    KERNEL_NAMES,
    KIND_FIELD,
    SPLIT_COLUMNS,
    kernel_identity,
    kernel_of_stages,
    kind_of_record,
    kind_of_row,
    split_of,
)
from orchestrator.tables.table import Table
from worker.families import Family
from worker.text import plural

Facts = Callable[[Newcomer], Mapping[str, Any]]
"""The facts of a newcomer's measurement: the fields of its record (docs/reference/files.md)."""


class Record(NamedTuple):
    """The record of one row."""

    place: Place
    us: float | None
    """The time that the row had when it was measured."""
    document: Mapping[str, Any]
    """The line, parsed."""
    line: str
    """The line as it is in the file, without its end."""

    def text(self, name: str) -> str:
        """A field as text, "" if it is not known."""
        return str(self.document.get(name) or "")


def records_path(table: Path) -> Path:
    """The file beside a table."""
    return table.with_name(table.name + ".provenance.jsonl")


def read_records(table: Path) -> dict[Place, Record]:
    """The records beside a table; none where there is no file. Raises TunedDBError for a file that is none of ours."""
    path = records_path(table)
    if not path.exists():
        return {}
    records: dict[Place, Record] = {}
    for number, text in enumerate(read_text(path, MAX_BYTES, TunedDBError).split("\n"), 1):
        line = text.strip()
        if not line:
            continue
        try:
            record = _make_record(json.loads(line), line)
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            what = "is not a record of a tuned row; mend the line, or move the file away and lose its records"
            raise TunedDBError(f"{path}:{number}: {what}") from e
        records[record.place] = record
    return records


def _make_record(document: Mapping[str, Any], line: str) -> Record:
    us = document.get("us")
    if not isinstance(us, float):
        us = number_of(str(us))
    return Record(document["key"], us, document, line)


def current_records(table: Table, records: Mapping[Place, Record]) -> dict[Place, Record]:
    """The records that say what their rows are now. The others are stale."""
    if not records:
        return {}
    current: dict[Place, Record] = {}
    kernel_cells = _kernel_cells_of(table.header)
    kernels: dict[tuple[str, ...], tuple[str, str]] = {}
    """Name and split by a row's cells: few are distinct in a table."""
    for row in table.rows:
        record = records.get(row.place)
        if record is None or record.us != row.us:
            continue
        cells = kernel_cells((*row.cells, ""))
        if cells not in kernels:
            kernels[cells] = kernel_of_stages(cells[: len(KERNEL_NAMES)]), split_of(cells[len(KERNEL_NAMES) :])
        name, split = kernels[cells]
        if record.text("kernel") == name and (not name or record.text("split") == split):
            current[row.place] = record
    return current


def _kernel_cells_of(header: tuple[str, ...]) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    """Picks the cells of KERNEL_NAMES and SPLIT_COLUMNS out of a row's cells with one empty cell behind them, which
    stands for every column that the header lacks."""
    index = {name: i for i, name in enumerate(header)}
    return itemgetter(*(index.get(name, len(header)) for name in (*KERNEL_NAMES, *SPLIT_COLUMNS)))


def describe_stale(table: Path, records: Mapping[Place, Record], current: Mapping[Place, Record]) -> str:
    """A sentence on the records whose row has changed or gone; "" if all are current."""
    stale = len(records) - len(current)
    if not stale:
        return ""
    return f"{records_path(table).name}: {plural(stale, 'record')} without a row: it is gone or was changed by hand"


def spread_of(record: Record | None) -> float:
    """The relative spread in a record, 0 where none is known."""
    if record is None:
        return 0.0
    return max(0.0, number_of(str(record.document.get("spread"))) or 0.0)


def new_record(new: Newcomer, family: Family, facts: Mapping[str, Any]) -> Record:
    """The record of a newcomer that is now a row. Unknown facts are left out."""
    _, name, split = kernel_identity(new.cells, family.name) or ("", "", "")
    document: dict[str, Any] = {"key": new.place, "us": number_of(new.cells.get("us", "")), "kernel": name}
    document["split"] = split
    for field in ("image", "tuner"):
        document[field] = str(facts.get(field) or "")
    for field, value in facts.items():
        if field not in document and value not in (None, "", {}, []):
            document[field] = value
    if kind := kind_of_row(new.cells) or kind_of_record(facts):
        document[KIND_FIELD] = kind
    line = json.dumps(document, separators=(",", ":"), ensure_ascii=False, default=str)
    return _make_record(document, line)
