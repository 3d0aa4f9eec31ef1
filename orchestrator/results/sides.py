"""Reads the two sides of `compare` from CSVs: tables of a tuner or a bench, or profiles of rocprofv3.

`golden` is the old side, `tot` (top of tree) the new one. `compare` calls `read_sides`; `comparison.py` joins the rows
and judges them. The record beside a CSV, which says where it was measured, is in `environment_record.py`. Every fault
names file and line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd

from orchestrator.errors import InputError
from orchestrator.files.faults import Faults, escaped, shown
from orchestrator.files.read import csv_records
from orchestrator.paths import RunPaths
from orchestrator.results.bench import MEASURED
from orchestrator.results.environment_record import Fields, join_records, read_record
from orchestrator.results.measurement_csv import read_header
from orchestrator.tables.run_folders import locate_input
from worker.families import FAMILIES, NULLS
from worker.text import plural

Line = tuple[int, Sequence[str]]
"""(number of a line, its cells)."""
ROCPROF_STATS = {"Name", "Calls", "AverageNs"}
ROCPROF_TRACE = {"Kernel_Name", "Start_Timestamp", "End_Timestamp"}
GRID = ("Grid_Size_X", "Grid_Size_Y", "Grid_Size_Z")
"""Columns of the two CSVs of rocprofv3 that hold times of kernels."""
TIMES = ("us", "time_us")
# columns that name the kernel: the first set that the file has
KERNELS = (
    ("kernel",),
    ("backend", "op"),
    ("kernelName",),
    ("kernelName1", "kernelName2"),
    ("kernelName1",),
    ("backend",),
)
ANY_KERNEL = "any"
"""The kernel of all rows if the column that names it is left out."""
RUNS = ("run", "repeat")
CHIP = ("gfx", "cu_num")
CONFIG = "aiter_config"
"""The column of the file, bucket and values of the config that a row was measured with."""
_OUR_RESULTS = {name for family in FAMILIES.values() for name in family.result_columns}
_OUR_KEYS = {name for family in FAMILIES.values() for name in family.key_names}
# columns that describe a measurement, and belong neither to the shape nor to the kernel
RESULTS = {
    *(_OUR_RESULTS - _OUR_KEYS - {"splitK", "libtype"}),
    "attempt",
    "node",
    "slot",
    "spread",
    "samples",
    "margin",
    "winner",
    "detail",
    "unconfirmed",
    "env",
    "gbps",
    "GB/s",
    "tflops",
    "TFLOPS",
    "std",
    "stddev",
    "min_us",
    "max_us",
    "median_us",
    "mean_us",
    "error",
    "errors",
    "captured",
    "timestamp",
    "_tag",
    "op",
    "timer",
    "fastest",
    "order",
    "status",
    CONFIG,
    *TIMES,
    *RUNS,
    *CHIP,
}
MAX_REPEATS = 100
MAX_LINES = 1_000_000


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """One side of a comparison: the times of its CSVs, and the records of the environments that measured them.

    `rows` has a row for each repeat: `kernel`, the shape's columns as text, `us`, and `aiter_config` if a file has it.
    `fields` joins all records, and adds the chip that the rows name. `notes` list the rows that were left out.
    """

    name: str
    files: list[Path]
    rows: pd.DataFrame
    records: list[Fields]
    fields: Fields
    notes: list[str]


def read_sides(sources: Mapping[str, Sequence[str]], runs: Path, dropped: Sequence[str] = ()) -> list[ComparedSide]:
    """Reads the sides, each given as files, folders or runs, without the `dropped` columns.

    All files must have the same shape columns. A file that is given twice counts once. Raises InputError with the
    faults of all files.
    """
    faults: list[str] = []
    sides: list[ComparedSide] = []
    shapes: dict[Path, set[str]] = {}
    for name, side_sources in sources.items():
        files = list({path.resolve(): path for source in side_sources for path in _csv_files(source, runs)}.values())
        parts: list[pd.DataFrame] = []
        notes: list[str] = []
        for path in files:
            try:
                rows = _read_rows(path, dropped, notes)
            except InputError as e:
                faults += e.faults
                continue
            parts.append(rows)
            shapes[path] = {*rows.columns} - {"us", *CHIP, CONFIG}
            first, first_shape = next(iter(shapes.items()))
            odd = sorted(shapes[path] ^ first_shape)
            if odd:
                faults.append(
                    f"{escaped(str(path))}:1: the columns of its shape differ from those of {escaped(str(first))} by"
                    f" {', '.join(map(shown, odd))}: leave out columns that are not part of a shape with"
                    " --ignore-column NAME"
                )
        if not faults:
            sides.append(_make_side(name, files, parts, notes, faults))
    if faults:
        raise InputError(faults)
    return sides


def _csv_files(source: str, runs: Path) -> list[Path]:
    """The file of that name, the CSVs with times in a folder, or the best result file of a run. Raises InputError."""
    kind, path = locate_input(source, runs)
    if kind == "file":
        return [path]
    if kind == "folder":
        files = [p for p in sorted(path.glob("*.csv")) if p.is_file() and {*TIMES} & {*read_header(p)}]
    else:
        run = RunPaths(path)
        files = [p for p in (run.bench_runs, run.profile, run.tuned) if p.is_file()][:1]
    if not files:
        raise InputError(
            f"{escaped(source)}: holds no CSV of timings (columns kernel, the shape's, us), and is not"
            " a finished run (with bench_runs.csv, profile.csv or tuned.csv)"
        )
    return files


def _make_side(
    name: str, files: list[Path], parts: Sequence[pd.DataFrame], notes: list[str], faults: list[str]
) -> ComparedSide:
    """A side from the rows of its files. Adds to `faults` if they are of several chips, or if there is no row."""
    rows = pd.concat(parts, ignore_index=True)
    names = ", ".join(escaped(str(path)) for path in files)
    fields: Fields = {}
    for column in CHIP:
        if column not in rows:
            continue
        chips = sorted({*rows.pop(column).dropna()} - NULLS)
        if chips:
            fields[column] = chips[0]
        if len(chips) > 1:
            faults.append(f"{names}: holds rows of several chips ({column} {', '.join(chips)}): split the file by chip")
    if rows.empty:
        faults.append(f"{names}: no row has a time")
    records = _read_records(files)
    return ComparedSide(name, files, rows, records, fields | join_records(records), notes)


def _read_records(files: Sequence[Path]) -> list[Fields]:
    """The environment records beside these files, each once. Raises InputError."""
    paths: list[Path] = []
    for file in files:
        paths += [file.with_suffix(".env.json"), file.with_name("environment.json")]
    return [read_record(path) for path in dict.fromkeys(paths) if path.is_file()]


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a file: of its times, of the names of its kernels, of its shapes. `is_unnamed`: the user left out
    the name of the kernel."""

    names: list[str]
    time: str
    kernel: tuple[str, ...]
    shape: list[str]
    is_unnamed: bool

    @classmethod
    def find(cls, names: list[str], dropped: Sequence[str]) -> _Columns:
        time = next((name for name in TIMES if name in names), "")
        kernel = next((columns for columns in KERNELS if {*columns} <= {*names}), ())
        shape = [name for name in names if name not in {*RESULTS, *kernel, *dropped}]
        return cls(names, time, kernel, shape, bool({"kernel", *kernel} & {*dropped}))

    def fault(self, *, needs_shape: bool) -> str:
        """The fault of a header with these columns, "" for none."""
        doubled = [name for name in self.names if self.names.count(name) > 1]
        if not all(self.names):
            return "a column has no name: name it or drop it"
        if doubled:
            return f"column {shown(doubled[0])} is there {self.names.count(doubled[0])} times: drop one"
        if not self.time:
            return "has no column us or time_us"
        if not self.kernel:
            return "has no column kernel (or kernelName, or backend)"
        if not self.shape and (needs_shape or self.is_unnamed):
            return "has no column of a shape, such as M,N,K"
        return ""


