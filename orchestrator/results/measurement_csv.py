"""Reads a CSV of measurements with pandas: its header, its columns by meaning, and its rows in chunks.

Call `read_header`, `measurement_columns`, then `chunks` on the file's `CleanLines`, which leave out damaged lines.

Columns are found by name, whatever their date and order. Some names changed over AITER's history or differ between
families: solidx for kernelId, err_ratio for errRatio, total_us for us (fmoe, before 2025-11). A benchmark is long
(`backend,us`) or wide (`triton_us,triton_tflops,...`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

import pandas as pd

from orchestrator.backend_names import legal_name, name_by_owner
from orchestrator.errors import InputError
from orchestrator.files.faults import Faults, escaped
from orchestrator.files.read import decode, open_file
from worker.families import Family
from worker.text import plural

MAX_LINE = 1 << 16
"""Characters of a line. AITER's longest lines have some 400."""
MAX_COLUMNS = 200
"""Columns of a header. AITER's widest table, tuned_fmoe.csv, has 26."""
MOST_NAMED = 5
"""Bad lines that a note names by number."""
_BLOCK = 1 << 17
"""Characters that are looked at together. A line of more is refused."""
_CHUNK = 100_000
"""Rows in a frame; 200,000 take pandas a fifth longer."""
_UNMARKED = bytes(set(range(256)) - set(b',\n"\0'))
"""All bytes but those that tell whether a block consists of plain rows."""
NULLS = ["Null", "null", "NULL", "None", ""]
"""Cells without a value. AITER writes `Null`, which pandas does not know."""
_ALIASES = {
    "us": ("us", "time_us", "total_us"),
    "err": ("errratio", "err_ratio", "err"),
    "kernel": ("kernelname", "kernel_name", "kernelname1", "kernel"),
    "kernel_id": ("kernelid", "kernel_id", "solidx"),
    "libtype": ("libtype", "backend"),
    "gfx": ("gfx",),
    "cu_num": ("cu_num",),
}
"""The names of a column in lower case, by its meaning; the first that the header has counts."""
_TEXTS = ("kernel", "kernel_id", "libtype", "gfx")
US = "_us"
"""The end of the name of a backend's column of times in a wide benchmark."""


class ForeignError(InputError):
    """The file is not a table at all (empty, binary, compressed). In a folder such a file is passed over."""


def read_header(path: Path) -> tuple[str, ...]:
    """The stripped names in a CSV's first line. Raises ForeignError or InputError."""
    faults = Faults(path)
    with open_file(path, InputError) as f:
        beginning = f.read(MAX_LINE)
    text = decode(beginning, faults)
    line = text.lines[0] if text else ""
    if text and len(text.lines) == 1 and len(beginning) == MAX_LINE:
        raise InputError(f"{escaped(str(path))}:1: is longer than {MAX_LINE} bytes, which no header of a table is")
    names = tuple(c.strip() for c in next(csv.reader([line]), ()))
    if text and not any(names):
        faults.add("holds no header", line=1)
    faults.raise_as(ForeignError)
    if len(names) > MAX_COLUMNS:
        raise InputError(f"{escaped(str(path))}:1: has {len(names)} columns, which no table of this kind has")
    return names


@dataclass(frozen=True, slots=True)
class MeasurementColumns:
    """The columns of a header by meaning, as column numbers. `roles` are the keys of _ALIASES, `keys` the family's key
    columns that are there, `wide` the columns of times of a wide benchmark by backend."""

    roles: dict[str, int]
    keys: dict[str, int]
    wide: dict[str, int]


def measurement_columns(header: Sequence[str], family: Family) -> MeasurementColumns:
    """Finds out what the columns of a header mean for a family."""
    numbers: dict[str, int] = {}
    for i, name in enumerate(header):
        if name:
            numbers.setdefault(name.lower(), i)
    roles = {}
    for role, aliases in _ALIASES.items():
        alias = next((name for name in aliases if name in numbers), None)
        if alias:
            roles[role] = numbers[alias]
    keys = {c.name: numbers[c.name.lower()] for c in family.columns if c.name.lower() in numbers}
    wide = {}
    if "us" not in roles:
        for name, i in numbers.items():
            backend = legal_name(name.removesuffix(US))
            if backend and name.endswith(US):
                wide[name_by_owner(backend)] = i
    return MeasurementColumns(roles, keys, wide)


