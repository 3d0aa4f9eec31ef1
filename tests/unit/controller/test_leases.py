"""The life of leases without a run around them: asked for, nodes or not, ended."""

from __future__ import annotations

import io
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import events as ev
from orchestrator.controller import leases as life
from orchestrator.controller.exchange import LeaseTurn
from orchestrator.controller.leases import (
    AWAY_S,
    IDLE_S,
    LEASE_WORK_S,
    MAX_FAILURES,
    KnownLease,
    LeasedNodes,
    MadeNode,
    Phase,
    Pool,
    wanted,
)
from orchestrator.controller.messages import Timeouts
from orchestrator.controller.node_registry import NodeRegistry
from orchestrator.errors import EngineError, UnreachableError
from orchestrator.leases import keeper
from orchestrator.leases.base import EndCause, Lease, LeaseState
from orchestrator.policy import Policy
from tests.unit.leases.standin import Scheduler
from tests.waiting import wait_until


class Nodes:
    """Leased nodes of one pool, whose turns are collected."""

    def __init__(
        self,
        make: Callable[[str, Lease, str], MadeNode],
        scheduler: Scheduler,
        known: Mapping[str, KnownLease],
        most: int,
    ) -> None:
        self.scheduler, self.policy = scheduler, Policy()
        self.woken = 0
        self.pool = Pool("pool", 1, most, 1, self.scheduler)
        self.leased = LeasedNodes([self.pool], make, known=known, wake=self._wake)
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
    for module, name in ((keeper, "FIRST_S"), (keeper, "SOON_S"), (keeper, "USUAL_S"), (life, "USUAL_S")):
        monkeypatch.setattr(module, name, 0.01)
    started: list[Nodes] = []

    def begin(
        make: Callable[[str, Lease, str], MadeNode],
        *before: ev.Event,
        scheduler: Scheduler | None = None,
        known: Mapping[str, KnownLease] | None = None,
        most: int = 1,
    ) -> Nodes:
        started.append(nodes := Nodes(make, scheduler or Scheduler(grants=True), known or {}, most))
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


