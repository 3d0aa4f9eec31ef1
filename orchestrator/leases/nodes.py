"""Nodes of a run that come from pools of leases: wished for, prepared, started and given back as the work needs them.

The controller's loop calls `turn`, which never waits: keepers look at the schedulers, and a few threads prepare nodes.
"""

from __future__ import annotations

import io
import queue
import re
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import tenacity

from orchestrator.dispatch.node import NodeDriver
from orchestrator.dispatch.node_registry import USUAL, NodeRegistry, Shutdown
from orchestrator.dispatch.stream import Chunk
from orchestrator.dispatch.supply import LeaseTurn
from orchestrator.errors import OrchestratorError, UnreachableError
from orchestrator.events import FleetMayGrow, LeaseEnded, LeasesQueued, NodeDraining, NodeExpected
from orchestrator.leases.base import EndCause, Lease, LeaseSource
from orchestrator.leases.demand import IdleTimes, PoolSize, wanted
from orchestrator.leases.keeper import LeaseKeeper
from orchestrator.scheduling import Policy


def rows_of(archive: bytes) -> Iterator[tuple[str, Chunk]]:
    """(node, whole file) of each events and log file in what a lease left (leases.holder). Raises TarError, OSError."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            name = LEFT_FILE.search(member.name)
            if member.isfile() and name is not None and (file := tar.extractfile(member)) is not None:
                yield name[1], Chunk("E" if name[2] == "events" else "L", name[3], 0, file.read())


LEFT_FILE = re.compile(r"(?:^|/)([^/]+)/(events|logs)/([0-9]{1,4})\.(?:jsonl|log)$")
NO_MORE_CLAIMS_S, BOOKS_S = 120.0, 30.0
"""Seconds before a lease's time limit at which it takes no more work, and at which its workers close their books; of a
short lease at most a quarter and an eighth of its time."""
UNREAD_S = 1.0
"""Seconds after a shutdown for the last records that are under way."""
PLACE_S = 600.0
"""Seconds that a shape awaits a machine that can confirm it (it did not run there), with nothing else going on."""
REACH_S = 120.0
"""So long the way to a granted lease may be broken before it is given back."""
AVOID_S = 600.0
"""So long a host is left out of requests after it was in quarantine."""
MAX_PARALLEL = 16
CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of leases, and where they come from."""

    size: PoolSize
    source: LeaseSource
    time_s: float = float("inf")
    """Time limit of a lease."""

    @property
    def no_more_claims_s(self) -> float:
        return min(NO_MORE_CLAIMS_S, self.time_s / 4)

    @property
    def books_s(self) -> float:
        return min(BOOKS_S, self.time_s / 8)


@dataclass(frozen=True, slots=True)
class MadeNode:
    """A lease that is ready for work: its physical host, and the id of each slot's GPU there."""

    driver: Callable[[], NodeDriver]
    """Its driver, made in the controller's own thread."""
    host: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KnownLease:
    """A lease of an earlier controller of the run, from the journal."""

    node: str
    pool: str
    ended: bool


class MakeNode(Protocol):
    """Check a lease's machine and make its node; called in a thread. Raises OrchestratorError where it cannot work."""

    def __call__(self, pool: str, lease: Lease, name: str, /) -> MadeNode: ...


@dataclass(slots=True)
class _Held:
    """A lease that is, or becomes, a node."""

    pool: str
    lease: Lease
    made: bool = False
    draining: bool = False
    cause: EndCause = EndCause.RELEASED
    """Reason for giving it back."""


