"""The leased nodes of a run: asks for leases, makes nodes of those that are granted, and gives them back.

The controller's loop calls `LeasedNodes.turn`, which never waits. A turn goes in this order: take the news of the
threads, drain nodes whose lease ends soon, give back leases whose nodes are shut down, set how many leases the work
needs, and order the missing ones. The thread of a pool's poller (leases/poller.py) talks to its scheduler, and a few
threads prepare nodes (`_prepare_node`) and fetch what ended leases left (`_fetch_leftovers`). Each hands its news, a
function, to the next turn by `_tell`.

The neighbours: lease_lifecycle.py has the data and draws the phases of a lease, and pool_size.py says how many leases
the work needs.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import tenacity

from orchestrator.errors import OrchestratorError, UnreachableError
from orchestrator.events import FleetMayGrow, LeaseEnded, LeasesQueued, NodeDraining, NodeExpected
from orchestrator.leases.holder import rows_of
from orchestrator.leases.lease import EndCause, Lease, LeaseState
from orchestrator.leases.lease_lifecycle import (
    LeaseLifecycle,
    LeasePhase,
    LeaseTurn,
    MakeReady,
    Pool,
    ReadyNode,
    RunNodes,
)
from orchestrator.leases.poller import USUAL_S, PoolOrder, PoolPoller, PoolSnapshot
from orchestrator.leases.pool_size import PoolSizes
from orchestrator.ledger.ingest import Chunk
from orchestrator.policy import Policy
from orchestrator.policy.model import Node

IDLE_S = 120.0
"""A lease without work is given back after this long."""
MAX_FAILURES = 3
"""No more leases are requested after this many leases or requests in a row that came to nothing."""
NO_MORE_CLAIMS_S = 120.0
"""This long before its time limit a lease takes no more work; of a short lease at most a quarter of its time."""
BOOKS_S = 30.0
"""This long before its time limit the workers of a lease close their books; at most an eighth of its time."""
AVOID_S = 600.0
"""A host is left out of requests for this long after it was in quarantine."""
AWAY_S = 600.0
"""While the scheduler does not answer, wait this many seconds before giving up its nodes. We reach every node of the
pool through the scheduler."""
UNREACHABLE_S = 60.0
"""A scheduler that is silent for longer is reported."""
REACH_S = 120.0
"""The way to a granted lease, or to what an ended one left, may be broken for this long before it is given up."""
UNREAD_S = 1.0
"""Time after a shutdown for the last records that are under way."""
CLOSE_S = 10.0
"""Time for all leases to be given back at the end."""
MAX_PARALLEL = 16


class LeasedNodes:
    """The leased nodes of one run. Only the controller's loop uses it. No call waits, except `close`."""

    def __init__(
        self,
        pools: Sequence[Pool],
        make_ready: MakeReady,
        *,
        known: Sequence[Node],
        hold: bool = False,
        grow: bool = True,
    ) -> None:
        """`known`: nodes of leases that earlier controllers had. `hold`: keep idle leases. `grow`: False takes over the
        leases that there are, and asks for none."""
        self._pools = {pool.name: pool for pool in pools}
        self._make_ready = make_ready
        self._sizes = PoolSizes(pools)
        self._hold = hold
        self._grow = grow and bool(pools)
        self._wake: Callable[[], None] = lambda: None
        self._news: queue.SimpleQueue[Callable[[LeaseTurn], None]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(MAX_PARALLEL, "lease")
        self._closing = threading.Event()
        self._names = {node.name for node in known}
        self._lives: dict[str, LeaseLifecycle] = {}
        for node in known:
            if node.pool in self._pools:
                self._lives[node.lease] = self._life_of_known_node(node)
        for pool in pools:
            pool.floor = pool.minimum
            pool.poller = PoolPoller(pool.name, pool.source, partial(self._report_snapshot, pool))
        self._sick_hosts: dict[str, float] = {}
        """Host -> when it was in quarantine last; those of the last AVOID_S."""
        self._may_grow: bool | None = None

    def _life_of_known_node(self, node: Node) -> LeaseLifecycle:
        """The life of a lease that an earlier controller had. Unless it has ended, a snapshot will tell its state."""
        has_ended = node.state == "gone"
        state = LeaseState.ENDED if has_ended else LeaseState.QUEUED
        phase = LeasePhase.ENDED if has_ended else LeasePhase.QUEUED
        return LeaseLifecycle(self._pools[node.pool], Lease(node.lease, state), node.name, phase)

    def start(self, wake: Callable[[], None]) -> None:
        """Ask for the leases that each pool starts with. `wake` is called, in any thread, when there is something for
        the next turn."""
        self._wake = wake
        for pool in self._pools.values():
            pool.want = pool.floor if self._grow else 0
            pool.poller.start()

    def turn(self, policy: Policy, registry: RunNodes, now: float) -> LeaseTurn:
        """Return what changed since the last turn. `now` in epoch seconds."""
        turn = LeaseTurn()
        while not self._news.empty():
            self._news.get()(turn)
        for pool in self._pools.values():
            self._report_silence(pool, turn)
        self._excuse_unreachable(registry)
        self._leave_failed_nodes(registry, turn)
        self._prepare_ends(policy, registry, turn, now)
        self._give_back_leases(turn, now)
        if self._grow:
            self._keep_sizes(policy, registry, turn, now)
        for pool in self._pools.values():
            self._order_leases(pool, turn)
        return turn

    def check_lease_of(self, node: str) -> None:
        """Look at once what became of the lease of a node that is in trouble."""
        for life in self._lives.values():
            if life.node == node:
                life.pool.poller.poll_now()

    @property
    def is_lease_coming(self) -> bool:
        """Return whether a lease is queued, being prepared or given back, or may be requested."""
        between = (LeasePhase.GRANTED, LeasePhase.LEAVING, LeasePhase.ENDING)
        if self._may_grow or any(life.phase in between for life in self._lives.values()):
            return True
        return any(pool.queued or pool.snapshot is None for pool in self._pools.values())

    def details(self) -> list[str]:
        """Lines on why no lease is ready, in the schedulers' words: for each queued lease, and for each pool that asks
        for no more."""
        sick = f" (in quarantine: {', '.join(sorted(self._sick_hosts))})" if self._sick_hosts else ""
        lines = []
        for pool in self._pools.values():
            if pool.hopeless:
                lines.append(f"  {pool.name}: no more leases are requested: {pool.hopeless}{sick}")
        for pool in self._pools.values():
            lines += [f"  {pool.name}: lease {lease.id} is queued: {lease.why}" for lease in pool.queued]
        return lines

    def close(self, *, release: bool) -> list[str]:
        """End all threads. With `release` give every lease back, otherwise leave them to their work. Return a line for
        each pool that may have leases left."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        pools = list(self._pools.values())
        with ThreadPoolExecutor(max(1, len(pools)), "lease") as threads:
            reasons = threads.map(lambda pool: pool.poller.close(release=release, timeout=CLOSE_S), pools)
            ended = zip(pools, reasons, strict=True)
            return [f"leases of {pool.name} may be left: {why}" for pool, why in ended if why]

    def _tell(self, news: Callable[[LeaseTurn], None]) -> None:
        """Have a function called in the next turn. From any thread."""
        self._news.put(news)
        self._wake()

    def _report_snapshot(self, pool: Pool, snapshot: PoolSnapshot) -> None:
        """Hand a snapshot to the next turn. Called in the poller's thread."""
        self._tell(partial(self._take_snapshot, pool, snapshot))

    def _take_snapshot(self, pool: Pool, snapshot: PoolSnapshot, turn: LeaseTurn) -> None:
        """Move each lease of a snapshot on: prepare the granted ones, and let go of those that ended."""
        pool.snapshot = snapshot
        for lease in (*snapshot.leases, *self._forgotten_leases(pool, snapshot)):
            life = self._lives.setdefault(lease.id, LeaseLifecycle(pool, lease))
            life.lease = lease
            if lease.state is LeaseState.ENDED:
                self._end_by_scheduler(life)
            elif lease.state is LeaseState.READY and life.phase is LeasePhase.QUEUED and not life.is_unwanted:
                self._begin_preparation(life, turn)
        queued = tuple(lease for lease in snapshot.leases if lease.state is LeaseState.QUEUED)
        if queued != pool.queued:
            pool.queued = queued
            turn.events.append(LeasesQueued(pool.name, tuple((lease.id, lease.why) for lease in queued)))
        if snapshot.refused:
            pool.ask_at = time.monotonic() + USUAL_S
            if all(lease.state is LeaseState.ENDED for lease in snapshot.leases):
                pool.failures.append(snapshot.refused)
            if snapshot.refused != pool.refused:
                turn.note(f"{pool.name}: more leases are refused: {snapshot.refused}", bad=True)
            pool.refused = snapshot.refused

    def _forgotten_leases(self, pool: Pool, snapshot: PoolSnapshot) -> list[Lease]:
        """Leases of ours that the scheduler does not list any more: they have ended."""
        listed = {lease.id for lease in snapshot.leases}
        forgotten = []
        for life in self._lives.values():
            lease = life.lease
            if life.pool is pool and lease.state is not LeaseState.ENDED and lease.id not in listed:
                why = "its scheduler does not know it any more"
                forgotten.append(replace(lease, state=LeaseState.ENDED, why=why, cause=EndCause.PREEMPTED))
        return forgotten

    def _report_silence(self, pool: Pool, turn: LeaseTurn) -> None:
        """Say once that a scheduler does not answer, and once that it answers again."""
        silent_s = pool.poller.silent_s
        if not pool.silence_reported and silent_s > UNREACHABLE_S:
            pool.silence_reported = True
            turn.note(f"{pool.name}: {pool.poller.silent_why}", bad=True)
        elif pool.silence_reported and silent_s == 0.0:
            pool.silence_reported = False
            turn.note(f"{pool.name}: the scheduler answers again")

    def _begin_preparation(self, life: LeaseLifecycle, turn: LeaseTurn) -> None:
        """The scheduler has granted a lease: name its node, and have a thread prepare it."""
        life.phase = LeasePhase.GRANTED
        life.node = life.node or self._new_node_name(life.pool.name)
        turn.note(f"{life.node}: lease {life.lease.id} is granted on {life.lease.host or 'a host'}")
        self._threads.submit(self._prepare_node, life)

    def _new_node_name(self, pool: str) -> str:
        """`POOL-N`, one more than the highest N so far: no name is used again."""
        matches = [re.fullmatch(rf"{re.escape(pool)}-([0-9]+)", name) for name in self._names]
        highest = max((int(match[1]) for match in matches if match), default=0)
        name = f"{pool}-{highest + 1}"
        self._names.add(name)
        return name

    def _prepare_node(self, life: LeaseLifecycle) -> None:
        """Check the lease's machine and make its node. In a thread."""
        ready = None
        why = ""
        try:
            retrying = self._retry_unreachable(lambda attempts: life.phase is LeasePhase.GRANTED)
            ready = retrying(self._make_ready, life.pool, life.lease, life.node)
        except OrchestratorError as e:
            why = str(e)
        except Exception as e:  # noqa: BLE001  whatever it is, the lease must not stay in between for ever
            why = f"{type(e).__name__}: {e}"
        self._tell(lambda turn: self._take_prepared(life, ready, why, turn))

    def _take_prepared(self, life: LeaseLifecycle, ready: ReadyNode | None, why: str, turn: LeaseTurn) -> None:
        """Have the loop drive the node that a lease has become. If it cannot be used (`ready` is None, because of
        `why`), give the lease back; it counts as one that was never ready."""
        if life.phase is not LeasePhase.GRANTED:  # it ended meanwhile
            if ready is not None:
                self._threads.submit(ready.transport.close)
            return
        lease, pool = life.lease, life.pool
        if ready is None:
            turn.note(f"{life.node}: lease {lease.id} cannot be used and is given back: {why}", bad=True)
            pool.failures.append(why)
            life.phase = LeasePhase.ENDED
            life.is_unwanted = True
            return
        life.phase = LeasePhase.NODE
        pool.failures.clear()
        slots = ready.plan.slots
        ends_at = lease.ends_at or 0.0
        turn.events.append(NodeExpected(life.node, slots, ready.host, ready.gpus, lease.id, pool.name, ends_at))
        turn.start.append(ready)

    def _retry_unreachable(self, is_awaited: Callable[[int], bool]) -> tenacity.Retrying:
        """Retries a call that finds the way broken, for REACH_S at most. It stops earlier if `is_awaited`, which gets
        the number of attempts, says that nobody needs the result any more."""

        def may_pass(state: tenacity.RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome is not None else None
            return isinstance(error, UnreachableError) and error.transient and is_awaited(state.attempt_number)

        return tenacity.Retrying(
            retry=may_pass,
            wait=tenacity.wait_exponential(multiplier=0.2, max=5.0),
            stop=tenacity.stop_any(tenacity.stop_after_delay(REACH_S), tenacity.stop_when_event_set(self._closing)),
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )

    def _end_by_scheduler(self, life: LeaseLifecycle) -> None:
        """The scheduler has ended a lease: fetch what it left behind, then let go of its node."""
        if life.node and life.phase not in (LeasePhase.ENDING, LeasePhase.ENDED):
            life.phase = LeasePhase.ENDING
            self._threads.submit(self._fetch_leftovers, life)
        elif life.phase is LeasePhase.QUEUED:
            life.phase = LeasePhase.ENDED
            if not life.is_unwanted:
                life.pool.failures.append(life.lease.why or "it ended before it was ready")

    def _fetch_leftovers(self, life: LeaseLifecycle) -> None:
        """Fetch the rows that an ended lease left. In a thread."""
        lease, poller = life.lease, life.pool.poller
        cause = lease.cause or EndCause.FAILED

        def is_awaited(attempts: int) -> bool:
            """While the scheduler does not answer; else once more, unless the machine failed."""
            poller.poll_now()
            return poller.silent_s > 0.0 or (attempts == 1 and cause is not EndCause.FAILED)

        rows: list[tuple[str, Chunk]] = []
        trouble = ""
        try:
            archive = self._retry_unreachable(is_awaited)(life.pool.source.leftovers, lease)
            rows.extend(rows_of(archive) if archive else ())  # what comes before damage is kept
        except Exception as e:  # noqa: BLE001  whatever it is, the lease must not stay in between for ever
            trouble = f"{life.node}: what it left behind could not be read: {e}"

        def end(turn: LeaseTurn) -> None:
            turn.rows += [(node, chunk) for node, chunk in rows if node == life.node]
            if trouble:
                turn.note(trouble, bad=True)
            self._end_node(life, cause, lease.why, turn)

        self._tell(end)

    def _end_node(self, life: LeaseLifecycle, cause: EndCause, why: str, turn: LeaseTurn) -> None:
        """Let go of the node of a lease. It does not come back. The next order lets go of the lease in the scheduler
        too. If the scheduler ended the lease while its node was shut down, the calls of the shutdown are cut off."""
        life.phase = LeasePhase.ENDED
        if life.shutdown is not None:
            life.shutdown.close()
            life.shutdown = None
        turn.events.append(LeaseEnded(life.node, cause.value, why, charged=cause is EndCause.FAILED))

    def _prepare_ends(self, policy: Policy, registry: RunNodes, turn: LeaseTurn, now: float) -> None:
        """Drain nodes near the time limit of their lease. Shut a node down when it is idle then, or when its workers
        need the rest of the time to close their books."""
        for life in self._working_leases(registry):
            if not life.lease.ends_at:
                continue
            left_s = life.lease.ends_at - now
            if left_s > min(NO_MORE_CLAIMS_S, life.pool.time_s / 4):
                continue
            self._drain_node(life, f"its lease ends in {left_s:.0f} s", turn)
            if life.lease.why:
                continue  # something ends it, and the scheduler will say what
            if left_s < min(BOOKS_S, life.pool.time_s / 8) or life.node in policy.idle_nodes():
                life.cause = EndCause.TIME_LIMIT
                self._shut_down_node(life, registry)

    def _leave_failed_nodes(self, registry: RunNodes, turn: LeaseTurn) -> None:
        """Shut down the nodes whose driver an error of our own ended. Their pools ask for no more leases, because the
        next node would most likely end like this one."""
        for life in self._working_leases(registry):
            if registry.has_failed(life.node):
                life.pool.hopeless = life.pool.hopeless or f"{life.node}: {registry.trouble_of(life.node)}"
                self._drain_node(life, "its lease is given back", turn)
                self._shut_down_node(life, registry)

    def _working_leases(self, registry: RunNodes) -> list[LeaseLifecycle]:
        """Leases whose node the loop has."""
        lives = self._lives.values()
        return [life for life in lives if life.phase is LeasePhase.NODE and registry.has(life.node)]

    def _drain_node(self, life: LeaseLifecycle, why: str, turn: LeaseTurn) -> None:
        """Give the node of a lease no more work."""
        if not life.is_draining:
            life.is_draining = True
            turn.events.append(NodeDraining(life.node))
            turn.note(f"{life.node} takes no more work: {why}")

    def _shut_down_node(self, life: LeaseLifecycle, registry: RunNodes) -> None:
        """End the workers of a lease's node; `_give_back_leases` follows once they are gone."""
        life.phase = LeasePhase.LEAVING
        life.shutdown = registry.begin_shutdown(life.node)

    def _give_back_leases(self, turn: LeaseTurn, now: float) -> None:
        """Give back the leases whose nodes are shut down."""
        for life in self._lives.values():
            if life.phase is not LeasePhase.LEAVING or life.shutdown is None or not life.shutdown.is_done():
                continue
            life.shutdown_seen_at = life.shutdown_seen_at or now
            if now - life.shutdown_seen_at >= UNREAD_S:
                life.is_unwanted = True
                self._end_node(life, life.cause, "given back", turn)

    def _excuse_unreachable(self, registry: RunNodes) -> None:
        """Keep nodes that are out of reach from being given up while their scheduler does not answer either."""
        for life in self._working_leases(registry):
            if 0.0 < life.pool.poller.silent_s < AWAY_S:
                registry.record_progress(life.node, registry.trouble_of(life.node))

    def _keep_sizes(self, policy: Policy, registry: RunNodes, turn: LeaseTurn, now: float) -> None:
        """Set how many leases the work needs, and shut down nodes that were idle for long, or whose host is in
        quarantine."""
        in_quarantine = policy.quarantined_hosts(now)
        self._sick_hosts.update(dict.fromkeys(in_quarantine, now))
        self._sick_hosts = {host: t for host, t in self._sick_hosts.items() if now - t < AVOID_S}
        self._sizes.set_wanted(policy, self._lives.values())
        idle_nodes = set(policy.idle_nodes())
        for life in self._working_leases(registry):
            if life.is_draining:
                continue
            if life.node not in idle_nodes:
                life.idle_since = None
                continue
            life.idle_since = life.idle_since or now
            if life.lease.host in in_quarantine:
                why = "its host is in quarantine"
            elif not self._hold and now - life.idle_since >= IDLE_S:
                why = "it was idle for 2 minutes"
                life.pool.floor = 0
            else:
                continue
            self._drain_node(life, why, turn)
            self._shut_down_node(life, registry)
        may_grow = self._sizes.may_grow(policy, self._lives.values(), now)
        if may_grow != self._may_grow:
            self._may_grow = may_grow
            turn.events.append(FleetMayGrow(may_grow))

    def _order_leases(self, pool: Pool, turn: LeaseTurn) -> None:
        """Have the poller give back the leases that are of no more use, and ask for those that are missing."""
        if pool.snapshot is None or pool.snapshot.number != pool.ordered:
            return  # no snapshot has shown the last order yet
        if len(pool.failures) >= MAX_FAILURES and not pool.hopeless:
            pool.hopeless = pool.failures[-1]
            text = f"{pool.name}: no more leases are requested, three in a row were never ready: {pool.hopeless}"
            turn.note(text, bad=True)
        listed = [self._lives[lease.id] for lease in pool.snapshot.leases]
        living = [life for life in listed if life.lease.state is not LeaseState.ENDED]
        queued = [life for life in living if life.phase is LeasePhase.QUEUED and life.lease.state is LeaseState.QUEUED]
        surplus = max(0, len(living) - pool.want)
        for life in queued[::-1][:surplus]:
            life.is_unwanted = True
        to_return = [
            life for life in listed if (life.is_unwanted or life.phase is LeasePhase.ENDED) and not life.is_returned
        ]
        may_ask = self._grow and not pool.hopeless and time.monotonic() >= pool.ask_at
        missing = max(0, pool.want - len(living)) if may_ask else 0
        if not to_return and not missing:
            return
        for life in to_return:
            life.is_returned = True
        pool.ordered += 1
        release = tuple(life.lease for life in to_return)
        pool.poller.order(PoolOrder(pool.ordered, missing, [*self._sick_hosts], release))
