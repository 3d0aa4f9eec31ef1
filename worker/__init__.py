"""The worker, the program on a node: drains its inbox, one attempt at a time, on one slot.

Stdlib only (a tuner may import what it needs), Python 3.10 to 3.13, and nothing from the controller.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# the folder that has this package in it: what a child process needs on its path
PACKAGE_PARENT = Path(__file__).resolve().parent.parent


@contextmanager
def without_gc() -> Iterator[None]:
    """No garbage collection: it would disturb a clock, free a GPU's graph at the wrong time, and cost time where many
    objects without cycles are made."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
