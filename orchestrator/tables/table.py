"""A tuned table as AITER has it, read by column name; every byte of its lines is kept.

    gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio
    gfx950,256,1,2112,7168,ck,15,0,9.6,a8w8_blockscale_1x128x128_...,3.15,1578.0,0.0

`read_table` reads a whole table and refuses one with faults. A `TableReader` gives the rows one by one, for files of
any size and for checks that go on after a fault. AITER's tuners write `Null` for a missing value. Columns that AITER
calls otherwise have our names here (`Family.from_aiter`). `keys.py` says what the key of a row is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import TunedDBError
from orchestrator.files.faults import MAX_FAULTS, listed
from orchestrator.files.read import MAX_BYTES, csv_records
from orchestrator.tables.keys import (
    GFX_OF_CU_NUM,
    MAX_SHOWN,
    TAG,
    Key,
    KeyFault,
    KeyReader,
    Place,
    number_of,
    place_of,
    repetitions,
)
from worker.families import NULLS, Family
from worker.protocol import FIELDS
from worker.text import plural

_INFINITE = ("inf", "infinity")

SHOWN = tuple(field.name for field in FIELDS if field.shown)
PROFILE_EXTRA = ("attempt", "node", "slot", *SHOWN, "winner", "unconfirmed")
"""Columns of profile.csv beyond the tuned table's. winner: 1 where this row settled its shape; unconfirmed: 1 where
candidates were left out then that faulted on one slot alone."""
FAILED_EXTRA = ("reason", "detail", "node", "attempts")
"""Columns of failed.csv beyond the key's."""


class TableRow(NamedTuple):
    """A row of a table."""

    line: int
    """Its first line in the file, from 1."""
    part: int
    """Its index in `Table.parts`."""
    cells: tuple[str, ...]
    """Its cells, in the order of `Table.header`."""
    key: Key
    tag: str
    """Its `_tag`, "" without one."""
    us: float | None
    """Its time in microseconds; None for a row that names no time."""
    place: Place
    """Key and tag as one text (`place_of`)."""


@dataclass(frozen=True, slots=True)
class Table:
    """A file as read."""

    path: Path
    family: Family
    header: tuple[str, ...]
    """Its columns, by our names."""
    parts: tuple[str, ...]
    """Its records as they are, the header first; joined they are its text."""
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...]
    """Sentences for the user."""

    def cells(self, row: TableRow) -> dict[str, str]:
        """The cells of a row by column name."""
        return dict(zip(self.header, row.cells, strict=True))

    @property
    def newline(self) -> str:
        """The line end of its header."""
        return "\r\n" if self.parts[0].endswith("\r\n") else "\n"


