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


def numbers(listed: ShapeList, column: str, *, every: bool) -> dict[Key, float]:
    """The column's numbers by key, {} without such a column. Raises InputError for what is no number above 0; an empty
    cell is left out where not `every` shape needs one."""
    cells = listed.annotations.get(column, [])
    out: dict[Key, float] = {}
    for shape, cell in zip(listed.shapes, cells, strict=bool(cells)):
        if not (cell or every):
            continue
        try:
            out[shape.key] = number = float(cell)
        except ValueError:
            number = 0.0
        if not 0 < number < 1e15:
            way_out = ", or name the calls of every shape" if every else ", or leave the cell empty"
            raise InputError(
                f"{listed.source}: {column} of the shape {describe(shape.key)} is {cell!r}, not a number above 0; drop"
                f" the column{way_out}"
            )
    return out


def read_calls(path: Path, family: Family) -> dict[Key, float]:
    """Calls by key, of a shape list with a column `count` or of a log (plain or gzip). Raises InputError."""
    first = read_head(path, _HEAD, InputError).partition("\n")[0]
    names = [c.strip() for c in first.split(",")]
    if family.m_column in names and len(names) > 1:
        listed = read_shapes(path, family)
        found = numbers(listed, COUNT, every=True)
        if not found:
            raise InputError(f"{path}: has no column {COUNT}, the calls of each shape")
        return found
    found = {key: float(n) for key, n in count_misses([path], family.name).ranked(family.name)}
    if not found:
        raise InputError(f"{path}: no line of this log is about a shape of {family.name} (and it is no list of shapes)")
    return found
