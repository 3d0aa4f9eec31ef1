"""Thread that keeps a pool of leases: it looks at them, asks for more, gives back, and reports what changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from orchestrator.errors import NodeError, UnreachableError
from orchestrator.leases.base import Lease, LeaseSource, LeaseState

LEASE_WORK_S = 600.0
"""Work that makes one more lease worth asking for: so many seconds on each of its slots."""
IDLE_S = 120.0
"""A lease that has had no work for so long is given back."""
MAX_FAILURES = 3
"""Leases in a row that ended before they were ready, after which no more are requested."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Size of a pool: leases to start with, leases at most, slots that one has."""

    name: str
    minimum: int
    maximum: int
    slots: int


def wanted(pools: Sequence[PoolSize], backlog_s: float, other_slots: int = 0, places: int = 0) -> dict[str, int]:
    """Leases that each pool should hold, earlier pools filled first.

    `backlog_s`: estimated seconds on one slot of all unsettled shapes. `other_slots`: those of machines of our own.
    `places`: leases or nodes that must be there whatever the backlog, as shapes await confirmation on another one.
    """
    left = backlog_s - other_slots * LEASE_WORK_S
    out = {}
    for pool in pools:
        lease_s = pool.slots * LEASE_WORK_S
        out[pool.name] = min(pool.maximum, max(ceil(left / lease_s) if left > 0 else 0, places))
        left -= out[pool.name] * lease_s
        places -= out[pool.name]
    return out


@dataclass(slots=True)
class IdleTimes:
    """Time since when each node has had no work, by the caller's clock in seconds."""

    _since: dict[str, float] = field(default_factory=dict)

    def over(self, idle: Iterable[str], now: float) -> list[str]:
        """Return those of the nodes idle now that have been idle for IDLE_S."""
        self._since = {node: self._since.get(node, now) for node in idle}
        return [node for node, t in self._since.items() if now - t >= IDLE_S]


@dataclass(slots=True)
class Failures:
    """Leases and requests in a row that came to nothing, with the scheduler's words."""

    _row: list[str] = field(default_factory=list)

    def add(self, why: str) -> None:
        self._row.append(why or "it ended before it was ready")

    def worked(self) -> None:
        """Break the row: a lease became a node."""
        self._row.clear()

    @property
    def hopeless(self) -> str:
        """Words of the last failure where there were MAX_FAILURES in a row, else ""."""
        return self._row[-1] if len(self._row) >= MAX_FAILURES else ""


def surplus(leases: Sequence[Lease], want: int) -> list[str]:
    """Queued leases beyond those wanted, the latest first."""
    held = [x for x in leases if x.state is not LeaseState.ENDED]
    queued = [x.id for x in held if x.state is LeaseState.QUEUED]
    return queued[::-1][: max(0, len(held) - want)]


def missing(leases: Sequence[Lease], want: int) -> int:
    """Leases still to be requested."""
    return max(0, want - sum(x.state is not LeaseState.ENDED for x in leases))


FIRST_S = 0.1
"""Seconds from the first request of a run to the first look: an idle scheduler has granted it by then."""
SOON_S, SOON_FOR_S, USUAL_S = 0.5, 30.0, 5.0
"""Seconds between two looks: shortly after a request, for so long; and then. A refused request is repeated as usual."""
WORDS_S = 10.0
"""Between two reports on the same leases whose words alone changed."""
UNREACHABLE_S = 60.0
"""A scheduler that does not answer for so long is reported once."""


@dataclass(frozen=True, slots=True)
class News:
    """Observation of a keeper. `looked`: the scheduler answered for the first time, and what it listed was reported.
    `queued`: all leases that wait now. `ready`, `ended`: one lease; `limited`: a ready one ends at another time.
    `trouble`: the scheduler does not answer, or refuses a request; no words: it answers again. `hopeless`: several
    leases in a row were never ready, and no more are requested."""

    kind: Literal["looked", "queued", "ready", "limited", "ended", "trouble", "hopeless"]
    leases: tuple[Lease, ...] = ()
    words: str = ""


