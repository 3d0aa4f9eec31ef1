"""Status and live view of a run from its state: nodes, slots and their speeds, what is left, notes as it happens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from orchestrator import events as ev
from orchestrator.cli.live_view import summary_line
from orchestrator.policy import PolicySettings
from orchestrator.policy.apply import apply
from orchestrator.policy.model import State
from orchestrator.reasons import Reason
from orchestrator.view.formatting import describe_work_time
from orchestrator.view.header import RunHeader
from orchestrator.view.live import LiveStatus
from orchestrator.view.slot_speed import compare_slots, flags, outliers
from orchestrator.view.status import RunStatus, rate_per_min, run_status, sessions_until, state_now
from orchestrator.view.time_left import time_left
from tests.simulator.plan import Faults, Poison, SimGroup, SimPlan
from tests.simulator.simulator import Simulator

ABOUT = RunHeader("r", "a16w16", "torch", 0.0, 4, 0, {"n": ("0", "1")}, lambda i: f"s{i}")
BEGIN: tuple[tuple[float, ev.Record], ...] = (
    (0.0, ev.WorkAdded("k", ((1,), (2,), (3,), (4,)), ((10.0,),) * 4)),
    (1.0, ev.Resumed(1)),
    (1.0, ev.NodeExpected("n", ("0", "1"))),
    (2.0, ev.NodeJoined("n", ("0", "1"))),
    (3.0, ev.CanaryPassed("n", "0", 10.0)),
    (3.0, ev.CanaryPassed("n", "1", 10.0)),
    (3.0, ev.Send("g1", "n", "0", 1, (1, 2))),
    (4.0, ev.AttemptStarted("g1", "n", "0")),
    (4.0, ev.ShapeStarted("g1", 1)),
)


def fed(*records: tuple[float, ev.Record], begin: tuple[tuple[float, ev.Record], ...] = BEGIN) -> State:
    state = State(PolicySettings())
    for t, record in (*begin, *records):
        apply(state, record, t)
    return state


def shown(state: State, now: float) -> RunStatus:
    return run_status(state, ABOUT, "running", now)


def test_a_node_that_a_finished_run_did_not_need_is_ended() -> None:
    state = fed(begin=BEGIN[:3])
    for word, there in (("finished", "ended"), ("interrupted", "preparing")):
        (node,) = run_status(state, ABOUT, word, 2.0).nodes
        assert [node.state, *(slot.state == "ended" for slot in node.slots)] == [there, *[word == "finished"] * 2]


def test_it_is_prepared_until_a_node_has_joined_and_a_dead_controller_means_interrupted() -> None:
    assert [shown(fed(begin=BEGIN[:n]), 2.0).state for n in (3, 4)] == ["preparing", "running"]
    for kept, driven, state in (
        ("running", True, "running"), ("running", False, "interrupted"), ("finished", False, "finished"),
        ("planned", False, "planned"),
    ):  # fmt: skip
        assert state_now(kept, driven=driven) == state


def test_a_run_s_time_and_rate_are_those_of_its_sessions() -> None:
    night = 8 * 3600.0
    state = fed((31.0, ev.ShapeTuned("g1", 1)), (night, ev.Resumed(2)), (night + 20.0, ev.RetryAsked((1,))))
    sessions = sessions_until(state, night + 60.0)
    assert [end - begin for begin, end in sessions] == [30.0, 60.0]
    assert describe_work_time(sessions).startswith("1 min 30 s (over 2 sessions from ")
    assert rate_per_min(state, night + 60.0) is None
    assert rate_per_min(fed((10.0, ev.ShapeTuned("g1", 1))), 24.0) == pytest.approx(60 / 20.0)


def test_notes_tell_what_happened_once() -> None:
    canary, disk = "the canary failed: wrong answer", "the node's disk is full"
    cases: list[tuple[list[ev.Record], list[str]]] = [
        ([ev.CanaryFailed("n", "0", "wrong answer"), ev.Quarantine("n", "0", canary, 65.0)], [canary]),
        ([ev.Quarantine("n", slot, disk, 65.0) for slot in "01"], [disk]),  # of all slots for one reason
        ([ev.FailShape(1, Reason.UNSUPPORTED, "none", None, True)], []),  # the report at the end lists it
        ([ev.AttemptEnded("g1", Reason.DONE, None, "", 2.0)], []),
        ([ev.AttemptEnded("g1", Reason.FAULT, 1, "signal 11", 2.0)],
         ["attempt g1 on n slot 0 ended after 2.0 s: the tuner's process died at s1: signal 11"]),
        ([ev.NodeTroubled("n", "no route"), ev.NodeLost("n", "no route"),
          ev.LeasesQueued("p", (("17", "Priority"),)), ev.LeasesQueued("p", ()),
          ev.ShapeTuned("g1", 1, (("asm", "1"),)), ev.SettleShape(1, "g1", False, "no second slot"),
          ev.LeaseEnded("n", "released", "")],
         ["n is in trouble; we try it again: no route", "n was given up: no route",
          "p: 1 lease is queued: 17 (Priority)", "s1 tuned, unconfirmed: no second slot",
          "the lease n ended (released)"]),
    ]  # fmt: skip
    for records, texts in cases:
        state = fed()
        live = LiveStatus(state, ABOUT)
        for record in records:
            live.feed(5.0, record)
            apply(state, record, 5.0)
        notes = live.take_notes()
        assert [text.endswith(end) for (text, _), end in zip(notes, texts, strict=True)] == [True] * len(texts), notes
        assert [text for text, bad in notes if not bad] == [t for t in texts if "lease" in t]
        assert live.take_notes() == []


def plan(seed: int, *, off: float, poison: bool = False) -> SimPlan:
    """A run of 40 groups, whose estimates are `off` by a factor and scatter."""
    draw, groups = random.Random(seed), list[SimGroup]()
    for g in range(40):
        ids = tuple(range(10 * g + 1, 10 * g + 1 + draw.randint(1, 10)))
        took = tuple(draw.uniform(3.0, 12.0) for _ in ids)
        groups.append(SimGroup(f"g{g:04d}", ids, took, sum(t / off * draw.lognormvariate(0.0, 0.25) for t in took)))
    groups.sort(key=lambda g: -g.estimate_s)
    faults = Faults(poison={groups[3].shapes[0]: Poison(Reason.FAULT)}) if poison else Faults()
    return SimPlan({"n1": 3, "n2": 3}, tuple(groups), faults, seed)


def watched(made: SimPlan, spread: float) -> Iterator[tuple[float, float, float]]:
    """(now, makespan, most likely seconds left) every second of a run's time, from its journal alone."""
    simulator = Simulator(made)
    simulator.run()
    state, about = State(PolicySettings()), replace(ABOUT, start_s=3.0, spread=spread)
    journal, at = simulator.journal, 0
    for now in range(int(simulator.now)):
        while at < len(journal) and journal[at][0] <= now:
            apply(state, journal[at][1], journal[at][0])
            at += 1
        left = time_left(state, about, float(now), driven=True)
        assert left is not None
        yield float(now), simulator.now, left.mid_s


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("off", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_after_a_third_the_end_is_known_within_a_factor(seed: int, off: float, poison: bool) -> None:
    """Also where every shape takes half or twice its estimate: the run itself shows it. What faults costs more than
    anybody could know; then the end alone is held to it."""
    for now, makespan, left in watched(plan(seed, off=off, poison=poison), spread=2.0):
        if now >= makespan / 3:
            assert 1 / 1.3 < (now + left) / makespan < 1.3, (now, makespan, left)
        if makespan / 3 <= now <= makespan / 2 and not poison:
            assert 1 / 1.3 < left / (makespan - now) < 1.3, (now, makespan, left)


def test_on_a_chip_that_nobody_measured_the_end_is_not_known_before_the_first_result() -> None:
    simulator = Simulator(plan(1, off=1.0))
    simulator.run()
    state, about = State(PolicySettings()), replace(ABOUT, known=False)
    for t, record in simulator.journal:
        apply(state, record, t)
        if state.running and not state.tuned_at:
            assert run_status(state, about, "running", t).eta_s is None
            assert run_status(state, ABOUT, "running", t).eta_s
        if state.tuned_at:
            break
    left = run_status(state, about, "running", t).eta_s
    assert left is not None
    assert left > 0


def test_a_refused_shape_says_nothing_of_the_time_that_measuring_takes() -> None:
    work = ev.WorkAdded("k", ((1,), (2,), (3,)), ((10.0,), (10.0,), (36000.0,)))
    begin = (
        (0.0, work),
        *BEGIN[1:6],
        (3.0, ev.Send("g1", "n", "0", 1, (3,))),
        (3.0, ev.AttemptStarted("g1", "n", "0")),
    )
    state = fed(
        (3.1, ev.ShapeRefused("g1", 3, Reason.UNSUPPORTED, "too large")),
        (3.1, ev.FailShape(3, Reason.UNSUPPORTED, "too large", None, True)),
        (3.1, ev.AttemptEnded("g1", Reason.DONE, None, "", 0.1)),
        begin=begin,
    )
    left = time_left(state, ABOUT, 4.0, driven=True)
    assert left is not None
    assert 1.5 < left.low_s < left.mid_s < left.high_s < 100


def test_what_is_waited_for_is_said_beside_the_time_left() -> None:
    busy = ev.NodeBusy("n1", "wait", "GPU 0 is busy")
    state = fed(
        (2.0, ev.NodeExpected("n1", ("0",))), (2.0, busy), (3.0, ev.LeasesQueued("pool", (("12", "Priority"),)))
    )
    status = run_status(state, ABOUT, "running", 4.0)
    assert status.waits_for == ["n1", "the queue of pool"]
    assert summary_line(status).endswith(" left, not counting the wait for n1, the queue of pool")


SLOTS = [(node, str(i)) for node in ("n1", "n2") for i in range(4)]
GPU = "MI355X gfx950 256"


def fleet(*odd: ev.CanaryTimed) -> State:
    """Eight slots with noise alike, then what `odd` says, five times."""
    rng = random.Random(1)
    state = fed(*((0.0, ev.NodeJoined(n, (s,))) for n, s in {*SLOTS, *((r.node, r.slot) for r in odd)}), begin=())
    for k in range(5):
        for place in SLOTS:
            us = 200 * rng.gauss(1, 0.004), 500 * rng.gauss(1, 0.004)
            apply(state, ev.CanaryTimed(*place, *us, GPU, 70 + rng.gauss(0, 1.5), 1400), float(k))
        for r in odd:
            apply(state, r, 100.0 + k)
    return state


def test_slow_hot_and_power_capped_slots_are_named_with_their_figures() -> None:
    assert flags(fleet()) == {}
    assert all(s.pace == pytest.approx(1.0, abs=0.01) for s in compare_slots(fleet()).values())
    slow = ev.CanaryTimed("n3", "0", 220.0, 501.0, GPU, 71, 1400)
    hot = ev.CanaryTimed("n3", "1", 200.0, 500.0, GPU, 93, 1400)
    capped = ev.CanaryTimed("n3", "2", 240.0, 500.0, GPU, 60, 1000)
    found = [*flags(fleet(slow, hot, capped)).items()]
    assert [place for place, _ in found] == [("n3", "0"), ("n3", "1"), ("n3", "2")]
    assert found[0][1].startswith("slow (compute ")
    assert "over the median of 11 slots)" in found[0][1]
    assert found[1][1] == "hot (93 C, median 70 C)"
    assert found[2][1].endswith("power-capped (1000 W, median 1400 W)")


def test_a_slot_stands_out_among_three_or_more_and_chance_names_few() -> None:
    """Eight slots with normal noise of 0.5 %, 500 fleets: at most one in a hundred has any flag."""
    for others, odd, out in (
        ([1.0], 2.0, False), ([1.0, 1.001], 1.1, True), ([1.0, 1.001], 0.9, False),
        ([1.0 + 0.02 * i for i in range(9)], 1.25, False), ([1.0 + 0.02 * i for i in range(9)], 1.6, True),
    ):  # fmt: skip
        values = {("n", str(i)): v for i, v in enumerate(others)}
        assert outliers({**values, ("x", "0"): odd}, 0.03, 0.005) == ({("x", "0")} if out else set()), (others, odd)
    rng = random.Random(7)
    assert sum(bool(outliers({s: rng.gauss(1, 0.005) for s in SLOTS}, 0.03, 0.005)) for _ in range(500)) <= 5


def test_only_slots_of_one_device_are_compared_and_only_their_latest_times() -> None:
    assert flags(fleet(ev.CanaryTimed("n3", "0", 400.0, 900.0, "MI300X gfx942 304", 70, 750))) == {}
    cooled = fleet(ev.CanaryTimed("n1", "0", 300.0, 500.0, GPU))
    assert list(flags(cooled)) == [("n1", "0")]
    for k in range(9):
        apply(cooled, ev.CanaryTimed("n1", "0", 200.0, 500.0, GPU), 200.0 + k)
    assert flags(cooled) == {}
