"""The thread that talks to a pool's scheduler: it carries orders out, looks, and reports what it saw."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from orchestrator.errors import NodeError, UnreachableError
from orchestrator.leases.base import Lease, LeaseSource, LeaseState

FIRST_S = 0.1
"""Seconds from a request to the first look: an idle scheduler has granted it by then."""
SOON_S, SOON_FOR_S, USUAL_S = 0.5, 30.0, 5.0
"""Seconds between two looks: in the first SOON_FOR_S seconds after a request, and later."""


@dataclass(frozen=True, slots=True)
class Look:
    """All leases that the scheduler knows, after the orders up to `number` were carried out."""

    number: int
    leases: tuple[Lease, ...]
    refused: str = ""
    """The scheduler's words where it refused to grant more."""


@dataclass(frozen=True, slots=True)
class Order:
    """Leases to ask for, none on a host of `avoid`, and leases to give back."""

    number: int
    ask: int
    avoid: Collection[str]
    release: tuple[Lease, ...]


class Keeper:
    """Looks at the leases of one pool every few seconds, and at once after an order, until `close`."""

    def __init__(self, pool: str, source: LeaseSource, report: Callable[[Look], None]) -> None:
        """`report` is called in its thread."""
        self.source, self._report, self._closing = source, report, False
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._release: tuple[Lease, ...] = ()
        self._soon_until = time.monotonic() + SOON_FOR_S
        self._silent_since, self.silent_why = 0.0, ""
        self._thread = threading.Thread(target=self._loop, name=f"leases {pool}", daemon=True)
        self.start = self._thread.start

    def order(self, order: Order) -> None:
        """Have an order carried out; there is no other before a look showed this one."""
        self._orders.put(order)

    def look(self) -> None:
        """Look at once."""
        self._orders.put(None)

    @property
    def silent_s(self) -> float:
        """Seconds since when the scheduler has not answered."""
        return time.monotonic() - self._silent_since if self._silent_since else 0.0

    def close(self, *, release: bool, timeout: float) -> str:
        """End the thread; give all leases back, or leave them. Return why some may be left, "" where none is."""
        self._closing = True
        self.look()
        self._thread.join(timeout)
        left = self._release_all(time.monotonic() + timeout) if release else ""
        self.source.close()
        return left

    def _loop(self) -> None:
        number, order = 0, None
        while not self._closing:
            began = time.monotonic()
            pause = FIRST_S if order and order.ask else SOON_S if began < self._soon_until else USUAL_S
            number = order.number if order else number
            try:
                self._turn(number, order)
                self._silent_since = 0.0
            except NodeError as e:
                self._silent_since, self.silent_why = self._silent_since or began, e.reason
            try:
                order = self._orders.get(timeout=pause)
            except queue.Empty:
                order = None

    def _turn(self, number: int, order: Order | None) -> None:
        """Carry out an order, and look."""
        self._release += order.release if order else ()
        if self._release:
            self.source.release(self._release)
            self._release = ()
        refused = ""
        if order and order.ask:
            self._soon_until = time.monotonic() + SOON_FOR_S
            try:
                self.source.ask(order.ask, order.avoid)
            except UnreachableError:
                raise
            except NodeError as e:
                refused = e.reason
        self._report(Look(number, tuple(self.source.list()), refused))

    def _release_all(self, until: float) -> str:
        why = ""
        while True:
            try:
                found = self.source.list()
                self.source.release(found)  # ended ones, too, where something is kept of them
                left = [x.id for x in found if x.state is not LeaseState.ENDED]
                if not left:
                    return ""
                why = f"{', '.join(left[:8])} did not end in time"
            except NodeError as e:
                why = str(e)
            if time.monotonic() > until:
                return why
            time.sleep(SOON_S)
