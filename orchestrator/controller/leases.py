"""The life of each lease of a run: asked for, granted, a node, ended with a reason. Slurm's and Kubernetes' live alike.

The controller's loop calls `turn`, which never waits: each pool has a keeper that talks to its scheduler, and a few
threads prepare nodes and bring home what ended leases left.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from math import ceil

import tenacity

from orchestrator.controller.node import NodeDriver
from orchestrator.controller.nodes import NodeRegistry, Shutdown
from orchestrator.errors import OrchestratorError, UnreachableError
from orchestrator.events import Event, FleetMayGrow, LeaseEnded, LeasesQueued, NodeDraining, NodeExpected
from orchestrator.leases.base import (
    USUAL_S,
    EndCause,
    Keeper,
    Lease,
    LeaseSource,
    LeaseState,
    Look,
    Order,
    rows_of,
)
from orchestrator.ledger.ingest import Chunk
from orchestrator.policy import Policy
from orchestrator.policy.model import Node

LEASE_WORK_S, IDLE_S, MAX_FAILURES = 600.0, 120.0, 3
"""Seconds of work on each of its slots that make one more lease worth asking for; seconds without work after which one$
is given back; leases or requests in a row that came to nothing, after which no more are requested."""
NO_MORE_CLAIMS_S, BOOKS_S = 120.0, 30.0
"""Seconds before a lease's time limit at which it takes no more work, and at which its workers close their books; of a
short lease at most a quarter and an eighth of its time."""
PLACE_S, AVOID_S, AWAY_S = 600.0, 600.0, 600.0
"""Seconds that a shape awaits a machine that can confirm it (it did not run there), with nothing else going on; that a
host is left out of requests after it was in quarantine; and that no node of a pool is given up while its scheduler does
not answer, as the way to all of them leads by it."""
UNREACHABLE_S, REACH_S = 60.0, 120.0
"""Silence of a scheduler that is reported, and the time for which the way to a granted lease, or to what an ended one
left, may be broken before it is given up."""
UNREAD_S, CLOSE_S, MAX_PARALLEL = 1.0, 10.0, 16
"""Seconds after a shutdown for the last records that are under way, and for all leases to be given back at the end."""


@dataclass(frozen=True, slots=True)
class MadeNode:
    """A lease that is ready for work: a function that makes its driver, called in the controller's own thread, its
    physical host, and the id of each slot's GPU there."""

    driver: Callable[[], NodeDriver]
    host: str
    gpus: tuple[str, ...]


MakeNode = Callable[[str, Lease, str], MadeNode]
"""Checks the machine of a pool's lease and makes its node under a name; called in a thread. Raises OrchestratorError
where it cannot work."""


@dataclass(slots=True)
class LeaseTurn:
    """Changes of one turn: events for the journal, drivers to start, notes for people (text, bad)."""

    events: list[Event] = field(default_factory=list)
    start: list[NodeDriver] = field(default_factory=list)
    notes: list[tuple[str, bool]] = field(default_factory=list)
    rows: list[tuple[str, Chunk]] = field(default_factory=list)
    """(node, whole file from its beginning) of what ended leases left behind."""


class Phase(Enum):
    """QUEUED: asked for. GRANTED: its machine is being checked. NODE: it works. LEAVING: its workers are stopped, and
    then we give it back. ENDING: its scheduler has ended it, and we fetch the rows that it left. ENDED: over."""

    QUEUED = auto()
    GRANTED = auto()
    NODE = auto()
    LEAVING = auto()
    ENDING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Pool:
    """A pool of leases: its size, where they come from, and what is known of it.

    `slots`: those of one lease. `time_s`: its time limit. `floor`: leases that are held at least while there is work:
    until one was idle, those to start with. `ordered`: number of the last order to the keeper. `queued`: leases that
    wait, as they were reported last. `failures`: words on the leases and requests in a row that came to
    nothing; `hopeless`: the last of them where no more are requested. `refused`: words with which the last request was
    refused; before `ask_at` there is no other. `silence_told`: it was reported that its scheduler does not answer.
    """

    name: str
    minimum: int
    maximum: int
    slots: int
    source: LeaseSource
    time_s: float = float("inf")
    keeper: Keeper = field(init=False)
    floor: int = field(init=False)
    want: int = 0
    ordered: int = 0
    look: Look | None = None
    queued: tuple[Lease, ...] = ()
    failures: list[str] = field(default_factory=list)
    hopeless: str = ""
    refused: str = ""
    ask_at: float = 0.0
    silence_told: bool = False


