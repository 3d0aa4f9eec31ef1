"""Reads the CSVs of one side of a comparison, row by row. Every fault is named with file and line."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.tables.backends import owned
from orchestrator.tables.faults import Faults, did_you_mean, escaped, shown
from orchestrator.tables.open import csv_records, open_file, read_head
from orchestrator.tables.tuned import NULLS
from worker.families import FAMILIES
from worker.text import plural

Key = tuple[str, ...]  # the kernel, then the cells of the shape's columns
Run = tuple[int, int]  # number of the file, number of the repeat

TIMES = ("us", "time_us")
# columns that name the kernel: the first set of them that is there
KERNELS = (
    ("kernel",), ("backend", "op"), ("kernelName",), ("kernelName1", "kernelName2"), ("kernelName1",), ("backend",),
)  # fmt: skip
RUNS = ("run", "repeat")
CHIP = ("gfx", "cu_num")
CONFIG = "aiter_config"  # file, bucket and values of the config that a row was measured with
_SHAPE = {name for f in FAMILIES.values() for name in f.key_names}
# columns that describe a measurement: they belong neither to the shape nor to the kernel
RESULTS = {
    *(c for f in FAMILIES.values() for c in f.result_columns if c not in ("splitK", "libtype") and c not in _SHAPE),
    "attempt", "node", "slot", "spread", "samples", "margin", "winner", "detail", "unconfirmed", "env",
    "gbps", "GB/s", "tflops", "TFLOPS", "std", "stddev", "min_us", "max_us", "median_us", "mean_us", "error", "errors",
    "captured", "timestamp", "_tag", "op", "timer", "fastest", "order", "status", CONFIG, *TIMES, *RUNS, *CHIP,
}  # fmt: skip
_ENDINGS = ("_spread", "_samples", "_status")  # of columns in which a bench.csv describes a backend
_OK = ("ok", "", "unstable", "short")  # a bench's statuses of rows that have a time
MAX_HEADER = 1 << 16
MAX_REPEATS = 100
MAX_ROWS = 1_000_000


@dataclass(slots=True)
class Side:
    """One side of a comparison: the times of its CSVs, and the records of what they were measured with.

    `shape`: names of the shape's columns; `chip`: values of the columns that name the chip; `numbered`: every file has
    a column of runs; `in_turn`: the column `order` says interleaved in every row; `configs`: the config of a key, if
    rows name it.
    """

    name: str
    files: list[Path]
    shape: tuple[str, ...] = ()
    times: dict[Key, dict[Run, float]] = field(default_factory=dict)
    chip: dict[str, set[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    numbered: bool = True
    in_turn: bool = True
    configs: dict[Key, str] = field(default_factory=dict)
    records: list[dict[str, str]] = field(default_factory=list)


def read_side(name: str, paths: Sequence[Path], dropped: Sequence[str] = ()) -> Side:
    """Reads all CSVs of a side, without the columns that are `dropped`. Raises InputError with every fault."""
    side, faults, seen = Side(name, list(paths)), list[str](), dict[tuple[int, int], Path]()
    for number, path in enumerate(paths):
        try:
            with open_file(path, InputError) as f:
                status = os.fstat(f.fileno())
            if (same := seen.setdefault((status.st_dev, status.st_ino), path)) is not path:
                raise InputError(f"{escaped(str(path))}: is given twice on one side, also as {escaped(str(same))}")
            _File(path, number, side).read(dropped)
        except InputError as e:
            faults += e.faults
    where = ", ".join(escaped(str(p)) for p in paths)
    if not faults and not side.times:
        faults.append(f"{where}: no row has a time")
    if several := [f"{n} {', '.join(sorted(v))}" for n, v in side.chip.items() if len(v) > 1]:
        faults.append(f"{where}: holds rows of several chips ({'; '.join(several)}): cut them apart")
    if faults:
        raise InputError(faults)
    return side


def is_timing(path: Path) -> bool:
    """True if a CSV's header is one of timings, and not of a comparison that was written here. Raises InputError."""
    line = read_head(path, MAX_HEADER, InputError).partition("\n")[0]
    names = [h.strip() for h in next(csv.reader([line.strip("\r")]), [])]
    return "verdict" not in names and any(n in TIMES or n.endswith("_us") for n in names)


