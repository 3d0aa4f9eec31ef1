"""Write a shape list, its M padded on request to the grid that AITER looks rows up on (`orchestrator.families`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.families import PadLevel, grid_point
from orchestrator.shapes.aiter_log import count_misses
from orchestrator.shapes.model import Key, Shape, ShapeList, describe, render_shapes
from orchestrator.shapes.reader import read_shapes
from orchestrator.tables.textfiles import read_head
from worker.families import Family
from worker.text import plural


def finished(keys: Iterable[Key], family: Family, level: PadLevel | None) -> tuple[list[Key], list[str]]:
    """(the keys to write: as they are, or the distinct grid points in the order of first use; sentences about it)."""
    listed = list(keys)
    if level is None:
        return listed, []
    if family.aiter.exact_m:
        return listed, [f"--pad-m changes nothing: AITER looks {family.name} up by the exact M"]
    points = list(dict.fromkeys(grid_point(key, family, level) for key in listed))
    less = f" became {len(points)} ({1 - len(points) / max(1, len(listed)):.0%} less to tune)"
    saved = less if len(points) < len(listed) else ", none saved"
    return points, [f"padding M ({level}): {plural(len(listed), 'shape')}{saved}"]


def write_list(
    path: Path, keys: Iterable[Key], family: Family, *, force: bool = False, calls: Mapping[Key, int] | None = None
) -> None:
    """Write a shape list that `tune` reads, with the `calls` of each shape where they are known. Raises InputError
    where the file is there and `force` is not given."""
    text = render_shapes((Shape(i, key) for i, key in enumerate(keys, 1)), family, calls)
    try:
        if force:
            from orchestrator.userfiles import write_atomic

            write_atomic(path, text)
            return
        with open(path, "x", encoding="utf-8") as f:
            f.write(text)
    except FileExistsError:
        raise InputError(f"{path} is there already; give another name with -o, or --force to replace it") from None
    except OSError as e:
        raise InputError(f"{path}: cannot be written: {e.strerror or e}") from e


# columns of a shape list: calls, and the time of a call today in microseconds
COUNT, NOW = "count", "now_us"
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
