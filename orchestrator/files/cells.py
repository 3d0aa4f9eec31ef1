"""Values as cells of a CSV: numbers as AITER writes them, and no text that a spreadsheet would run.

`cell` writes a value. Text that did not come from us is refused by `cell_fault` in tables that programs read, and made
harmless by `no_formula` in tables for people.
"""

from __future__ import annotations

import math
import time
from typing import Any

FORMULA_MARKS = ("=", "+", "-", "@")
"""A spreadsheet takes a text that begins with one of these for a formula."""


def utc(t: float) -> str:
    """A time in epoch seconds as files have it: `2026-04-01T12:00:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t))


def cell(value: Any) -> str:
    """A value as AITER writes it: numbers above 1 with 4 decimals, below with 4 digits; "" for what is missing."""
    if value is None:
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        return repr(round(float(value), 4) if abs(value) >= 1 else float(f"{value:.4g}"))
    return str(value).strip()


def cell_fault(text: str) -> str:
    """The reason why text of a node or of a foreign file may not stand in a cell of a user's table; "" if it may.

    A number may begin with a sign; any other text that begins so is a formula to a spreadsheet.
    """
    if not text.isprintable():
        return "holds control characters"
    if text[:1] not in FORMULA_MARKS:
        return ""
    try:
        float(text)
    except ValueError:
        return "is a formula to a spreadsheet"
    return ""


def no_formula(text: str) -> str:
    """Text of a node or a file for a cell that no program reads: a `'` before what a spreadsheet would run."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") and text else text
