"""The thread that talks to the scheduler of a pool, so that the controller's loop never waits for one.

leases/leased_nodes.py gives it a `PoolOrder` (how many leases to request, which to give back). The thread carries
it out, lists the leases, and reports a `PoolSnapshot`. Orders are numbered, and a snapshot names the last one that it
shows the effect of: only then is the next order given, or leases would be requested twice.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from orchestrator.errors import NodeError, UnreachableError
from orchestrator.leases.lease import Lease, LeaseSource, LeaseState

FIRST_S = 0.1
"""Seconds from a request to the next listing: an idle scheduler has granted it by then."""
SOON_S = 0.5
"""Seconds between two listings in the first SOON_FOR_S seconds after a request."""
SOON_FOR_S = 30.0
USUAL_S = 5.0
"""Seconds between two listings later."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """All leases that the scheduler knows."""

    number: int
    """The last order that was carried out before."""
    leases: tuple[Lease, ...]
    refused: str = ""
    """The scheduler's message if it refused to grant more."""


@dataclass(frozen=True, slots=True)
class PoolOrder:
    """An order to the scheduler."""

    number: int
    request: int
    """Leases to ask for."""
    avoid: Collection[str]
    """Hosts on which none of them should be."""
    release: tuple[Lease, ...]
    """Leases to give back."""


class PoolPoller:
    """Lists the leases of one pool every few seconds, and at once after an order, until `close`."""

    def __init__(self, pool: str, source: LeaseSource, report: Callable[[PoolSnapshot], None]) -> None:
        """`report` is called in the poller's thread."""
        self.source = source
        self._report = report
        self._closing = False
        self._orders: queue.SimpleQueue[PoolOrder | None] = queue.SimpleQueue()
        """Orders to carry out; None only wakes the thread."""
        self._release: tuple[Lease, ...] = ()
        """Leases that are still to be given back, because the scheduler did not answer."""
        self._soon_until = time.monotonic() + SOON_FOR_S
        self._silent_since = 0.0
        self.silent_why = ""
        self._thread = threading.Thread(target=self._loop, name=f"leases {pool}", daemon=True)
        self.start = self._thread.start

    def order(self, order: PoolOrder) -> None:
        """Have an order carried out soon. Give no other before a snapshot has shown this one's number."""
        self._orders.put(order)

    def poll_now(self) -> None:
        """List the leases at once."""
        self._orders.put(None)

    @property
    def silent_s(self) -> float:
        """Seconds since the scheduler stopped answering, 0 if it answers; `silent_why` has its last error."""
        return time.monotonic() - self._silent_since if self._silent_since else 0.0

    def close(self, *, release: bool, timeout: float) -> str:
        """End the thread within `timeout` seconds. With `release` give all leases back, for as long again; return why
        some may be left, "" if none is."""
        self._closing = True
        self.poll_now()
        self._thread.join(timeout)
        why_left = self._release_all(time.monotonic() + timeout) if release else ""
        self.source.close()
        return why_left

    def _loop(self) -> None:
        number = 0
        order: PoolOrder | None = None
        while not self._closing:
            began = time.monotonic()
            pause = self._pause(order, began)
            if order is not None:
                number = order.number
            try:
                self._report(self._carry_out(number, order))
                self._silent_since = 0.0
            except NodeError as e:
                self._silent_since = self._silent_since or began
                self.silent_why = e.reason
            try:
                order = self._orders.get(timeout=pause)
            except queue.Empty:
                order = None

    def _pause(self, order: PoolOrder | None, now: float) -> float:
        """Seconds until the next listing, unless an order comes first."""
        if order is not None and order.request:
            return FIRST_S
        return SOON_S if now < self._soon_until else USUAL_S

    def _carry_out(self, number: int, order: PoolOrder | None) -> PoolSnapshot:
        """Carry out an order, and list the leases. Raises NodeError if the scheduler does not answer."""
        if order is not None:
            self._release += order.release
        if self._release:
            self.source.release(self._release)
            self._release = ()
        refused = ""
        if order is not None and order.request:
            self._soon_until = time.monotonic() + SOON_FOR_S
            try:
                self.source.ask(order.request, order.avoid)
            except UnreachableError:
                raise
            except NodeError as e:
                refused = e.reason
        return PoolSnapshot(number, tuple(self.source.list()), refused)

    def _release_all(self, until: float) -> str:
        """Give leases back until none lives, or it is `until` (time.monotonic()). Return why some may be left."""
        while True:
            try:
                leases = self.source.list()
                self.source.release(leases)  # ended ones too, because a scheduler may keep something of them
                living = [lease.id for lease in leases if lease.state is not LeaseState.ENDED]
                if not living:
                    return ""
                why = f"{', '.join(living[:8])} did not end in time"
            except NodeError as e:
                why = str(e)
            if time.monotonic() > until:
                return why
            time.sleep(SOON_S)
