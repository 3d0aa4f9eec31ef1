"""Waits for conditions, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 600.0
"""After this many seconds a wait counts as a hang. No test measures time: benchmarks do."""


def wait_until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Poll until `condition()` is true and return its value; AssertionError with `what` if it never is."""
    until = time.monotonic() + patience_s
    while not (value := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"not within {patience_s:g} s: {what}")
        time.sleep(0.02)
    return value
