"""Timer `rocprof`: kernel times of `rocprofv3 --kernel-trace --stats`, kernels selected by name.

The trace is a CSV as its documentation has it (ROCm 6.2 to 7.1): `*_kernel_trace.csv` with a row per dispatch
(Kernel_Name, Start_Timestamp, End_Timestamp in ns, ...). Columns are found by name: their number changed with every
release. Stdlib only.

A process makes WARMUP + CALLS calls. A kernel belongs to the call if it ran a whole number of times per call. The
warm-up is left out.
"""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.text import plural

WARMUP, CALLS = 5, 26
TOOL = "rocprofv3"
_RUNTIME = re.compile(r"__amd_rocclr_|^hip(Memcpy|Memset)")
"""Copies and fills of the runtime: part of a call only where a pattern asks for them."""
Kernels = Mapping[str, Sequence[int]]
"""Kernels by name, with the durations of their dispatches in ns, in the order of their start."""


class RocprofError(Exception):
    """The profiler's files cannot be read; the text has the reason."""


def argv(program: Sequence[str], folder: Path) -> list[str]:
    """The command line that runs `program` under the profiler. Raises RocprofError where there is none."""
    tool = shutil.which(TOOL) or (f"/opt/rocm/bin/{TOOL}" if Path(f"/opt/rocm/bin/{TOOL}").exists() else "")
    if not tool:
        raise RocprofError(f"{TOOL} is neither in PATH nor in /opt/rocm/bin")
    options = ["--kernel-trace", "--stats", "--output-format", "csv", "-d", str(folder), "-o", "bench"]
    return [tool, *options, "--", *program]


def per_call_us(folder: Path, pattern: str = "", warmup: int = WARMUP, calls: int = CALLS) -> tuple[float, str]:
    """(microseconds of one call, the kernels that count, joined by ` + `). Raises RocprofError."""
    traces = [parse_trace(p) for p in sorted(folder.rglob("*kernel_trace.csv"))]
    if not traces:
        raise RocprofError(f"{TOOL} left no kernel_trace.csv: no kernel ran, or not on a GPU")
    # one a process: only one of the processes had work for the device
    return select(max(traces, key=lambda t: sum(map(len, t.values()))), pattern, warmup, calls)


def select(kernels: Kernels, pattern: str, warmup: int, calls: int) -> tuple[float, str]:
    """The time of a call from the kernels that belong to it: by `pattern`, else all but the runtime's own.

    Raises RocprofError naming what ran.
    """
    total, mine = warmup + calls, dict[str, float]()
    for name, durations in kernels.items():
        wanted = re.search(pattern, name) if pattern else not _RUNTIME.search(name)
        each, rest = divmod(len(durations), total)
        if wanted and each and not rest:
            mine[name] = sum(durations[each * warmup :]) / calls
    if not mine:
        ran = ", ".join(f"{_short(name)} ({plural(len(d), 'time')})" for name, d in list(kernels.items())[:8])
        what = f"matching {pattern!r} " if pattern else ""
        raise RocprofError(f"no kernel {what}ran a whole number of times in each of {total} calls; there were: {ran}")
    return sum(mine.values()) / 1e3, " + ".join(map(_short, mine))


def parse_trace(path: Path) -> Kernels:
    """The dispatches of a `kernel_trace.csv`, by kernel. Raises RocprofError with file and line."""
    found: dict[str, list[tuple[int, int]]] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as f:
        reader = csv.DictReader(f)
        header = reader.fieldnames or ()
        if missing := [n for n in ("Kernel_Name", "Start_Timestamp", "End_Timestamp") if n not in header]:
            raise RocprofError(f"{path}:1: no column {', '.join(missing)}")
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(f"its cells are not the {len(header)} of the header")
                start, end = int(row["Start_Timestamp"]), int(row["End_Timestamp"])
                if end < start:
                    raise ValueError("a kernel ends before it starts")
                if row.get("Kind", "KERNEL_DISPATCH") == "KERNEL_DISPATCH":
                    found.setdefault(row["Kernel_Name"], []).append((start, end - start))
        except (ValueError, csv.Error) as e:
            raise RocprofError(f"{path}:{reader.line_num}: {e}") from e
    return {name: [d for _, d in sorted(times)] for name, times in found.items()}


def _short(name: str) -> str:
    return name.split("(", 1)[0][:80]
