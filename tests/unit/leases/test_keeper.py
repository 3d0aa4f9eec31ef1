"""The keeper against a stand-in of a scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from orchestrator.leases import keeper as module
from orchestrator.leases.base import EndCause, Lease, LeaseState
from orchestrator.leases.demand import MAX_FAILURES
from orchestrator.leases.keeper import LeaseKeeper
from tests.unit.leases.standin import Scheduler
from tests.waiting import wait_until


class Reports:
    """Everything that was reported, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def looked(self, pool: str) -> None:
        self.seen.append(("looked",))

    def queued(self, pool: str, leases: Sequence[Lease]) -> None:
        self.seen.append(("queued", tuple(x.id for x in leases)))

    def ready(self, pool: str, lease: Lease) -> None:
        self.seen.append(("ready", lease.id))

    def ended(self, pool: str, lease: Lease) -> None:
        self.seen.append(("ended", lease.id))

    def trouble(self, pool: str, detail: str) -> None:
        self.seen.append(("trouble", detail))

    def hopeless(self, pool: str, why: str) -> None:
        self.seen.append(("hopeless", why))


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def keeper(scheduler: Scheduler, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> Iterator[LeaseKeeper]:
    monkeypatch.setattr(module, "SOON_S", 0.01)
    monkeypatch.setattr(module, "USUAL_S", 0.01)
    keeper = LeaseKeeper("pool", scheduler, reports)
    keeper.start()
    yield keeper
    keeper.close(release=True, timeout=5.0)


def test_it_asks_once_for_what_is_missing_and_reports_each_change_once(
    keeper: LeaseKeeper, scheduler: Scheduler, reports: Reports
) -> None:
    keeper.want(2, {"sick"})
    wait_until(lambda: ("queued", ("1", "2")) in reports.seen, "both are queued")
    scheduler.ready("1")
    wait_until(lambda: ("ready", "1") in reports.seen, "one is ready")
    scheduler.end("1", EndCause.PREEMPTED)
    wait_until(lambda: ("ended", "1") in reports.seen, "it is over")
    wait_until(lambda: len(scheduler.requests) == 2, "another is asked for")
    assert scheduler.requests == [(2, frozenset({"sick"})), (1, frozenset({"sick"}))]
    assert reports.seen.count(("ready", "1")) == 1
    assert reports.seen.count(("ended", "1")) == 1


def test_fewer_are_wanted(keeper: LeaseKeeper, scheduler: Scheduler, reports: Reports) -> None:
    keeper.want(3)
    wait_until(lambda: len(scheduler.leases) == 3, "three are queued")
    scheduler.ready("1")
    keeper.want(1)
    wait_until(lambda: scheduler.leases["3"].state is LeaseState.ENDED, "the queued ones are given back")
    assert scheduler.leases["1"].state is LeaseState.READY
    keeper.want(0)
    keeper.release(["1"])
    wait_until(lambda: ("ended", "1") in reports.seen, "the ready one on request")


def test_three_that_never_were_ready_end_the_requests(
    keeper: LeaseKeeper, scheduler: Scheduler, reports: Reports
) -> None:
    keeper.want(1)
    for i in range(1, MAX_FAILURES + 1):
        wait_until(lambda i=i: str(i) in scheduler.leases, "another is asked for")  # type: ignore[misc]
        scheduler.end(str(i), EndCause.FAILED, "BOOT_FAIL")
    wait_until(lambda: ("hopeless", "BOOT_FAIL") in reports.seen, "it gives up")
    assert len(scheduler.leases) == MAX_FAILURES


def test_a_scheduler_that_is_silent_for_long_is_reported_once_and_nothing_is_lost(
    keeper: LeaseKeeper, scheduler: Scheduler, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNREACHABLE_S", 0.0)
    keeper.want(1)
    wait_until(lambda: "1" in scheduler.leases, "one is queued")
    scheduler.silent = True
    said = ("trouble", "pool: the scheduler does not answer")
    wait_until(lambda: said in reports.seen, "the silence is reported")
    scheduler.ready("1")
    scheduler.silent = False
    wait_until(lambda: ("ready", "1") in reports.seen, "what happened meanwhile is seen")
    assert reports.seen.count(said) == 1
    assert ("trouble", "") in reports.seen


def test_the_end_gives_everything_back_or_leaves_it(scheduler: Scheduler, reports: Reports) -> None:
    first = LeaseKeeper("pool", scheduler, reports)
    first.start()
    first.want(2)
    wait_until(lambda: len(scheduler.leases) == 2, "two are queued")
    assert first.close(release=False, timeout=5.0) == ""
    assert {x.state for x in scheduler.leases.values()} == {LeaseState.QUEUED}
    again = LeaseKeeper("pool", scheduler, reports)
    again.start()
    assert again.close(release=True, timeout=5.0) == ""
    assert {x.state for x in scheduler.leases.values()} == {LeaseState.ENDED}
