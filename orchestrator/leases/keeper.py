"""The thread that talks to a pool's scheduler: it carries orders out, looks, and reports what it saw."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from orchestrator.errors import NodeError, UnreachableError
from orchestrator.leases.base import Lease, LeaseSource, LeaseState

FIRST_S = 0.1
"""Seconds from a request to the first look: an idle scheduler has granted it by then."""
SOON_S, SOON_FOR_S, USUAL_S = 0.5, 30.0, 5.0
"""Seconds between two looks: shortly after a request, for so long; and then."""


@dataclass(frozen=True, slots=True)
class Look:
    """All leases that the scheduler knows, after the orders up to `number` were carried out."""

    number: int
    leases: tuple[Lease, ...]
    refused: str = ""
    """The scheduler's words where it refused to grant more."""


class Keeper:
    """Looks at the leases of one pool every few seconds, and at once after an order, until `close`."""

    def __init__(self, pool: str, source: LeaseSource, report: Callable[[Look], None]) -> None:
        """`report` is called in its thread."""
        self.source, self._report = source, report
        self._lock, self._wake, self._closing = threading.Lock(), threading.Event(), False
        self._number, self._ask, self._avoid = 0, 0, frozenset[str]()
        self._release: dict[str, Lease] = {}
        self._soon_until = time.monotonic() + SOON_FOR_S
        self._silent_since: float | None = None
        self.silent_why = ""
        """Reason why the scheduler does not answer; "" where it does."""
        self._thread = threading.Thread(target=self._loop, name=f"leases {pool}", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def order(self, ask: int, avoid: Collection[str], release: Collection[Lease]) -> int:
        """Have leases requested, none on a host of `avoid`, and others given back; return the order's number."""
        with self._lock:
            self._number, self._ask, self._avoid = self._number + 1, ask, frozenset(avoid)
            self._release |= {x.id: x for x in release}
        self._wake.set()
        return self._number

    def look(self) -> None:
        """Look at once."""
        self._wake.set()

    @property
    def silent_s(self) -> float:
        """Seconds since when the scheduler has not answered."""
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, *, release: bool, timeout: float) -> str:
        """End the thread; give all leases back, or leave them. Return why some may be left, "" where none is."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)
        left = self._release_all(time.monotonic() + timeout) if release else ""
        self.source.close()
        return left

    def _loop(self) -> None:
        while not self._closing:
            self._wake.clear()
            began = time.monotonic()
            pause = SOON_S if began < self._soon_until else USUAL_S
            try:
                if self._turn():
                    pause = FIRST_S
            except NodeError as e:
                self._silent_since, self.silent_why = self._silent_since or began, e.reason
            else:
                self._silent_since, self.silent_why = None, ""
            self._wake.wait(max(pause / 2, began + pause - time.monotonic()))

    def _turn(self) -> int:
        """Carry out what was ordered, and look. Return the number of leases that were granted or queued."""
        with self._lock:
            number, ask, avoid, release = self._number, self._ask, self._avoid, self._release
            self._ask, self._release = 0, {}
        failed: NodeError | None = None
        try:
            if release:
                self.source.release(release.values())
                release = {}
            if ask:
                self._soon_until = time.monotonic() + SOON_FOR_S
                self.source.ask(ask, avoid)
        except NodeError as e:
            with self._lock:
                self._release = release | self._release  # again next time
            if isinstance(e, UnreachableError):
                raise
            failed = e
        refused = failed.reason if failed is not None and not release else ""
        self._report(Look(number, tuple(self.source.list()), refused))
        if failed is not None and release:
            raise failed
        return 0 if failed is not None else ask

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
