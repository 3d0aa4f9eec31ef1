"""A tuned table as AITER ships it, read by column name; every byte of its lines is kept.

Old tables have no gfx column; AITER fills it from cu_num (`update_config_files` in aiter/jit/core.py), and
so do we: 256 is gfx950, 80 and 304 are gfx942. AITER's tuners write `Null` for a missing value. Some
tables carry a `_tag` column, which AITER counts to the key. Columns that AITER calls otherwise have our names here.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import TunedDBError
from orchestrator.tables.open import MAX_BYTES, csv_records, read_text
from worker.families import Column, Family
from worker.protocol import FIELDS
from worker.text import plural

GFX_OF_CU_NUM = {256: "gfx950", 80: "gfx942", 304: "gfx942"}
NULLS = frozenset(("", "Null", "null", "NULL", "NaN", "nan", "None"))
TAG = "_tag"
KERNEL_NAMES = ("kernelName", "kernelName1", "kernelName2")
"""Columns that name a row's kernel (fmoe: one a stage)."""
MAX_FAULTS = 50
MAX_MEMO = 100_000

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
    """The kernel's name (fmoe: of both stages); "" where there is none."""
    return kernel_of_stages(cells.get(n, "") for n in KERNEL_NAMES)


def kernel_of_stages(names: Iterable[str]) -> str:
    """The names of a kernel's stages as one; "" where there are none."""
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


class KeyReader:
    """`key_of` for the rows of one header; each spelling of a cell is read once, which makes it ten times faster."""

    def __init__(self, header: Sequence[str], family: Family) -> None:
        at = {name: i for i, name in enumerate(header)}
        self._gfx = at.get("gfx")
        self._cu_num = at["cu_num"] if "cu_num" in family.chip_columns else None
        self._columns = [(at[c.name], c, dict[str, int | str]()) for c in family.columns]
        self._cu_nums: dict[str, int] = {}

    def __call__(self, cells: Sequence[str]) -> Key:
        """Raises KeyFault naming the column."""
        text = "0" if self._cu_num is None else cells[self._cu_num]
        cu_num = self._cu_nums.get(text)
        if cu_num is None:
            cu_num = self._cu_nums[text] = _whole("cu_num", text)
        gfx = "" if self._gfx is None else cells[self._gfx]
        key: list[int | str] = [GFX_OF_CU_NUM.get(cu_num, "") if gfx in NULLS else gfx, cu_num]
        try:
            key += [memo[cells[i]] for i, _, memo in self._columns]
        except KeyError:
            for i, column, memo in self._columns:
                if len(memo) >= MAX_MEMO:
                    memo.clear()
                memo[cells[i]] = _value(column, cells[i])
            key += [_value(column, cells[i]) for i, column, _ in self._columns]
        return tuple(key)


class RowReader:
    """Reader of the rows below one header."""

    def __init__(self, header: tuple[str, ...], family: Family) -> None:
        self.header = header
        self.key = KeyReader(header, family)
        self.us_at = header.index("us")
        self._tag = header.index(TAG) if TAG in header else None
        self._gfx = header.index("gfx") if "gfx" in header else None
        self._unnamed: Counter[int] = Counter()

    def read(self, cells: Sequence[str]) -> tuple[Key, float | None]:
        """(key, us or None where the row has no time). Raises KeyFault saying what is wrong with the row."""
        if len(cells) != len(self.header):
            raise KeyFault(f"has {len(cells)} cells, the header {len(self.header)}; was a write cut short?")
        key = self.key(cells)
        text = cells[self.us_at]
        us = number_of(text)
        if us is None and text not in NULLS and text.lower().lstrip("+-") not in ("inf", "infinity"):
            raise KeyFault(f"us is {text[:40]!r}, not a number")
        if self._gfx is None or cells[self._gfx] in NULLS:
            self._unnamed[int(key[1])] += 1
        return key, us if us is not None and us > 0 else None

    def row(self, line: int, part: int, cells: Sequence[str], key: Key, us: float | None) -> TableRow:
        """A row of a table, with its tag."""
        tag = "" if self._tag is None or cells[self._tag] in NULLS else cells[self._tag]
        return TableRow(line, part, tuple(cells), key, tag, us, place_of(key, tag))

    def notes(self, path: Path) -> list[str]:
        """Notes on the rows read that have no gfx."""
        notes = []
        for cu_num, n in sorted(self._unnamed.items()):
            rows = f"{path}: {plural(n, 'row has', 'rows have')} no gfx"
            gfx = GFX_OF_CU_NUM.get(cu_num)
            if gfx:
                notes.append(f"{rows}: taken as {gfx} because cu_num is {cu_num}, as AITER does")
            else:
                none = f" and none follows from cu_num {cu_num}" if cu_num else ""
                notes.append(f"{rows}{none}: they match nothing and stay as they are")
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


