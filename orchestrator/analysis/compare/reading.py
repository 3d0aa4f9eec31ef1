"""The CSVs of one side, read row by row in bounded memory; every fault named with its file and line."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.analysis.compare.columns import Columns, read_columns
from orchestrator.errors import InputError
from orchestrator.tables.backends import owned
from orchestrator.tables.faults import Faults, escaped, shown
from orchestrator.tables.open import open_file, read_head, text_lines
from orchestrator.tables.tuned import NULLS
from worker.text import plural

Key = tuple[str, ...]
"""The kernel, then the cells of the shape's columns."""
Run = tuple[int, int]
"""(number of the file, number of the repeat)."""

MAX_HEADER = 1 << 16
MAX_CELL = 4096
MAX_ROWS = 1_000_000
MAX_REPEATS = 100
MAX_CHIPS = 8
_OK = ("ok", "", "unstable", "short")
"""A bench's statuses of rows that have a time."""


@dataclass(slots=True)
class Side:
    """What was measured on one side. `numbered`: every file has a run column; `in_turn`: an order column says
    interleaved in every row of every file."""

    shape: tuple[str, ...] = ()
    times: dict[Key, dict[Run, float]] = field(default_factory=dict)
    chip: dict[str, set[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    numbered: bool = True
    in_turn: bool = True


def read_side(paths: Sequence[Path], dropped: Sequence[str] = ()) -> Side:
    """Read all CSVs of a side, without the columns that are `dropped`. Raises InputError with every fault."""
    side, faults, seen = Side(), list[str](), dict[tuple[int, int], Path]()
    for number, path in enumerate(paths):
        try:
            with open_file(path, InputError) as f:
                status = os.fstat(f.fileno())
            same = seen.setdefault((status.st_dev, status.st_ino), path)
            if same is not path:
                raise InputError(f"{escaped(str(path))}: is given twice on one side, also as {escaped(str(same))}")
            _File(path, number, side, dropped).read()
        except InputError as e:
            faults += e.faults
    if not faults and not side.times:
        faults.append(f"{', '.join(escaped(str(p)) for p in paths)}: no row has a time")
    if not faults:
        several = [f"{n} {', '.join(sorted(v))}" for n, v in side.chip.items() if len(v) > 1]
        if several:
            faults.append(
                f"{escaped(str(paths[0]))}: holds rows of several chips ({'; '.join(several)}): cut them apart"
            )
    if faults:
        raise InputError(faults)
    return side


def header_of(path: Path) -> list[str]:
    """The first line of a CSV as cells; [] where it has none that can be read. Raises InputError."""
    line = read_head(path, MAX_HEADER, InputError).partition("\n")[0]
    return next(csv.reader([line.strip("\r\n")]), []) if len(line) < MAX_HEADER else []


class _StopError(Exception):
    """The rest of the file makes no sense; the fault is noted."""


class _File:
    """One file on its way into a side."""

    def __init__(self, path: Path, number: int, side: Side, dropped: Sequence[str]) -> None:
        self.path, self.number, self.side, self.dropped = path, number, side, dropped
        self.faults, self.left_out = Faults(path), Counter[str]()
        self.line, self.whole = 0, True
        self.first: dict[tuple[Key, int], int] = {}
        self.ordinal: Counter[Key] = Counter()

    def read(self) -> None:
        """Read it to its end. Raises InputError with every fault up to the first that ends the reading."""
        rows = csv.reader(self._lines())
        columns: Columns | None = None
        data = 0
        try:
            for cells in rows:
                if not any(c.strip() for c in cells):
                    continue
                if columns is None:
                    columns = self._header(cells)
                    continue
                data += 1
                self._row(cells, columns)
        except csv.Error as e:
            self.faults.add(f"is no CSV: {e}", line=self.line)
        except _StopError:
            pass
        except InputError as e:
            raise InputError([*self.faults.texts, *e.faults]) from e
        if not self.faults.count and columns is None:
            self.faults.add("is empty")
        elif not self.faults.count and not data:
            self.faults.add("no row follows the header", line=self.line)
        self.faults.raise_as(InputError)
        where = escaped(str(self.path))
        self.side.notes += [f"{where}: left out {plural(n, 'row')} {why}" for why, n in self.left_out.items()]
        if not self.whole:
            self.side.notes.append(f"{where}:{self.line}: does not end in a line end; was the last row cut short?")

    def _lines(self) -> Iterator[str]:
        for text in text_lines(self.path, None, InputError):
            self.line += 1
            self.whole = text.endswith(("\n", "\r"))
            yield text.removeprefix("\ufeff") if self.line == 1 else text

    def _stop(self, what: str) -> None:
        self.faults.add(what, line=self.line)
        raise _StopError

    def _header(self, cells: list[str]) -> Columns:
        columns = read_columns(cells, self.dropped)
        if isinstance(columns, list):
            for fault in columns:
                self.faults.add(fault, line=self.line)
            raise _StopError
        shape = self.side.shape
        if shape and set(columns.shape_names) != set(shape):
            odd = sorted(set(columns.shape_names) ^ set(shape))
            self._stop(f"its shape columns differ from the file before it by {', '.join(map(shown, odd))}"
                       f"; leave out what is no part of a shape with --ignore-column")  # fmt: skip
        self.side.shape = shape or columns.shape_names
        self.side.numbered &= columns.run is not None
        self.side.in_turn &= columns.order is not None
        return columns

    def _row(self, cells: list[str], columns: Columns) -> None:
        if len(cells) != len(columns.names):
            self.faults.add(f"has {len(cells)} cells, the header {len(columns.names)}; was the file cut short?",
                            line=self.line)  # fmt: skip
            return
        if columns.status is not None and cells[columns.status].strip() not in _OK:
            self.left_out["whose status is not ok"] += 1
            return
        places = dict(columns.shape)
        shape = tuple(_plain(cells[places[name]]) for name in self.side.shape)
        if any(len(c) > MAX_CELL for c in cells):
            self.faults.add(f"a cell is longer than {MAX_CELL} characters", line=self.line)
            return
        if columns.order is not None and cells[columns.order].strip() != "interleaved":
            self.side.in_turn = False
        for name, place in columns.chip:
            found = self.side.chip.setdefault(name, set())
            if cells[place].strip() not in NULLS and len(found) < MAX_CHIPS:
                found.add(_plain(cells[place]))
        named = " + ".join(k for i in columns.kernel if (k := cells[i].strip()) not in NULLS)
        told = cells[columns.told].strip() if columns.told is not None else ""
        for backend, place in columns.times:
            us = self._time(cells[place].strip(), columns, place)
            if us is not None:
                self._add((owned(backend, told) if backend else named, *shape), us, cells, columns)

    def _time(self, cell: str, columns: Columns, place: int) -> float | None:
        try:
            us = float(cell)
        except ValueError:
            us = math.nan
            if cell not in NULLS:
                self.faults.add(f"{shown(cell)} is not a number", line=self.line, column=columns.names[place])
                return None
        if math.isfinite(us) and us > 0:
            return us
        if columns.lenient:
            self.left_out["without a time"] += 1
        else:
            self.faults.add(f"{shown(cell)} is no time: drop the row, or say so in a column status",
                            line=self.line, column=columns.names[place])  # fmt: skip
        return None

    def _add(self, key: Key, us: float, cells: list[str], columns: Columns) -> None:
        if not key[0]:
            self.faults.add("names no kernel", line=self.line)
            return
        self.ordinal[key] += 1
        run = self.ordinal[key]
        if columns.run is not None:
            text = _plain(cells[columns.run])
            if not (text.isascii() and text.isdigit() and len(text) < 10):
                self.faults.add(f"{shown(text)} is no number of a repeat", line=self.line, column="run")
                return
            run = int(text)
            first = self.first.setdefault((key, run), self.line)
            if first != self.line:
                self.faults.add(f"run {run} of this kernel and shape is in line {first} already: drop one, or give the"
                                " repeats numbers of their own", line=self.line)  # fmt: skip
                return
        times = self.side.times.setdefault(key, {})
        times[self.number, run] = us
        if len(times) > MAX_REPEATS:
            self._stop(f"more than {MAX_REPEATS} repeats of one kernel and shape: is a column of the shape missing?")
        if len(self.ordinal) > MAX_ROWS:
            self._stop(f"more than {MAX_ROWS:,} different rows: compare the tuned tables or a benchmark")


def _plain(cell: str) -> str:
    """A cell as it is joined: `128`, ` 128` and `128.0` are one."""
    text = cell.strip()
    if text.endswith(".0") and text[:-2].isascii() and text[:-2].isdigit():
        return text[:-2]
    return text