class LeaseKeeper:
    """Keeps the leases of one pool at the number that is wanted, until `close`."""

    def __init__(
        self,
        pool: str,
        source: LeaseSource,
        report: Callable[[News], None],
        *,
        known: Collection[str] = (),
        fresh: bool = False,
    ) -> None:
        """`report` is called in its thread. `known`: leases that were ready under an earlier controller of the run.
        `fresh`: there was none, so nothing has been requested."""
        self.source, self._report = source, report
        self._fresh = fresh
        self._want, self._avoid = 0, frozenset[str]()
        self._to_release: set[str] = set()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._soon_until = time.monotonic() + SOON_FOR_S
        self._ready: dict[str, float | None] = {}
        """Lease -> its end, as it was reported."""
        self._ended: set[str] = set()
        self._released: set[str] = set()
        self._known, self._failures = frozenset(known), Failures()
        self._hopeless = self._looked = False
        self._queued: tuple[Lease, ...] = ()
        self._words_at = 0.0
        self._silent_since: float | None = None
        self._silence_reported = False
        self._refused, self._ask_at = "", 0.0
        """Words of the last request if it was refused, and when it is repeated."""
        self._thread = threading.Thread(target=self._loop, name=f"leases {pool}", daemon=True)

    # --- called by the controller ---------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def want(self, n: int, avoid: Collection[str] = ()) -> None:
        """Hold `n` leases from now on; ask for none on a host of `avoid`."""
        with self._lock:
            if (n, frozenset(avoid)) == (self._want, self._avoid):
                return
            self._want, self._avoid = n, frozenset(avoid)
        self._wake.set()

    def release(self, ids: Collection[str]) -> None:
        """Give these back soon."""
        with self._lock:
            self._to_release |= set(ids)
        self._wake.set()

    def look(self) -> None:
        """Look at once."""
        self._wake.set()

    @property
    def silent_s(self) -> float:
        """Seconds since when the scheduler has not answered."""
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    def accept(self) -> None:
        """Take note that a lease became a node: those before it that did not are forgiven."""
        self._failures.worked()

    def reject(self, lease: Lease, why: str) -> None:
        """Give a lease back that is of no use: it counts as one that never was ready."""
        self._failures.add(why)
        self.release([lease.id])

    def close(self, *, release: bool, timeout: float) -> str:
        """End the thread; give all leases back, or leave them. Return why some may be left, "" where none is."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)
        left = ""
        if release:
            left = self._release_all(time.monotonic() + timeout)
        self.source.close()
        return left

    # --- the thread -----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._closing:
            self._wake.clear()
            began, pause = time.monotonic(), FIRST_S
            try:
                if self._fresh and self._want:
                    self._ask(self._want, self._avoid, ())
                else:
                    self._turn()
                    pause = SOON_S if began < self._soon_until else USUAL_S
            except NodeError as e:
                self._silent(e.reason)
            else:
                self._answered()
            self._fresh = False
            self._wake.wait(max(pause / 2, began + pause - time.monotonic()))

    def _turn(self) -> None:
        """Look once; then release and ask as needed."""
        leases = self.source.list()
        self._compare(leases)
        if not self._looked:
            self._looked = True
            self._report(News("looked"))
        with self._lock:
            want, avoid, release, self._to_release = self._want, self._avoid, self._to_release, set()
        release |= set(surplus(leases, want))
        if release:
            self._released |= release
            try:
                self.source.release(release)
            except NodeError:
                self.release(release)  # again next time
                raise
        lacking = 0 if self._hopeless or self._closing else missing(leases, want)
        if lacking and time.monotonic() >= self._ask_at:
            self._ask(lacking, avoid, leases)

    def _ask(self, n: int, avoid: Collection[str], leases: Sequence[Lease]) -> None:
        """Ask for more. A refusal counts like a lease that never was ready, unless the pool has others."""
        self._soon_until = time.monotonic() + SOON_FOR_S
        try:
            self.source.ask(n, avoid)
        except UnreachableError:
            raise
        except NodeError as e:
            self._ask_at = time.monotonic() + USUAL_S
            if all(x.state is LeaseState.ENDED for x in leases):
                self._failures.add(e.reason)
            if e.reason != self._refused:
                self._report(News("trouble", words=f"more leases are refused: {e.reason}"))
            self._refused = e.reason
        else:
            self._refused = ""

    def _compare(self, leases: Sequence[Lease]) -> None:
        """Report what is new."""
        for lease in leases:
            if lease.state is LeaseState.READY and self._ready.get(lease.id, 0.0) != lease.ends_at:
                kind: Literal["limited", "ready"] = "limited" if lease.id in self._ready else "ready"
                self._ready[lease.id] = lease.ends_at
                self._report(News(kind, (lease,)))
            elif lease.state is LeaseState.ENDED and lease.id not in self._ended:
                self._ended.add(lease.id)
                if lease.id not in self._known | self._released | self._ready.keys():
                    self._failures.add(lease.why)
                self._report(News("ended", (lease,)))
        queued = tuple(x for x in leases if x.state is LeaseState.QUEUED)
        # who waits is news at once, a scheduler's changing guess of the start is not
        same = {x.id for x in queued} == {x.id for x in self._queued}
        if queued != self._queued and (not same or time.monotonic() >= self._words_at):
            self._queued, self._words_at = queued, time.monotonic() + WORDS_S
            self._report(News("queued", queued))
        if self._failures.hopeless and not self._hopeless:
            self._hopeless = True
            self._report(News("hopeless", words=self._failures.hopeless))

    def _silent(self, why: str) -> None:
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        elif self.silent_s > UNREACHABLE_S and not self._silence_reported:
            self._silence_reported = True
            self._report(News("trouble", words=why))

    def _answered(self) -> None:
        if self._silence_reported:
            self._report(News("trouble"))
        self._silent_since, self._silence_reported = None, False

    def _release_all(self, until: float) -> str:
        why = ""
        while True:
            try:
                found = self.source.list()
                self.source.release([x.id for x in found])  # ended ones, too, where something is kept of them
                left = [x.id for x in found if x.state is not LeaseState.ENDED]
                if not left:
                    return ""
                why = f"{', '.join(left[:8])} did not end in time"
            except NodeError as e:
                why = str(e)
            if time.monotonic() > until:
                return why
            time.sleep(SOON_S)
