"""Order file: the candidates of each shape and M, as a compiler without a GPU ranks them (docs/reference/files.md).

It is an order and no more. A node learns from it which candidates to try behind others that may be as fast, compiles
with its own Triton all the same, and drops what that one refuses. What the file does not know is tried as ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
LEVELS = {"ok": 0, "waiting": 0, "spills": 1}
"""Level of a candidate by its status: how far behind others it is tried."""
LAST = 2
"""Level of all others: `double`, and the ends of a compilation that failed."""
ABOUT = ("kind", "gfx", "triton", "source")
"""Fields that tell for what an order was made."""


@dataclass(frozen=True, slots=True)
class Order:
    """Part of an order file that nodes get."""

    about: Mapping[str, str]
    behind: Mapping[str, Sequence[Sequence[str]]]
    """By shape the names of the candidates of each level above 0."""

    @classmethod
    def parse(cls, raw: Any) -> Order | None:
        """Of `for_nodes`; None for an empty one. Raises ValueError."""
        if not raw:
            return None
        if not isinstance(raw, Mapping) or set(raw) != {*ABOUT, "behind"} or not isinstance(raw["behind"], Mapping):
            raise ValueError("no order file of `triton-config order`")
        return cls({name: str(raw[name]) for name in ABOUT}, raw["behind"])

    def levels(self, shape: str, names: Sequence[str]) -> dict[int, int]:
        """Level of the candidates of a shape that have one above 0, by their index."""
        known = {name: level for level, some in enumerate(self.behind.get(shape, ()), 1) for name in some}
        return {i: known[name] for i, name in enumerate(names) if name in known}

    def misfit(self, here: Mapping[str, str]) -> str:
        """Text of what differs here from what the order was made for."""
        return ", ".join(
            f"{k} {self.about[k] or 'unknown'} (here {here[k]})" for k in ABOUT if self.about[k] != here[k]
        )


def shape_name(key: Mapping[str, int | str]) -> str:
    """A shape's key columns as one text: `16x1280x8192xtorch.bfloat16x...`."""
    return "x".join(map(str, key.values()))


def read(path: Path) -> dict[str, Any]:
    """An order file's document. Raises OSError, ValueError."""
    try:
        document = json.loads(path.read_text())
        known = document["format"] == FORMAT and isinstance(document["shapes"], dict)
    except (ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise ValueError(f"{path} is no order file of `triton-config order`, format {FORMAT}")
    return dict(document)


def text_of(document: Mapping[str, Any]) -> str:
    """The document as it is written: a line a candidate."""
    return json.dumps(document, separators=(",", ":")).replace('{"name":', '\n{"name":') + "\n"


def for_nodes(path: Path) -> dict[str, Any]:
    """Part of an order file that nodes get: the candidates of each level above 0. Raises OSError, ValueError."""
    document = read(path)
    try:
        behind: dict[str, list[list[str]]] = {}
        for shape, found in document["shapes"].items():
            levels: list[list[str]] = [[] for _ in range(LAST)]
            for c in found["candidates"]:
                if level := LEVELS.get(c["status"], LAST):
                    levels[level - 1].append(c["name"])
            behind[shape] = levels
        return {**{name: document[name] for name in ABOUT}, "behind": behind}
    except (TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"{path} is no order file of `triton-config order`") from e