class _File:
    """One file on its way into a side. `at`: columns by name; `times`: (backend or None, column), several if wide."""

    def __init__(self, path: Path, number: int, side: Side) -> None:
        self.path, self.number, self.side = path, number, side
        self.faults, self.left_out, self.ordinal = Faults(path), Counter[str](), Counter[Key]()
        self.first: dict[tuple[Key, int], int] = {}
        self.line = 0
        self.at: dict[str, int] = {}
        self.kernel: tuple[str, ...] = ()
        self.times: list[tuple[str | None, str]] = []

    def read(self, dropped: Sequence[str]) -> None:
        """Reads it to its end. Raises InputError with every fault up to the first that ends the reading."""
        header, ended = 0, True
        try:
            for line, text, cells in csv_records(self.path, None):
                self.line, ended = line, text.endswith("\n")
                if any(cells) and header:
                    self._row(cells)
                elif any(cells):
                    header = self.line
                    self._header([c.removeprefix("\ufeff") for c in cells], dropped)
        except InputError as e:
            raise InputError([*self.faults.texts, *e.faults]) from e
        if not header:
            self.faults.add("is empty")
        elif self.line == header:
            self.faults.add("no row follows the header", line=header)
        self.faults.raise_as(InputError)
        where = escaped(str(self.path))
        self.side.notes += [f"{where}: left out {plural(n, 'row')} {why}" for why, n in self.left_out.items()]
        if not ended:
            self.side.notes.append(f"{where}:{self.line}: does not end in a line end; was the last row cut short?")

    def _stop(self, what: str) -> None:
        raise InputError(f"{escaped(str(self.path))}:{self.line}: {what}")

    def _header(self, names: list[str], dropped: Sequence[str]) -> None:
        twice = next((n for n, c in Counter(names).items() if c > 1 and n), None)
        if twice or "" in names:
            unnamed = f"column {names.index('') + 1} has no name: name it or drop it" if "" in names else ""
            self._stop(unnamed or f"column {shown(str(twice))} is there {names.count(str(twice))} times: drop one")
        self.at = {name: i for i, name in enumerate(names)}
        columns = f"its columns are {escaped(', '.join(names))[:300]}"
        time = next((t for t in TIMES if t in self.at), None)
        self.kernel = next((some for some in KERNELS if all(n in self.at for n in some)), ())
        wide = [] if time else [n for n in names if n.endswith("_us") and n not in RESULTS]
        self.times = [(None, time)] if time else [(owned(n.removesuffix("_us")), n) for n in wide]
        if time is None and (not wide or self.kernel):
            near = next((d for n in names if (d := did_you_mean(n, TIMES)) and "us" in n.lower()), "")
            self._stop(f"has no column us or time_us{near}; {columns}")
        if time and not self.kernel:
            self._stop(f"has no column kernel (or kernelName, or backend); {columns}")
        other = RESULTS | {*self.kernel, *dropped, *(n for n in names if wide and n.endswith(("_us", "_tflops")))}
        shape = tuple(n for n in names if n not in other and not n.endswith(_ENDINGS))
        if not shape:
            self._stop("has no column of a shape, such as M,N,K")
        self.side.shape = self.side.shape or shape
        if odd := sorted(set(shape) ^ set(self.side.shape)):
            hint = "leave out what is no part of a shape with --ignore-column"
            self._stop(f"its shape columns differ from the file before it by {', '.join(map(shown, odd))}; {hint}")
        self.side.numbered &= any(n in self.at for n in RUNS)

    def _row(self, cells: Sequence[str]) -> None:
        if len(cells) != len(self.at):
            what = f"has {len(cells)} cells, the header {len(self.at)}; was the file cut short?"
            self.faults.add(what, line=self.line)
            return
        row = dict(zip(self.at, cells, strict=True))
        if row.get("status", "") not in _OK:
            self.left_out["whose status is not ok"] += 1
            return
        self.side.in_turn &= row.get("order") == "interleaved"
        for name in CHIP:
            self.side.chip.setdefault(name, set()).update({_plain(row.get(name, ""))} - NULLS)
        kernel = " + ".join(row[n] for n in self.kernel if row[n] not in NULLS)
        for backend, column in self.times:
            us = self._time(row[column], column)
            if us is not None:
                self._add((backend or kernel, *(_plain(row[n]) for n in self.side.shape)), us, row)

    def _time(self, cell: str, column: str) -> float | None:
        try:
            us = float("nan" if cell in NULLS else cell)
        except ValueError:
            self.faults.add(f"{shown(cell)} is not a number", line=self.line, column=column)
            return None
        if math.isfinite(us) and us > 0:
            return us
        if self.kernel == ("kernel",):
            what = f"{shown(cell)} is no time: drop the row, or say so in a column status"
            self.faults.add(what, line=self.line, column=column)
        else:  # in a tuner's table or a wide one, a row without a time is ordinary
            self.left_out["without a time"] += 1
        return None

    def _add(self, key: Key, us: float, row: dict[str, str]) -> None:
        self.ordinal[key] += 1
        run = _plain(next((row[n] for n in RUNS if n in row), str(self.ordinal[key])))
        if not key[0]:
            self.faults.add("names no kernel", line=self.line)
        elif not (run.isascii() and run.isdigit() and len(run) < 10):
            self.faults.add(f"{shown(run)} is no number of a repeat", line=self.line, column="run")
        elif (first := self.first.setdefault((key, int(run)), self.line)) != self.line:
            what = f"run {run} of this kernel and shape is in line {first} already"
            self.faults.add(f"{what}: drop one, or give the repeats numbers of their own", line=self.line)
        else:
            self.side.times.setdefault(key, {})[self.number, int(run)] = us
            if CONFIG in row:
                self.side.configs[key] = row[CONFIG]
        if self.ordinal[key] > MAX_REPEATS:
            self._stop(f"more than {MAX_REPEATS} repeats of one kernel and shape: is a column of the shape missing?")
        if len(self.ordinal) > MAX_ROWS:
            self._stop(f"more than {MAX_ROWS:,} different rows: compare the tuned tables or a benchmark")


def _plain(cell: str) -> str:
    """A cell as it is joined: `128` and `128.0` are one."""
    whole = cell.removesuffix(".0")
    return whole if whole.isascii() and whole.isdigit() else cell
