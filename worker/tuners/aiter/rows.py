"""Makes a row of ours from a line that AITER writes on one candidate.

tables.py reads AITER's files and calls `to_row` for each line, journal.py for each record of the shim; verdict.py
judges a shape by its rows.

AITER writes `Null` for missing values, -1 for a candidate that could not run, and inf for one that crashed, hung or
(before 2025-12-30) raised an exception.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from worker.families import Family, backend_of
from worker.protocol import FIELDS, Row

_NULLS = frozenset(("", "null", "nan", "none", "na", "<na>"))
_ALIASES = {"solidx": "kernelId", "err_ratio": "errRatio", "ksplit": "splitK"}
_KINDS = {f.name: f.kind for f in FIELDS}
_READ_APART = frozenset(("us", "kernelName", "libtype", "errRatio"))
"""Fields of a row that `to_row` does not copy from the column of their name."""


def parse_number(cell: str | None) -> float | None:
    """A number, also inf; None for Null and for text. A trailing % counts as hundredths."""
    text = (cell or "").strip()
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def to_row(family: Family, cells: Mapping[str, str], limit: float) -> Row:
    """A line of a tuned or profile file as a row of ours. `limit`: the largest errRatio of an `ok`."""
    cells = {_ALIASES.get(name, name): cell for name, cell in cells.items()}
    name = cells.get("kernelName") or cells.get("kernelName1") or ""
    row = Row(us=-1.0, kernelName="" if name.lower() in _NULLS else name, libtype=backend_of(family.name, cells))
    for column in dict.fromkeys(("kernelId", "splitK", "tflops", "bw", *family.result_columns)):
        if column not in _KINDS or column in _READ_APART:
            continue
        value = _value(column, cells.get(column, ""))
        is_rate = column in ("tflops", "bw")
        if value is not None and (not is_rate or value > 0):
            row[column] = value
    err = _error(family, cells)
    if err is not None and math.isfinite(err):
        row["errRatio"] = err
    row.update(_outcome(parse_number(cells.get("us")), err, limit))
    return row


def _value(column: str, cell: str) -> Any:
    """The value of a column of ours, None if the cell has none."""
    kind = _KINDS[column]
    if kind is str:
        return None if cell.lower() in _NULLS else cell
    number = parse_number(cell)
    return kind(number) if number is not None and math.isfinite(number) else None


def _error(family: Family, cells: Mapping[str, str]) -> float | None:
    """The errRatio of a line; of a pair of stages the larger one."""
    if family.two_stages:
        errors = [parse_number(cells.get(name)) for name in ("err1", "err2", "err")]
        known = [error for error in errors if error is not None]
        if known:
            return max(known)
    return parse_number(cells.get("errRatio"))


def _outcome(us: float | None, err: float | None, limit: float) -> Row:
    """Status and detail, and `us` if it is a time."""
    if us is None or us < 0:
        return Row(status="unsupported", detail="AITER could not run it (-1)" if us == -1 else "no time")
    if us == 0:
        return Row(status="error", detail="AITER measured 0 us, which cannot be")
    if math.isinf(us):
        return Row(status="error", detail="no time (inf): it crashed, hung or raised")
    if err is None:
        return Row(us=us, status="wrong", detail="AITER gave no error for it")
    return Row(us=us, status="ok" if err <= limit else "wrong", detail="")


class KernelNames:
    """Kernel names as tables have them, by backend and number: each backend of a family counts from 0."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, int], str] = {}

    def learn(self, row: Row) -> None:
        """Keep the name that a row of a table has."""
        if row["kernelName"] and "kernelId" in row:
            self._names[row.get("libtype", ""), row["kernelId"]] = row["kernelName"]

    def find(self, libtype: str, number: int) -> str:
        """The kernel's name; "" if it is not known, or if it is not known which backend's number it is."""
        names = set()
        for (known_libtype, known_number), name in self._names.items():
            if known_number == number and libtype in ("", known_libtype):
                names.add(name)
        return names.pop() if len(names) == 1 else ""
