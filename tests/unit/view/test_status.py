"""Status and live view of a run from its state: nodes, slots, its time, what is left, notes as it happens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.policy.apply import apply
from orchestrator.policy.model import State
from orchestrator.reasons import Reason
from orchestrator.view.live import LiveStatus
from orchestrator.view.status import RunHeader, RunStatus, run_status, sessions_until, state_now, time_left
from orchestrator.view.timeline import spans
from orchestrator.view.words import left_words, slot_words, worked_words
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


def fed(*records: tuple[float, ev.Record]) -> State:
    state = State(PolicySettings())
    for t, record in (*BEGIN, *records):
        apply(state, record, t)
    return state


def shown(state: State, now: float, word: str = "running") -> RunStatus:
    return run_status(state, ABOUT, word, now)


class TestPicture:
    def test_what_a_slot_measures_and_since_when(self) -> None:
        s = shown(fed(), 9.0)
        (node,) = s.nodes
        assert (node.state, [x.state for x in node.slots]) == ("busy", ["busy", "idle"])
        assert (node.slots[0].doing, node.slots[0].since, node.slots[0].attempt) == ("s1  (g1)", 4.0, "g1")
        assert (s.running, s.pending, s.tuned) == (1, 3, 0)

    def test_settled_shapes_count_once_and_at_their_node(self) -> None:
        late = ev.FailShape(1, Reason.FAULT, "it crashed", "g1", True)
        s = shown(fed((5.0, ev.ShapeTuned("g1", 1)), (6.0, late), (6.0, ev.ShapeTuned("g1", 1))), 7.0)
        assert (s.tuned, s.failed, s.nodes[0].tuned, s.nodes[0].failed) == (1, 0, 1, 0)

    def test_a_retry_takes_a_failure_back(self) -> None:
        failed = ev.FailShape(1, Reason.FAULT, "it crashed", "g1", True)
        s = shown(fed((5.0, failed), (6.0, ev.RetryAsked((1,)))), 7.0)
        assert (s.failed, s.nodes[0].failed, s.pending + s.running) == (0, 0, 4)

    def test_all_slots_in_quarantine_are_the_node_s_state_and_say_why(self) -> None:
        shut = [(6.0, ev.Quarantine("n", slot, "three faults", 65.0)) for slot in "01"]
        state = fed((5.0, ev.AttemptEnded("g1", Reason.FAULT, 1, "", 1.0)), *shut)
        (node,) = shown(state, 9.0).nodes
        assert (node.state, node.detail) == ("quarantined", "three faults")

    def test_a_lease_that_ended_is_gone_and_says_why(self) -> None:
        state = fed(
            (4.5, ev.NodeExpected("m", ("0",), "h1", ("3",), "17_3", "mi355")),
            (5.0, ev.LeaseEnded("n", "time_limit", "TIMEOUT")),
            (6.0, ev.LeaseEnded("m", "released", "")),
        )
        by_name = {n.name: n for n in shown(state, 9.0).nodes}
        assert (by_name["n"].state, by_name["n"].detail) == ("ended", "the lease n ended (time limit: TIMEOUT)")
        assert (by_name["m"].detail, by_name["m"].lease) == ("the lease m ended (released)", "17_3")
        assert slot_words(state, "m", "0") == "h1 GPU 3"
        found = [(s.kind, s.end) for n in ("n", "m") for s in spans(state, n) if s.start >= 5.0]
        assert found == [("ended", None), ("released", None)]

    @pytest.mark.parametrize("back", [ev.AttemptStarted("g1", "n", "0"), ev.ShapeStarted("g1", 2)])
    def test_what_a_lost_node_had_is_lost_until_it_is_heard_of(self, back: ev.Record) -> None:
        state = fed((5.0, ev.NodeLost("n", "does not answer")))
        (node,) = shown(state, 6.0).nodes
        assert (node.state, node.detail, node.running) == ("unreachable", "does not answer", 0)
        for t, record in ((7.0, ev.NodeJoined("n", ("0", "1"))), (8.0, back)):
            apply(state, record, t)
        (node,) = shown(state, 9.0).nodes
        assert (node.state, node.running, node.slots[0].attempt) == ("busy", 1, "g1")

    def test_it_is_prepared_until_a_node_has_joined(self) -> None:
        state = State(PolicySettings())
        apply(state, ev.NodeExpected("n", ("0",)), 1.0)
        assert shown(state, 2.0).state == "preparing"
        apply(state, ev.NodeJoined("n", ("0",)), 2.0)
        assert shown(state, 3.0).state == "running"

    @pytest.mark.parametrize(
        ("kept", "driven", "state"),
        [("running", True, "running"), ("running", False, "interrupted"), ("finished", False, "finished"),
         ("planned", False, "planned")],
    )  # fmt: skip
    def test_a_dead_controller_means_interrupted(self, kept: str, driven: bool, state: str) -> None:
        assert state_now(kept, driven=driven) == state


class TestTime:
    def test_the_hours_before_a_retry_are_not_the_run_s(self) -> None:
        night = 8 * 3600.0
        state = fed(
            (31.0, ev.ShapeTuned("g1", 1)), (night, ev.Resumed(2)), (night, ev.RetryAsked((1,))),
            (night + 20.0, ev.StopAsked()),
        )  # fmt: skip
        sessions = sessions_until(state, night + 60.0)
        assert [end - begin for begin, end in sessions] == [30.0, 60.0]
        assert worked_words(sessions).startswith("1 min 30 s (over 2 sessions from ")

    def test_one_session_needs_no_words(self) -> None:
        assert worked_words(sessions_until(fed(), 66.0)) == "1 min 05 s"
        assert worked_words(sessions_until(State(PolicySettings()), 66.0)) == ""

    def test_the_rate_is_of_this_session(self) -> None:
        state = fed(*((float(t), ev.ShapeTuned("g1", i)) for t, i in ((10, 1), (20, 2))))
        assert shown(state, 24.0).rate_per_min == pytest.approx(2 * 60 / 20.0)
        apply(state, ev.Resumed(2), 90_000.0)
        assert shown(state, 90_010.0).rate_per_min is None


class TestNotes:
    def told(self, *records: ev.Record) -> list[tuple[str, bool]]:
        state = fed()
        live = LiveStatus(state, ABOUT)
        for record in records:
            live.feed(5.0, record)
            apply(state, record, 5.0)
        notes = live.take_notes()
        assert live.take_notes() == []
        return notes

    def test_a_failed_canary_is_told_once(self) -> None:
        why = "the canary failed: wrong answer"
        ((text, bad),) = self.told(ev.CanaryFailed("n", "0", "wrong answer"), ev.Quarantine("n", "0", why, 65.0))
        assert text.startswith("n slot 0 quarantined until ")
        assert text.endswith(why)
        assert bad

    def test_a_quarantine_of_all_slots_for_one_reason_is_told_once(self) -> None:
        shut = [ev.Quarantine("n", slot, "the node's disk is full", 65.0) for slot in "01"]
        assert len(self.told(*shut)) == 1

    def test_a_failed_shape_is_left_to_the_report_at_the_end(self) -> None:
        assert self.told(ev.FailShape(1, Reason.UNSUPPORTED, "no candidates", None, True)) == []

    def test_an_attempt_that_ended_badly_is_told_with_its_place(self) -> None:
        ((text, _),) = self.told(ev.AttemptEnded("g1", Reason.FAULT, 1, "signal 11", 2.0))
        assert text == "attempt g1 on n slot 0 ended after 2.0 s: the tuner's process died at s1: signal 11"
        assert self.told(ev.AttemptEnded("g1", Reason.DONE, None, "", 2.0)) == []

    def test_nodes_leases_and_unconfirmed_winners_are_told(self) -> None:
        notes = self.told(
            ev.NodeTroubled("n", "no route", 5.0), ev.NodeLost("n", "no route"),
            ev.LeasesQueued("p", (("17", "Priority"),)), ev.LeasesQueued("p", ()),
            ev.ShapeTuned("g1", 1, (("asm", "1"),)), ev.SettleShape(1, "g1", False, "no second slot"),
            ev.LeaseEnded("n", "released", ""),
        )  # fmt: skip
        assert notes == [
            ("n is in trouble, and is tried again: no route", True), ("n was given up: no route", True),
            ("p: 1 lease is queued: 17 (Priority)", False), ("s1 tuned, unconfirmed: no second slot", True),
            ("the lease n ended (released)", False),
        ]  # fmt: skip

    def test_what_a_node_is_doing_is_shown_until_the_next_record_of_it(self) -> None:
        state = fed((5.0, ev.NodeLost("n", "no route")))
        live = LiveStatus(state, ABOUT)
        live.feed(6.0, ev.NodeExpected("n", ("0", "1")))
        apply(state, ev.NodeExpected("n", ("0", "1")), 6.0)
        live.progress("n", "pulling the image")
        assert live.status(7.0).nodes[0].detail == "pulling the image"
        live.trouble("n", "no route")
        live.trouble("n", "no route")
        assert live.take_notes() == [("n: no route", True)]
        live.feed(8.0, ev.NodeJoined("n", ("0", "1")))
        apply(state, ev.NodeJoined("n", ("0", "1")), 8.0)
        assert live.status(9.0).nodes[0].detail == ""


# --- what is left -----------------------------------------------------------------------------------------------------


def plan(seed: int, *, off: float, poison: bool = False, last: float = 0.0) -> tuple[SimPlan, dict[int, float]]:
    """A run of 40 groups, whose estimates are `off` by a factor and scatter; with the estimate of each shape."""
    draw, groups, costs = random.Random(seed), list[SimGroup](), dict[int, float]()
    for g in range(40):
        ids = tuple(range(10 * g + 1, 10 * g + 1 + draw.randint(1, 10)))
        took = tuple(draw.uniform(3.0, 12.0) for _ in ids)
        costs |= {i: t / off * draw.lognormvariate(0.0, 0.25) for i, t in zip(ids, took, strict=True)}
        groups.append(SimGroup(f"g{g:04d}", ids, took, sum(costs[i] for i in ids)))
    if last:
        ids = (1000,)
        costs[1000] = 5.0
        groups.append(SimGroup("g9999", ids, (last,), 5.0))
    groups.sort(key=lambda g: -g.estimate_s)
    faults = Faults(poison={groups[3].shapes[0]: Poison(Reason.FAULT)}) if poison else Faults()
    return SimPlan({"n1": 3, "n2": 3}, tuple(groups), faults, seed), costs


def watched(made: tuple[SimPlan, dict[int, float]], spread: float) -> Iterator[tuple[float, float, float, str]]:
    """(now, makespan, most likely seconds left, the words) every second of a run's time, from its journal alone."""
    simulator = Simulator(made[0])
    simulator.run()
    state, about = State(PolicySettings()), replace(ABOUT, start_s=3.0, spread=spread)
    journal, at = simulator.journal, 0
    for now in range(int(simulator.now)):
        while at < len(journal) and journal[at][0] <= now:
            apply(state, journal[at][1], journal[at][0])
            at += 1
        left = time_left(state, about, float(now), driven=True)
        assert left is not None
        yield float(now), simulator.now, left.mid_s, left_words(left.low_s, left.mid_s, left.high_s)


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("off", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_after_a_third_the_end_is_known_within_a_factor(seed: int, off: float, poison: bool) -> None:
    """Also where every shape takes half or twice its estimate: the run itself shows it. What faults costs more than
    anybody could know; then the end alone is held to it."""
    for now, makespan, left, _ in watched(plan(seed, off=off, poison=poison), spread=2.0):
        if now >= makespan / 3:
            assert 1 / 1.3 < (now + left) / makespan < 1.3, (now, makespan, left)
        if makespan / 3 <= now <= makespan / 2 and not poison:
            assert 1 / 1.3 < left / (makespan - now) < 1.3, (now, makespan, left)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_left_is_never_said_while_something_runs(seed: int) -> None:
    """The last shape takes forty times as long as it should: what is left stays more than nothing, and grows."""
    short = 0
    for _, _, left, words in watched(plan(seed, off=1.0, last=200.0), spread=1.3):
        assert left >= 1.0
        assert not words.removeprefix("about ").startswith("0 s")
        short = short + 1 if left < 2.0 else 0
        assert short < 10, "a second or two are left for ten seconds"


def test_a_run_that_nobody_drives_counts_all_that_is_left() -> None:
    left = time_left(fed((10.0, ev.ShapeTuned("g1", 1))), ABOUT, 99_999.0, driven=False)
    assert left is not None
    assert left.mid_s == pytest.approx(20.0, rel=0.5)


def test_what_is_left_of_many_shapes_is_about_what_a_schedule_of_each_says(monkeypatch: pytest.MonkeyPatch) -> None:
    state, n = State(PolicySettings()), 600
    apply(state, ev.WorkAdded("k", tuple((i,) for i in range(n)), ((10.0,),) * n), 0.0)
    apply(state, ev.NodeJoined("n1", ("0", "1")), 0.0)
    for shape, slot in ((0, "0"), (1, "1")):
        apply(state, ev.Send(f"g{shape}", "n1", slot, shape, (shape,)), 1.0)
        apply(state, ev.AttemptStarted(f"g{shape}", "n1", slot), 1.0)
    apply(state, ev.ShapeTuned("g0", 0), 9.0)
    apply(state, ev.AttemptEnded("g0", Reason.DONE, None, "", 8.0), 9.0)
    each = time_left(state, ABOUT, 10.0, driven=True)
    monkeypatch.setattr("orchestrator.view.status.MOST_SCHEDULED", 100)
    summed = time_left(state, ABOUT, 10.0, driven=True)
    assert each is not None
    assert summed is not None
    assert summed.mid_s == pytest.approx(each.mid_s, rel=0.02)


@pytest.mark.parametrize(("alone", "seconds"), [(False, (100 + 8 * 10) / 2), (True, (100 + 100 * 10) / 2)])
def test_shapes_that_share_a_process_share_its_set_up(alone: bool, seconds: float) -> None:
    state, units = State(PolicySettings()), tuple((i,) for i in range(100))
    apply(state, ev.WorkAdded("k", units, ((1.0,),) * 100, alone=alone, setup_s=10.0), 0.0)
    apply(state, ev.NodeJoined("n", ("0", "1")), 0.0)
    left = time_left(state, ABOUT, 1.0, driven=False)
    assert left is not None
    assert left.mid_s == pytest.approx(seconds, rel=0.1)


def test_nothing_is_left_of_a_settled_run() -> None:
    state = fed(*((5.0, ev.ShapeTuned("g1", i)) for i in (1, 2, 3, 4)))
    assert time_left(state, ABOUT, 6.0, driven=True) is None
    assert shown(state, 6.0).eta_s == 0.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [((60, 65, 70), "about 1 min 05 s"), ((10, 100, 1000), "10 s to 17 min 00 s"), ((0, 0, 0), "about 1 s"),
     ((3000, 3333, 3500), "about 56 min 00 s")],
)  # fmt: skip
def test_what_is_left_in_words(seconds: tuple[float, float, float], words: str) -> None:
    assert left_words(*seconds) == words
