"""The view of a run from its journal alone: nodes, slots, its time, what is left, notes as it happens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import events as ev
from orchestrator.ledger import LedgerReader
from orchestrator.reasons import Reason
from orchestrator.run.view import RunView
from orchestrator.run.view.reading import ViewReader
from orchestrator.run.view.sentences import sentence
from orchestrator.run.view.status import Notes, RunHeader, left_words, run_status, state_now, time_left
from orchestrator.run.view.work import Costs
from orchestrator.status import RunStatus
from tests.simulator.plan import Faults, Poison, SimGroup, SimPlan
from tests.simulator.simulator import Simulator
from tests.support.ledger_kit import per_node
from tests.support.report_kit import simulated_run

ABOUT = RunHeader("r", "a16w16", "torch", 0.0, 4, 0, {"n": ("0", "1")}, lambda i: f"s{i}")
BEGIN: tuple[tuple[float, ev.Record], ...] = (
    (0.0, ev.GroupAdded("g1", (1, 2), 20.0)),
    (0.0, ev.GroupAdded("g2", (3, 4), 20.0)),
    (1.0, ev.Resumed(1)),
    (1.0, ev.NodeExpected("n", ("0", "1"))),
    (2.0, ev.NodeJoined("n", ("0", "1"))),
    (3.0, ev.CanaryPassed("n", "0", 10.0)),
    (3.0, ev.CanaryPassed("n", "1", 10.0)),
    (3.0, ev.Send("g1-1", "g1", "n", None, 1)),
    (4.0, ev.AttemptStarted("g1-1", "n", "0")),
    (4.0, ev.ShapeStarted("g1-1", 1)),
)


def fed(*records: tuple[float, ev.Record]) -> RunView:
    view = RunView()
    for t, record in (*BEGIN, *records):
        view.feed(t, record)
    return view


def shown(view: RunView, now: float, state: str = "running") -> RunStatus:
    return run_status(view, ABOUT, state, now)


class TestPicture:
    def test_what_a_slot_measures_and_since_when(self) -> None:
        s = shown(fed(), 9.0)
        (node,) = s.nodes
        assert (node.state, [x.state for x in node.slots]) == ("busy", ["busy", "idle"])
        assert (node.slots[0].doing, node.slots[0].since, node.slots[0].attempt) == ("s1  (g1-1)", 4.0, "g1-1")
        assert (s.running, s.pending, s.tuned) == (1, 3, 0)

    def test_settled_shapes_count_once_and_at_their_node(self) -> None:
        late = ev.FailShape(1, Reason.FAULT, "it crashed", "g1-1", True)
        view = fed((5.0, ev.ShapeTuned("g1-1", 1)), (6.0, late), (6.0, ev.ShapeTuned("g1-1", 1)))
        s = shown(view, 7.0)
        assert (s.tuned, s.failed, s.nodes[0].tuned, s.nodes[0].failed) == (1, 0, 1, 0)

    def test_a_retry_takes_a_failure_back(self) -> None:
        failed = ev.FailShape(1, Reason.FAULT, "it crashed", "g1-1", True)
        view = fed((5.0, failed), (6.0, ev.RetryAsked((1,))), (6.0, ev.Split("g1", (("g1a", (1, 2)),), "asked")))
        s = shown(view, 7.0)
        assert (s.failed, s.nodes[0].failed) == (0, 0)
        assert (view.work.groups["g1"].left, view.work.groups["g1a"].left) == (0, 2)

    def test_all_slots_in_quarantine_are_the_node_s_state_and_say_why(self) -> None:
        shut = [(6.0, ev.Quarantine("n", slot, "three faults", 65.0)) for slot in "01"]
        view = fed((5.0, ev.AttemptEnded("g1-1", Reason.FAULT, 1, "", 1.0)), *shut)
        (node,) = shown(view, 9.0).nodes
        assert (node.state, node.detail) == ("quarantined", "three faults")

    def test_a_lease_that_ended_is_gone_and_says_why(self) -> None:
        view = fed(
            (4.5, ev.NodeExpected("m", ("0",), "h1", ("3",), "17_3", "mi355")),
            (5.0, ev.LeaseEnded("n", "time_limit", "TIMEOUT")),
            (6.0, ev.LeaseEnded("m", "released", "")),
        )
        a = view.work.attempts["g1-1"]
        assert (a.kind, a.outcome, a.end) == ("cancelled", "lease_ended", 5.0)
        by_name = {n.name: n for n in shown(view, 9.0).nodes}
        assert (by_name["n"].state, by_name["n"].detail) == ("ended", "the lease n ended (time limit: TIMEOUT)")
        assert by_name["m"].detail == "the lease m ended (released)"
        m = view.places.nodes["m"]
        assert (m.host, m.gpus, m.lease, m.pool) == ("h1", {"0": "3"}, "17_3", "mi355")
        assert [(s.kind, s.end) for s in view.places.spans if s.start >= 5.0] == [("ended", None), ("released", None)]
        found = ev.ConvictCandidates(1, (("k",),), (("n", "0"), ("m", "0"), ("m", "0")))
        assert sentence(found, spot=view.places.spot).startswith(
            "1 candidate of shape 1 faulted on n slot 0 and h1 GPU 3,"
        )
        shut = sentence(ev.Quarantine("m", "0", "why", 0.0), spot=view.places.spot)
        assert shut.startswith("m slot 0 (h1 GPU 3) quarantined until")
        assert fed((5.0, ev.LeaseEnded("n", "node_failure", "", True))).work.attempts["g1-1"].kind == "lost"

    @pytest.mark.parametrize("back", [ev.AttemptStarted("g1-1", "n", "0"), ev.ShapeStarted("g1-1", 2)])
    def test_what_a_lost_node_had_is_lost_until_it_is_heard_of(self, back: ev.Record) -> None:
        view = fed((5.0, ev.NodeLost("n", "does not answer")))
        (node,) = shown(view, 6.0).nodes
        assert (node.state, node.detail, node.running) == ("unreachable", "does not answer", 0)
        for t, record in ((7.0, ev.NodeJoined("n", ("0", "1"))), (8.0, back)):
            view.feed(t, record)
        (node,) = shown(view, 9.0).nodes
        assert (node.state, node.running, node.slots[0].attempt) == ("busy", 1, "g1-1")
        assert len(view.places.lanes["n", "0"]) == 1

    @pytest.mark.parametrize(
        ("kept", "driven", "state"),
        [("running", True, "running"), ("running", False, "interrupted"), ("preparing", False, "interrupted"),
         ("finished", False, "finished"), ("planned", False, "planned")],
    )  # fmt: skip
    def test_a_dead_controller_means_interrupted(self, kept: str, driven: bool, state: str) -> None:
        assert state_now(kept, driven=driven) == state


class TestTime:
    def test_the_hours_before_a_retry_are_not_the_run_s(self) -> None:
        view = fed((31.0, ev.ShapeTuned("g1-1", 1)))
        later = ((8 * 3600.0, ev.Resumed(2)), (8 * 3600.0, ev.RetryAsked((1,))), (8 * 3600.0 + 20.0, ev.StopAsked()))
        for t, record in later:
            view.feed(t, record)
        assert view.sessions.worked_s(8 * 3600.0 + 60.0) == 30.0 + 60.0
        words = view.sessions.words(8 * 3600.0 + 60.0)
        assert words.startswith("1 min 30 s (over 2 sessions from ")

    def test_one_session_needs_no_words(self) -> None:
        assert fed().sessions.words(66.0) == "1 min 05 s"
        assert RunView().sessions.words(66.0) == ""

    def test_the_rate_is_of_this_session(self) -> None:
        view = fed(*((float(t), ev.ShapeTuned("g1-1", i)) for t, i in ((10, 1), (20, 2))))
        assert shown(view, 24.0).rate_per_min == pytest.approx(2 * 60 / 20.0)
        view.feed(90_000.0, ev.Resumed(2))
        assert shown(view, 90_010.0).rate_per_min is None

    def test_the_rate_of_more_shapes_than_are_remembered(self) -> None:
        view = fed((1.0, ev.ShapeTuned("g1-1", 1)))
        view.work.tuned_at.extend(10.0 + i / 100 for i in range(10_000))  # 100 a second
        assert shown(view, 110.0).rate_per_min == pytest.approx(6000.0, rel=0.01)


class TestNotes:
    def test_a_failed_canary_is_told_once(self) -> None:
        view = fed()
        notes = Notes(view, ABOUT.named)
        for record in (
            ev.CanaryFailed("n", "0", "wrong answer"),
            ev.Quarantine("n", "0", "the canary failed: wrong answer", 65.0),
        ):
            view.feed(5.0, record)
            notes.feed(record)
        ((text, bad),) = notes.take()
        assert text.startswith("n slot 0 quarantined until ")
        assert text.endswith("the canary failed: wrong answer")
        assert bad
        assert notes.take() == []

    def test_a_failed_shape_is_left_to_the_report_at_the_end(self) -> None:
        view = fed()
        notes = Notes(view, ABOUT.named)
        notes.feed(ev.FailShape(1, Reason.UNSUPPORTED, "no candidates", None, True))
        assert notes.take() == []

    def test_an_attempt_that_ended_badly_is_told_with_its_place(self) -> None:
        view = fed()
        notes = Notes(view, ABOUT.named)
        for record in (
            ev.AttemptEnded("g1-1", Reason.FAULT, 1, "signal 11", 2.0),
            ev.AttemptEnded("g2-1", Reason.DONE, None, "", 2.0),
        ):
            view.feed(5.0, record)
            notes.feed(record)
        ((text, _),) = notes.take()
        assert text == "attempt g1-1 on n slot 0 ended after 2.0 s: the tuner's process died at s1: signal 11"


@pytest.mark.parametrize("until", [20.0, 90.0, 200.0, None])
def test_the_picture_and_the_ledger_s_tables_agree(tmp_path: Path, until: float | None) -> None:
    """Two folds of one journal, of a run with faults, losses and quarantines."""
    paths = simulated_run(tmp_path, 120, until=until)
    reader = ViewReader()
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        view, counts = reader.update(ledger), ledger.counts()
        assert (view.work.tuned, view.work.failed) == (counts.tuned, counts.failed)
        nodes = {n.name: (n.tuned, n.failed) for n in view.places.nodes.values() if n.tuned or n.failed}
        assert nodes == per_node(ledger)
        running = {a.id: (a.node, a.slot, a.current) for a in ledger.attempts(open_only=True) if a.started_at}
        slots = [s.attempt for n in view.places.nodes.values() for s in n.slots.values() if s.attempt is not None]
        assert {a.id: (a.node, a.slot, a.current) for a in slots} == running
        pending = {s.id: s.group for s in ledger.shapes("pending")}
        assert {s.id: s.group for s in view.work.shapes.values() if s.state == "pending"} == pending
        left = {g.id: g.left for g in view.work.groups.values() if g.left}
        assert left == Counter(pending.values())


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
    view = RunView(Costs(made[1].__getitem__, 0.0, 3.0, spread))
    journal, at = simulator.journal, 0
    for now in range(int(simulator.now)):
        while at < len(journal) and journal[at][0] <= now:
            view.feed(*journal[at])
            at += 1
        left = time_left(view, float(now), driven=True)
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
    view = fed((10.0, ev.ShapeTuned("g1-1", 1)))
    left = time_left(view, 99_999.0, driven=False)
    assert left is not None
    assert left.mid_s == pytest.approx(20.0, rel=0.5)


def test_what_is_left_of_many_groups_is_about_what_a_schedule_of_each_says(monkeypatch: pytest.MonkeyPatch) -> None:
    view, groups = RunView(), 600
    for g in range(groups):
        view.feed(0.0, ev.GroupAdded(f"g{g}", (g,), 10.0))
    view.feed(0.0, ev.NodeJoined("n1", ("0", "1")))
    for g, slot in ((0, "0"), (1, "1")):
        view.feed(1.0, ev.Send(f"g{g}-1", f"g{g}", "n1", slot, g))
        view.feed(1.0, ev.AttemptStarted(f"g{g}-1", "n1", slot))
    view.feed(9.0, ev.ShapeTuned("g0-1", 0))
    view.feed(9.0, ev.AttemptEnded("g0-1", Reason.DONE, None, "", 8.0))
    each = time_left(view, 10.0, driven=True)
    monkeypatch.setattr("orchestrator.run.view.status.MOST_SCHEDULED", 100)
    summed = time_left(view, 10.0, driven=True)
    assert each is not None
    assert summed is not None
    assert summed.mid_s == pytest.approx(each.mid_s, rel=0.02)


def test_nothing_is_left_of_a_settled_run() -> None:
    view = fed(*((5.0, ev.ShapeTuned("g1-1", i)) for i in (1, 2, 3, 4)))
    assert time_left(view, 6.0, driven=True) is None
    assert shown(view, 6.0).eta_s == 0.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [((60, 65, 70), "about 1 min 05 s"), ((10, 100, 1000), "10 s to 17 min 00 s"), ((0, 0, 0), "about 1 s"),
     ((3000, 3333, 3500), "about 56 min 00 s")],
)  # fmt: skip
def test_what_is_left_in_words(seconds: tuple[float, float, float], words: str) -> None:
    assert left_words(*seconds) == words