def _read_frame(path: Path, dropped: Sequence[str], faults: Faults) -> tuple[pd.DataFrame, _Columns]:
    """All rows of a file as texts, indexed by the number of their line, which messages name; and what its columns mean.
    Raises InputError with the file's faults."""
    where = escaped(str(path))
    all_lines = list(islice(csv_records(path, None), MAX_LINES + 2))
    is_too_long = len(all_lines) == MAX_LINES + 2  # a file that is longer is refused, never cut
    records = [(line, cells) for line, _, cells in all_lines if any(cells)]
    if not records:
        raise InputError(f"{where}:1: is empty (columns: none)")
    (header_line, header), *lines = records
    names = [name.removeprefix("\ufeff") for name in header]
    is_profile = set(names) >= ROCPROF_STATS or set(names) >= ROCPROF_TRACE
    if is_profile:
        names, lines = _times_of_profile(names, lines, where)
    columns = _Columns.find(names, dropped)
    fault = columns.fault(needs_shape=not is_profile)
    if not fault and is_too_long:
        fault = f"more than {MAX_LINES:,} lines: compare the tuned tables or a benchmark"
    if fault:
        raise InputError(f"{where}:{header_line}: {fault} (columns: {escaped(', '.join(names))[:300] or 'none'})")
    for line, cells in lines:
        if len(cells) != len(names):
            faults.add(_wrong_length(cells, names), line=line)
    faults.raise_as(InputError)
    numbers = [line for line, _ in lines]
    frame = pd.DataFrame([cells for _, cells in lines], index=numbers, columns=pd.Index(names), dtype=object)
    return frame, columns


