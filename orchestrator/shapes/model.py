"""A shape and a list of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, field

from worker.families import Family

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
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow([*family.key_names, *listed.annotations])
    out.writerows((*s.key, *cells) for s, *cells in zip(listed.shapes, *listed.annotations.values(), strict=True))
    return text.getvalue()


def render_shapes(shapes: Iterable[Shape], family: Family) -> str:
    """A shapes CSV with all key columns, which `read_shapes` reads back to the same keys."""
    lines = [",".join(family.key_names)]
    lines += [",".join(map(str, s.key)) for s in shapes]
    return "\n".join(lines) + "\n"


def describe(key: dict[str, int | str]) -> str:
    """A shape for people: 16x1280x8192, with what is not its family's default left to the files."""
    sizes = [str(v) for v in key.values() if isinstance(v, int)]
    return "x".join(sizes)
