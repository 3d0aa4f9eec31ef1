"""Cleans values that come from a node, which may be anything: plain text, finite numbers, small JSON.

The ledger's reader of records, the facts of a node, and the log of a workload call it. A value of the wrong type is ""
or None; nothing here raises.
"""

from __future__ import annotations

import json
import math
from typing import Any

from worker.text import uncoloured

MAX_TEXT = 2000
"""Characters of a text."""
MAX_JSON = 16 * 1024
"""Characters of an object, written as JSON. Of a larger one only its numbers and short texts are kept."""
_MAX_DEPTH = 5
_MAX_ITEMS = 200
_INT64 = 2**63


def text(value: Any, limit: int = MAX_TEXT) -> str:
    """One line of printable text, without escape sequences and control, bidi and broken characters. "" if the value is
    not text."""
    if type(value) is str and len(value) <= limit and value.isprintable():
        return value.strip()
    if not isinstance(value, str):
        return ""
    line: str = value[: 4 * limit]
    if not line.isprintable():
        line = "".join(map(_printable, uncoloured(line)))
    line = line.strip()
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else ""


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def integer(value: Any) -> int | None:
    """A whole number that fits 64 bits, or None."""
    if type(value) is not int:
        if not isinstance(value, float) or not value.is_integer():
            return None
        value = int(value)
    return value if -_INT64 <= value < _INT64 else None


def document(value: Any) -> dict[str, Any]:
    """A JSON object of clean scalars, lists and objects, cut if it is too large. {} if the value is not an object."""
    cleaned = _node(value, 0)
    if not isinstance(cleaned, dict):
        return {}
    if len(json.dumps(cleaned)) <= MAX_JSON:
        return cleaned
    return {key: item for key, item in cleaned.items() if _is_short(item)}


def _is_short(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and len(value) < 200)


def _node(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return integer(value)
    if isinstance(value, float):
        return number(value)
    if depth < _MAX_DEPTH and isinstance(value, dict):
        items = list(value.items())[:_MAX_ITEMS]
        return {text(k, 100): _node(v, depth + 1) for k, v in items if isinstance(k, str)}
    if depth < _MAX_DEPTH and isinstance(value, list):
        return [_node(v, depth + 1) for v in value[:_MAX_ITEMS]]
    return None


def seconds_by_kind(value: Any) -> dict[str, float]:
    """An attempt's `spent`: seconds by kind. Negative numbers are dropped."""
    if not isinstance(value, dict):
        return {}
    clean = {text(k, 40): number(v) for k, v in list(value.items())[:40]}
    return {k: v for k, v in clean.items() if k and v is not None and v >= 0}
