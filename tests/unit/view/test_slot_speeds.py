"""Slots beside each other by their timed canaries: who stands out, what they are named for, and the time left."""

from __future__ import annotations

import random

import pytest

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.policy.apply import apply
from orchestrator.policy.model import State
from orchestrator.view.status import SlotSpeed, flag_words, flags, outliers, run_status, speeds, time_left, usual_pace
from tests.unit.view.test_status import ABOUT

SLOTS = [("n1", str(i)) for i in range(4)] + [("n2", str(i)) for i in range(4)]


def fleet(*odd: ev.CanaryTimed, times: int = 5, noise: float = 0.004, device: str = "MI355X gfx950 256") -> State:
    """Eight slots with noise alike, then what `odd` says, five times."""
    rng = random.Random(1)
    out = State(PolicySettings())
    for node, slot in {*SLOTS, *((r.node, r.slot) for r in odd)}:
        apply(out, ev.NodeJoined(node, (slot,)), 0.0)
    for k in range(times):
        for node, slot in SLOTS:
            made = ev.CanaryTimed(
                node, slot, 200 * rng.gauss(1, noise), 500 * rng.gauss(1, noise), device, 70 + rng.gauss(0, 1.5), 1400
            )
            apply(out, made, float(k))
    for k in range(times):
        for r in odd:
            apply(out, r, 100.0 + k)
    return out


def test_alike_slots_are_not_named() -> None:
    assert flags(fleet()) == {}
    assert all(s.pace == pytest.approx(1.0, abs=0.01) for s in speeds(fleet()).values())


def test_slow_hot_and_power_capped_slots_are_named_with_their_figures() -> None:
    slow = ev.CanaryTimed("n3", "0", 220.0, 501.0, "MI355X gfx950 256", 71, 1400)
    hot = ev.CanaryTimed("n3", "1", 200.0, 500.0, "MI355X gfx950 256", 93, 1400)
    capped = ev.CanaryTimed("n3", "2", 240.0, 500.0, "MI355X gfx950 256", 60, 1000)
    found = flags(fleet(slow, hot, capped))
    assert list(found) == [("n3", "0"), ("n3", "1"), ("n3", "2")]
    assert found["n3", "0"].startswith("slow (compute ")
    assert "over the median of 11 slots)" in found["n3", "0"]
    assert found["n3", "1"] == "hot (93 C, median 70 C)"
    assert found["n3", "2"].endswith("power-capped (1000 W, median 1400 W)")
    assert found["n3", "2"].startswith("slow (compute 2")


def test_a_slow_slot_among_few_is_named_from_three_on() -> None:
    assert outliers({("a", "0"): 1.0, ("b", "0"): 2.0}, 0.03, 0.005) == set()
    assert outliers({("a", "0"): 1.0, ("b", "0"): 1.001, ("c", "0"): 1.1}, 0.03, 0.005) == {("c", "0")}
    assert outliers({("a", "0"): 1.0, ("b", "0"): 1.001, ("c", "0"): 0.9}, 0.03, 0.005) == set(), "a fast one is none"


def test_a_wide_fleet_needs_more_to_stand_out() -> None:
    wide = {("n", str(i)): 1.0 + 0.02 * i for i in range(9)}
    assert outliers({**wide, ("n", "x"): 1.25}, 0.03, 0.005) == set()
    assert outliers({**wide, ("n", "x"): 1.6}, 0.03, 0.005) == {("n", "x")}


def test_chance_names_few_slots() -> None:
    """Eight slots with normal noise of 0.5 %, 500 fleets: at most one in a hundred has any flag."""
    rng = random.Random(7)
    named = sum(bool(outliers({s: rng.gauss(1, 0.005) for s in SLOTS}, 0.03, 0.005)) for _ in range(500))
    assert named <= 5


def test_only_slots_of_one_device_are_compared_and_only_their_latest_times() -> None:
    other = ev.CanaryTimed("n3", "0", 400.0, 900.0, "MI300X gfx942 304", 70, 750)
    assert flags(fleet(other)) == {}
    cooled = fleet(ev.CanaryTimed("n1", "0", 300.0, 500.0, "MI355X gfx950 256"))
    assert list(flags(cooled)) == [("n1", "0")]
    for k in range(9):
        apply(cooled, ev.CanaryTimed("n1", "0", 200.0, 500.0, "MI355X gfx950 256"), 200.0 + k)
    assert flags(cooled) == {}


def test_a_time_that_is_none_says_nothing() -> None:
    times = fleet(ev.CanaryTimed("n3", "0", -1.0, 500.0, "MI355X gfx950 256"))
    assert flags(times) == {}
    assert speeds(times)["n3", "0"].compute is None
    assert SlotSpeed(None, None, "").pace == 1.0


def test_the_pace_of_a_fleet_is_that_of_its_throughput() -> None:
    assert usual_pace({}) == 1.0
    found = {("n", "0"): SlotSpeed(1.0, 1.0, ""), ("n", "1"): SlotSpeed(2.0, 2.0, "")}
    assert usual_pace(found) == pytest.approx(4 / 3)  # of two slots, one of half the speed: three quarters of the work


def on(slow_factor: float, running_on: str = "") -> State:
    """Four slots of a node with work left; n slot 3 takes `slow_factor` times as long."""
    state, ids = State(PolicySettings()), tuple(range(1, 41))
    slots = ("0", "1", "2", "3")
    apply(state, ev.WorkAdded("k", (ids,), ((10.0,) * 40,)), 0.0)
    apply(state, ev.Resumed(1), 1.0)
    apply(state, ev.NodeJoined("n", slots), 2.0)
    for slot in slots:
        apply(state, ev.CanaryPassed("n", slot, 10.0), 3.0)
        us = 100.0 * (slow_factor if slot == "3" else 1.0)
        apply(state, ev.CanaryTimed("n", slot, us, us, "x"), 4.0)
    if running_on:
        apply(state, ev.Send("g1", "n", running_on, 1, ids), 5.0)
        apply(state, ev.AttemptStarted("g1", "n", running_on), 6.0)
    return state


def left(state: State) -> float:
    found = time_left(state, ABOUT, 6.0, driven=True)
    assert found is not None
    return found.mid_s


def test_a_slow_slot_lengthens_the_time_left_and_a_group_on_it_takes_longer() -> None:
    assert left(on(2.0)) > left(on(1.0))
    assert left(on(2.0, "3")) == pytest.approx(2 * left(on(1.0, "3")), rel=0.05)
    assert left(on(2.0, "0")) == pytest.approx(left(on(1.0, "0")), rel=0.05)


def test_status_names_them() -> None:
    state = on(1.5)
    words = ["n slot 3 is slow (compute 50.0 %, memory 50.0 % over the median of 4 slots)"]
    s = run_status(state, ABOUT, "running", 7.0)
    assert s.standing_out == s.to_json()["standing_out"] == flag_words(state) == words
