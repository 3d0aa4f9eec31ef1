"""Write a shape list, its M padded on request to the grid that AITER looks rows up on (`orchestrator.families`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.families import PadLevel, grid_point
from orchestrator.shapes.aiter_log import count_misses
from orchestrator.shapes.model import Key, Shape, ShapeList, describe, render_shapes
from orchestrator.shapes.reader import read_shapes
from orchestrator.tables.open import read_head
from worker.families import Family
from worker.text import plural


@dataclass(frozen=True, slots=True)
class PadSaving:
    """Number of shapes saved by padding."""

    before: int
    after: int
    level: PadLevel

    def __str__(self) -> str:
        if self.before == self.after:
            return f"padding M ({self.level}): {plural(self.before, 'shape')}, none saved"
        less = 1 - self.after / self.before
        return f"padding M ({self.level}): {plural(self.before, 'shape')} became {self.after} ({less:.0%} less to tune)"


def pad(keys: Iterable[Key], family: Family, level: PadLevel) -> tuple[dict[Key, int], PadSaving]:
    """(the distinct grid points in the order of first use, each with how many of `keys` it serves; the saving)."""
    out: dict[Key, int] = {}
    before = 0
    for key in keys:
        before += 1
        point = grid_point(key, family, level)
        out[point] = out.get(point, 0) + 1
    return out, PadSaving(before, len(out), level)


def finished(keys: Iterable[Key], family: Family, level: PadLevel | None) -> tuple[list[Key], list[str]]:
    """(the keys to write, sentences about it)."""
    listed = list(keys)
    if level is None:
        return listed, []
    if family.aiter.exact_m:
        return listed, [f"--pad-m changes nothing: AITER looks {family.name} up by the exact M"]
    points, saving = pad(listed, family, level)
    return list(points), [str(saving)]


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
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
    except FileExistsError:
        raise InputError(f"{path} is there already; give another name with -o, or --force to replace it") from None
    except OSError as e:
        raise InputError(f"{path}: cannot be written: {e.strerror or e}") from e


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
