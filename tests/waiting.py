"""Waits for conditions, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 600.0
"""After this many seconds a wait counts as a hang. No test measures time: benchmarks do."""


def wait_until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Poll until `condition()` is true and return its value; AssertionError with `what` if it never is."""
    began = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - began
        if waited_s > patience_s:
            raise AssertionError(f"not within {patience_s:g} s: {what}")
        # a condition may cost as much as a look into a ledger, and what it waits for needs the same cores
        time.sleep(max(0.02, min(0.2, 0.05 * waited_s)))
    return value
