"""A family by the name that a user typed."""

from __future__ import annotations

import difflib

from orchestrator.errors import InputError
from worker.families import FAMILIES, Family


def get_family(name: str) -> Family:
    """The family of that name. Raises InputError with the nearest name where there is none."""
    if name in FAMILIES:
        return FAMILIES[name]
    near = [f for f in FAMILIES if name and f.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), FAMILIES, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InputError(f"unknown family {name[:40]!r}{hint} (families: {', '.join(FAMILIES)})")
