"""The header of a CSV that DuckDB is to read: its columns by meaning, and whether the file is damaged.

A file of gigabytes is not read for this: one small window in every megabyte must hold a line end, which no line of
more than that can avoid; shorter ones DuckDB itself refuses (`max_line_size`).

Columns are known by name, whatever their date and order. Names that changed over AITER's history, or differ between
families: solidx for kernelId, err_ratio for errRatio, total_us for us (fmoe, before 2025-11). Benchmarks are long
(`backend,us`) or wide (`triton_us,triton_tflops,...`).
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.tables.backends import legal_name, owned
from orchestrator.tables.faults import Faults, escaped
from orchestrator.tables.open import decode, open_file
from worker.families import Family

STEP = 1 << 20
WINDOW = 4096
MAX_LINE = 1 << 16
"""Bytes of a line; AITER's longest have some 400."""
MAX_COLUMNS = 200


@dataclass(frozen=True, slots=True)
class Scanned:
    """`header`: stripped names. `cut`: the last line has all its cells but no line end, so that its last cell may be
    the beginning of another number; `whole` is the number of bytes before it."""

    path: Path
    header: tuple[str, ...]
    size: int
    cut: bool
    whole: int


class ForeignError(InputError):
    """The file is no table at all (empty, binary, compressed): in a folder it is passed over."""


def scan(path: Path) -> Scanned:
    """Look at the CSV. Raises ForeignError for what is no table, InputError for one that is damaged or unreadable."""
    faults = Faults(path)
    with open_file(path, InputError) as f:
        fd, size = f.fileno(), os.fstat(f.fileno()).st_size
        try:
            header = _header(os.pread(fd, MAX_LINE, 0), faults)
            _check_lines(fd, size, faults)
            faults.raise_as(InputError)
            whole = _tail(fd, size, len(header))
        except OSError as e:
            raise InputError(f"{escaped(str(path))}: cannot be read: {e.strerror or e}") from e
    return Scanned(path, header, size, whole < size, whole)


def _header(first: bytes, faults: Faults) -> tuple[str, ...]:
    text = decode(first, faults)
    if text is None:
        faults.raise_as(ForeignError)
        return ()
    line = text.lines[0]
    if len(text.lines) == 1 and len(first) == MAX_LINE:
        faults.add(f"is longer than {MAX_LINE} bytes: no header of a table is", line=1)
    try:
        cells = next(csv.reader([line], strict=True), [])
    except csv.Error:
        cells = []
    names = tuple(c.strip() for c in cells)
    if not any(names) and not faults.count:
        faults.add("holds no header", line=1)
        faults.raise_as(ForeignError)
    if len(names) > MAX_COLUMNS:
        faults.add(f"has {len(names)} columns, which no table of this kind has", line=1)
    faults.raise_as(InputError)
    return names


def _check_lines(fd: int, size: int, faults: Faults) -> None:
    for at in range(0, size, STEP):
        if _no_end(os.pread(fd, WINDOW, at)) and at + WINDOW < size:
            window = os.pread(fd, MAX_LINE, at)
            if len(window) == MAX_LINE and _no_end(window):
                what = f"is longer than {MAX_LINE // 1024} KiB: the file is damaged, or no table"
                faults.add(f"{what}; remove the line", line=_line_at(fd, at))
                return


def _no_end(data: bytes) -> bool:
    return b"\n" not in data and b"\r" not in data


def _line_at(fd: int, offset: int) -> int:
    """The number of the line that holds the byte at `offset` (lines that end in CR alone count as one)."""
    lines, at = 1, 0
    while at < offset:
        data = os.pread(fd, min(STEP, offset - at), at)
        if not data:
            break
        lines, at = lines + data.count(b"\n"), at + len(data)
    return lines


def _tail(fd: int, size: int, columns: int) -> int:
    """The bytes up to a last line that may be cut in its last cell; `size` where there is none such."""
    end = os.pread(fd, MAX_LINE, max(0, size - MAX_LINE))
    if end.endswith((b"\n", b"\r")):
        return size
    last = end.replace(b"\r", b"\n").rpartition(b"\n")[2]
    if len(last) == size:  # a header alone
        return size
    # a line that lacks cells is refused by DuckDB, which names its number
    return size - len(last) if last.count(b",") + 1 >= columns else size


_ALIASES = {
    "us": ("us", "time_us", "total_us"),
    "err": ("errratio", "err_ratio", "err"),
    "kernel": ("kernelname", "kernel_name", "kernelname1", "kernel"),
    "kernel_id": ("kernelid", "kernel_id", "solidx"),
    "libtype": ("libtype", "backend"),
    "tflops": ("tflops",),
    "gfx": ("gfx",),
    "cu_num": ("cu_num",),
}
_US, _TFLOPS = "_us", "_tflops"


@dataclass(frozen=True, slots=True)
class Wide:
    """The columns of one backend in a wide benchmark, by number; `tflops` None where there is none."""

    backend: str
    us: int
    tflops: int | None


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a header by meaning, as column numbers. `keys` holds the family's key columns that are there."""

    at: dict[str, int]
    keys: dict[str, int]
    wide: tuple[Wide, ...]

    @property
    def times(self) -> bool:
        """True where the file holds measurements."""
        return "us" in self.at or bool(self.wide)


def layout(header: tuple[str, ...], family: Family) -> Layout:
    """The layout of a header for a family."""
    lower = {name.lower(): i for i, name in reversed(list(enumerate(header))) if name}
    at = {
        role: next(lower[n] for n in names if n in lower)
        for role, names in _ALIASES.items()
        if lower.keys() & set(names)
    }
    keys = {c.name: lower[c.name.lower()] for c in family.columns if c.name.lower() in lower}
    wide = []
    if "us" not in at:
        for name, i in sorted(lower.items(), key=lambda item: item[1]):
            backend = legal_name(name.removesuffix(_US)) if name.endswith(_US) else None
            if backend:
                wide.append(Wide(owned(backend), i, lower.get(backend + _TFLOPS)))
    return Layout(at, keys, tuple(wide))


def missing(found: Layout, family: Family) -> list[str]:
    """The key columns that the file lacks and that have no default."""
    return [c.name for c in family.columns if c.required and c.name not in found.keys]


def doubled(header: tuple[str, ...]) -> list[str]:
    """Names that stand in the header twice."""
    return sorted({n for n in header if n and header.count(n) > 1})
