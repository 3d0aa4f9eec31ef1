"""Number of leases that are wanted, those that are idle, and the point at which more requests are pointless."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.leases.base import Lease, LeaseState
from orchestrator.leases.keeper import (
    IDLE_S,
    LEASE_WORK_S,
    MAX_FAILURES,
    Failures,
    IdleTimes,
    PoolSize,
    missing,
    surplus,
    wanted,
)

POOL = PoolSize("mi355", 1, 8, 8)


def lease(id_: str, state: LeaseState, why: str = "") -> Lease:
    return Lease(id_, state, why=why)


def test_a_lease_for_every_ten_minutes_of_work_on_its_slots() -> None:
    hour = 3600.0 * 8
    assert wanted([POOL], hour) == {"mi355": 6}
    assert wanted([POOL], 10 * hour) == {"mi355": 8}
    assert wanted([POOL], 1.0) == {"mi355": 1}
    assert wanted([POOL], 0.0) == {"mi355": 0}
    # machines of one's own do their share, and pools are filled in order
    assert wanted([POOL], hour, other_slots=16) == {"mi355": 4}
    more = PoolSize("spare", 1, 4, 2)
    assert wanted([POOL, more], 8 * hour / 6 + 2 * LEASE_WORK_S) == {"mi355": 8, "spare": 1}


@given(st.floats(0, 1e9), st.integers(0, 100), st.integers(0, 20))
def test_never_more_than_the_maximum_and_enough_for_the_backlog(backlog: float, others: int, places: int) -> None:
    want = wanted([POOL], backlog, others, places)["mi355"]
    assert 0 <= want <= POOL.maximum
    if want < POOL.maximum:
        assert want * POOL.slots * LEASE_WORK_S >= backlog - others * LEASE_WORK_S - 1e-3


def test_a_node_is_idle_for_long_only_if_it_was_at_every_look() -> None:
    idle = IdleTimes()
    assert idle.over(["a", "b"], 0.0) == []
    assert idle.over(["a"], IDLE_S / 2) == []
    assert idle.over(["a", "b"], IDLE_S) == ["a"]
    assert idle.over(["a", "b"], IDLE_S * 2) == ["a", "b"]


def test_queued_leases_that_are_no_longer_wanted_are_given_back_the_latest_first() -> None:
    held = [
        lease("1", LeaseState.READY), lease("2", LeaseState.QUEUED), lease("3", LeaseState.QUEUED),
        lease("0", LeaseState.ENDED),
    ]  # fmt: skip
    assert surplus(held, 3) == []
    assert surplus(held, 2) == ["3"]
    assert surplus(held, 0) == ["3", "2"], "what is ready is given back when it is idle"
    assert missing(held, 5) == 2
    assert missing(held, 1) == 0


def test_three_failures_in_a_row_are_enough() -> None:
    failures = Failures()
    for i in range(MAX_FAILURES - 1):
        failures.add(f"reason {i}")
    failures.worked()
    for i in range(MAX_FAILURES - 1):
        failures.add(f"reason {i}")
    before = failures.hopeless
    failures.add("")
    assert (before, failures.hopeless) == ("", "it ended before it was ready")
