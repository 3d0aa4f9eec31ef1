"""The CSVs of one side of a comparison, read row by row in bounded memory; every fault is named with file and line."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.tables.backends import owned
from orchestrator.tables.faults import Faults, did_you_mean, escaped, shown
from orchestrator.tables.open import open_file, read_head, text_lines
from orchestrator.tables.tuned import NULLS
from worker.families import FAMILIES
from worker.text import plural

TIMES = ("us", "time_us")
KERNELS = (
    ("kernel",),
    ("backend", "op"),
    ("kernelName",),
    ("kernelName1", "kernelName2"),
    ("kernelName1",),
    ("backend",),
)
"""Columns that name the kernel, the first that is there."""
RUNS = ("run", "repeat")
CHIP = ("gfx", "cu_num")
ORDER = "order"
CONFIG = "aiter_config"
"""File, bucket and values of the config that a row was measured with, as a bench of config sets writes them."""
STATUS = "status"
_SHAPE = {name for f in FAMILIES.values() for name in f.key_names}
# fmt: off
RESULTS = {
    *(c for f in FAMILIES.values() for c in f.result_columns if c not in ("splitK", "libtype") and c not in _SHAPE),
    "attempt", "node", "slot", "spread", "samples", "margin", "winner", "detail", "unconfirmed", "env",
    "gbps", "GB/s", "tflops", "TFLOPS", "std", "stddev", "min_us", "max_us", "median_us", "mean_us", "error", "errors",
    "captured", "timestamp", "_tag",
    "op", "timer", "fastest", CONFIG,
}
# fmt: on
_OF_RUNS = ("_spread", "_samples", "_status")
"""Endings of the columns in which a bench.csv describes a backend besides its time."""
MAX_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a file by meaning. `shape` are (name, place); `times` are (kernel or None, place), several in a
    wide file.

    `lenient`: the file is a tuner's or a wide one, in which a row without a time is ordinary.
    """

    names: tuple[str, ...]
    kernel: tuple[int, ...]
    shape: tuple[tuple[str, int], ...]
    times: tuple[tuple[str | None, int], ...]
    run: int | None
    order: int | None
    status: int | None
    chip: tuple[tuple[str, int], ...]
    lenient: bool
    config: int | None = None

    @property
    def shape_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.shape)


def is_timing(header: Sequence[str]) -> bool:
    """True for a header of timings, and not of a comparison that was written here."""
    names = [h.strip() for h in header]
    return "verdict" not in names and any(n in TIMES or n.endswith("_us") for n in names)


def read_columns(header: Sequence[str], dropped: Sequence[str] = ()) -> Columns | list[str]:
    """The meaning of a header without the columns that are `dropped`; what is wrong with it where it has none."""
    names = tuple(h.strip() for h in header)
    if len(names) > MAX_COLUMNS:
        return [f"the header has {len(names)} columns, which is no table of timings"]
    faults = [f"column {shown(n)} is there {c} times: drop one" for n, c in Counter(names).items() if c > 1]
    faults += [f"column {i} has no name: name it or drop it" for i, n in enumerate(names, 1) if not n]
    if faults:
        return faults
    at = {name: i for i, name in enumerate(names)}
    time = next((at[t] for t in TIMES if t in at), None)
    wide = {n.removesuffix("_us"): i for n, i in at.items() if n.endswith("_us") and n not in (*TIMES, *RESULTS)}
    kernel = next((tuple(at[n] for n in some) for some in KERNELS if all(n in at for n in some)), ())
    if time is None and (not wide or kernel):
        near = next((d for n in names if (d := did_you_mean(n, TIMES)) and "us" in n.lower()), "")
        return [f"has no column us or time_us{near}; its columns are {escaped(', '.join(names))[:300]}"]
    if time is not None and not kernel:
        return [f"has no column kernel (or kernelName, or backend); its columns are {escaped(', '.join(names))[:300]}"]
    used = {
        *kernel,
        *(at[n] for n in (*TIMES, *RUNS, *CHIP, ORDER, STATUS) if n in at),
        *(at.get(d, -1) for d in dropped),
    }
    if time is None:
        used |= {i for n, i in at.items() if n.endswith(("_us", "_tflops"))}
    shape = tuple((n, i) for n, i in at.items() if i not in used and n not in RESULTS and not n.endswith(_OF_RUNS))
    if not shape:
        return ["has no column of a shape, such as M,N,K"]
    return Columns(
        names,
        kernel,
        shape,
        ((None, time),) if time is not None else tuple(wide.items()),
        next((at[r] for r in RUNS if r in at), None),
        at.get(ORDER),
        at.get(STATUS),
        tuple((n, at[n]) for n in CHIP if n in at),
        time is None or names[kernel[0]] != "kernel",
        at.get(CONFIG),
    )


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
class Timings:
    """The times of one side. `numbered`: every file has a run column; `in_turn`: an order column says
    interleaved in every row of every file; `configs`: the config of a key, where rows name it."""

    shape: tuple[str, ...] = ()
    times: dict[Key, dict[Run, float]] = field(default_factory=dict)
    chip: dict[str, set[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    numbered: bool = True
    in_turn: bool = True
    configs: dict[Key, str] = field(default_factory=dict)


def read_side(paths: Sequence[Path], dropped: Sequence[str] = ()) -> Timings:
    """Read all CSVs of a side, without the columns that are `dropped`. Raises InputError with every fault."""
    side, faults, seen = Timings(), list[str](), dict[tuple[int, int], Path]()
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

    def __init__(self, path: Path, number: int, side: Timings, dropped: Sequence[str]) -> None:
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
        for backend, place in columns.times:
            us = self._time(cells[place].strip(), columns, place)
            if us is not None:
                self._add((owned(backend) if backend else named, *shape), us, cells, columns)

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
        if columns.config is not None:
            self.side.configs[key] = cells[columns.config].strip()
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
