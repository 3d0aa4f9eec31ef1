"""The life of leases without a run around them: requested, granted, given back, ended."""

from __future__ import annotations

import io
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.controller.node_registry import NodeRegistry
from orchestrator.controller.timeouts import Timeouts
from orchestrator.errors import EngineError, NodeError, UnreachableError
from orchestrator.leases import holder, leased_nodes, poller
from orchestrator.leases.lease import EndCause, Lease
from orchestrator.leases.lease_lifecycle import LeasePhase, LeaseTurn, Pool, ReadyNode
from orchestrator.leases.leased_nodes import IDLE_S, MAX_FAILURES, LeasedNodes
from orchestrator.leases.pool_size import LEASE_WORK_S, PoolSizes, leases_wanted
from orchestrator.policy import Policy
from orchestrator.policy.model import Node
from tests.unit.leases.standin import Scheduler
from tests.waiting import PATIENCE_S, wait_until

WORK = ev.WorkAdded("k", ((1,),), ((10.0,),))


class Nodes:
    """Leased nodes of one pool, whose turns are collected."""

    def __init__(self, scheduler: Scheduler, most: int, known: Sequence[Node]) -> None:
        self.scheduler, self.policy, self.all = scheduler, Policy(), LeaseTurn()
        self.troubles: list[NodeError] = []
        """Errors of the next machines that are checked."""
        self.checked: list[str] = []
        """Leases whose machine was checked."""
        self.ends_meanwhile = False
        """Each lease ends while its machine is checked."""
        self.closed: list[str] = []
        """Leases whose transport was closed."""
        self.pool = Pool("pool", 1, most, 1, scheduler)
        self.leased = LeasedNodes([self.pool], self.make_ready, known=known)
        self.registry = NodeRegistry(Timeouts())
        self.policy.handle(WORK, time.time())
        self.turn()
        self.leased.start(wake=lambda: None)

    def make_ready(self, pool: Pool, lease: Lease, name: str) -> ReadyNode:
        self.checked.append(lease.id)
        if self.troubles:
            raise self.troubles.pop(0)
        plan: Any = SimpleNamespace(node=name, slots=("0",))
        if self.ends_meanwhile:
            self.scheduler.end(lease.id, EndCause.PREEMPTED)
            wait_until(self.ends, "its end is recorded")
        transport: Any = SimpleNamespace(close=lambda: self.closed.append(lease.id))
        return ReadyNode(plan, transport, lease.host, ("0",))

    def turn(self) -> LeaseTurn:
        """All that has changed so far."""
        out = self.leased.turn(self.policy, self.registry, time.time())
        self.all.events += out.events
        self.all.notes += out.notes
        self.all.rows += out.rows
        for ready in out.start:
            driver: Any = SimpleNamespace(node=ready.plan.node, start=lambda: None)
            self.registry.start(driver)
        return self.all

    def until(self, event: ev.Event) -> None:
        wait_until(lambda: event in self.turn().events, str(event))

    def until_told(self, words: str) -> None:
        wait_until(lambda: any(words in text for text, _ in self.turn().notes), words)

    def node(self, lease: str = "1") -> str:
        """The node that a lease has become."""
        wait_until(lambda: self.turn() and self.names().get(lease), f"lease {lease} is a node")
        return self.names()[lease]

    def names(self) -> dict[str, str]:
        return {e.lease: e.node for e in self.all.events if isinstance(e, ev.NodeExpected)}

    def ends(self) -> list[ev.LeaseEnded]:
        return [e for e in self.all.events if isinstance(e, ev.LeaseEnded)]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Nodes]]:
    for module, name in ((poller, "FIRST_S"), (poller, "SOON_S"), (poller, "USUAL_S"), (leased_nodes, "USUAL_S")):
        monkeypatch.setattr(module, name, 0.01)
    started: list[Nodes] = []

    def begin(scheduler: Scheduler | None = None, most: int = 1, known: Sequence[Node] = ()) -> Nodes:
        started.append(Nodes(scheduler or Scheduler(grants=True), most, known))
        return started[-1]

    yield begin
    for nodes in started:
        nodes.scheduler.silent = False  # or the end waits for it
        nodes.leased.close(release=True)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes without work; one that is to be given back is not really shut down."""
    idle: list[str] = []
    monkeypatch.setattr(Policy, "idle_nodes", lambda _: idle)
    monkeypatch.setattr(LeasedNodes, "_shut_down_node", lambda _, x, registry: setattr(x, "phase", LeasePhase.LEAVING))
    return idle


def test_a_lease_on_a_quarantined_host_is_given_back_and_the_host_left_out(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch, idle: list[str]
) -> None:
    nodes = start(most=2)
    idle.append(nodes.node())
    monkeypatch.setattr(nodes.policy, "quarantined_hosts", lambda now: {"g1"})
    nodes.until_told("takes no more work: its host is in quarantine")
    nodes.scheduler.end("1", EndCause.PREEMPTED)
    requests = nodes.scheduler.requests
    wait_until(lambda: nodes.turn() and requests[1:] == [(1, frozenset({"g1"}))], "another is requested")
    nodes.pool.hopeless = "not available"  # as Slurm says where no other host is left
    assert "  pool: no more leases are requested: not available (in quarantine: g1)" in nodes.leased.details()


def test_a_lease_that_was_idle_for_two_minutes_is_given_back(start: Callable[..., Nodes], idle: list[str]) -> None:
    nodes = start()
    node = nodes.node()

    def drains(after: float, idles: bool = True) -> bool:
        idle[:] = [node] if idles else []
        out = nodes.leased.turn(nodes.policy, nodes.registry, 1000.0 + after)
        return ev.NodeDraining(node) in out.events

    assert not drains(0.0)
    assert not drains(IDLE_S / 2, idles=False)
    assert not drains(IDLE_S)
    assert drains(IDLE_S * 2)
    assert nodes.pool.floor == 0


def test_leases_that_cannot_be_used_are_given_back_and_three_are_enough(start: Callable[..., Nodes]) -> None:
    scheduler = Scheduler()
    nodes = start(scheduler)
    nodes.troubles += [EngineError("pool", "no Python was found")] * MAX_FAILURES
    scheduler.grants = True
    for lease in list(scheduler.leases):
        scheduler.ready(lease)
    nodes.until_told("no more leases are requested")
    wait_until(lambda: scheduler.held() == [], "all are given back")
    assert len(scheduler.requests) == MAX_FAILURES
    assert any("no Python was found" in line for line in nodes.leased.details())


def test_the_way_into_a_lease_that_ended_while_its_machine_was_checked_is_closed(start: Callable[..., Nodes]) -> None:
    nodes = start(Scheduler())
    nodes.ends_meanwhile = True
    wait_until(lambda: nodes.turn() and nodes.scheduler.leases, "one is requested")
    nodes.scheduler.ready("1")
    wait_until(lambda: nodes.turn() and nodes.closed == ["1"], "its transport is closed")
    assert not nodes.names()


def test_the_lease_of_a_node_that_a_bug_of_ours_ended_is_given_back_and_no_other_is_requested(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = start(most=2)
    node = nodes.node()
    shut_down: Any = SimpleNamespace(is_done=lambda: True, close=lambda: None)
    monkeypatch.setattr(nodes.registry, "begin_shutdown", lambda name: shut_down)
    monkeypatch.setattr(leased_nodes, "UNREAD_S", 0.0)
    nodes.registry.record_failed(node, "gemmfleet failed with KeyError")
    nodes.until(ev.LeaseEnded(node, "released", "given back"))
    wait_until(lambda: nodes.turn() and nodes.scheduler.held() == [], "it is given back")
    assert len(nodes.scheduler.requests) == 1
    assert nodes.leased.details() == [f"  pool: no more leases are requested: {node}: gemmfleet failed with KeyError"]


class HangingDriver:
    """A driver (controller/node_driver.py) whose shutdown hangs until it is cut off."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.workers = SimpleNamespace(start_no_more=lambda: True)
        self.thread: threading.Thread | None = None
        """The thread of the shutdown."""
        self._is_cut_off = threading.Event()
        self.hang_up = self._is_cut_off.set

    def start(self) -> None: ...

    def connect_to_stop(self, seconds: float) -> None:
        self.thread = threading.current_thread()
        assert self._is_cut_off.wait(PATIENCE_S)
        raise UnreachableError(self.node, "closed")


