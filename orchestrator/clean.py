"""Sanitizing of data from a node: plain text, finite numbers, small JSON. Nothing here raises."""

from __future__ import annotations

import json
import math
from typing import Any

from worker.text import uncoloured

MAX_TEXT = 2000
MAX_JSON = 16 * 1024
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
    out: str = value[: 4 * limit]
    if not out.isprintable():
        out = uncoloured(out)
        out = "".join(c if c.isprintable() else " " if c.isspace() else "" for c in out)
    out = out.strip()
    return out if len(out) <= limit else out[: limit - 3] + "..."


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        out = float(value)
    except OverflowError:
        return None
    return out if math.isfinite(out) else None


def integer(value: Any) -> int | None:
    """A whole number that fits 64 bits, or None."""
    if type(value) is not int:
        if not isinstance(value, float) or not value.is_integer():
            return None
        value = int(value)
    return value if -_INT64 <= value < _INT64 else None


def document(value: Any) -> dict[str, Any]:
    """A JSON object of clean scalars, lists and objects, cut if it is too large. {} if the value is not an object."""
    out = _node(value, 0)
    if not isinstance(out, dict):
        return {}
    if len(json.dumps(out)) > MAX_JSON:
        return {k: v for k, v in out.items() if isinstance(v, (int, float)) or (isinstance(v, str) and len(v) < 200)}
    return out


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