def chunks(lines: CleanLines, columns: MeasurementColumns, family: Family) -> Iterator[pd.DataFrame]:
    """The rows of a file, some 100,000 at a time, in columns named by their meaning (a key column by its own name).

    Numbers are float or int, NaN where a cell does not hold one; texts are categories. Raises InputError where a line
    makes the rest of the file unreadable.
    """
    names = {i: name for name, i in (columns.roles | columns.keys).items()}
    names |= {i: backend + US for backend, i in columns.wide.items()}
    texts = {column.name for column in family.columns if column.kind == "text"} | set(_TEXTS)
    numeric = [name for name in names.values() if name not in texts]
    with lines:
        try:
            reader = pd.read_csv(
                lines,
                header=None,
                names=[names.get(i, f" {i}") for i in range(lines.columns)],
                chunksize=_CHUNK,
                usecols=list(names.values()),
                # a kernel's name is repeated in thousands of rows: as a category it is held once
                dtype={name: "category" for name in names.values() if name in texts},
                na_values=NULLS,
                low_memory=False,
                index_col=False,
                engine="c",
            )
        except pd.errors.EmptyDataError:
            return
        with reader:
            for chunk in reader:
                yield chunk.assign(**{name: pd.to_numeric(chunk[name], errors="coerce") for name in numeric})


class CleanLines(io.TextIOBase):
    """The lines of a CSV below its header, for pandas, without those that are not rows of it.

    pandas itself would fill up a line that is too short, and cut one that is too long. `malformed`: the number of lines
    left out, of which `named` has the first few numbers; `cut`: the last line has no end, so that its last cell may be
    the beginning of another number. Reading raises InputError, with the line, if nothing after it can be trusted.
    """

    def __init__(self, path: Path, columns: int) -> None:
        open_file(path, InputError).close()
        self.path = path
        self.columns = columns
        self.malformed = 0
        self.named: list[int] = []
        self.cut = False
        self._file: TextIO = path.open(encoding="utf-8-sig", errors="surrogateescape")  # all line ends become \n
        self._file.readline()
        self._line = 2
        self._rest = ""
        self._row = b"," * (columns - 1) + b"\n"

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        """pandas asks for it and does not call it."""
        return iter(self.read, "")

    def notes(self) -> Iterator[str]:
        """Sentences on the lines that were left out."""
        name = escaped(str(self.path))
        if self.cut:
            how = "left out (add a line end if it is whole)"
            yield f"{name}: its last line has no line end and may be cut short: {how}"
        bad = self.malformed - self.cut
        if bad:
            more = ", ..." if bad > MOST_NAMED else ""
            what = plural(bad, "line is not a row", "lines are not rows")
            numbers = ", ".join(map(str, self.named))
            yield f"{name}:{self.named[0]}: {what} of its header: left out (line {numbers}{more})"

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()

    def read(self, size: int | None = -1) -> str:
        """Returns the next lines, whatever `size`, "" at the end."""
        try:
            while True:
                block = self._file.read(_BLOCK)
                if not block:
                    break
                whole, end, self._rest = (self._rest + block).rpartition("\n")
                clean = self._clean(whole + end)
                if len(self._rest) > _BLOCK:
                    self._raise(self._line, f"is longer than {_BLOCK // 1024} KiB")
                if clean:
                    return clean
        except OSError as e:
            raise InputError(f"{escaped(str(self.path))}: cannot be read: {e.strerror or e}") from e
        if self._rest:  # without a line end
            self.cut = bool(self._clean(f"{self._rest}\n"))
            self._rest = ""
            self.malformed += self.cut
        return ""

    def _clean(self, text: str) -> str:
        """The lines of `text` that are rows. A block of plain rows is recognised as a whole, by its commas alone."""
        raw = text.encode("utf-8", "surrogateescape")
        marks = raw.translate(None, _UNMARKED)
        count = marks.count(b"\n")
        first = self._line
        self._line += count
        if marks == self._row * count and raw.isascii():
            return text
        lines = enumerate(text.split("\n")[:-1], first)
        return "".join(f"{line}\n" for number, line in lines if self._is_row(number, line))

    def _is_row(self, number: int, line: str) -> bool:
        if "\0" in line:
            self._raise(number, "holds a NUL byte")
        try:
            cells = len(next(csv.reader([line], strict=True))) if '"' in line else line.count(",") + 1
            line.encode()
        except UnicodeEncodeError:
            cells = 0
        except csv.Error:
            self._raise(number, "opens a quote that is not closed")
        if cells != self.columns and line.strip():
            self.malformed += 1
            if len(self.named) < MOST_NAMED:
                self.named.append(number)
        return cells == self.columns

    def _raise(self, number: int, what: str) -> NoReturn:
        raise InputError(f"{escaped(str(self.path))}:{number}: {what}: the file is damaged; mend or remove the line")
