"""Provenance records of a tuned table's rows: `<table>.provenance.jsonl`, one JSON object a line, one line a row.

Each line begins with `key, us, kernel, split, image, tuner`, so that a hundred thousand of them are looked through
without being parsed. A record is current as long as time and kernel of its row are the same; it is stale otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.errors import TunedDBError
from orchestrator.tables.kinds import FIELD, kind_in, kind_of
from orchestrator.tables.open import text_lines
from orchestrator.tables.policy import NUMBERS, Newcomer, identity, split_of
from orchestrator.tables.tuned import KERNEL_NAMES, Place, Table, kernel_of_stages, number_of
from worker.families import Family
from worker.text import plural

Facts = Callable[[Newcomer], Mapping[str, Any]]
"""The facts of a newcomer's measurement: the fields of its record (docs/reference/files.md)."""
SUFFIX = ".provenance.jsonl"
KNOWN = ("image", "tuner")
"""Fields that must not differ silently between rows of a table, where they are known."""
_FIRST = ("key", "us", "kernel", "split", *KNOWN)
_BEGIN = re.compile(
    "{" + ",".join(f'"{name}":' + ("([^,]*)" if name == "us" else r'"([^"\\]*)"') for name in _FIRST) + "[,}]"
)
"""The beginning of a line that we wrote, where none of these texts has an escape."""


class Record(NamedTuple):
    """The beginning of a line, and the whole of it."""

    place: str
    us: float | None
    kernel: str
    split: str
    image: str
    tuner: str
    line: str

    def document(self) -> dict[str, Any]:
        """All of it."""
        return dict(json.loads(self.line))


def records_path(table: Path) -> Path:
    """The file beside a table."""
    return table.with_name(table.name + SUFFIX)


def read_records(table: Path) -> dict[Place, Record]:
    """The records beside a table; none where there is no file. Raises TunedDBError for a file that is none of ours."""
    path, out = records_path(table), dict[Place, Record]()
    for n, line in enumerate(text_lines(path) if path.exists() else (), 1):
        if line := line.strip():
            if found := _BEGIN.match(line):
                place, us, kernel, split, image, tuner = found.groups()
                out[place] = Record(place, number_of(us), kernel, split, image, tuner, line)
            else:
                record = _parsed(path, n, line)
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
    for row in table.rows:
        record = records.get(row.place)
        if record is not None and record.us == row.us:
            kernel, split = _kernel(texts((*row.cells, "")))
            if record.kernel == kernel and (record.split == split or not kernel):
                out[row.place] = record
    return out


@lru_cache(10_000)
def _kernel(texts: tuple[str, ...]) -> tuple[str, str]:
    """Name and split of a kernel by the cells of KERNEL_NAMES and NUMBERS."""
    return kernel_of_stages(texts[: len(KERNEL_NAMES)]), split_of(texts[len(KERNEL_NAMES) :])


def stale(table: Path, records: Mapping[Place, Record], known: Mapping[Place, Record]) -> str:
    """A sentence on the records whose row has changed or gone; "" if all are current."""
    n, name = len(records) - len(known), records_path(table).name
    return f"{name}: {plural(n, 'record')} without a row: it is gone or was changed by hand" if n else ""


def spread_of(record: Record | None) -> float:
    """The relative spread in a record, 0 where none is known."""
    if record is None or '"spread":' not in record.line:
        return 0.0
    return max(0.0, number_of(str(record.document().get("spread"))) or 0.0)


def new_record(new: Newcomer, family: Family, facts: Mapping[str, Any]) -> Record:
    """The record of a newcomer that is now a row. Unknown facts are left out."""
    kernel = identity(new.cells, family.name)
    first = {
        "key": new.place,
        "us": number_of(new.cells.get("us", "")),
        "kernel": kernel[1] if kernel else "",
        "split": kernel[2] if kernel else "",
        **{name: str(facts.get(name) or "") for name in KNOWN},
    }
    rest = {k: v for k, v in facts.items() if k not in _FIRST and v not in (None, "", {}, [])}
    rest |= {FIELD: kind} if (kind := kind_of(new.cells) or kind_in(facts)) else {}
    return _record(first | rest)


def _parsed(path: Path, n: int, line: str) -> Record:
    """A line that something else has written in another order of its fields."""
    try:
        raw = json.loads(line)
        place = raw["key"]
    except (ValueError, KeyError, TypeError, RecursionError):
        place = None
    if not isinstance(place, str):
        raise TunedDBError(
            f"{path}:{n}: is not a record of a tuned row; mend the line, or move the file away and lose its records"
        )
    us = raw.get("us")
    usable = isinstance(us, (int, float)) and not isinstance(us, bool)
    first = {"key": place, "us": us if usable else None} | {k: str(raw.get(k) or "") for k in _FIRST[2:]}
    return _record(first | {k: v for k, v in raw.items() if k not in _FIRST})


def _record(document: Mapping[str, Any]) -> Record:
    line = json.dumps(document, separators=(",", ":"), ensure_ascii=False, default=str)
    place, us, kernel, split, image, tuner = (document[k] for k in _FIRST)
    return Record(place, us, kernel, split, image, tuner, line)
