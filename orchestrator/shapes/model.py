"""A shape, a list of them as text and as a file, and the bytes of its operands.

A family says which columns its key has, such as `M,N,K`. A shape is known by that key, `(16, 1280, 8192)`; in a run it
is passed by its id. `reader.py` reads a list of the user, `write_list` writes one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.families import ELEMENT_TYPES, PadLevel, family_type, grid_point
from orchestrator.files.write import csv_text, write_output
from worker.families import Family
from worker.text import plural

Key = tuple[int | str, ...]
"""The values of a family's key columns, in the order of `family.key_names`."""


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
    columns = listed.annotations.values()
    rows = ((*shape.key, *cells) for shape, *cells in zip(listed.shapes, *columns, strict=True))
    return csv_text((*family.key_names, *listed.annotations), rows)


def render_shapes(
    keys: Iterable[Key], family: Family, calls: Mapping[Key, int] | None = None, transformers: str = ""
) -> str:
    """A shapes CSV with all key columns, which `read_shapes` reads back to the same keys; with `calls` by key in a
    column `count`, and with the version of transformers that the sizes are from."""
    header = [*family.key_names]
    if calls:
        header.append(COUNT)
    if transformers:
        header.append("transformers")
    rows = []
    for key in keys:
        row = [*key]
        if calls:
            row.append(calls[key])
        if transformers:
            row.append(transformers)
        rows.append(row)
    return csv_text(header, rows)


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


def pad_calls(calls: Mapping[Key, int], family: Family, level: PadLevel | None) -> tuple[Mapping[Key, int], list[str]]:
    """(the calls by the keys to write, in the order of first use; sentences about it).

    Without a `level` the keys are as they are, with one they are points of AITER's grid.
    """
    if level is None:
        return calls, []
    if family.aiter.exact_m:
        return calls, [f"--pad-m changes nothing: AITER looks {family.name} up by the exact M"]
    padded = Counter[Key]()
    for key, number in calls.items():
        padded[grid_point(key, family, level)] += number
    saved = ", none saved"
    if len(padded) < len(calls):
        saved = f" became {len(padded)} ({1 - len(padded) / len(calls):.0%} less to tune)"
    return padded, [f"padding M ({level}): {plural(len(calls), 'shape')}{saved}"]


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
    write_output(path, render_shapes(keys, family, calls, transformers))


COUNT = "count"
"""Column of a shape list: calls of the shape in a workload."""
NOW = "now_us"
"""Column of a shape list: the time of a call today in microseconds."""


def numbers(listed: ShapeList, column: str) -> dict[Key, float]:
    """The column's numbers by key, {} without such a column. Raises InputError for a cell that is not above 0."""
    cells = listed.annotations.get(column, [])
    numbers_by_key: dict[Key, float] = {}
    for shape, cell in zip(listed.shapes, cells, strict=bool(cells)):
        try:
            number = float(cell)
        except ValueError:
            number = 0.0
        if not 0 < number < 1e15:
            raise InputError(
                f"{listed.source}: {column} of the shape {describe(shape.key)} is {cell!r}, not a number above 0; drop"
                " the column, or name that of every shape"
            )
        numbers_by_key[shape.key] = number
    return numbers_by_key
