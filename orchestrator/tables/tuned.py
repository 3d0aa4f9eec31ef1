"""A tuned table as AITER has it, read by column name; every byte of its lines is kept. Its keys, and the core of every
merge: the same key twice, the best of a key.

Old tables have no gfx column; AITER fills it from cu_num (`update_config_files` in aiter/jit/core.py), and
so do we: 256 is gfx950, 80 and 304 are gfx942. AITER's tuners write `Null` for a missing value. Some
tables carry a `_tag` column, which AITER counts to the key. Columns that AITER calls otherwise have our names here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from orchestrator.errors import TunedDBError
from orchestrator.files.faults import MAX_FAULTS, listed
from orchestrator.files.read import MAX_BYTES, csv_records
from worker.families import NULLS, Column, Family
from worker.protocol import FIELDS
from worker.text import plural

GFX_OF_CU_NUM = {256: "gfx950", 80: "gfx942", 304: "gfx942"}
TAG = "_tag"
KERNEL_NAMES = ("kernelName", "kernelName1", "kernelName2")
"""Columns that name a row's kernel (fmoe: one a stage)."""
_INFINITE = ("inf", "infinity")
T = TypeVar("T")
K = TypeVar("K")

SHOWN = tuple(f.name for f in FIELDS if f.shown)
PROFILE_EXTRA = ("attempt", "node", "slot", *SHOWN, "winner", "unconfirmed")
"""Columns of profile.csv beyond the tuned table's. winner: 1 where this row settled its shape; unconfirmed: 1 where
candidates were left out then that faulted on one slot alone."""
FAILED_EXTRA = ("reason", "detail", "node", "attempts")
"""Columns of failed.csv beyond the key's."""

Key = tuple[int | str, ...]
"""(gfx, cu_num, the family's key columns); cu_num is 0 where the family's tables have none."""
Place = str
"""A key with its `_tag` as text (`place_of`): a table has at most one row of it."""


class TableRow(NamedTuple):
    """A row of a table. `part` is its place in Table.parts, `line` its first line in the file (from 1)."""

    line: int
    part: int
    cells: tuple[str, ...]
    key: Key
    tag: str
    us: float | None
    place: Place


@dataclass(frozen=True, slots=True)
class Table:
    """A file as read: `parts` joined are its text, the header first; `header` are its columns by our names."""

    path: Path
    family: Family
    header: tuple[str, ...]
    parts: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...]

    def cells(self, row: TableRow) -> dict[str, str]:
        """The cells of a row by column name."""
        return dict(zip(self.header, row.cells, strict=True))

    @property
    def newline(self) -> str:
        """The line end of its header."""
        return "\r\n" if self.parts[0].endswith("\r\n") else "\n"


_PLACE = [",".join(["%s"] * n) for n in range(32)]


def place_of(key: Key, tag: str) -> Place:
    """`gfx950,256,1,64,128`, with the tag behind a `;` where there is one."""
    text = _PLACE[len(key)] % key
    return f"{text};{tag}" if tag else text


def chip_name(gfx: int | str, cu_num: int | str) -> str:
    """`gfx950/256`; `gfx950` where the family's tables have no cu_num."""
    return f"{gfx or '?'}/{cu_num}" if cu_num else str(gfx or "?")


class KeyFault(ValueError):
    """A cell of the key that cannot be."""


def key_dict(key: Key, family: Family) -> dict[str, int | str]:
    """A key by column name."""
    return dict(zip(("gfx", "cu_num", *family.key_names), key, strict=True))


def kernel_of(cells: Mapping[str, str]) -> str:
    """The kernel's name (fmoe: of both stages); "" if the row names none."""
    return kernel_of_stages(cells.get(n, "") for n in KERNEL_NAMES)


def kernel_of_stages(names: Iterable[str]) -> str:
    """The names of a kernel's stages as one text."""
    return " + ".join(n for n in names if n not in NULLS)


def key_of(cells: Mapping[str, str], family: Family) -> Key:
    """The key of a row from its stripped cells; gfx follows from cu_num where it is missing ("" where
    nothing does).

    Text is compared as the family spells it, whatever its case in the file. Raises KeyFault naming the
    column.
    """
    cu_num = _whole("cu_num", cells.get("cu_num", "")) if "cu_num" in family.chip_columns else 0
    gfx = cells.get("gfx", "")
    gfx = GFX_OF_CU_NUM.get(cu_num, "") if gfx in NULLS else gfx
    return (gfx, cu_num, *(_value(c, cells.get(c.name, "")) for c in family.columns))


