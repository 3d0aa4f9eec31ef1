"""The timed canary: between attempts, for one percent of the slot's time at most, on record, and never in the way."""

from __future__ import annotations

from pathlib import Path

from tests.support.workernode import node
from worker.agent.tuner_supervisor import SHARE, CanaryBudget
from worker.tuners.common.device import Device, timed_canary


def test_one_percent_of_the_time_is_never_exceeded() -> None:
    b = CanaryBudget(since=1000.0, next_s=0.5)
    now, asked = 1000.0, 0
    while now < 2000.0:
        now += 7.0
        if b.allows(now):
            asked += 1
            b.took(0.3 if asked % 2 else 2.0)
        assert b.spent_s <= SHARE * (now - 1000.0) + 2.0 - 0.3, "at most one that took longer than the last"
    assert asked > 3
    assert not CanaryBudget(0.0).allows(1e9), "a tuner without one"
    assert not CanaryBudget(0.0, 0.001, closed=True).allows(1e9)
    assert not CanaryBudget(0.0, 15.0).allows(1000.0), "nor before it is affordable"


def test_it_is_timed_after_an_attempt_and_put_on_record(tmp_path: Path) -> None:
    with node(tmp_path, options={"times": {"0": [100.0, 50.0]}}) as n:
        n.put("g-1")
        n.start()
        timed = n.wait_record("canary_timed")
        assert (timed["compute_us"], timed["memory_us"]) == (100.0, 50.0)
        assert timed["seconds"] > 0
        assert isinstance(timed.get("conditions", {}), dict)
        order = [r["type"] for r in n.records("0") if r["type"] in ("attempt_ended", "canary_timed")]
        assert order == ["attempt_ended", "canary_timed"]


def test_one_that_fails_is_not_tried_again_and_costs_nothing_else(tmp_path: Path) -> None:
    with node(tmp_path, options={"times": {"0": "no product here"}}) as n:
        n.put("g-1")
        n.put("h-1")
        n.start()
        for attempt in ("g-1", "h-1"):
            assert n.wait_ended(attempt)["outcome"] == "done"
        n.put("c-1", kind="canary", slot="0", shapes=0)
        assert n.wait_ended("c-1")["outcome"] == "done"
        assert n.records("0", "canary_timed") == []
        assert len(n.records("0", "tuner_ready")) == 1, "the process lives on"


def test_without_room_there_is_no_time(tmp_path: Path) -> None:
    with node(tmp_path, options={"times": {"0": [-1.0, -1.0]}}) as n:
        n.put("g-1")
        n.put("h-1")
        n.start()
        n.wait_ended("h-1")
        assert n.records("0", "canary_timed") == []


def test_torch_times_both_kernels_where_there_is_room() -> None:
    device = Device("cpu")
    compute, memory = timed_canary(device)
    assert compute > 0
    assert memory > 0
    device.available = lambda: 1 << 20  # type: ignore[method-assign]
    assert timed_canary(device) == (-1.0, -1.0)
