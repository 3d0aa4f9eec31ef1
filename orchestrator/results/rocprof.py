"""Reads the two CSVs of rocprofv3 that hold times of kernels, as rows of a table that `compare` knows.

`*_kernel_stats.csv` has one averaged time a kernel. `*_kernel_trace.csv` has a row a dispatch: the dispatches of a
kernel with the same grid are repeats. Neither names the shape, so a kernel's grid stands for it. The columns are those
of ROCm 6.2 to 7.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from orchestrator.errors import InputError

Line = tuple[int, Sequence[str]]
STATS = {"Name", "Calls", "AverageNs"}
TRACE = {"Kernel_Name", "Start_Timestamp", "End_Timestamp"}
GRID = ("Grid_Size_X", "Grid_Size_Y", "Grid_Size_Z")


def is_rocprof(names: Iterable[str]) -> bool:
    """Return whether a header is one of the two."""
    return set(names) >= STATS or set(names) >= TRACE


def timings(names: Sequence[str], lines: Sequence[Line], most: int, where: str) -> tuple[list[str], list[Line]]:
    """The header and rows as `kernelName`, the grid of a trace, `us`; only the last `most` dispatches of each key.

    The first dispatches warm up. Raises InputError with the line.
    """
    grid = [n for n in GRID if n in names]
    kernel = "Name" if "Name" in names else "Kernel_Name"
    dispatches: dict[tuple[str, ...], list[Line]] = defaultdict(list)
    for number, cells in lines:
        place = f"{where}:{number}:"
        if len(cells) != len(names):
            raise InputError(f"{place} has {len(cells)} cells, the header {len(names)}; was the file cut short?")
        row = dict(zip(names, cells, strict=True))
        if row.get("Kind", "KERNEL_DISPATCH") != "KERNEL_DISPATCH":
            continue
        try:
            ns = row.get("AverageNs") or int(row["End_Timestamp"]) - int(row["Start_Timestamp"])
            us = float(ns) / 1e3
        except (KeyError, ValueError) as e:
            raise InputError(f"{place} is not a row of rocprofv3: {e}; drop the row") from None
        key = (row[kernel], *(row[n] for n in grid))
        dispatches[key].append((number, [*key, f"{us:.4f}"]))
    kept = sorted(line for of_key in dispatches.values() for line in of_key[-most:])
    return ["kernelName", *grid, "us"], kept
