"""Calls of a workload by shape: the column `count` of a shape list, or AITER's logs, a line a call."""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.shapes.aiter_log import count_misses
from orchestrator.shapes.model import Key, ShapeList, describe
from orchestrator.shapes.reader import read_shapes
from orchestrator.tables.open import read_head
from worker.families import Family

COUNT, NOW = "count", "now_us"
"""Columns of a shape list: calls, and the time of a call today in microseconds."""
_HEAD = 4096


def numbers(listed: ShapeList, column: str) -> dict[Key, float]:
    """The column's numbers by key, {} without such a column. Raises InputError for what is no number above 0."""
    cells = listed.annotations.get(column, [])
    out: dict[Key, float] = {}
    for shape, cell in zip(listed.shapes, cells, strict=bool(cells)):
        try:
            out[shape.key] = number = float(cell)
        except ValueError:
            number = 0.0
        if not 0 < number < 1e15:
            raise InputError(
                f"{listed.source}: {column} of the shape {describe(shape.key)} is {cell!r}, not a number above 0; drop"
                " the column, or name that of every shape"
            )
    return out


def read_calls(path: Path, family: Family) -> dict[Key, float]:
    """Calls by key, of a shape list with a column `count` or of a log (plain or gzip). Raises InputError."""
    if family.m_column in read_head(path, _HEAD, InputError).partition("\n")[0].split(","):
        found = numbers(read_shapes(path, family), COUNT)
    else:
        found = {key: float(n) for key, n in count_misses([path], family.name).ranked(family.name)}
    if not found:
        raise InputError(f"{path}: is no list of shapes with a column {COUNT}, and no log with shapes of {family.name}")
    return found