def test_a_lease_on_a_quarantined_host_is_given_back_and_the_host_left_out(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = start(made, ev.WorkAdded("k", ((1,),), ((10.0,),)), most=2)
    node = nodes.node()
    monkeypatch.setattr(nodes.policy, "idle_nodes", lambda: [node])
    monkeypatch.setattr(nodes.policy, "quarantined_hosts", lambda now: {"g1"})
    monkeypatch.setattr(nodes.leased, "_shut_down", lambda lease, registry: setattr(lease, "phase", Phase.LEAVING))
    assert nodes.told(f"{node} takes no more work: its host is in quarantine")
    nodes.scheduler.end("1", EndCause.PREEMPTED)
    wait_until(
        lambda: nodes.turn() and nodes.scheduler.requests[1:] == [(1, frozenset({"g1"}))], "another is requested"
    )


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
    nodes.scheduler.end("1", EndCause.PREEMPTED)
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

    def leftovers(lease: Lease) -> bytes:
        tries.append(nodes.scheduler.silent)
        if len(tries) < 3:
            nodes.scheduler.silent = True  # it goes away between its word on the end and this
        if nodes.scheduler.silent:
            raise UnreachableError("pool", "the scheduler does not answer")
        return files.getvalue()

    monkeypatch.setattr(nodes.scheduler, "leftovers", leftovers)
    nodes.scheduler.end("1", EndCause.PREEMPTED)
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
    nodes.scheduler.end("1", EndCause.FAILED)
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

    def leftovers(lease: Lease) -> bytes:
        raise UnreachableError("pool", "no route to host")

    nodes = start(made)
    nodes.node()
    monkeypatch.setattr(nodes.scheduler, "leftovers", leftovers)
    nodes.scheduler.end("1", EndCause.FAILED)
    wait_until(lambda: nodes.told("could not be read"), "it is given up")
    assert any(isinstance(e, ev.LeaseEnded) for e in nodes.all.events)


def test_a_node_out_of_reach_is_not_given_up_while_its_scheduler_is_away(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("orchestrator.controller.node_registry.time", SimpleNamespace(
        time=lambda: clock.now, monotonic=time.monotonic, sleep=time.sleep
    ))  # fmt: skip
    nodes = start(made)
    node = nodes.node()
    nodes.registry.arrived(node, 1)
    nodes.registry.in_trouble(node, "the stream ended")
    nodes.scheduler.silent = True
    keeper = nodes.pool.keeper
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


# --- asked for and given back -----------------------------------------------------------------------------------------


def test_queued_leases_are_reported_once_and_those_no_longer_wanted_given_back(start: Callable[..., Nodes]) -> None:
    nodes = start(made, ev.WorkAdded("k", ((1,),), ((10.0,),)), scheduler=Scheduler(), most=3)
    nodes.leased._set_wanted = lambda policy: None  # type: ignore[method-assign]
    nodes.pool.want = 3
    queued = ev.LeasesQueued("pool", tuple((i, "Priority") for i in "123"))
    wait_until(lambda: queued in nodes.turn().events, "three are queued")
    nodes.scheduler.ready("1")
    node = nodes.node()
    nodes.pool.want = 1
    wait_until(lambda: nodes.turn() and nodes.scheduler.released == ["2", "3"], "the latest are given back")
    assert nodes.all.events.count(queued) == 1
    assert nodes.scheduler.leases["1"].state is LeaseState.READY
    nodes.scheduler.end("1", EndCause.TIME_LIMIT, "TIMEOUT")
    ended = ev.LeaseEnded(node, "time_limit", "TIMEOUT")
    wait_until(
        lambda: ended in nodes.turn().events and len(nodes.scheduler.leases) == 4, "it ends, another is requested"
    )
    assert nodes.scheduler.requests[1:] == [(1, frozenset())]
    assert nodes.all.events.count(ended) == 1


def test_refused_requests_are_repeated_while_there_is_another_lease(start: Callable[..., Nodes]) -> None:
    nodes = start(made, scheduler=Scheduler(), most=2)
    nodes.leased._set_wanted = lambda policy: None  # type: ignore[method-assign]
    wait_until(lambda: nodes.turn() and nodes.scheduler.leases, "one is queued")
    nodes.scheduler.refuses = "exceeded quota"
    nodes.pool.want = 2
    wait_until(lambda: nodes.turn() and nodes.scheduler.refused > MAX_FAILURES, "it is refused often")
    assert [text for text, _ in nodes.all.notes].count("pool: more leases are refused: exceeded quota") == 1
    assert not nodes.pool.hopeless
    nodes.scheduler.refuses = ""
    wait_until(lambda: nodes.turn() and "2" in nodes.scheduler.leases, "it is granted in the end")
    nodes.scheduler.refuses = "Invalid account"
    for id_ in ("1", "2"):
        nodes.scheduler.end(id_, EndCause.PREEMPTED)
    wait_until(lambda: nodes.told("no more leases are requested"), "without any lease it is given up")


def test_a_scheduler_that_is_silent_for_long_is_reported_once_and_nothing_is_lost(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "UNREACHABLE_S", 0.0)
    nodes = start(made, scheduler=Scheduler())
    wait_until(lambda: nodes.turn() and nodes.scheduler.leases, "one is queued")
    nodes.scheduler.silent = True
    wait_until(lambda: nodes.told("pool: the scheduler does not answer"), "the silence is reported")
    nodes.scheduler.ready("1")
    nodes.scheduler.silent = False
    nodes.node()
    wait_until(lambda: nodes.told("the scheduler answers again"), "it answers again")
    assert [text for text, _ in nodes.all.notes].count("pool: the scheduler does not answer") == 1


def test_leases_of_an_earlier_controller_are_taken_over_or_ended(start: Callable[..., Nodes]) -> None:
    """One works on, one has ended meanwhile, one is forgotten, one has ended before and is there all the same."""
    known, scheduler = {i: KnownLease(f"pool-{i}", "pool", ended=i == "4") for i in "1234"}, Scheduler()
    for id_ in "124":
        scheduler.ready(id_)
    scheduler.end("2", EndCause.FAILED, "NODE_FAIL")
    nodes = start(made, scheduler=scheduler, known=known, most=3)
    ends = [ev.LeaseEnded("pool-2", "failed", "NODE_FAIL", charged=True),
            ev.LeaseEnded("pool-3", "preempted", "its scheduler does not know it any more")]  # fmt: skip
    wait_until(lambda: all(e in nodes.turn().events for e in ends) and "4" in scheduler.released, "all is settled")
    assert nodes.node() == "pool-1"
    assert sum(isinstance(e, ev.LeaseEnded) for e in nodes.all.events) == 2
    assert not scheduler.requests, "one is enough"


# --- the number of leases ---------------------------------------------------------------------------------------------

POOL = Pool("mi355", 1, 8, 8, Scheduler())


def test_a_lease_for_every_ten_minutes_of_work_on_its_slots() -> None:
    hour = 3600.0 * 8
    assert wanted([POOL], hour) == {"mi355": 6}
    assert wanted([POOL], 0.0) == {"mi355": 0}
    # machines of one's own do their share, and pools are filled in order
    assert wanted([POOL], hour, other_slots=16) == {"mi355": 4}
    more = Pool("spare", 1, 4, 2, Scheduler())
    assert wanted([POOL, more], 8 * hour / 6 + 2 * LEASE_WORK_S) == {"mi355": 8, "spare": 1}


@given(st.floats(0, 1e9), st.integers(0, 100), st.integers(0, 20))
def test_never_more_than_the_maximum_and_enough_for_the_backlog(backlog: float, others: int, places: int) -> None:
    want = wanted([POOL], backlog, others, places)["mi355"]
    assert 0 <= want <= POOL.maximum
    if want < POOL.maximum:
        assert want * POOL.slots * LEASE_WORK_S >= backlog - others * LEASE_WORK_S - 1e-3


def test_a_lease_that_was_idle_for_two_minutes_is_given_back(
    start: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = start(made)
    node = nodes.node()
    idle = [node]
    monkeypatch.setattr(nodes.policy, "idle_nodes", lambda: idle)
    monkeypatch.setattr(nodes.leased, "_shut_down", lambda lease, registry: setattr(lease, "phase", Phase.LEAVING))

    def turn(after: float) -> bool:
        out = nodes.leased.turn(nodes.policy, nodes.registry, 1000.0 + after)
        return ev.NodeDraining(node) in out.events

    assert not turn(0.0)
    idle.clear()
    assert not turn(IDLE_S / 2)
    idle.append(node)
    assert not turn(IDLE_S)
    assert turn(IDLE_S * 2)
    assert nodes.pool.floor == 0