def no_gfx(key: Key) -> str:
    """A sentence on a key without gfx, whose row AITER selects nowhere; "" for other keys."""
    none = f", and none follows from cu_num {key[1]}" if key[1] else ""
    return "" if key[0] else f"names no gfx{none}"


class KeyReader:
    """`key_of` for the rows of one header; each spelling of a cell is read once, which makes it ten times faster."""

    def __init__(self, header: Sequence[str], family: Family) -> None:
        at = {name: i for i, name in enumerate(header)}
        self._gfx = at.get("gfx")
        self._cu_num = at["cu_num"] if "cu_num" in family.chip_columns else None
        self._whole = cache(partial(_whole, "cu_num"))
        self._columns = [(at[c.name], cache(partial(_value, c))) for c in family.columns]

    def __call__(self, cells: Sequence[str]) -> Key:
        """Raises KeyFault naming the column."""
        cu_num = 0 if self._cu_num is None else self._whole(cells[self._cu_num])
        gfx = "" if self._gfx is None else cells[self._gfx]
        gfx = GFX_OF_CU_NUM.get(cu_num, "") if gfx in NULLS else gfx
        return (gfx, cu_num, *[value(cells[i]) for i, value in self._columns])


class TableReader:
    """Reads a tuned table or profile record by record. `header` are its columns by our names, `head` is its first line,
    `records` gives the records below it as `csv_records` does (with the same `cap`), and `row` the row in one.

    A `lenient` reader takes what pandas takes, as AITER ships some: it fills up short rows, and a time may be anything.
    """

    def __init__(self, path: Path, family: Family, *, cap: int | None = MAX_BYTES, lenient: bool = False) -> None:
        """Raises TunedDBError for a file that is empty, or that lacks a column."""
        self.path, self.lenient = path, lenient
        self.records = csv_records(path, cap)
        _, self.head, cells = next(self.records, (0, "", None))
        if cells is None:
            header = ",".join(family.aiter_header)
            raise TunedDBError(f"{path}: is empty; delete it (a merge creates it), or give it the header {header}")
        self.header = read_header(path, cells, family)
        self.us_at = self.header.index("us")
        self._key = KeyReader(self.header, family)
        self._tag, self._gfx = (self.header.index(n) if n in self.header else None for n in (TAG, "gfx"))
        self._unnamed: Counter[int] = Counter()

    def row(self, line: int, part: int, cells: Sequence[str]) -> TableRow:
        """The row in a record's cells. Raises KeyFault with what is wrong with it."""
        if self.lenient:
            cells = [*cells, *[""] * (len(self.header) - len(cells))][: len(self.header)]
        elif len(cells) != len(self.header):
            raise KeyFault(f"has {len(cells)} cells, the header {len(self.header)}; was a write cut short?")
        key, text = self._key(cells), cells[self.us_at]
        us = number_of(text)
        if us is None and not self.lenient and text not in NULLS and text.lower().lstrip("+-") not in _INFINITE:
            raise KeyFault(f"us is {text[:40]!r}, not a number")
        if self._gfx is None or cells[self._gfx] in NULLS:
            self._unnamed[int(key[1])] += 1
        tag = "" if self._tag is None or cells[self._tag] in NULLS else cells[self._tag]
        us = us if us is not None and us > 0 else None
        return TableRow(line, part, tuple(cells), key, tag, us, place_of(key, tag))

    def notes(self) -> list[str]:
        """Notes on the rows read that have no gfx."""
        notes = []
        for cu_num, n in sorted(self._unnamed.items()):
            rows, gfx = f"{self.path}: {plural(n, 'row has', 'rows have')} no gfx", GFX_OF_CU_NUM.get(cu_num)
            none = f" and none follows from cu_num {cu_num}" if cu_num else ""
            taken = f": taken as {gfx} because cu_num is {cu_num}, as AITER does"
            notes.append(rows + (taken if gfx else f"{none}: they match nothing and stay as they are"))
        return notes


