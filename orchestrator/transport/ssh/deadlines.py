"""Time limits for calls that cannot have one: a write into a stalled link blocks until somebody closes the link."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(order=True, slots=True)
class _Limit:
    at: float
    number: int
    act: Callable[[], None] | None = field(compare=False)


class Watchdog:
    """One thread, started at the first need, that acts on the calls which are not back in time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limits: list[_Limit] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, at: float, act: Callable[[], None]) -> Iterator[None]:
        """Call `act` from another thread if the block is not left by `at` (time.monotonic()); it must not wait."""
        limit = _Limit(at, next(self._numbers), act)
        with self._changed:
            heapq.heappush(self._limits, limit)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="ssh watchdog", daemon=True)
                self._thread.start()
            elif self._limits[0] is limit:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                limit.act = None
                while self._limits and self._limits[0].act is None:
                    heapq.heappop(self._limits)

    def _watch(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                if not self._limits:
                    self._changed.wait()
                    continue
                if self._limits[0].at > now:
                    self._changed.wait(self._limits[0].at - now)
                    continue
                act = heapq.heappop(self._limits).act
            if act is not None:
                act()


WATCHDOG = Watchdog()
