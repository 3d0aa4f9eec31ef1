"""Timer `rocprof`: kernel times of `rocprofv3 --kernel-trace --stats`, kernels selected by name.

The files are CSVs as its documentation has them (ROCm 6.2 to 7.1): `*_kernel_trace.csv` with a row per dispatch
(Kernel_Name, Start_Timestamp, End_Timestamp in ns, ...) and `*_kernel_stats.csv` with a row per kernel (Name, Calls,
TotalDurationNs, AverageNs, ...). Columns are found by name: their number changed with every release. Stdlib only.

A process makes WARMUP + CALLS calls. A kernel belongs to the call if it ran a whole number of times per call: 31 calls
in all are no accident. In the trace the warm-up is left out; the statistics alone are averaged over all.
"""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.text import plural

WARMUP, CALLS = 5, 26
TOOL = "rocprofv3"
_RUNTIME = re.compile(r"__amd_rocclr_|^hip(Memcpy|Memset)")
"""Copies and fills of the runtime: part of a call only where a pattern asks for them."""


class RocprofError(Exception):
    """The profiler's files cannot be read; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel by name with the durations of its dispatches in ns, in the order of their start."""

    name: str
    durations: tuple[float, ...]


def argv(program: Sequence[str], folder: Path) -> list[str]:
    """The command line that runs `program` under the profiler. Raises RocprofError where there is none."""
    tool = shutil.which(TOOL) or (f"/opt/rocm/bin/{TOOL}" if Path(f"/opt/rocm/bin/{TOOL}").exists() else "")
    if not tool:
        raise RocprofError(f"{TOOL} is neither in PATH nor in /opt/rocm/bin")
    options = ["--kernel-trace", "--stats", "--output-format", "csv", "-d", str(folder), "-o", "bench"]
    return [tool, *options, "--", *program]


def per_call_us(folder: Path, pattern: str = "", warmup: int = WARMUP, calls: int = CALLS) -> tuple[float, str]:
    """(microseconds of one call, the kernels that count, joined by ` + `). Raises RocprofError."""
    traces = sorted(folder.rglob("*kernel_trace.csv"))
    if traces:
        return select(_merged(parse_trace(p) for p in traces), pattern, warmup, calls)
    stats = sorted(folder.rglob("*kernel_stats.csv"))
    if not stats:
        raise RocprofError(f"{TOOL} left neither kernel_trace.csv nor kernel_stats.csv: no kernel ran, or not on a GPU")
    return select(_merged(parse_stats(p) for p in stats), pattern, 0, warmup + calls)


def select(kernels: Sequence[Kernel], pattern: str, warmup: int, calls: int) -> tuple[float, str]:
    """The time of a call from the kernels that belong to it: by `pattern`, else all but the runtime's own.

    Raises RocprofError naming what ran.
    """
    total = warmup + calls
    mine: list[tuple[str, float]] = []
    for kernel in kernels:
        wanted = re.search(pattern, kernel.name) if pattern else not _RUNTIME.search(kernel.name)
        each, rest = divmod(len(kernel.durations), total)
        if wanted and each and not rest:
            mine.append((kernel.name, sum(kernel.durations[each * warmup :]) / calls))
    if not mine:
        ran = ", ".join(f"{_short(k.name)} ({plural(len(k.durations), 'time')})" for k in kernels[:8])
        what = f"matching {pattern!r} " if pattern else ""
        raise RocprofError(f"no kernel {what}ran a whole number of times in each of {total} calls; there were: {ran}")
    return sum(ns for _, ns in mine) / 1e3, " + ".join(_short(name) for name, _ in mine)


def parse_trace(path: Path) -> list[Kernel]:
    """The dispatches of a `kernel_trace.csv`, by kernel. Raises RocprofError with file and line."""
    found: dict[str, list[tuple[int, int]]] = {}
    for number, row in _rows(path, ("Kernel_Name", "Start_Timestamp", "End_Timestamp")):
        if row.get("Kind", "KERNEL_DISPATCH") != "KERNEL_DISPATCH":
            continue
        try:
            start, end = int(row["Start_Timestamp"]), int(row["End_Timestamp"])
        except ValueError:
            raise RocprofError(f"{path}:{number}: a time is no whole number of nanoseconds") from None
        if end < start:
            raise RocprofError(f"{path}:{number}: a kernel ends before it starts")
        found.setdefault(row["Kernel_Name"], []).append((start, end - start))
    return [Kernel(name, tuple(float(d) for _, d in sorted(times))) for name, times in found.items()]


def parse_stats(path: Path) -> list[Kernel]:
    """The kernels of a `kernel_stats.csv`, each call with the average time. Raises RocprofError with file and line."""
    out = []
    for number, row in _rows(path, ("Name", "Calls", "TotalDurationNs")):
        try:
            calls, total = int(row["Calls"]), float(row["TotalDurationNs"])
        except ValueError:
            raise RocprofError(f"{path}:{number}: Calls or TotalDurationNs is no number") from None
        if not 0 < calls < 10_000_000 or not 0 <= total < 1e18:
            raise RocprofError(f"{path}:{number}: {calls} calls in {total:g} ns cannot be")
        out.append(Kernel(row["Name"], (total / calls,) * calls))
    return out


def _rows(path: Path, needed: Sequence[str]) -> Iterable[tuple[int, dict[str, str]]]:
    """(line, row by column name) of a CSV; a last line that was cut off is an error."""
    with path.open(newline="", encoding="utf-8", errors="replace") as f:
        reader = csv.reader(f)
        try:
            header = next(reader, [])
            missing = [n for n in needed if n not in header]
            if missing:
                raise RocprofError(f"{path}:1: no column {', '.join(missing)}")
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise RocprofError(f"{path}:{reader.line_num}: {len(cells)} cells, the header has {len(header)}")
                yield reader.line_num, dict(zip(header, cells, strict=True))
        except csv.Error as e:
            raise RocprofError(f"{path}:{reader.line_num}: no CSV: {e}") from e


def _merged(parts: Iterable[list[Kernel]]) -> list[Kernel]:
    """Kernels of several files (one a process): only one of the processes had work for the device."""
    return max(parts, key=lambda kernels: sum(len(k.durations) for k in kernels), default=[])


def _short(name: str) -> str:
    return name.split("(", 1)[0][:80]
