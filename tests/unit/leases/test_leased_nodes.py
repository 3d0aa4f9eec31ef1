"""Leases that become nodes, or do not, without a run around them."""

from __future__ import annotations

import io
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.dispatch.node_registry import NodeRegistry
from orchestrator.dispatch.reports import LeaseTurn
from orchestrator.dispatch.timeouts import Timeouts
from orchestrator.errors import EngineError, UnreachableError
from orchestrator.leases import keeper
from orchestrator.leases.base import EndCause, Lease
from orchestrator.leases.holdings import AWAY_S, Pool
from orchestrator.leases.keeper import MAX_FAILURES, PoolSize
from orchestrator.leases.nodes import LeasedNodes, MadeNode
from orchestrator.policy import Policy
from tests.unit.leases.standin import Scheduler
from tests.waiting import wait_until


class Nodes:
    """Leased nodes of one pool, whose turns are collected."""

    def __init__(self, make: Callable[[str, Lease, str], MadeNode]) -> None:
        self.scheduler, self.policy = Scheduler(grants=True), Policy()
        self.woken = 0
        pool = Pool(PoolSize("pool", 1, 1, 1), self.scheduler)
        self.leased = LeasedNodes([pool], make, known={}, wake=self._wake)
        self.registry = NodeRegistry(Timeouts())
        self.all = LeaseTurn()

    def _wake(self) -> None:
        self.woken += 1

    def turn(self) -> LeaseTurn:
        """All that has changed so far."""
        out = self.leased.turn(self.policy, self.registry, time.time())
        self.all.events += out.events
        self.all.notes += out.notes
        self.all.rows += out.rows
        for driver in out.start:
            self.registry.start(driver)
        return self.all

    def node(self) -> str:
        """The node that a lease has become."""
        wait_until(lambda: any(isinstance(e, ev.NodeExpected) for e in self.turn().events), "a lease is a node")
        return next(e.node for e in self.all.events if isinstance(e, ev.NodeExpected))

    def told(self, words: str) -> bool:
        return any(words in text for text, _ in self.turn().notes)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Nodes]]:
    monkeypatch.setattr(keeper, "SOON_S", 0.01)
    monkeypatch.setattr(keeper, "USUAL_S", 0.01)
    started: list[Nodes] = []

    def begin(make: Callable[[str, Lease, str], MadeNode], *before: ev.Event) -> Nodes:
        started.append(nodes := Nodes(make))
        for event in before:
            nodes.policy.handle(event, time.time())
        nodes.turn()
        nodes.leased.start()
        return nodes

    yield begin
    for nodes in started:
        nodes.leased.close(release=True)


def made(pool: str, lease: Lease, name: str) -> MadeNode:
    driver: Any = SimpleNamespace(node=name, slots=("0",), start=lambda: None)
    return MadeNode(lambda: driver, lease.host, ("0",))


def test_a_lease_on_a_quarantined_host_is_given_back_and_the_host_left_out(start: Callable[..., Nodes]) -> None:
    sick = (
        ev.NodeExpected("other", ("0",), "g1", ("0",)),
        ev.NodeJoined("other", ("0",)),
        ev.CanaryFailed("other", "0", "wrong answer"),
    )
    nodes = start(made, *sick)
    wait_until(lambda: nodes.told("is given back: its host g1 was in quarantine"), "the first is given back")
    wait_until(lambda: any(isinstance(e, ev.NodeExpected) for e in nodes.turn().events), "another is a node")
    (expected,) = (e for e in nodes.all.events if isinstance(e, ev.NodeExpected))
    assert (expected.host, expected.lease) == ("g2", "2")
    assert nodes.scheduler.requests[1:] == [(1, frozenset({"g1"}))]
    assert nodes.scheduler.held() == ["2"]
    assert nodes.woken >= 2


def test_a_way_that_is_broken_for_a_while_costs_no_lease(start: Callable[..., Nodes]) -> None:
    tries: list[str] = []

    def make(pool: str, lease: Lease, name: str) -> MadeNode:
        tries.append(lease.id)
        if len(tries) < 3:
            raise UnreachableError(name, "the login node does not answer")
        return made(pool, lease, name)

    nodes = start(make)
    wait_until(lambda: any(isinstance(e, ev.NodeExpected) for e in nodes.turn().events), "it is a node in the end")
    assert tries == ["1", "1", "1"]
    assert len(nodes.scheduler.requests) == 1


def test_a_lease_that_ends_while_the_way_is_broken_is_let_go(start: Callable[..., Nodes]) -> None:
    tries: list[str] = []

    def make(pool: str, lease: Lease, name: str) -> MadeNode:
        tries.append(lease.id)
        if lease.id == "1":
            raise UnreachableError(name, "its job is gone")
        return made(pool, lease, name)

    nodes = start(make)
    wait_until(lambda: nodes.turn() and tries, "the first is tried")
    nodes.scheduler.end("1", EndCause.CANCELLED)
    wait_until(lambda: any(isinstance(e, ev.NodeExpected) for e in nodes.turn().events), "another is a node")
    assert nodes.scheduler.held() == ["2"]
    assert not nodes.told("cannot be used")