class TableReader:
    """Reads a tuned table or profile record by record: iterate over `records`, and call `row` on the cells of each.

    `header` are the columns by our names, and `head` is the first line. `records` gives (line, text, cells) of each
    record below it, as `csv_records` does (with the same `cap`). A `lenient` reader takes what pandas takes, as AITER
    ships such tables: it fills up short rows, and a time may be anything.
    """

    def __init__(self, path: Path, family: Family, *, cap: int | None = MAX_BYTES, lenient: bool = False) -> None:
        """Raises TunedDBError for a file that is empty, or that lacks a column."""
        self.path = path
        self.lenient = lenient
        self.records = csv_records(path, cap)
        _, self.head, cells = next(self.records, (0, "", None))
        if cells is None:
            header = ",".join(family.aiter_header)
            raise TunedDBError(f"{path}: is empty; delete it (a merge creates it), or give it the header {header}")
        self.header = read_header(path, cells, family)
        self.us_index = self.header.index("us")
        self._key = KeyReader(self.header, family)
        self._tag_index = self._index_of(TAG)
        self._gfx_index = self._index_of("gfx")
        self._rows_without_gfx: Counter[int] = Counter()
        """The number of such rows by their cu_num."""

    def _index_of(self, column: str) -> int | None:
        return self.header.index(column) if column in self.header else None

    def row(self, line: int, part: int, cells: Sequence[str]) -> TableRow:
        """The row in the cells of a record, which begins at `line`. `part`: its index among the table's parts, for who
        keeps these. Raises KeyFault with what is wrong with it."""
        if self.lenient:
            cells = fill_up(cells, len(self.header))
        elif len(cells) != len(self.header):
            raise KeyFault(f"has {plural(len(cells), 'cell')}, the header {len(self.header)}; was a write cut short?")
        key = self._key(cells)
        us_text = cells[self.us_index]
        us = number_of(us_text)
        if us is None and not (self.lenient or _says_no_time(us_text)):
            raise KeyFault(f"us is {us_text[:MAX_SHOWN]!r}, not a number")
        if us is not None and us <= 0:
            us = None
        if self._gfx_index is None or cells[self._gfx_index] in NULLS:
            self._rows_without_gfx[int(key[1])] += 1
        tag = ""
        if self._tag_index is not None and cells[self._tag_index] not in NULLS:
            tag = cells[self._tag_index]
        return TableRow(line, part, tuple(cells), key, tag, us, place_of(key, tag))

    def notes(self) -> list[str]:
        """Notes on the rows read that have no gfx."""
        notes = []
        for cu_num, count in sorted(self._rows_without_gfx.items()):
            rows = f"{self.path}: {plural(count, 'row has', 'rows have')} no gfx"
            if gfx := GFX_OF_CU_NUM.get(cu_num):
                notes.append(f"{rows}: taken as {gfx} because cu_num is {cu_num}, as AITER does")
                continue
            if cu_num:
                rows += f" and none follows from cu_num {cu_num}"
            notes.append(f"{rows}: they match nothing and stay as they are")
        return notes


def fill_up(cells: Sequence[str], width: int) -> list[str]:
    """The cells of a row as pandas reads them: filled up with nothing, or cut off, at the width of the header."""
    return [*cells, *[""] * (width - len(cells))][:width]


def _says_no_time(text: str) -> bool:
    return text in NULLS or text.lower().lstrip("+-") in _INFINITE


def read_table(path: Path, family: Family, *, doubled: bool = False, lenient: bool = False) -> Table:
    """Read a table. Raises TunedDBError with every fault, each with file and line.

    `doubled`: a key may come more than once. `lenient`: the table is AITER's own and is read as pandas reads it; rows
    without a key are left out (at e4048607a5 one of its fmoe tables has such rows).
    """
    reader = TableReader(path, family, lenient=lenient)
    parts = [reader.head]
    rows: list[TableRow] = []
    faults: list[str] = []
    for line, text, cells in reader.records:
        parts.append(text)
        if not any(cells):
            continue
        try:
            rows.append(reader.row(line, len(parts) - 1, cells))
        except KeyFault as e:
            faults.append(f"{path}:{line}: {e}")
    if not lenient:
        if not doubled:
            faults += _describe_repetitions(path, rows)
        if faults:
            raise TunedDBError(listed(faults, MAX_FAULTS, ""))
    return Table(path, family, reader.header, tuple(parts), tuple(rows), tuple(reader.notes()))


def _describe_repetitions(path: Path, rows: Sequence[TableRow]) -> list[str]:
    return [
        f"{path}:{row.line}: has the same key as line {first.line}: {row.place};"
        " delete one of them (AITER refuses a table with both)"
        for row, first in repetitions((row.place, row) for row in rows)
    ]


def read_header(path: Path, cells: Sequence[str], family: Family) -> tuple[str, ...]:
    """The columns of a table of the family, by our names. Raises TunedDBError where one is missing or there twice."""
    names: tuple[str, ...] = ()
    if cells:
        names = family.from_aiter((cells[0].removeprefix("\ufeff").strip(), *cells[1:]))
    faults = [f"{path}:1: column {name} is there {n} times" for name, n in Counter(names).items() if n > 1]
    needed = (family.chip_columns[-1], *family.key_names, "us")  # gfx follows from cu_num
    missing = family.to_aiter(name for name in needed if name not in names)
    if missing:
        faults.append(
            f"{path}:1: is not a tuned table of {family.name}: column {', '.join(missing)} is missing"
            f" (its header is {','.join(family.aiter_header)})"
        )
    if faults:
        raise TunedDBError(faults)
    return names