class LeasedNodes:
    """The leased nodes of one run; used by the controller's loop alone."""

    def __init__(
        self,
        pools: Sequence[Pool],
        make: MakeNode,
        *,
        known: Mapping[str, KnownLease],
        other_slots: Callable[[], int] = lambda: 0,
        hold: bool = False,
        grow: bool = True,
        fresh: bool = False,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`known`: by lease. `other_slots`: slots of machines of our own. `hold`: keep idle leases. `grow`: False takes
        over what is there, and asks for none. `fresh`: this is the run's first controller. `wake` is called, in any
        thread, when there is something for the next turn."""
        self._pools = pools
        self._by_name = {p.size.name: p for p in pools}
        self._make, self._other_slots, self._hold, self._grow = make, other_slots, hold, grow
        self._wake = wake
        self._news: queue.SimpleQueue[Callable[[LeaseTurn], None]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(MAX_PARALLEL, "lease")
        self._closing = threading.Event()
        self._names = {id_: k.node for id_, k in known.items()}
        self._over = {id_ for id_, k in known.items() if k.ended}
        self._held: dict[str, _Held] = {}
        """Node -> its lease."""
        self._leaving: dict[str, Shutdown] = {}
        self._ended_at: dict[str, float] = {}
        """Node -> when its shutdown was seen to be done."""
        self._unlooked = {p.size.name for p in pools}
        """Pools of which nothing is known yet."""
        self._moved = (0.0, -1)
        """Time of the last change of the number of settled shapes, and that number."""
        self._sick: dict[str, float] = {}
        """Host -> when it was in quarantine last; those of the last AVOID_S."""
        self._idle = IdleTimes()
        self._queued: dict[str, tuple[Lease, ...]] = {}
        self._hopeless: dict[str, str] = {}
        self._bringing = 0
        """Ended leases whose leftovers are being fetched."""
        self._may_grow: bool | None = None
        self._floor = {p.size.name: p.size.minimum for p in pools}
        """Leases that each pool holds at least while there is work, until one of it is given back."""
        self._keepers = {
            p.size.name: LeaseKeeper(
                p.size.name,
                p.source,
                self,
                known=[i for i, k in known.items() if k.pool == p.size.name],
                fresh=fresh and grow,
            )
            for p in pools
        }
        self._started = False

    # --- called by the controller -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask for the leases that each pool starts with."""
        self._started = True
        for pool in self._pools:
            keeper = self._keepers[pool.size.name]
            if self._grow:
                keeper.want(pool.size.minimum)
            keeper.start()

    def turn(self, policy: Policy, registry: NodeRegistry, now: float) -> LeaseTurn:
        """Return what changed since the last turn. `now` in epoch seconds."""
        out = LeaseTurn()
        while True:
            try:
                news = self._news.get_nowait()
            except queue.Empty:
                break
            news(out)
        self._end_times(policy, registry, out, now)
        self._left(out, now)
        if self._grow:
            self._wish(policy, registry, out, now)
        return out

    def look(self, node: str) -> None:
        """Look at once what became of the lease of a node that is in trouble."""
        held = self._held.get(node)
        if held is not None:
            self._keepers[held.pool].look()

    @property
    def coming(self) -> bool:
        """Return whether a lease is queued, being prepared, or may be requested."""
        making = any(not h.made for h in self._held.values())
        busy = self._may_grow or self._bringing or self._leaving or making or self._unlooked
        return bool(busy) or any(self._queued.values())

    def why(self) -> list[str]:
        """State of what is awaited, a line each, in the schedulers' words."""
        lines = [f"  {pool}: no more leases are requested: {words}" for pool, words in self._hopeless.items()]
        for pool, leases in self._queued.items():
            lines += [f"  {pool}: lease {x.id} is queued: {x.why}" for x in leases]
        return lines

    def close(self, *, release: bool) -> list[str]:
        """End all threads; give every lease back, or leave them to their work. Return what may be left, a line each."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if not self._started:
            return []
        with ThreadPoolExecutor(max(1, len(self._keepers)), "lease") as pool:
            left = pool.map(lambda k: (k.pool, k.close(release=release, timeout=CLOSE_S)), self._keepers.values())
        return [f"leases of {name} may be left: {why}" for name, why in left if why]

    # --- called by keepers, in their threads ------------------------------------------------------------------------

    def _tell(self, news: Callable[[LeaseTurn], None]) -> None:
        self._news.put(news)
        self._wake()

    def looked(self, pool: str) -> None:
        self._tell(lambda out: self._unlooked.discard(pool))

    def queued(self, pool: str, leases: Sequence[Lease]) -> None:
        def take(out: LeaseTurn) -> None:
            self._queued[pool] = tuple(leases)
            out.events.append(LeasesQueued(pool, tuple((x.id, x.why) for x in leases)))

        self._tell(take)

    def ready(self, pool: str, lease: Lease) -> None:
        self._tell(lambda out: self._prepare(pool, lease, out))

    def limited(self, pool: str, lease: Lease) -> None:
        def take(out: LeaseTurn) -> None:
            for held in self._held.values():
                held.lease = lease if held.lease.id == lease.id else held.lease

        self._tell(take)

    def ended(self, pool: str, lease: Lease) -> None:
        self._tell(lambda out: self._ended(pool, lease))

    def trouble(self, pool: str, detail: str) -> None:
        text = f"{pool}: {detail or 'the scheduler answers again'}"
        self._tell(lambda out: out.notes.append((text, bool(detail))))

    def hopeless(self, pool: str, why: str) -> None:
        def note(out: LeaseTurn) -> None:
            self._hopeless[pool] = why
            out.notes.append((f"{pool}: no more leases are requested, three in a row were never ready: {why}", True))

        self._tell(note)

    # --- leases become nodes ----------------------------------------------------------------------------------------

    def _prepare(self, pool: str, lease: Lease, out: LeaseTurn) -> None:
        if lease.id in self._over:
            self._keepers[pool].release([lease.id])  # its node is gone for good
            return
        if lease.host in self._sick and lease.id not in self._names:
            why = f"its host {lease.host} was in quarantine"
            out.notes.append((f"{pool}: lease {lease.id} is given back: {why}", True))
            self._keepers[pool].reject(lease, why)
            return
        node = self._names.setdefault(lease.id, self._new_name(pool))
        self._held[node] = _Held(pool, lease)
        out.notes.append((f"{node}: lease {lease.id} is granted on {lease.host or 'a host'}", False))
        self._threads.submit(self._prepared, pool, lease, node)

    def _prepared(self, pool: str, lease: Lease, node: str) -> None:
        def may_pass(e: BaseException) -> bool:
            return isinstance(e, UnreachableError) and e.transient and node in self._held

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_pass),
            wait=tenacity.wait_exponential(multiplier=0.2, max=5.0),
            stop=tenacity.stop_any(tenacity.stop_after_delay(REACH_S), tenacity.stop_when_event_set(self._closing)),
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )
        try:
            made = retrying(self._make, pool, lease, node)
        except Exception as e:  # noqa: BLE001  whatever it is, the lease must not stay in between for ever
            why = str(e) if isinstance(e, OrchestratorError) else f"{type(e).__name__}: {e}"
            self._tell(lambda out: self._unusable(node, why, out))
        else:
            self._tell(lambda out: self._usable(node, made, out))

    def _usable(self, node: str, made: MadeNode, out: LeaseTurn) -> None:
        held = self._held.get(node)
        if held is None:
            return  # it ended meanwhile
        held.made = True
        self._keepers[held.pool].accept()
        driver = made.driver()
        lease, ends_at = held.lease.id, held.lease.ends_at or 0.0
        out.events.append(NodeExpected(node, driver.slots, made.host, made.gpus, lease, held.pool, ends_at))
        out.start.append(driver)

    def _unusable(self, node: str, why: str, out: LeaseTurn) -> None:
        held = self._held.pop(node, None)
        if held is not None:
            out.notes.append((f"{node}: lease {held.lease.id} cannot be used and is given back: {why}", True))
            self._keepers[held.pool].reject(held.lease, why)

    def _new_name(self, pool: str) -> str:
        taken = [re.fullmatch(rf"{re.escape(pool)}-([0-9]+)", n) for n in self._names.values()]
        return f"{pool}-{max((int(m[1]) for m in taken if m), default=0) + 1}"

    def _ended(self, pool: str, lease: Lease) -> None:
        """Bring home what the lease left behind, then let go of its node."""
        if lease.id in self._names and lease.id not in self._over:
            self._over.add(lease.id)
            self._bringing += 1
            self._threads.submit(self._bring_home, pool, lease)

    def _bring_home(self, pool: str, lease: Lease) -> None:
        rows: list[tuple[str, Chunk]] = []
        trouble = ""
        try:
            data = self._keepers[pool].source.leftovers(lease.id)
            rows = list(rows_of(data)) if data else []
        except (OrchestratorError, tarfile.TarError, OSError) as e:
            trouble = f"{self._names[lease.id]}: what it left behind could not be read: {e}"
        self._tell(lambda out: self._gone(pool, lease, rows, trouble, out))

    def _gone(self, pool: str, lease: Lease, rows: Sequence[tuple[str, Chunk]], trouble: str, out: LeaseTurn) -> None:
        self._bringing -= 1
        self._keepers[pool].release([lease.id])  # what is left of it in the scheduler is of no more use
        node = self._names[lease.id]
        self._held.pop(node, None)
        self._leaving.pop(node, None)
        out.rows += [(name, chunk) for name, chunk in rows if name == node]
        if trouble:
            out.notes.append((trouble, True))
        cause = lease.cause or EndCause.UNKNOWN
        out.events.append(LeaseEnded(node, cause.value, lease.why, charged=cause.is_loss))

    # --- and leave --------------------------------------------------------------------------------------------------

    def _end_times(self, policy: Policy, registry: NodeRegistry, out: LeaseTurn, now: float) -> None:
        """No new claims near a lease's time limit; then its workers close their books, and it is given back."""
        for node, held in self._held.items():
            left = (held.lease.ends_at or float("inf")) - now
            pool = self._by_name[held.pool]
            if node not in registry.drivers or left > pool.no_more_claims_s:
                continue
            self._drain(node, held, f"its lease ends in {left:.0f} s", out)
            if held.lease.why or node in self._leaving:
                continue  # something ends it, and the scheduler will say what
            if left < pool.books_s or node in policy.idle_nodes():
                held.cause = EndCause.TIME_LIMIT
                self._leave([node], registry)

    def _drain(self, node: str, held: _Held, why: str, out: LeaseTurn) -> None:
        if not held.draining:
            held.draining = True
            out.events.append(NodeDraining(node))
            out.notes.append((f"{node} takes no more work: {why}", False))

    def _leave(self, nodes: Iterable[str], registry: NodeRegistry) -> None:
        for node in nodes:
            self._leaving[node] = Shutdown(registry, USUAL, tidy=True)
            self._leaving[node].begin([registry.drivers[node]])

    def _left(self, out: LeaseTurn, now: float) -> None:
        """Give back the leases whose nodes are shut down."""
        for node, shutdown in list(self._leaving.items()):
            held = self._held.get(node)
            if held is not None and shutdown.done() and now - self._ended_at.setdefault(node, now) >= UNREAD_S:
                shutdown.close()
                self._keepers[held.pool].release([held.lease.id])
                self._over.add(held.lease.id)
                del self._held[node], self._leaving[node]
                out.events.append(LeaseEnded(node, held.cause.value, "given back", charged=False))

    def _wish(self, policy: Policy, registry: NodeRegistry, out: LeaseTurn, now: float) -> None:
        want = wanted([p.size for p in self._pools], policy.backlog_s(), self._other_slots(), policy.places_awaited())
        sick = policy.quarantined_hosts(now)
        self._sick = {h: t for h, t in (self._sick | dict.fromkeys(sick, now)).items() if now - t < AVOID_S}
        held: dict[str, int] = {p.size.name: 0 for p in self._pools}
        for node, h in self._held.items():
            held[h.pool] += node not in self._leaving
        for pool in self._pools:
            name = pool.size.name
            # what works already is given back when it is idle, not before; and only work that waits needs more
            enough = max(held[name], self._floor[name]) + len(self._queued.get(name, ()))
            most = want[name] if policy.has_waiting or policy.places_awaited() else enough
            self._keepers[name].want(max(min(want[name], most), held[name], self._floor[name]), self._sick)
        ready = {n for n, h in self._held.items() if n in registry.drivers and not h.draining}
        for node in ready:
            if self._held[node].lease.host in sick and node in policy.idle_nodes():
                self._drain(node, self._held[node], "its host is in quarantine", out)
                self._leave([node], registry)
        idle = self._idle.over((n for n in policy.idle_nodes() if n in ready and n not in self._leaving), now)
        if not self._hold:
            for node in idle:
                self._floor[self._held[node].pool] = 0
                self._drain(node, self._held[node], "it was idle for 2 minutes", out)
                self._leave([node], registry)
        settled = policy.progress().tuned + policy.progress().failed
        if settled != self._moved[1] or not policy.places_awaited() or policy.progress().running:
            self._moved = (now, settled)
        staying = Counter(h.pool for h in self._held.values() if not h.draining)
        more = now - self._moved[0] < PLACE_S and any(
            p.size.name not in self._hopeless
            and (bool(self._queued.get(p.size.name)) or staying[p.size.name] < p.size.maximum)
            for p in self._pools
        )
        if more != self._may_grow:
            self._may_grow = more
            out.events.append(FleetMayGrow(more))