def test_leases_that_cannot_be_used_are_given_back_and_three_are_enough(start: Callable[..., Nodes]) -> None:
    def make(pool: str, lease: Lease, name: str) -> MadeNode:
        raise EngineError(name, "no Python was found")

    nodes = start(make)
    wait_until(lambda: nodes.told("no more leases are requested"), "it gives up")
    wait_until(lambda: nodes.scheduler.held() == [], "all are given back")
    assert len(nodes.scheduler.requests) == MAX_FAILURES
    assert any("no Python was found" in line for line in nodes.leased.why())


def test_rows_are_brought_home_when_the_scheduler_is_back(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = start(made)
    node = nodes.node()
    files = io.BytesIO()
    with tarfile.open(fileobj=files, mode="w") as tar:
        member = tarfile.TarInfo(f"runs/{node}/events/0.jsonl")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"rows"))
    tries: list[bool] = []

    def leftovers(lease_id: str) -> bytes:
        tries.append(nodes.scheduler.silent)
        if len(tries) < 3:
            nodes.scheduler.silent = True  # it goes away between its word on the end and this
        if nodes.scheduler.silent:
            raise UnreachableError("pool", "the scheduler does not answer")
        return files.getvalue()

    monkeypatch.setattr(nodes.scheduler, "leftovers", leftovers)
    nodes.scheduler.end("1", EndCause.CANCELLED)
    wait_until(lambda: nodes.turn() and len(tries) >= 3, "it is tried again")
    assert not any(isinstance(e, ev.LeaseEnded) for e in nodes.all.events)
    nodes.scheduler.silent = False
    wait_until(lambda: any(isinstance(e, ev.LeaseEnded) for e in nodes.turn().events), "it has ended")
    assert [(name, chunk.data) for name, chunk in nodes.all.rows] == [(node, b"rows")]


def test_a_lease_that_ended_is_replaced_once_while_its_rows_are_brought_home(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease that ended and the one in its place are there for a while, in a pool of one."""
    home = threading.Event()
    nodes = start(made)
    nodes.policy.handle(ev.WorkAdded("k", ((1,),), ((10.0,),)), time.time())
    nodes.node()
    monkeypatch.setattr(nodes.scheduler, "leftovers", lambda _: home.wait(60) and None)
    nodes.scheduler.end("1", EndCause.OUT_OF_MEMORY)
    wait_until(lambda: any(isinstance(e, ev.NodeExpected) and e.lease == "2" for e in nodes.turn().events), "replaced")
    looks = nodes.scheduler.looks
    wait_until(lambda: nodes.turn() and nodes.scheduler.looks > looks + 3, "it is looked at again")
    home.set()
    wait_until(lambda: any(isinstance(e, ev.LeaseEnded) for e in nodes.turn().events), "it has ended")
    assert [n for n, _ in nodes.scheduler.requests] == [1, 1]


def test_rows_that_nobody_can_bring_are_not_waited_for(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler answers, and the host with the rows is gone."""

    def leftovers(lease_id: str) -> bytes:
        raise UnreachableError("pool", "no route to host")

    nodes = start(made)
    nodes.node()
    monkeypatch.setattr(nodes.scheduler, "leftovers", leftovers)
    nodes.scheduler.end("1", EndCause.NODE_FAILURE)
    wait_until(lambda: nodes.told("could not be read"), "it is given up")
    assert any(isinstance(e, ev.LeaseEnded) for e in nodes.all.events)


def test_a_node_out_of_reach_is_not_given_up_while_its_scheduler_is_away(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("orchestrator.dispatch.node_registry.time", SimpleNamespace(
        time=lambda: clock.now, monotonic=time.monotonic, sleep=time.sleep
    ))  # fmt: skip
    nodes = start(made)
    node = nodes.node()
    nodes.registry.arrived(node, 1)
    nodes.registry.in_trouble(node, "the stream ended")
    nodes.scheduler.silent = True
    keeper = nodes.leased._held.pools["pool"].keeper
    wait_until(lambda: keeper.silent_s > 0.0, "its scheduler is missed")
    for _ in range(3):
        clock.now += 80.0
        nodes.turn()
        assert list(nodes.registry.give_up()) == []
    assert nodes.registry.why(node) == "the stream ended"
    monkeypatch.setattr(type(keeper), "silent_s", property(lambda self: AWAY_S + 1))
    clock.now += 80.0
    nodes.turn()
    clock.now += 80.0
    assert list(nodes.registry.give_up()) == [(node, "the stream ended")]
    nodes.scheduler.silent = False  # or the end waits for it
