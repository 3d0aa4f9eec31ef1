"""The keeper against a stand-in of a scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from orchestrator.leases import keeper as module
from orchestrator.leases.base import EndCause, Lease, LeaseState
from orchestrator.leases.keeper import MAX_FAILURES, LeaseKeeper, News
from tests.unit.leases.standin import Scheduler
from tests.waiting import wait_until


class Reports:
    """Everything that was reported, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def __call__(self, news: News) -> None:
        ids = tuple(x.id for x in news.leases)
        if news.kind in ("trouble", "hopeless"):
            self.seen.append((news.kind, news.words))
        elif news.kind == "queued":
            self.seen.append((news.kind, ids))
        elif news.kind == "limited":
            self.seen.append((news.kind, *ids, news.leases[0].ends_at))
        else:
            self.seen.append((news.kind, *ids))


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


def test_one_that_was_ready_or_was_given_back_is_no_failure(
    keeper: LeaseKeeper, scheduler: Scheduler, reports: Reports
) -> None:
    def end(*ids: str) -> None:
        for id_ in ids:
            wait_until(lambda id_=id_: id_ in scheduler.leases, f"{id_} is requested")  # type: ignore[misc]
            scheduler.end(id_, EndCause.FAILED, f"reason {id_}")

    keeper.want(1)
    end("1", "2")
    wait_until(lambda: "3" in scheduler.leases, "another is requested")
    scheduler.ready("3")
    wait_until(lambda: ("ready", "3") in reports.seen, "it is ready")
    keeper.accept()
    end("3", "4", "5")
    wait_until(lambda: "6" in scheduler.leases, "two in a row are not enough")
    keeper.want(0)
    wait_until(lambda: ("ended", "6") in reports.seen, "it is given back")
    keeper.want(1)
    end("7")
    wait_until(lambda: ("hopeless", "reason 7") in reports.seen, "three in a row are")


def test_a_scheduler_that_is_silent_for_long_is_reported_once_and_nothing_is_lost(
    keeper: LeaseKeeper, scheduler: Scheduler, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNREACHABLE_S", 0.0)
    keeper.want(1)
    wait_until(lambda: "1" in scheduler.leases, "one is queued")
    scheduler.silent = True
    said = ("trouble", "the scheduler does not answer")
    wait_until(lambda: said in reports.seen, "the silence is reported")
    assert keeper.silent_s > 0.0
    scheduler.ready("1")
    scheduler.silent = False
    wait_until(lambda: ("ready", "1") in reports.seen, "what happened meanwhile is seen")
    assert reports.seen.count(said) == 1
    wait_until(lambda: ("trouble", "") in reports.seen and keeper.silent_s == 0.0, "it answers again")


def test_another_end_of_a_ready_lease_is_reported(keeper: LeaseKeeper, scheduler: Scheduler, reports: Reports) -> None:
    keeper.want(1)
    wait_until(lambda: "1" in scheduler.leases, "one is queued")
    scheduler.ready("1")
    wait_until(lambda: ("ready", "1") in reports.seen, "it is ready")
    scheduler.ready("1", ends_at=5000.0)
    wait_until(lambda: ("limited", "1", 5000.0) in reports.seen, "its end is known")
    assert [s for s in reports.seen if s[0] in ("ready", "limited")] == [("ready", "1"), ("limited", "1", 5000.0)]


def test_a_fresh_run_asks_before_it_looks(scheduler: Scheduler, reports: Reports) -> None:
    """Under another controller of the run there may be leases."""
    asked: list[bool] = []
    for fresh in (True, False):
        other = Scheduler()
        keeper = LeaseKeeper("pool", other, reports, fresh=fresh)
        looks: list[int] = []

        def look(other: Scheduler = other, looks: list[int] = looks) -> Sequence[Lease]:
            looks.append(len(other.requests))
            return Scheduler.list(other)

        other.list = look  # type: ignore[method-assign]
        keeper.want(1)
        keeper.start()
        wait_until(lambda looks=looks, other=other: looks and other.requests, "it asked and looked")  # type: ignore[misc]
        asked.append(looks[0] == 1)
        keeper.close(release=True, timeout=5.0)
    assert asked == [True, False]


def test_refused_requests_are_repeated_and_three_without_any_lease_end_them(
    keeper: LeaseKeeper, scheduler: Scheduler, reports: Reports
) -> None:
    keeper.want(2)
    wait_until(lambda: "2" in scheduler.leases, "two are queued")
    scheduler.refuses = "exceeded quota"
    scheduler.end("1", EndCause.CANCELLED)
    said = ("trouble", "more leases are refused: exceeded quota")
    wait_until(lambda: reports.seen.count(said) == 1 and scheduler.refused > MAX_FAILURES, "it is refused often")
    assert not [s for s in reports.seen if s[0] == "hopeless"], "there is another lease"
    scheduler.refuses = ""
    wait_until(lambda: "3" in scheduler.leases, "it is granted in the end")
    scheduler.refuses = "Invalid account"
    scheduler.ready("2")
    scheduler.ready("3")
    keeper.accept()
    for id_ in ("2", "3"):
        scheduler.end(id_, EndCause.PREEMPTED)
    wait_until(lambda: ("hopeless", "Invalid account") in reports.seen, "there is no way")
    assert reports.seen.count(said) == 1


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
