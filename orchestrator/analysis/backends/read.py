"""Reads CSVs of measurements with pandas: their headers, what the columns mean, their rows in chunks.

Columns are found by name, whatever their date and order. Some names changed over AITER's history or differ between
families: solidx for kernelId, err_ratio for errRatio, total_us for us (fmoe, before 2025-11). A benchmark is long
(`backend,us`) or wide (`triton_us,triton_tflops,...`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

import pandas as pd

from orchestrator.errors import InputError
from orchestrator.tables.backends import legal_name, owned
from orchestrator.tables.faults import Faults, escaped
from orchestrator.tables.open import decode, open_file
from worker.families import Family

MAX_LINE = 1 << 16
"""Characters of a line. AITER's longest lines have some 400."""
MAX_COLUMNS = 200
MOST_NAMED = 5
"""Bad lines that a note names by number."""
_BLOCK = 1 << 17
"""Characters that are looked at together. A line of more is refused."""
_CHUNK = 100_000
"""Rows in a frame; 200,000 take pandas a fifth longer."""
_UNMARKED = bytes(set(range(256)) - set(b',\n"\0'))
NULLS = ["Null", "null", "NULL", "None", ""]
"""Cells without a value. AITER writes `Null`, which pandas does not know."""
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
_TEXTS = ("kernel", "kernel_id", "libtype", "gfx")
_US, _TFLOPS = "_us", "_tflops"


class ForeignError(InputError):
    """The file is not a table at all (empty, binary, compressed). In a folder such a file is passed over."""


def read_header(path: Path) -> tuple[str, ...]:
    """The stripped names in a CSV's first line. Raises ForeignError or InputError."""
    faults = Faults(path)
    with open_file(path, InputError) as f:
        text = decode(first := f.read(MAX_LINE), faults)
    line = text.lines[0] if text else ""
    if text and len(text.lines) == 1 and len(first) == MAX_LINE:
        raise InputError(f"{escaped(str(path))}:1: is longer than {MAX_LINE} bytes, which no header of a table is")
    names = tuple(c.strip() for c in next(csv.reader([line]), ()))
    if text and not any(names):
        faults.add("holds no header", line=1)
    faults.raise_as(ForeignError)
    if len(names) > MAX_COLUMNS:
        raise InputError(f"{escaped(str(path))}:1: has {len(names)} columns, which no table of this kind has")
    return names


@dataclass(frozen=True, slots=True)
class Wide:
    """The columns of one backend in a wide benchmark, by number."""

    backend: str
    us: int
    tflops: int | None


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a header by meaning, as column numbers. `keys` holds the family's key columns that are there."""

    at: dict[str, int]
    keys: dict[str, int]
    wide: tuple[Wide, ...]


def layout(header: tuple[str, ...], family: Family) -> Layout:
    """Finds out what the columns of a header mean for a family."""
    lower = {name.lower(): i for i, name in reversed(list(enumerate(header))) if name}
    at = {role: lower[found[0]] for role, names in _ALIASES.items() if (found := [n for n in names if n in lower])}
    keys = {c.name: lower[c.name.lower()] for c in family.columns if c.name.lower() in lower}
    wide = []
    for name, i in () if "us" in at else sorted(lower.items(), key=lambda item: item[1]):
        if name.endswith(_US) and (backend := legal_name(name.removesuffix(_US))):
            wide.append(Wide(owned(backend), i, lower.get(backend + _TFLOPS)))
    return Layout(at, keys, tuple(wide))


