"""Signs of sick hardware in the readings of a slot's GPU (worker/conditions.py takes them, before and after an
attempt)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOT_C = 100.0
"""A GPU is said to be hot from here on."""


def hardware_evidence(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Evidence of a hardware fault from the readings before and after an attempt, or "":
    `uncorrectable hardware errors rose during the attempt: umc +2`.

    The agent adds it to the end of the attempt (agent/loop.py), and `explain` shows it (view/explain.py).

    A counter that fell was reset, and does not count.
    """
    if any(before.get(name) != after.get(name) for name in ("id", "pci")):
        return ""  # another GPU
    counts_before = before.get("errors", {}).get("uncorrectable", {})
    rises = {}
    for block, count in after.get("errors", {}).get("uncorrectable", {}).items():
        rise = count - counts_before.get(block, 0)
        if rise > 0:
            rises[block] = rise
    if not counts_before or not rises:
        return ""
    total = rises.pop("total", 0)
    blocks = ", ".join(f"{block} +{rise}" for block, rise in sorted(rises.items())) or f"+{total}"
    age = float(before.get("age_s", 0.0))
    when = f" or the {age:.0f} s before it" if age >= 1.0 else ""
    return f"uncorrectable hardware errors rose during the attempt{when}: {blocks}"
