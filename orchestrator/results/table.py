"""Reading a tuned table as AITER ships it: by column name, every byte of its lines kept.

Old tables have no gfx column; AITER fills it from cu_num (`update_config_files` in aiter/jit/core.py), and
so do we: 256 is gfx950, 80 and 304 are gfx942. AITER's tuners write `Null` for a missing value. Some
tables carry a `_tag` column, which AITER counts to the key.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import TunedDBError
from orchestrator.families import Column, Family

GFX_OF_CU_NUM = {256: "gfx950", 80: "gfx942", 304: "gfx942"}
NULLS = frozenset(("", "Null", "null", "NULL", "NaN", "nan", "None"))
TAG = "_tag"
MAX_BYTES = 512 * 1024 * 1024
MAX_FAULTS = 50

Key = tuple[int | str, ...]
"""(gfx, cu_num, the family's key columns)."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table. `part` is its place in Table.parts, `line` its first line in the file (from 1)."""

    line: int
    part: int
    cells: tuple[str, ...]
    key: Key
    tag: str
    us: float | None

    @property
    def usable(self) -> bool:
        """Whether it has a time that a row can be beaten by."""
        return self.us is not None


@dataclass(frozen=True, slots=True)
class Table:
    """A file as read: `parts` joined are its text, the header first; `header` are the stripped column names."""

    path: Path
    header: tuple[str, ...]
    parts: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...]

    @property
    def newline(self) -> str:
        """The line end of its header."""
        return "\r\n" if self.parts[0].endswith("\r\n") else "\n"


class KeyFault(ValueError):
    """A cell of the key that cannot be."""


def key_of(cells: Mapping[str, str], family: Family) -> Key:
    """The key of a row from its stripped cells; gfx follows from cu_num where it is missing ("" where
    nothing does).

    Text is compared as the family spells it, whatever its case in the file. Raises KeyFault naming the
    column.
    """
    cu_num = _whole("cu_num", cells.get("cu_num", ""))
    gfx = cells.get("gfx", "")
    gfx = GFX_OF_CU_NUM.get(cu_num, "") if gfx in NULLS else gfx
    return (gfx, cu_num, *(_value(c, cells.get(c.name, "")) for c in family.columns))


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
    text = _text(path)
    lines = io.StringIO(text, newline="").readlines()
    reader = csv.reader(lines, strict=True)
    parts: list[str] = []
    rows: list[TableRow] = []
    faults: list[str] = []
    header: tuple[str, ...] = ()
    unnamed: Counter[int] = Counter()
    begin = 0
    try:
        for record in reader:
            raw, at = "".join(lines[begin : reader.line_num]), begin + 1
            begin = reader.line_num
            parts.append(raw)
            cells = tuple(c.strip() for c in record)
            if not header:
                header = _header(path, cells, family)
            elif any(cells):
                row = _row(path, at, len(parts) - 1, cells, header, family, faults)
                if row is not None:
                    rows.append(row)
                    if "gfx" not in header or cells[header.index("gfx")] in NULLS:
                        unnamed[int(row.key[1])] += 1
    except csv.Error as e:
        raise TunedDBError(f"{path}:{reader.line_num}: is no CSV line: {e}") from e
    if not header:
        raise TunedDBError(
            f"{path}: is empty; delete it (it will be created), or give it the header {_example(family)}"
        )
    if not doubled:
        faults += _doubled(path, rows)
    if faults:
        more = [f"... and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        raise TunedDBError(faults[:MAX_FAULTS] + more)
    return Table(path, header, tuple(parts), tuple(rows), tuple(_gfx_notes(path, unnamed)))


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            raise TunedDBError(f"{path}: is no file" if path.exists() else f"{path}: there is no such file")
        if path.stat().st_size > MAX_BYTES:
            raise TunedDBError(f"{path}: is larger than {MAX_BYTES // 2**20} MB, which no tuned table is")
        data = path.read_bytes()
    except OSError as e:
        raise TunedDBError(f"{path}: cannot be read: {e.strerror or e}") from e
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise TunedDBError(f"{path}:{line}: holds bytes that are not UTF-8; is it a CSV?") from e


def _header(path: Path, cells: tuple[str, ...], family: Family) -> tuple[str, ...]:
    names = (cells[0].removeprefix("\ufeff").strip(), *cells[1:]) if cells else ()
    faults = [f"{path}:1: column {n} is there {c} times" for n, c in Counter(names).items() if c > 1]
    missing = [n for n in ("cu_num", *family.key_names, "us") if n not in names]
    if missing:
        faults.append(
            f"{path}:1: is no tuned table of {family.name}: column {', '.join(missing)} is missing"
            f" (its header is {_example(family)})"
        )
    if faults:
        raise TunedDBError(faults)
    return names


def _example(family: Family) -> str:
    return ",".join(family.tuned_header)


def _row(
    path: Path,
    line: int,
    part: int,
    cells: tuple[str, ...],
    header: tuple[str, ...],
    family: Family,
    faults: list[str],
) -> TableRow | None:
    if len(cells) != len(header):
        faults.append(f"{path}:{line}: has {len(cells)} cells, the header {len(header)}; was a write cut short?")
        return None
    named = dict(zip(header, cells, strict=True))
    try:
        key = key_of(named, family)
    except KeyFault as e:
        faults.append(f"{path}:{line}: {e}")
        return None
    us = number_of(named["us"])
    if us is None and named["us"] not in NULLS and named["us"].lower().lstrip("+-") not in ("inf", "infinity"):
        faults.append(f"{path}:{line}: us is {named['us'][:40]!r}, not a number")
        return None
    tag = named.get(TAG, "")
    return TableRow(line, part, cells, key, "" if tag in NULLS else tag, us if us is not None and us > 0 else None)


def _doubled(path: Path, rows: list[TableRow]) -> list[str]:
    first: dict[tuple[Key, str], int] = {}
    faults = []
    for r in rows:
        at = first.setdefault((r.key, r.tag), r.line)
        if at != r.line:
            key = ",".join(map(str, r.key)) + (f" ({TAG} {r.tag})" if r.tag else "")
            faults.append(
                f"{path}:{r.line}: has the same key as line {at}: {key};"
                " delete one of them (AITER refuses a table with both)"
            )
    return faults


def _gfx_notes(path: Path, unnamed: Counter[int]) -> list[str]:
    notes = []
    for cu_num, n in sorted(unnamed.items()):
        rows = f"{path}: {n} {'row says' if n == 1 else 'rows say'} no gfx"
        gfx = GFX_OF_CU_NUM.get(cu_num)
        if gfx:
            notes.append(f"{rows}: taken as {gfx} because cu_num is {cu_num}, as AITER does")
        else:
            notes.append(f"{rows} and none follows from cu_num {cu_num}: they match nothing and stay as they are")
    return notes