@dataclass(slots=True, eq=False)
class Life:
    """The life of one lease.

    `lease`: what the scheduler said of it last. `node`: the name of its node, from the grant on. `unwanted`: it is to
    be given back, for the reason `cause`; `returned`: its scheduler was told so. `left_at`: when its shutdown was seen
    to be done.
    """

    pool: Pool
    lease: Lease
    node: str = ""
    phase: Phase = Phase.QUEUED
    unwanted: bool = False
    returned: bool = False
    draining: bool = False
    idle_since: float | None = None
    cause: EndCause = EndCause.RELEASED
    leaving: Shutdown | None = None
    left_at: float = 0.0


def wanted(pools: Sequence[Pool], backlog_s: float, other_slots: int = 0, places: int = 0) -> dict[str, int]:
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


class LeasedNodes:
    """The leased nodes of one run; used by the controller's loop alone. No call waits, but for `close`."""

    def __init__(
        self,
        pools: Sequence[Pool],
        make: MakeNode,
        *,
        known: Sequence[Node],
        other_slots: Callable[[], int] = lambda: 0,
        hold: bool = False,
        grow: bool = True,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`known`: nodes of leases that earlier controllers had. `other_slots`: slots of machines of our own. `hold`:
        keep idle leases. `grow`: False takes over what is there, and asks for none. `wake` is called, in any thread,
        when there is something for the next turn."""
        self._pools, self._make, self._other_slots = {p.name: p for p in pools}, make, other_slots
        self._hold, self._grow, self._wake = hold, grow and bool(pools), wake
        self._news: queue.SimpleQueue[Callable[[LeaseTurn], None]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(MAX_PARALLEL, "lease")
        self._closing = threading.Event()
        self._lives: dict[str, Life] = {}
        self._names = {n.name for n in known}
        for n in (n for n in known if n.pool in self._pools):
            ended = n.state == "gone"
            state, phase = (LeaseState.ENDED, Phase.ENDED) if ended else (LeaseState.QUEUED, Phase.QUEUED)
            self._lives[n.lease] = Life(self._pools[n.pool], Lease(n.lease, state), n.name, phase)
        for pool in pools:
            told = partial(lambda pool, look: self._tell(partial(self._take, pool, look)), pool)
            pool.floor, pool.keeper = pool.minimum, Keeper(pool.name, pool.source, told)
        self._moved = (0.0, -1)  # the last change of the number of settled shapes, and that number
        self._sick: dict[str, float] = {}  # host -> when it was in quarantine last; those of the last AVOID_S
        self._may_grow: bool | None = None

    def start(self) -> None:
        """Ask for the leases that each pool starts with."""
        for pool in self._pools.values():
            pool.want = pool.floor if self._grow else 0
            pool.keeper.start()

    def turn(self, policy: Policy, registry: NodeRegistry, now: float) -> LeaseTurn:
        """Return what changed since the last turn. `now` in epoch seconds."""
        out = LeaseTurn()
        while not self._news.empty():
            self._news.get()(out)
        for pool in self._pools.values():
            self._tell_silence(pool, out)
        self._excuse(registry)
        self._near_ends(policy, registry, out, now)
        self._give_back(out, now)
        if self._grow:
            self._keep_size(policy, registry, out, now)
        for pool in self._pools.values():
            self._order(pool, out)
        return out

    def look(self, node: str) -> None:
        """Look at once what became of the lease of a node that is in trouble."""
        for life in self._lives.values():
            if life.node == node:
                life.pool.keeper.look()

    @property
    def coming(self) -> bool:
        """Return whether a lease is queued, being prepared or given back, or may be requested."""
        between = (Phase.GRANTED, Phase.LEAVING, Phase.ENDING)
        under_way = any(x.phase in between for x in self._lives.values())
        return bool(self._may_grow) or under_way or any(p.queued or not p.look for p in self._pools.values())

    def why(self) -> list[str]:
        """State of what is awaited, a line each, in the schedulers' words."""
        pools = self._pools.values()
        shut = f" (in quarantine: {', '.join(sorted(self._sick))})" if self._sick else ""
        lines = [f"  {p.name}: no more leases are requested: {p.hopeless}{shut}" for p in pools if p.hopeless]
        return lines + [f"  {p.name}: lease {x.id} is queued: {x.why}" for p in pools for x in p.queued]

    def close(self, *, release: bool) -> list[str]:
        """End all threads; give every lease back, or leave them to their work. Return what may be left, a line each."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        pools = self._pools.values()
        with ThreadPoolExecutor(max(1, len(pools)), "lease") as threads:
            left = threads.map(lambda p: (p.name, p.keeper.close(release=release, timeout=CLOSE_S)), pools)
        return [f"leases of {name} may be left: {why}" for name, why in left if why]

    def _tell(self, news: Callable[[LeaseTurn], None]) -> None:
        """Have it done in the next turn. From any thread."""
        self._news.put(news)
        self._wake()

    def _take(self, pool: Pool, look: Look, out: LeaseTurn) -> None:
        pool.look = look
        there = {x.id for x in look.leases}
        words = "its scheduler does not know it any more"
        forgotten = [
            replace(x.lease, state=LeaseState.ENDED, why=words, cause=EndCause.PREEMPTED)
            for x in self._lives.values()
            if x.pool is pool and x.lease.state is not LeaseState.ENDED and x.lease.id not in there
        ]
        for lease in (*look.leases, *forgotten):
            life = self._lives.setdefault(lease.id, Life(pool, lease))
            life.lease = lease
            if lease.state is LeaseState.READY and life.phase is Phase.QUEUED and not life.unwanted:
                self._granted(life, out)
            elif lease.state is LeaseState.ENDED:
                self._ended(life)
        queued = tuple(x for x in look.leases if x.state is LeaseState.QUEUED)
        if queued != pool.queued:
            pool.queued = queued
            out.events.append(LeasesQueued(pool.name, tuple((x.id, x.why) for x in queued)))
        if look.refused:
            pool.ask_at = time.monotonic() + USUAL_S
            if all(x.state is LeaseState.ENDED for x in look.leases):
                pool.failures.append(look.refused)
            if look.refused != pool.refused:
                out.notes.append((f"{pool.name}: more leases are refused: {look.refused}", True))
            pool.refused = look.refused

    def _tell_silence(self, pool: Pool, out: LeaseTurn) -> None:
        silent = pool.keeper.silent_s
        if silent > UNREACHABLE_S if not pool.silence_told else silent == 0.0:
            pool.silence_told = not pool.silence_told
            words = pool.keeper.silent_why if pool.silence_told else "the scheduler answers again"
            out.notes.append((f"{pool.name}: {words}", pool.silence_told))

    def _granted(self, life: Life, out: LeaseTurn) -> None:
        life.phase, life.node = Phase.GRANTED, life.node or self._new_name(life.pool.name)
        out.notes.append((f"{life.node}: lease {life.lease.id} is granted on {life.lease.host or 'a host'}", False))
        self._threads.submit(self._prepare, life)

    def _prepare(self, life: Life) -> None:
        made, why = None, ""
        try:
            call = self._patiently(lambda _: life.phase is Phase.GRANTED)
            made = call(self._make, life.pool.name, life.lease, life.node)
        except Exception as e:  # noqa: BLE001  whatever it is, the lease must not stay in between for ever
            why = str(e) if isinstance(e, OrchestratorError) else f"{type(e).__name__}: {e}"
        self._tell(lambda out: self._prepared(life, made, why, out))

    def _prepared(self, life: Life, made: MadeNode | None, why: str, out: LeaseTurn) -> None:
        """It is a node, or of no use: then it counts as one that never was ready."""
        if life.phase is not Phase.GRANTED:
            return  # it ended meanwhile
        if made is None:
            out.notes.append((f"{life.node}: lease {life.lease.id} cannot be used and is given back: {why}", True))
            life.pool.failures.append(why)
            life.phase, life.unwanted = Phase.ENDED, True
            return
        life.phase = Phase.NODE
        life.pool.failures.clear()
        driver, of = made.driver(), (life.lease.id, life.pool.name, life.lease.ends_at or 0.0)
        out.events.append(NodeExpected(life.node, driver.slots, made.host, made.gpus, *of))
        out.start.append(driver)

    def _patiently(self, awaited: Callable[[int], bool]) -> tenacity.Retrying:
        """Repetition of a call that finds the way broken: for REACH_S, while `awaited`, given the number of attempts,
        says that its result is still of use."""

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

    def _new_name(self, pool: str) -> str:
        taken = [re.fullmatch(rf"{re.escape(pool)}-([0-9]+)", n) for n in self._names]
        self._names.add(name := f"{pool}-{max((int(m[1]) for m in taken if m), default=0) + 1}")
        return name

    def _ended(self, life: Life) -> None:
        """Its scheduler has ended it: bring home what it left behind, then let go of its node."""
        if life.node and life.phase not in (Phase.ENDING, Phase.ENDED):
            life.phase = Phase.ENDING
            self._threads.submit(self._bring_home, life)
        elif life.phase is Phase.QUEUED:
            life.phase = Phase.ENDED
            life.pool.failures += [] if life.unwanted else [life.lease.why or "it ended before it was ready"]

    def _bring_home(self, life: Life) -> None:
        keeper, cause = life.pool.keeper, life.lease.cause or EndCause.FAILED

        def awaited(attempts: int) -> bool:
            keeper.look()
            return keeper.silent_s > 0.0 or (attempts == 1 and cause is not EndCause.FAILED)

        lease, rows, trouble = life.lease, list[tuple[str, Chunk]](), ""
        try:
            data = self._patiently(awaited)(life.pool.source.leftovers, lease)
            rows.extend(rows_of(data) if data else ())  # what comes before damage is kept
        except Exception as e:  # noqa: BLE001  whatever it is, the lease must not stay in between for ever
            trouble = f"{life.node}: what it left behind could not be read: {e}"

        def gone(out: LeaseTurn) -> None:
            out.rows += [(name, chunk) for name, chunk in rows if name == life.node]
            if trouble:
                out.notes.append((trouble, True))
            self._over(life, cause, lease.why, out)

        self._tell(gone)

    def _over(self, life: Life, cause: EndCause, why: str, out: LeaseTurn) -> None:
        """Let go of its node, which does not come back, and of the rest of the lease in the scheduler."""
        life.phase = Phase.ENDED
        out.events.append(LeaseEnded(life.node, cause.value, why, charged=cause is EndCause.FAILED))

    def _near_ends(self, policy: Policy, registry: NodeRegistry, out: LeaseTurn, now: float) -> None:
        """No new claims near a lease's time limit; then its workers close their books, and it is given back."""
        for life in self._working(registry):
            left = (life.lease.ends_at or float("inf")) - now
            if left > min(NO_MORE_CLAIMS_S, life.pool.time_s / 4):
                continue
            self._drain(life, f"its lease ends in {left:.0f} s", out)
            if life.lease.why:
                continue  # something ends it, and the scheduler will say what
            if left < min(BOOKS_S, life.pool.time_s / 8) or life.node in policy.idle_nodes():
                life.cause = EndCause.TIME_LIMIT
                self._shut_down(life, registry)

    def _working(self, registry: NodeRegistry) -> list[Life]:
        return [x for x in self._lives.values() if x.phase is Phase.NODE and x.node in registry.drivers]

    def _drain(self, life: Life, why: str, out: LeaseTurn) -> None:
        if not life.draining:
            life.draining = True
            out.events.append(NodeDraining(life.node))
            out.notes.append((f"{life.node} takes no more work: {why}", False))

    def _shut_down(self, life: Life, registry: NodeRegistry) -> None:
        life.phase, life.leaving = Phase.LEAVING, Shutdown(registry, registry.timeouts.stop, tidy=True)
        life.leaving.begin([registry.drivers[life.node]])

    def _give_back(self, out: LeaseTurn, now: float) -> None:
        """Give back the leases whose nodes are shut down."""
        for life in self._lives.values():
            if life.phase is Phase.LEAVING and life.leaving is not None and life.leaving.done():
                life.left_at = life.left_at or now
                if now - life.left_at >= UNREAD_S:
                    life.leaving.close()
                    life.unwanted = True
                    self._over(life, life.cause, "given back", out)

    def _excuse(self, registry: NodeRegistry) -> None:
        """Give no node up for being out of reach while its scheduler is."""
        for life in self._working(registry):
            if 0.0 < life.pool.keeper.silent_s < AWAY_S:
                registry.goes_on(life.node, registry.why(life.node))

    def _keep_size(self, policy: Policy, registry: NodeRegistry, out: LeaseTurn, now: float) -> None:
        """Set the number that the work needs, and let go of what it does not."""
        sick = policy.quarantined_hosts(now)
        self._sick = {h: t for h, t in (self._sick | dict.fromkeys(sick, now)).items() if now - t < AVOID_S}
        self._set_wanted(policy)
        idle = set(policy.idle_nodes())
        for life in self._working(registry):
            if life.draining:
                continue
            life.idle_since = (life.idle_since or now) if life.node in idle else None
            why = "its host is in quarantine" if life.idle_since and life.lease.host in sick else ""
            if not why and not self._hold and life.idle_since and now - life.idle_since >= IDLE_S:
                why, life.pool.floor = "it was idle for 2 minutes", 0
            if why:
                self._drain(life, why, out)
                self._shut_down(life, registry)
        more = self._is_awaited(policy, now)
        if more != self._may_grow:
            self._may_grow = more
            out.events.append(FleetMayGrow(more))

    def _set_wanted(self, policy: Policy) -> None:
        places = policy.places_awaited()
        want = wanted([*self._pools.values()], policy.backlog_s(), self._other_slots(), places)
        at_work = (Phase.GRANTED, Phase.NODE)
        held = Counter(x.pool.name for x in self._lives.values() if x.phase in at_work)
        for name, pool in self._pools.items():
            # what works already is given back when it is idle, not before; and only work that waits needs more
            least = max(held[name], pool.floor)
            most = want[name] if policy.has_waiting or places else least + len(pool.queued)
            pool.want = max(min(want[name], most), least)

    def _is_awaited(self, policy: Policy, now: float) -> bool:
        """Return whether another lease may come that the work has a use for."""
        state = policy.state
        settled = state.tuned + state.failed
        if settled != self._moved[1] or not policy.places_awaited() or state.running:
            self._moved = (now, settled)
        at_work = (Phase.GRANTED, Phase.NODE)
        staying = Counter(x.pool.name for x in self._lives.values() if x.phase in at_work and not x.draining)
        return now - self._moved[0] < PLACE_S and any(
            not p.hopeless and (bool(p.queued) or staying[name] < p.maximum) for name, p in self._pools.items()
        )

    def _order(self, pool: Pool, out: LeaseTurn) -> None:
        """Have the keeper give back what is of no more use, and ask for what lacks."""
        if pool.look is None or pool.look.number != pool.ordered:
            return  # no look has shown the last order yet
        if len(pool.failures) >= MAX_FAILURES and not pool.hopeless:
            pool.hopeless = pool.failures[-1]
            text = f"{pool.name}: no more leases are requested, three in a row were never ready: {pool.hopeless}"
            out.notes.append((text, True))
        there = [self._lives[x.id] for x in pool.look.leases]
        held = [x for x in there if x.lease.state is not LeaseState.ENDED]
        queued = [x for x in held if x.phase is Phase.QUEUED and x.lease.state is LeaseState.QUEUED]
        for life in queued[::-1][: max(0, len(held) - pool.want)]:
            life.unwanted = True
        back = [x for x in there if (x.unwanted or x.phase is Phase.ENDED) and not x.returned]
        lacking = pool.want - len(held) if self._grow and not pool.hopeless and time.monotonic() >= pool.ask_at else 0
        if back or lacking > 0:
            for life in back:
                life.returned = True
            pool.ordered += 1
            pool.keeper.order(Order(pool.ordered, max(0, lacking), [*self._sick], tuple(x.lease for x in back)))