def _value(column: Column, text: str) -> int | str:
    if column.kind == "int":
        return _whole(column.name, text)
    if text in column.legal:
        return text
    if text in NULLS:
        raise KeyFault(f"{column.name} is empty")
    same = [v for v in column.legal if v.lower() == text.lower()]
    return same[0] if same else text


def _whole(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    number = number_of(text)
    if number is None or not number.is_integer() or number < 0:
        raise KeyFault(f"{name} is {text[:40]!r}, not a whole number" if text else f"{name} is empty")
    return int(number)


def number_of(text: str) -> float | None:
    """A finite number, None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read_table(path: Path, family: Family, *, doubled: bool = False, lenient: bool = False) -> Table:
    """Read a table. Raises TunedDBError with every fault, each with file and line.

    `doubled`: a key may come more than once. `lenient`: the table is AITER's own and is read as pandas reads it; rows
    without a key are left out (at e4048607a5 one of its fmoe tables has such rows).
    """
    reader = TableReader(path, family, lenient=lenient)
    parts, rows, faults = [reader.head], list[TableRow](), list[str]()
    for line, text, cells in reader.records:
        parts.append(text)
        if any(cells):
            try:
                rows.append(reader.row(line, len(parts) - 1, cells))
            except KeyFault as e:
                faults.append(f"{path}:{line}: {e}")
    if lenient:
        faults.clear()
    elif not doubled:
        faults += (
            f"{path}:{row.line}: has the same key as line {first.line}: {row.place};"
            " delete one of them (AITER refuses a table with both)"
            for row, first in twice((row.place, row) for row in rows)
        )
    if faults:
        raise TunedDBError(listed(faults, MAX_FAULTS, ""))
    return Table(path, family, reader.header, tuple(parts), tuple(rows), tuple(reader.notes()))


def twice(keyed: Iterable[tuple[Hashable, T]], seen: dict[Any, T] | None = None) -> Iterator[tuple[T, T]]:
    """(the entry, the first entry of its key) for each key that comes again. `seen`: what was there before, by key."""
    first = {} if seen is None else seen
    for key, entry in keyed:
        if (before := first.setdefault(key, entry)) is not entry:
            yield entry, before


def best(entries: Iterable[T], key: Callable[[T], K], rank: Callable[[T], Any]) -> dict[K, T]:
    """The entry of lowest rank of each key, the first of equals, in the order in which the keys come."""
    out: dict[K, T] = {}
    for entry in entries:
        at = key(entry)
        if at not in out or rank(entry) < rank(out[at]):
            out[at] = entry
    return out


def read_header(path: Path, cells: Sequence[str], family: Family) -> tuple[str, ...]:
    """The columns of a table of the family, by our names. Raises TunedDBError where one is missing or there twice."""
    names = family.from_aiter((cells[0].removeprefix("\ufeff").strip(), *cells[1:]) if cells else ())
    faults = [f"{path}:1: column {n} is there {c} times" for n, c in Counter(names).items() if c > 1]
    needed = (family.chip_columns[-1], *family.key_names, "us")  # gfx follows from cu_num
    missing = family.to_aiter(n for n in needed if n not in names)
    if missing:
        faults.append(
            f"{path}:1: is not a tuned table of {family.name}: column {', '.join(missing)} is missing"
            f" (its header is {','.join(family.aiter_header)})"
        )
    if faults:
        raise TunedDBError(faults)
    return names


def key_order(key: Key) -> tuple[tuple[int, int, str], ...]:
    """Sort key of keys: numbers by size, then text."""
    return tuple((0, v, "") if isinstance(v, int) else (1, 0, v) for v in key)


def file_order(family: Family, header: Sequence[str]) -> Callable[[Key], Any]:
    """The sort key of a table's keys, so that rows are as AITER's tuners leave them: by its key columns, N before M
    (`sort_keys` of base_tuner.py). The one of fmoe does not sort: all keys are equal."""
    if family.two_stages:
        return lambda key: ()
    names = ("gfx", "cu_num", *family.key_names)
    swapped = ({"M": "N", "N": "M"}.get(n, n) for n in names)
    return itemgetter(*(names.index(n) for n in swapped if n in header))
