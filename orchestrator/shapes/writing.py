"""Write a shape list, its M padded on request to the grid that AITER looks rows up on.

AITER asks for the exact M, then for M padded finely, then for M padded coarsely. Source: `getPaddedM` in
csrc/py_itfs_cu/gemm_common.cu at e4048607a5, the same at v0.1.7. The batched families look up the exact M only. fmoe
takes its tokens to the next power of two below 32768 and to 32768 or 131072 from there (`get_padded_M`, fused_moe.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from orchestrator.errors import InputError
from orchestrator.shapes.aiter_log import count_misses
from orchestrator.shapes.model import Key, Shape, ShapeList, describe, render_shapes
from orchestrator.shapes.reader import read_shapes
from orchestrator.tables.open import read_head
from worker.families import Family
from worker.text import plural

PadLevel = Literal["fine", "coarse"]
_STEPS = ((256, 16), (1024, 32), (4096, 64))
_LAST_STEP = 128
_TOP, _TOP_ABOVE_N = 8192, 4096
_TOKEN_TIERS = (131072, 32768)


def padded(m: int, n: int, level: PadLevel) -> int:
    """The M that AITER looks up for `m` tokens and `n` output features."""
    if level == "fine":
        step = next((s for most, s in _STEPS if m <= most), _LAST_STEP)
        return -(-m // step) * step
    if m > _TOP and n > _TOP_ABOVE_N:
        return _TOP
    return _power(m)


def _power(m: int) -> int:
    return 1 << (m - 1).bit_length()


def grid_point(key: Key, family: Family, level: PadLevel) -> Key:
    """The key with its M on the grid; unchanged where the family is looked up by the exact M."""
    at = family.key_names.index(family.m_column)
    m = int(key[at])
    if family.two_stages:
        m = next((tier for tier in _TOKEN_TIERS if m >= tier), _power(m))
    elif not family.aiter.exact_m:
        m = padded(m, int(key[family.key_names.index("N")]), level)
    return (*key[:at], m, *key[at + 1 :])


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
