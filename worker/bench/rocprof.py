"""The timer `rocprof` of a bench: kernel times from `rocprofv3 --kernel-trace --stats`, selected by the kernel's name.

runner.py runs `profiler_argv` around a process of child.py, which makes WARMUP + CALLS calls and ends, and then reads
the folder that it left with `per_call_us`. The trace is a documented CSV (ROCm 6.2 to 7.1): `*_kernel_trace.csv` with a
row for each dispatch, times in ns. Columns are found by name, because their number changes with every release:

    "Kind","Kernel_Name","Start_Timestamp","End_Timestamp",...
    "KERNEL_DISPATCH","_gemm_afp4wfp4_kernel",1000,11000,...

A kernel belongs to the call if it ran a whole number of times per call. Warm-up is left out.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from worker.text import plural
from worker.tuners.common.helper_process import HelperRefused

WARMUP = 5
CALLS = 26
"""Calls under the profiler: WARMUP, which do not count, then CALLS."""
TOOL = "rocprofv3"
_RUNTIME = re.compile(r"__amd_rocclr_|^hip(Memcpy|Memset)")
"""Copies and fills of the runtime. They are part of a call only if a pattern asks for them."""


def profiler_argv(program: Sequence[str], folder: Path) -> list[str]:
    """The command line that runs `program` under the profiler. Raises HelperError if there is no profiler."""
    tool = shutil.which(TOOL, path=f"{os.environ.get('PATH', os.defpath)}:/opt/rocm/bin")
    if tool is None:
        raise HelperRefused("unavailable", f"{TOOL} is neither in PATH nor in /opt/rocm/bin")
    return [
        tool,
        *["--kernel-trace", "--stats", "--output-format", "csv", "-o", "bench", "-d"],
        str(folder),
        "--",
        *program,
    ]


def per_call_us(folder: Path, pattern: str = "", warmup: int = WARMUP, calls: int = CALLS) -> tuple[float, str]:
    """(microseconds of one call, the kernels that count, joined by ` + `). Raises HelperError, which names what ran.

    Kernels belong to the call by `pattern`, else all but the runtime's own.
    """
    durations = _read_largest_trace(folder)
    all_calls = warmup + calls
    ns_per_call: dict[str, float] = {}
    for name, times in durations.items():
        is_wanted = re.search(pattern, name) if pattern else not _RUNTIME.search(name)
        per_call, rest = divmod(len(times), all_calls)
        if is_wanted and per_call and not rest:
            ns_per_call[name] = sum(times[per_call * warmup :]) / calls
    if not ns_per_call:
        ran = [f"{_short_name(name)} ({plural(len(times), 'time')})" for name, times in durations.items()][:8]
        wanted = f"kernel matching {pattern!r}" if pattern else "kernel"
        raise HelperRefused(
            "error",
            f"no {wanted} ran a whole number of times in each of {all_calls} calls; there were:"
            f" {', '.join(ran) or 'none, or none on a GPU'}",
        )
    return sum(ns_per_call.values()) / 1e3, " + ".join(map(_short_name, ns_per_call))


def _read_largest_trace(folder: Path) -> dict[str, list[int]]:
    """The trace that counts: there is one for each process, and only one process had work for the device."""
    traces = [_parse_trace(path) for path in sorted(folder.rglob("*kernel_trace.csv"))]
    return max(traces, key=lambda trace: sum(map(len, trace.values())), default={})


def _parse_trace(path: Path) -> dict[str, list[int]]:
    """Durations of the dispatches of a `kernel_trace.csv` in ns, by kernel, in the order of their start. Raises
    HelperError with file and line."""
    times: dict[str, list[tuple[int, int]]] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as f:
        reader = csv.DictReader(f)
        try:
            for row in reader:
                start = int(row["Start_Timestamp"])
                duration = int(row["End_Timestamp"]) - start
                if row.get("Kind", "KERNEL_DISPATCH") == "KERNEL_DISPATCH":
                    times.setdefault(row["Kernel_Name"], []).append((start, duration))
        except (KeyError, TypeError, ValueError, csv.Error) as e:
            raise HelperRefused("error", f"{path}:{reader.line_num}: this is not a trace of {TOOL}: {e!r}") from e
    return {name: [duration for _, duration in sorted(pairs)] for name, pairs in times.items()}


def _short_name(name: str) -> str:
    return name.split("(", 1)[0][:80]
