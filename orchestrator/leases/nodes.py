"""Nodes of a run that come from pools of leases: wished for, prepared, started and given back as the work needs them.

The controller's loop calls `turn`, which never waits: keepers look at the schedulers, and a few threads prepare nodes.
"""

from __future__ import annotations

import queue
import re
import tarfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import tenacity

from orchestrator.dispatch.node import NodeDriver
from orchestrator.dispatch.node_registry import NodeRegistry
from orchestrator.dispatch.reports import LeaseTurn
from orchestrator.dispatch.stream import Chunk
from orchestrator.errors import OrchestratorError, UnreachableError
from orchestrator.events import LeaseEnded, LeasesQueued, NodeExpected
from orchestrator.leases.base import EndCause, Lease
from orchestrator.leases.holder import rows_of
from orchestrator.leases.holdings import HeldLease, Holdings, Pool
from orchestrator.leases.keeper import LeaseKeeper, News
from orchestrator.policy import Policy

REACH_S = 120.0
"""So long the way to a granted lease, or to what an ended one left, may be broken before it is given up."""
MAX_PARALLEL = 16
CLOSE_S = 10.0


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


class LeasedNodes:
    """The leased nodes of one run (NodeSupply); used by the controller's loop alone."""

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
        self._make, self._grow, self._wake = make, grow, wake
        self._news: queue.SimpleQueue[Callable[[LeaseTurn], None]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(MAX_PARALLEL, "lease")
        self._closing = threading.Event()
        self._names = {id_: k.node for id_, k in known.items()}
        self._over = {id_ for id_, k in known.items() if k.ended}
        self._bringing = 0
        """Ended leases whose leftovers are being fetched."""
        for pool in pools:
            before = [i for i, k in known.items() if k.pool == pool.name]
            report = self._reporter(pool)
            pool.keeper = LeaseKeeper(pool.name, pool.source, report, known=before, fresh=fresh and grow)
        self._held = Holdings(pools, other_slots, hold=hold)
        self._started = False

    # --- called by the controller -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask for the leases that each pool starts with."""
        self._started = True
        for pool in self._held.pools.values():
            if self._grow:
                pool.keeper.want(pool.floor)
            pool.keeper.start()

    def turn(self, policy: Policy, registry: NodeRegistry, now: float) -> LeaseTurn:
        """Return what changed since the last turn. `now` in epoch seconds."""
        out = LeaseTurn()
        while True:
            try:
                news = self._news.get_nowait()
            except queue.Empty:
                break
            news(out)
        self._held.excuse(registry)
        self._held.end_times(policy, registry, out, now)
        self._over.update(self._held.give_back(out, now))
        if self._grow:
            self._held.turn(policy, registry, out, now)
        return out

    def look(self, node: str) -> None:
        """Look at once what became of the lease of a node that is in trouble."""
        held = self._held.of.get(node)
        if held is not None:
            held.pool.keeper.look()

    @property
    def coming(self) -> bool:
        """Return whether a lease is queued, being prepared or given back, or may be requested."""
        if self._held.may_grow or self._bringing:
            return True
        under_way = any(not h.made or h.leaving is not None for h in self._held.of.values())
        return under_way or any(p.queued or not p.looked for p in self._held.pools.values())

    def why(self) -> list[str]:
        """State of what is awaited, a line each, in the schedulers' words."""
        pools = self._held.pools.values()
        lines = [f"  {p.name}: no more leases are requested: {p.hopeless}" for p in pools if p.hopeless]
        return lines + [f"  {p.name}: lease {x.id} is queued: {x.why}" for p in pools for x in p.queued]

    def close(self, *, release: bool) -> list[str]:
        """End all threads; give every lease back, or leave them to their work. Return what may be left, a line each."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if not self._started:
            return []
        pools = self._held.pools.values()
        with ThreadPoolExecutor(max(1, len(pools)), "lease") as threads:
            left = threads.map(lambda p: (p.name, p.keeper.close(release=release, timeout=CLOSE_S)), pools)
        return [f"leases of {name} may be left: {why}" for name, why in left if why]

    # --- what keepers report ----------------------------------------------------------------------------------------

    def _tell(self, news: Callable[[LeaseTurn], None]) -> None:
        """Have it done in the next turn. From any thread."""
        self._news.put(news)
        self._wake()

    def _reporter(self, pool: Pool) -> Callable[[News], None]:
        return lambda news: self._tell(lambda out: self._take(pool, news, out))

    def _take(self, pool: Pool, news: News, out: LeaseTurn) -> None:
        match news:
            case News("looked"):
                pool.looked = True
            case News("queued", leases):
                pool.queued = leases
                out.events.append(LeasesQueued(pool.name, tuple((x.id, x.why) for x in leases)))
            case News("ready", (lease,)):
                self._prepare(pool, lease, out)
            case News("limited", (lease,)):
                for held in self._held.of.values():
                    held.lease = lease if held.lease.id == lease.id else held.lease
            case News("ended", (lease,)):
                self._ended(pool, lease)
            case News("trouble", _, words):
                out.notes.append((f"{pool.name}: {words or 'the scheduler answers again'}", bool(words)))
            case News("hopeless", _, words):
                pool.hopeless = words
                text = f"{pool.name}: no more leases are requested, three in a row were never ready: {words}"
                out.notes.append((text, True))

    # --- leases become nodes ----------------------------------------------------------------------------------------

    def _prepare(self, pool: Pool, lease: Lease, out: LeaseTurn) -> None:
        if lease.id in self._over:
            pool.keeper.release([lease.id])  # its node is gone for good
            return
        if lease.host in self._held.sick and lease.id not in self._names:
            why = f"its host {lease.host} was in quarantine"
            out.notes.append((f"{pool.name}: lease {lease.id} is given back: {why}", True))
            pool.keeper.reject(lease, why)
            return
        node = self._names.setdefault(lease.id, self._new_name(pool.name))
        self._held.of[node] = HeldLease(pool, lease)
        out.notes.append((f"{node}: lease {lease.id} is granted on {lease.host or 'a host'}", False))
        self._threads.submit(self._prepared, pool, lease, node)

    def _prepared(self, pool: Pool, lease: Lease, node: str) -> None:
        try:
            made = self._patiently(lambda _: node in self._held.of)(self._make, pool.name, lease, node)
        except Exception as e:  # noqa: BLE001  whatever it is, the lease must not stay in between for ever
            why = str(e) if isinstance(e, OrchestratorError) else f"{type(e).__name__}: {e}"
            self._tell(lambda out: self._unusable(node, why, out))
        else:
            self._tell(lambda out: self._usable(node, made, out))

    def _patiently(self, awaited: Callable[[int], bool]) -> tenacity.Retrying:
        """Repetition of a call that finds the way broken: for REACH_S, while its result is `awaited` after so many
        attempts."""

        def may_pass(state: tenacity.RetryCallState) -> bool:
            e = state.outcome.exception() if state.outcome is not None else None
            return isinstance(e, UnreachableError) and e.transient and awaited(state.attempt_number)

        return tenacity.Retrying(
            retry=may_pass,
            wait=tenacity.wait_exponential(multiplier=0.2, max=5.0),
            stop=tenacity.stop_any(tenacity.stop_after_delay(REACH_S), tenacity.stop_when_event_set(self._closing)),
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )

    def _usable(self, node: str, made: MadeNode, out: LeaseTurn) -> None:
        held = self._held.of.get(node)
        if held is None:
            return  # it ended meanwhile
        held.made = True
        held.pool.keeper.accept()
        driver = made.driver()
        lease, ends_at = held.lease.id, held.lease.ends_at or 0.0
        out.events.append(NodeExpected(node, driver.slots, made.host, made.gpus, lease, held.pool.name, ends_at))
        out.start.append(driver)

    def _unusable(self, node: str, why: str, out: LeaseTurn) -> None:
        held = self._held.of.pop(node, None)
        if held is not None:
            out.notes.append((f"{node}: lease {held.lease.id} cannot be used and is given back: {why}", True))
            held.pool.keeper.reject(held.lease, why)

    def _new_name(self, pool: str) -> str:
        taken = [re.fullmatch(rf"{re.escape(pool)}-([0-9]+)", n) for n in self._names.values()]
        return f"{pool}-{max((int(m[1]) for m in taken if m), default=0) + 1}"

    # --- and end ----------------------------------------------------------------------------------------------------

    def _ended(self, pool: Pool, lease: Lease) -> None:
        """Bring home what the lease left behind, then let go of its node."""
        if lease.id in self._names and lease.id not in self._over:
            self._over.add(lease.id)
            held = self._held.of.get(self._names[lease.id])
            if held is not None:
                held.ended = True
            self._bringing += 1
            self._threads.submit(self._bring_home, pool, lease)

    def _bring_home(self, pool: Pool, lease: Lease) -> None:
        def awaited(attempts: int) -> bool:
            pool.keeper.look()
            return pool.keeper.silent_s > 0.0 or (attempts == 1 and not _cause(lease).is_loss)

        rows: list[tuple[str, Chunk]] = []
        trouble = ""
        try:
            data = self._patiently(awaited)(pool.source.leftovers, lease.id)
            rows = list(rows_of(data)) if data else []
        except (OrchestratorError, tarfile.TarError, OSError) as e:
            trouble = f"{self._names[lease.id]}: what it left behind could not be read: {e}"
        self._tell(lambda out: self._gone(pool, lease, rows, trouble, out))

    def _gone(self, pool: Pool, lease: Lease, rows: Sequence[tuple[str, Chunk]], trouble: str, out: LeaseTurn) -> None:
        self._bringing -= 1
        pool.keeper.release([lease.id])  # what is left of it in the scheduler is of no more use
        node = self._names[lease.id]
        self._held.of.pop(node, None)
        out.rows += [(name, chunk) for name, chunk in rows if name == node]
        if trouble:
            out.notes.append((trouble, True))
        cause = _cause(lease)
        out.events.append(LeaseEnded(node, cause.value, lease.why, charged=cause.is_loss))


def _cause(lease: Lease) -> EndCause:
    return lease.cause or EndCause.UNKNOWN