def _read_rows(path: Path, dropped: Sequence[str], notes: list[str]) -> pd.DataFrame:
    """The rows of a file that have a time, in the form of `ComparedSide.rows`, with the chip if the file names it. Adds
    the rows left out to `notes`. Raises InputError with the file's faults."""
    faults = Faults(path)
    frame, columns = _read_frame(path, dropped, faults)
    measured = frame
    if "status" in frame:
        measured = frame[frame["status"].isin(("", *MEASURED))]
    us = _times(measured[columns.time], columns, faults)
    for count, why in ((len(frame) - len(measured), "whose status is not ok"), (us.isna().sum(), "without a time")):
        if count:
            notes.append(f"{escaped(str(path))}: left out {plural(int(count), 'row')} {why}")
    us = us.dropna()

    # the kernel, the shape and the time of each
    timed = measured.loc[us.index].replace(r"^([0-9]+)\.0$", r"\1", regex=True)  # `128` and `128.0` are the same
    rows = timed[[*columns.shape, *(name for name in (*CHIP, CONFIG) if name in frame)]].assign(us=us)
    rows.insert(0, "kernel", _kernel_names(measured.loc[us.index], columns))
    _check_repeats(rows, timed, columns, faults)
    faults.raise_as(InputError)
    return rows


def _times_of_profile(names: Sequence[str], lines: Sequence[Line], where: str) -> tuple[list[str], list[Line]]:
    """Header and rows of a CSV of rocprofv3 as `kernelName`, the grid of a trace, `us`. Raises InputError.

    `*_kernel_stats.csv` has one averaged time a kernel, `*_kernel_trace.csv` a row a dispatch. Neither names the shape,
    so a kernel's grid stands for it, and dispatches with the same grid are repeats. The first dispatches warm up: only
    the last MAX_REPEATS of each grid count. The columns are those of ROCm 6.2 to 7.1.
    """
    grid = [name for name in GRID if name in names]
    kernel = "Name" if "Name" in names else "Kernel_Name"
    dispatches: dict[tuple[str, ...], list[Line]] = defaultdict(list)
    for number, cells in lines:
        place = f"{where}:{number}:"
        if len(cells) != len(names):
            raise InputError(f"{place} {_wrong_length(cells, names)}")
        row = dict(zip(names, cells, strict=True))
        if row.get("Kind", "KERNEL_DISPATCH") != "KERNEL_DISPATCH":
            continue
        try:
            ns = row.get("AverageNs") or int(row["End_Timestamp"]) - int(row["Start_Timestamp"])
            us = float(ns) / 1e3
        except (KeyError, ValueError) as e:
            raise InputError(f"{place} is not a row of rocprofv3: {e}; drop the row") from None
        key = (row[kernel], *(row[name] for name in grid))
        dispatches[key].append((number, [*key, f"{us:.4f}"]))
    kept = sorted(line for same in dispatches.values() for line in same[-MAX_REPEATS:])
    return ["kernelName", *grid, "us"], kept


def _wrong_length(cells: Sequence[str], names: Sequence[str]) -> str:
    return f"has {plural(len(cells), 'cell')}, the header {len(names)}; was the file cut short?"


def _times(cells: pd.Series, columns: _Columns, faults: Faults) -> pd.Series:
    """The times, NaN for none. Adds a fault for each cell that should be a time."""
    us = pd.to_numeric(cells, errors="coerce").astype(float)
    timed = us.where(np.isfinite(us) & (us > 0))
    if columns.kernel == ("kernel",):
        wrong = timed.isna()
    else:  # rows without a time are normal in a tuner's table
        wrong = us.isna() & ~cells.isin(NULLS)
    for line, text in cells[wrong].items():
        what = f"{shown(text)} is not a time: drop the row, or mark it in a column status"
        faults.add(what, line=int(str(line)), column=columns.time)
    return timed


def _kernel_names(rows: pd.DataFrame, columns: _Columns) -> list[str]:
    """The kernel of each row, `a + b` if several columns name it."""
    if columns.is_unnamed:
        return [ANY_KERNEL] * len(rows)
    names = rows[[*columns.kernel]].itertuples(index=False, name=None)
    return [" + ".join(name for name in cells if name not in NULLS) for cells in names]


def _check_repeats(rows: pd.DataFrame, timed: pd.DataFrame, columns: _Columns, faults: Faults) -> None:
    """Add a fault for each row without a kernel, each run that is there twice, and each shape with too many repeats.

    `timed`: the same rows with all their columns, of which `run` or `repeat` numbers the repeats.
    """
    # a file without numbers of runs lists the repeats one after the other
    groups = rows.groupby(["kernel", *columns.shape], sort=False)
    repeat = groups.cumcount()
    run = next((timed[name] for name in RUNS if name in timed), repeat)
    line_of_first = rows.index.to_series().groupby([groups.ngroup(), run]).transform("first")
    for line in rows.index[rows["kernel"] == ""]:
        faults.add("names no kernel", line=int(line))
    for line, first in line_of_first[line_of_first != rows.index].items():
        what = f"this run of its kernel and shape is in line {first} already: drop one, or number the repeats"
        faults.add(what, line=int(str(line)))
    for line in rows.index[repeat == MAX_REPEATS]:
        what = f"more than {MAX_REPEATS} repeats of one kernel and shape: is a column of it missing?"
        faults.add(what, line=int(line))
