"""Write tables: cells as AITER writes them, text that no spreadsheet runs, CSV files that are complete or absent."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from orchestrator.userfiles import write_atomic


def write_csv(to: Path | TextIO, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV with LF line ends, to an open file or atomically to a path. Raises OSError."""

    def fill(f: TextIO) -> None:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(header)
        out.writerows(rows)

    if isinstance(to, Path):
        write_atomic(to, fill)
    else:
        fill(to)


def utc(t: float) -> str:
    """A time in epoch seconds as files have it: `2026-04-01T12:00:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t))


def cell(value: Any) -> str:
    """A value as AITER writes it: numbers above 1 with 4 decimals, below with 4 digits; "" for what is missing."""
    if value is None:
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        return repr(round(float(value), 4) if abs(value) >= 1 else float(f"{value:.4g}"))
    return str(value).strip()


def no_formula(text: str) -> str:
    """Text of a node or a file for a cell that no program reads: a `'` before what a spreadsheet would run."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") and text else text