def chunks(lines: CleanLines, found: Layout, family: Family) -> Iterator[pd.DataFrame]:
    """The rows of a file, some 100,000 at a time, in columns named by their meaning (a key column by its own name).

    Numbers are float or int, NaN where a cell does not hold one; texts are categories. Raises InputError where a line
    makes the rest of the file unreadable.
    """
    texts = {c.name for c in family.columns if c.kind == "text"} | set(_TEXTS)
    names = {i: name for name, i in (found.at | found.keys).items()}
    for wide in found.wide:
        tflops = {} if wide.tflops is None else {wide.tflops: wide.backend + _TFLOPS}
        names |= {wide.us: wide.backend + _US} | tflops
    with lines:
        try:
            reader = pd.read_csv(
                lines, header=None, names=[names.get(i, f" {i}") for i in range(lines.columns)], chunksize=_CHUNK,
                usecols=list(names.values()), dtype={name: "category" for name in names.values() if name in texts},
                na_values=NULLS, low_memory=False, index_col=False, engine="c",
            )  # fmt: skip
        except pd.errors.EmptyDataError:
            return
        with reader:
            for chunk in reader:
                numbers = (name for name in names.values() if name not in texts)
                yield chunk.assign(**{name: pd.to_numeric(chunk[name], errors="coerce") for name in numbers})


class CleanLines(io.TextIOBase):
    """The lines of a CSV below its header, for pandas, without those that are not rows of it.

    pandas itself would fill up a line that is too short, and cut one that is too long. `malformed`: the number of lines
    left out, of which `named` has the first few numbers; `cut`: the last line has no end, so that its last cell may be
    the beginning of another number. Reading raises InputError, with the line, if nothing after it can be trusted.
    """

    def __init__(self, path: Path, columns: int) -> None:
        open_file(path, InputError).close()
        self.path, self.columns = path, columns
        self.malformed, self.named, self.cut = 0, list[int](), False
        self._file: TextIO = path.open(encoding="utf-8-sig", errors="surrogateescape")  # all line ends become \n
        self._file.readline()
        self._line, self._rest, self._row = 2, "", b"," * (columns - 1) + b"\n"

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        """pandas asks for it and does not call it."""
        return iter(lambda: self.read(), "")

    def notes(self) -> Iterator[str]:
        """Sentences on the lines that were left out."""
        name = escaped(str(self.path))
        if self.cut:
            how = "left out (add a line end if it is whole)"
            yield f"{name}: its last line has no line end and may be cut short: {how}"
        if bad := self.malformed - self.cut:
            some = ", ".join(map(str, self.named)) + (", ..." if bad > MOST_NAMED else "")
            word = "line is no row" if bad == 1 else "lines are no rows"
            yield f"{name}:{self.named[0]}: {bad} {word} of its header: left out (line {some})"

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()

    def read(self, size: int | None = -1) -> str:
        """Returns the next lines, whatever `size`, "" at the end."""
        try:
            while block := self._file.read(_BLOCK):
                whole, end, self._rest = (self._rest + block).rpartition("\n")
                clean = self._clean(whole + end)
                if len(self._rest) > _BLOCK:
                    self._raise(self._line, f"is longer than {_BLOCK // 1024} KiB")
                if clean:
                    return clean
        except OSError as e:
            raise InputError(f"{escaped(str(self.path))}: cannot be read: {e.strerror or e}") from e
        if self._rest:  # without a line end
            self.cut, self._rest = bool(self._clean(self._rest + "\n")), ""
            self.malformed += self.cut
        return ""

    def _clean(self, text: str) -> str:
        raw = text.encode("utf-8", "surrogateescape")
        marks = raw.translate(None, _UNMARKED)
        lines = marks.count(b"\n")
        first, self._line = self._line, self._line + lines
        if marks == self._row * lines and raw.isascii():
            return text
        return "".join(f"{line}\n" for n, line in enumerate(text.split("\n")[:-1], first) if self._is_row(n, line))

    def _is_row(self, number: int, line: str) -> bool:
        cells = line.count(",") + 1
        try:
            line.encode()
            if '"' in line:
                cells = len(next(csv.reader([line], strict=True)))
        except UnicodeEncodeError:
            cells = 0
        except csv.Error:
            self._raise(number, "opens a quote that is not closed")
        if "\0" in line:
            self._raise(number, "holds a NUL byte")
        if cells != self.columns and line.strip():
            self.malformed += 1
            if len(self.named) < MOST_NAMED:
                self.named.append(number)
        return cells == self.columns

    def _raise(self, number: int, what: str) -> NoReturn:
        raise InputError(f"{escaped(str(self.path))}:{number}: {what}: the file is damaged; mend or remove the line")
