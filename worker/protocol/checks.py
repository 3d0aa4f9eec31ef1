"""Checks of every message: the version, JSON, names and types of fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

PROTOCOL = 1
MAX_SECONDS = 1e7


class ProtocolError(ValueError):
    """A spec, record or name that is not of this protocol."""


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """`data` as a JSON object, UTF-8 only (json itself would take UTF-16 as well). Raises ProtocolError."""
    try:
        raw = json.loads(data.decode())
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"{what} is not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ProtocolError(f"{what} is not a JSON object")
    return raw


def some(faults: list[str], limit: int = 20) -> list[str]:
    """The first faults, and how many more there are."""
    return faults if len(faults) <= limit else [*faults[:limit], f"and {len(faults) - limit} more"]


def type_faults(raw: Mapping[str, Any], types: Mapping[str, tuple[type, ...]], required: Sequence[str]) -> list[str]:
    """Unknown and missing fields, and those of another type."""
    out = [f"unknown field {k!r}" for k in raw if k not in types]
    out += [f"missing field {k!r}" for k in required if k not in raw]
    for name, legal in types.items():
        if name in raw and (not isinstance(raw[name], legal) or isinstance(raw[name], bool)):
            out.append(f"{name} is {type(raw[name]).__name__}, not {legal[0].__name__}")
    return out
