"""Newcomers to a tuned table, reduced to the lowest time per key, whatever order they come in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.results.table import NULLS, TAG, Key, KeyFault, Place, key_of, number_of, place_of, read_table
from worker.families import Family


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A row that wants into a table. `us` is the time as it would be written, `spread` its relative spread (or 0)."""

    key: Key
    cells: dict[str, str]
    us: float
    spread: float
    place: Place = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", place_of(self.key, self.tag))

    @property
    def kernel(self) -> str:
        return kernel_of(self.cells)

    @property
    def tag(self) -> str:
        tag = self.cells.get(TAG, "")
        return "" if tag in NULLS else tag

    def rank(self) -> tuple[float, str, list[tuple[bool, str, str]], float]:
        """Lowest time, then name, then whatever else differs, and at last where it is from: a total order."""
        rest = sorted((name.startswith("_"), name, value) for name, value in self.cells.items())
        return (self.us, self.kernel, rest, self.spread)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A newcomer that cannot be a row of a table; `key` is its key columns as far as they are known."""

    key: dict[str, int | str]
    us: float | None
    kernel: str
    why: str


def champions(
    newcomers: Iterable[Mapping[str, Any]], family: Family, err_ratio: float | None = None
) -> tuple[list[Newcomer], list[Rejected]]:
    """(the best newcomer of each key, those that cannot be rows), both in the order of their keys.

    Newcomers are rows by column name, values as text or as numbers. `err_ratio`: the largest share of wrong
    elements allowed; None (and a family whose error is no share: fmoe) does not look at it.
    """
    best: dict[Key, Newcomer] = {}
    rejected: list[Rejected] = []
    for raw in newcomers:
        new = newcomer(raw, family, err_ratio)
        if isinstance(new, Rejected):
            rejected.append(new)
        elif new.key not in best or new.rank() < best[new.key].rank():
            best[new.key] = new
    rejected.sort(key=lambda r: (tuple(map(str, r.key.values())), r.kernel, r.us or 0.0, r.why))
    return [best[k] for k in sorted(best, key=order)], rejected


def newcomer(raw: Mapping[str, Any], family: Family, err_ratio: float | None) -> Newcomer | Rejected:
    """A row by column name as a newcomer, or why it cannot be one."""
    cells = {name: value.strip() if type(value) is str else cell(value) for name, value in raw.items()}
    us = number_of(cells.get("us", ""))
    known: dict[str, int | str] = {n: cells.get(n, "") for n in ("gfx", "cu_num", *family.key_names)}
    try:
        key = key_of(cells, family)
    except KeyFault as e:
        return Rejected(known, us, kernel_of(cells), str(e))
    known = key_dict(key, family)
    if not key[0]:
        return Rejected(known, us, kernel_of(cells), f"it names no gfx, and none follows from cu_num {key[1]}")
    if us is None or us <= 0:
        return Rejected(known, us, kernel_of(cells), f"its us is {cells.get('us') or 'missing'}")
    if err_ratio is not None and family.err_column != "err1":
        err = number_of(cells.get(family.err_column, ""))
        if err is None or not 0 <= err <= err_ratio:
            shown = cells.get(family.err_column) or "missing"
            return Rejected(known, us, kernel_of(cells), f"its {family.err_column} is {shown}, the limit {err_ratio:g}")
    return Newcomer(key, cells, us, number_of(cells.pop("spread", "")) or 0.0)


def key_dict(key: Key, family: Family) -> dict[str, int | str]:
    """A key by column name."""
    return dict(zip(("gfx", "cu_num", *family.key_names), key, strict=True))


def kernel_of(cells: Mapping[str, str]) -> str:
    """The kernel's name (fmoe: of both stages)."""
    names = (cells.get(n, "") for n in ("kernelName", "kernelName1", "kernelName2"))
    return " + ".join(n for n in names if n not in NULLS)


def cell(value: Any) -> str:
    """A value as AITER writes it: numbers above 1 with 4 decimals, below with 4 digits; "" for what is
    missing."""
    if value is None:
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        return repr(round(float(value), 4) if abs(value) >= 1 else float(f"{value:.4g}"))
    return str(value).strip()


def order(key: Key) -> tuple[tuple[int, int, str], ...]:
    """To sort keys by, numbers by their size."""
    return tuple((0, v, "") if isinstance(v, int) else (1, 0, v) for v in key)


def read_newcomers(path: Path, family: Family) -> list[dict[str, str]]:
    """The rows of a CSV with a tuned table's columns (tuned.csv or profile.csv of a run, a table of AITER's).

    A key may come more than once. Raises TunedDBError.
    """
    table = read_table(path, family, doubled=True)
    return [{n: c for n, c in zip(table.header, r.cells, strict=True) if c not in NULLS} for r in table.rows]
