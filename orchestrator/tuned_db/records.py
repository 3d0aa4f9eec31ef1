"""Provenance records of a tuned table's rows: `<table>.provenance.jsonl`, one JSON object a line, one line a row.

Each line begins with `key, us, kernel, split, image, tuner`, so that a hundred thousand of them are looked through
without being parsed. A record is current as long as time and kernel of its row are the same; it is stale otherwise.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.errors import TunedDBError
from orchestrator.tables.open import text_lines
from orchestrator.tables.tuned import KERNEL_NAMES, Place, Table, TableRow, kernel_of_stages, number_of
from orchestrator.tuned_db.kinds import FIELD, kind_in, kind_of
from orchestrator.tuned_db.merge_policy import NUMBERS, Newcomer, identity, split_of
from worker.families import Family

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


@dataclass(slots=True)
class Records:
    """The records of a table by place."""

    path: Path
    by_place: dict[str, Record] = field(default_factory=dict)

    def lines(self, places: Iterable[Place]) -> list[str]:
        """The lines of a file with the records of these places, in their order."""
        return [self.by_place[place].line + "\n" for place in places if place in self.by_place]


def records_path(table: Path) -> Path:
    """The file beside a table."""
    return table.with_name(table.name + SUFFIX)


def read_records(table: Path) -> Records:
    """The records beside a table; none where there is no file. Raises TunedDBError for a file that is none of ours."""
    path = records_path(table)
    out = Records(path)
    if not path.exists():
        return out
    for n, line in enumerate(text_lines(path), 1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        record = _scan(line) or _parsed(path, n, line)
        out.by_place[record.place] = record
    return out


def current_records(header: Sequence[str], rows: Mapping[Place, TableRow], records: Records) -> dict[Place, Record]:
    """The records that are current."""
    if not records.by_place:
        return {}
    at = {name: i for i, name in enumerate(header)}
    names = [at[n] for n in KERNEL_NAMES if n in at]
    numbers = [at.get(n, len(header)) for n in NUMBERS]
    texts_of: Callable[[tuple[str, ...]], tuple[str, ...]] = itemgetter(*numbers)
    padded = max(numbers) == len(header)
    alone = names[0] if len(names) == 1 else None
    splits: dict[tuple[str, ...], str] = {}
    out = {}
    for place, record in records.by_place.items():
        row = rows.get(place)
        if row is None or record.us != row.us:
            continue
        cells = row.cells
        kernel = cells[alone] if alone is not None and record.kernel else kernel_of_stages(cells[i] for i in names)
        if record.kernel != kernel:
            continue
        texts = texts_of((*cells, "") if padded else cells)
        split = splits.get(texts)
        if split is None:
            split = splits[texts] = split_of(texts)
        if record.split == split or not record.kernel:
            out[place] = record
    return out


def known_records(table: Table) -> dict[Place, Record]:
    """The records beside a table that are current. Raises TunedDBError."""
    return current_records(table.header, {r.place: r for r in table.rows}, read_records(table.path))


def record_of_newcomer(records: Records, new: Newcomer, family: Family) -> Record | None:
    """The record of a row of the table that is merged into another."""
    record = records.by_place.get(new.place)
    kernel = identity(new.cells, family.name)
    same = record is not None and record.us == new.us and (record.kernel, record.split) == (kernel or ("", "", ""))[1:]
    return record if same else None


def spread_of(record: Record | None) -> float:
    """The relative spread in a record, 0 where none is known."""
    if record is None or '"spread":' not in record.line:
        return 0.0
    spread = record.document().get("spread")
    if isinstance(spread, bool) or not isinstance(spread, (int, float)) or not math.isfinite(spread):
        return 0.0
    return max(0.0, float(spread))


def new_record(new: Newcomer, family: Family, facts: Mapping[str, Any]) -> Record:
    """The record of a newcomer that is now a row. What is not known of it is left out."""
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


def _scan(line: str) -> Record | None:
    """The beginning of a line as we write it, without escapes; None for any other line."""
    found = _BEGIN.match(line)
    if found is None:
        return None
    place, us, kernel, split, image, tuner = found.groups()
    return Record(place, number_of(us), kernel, split, image, tuner, line)


def _parsed(path: Path, n: int, line: str) -> Record:
    """A line that something else has written in another order of its fields."""
    try:
        raw = json.loads(line)
        place = raw["key"]
    except (ValueError, KeyError, TypeError, RecursionError):
        place = None
    if not isinstance(place, str):
        raise TunedDBError(
            f"{path}:{n}: is no record of a tuned row; mend the line, or move the file away and lose what it records"
        )
    us = raw.get("us")
    usable = isinstance(us, (int, float)) and not isinstance(us, bool)
    first = {"key": place, "us": us if usable else None} | {k: str(raw.get(k) or "") for k in _FIRST[2:]}
    return _record(first | {k: v for k, v in raw.items() if k not in _FIRST})


def _record(document: Mapping[str, Any]) -> Record:
    line = json.dumps(document, separators=(",", ":"), ensure_ascii=False, default=str)
    place, us, kernel, split, image, tuner = (document[k] for k in _FIRST)
    return Record(place, us, kernel, split, image, tuner, line)
