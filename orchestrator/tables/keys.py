"""The key of a row of a tuned table: the chip and the shape, as AITER compares them; and the order of keys in a file.

A `Key` is a tuple of values, `("gfx950", 256, 1, 2112, 7168)`; a `Place` is that key as text with the row's tag, and a
table has at most one row of it. `KeyReader` reads the keys of a whole table, `key_of` that of one row.
Old tables have no gfx column; AITER fills it from cu_num (`update_config_files` in aiter/jit/core.py), and so do we.
Some tables have a `_tag` column, which AITER counts to the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any, TypeVar

from worker.families import NULLS, Column, Family

GFX_OF_CU_NUM = {256: "gfx950", 80: "gfx942", 304: "gfx942"}
"""Compute units -> the gfx that AITER assumes if a row does not name it."""
CHIP_COLUMNS = ("gfx", "cu_num")
TAG = "_tag"
MAX_SHOWN = 40
"""Most characters of a cell in a message."""
MAX_DIGITS = 18
"""Most digits of a number that always fits into 64 bits."""

T = TypeVar("T")
K = TypeVar("K")

Key = tuple[int | str, ...]
"""(gfx, cu_num, the family's key columns): `("gfx950", 256, 1, 2112, 7168)`. cu_num is 0 if the family's tables have
none."""
Place = str
"""A key with its `_tag` as text (`place_of`): a table has at most one row of it."""

_PLACE_FORMATS = [",".join(["%s"] * columns) for columns in range(32)]


class KeyFault(ValueError):
    """A cell of the key that cannot be."""


def place_of(key: Key, tag: str) -> Place:
    """`gfx950,256,1,64,128`, with the tag behind a `;` where there is one."""
    text = _PLACE_FORMATS[len(key)] % key
    return f"{text};{tag}" if tag else text


def chip_name(gfx: int | str, cu_num: int | str) -> str:
    """`gfx950/256`; `gfx950` where the family's tables have no cu_num."""
    return f"{gfx or '?'}/{cu_num}" if cu_num else str(gfx or "?")


def key_names(family: Family) -> tuple[str, ...]:
    """The columns of a `Key`, in its order."""
    return (*CHIP_COLUMNS, *family.key_names)


def key_dict(key: Key, family: Family) -> dict[str, int | str]:
    """A key by column name."""
    return dict(zip(key_names(family), key, strict=True))


def key_with_tag(key: Key, tag: str, family: Family) -> dict[str, int | str]:
    """A key by column name, with its tag if it has one."""
    cells = key_dict(key, family)
    if tag:
        cells[TAG] = tag
    return cells


def key_of(cells: Mapping[str, str], family: Family) -> Key:
    """The key of a row from its stripped cells; gfx follows from cu_num where it is missing ("" where nothing does).

    Text is compared as the family spells it, whatever its case in the file. Raises KeyFault naming the column.
    """
    cu_num = 0
    if "cu_num" in family.chip_columns:
        cu_num = _read_whole("cu_num", cells.get("cu_num", ""))
    values = [_read_value(column, cells.get(column.name, "")) for column in family.columns]
    return (_gfx_of(cells.get("gfx", ""), cu_num), cu_num, *values)


def missing_gfx(key: Key) -> str:
    """A sentence on a key without gfx, whose row AITER selects nowhere; "" for other keys."""
    if key[0]:
        return ""
    return f"names no gfx, and none follows from cu_num {key[1]}" if key[1] else "names no gfx"


class KeyReader:
    """`key_of` for the rows of one header; each spelling of a cell is read once, which makes it ten times faster."""

    def __init__(self, header: Sequence[str], family: Family) -> None:
        index = {name: i for i, name in enumerate(header)}
        self._gfx = index.get("gfx")
        self._cu_num = index["cu_num"] if "cu_num" in family.chip_columns else None
        self._read_cu_num = cache(partial(_read_whole, "cu_num"))
        self._columns = [(index[column.name], cache(partial(_read_value, column))) for column in family.columns]

    def __call__(self, cells: Sequence[str]) -> Key:
        """Raises KeyFault naming the column."""
        cu_num = 0 if self._cu_num is None else self._read_cu_num(cells[self._cu_num])
        gfx = "" if self._gfx is None else cells[self._gfx]
        return (_gfx_of(gfx, cu_num), cu_num, *[read(cells[i]) for i, read in self._columns])


def _gfx_of(gfx: str, cu_num: int) -> str:
    return GFX_OF_CU_NUM.get(cu_num, "") if gfx in NULLS else gfx


def _read_value(column: Column, text: str) -> int | str:
    if column.kind == "int":
        return _read_whole(column.name, text)
    if text in column.legal:
        return text
    if text in NULLS:
        raise KeyFault(f"{column.name} is empty")
    for legal in column.legal:
        if legal.lower() == text.lower():
            return legal
    return text


def _read_whole(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return int(text)
    number = number_of(text)
    if number is not None and number.is_integer() and number >= 0:
        return int(number)
    raise KeyFault(f"{name} is {text[:MAX_SHOWN]!r}, not a whole number" if text else f"{name} is empty")


def number_of(text: str) -> float | None:
    """A finite number, None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def repetitions(keyed: Iterable[tuple[Hashable, T]], seen: dict[Any, T] | None = None) -> Iterator[tuple[T, T]]:
    """(the entry, the first entry of its key) for each key that comes again. `seen`: what came before, by key."""
    first_entries = {} if seen is None else seen
    for key, entry in keyed:
        first = first_entries.setdefault(key, entry)
        if first is not entry:
            yield entry, first


def best_by_key(entries: Iterable[T], key: Callable[[T], K], rank: Callable[[T], Any]) -> dict[K, T]:
    """The entry of lowest rank of each key, the first of equals, in the order in which the keys come."""
    best: dict[K, T] = {}
    for entry in entries:
        entry_key = key(entry)
        if entry_key not in best or rank(entry) < rank(best[entry_key]):
            best[entry_key] = entry
    return best


def key_order(key: Key) -> tuple[tuple[int, int, str], ...]:
    """Sort key of keys: numbers by size, then text."""
    return tuple((0, value, "") if isinstance(value, int) else (1, 0, value) for value in key)


def file_order(family: Family, header: Sequence[str]) -> Callable[[Key], Any]:
    """The sort key of a table's keys, so that rows are as AITER's tuners leave them: by its key columns, N before M
    (`sort_keys` of base_tuner.py). The one of fmoe does not sort: all keys are equal."""
    if family.two_stages:
        return lambda key: ()
    names = key_names(family)
    swapped = [{"M": "N", "N": "M"}.get(name, name) for name in names]
    return itemgetter(*(names.index(name) for name in swapped if name in header))
