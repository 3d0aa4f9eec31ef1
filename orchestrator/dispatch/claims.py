"""What a node was given and should still hold, against what its beat says it holds.

An attempt leaves `inbox/` and `claimed/` only when its end is on record. Where that record was destroyed (a results
file that was truncated, a torn line) nobody would ever say that the attempt is over: this does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

BEATS, PATIENCE_S = 2, 15.0
"""An attempt has vanished when it is missing in so many beats in a row, and so long after it was written there: a
beat may be some seconds old when it is read."""


@dataclass(slots=True)
class _Given:
    since: float
    missed: int = 0


class Claims:
    """Of one node. The writer's thread adds, the reader's compares."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._given: dict[str, _Given] = {}

    def arrived(self, attempts: Collection[str]) -> None:
        """These are on the node now."""
        now = self._clock()
        with self._lock:
            for attempt in attempts:
                self._given[attempt] = _Given(now)

    def taken(self, attempt: str) -> None:
        """It was taken back."""
        with self._lock:
            self._given.pop(attempt, None)

    def compare(self, held: Collection[str]) -> frozenset[str]:
        """Take in a beat; those that have vanished, each once. Most of them simply ended: the caller knows which."""
        old = self._clock() - PATIENCE_S
        with self._lock:
            for attempt, given in self._given.items():
                given.missed = 0 if attempt in held else given.missed + 1
            gone = frozenset(a for a, g in self._given.items() if g.missed >= BEATS and g.since <= old)
            for attempt in gone:
                del self._given[attempt]
        return gone
