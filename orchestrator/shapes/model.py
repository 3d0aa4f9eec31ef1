"""A shape, a list of them as text and as a file, and the bytes of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.families import ELEMENT_TYPES, PadLevel, family_type, grid_point
from orchestrator.files.write import csv_text, write_output
from worker.families import Family
from worker.text import plural

Key = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """One GEMM problem. `id` counts from 1 in file order after duplicates went; `key` is aligned with
    `family.key_names`."""

    id: int
    key: Key

    def key_dict(self, family: Family) -> dict[str, int | str]:
        """The key columns by name, in the family's order."""
        return dict(zip(family.key_names, self.key, strict=True))


@dataclass(frozen=True, slots=True)
class ShapeList:
    """The shapes of a file. `notes` are sentences about what was cleaned, ignored or taken by default;
    `sha256` is of the file's bytes as read; `source` the path as given; `annotations` maps each column that gemmfleet
    does not know to its cells, one a shape."""

    shapes: list[Shape]
    notes: list[str] = field(default_factory=list)
    sha256: str = ""
    source: str = ""
    annotations: dict[str, list[str]] = field(default_factory=dict)


def annotations_csv(listed: ShapeList, family: Family) -> str:
    """A CSV of the key columns and, beside them, the annotations of the user's file."""
    rows = ((*s.key, *cells) for s, *cells in zip(listed.shapes, *listed.annotations.values(), strict=True))
    return csv_text((*family.key_names, *listed.annotations), rows)


def render_shapes(
    shapes: Iterable[Shape], family: Family, calls: Mapping[Key, int] | None = None, transformers: str = ""
) -> str:
    """A shapes CSV with all key columns, which `read_shapes` reads back to the same keys; with `calls` by key in a
    column `count`, and with the version of transformers that the sizes are from."""
    header = [*family.key_names]
    header += [COUNT] if calls else []
    header += ["transformers"] if transformers else []
    lines = [",".join(header)]
    for shape in shapes:
        cells = [*map(str, shape.key)]
        cells += [str(calls[shape.key])] if calls else []
        cells += [transformers] if transformers else []
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def describe(key: Iterable[int | str]) -> str:
    """A shape for people: its sizes, `16x1280x8192`; types are left to the files."""
    return "x".join(str(v) for v in key if isinstance(v, int))


def element_type(family: Family) -> Callable[[Key], tuple[str, float] | None]:
    """A function from a key to (type, bytes an element) of its operands; to None where the family does not say."""
    fixed = family_type(family)
    columns = [name for name in ("q_dtype_w", "dtype") if name in family.key_names]
    if fixed is not None or family.two_stages or not columns:
        return lambda key: fixed
    position = family.key_names.index(columns[0])
    return lambda key: ELEMENT_TYPES.get(str(key[position]))


def operand_bytes(family: Family) -> Callable[[Key], float]:
    """A function from a key to the bytes of A, B and the result, without scales; 0 where they are not known (fmoe).

    A plan asks for each of 100,000 shapes, so columns are found by position, once for the family.
    """
    if family.two_stages:
        return lambda key: 0.0
    element_type_of = element_type(family)
    position = {name: index for index, name in enumerate(family.key_names)}
    m_index, n_index, k_index = (position[name] for name in "MNK")
    batch_index = position.get("B")
    result_index = position.get("outdtype")

    def size(key: Key) -> float:
        element = element_type_of(key)
        if element is None:
            return 0.0
        m = int(key[m_index])
        n = int(key[n_index])
        k = int(key[k_index])
        batches = 1 if batch_index is None else int(key[batch_index])
        result = None if result_index is None else ELEMENT_TYPES.get(str(key[result_index]))
        result_element_bytes = result[1] if result else 2.0
        return batches * (element[1] * (m * k + n * k) + result_element_bytes * m * n)

    return size


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
    path: Path,
    keys: Iterable[Key],
    family: Family,
    *,
    force: bool = False,
    calls: Mapping[Key, int] | None = None,
    transformers: str = "",
) -> None:
    """Write a shape list that `tune` reads; for `calls` and `transformers` see `render_shapes`. Raises InputError where
    the file is there and `force` is not given."""
    if path.exists() and not force:
        raise InputError(f"{path} is there already; give another name with -o, or --force to replace it")
    shapes = (Shape(i, key) for i, key in enumerate(keys, 1))
    write_output(path, render_shapes(shapes, family, calls, transformers))


# columns of a shape list: calls, and the time of a call today in microseconds
COUNT, NOW = "count", "now_us"


def numbers(listed: ShapeList, column: str) -> dict[Key, float]:
    """The column's numbers by key, {} without such a column. Raises InputError for a cell that is not above 0."""
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
