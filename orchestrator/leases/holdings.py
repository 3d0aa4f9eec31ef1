"""Leases that a run holds, pool by pool: the number that it wants, and giving back those that it needs no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from orchestrator.dispatch.node_registry import NodeRegistry, Shutdown
from orchestrator.dispatch.reports import LeaseTurn
from orchestrator.events import FleetMayGrow, LeaseEnded, NodeDraining
from orchestrator.leases.base import EndCause, Lease, LeaseSource
from orchestrator.leases.keeper import IdleTimes, LeaseKeeper, PoolSize, wanted
from orchestrator.policy import Policy

NO_MORE_CLAIMS_S, BOOKS_S = 120.0, 30.0
"""Seconds before a lease's time limit at which it takes no more work, and at which its workers close their books; of a
short lease at most a quarter and an eighth of its time."""
UNREAD_S = 1.0
"""Seconds after a shutdown for the last records that are under way."""
PLACE_S = 600.0
"""Seconds that a shape awaits a machine that can confirm it (it did not run there), with nothing else going on."""
AVOID_S = 600.0
"""So long a host is left out of requests after it was in quarantine."""
AWAY_S = 600.0
"""So long no node of a pool is given up while its scheduler does not answer: the way to all of them leads by it."""


@dataclass(slots=True)
class Pool:
    """A pool of leases, where they come from, who keeps them, and what is known of it."""

    size: PoolSize
    source: LeaseSource
    time_s: float = float("inf")
    """Time limit of a lease."""
    keeper: LeaseKeeper = field(init=False)
    floor: int = field(init=False)
    """Leases that it holds at least while there is work: until one of it is given back, those to start with."""
    looked: bool = False
    """Its scheduler has answered."""
    queued: tuple[Lease, ...] = ()
    hopeless: str = ""
    """Reason why no more leases are requested."""

    def __post_init__(self) -> None:
        self.floor = self.size.minimum

    @property
    def name(self) -> str:
        return self.size.name

    @property
    def no_more_claims_s(self) -> float:
        return min(NO_MORE_CLAIMS_S, self.time_s / 4)

    @property
    def books_s(self) -> float:
        return min(BOOKS_S, self.time_s / 8)


@dataclass(slots=True)
class HeldLease:
    """A lease that is, or becomes, a node."""

    pool: Pool
    lease: Lease
    made: bool = False
    ended: bool = False
    """Its scheduler has ended it; what it left behind is being brought home."""
    draining: bool = False
    cause: EndCause = EndCause.RELEASED
    """Reason for giving it back."""
    leaving: Shutdown | None = None
    left_at: float | None = None
    """Time at which its shutdown was seen to be done."""


class Holdings:
    """The leases of a run that are nodes or become some, by node; `turn` keeps their number right."""

    def __init__(self, pools: Iterable[Pool], other_slots: Callable[[], int], *, hold: bool) -> None:
        self.pools = {p.name: p for p in pools}
        self.of: dict[str, HeldLease] = {}
        self._other_slots, self._hold = other_slots, hold
        self._moved = (0.0, -1)
        """Time of the last change of the number of settled shapes, and that number."""
        self.sick: dict[str, float] = {}
        """Host -> when it was in quarantine last; those of the last AVOID_S."""
        self._idle = IdleTimes()
        self.may_grow: bool | None = None

    def turn(self, policy: Policy, registry: NodeRegistry, out: LeaseTurn, now: float) -> None:
        """Ask for what the work needs, and give back what it does not."""
        sick = policy.quarantined_hosts(now)
        self.sick = {h: t for h, t in (self.sick | dict.fromkeys(sick, now)).items() if now - t < AVOID_S}
        self._ask(policy)
        ready = {n: h for n, h in self.of.items() if n in registry.drivers and not h.draining}
        idle = [n for n in policy.idle_nodes() if n in ready]
        for node in idle:
            if ready[node].lease.host in sick:
                self._leave(node, "its host is in quarantine", registry, out)
        for node in self._idle.over((n for n in idle if ready[n].leaving is None), now):
            if not self._hold:
                ready[node].pool.floor = 0
                self._leave(node, "it was idle for 2 minutes", registry, out)
        more = self._is_awaited(policy, now)
        if more != self.may_grow:
            self.may_grow = more
            out.events.append(FleetMayGrow(more))

    def _ask(self, policy: Policy) -> None:
        places = policy.places_awaited()
        sizes = [p.size for p in self.pools.values()]
        want = wanted(sizes, policy.backlog_s(), self._other_slots(), places)
        held = Counter(h.pool.name for h in self.of.values() if h.leaving is None and not h.ended)
        for name, pool in self.pools.items():
            # what works already is given back when it is idle, not before; and only work that waits needs more
            least = max(held[name], pool.floor)
            most = want[name] if policy.has_waiting or places else least + len(pool.queued)
            pool.keeper.want(max(min(want[name], most), least), self.sick)

    def _is_awaited(self, policy: Policy, now: float) -> bool:
        """Return whether another lease may come that the work has a use for."""
        progress = policy.progress()
        settled = progress.tuned + progress.failed
        if settled != self._moved[1] or not policy.places_awaited() or progress.running:
            self._moved = (now, settled)
        staying = Counter(h.pool.name for h in self.of.values() if not h.draining and not h.ended)
        return now - self._moved[0] < PLACE_S and any(
            not p.hopeless and (bool(p.queued) or staying[name] < p.size.maximum) for name, p in self.pools.items()
        )

    def end_times(self, policy: Policy, registry: NodeRegistry, out: LeaseTurn, now: float) -> None:
        """No new claims near a lease's time limit; then its workers close their books, and it is given back."""
        for node, held in self.of.items():
            left = (held.lease.ends_at or float("inf")) - now
            if node not in registry.drivers or left > held.pool.no_more_claims_s:
                continue
            self._drain(node, f"its lease ends in {left:.0f} s", out)
            if held.lease.why or held.leaving is not None:
                continue  # something ends it, and the scheduler will say what
            if left < held.pool.books_s or node in policy.idle_nodes():
                held.cause = EndCause.TIME_LIMIT
                self._shut_down(node, registry)

    def excuse(self, registry: NodeRegistry) -> None:
        """Give no node up for being out of reach while its scheduler is."""
        for node, held in self.of.items():
            if node in registry.drivers and 0.0 < held.pool.keeper.silent_s < AWAY_S:
                registry.goes_on(node, registry.why(node))

    def _leave(self, node: str, why: str, registry: NodeRegistry, out: LeaseTurn) -> None:
        self._drain(node, why, out)
        self._shut_down(node, registry)

    def _drain(self, node: str, why: str, out: LeaseTurn) -> None:
        held = self.of[node]
        if not held.draining:
            held.draining = True
            out.events.append(NodeDraining(node))
            out.notes.append((f"{node} takes no more work: {why}", False))

    def _shut_down(self, node: str, registry: NodeRegistry) -> None:
        self.of[node].leaving = shutdown = Shutdown(registry, registry.timeouts.stop, tidy=True)
        shutdown.begin([registry.drivers[node]])

    def give_back(self, out: LeaseTurn, now: float) -> list[str]:
        """Give back the leases whose nodes are shut down; return them."""
        gone = []
        for node, held in list(self.of.items()):
            if held.leaving is None or not held.leaving.done():
                continue
            held.left_at = held.left_at or now
            if now - held.left_at >= UNREAD_S:
                held.leaving.close()
                held.pool.keeper.release([held.lease.id])
                gone.append(self.of.pop(node).lease.id)
                out.events.append(LeaseEnded(node, held.cause.value, "given back", charged=False))
        return gone