def test_a_shutdown_is_cut_off_if_the_scheduler_ends_its_lease_meanwhile(start: Callable[..., Nodes]) -> None:
    nodes = start()
    driver: Any = HangingDriver(nodes.node())
    nodes.registry.start(driver)
    nodes.registry.record_failed(driver.node, "a bug")
    wait_until(lambda: nodes.turn() and driver.thread, "its shutdown has begun")
    nodes.scheduler.end("1", EndCause.TIME_LIMIT)
    nodes.until(ev.LeaseEnded(driver.node, "time_limit", "time_limit"))
    driver.thread.join(PATIENCE_S)
    assert not driver.thread.is_alive(), "it ends with the lease, not with the run"


def left_by(node: str) -> bytes:
    """The tar of a lease that left some rows."""
    files = io.BytesIO()
    with tarfile.open(fileobj=files, mode="w:gz") as tar:
        member = tarfile.TarInfo(f"runs/{node}/events/0.jsonl")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"rows"))
    return files.getvalue()


def test_rows_are_brought_home_when_the_scheduler_is_back(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = start()
    node, tries = nodes.node(), list[bool]()

    def leftovers(lease: Lease) -> bytes:
        tries.append(nodes.scheduler.silent)
        if len(tries) < 3:
            nodes.scheduler.silent = True  # the node goes away after it reported the end, and before this
        if nodes.scheduler.silent:
            raise UnreachableError("pool", "the scheduler does not answer")
        return left_by(node)

    monkeypatch.setattr(nodes.scheduler, "leftovers", leftovers)
    nodes.scheduler.end("1", EndCause.PREEMPTED)
    wait_until(lambda: nodes.turn() and len(tries) >= 3, "it is tried again")
    assert not nodes.ends()
    nodes.scheduler.silent = False
    nodes.until(ev.LeaseEnded(node, "preempted", "preempted"))
    assert [(name, chunk.data) for name, chunk in nodes.all.rows] == [(node, b"rows")]


@pytest.mark.parametrize("harm", ["cut", "unpacks to too much"])
def test_what_is_before_the_damage_of_an_archive_is_brought_home(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    nodes = start()
    node, files = nodes.node(), io.BytesIO()
    with tarfile.open(fileobj=files, mode="w:gz") as tar:
        for slot, data in enumerate((b"rows", os.urandom(100_000))):
            member = tarfile.TarInfo(f"runs/{node}/events/{slot}.jsonl")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    monkeypatch.setattr(holder, "MAX_UNPACKED", holder.MAX_UNPACKED if harm == "cut" else 50_000)
    archive = files.getvalue()[: -1000 if harm == "cut" else None]
    monkeypatch.setattr(nodes.scheduler, "leftovers", lambda lease: archive)
    nodes.scheduler.end("1", EndCause.PREEMPTED)
    nodes.until(ev.LeaseEnded(node, "preempted", "preempted"))
    assert [(name, chunk.data) for name, chunk in nodes.all.rows] == [(node, b"rows")]
    assert any("what it left behind could not be read" in text for text, _ in nodes.all.notes)


def test_a_node_out_of_reach_is_not_given_up_while_its_scheduler_is_away(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("orchestrator.controller.node_registry.time", SimpleNamespace(time=lambda: clock.now))
    nodes = start()
    node = nodes.node()
    nodes.registry.record_up(node, 1)
    nodes.registry.record_trouble(node, "the stream ended")
    nodes.scheduler.silent = True
    wait_until(lambda: nodes.pool.poller.silent_s > 0.0, "its scheduler is missed")
    for away_s, given_up in ((1.0, []), (1.0, []), (1.0, []), (leased_nodes.AWAY_S + 1, [(node, "the stream ended")])):
        monkeypatch.setattr(poller.PoolPoller, "silent_s", property(lambda _, s=away_s: s))  # type: ignore[misc]
        clock.now += 80.0
        nodes.turn()
        clock.now += 80.0 if given_up else 0.0
        assert list(nodes.registry.give_up()) == given_up


def test_leases_of_an_earlier_controller_are_taken_over_or_ended(start: Callable[..., Nodes]) -> None:
    """One works on, one has ended meanwhile, one is forgotten, one has ended before and is there all the same."""
    known = [
        Node(f"pool-{i}", "g", "gone" if i == "4" else "away", lease=i, pool="pool") for i in "1234"
    ]  # fmt: skip
    scheduler = Scheduler()
    for id_ in "124":
        scheduler.ready(id_)
    scheduler.end("2", EndCause.FAILED, "NODE_FAIL")
    nodes = start(scheduler, most=3, known=known)
    nodes.until(ev.LeaseEnded("pool-2", "failed", "NODE_FAIL", charged=True))
    nodes.until(ev.LeaseEnded("pool-3", "preempted", "its scheduler does not know it any more"))
    wait_until(lambda: nodes.turn() and "4" in scheduler.released, "all is settled")
    assert nodes.node() == "pool-1"
    assert len(nodes.ends()) == 2
    assert not scheduler.requests, "one is enough"


POOL = Pool("mi355", 1, 8, 8, Scheduler())


def test_a_lease_for_every_ten_minutes_of_work_on_its_slots() -> None:
    hour = 3600.0 * 8
    assert leases_wanted([POOL], hour) == {"mi355": 6}
    assert leases_wanted([POOL], 0.0) == {"mi355": 0}
    # machines of one's own do their share, and pools are filled in order
    assert leases_wanted([POOL], hour, other_slots=16) == {"mi355": 4}
    more = Pool("spare", 1, 4, 2, Scheduler())
    assert leases_wanted([POOL, more], 8 * hour / 6 + 2 * LEASE_WORK_S) == {"mi355": 8, "spare": 1}


def test_machines_that_join_take_work_from_the_leases_until_they_are_lost() -> None:
    pool = Pool("pool", 0, 8, 1, Scheduler())
    pool.floor = 0
    policy, sizes = Policy(), PoolSizes([pool])

    def wanted_after(event: ev.Event) -> int:
        policy.handle(event, 1000.0)
        sizes.set_wanted(policy, [])
        return pool.want

    groups = tuple((i,) for i in range(6))
    assert wanted_after(ev.WorkAdded("k", groups, ((LEASE_WORK_S,),) * 6)) == 6
    assert wanted_after(ev.NodeExpected("joined", ("0", "1"))) == 4
    assert wanted_after(ev.NodeExpected("pool-1", ("0",), "g1", ("0",), "1", "pool")) == 4, "a lease does not count"
    assert wanted_after(ev.NodeLost("joined", "the host is off")) == 6
