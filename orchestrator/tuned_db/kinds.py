"""The kind of a tuned row: AITER's, whose kernel AITER's dispatch loads, or our own tuners'. Pure.

AITER stops at a name that it has no kernel of, so that a table never holds both (`compatibility`). The kernel's name
decides; where it is of no known pattern, the row's record of provenance; a row of unknown kind goes with either.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

from orchestrator.tables.tuned import KERNEL_NAMES, NULLS
from worker.families import backend_of, kernel_of_aiter
from worker.families.backends import tuner_of
from worker.tuners.catalog import recorded_tuner

Kind = Literal["aiter", "own", ""]
FIELD = "kind"
"""The field of a record of provenance."""


@lru_cache(50_000)
def kind_by_names(libtype: str, *names: str) -> Kind:
    """The kind by a row's libtype and kernel names, "" where it is unknown."""
    there = [n for n in names if n not in NULLS]
    if libtype.lower() == "replay" or any(tuner_of(n) for n in there):
        return "own"
    if any(kernel_of_aiter(n) for n in there):
        return "aiter"
    return "aiter" if there and libtype and backend_of("", {"libtype": libtype}) else ""


def kind_of(cells: Mapping[str, str]) -> Kind:
    """The kind of a row by its cells."""
    return kind_by_names(cells.get("libtype", ""), *(cells.get(n, "") for n in KERNEL_NAMES))


def kind_in(facts: Mapping[str, object]) -> Kind:
    """The kind of a row by the fields of its record."""
    kind = facts.get(FIELD)
    if kind in ("aiter", "own"):
        return "own" if kind == "own" else "aiter"
    found = recorded_tuner(str(facts.get("tuner") or "").partition(" ")[0]).produces
    return "own" if found == "configs" else found  # AITER's dispatch has none of these names either


def describe_own(cells: Mapping[str, str]) -> str:
    """The owner of a row of our tuners, for a sentence."""
    name = next((cells[n] for n in KERNEL_NAMES if tuner_of(cells.get(n, ""))), "")
    return f"{name[:80]} is a kernel of gemmfleet's tuner {tuner_of(name)}" if name else "is a kernel of our own tuners"


def other_name(path: Path, word: str) -> Path:
    """A file for rows of the other kind than a table's: beside it, but in no folder whose tables AITER merges."""
    return (Path() if in_aiter(path) else path.parent) / f"{path.stem}_{word}{path.suffix or '.csv'}"


def in_aiter(path: Path) -> bool:
    """True where a table lies in a folder whose tables AITER merges by itself."""
    return path.parent.name in ("configs", "model_configs")
