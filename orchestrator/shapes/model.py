"""A shape and a list of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.families import Family

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
    `sha256` is of the file's bytes as read; `source` the path as given."""

    shapes: list[Shape]
    notes: list[str] = field(default_factory=list)
    sha256: str = ""
    source: str = ""


def render_shapes(shapes: Iterable[Shape], family: Family) -> str:
    """A shapes CSV with all key columns, which `read_shapes` reads back to the same keys."""
    lines = [",".join(family.key_names)]
    lines += [",".join(map(str, s.key)) for s in shapes]
    return "\n".join(lines) + "\n"


def describe(key: dict[str, int | str]) -> str:
    """A shape for people: 16x1280x8192, with what is not its family's default left to the files."""
    sizes = [str(v) for v in key.values() if isinstance(v, int)]
    return "x".join(sizes)