def read_table(path: Path, family: Family, *, doubled: bool = False) -> Table:
    """Raises TunedDBError with every fault, each with file and line. `doubled`: a key may come more than once."""
    parts: list[str] = []
    rows: list[TableRow] = []
    faults: list[str] = []
    reader: RowReader | None = None
    for at, text, cells in csv_records(path):
        parts.append(text)
        if reader is None:
            reader = RowReader(read_header(path, cells, family), family)
        elif any(cells):
            try:
                rows.append(reader.row(at, len(parts) - 1, cells, *reader.read(cells)))
            except KeyFault as e:
                faults.append(f"{path}:{at}: {e}")
    if reader is None:
        raise TunedDBError(
            f"{path}: is empty; delete it (it will be created), or give it the header {_example(family)}"
        )
    if not doubled:
        faults += _doubled(path, rows)
    if faults:
        more = [f"... and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        raise TunedDBError(faults[:MAX_FAULTS] + more)
    return Table(path, family, reader.header, tuple(parts), tuple(rows), tuple(reader.notes(path)))


def read_header(path: Path, cells: Sequence[str], family: Family) -> tuple[str, ...]:
    """The columns of a table of the family, by our names. Raises TunedDBError where one is missing or there twice."""
    names = family.from_aiter((cells[0].removeprefix("\ufeff").strip(), *cells[1:]) if cells else ())
    faults = [f"{path}:1: column {n} is there {c} times" for n, c in Counter(names).items() if c > 1]
    chip = [n for n in family.chip_columns if n == family.chip_columns[-1]]  # gfx follows from cu_num
    missing = family.to_aiter(n for n in (*chip, *family.key_names, "us") if n not in names)
    if missing:
        faults.append(
            f"{path}:1: is no tuned table of {family.name}: column {', '.join(missing)} is missing"
            f" (its header is {_example(family)})"
        )
    if faults:
        raise TunedDBError(faults)
    return names


def _example(family: Family) -> str:
    return ",".join(family.aiter_header)


def _doubled(path: Path, rows: list[TableRow]) -> list[str]:
    first: dict[Place, int] = {}
    faults = []
    for r in rows:
        at = first.setdefault(r.place, r.line)
        if at != r.line:
            key = ",".join(map(str, r.key)) + (f" ({TAG} {r.tag})" if r.tag else "")
            faults.append(
                f"{path}:{r.line}: has the same key as line {at}: {key};"
                " delete one of them (AITER refuses a table with both)"
            )
    return faults


def key_order(key: Key) -> tuple[tuple[int, int, str], ...]:
    """Sort key of keys: numbers by size, then text."""
    return tuple((0, v, "") if isinstance(v, int) else (1, 0, v) for v in key)


def file_order(key: Key, family: Family) -> tuple[tuple[int, int, str], ...]:
    """Sort key of a table's rows as AITER's tuners leave them: N before M (`sort_keys` of base_tuner.py)."""
    order = key_order(key)
    names = ("gfx", "cu_num", *family.key_names)
    swapped = [{"M": "N", "N": "M"}.get(n, n) for n in names]
    return tuple(order[names.index(n)] for n in swapped)


def read_shipped(path: Path, family: Family) -> Table:
    """A table of AITER's own, read as pandas does: short rows are filled up, rows without a key passed over.

    At e4048607a5 one of its fmoe tables has such rows.
    """
    rows: list[TableRow] = []
    reader = csv.reader(io.StringIO(read_text(path, MAX_BYTES, TunedDBError, errors="replace"), newline=""))
    header = family.from_aiter(c.strip() for c in next(reader, []))
    for record in reader:
        cells = tuple(c.strip() for c in [*record, *[""] * (len(header) - len(record))][: len(header)])
        named = dict(zip(header, cells, strict=True))
        try:
            key = key_of(named, family)
        except KeyFault:
            continue
        tag = named.get(TAG, "")
        us = number_of(named.get("us", ""))
        tag = "" if tag in NULLS else tag
        rows.append(TableRow(reader.line_num, 0, cells, key, tag, us, place_of(key, tag)))
    return Table(path, family, header, (), tuple(rows), ())
