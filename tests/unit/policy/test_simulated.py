"""The policy against simulated nodes: one kind of trouble at a time, and how long it takes without any."""

from __future__ import annotations

import random
import re

import pytest

from orchestrator import events as ev
from orchestrator.reasons import Reason
from tests.paths import ROOT
from tests.simulator.plan import Faults, Outage, Poison, Sickness, SimGroup, SimPlan, Span
from tests.simulator.simulator import Result, simulate
from tests.support.drawn_plans import draw_groups


def _plan(nodes: int, slots: int, groups: int, faults: Faults | None = None, seed: int = 1, **more: float) -> SimPlan:
    drawn = draw_groups(random.Random(seed), groups)
    return SimPlan({f"n{i + 1}": slots for i in range(nodes)}, drawn, faults or Faults(), seed, **more)  # type: ignore[arg-type]


def _all_tuned_but(result: Result, *guilty: int) -> None:
    assert result.end == "finished"
    assert [s for s, e in result.shapes.items() if e.end != "tuned"] == sorted(guilty)


def _quarantined(result: Result) -> set[tuple[str, str]]:
    return {(r.node, r.slot) for _, r in result.journal if isinstance(r, ev.Quarantine)}


def _kills(result: Result, shape: int) -> int:
    return sum(d.why == f"shape {shape}" for d in result.deaths)


@pytest.mark.parametrize(("nodes", "slots", "groups"), [(1, 1, 30), (1, 8, 150), (4, 2, 150), (12, 8, 1500)])
def test_makespan_is_near_the_lower_bound(nodes: int, slots: int, groups: int) -> None:
    plan = _plan(nodes, slots, groups)
    result = simulate(plan)
    _all_tuned_but(result)
    assert result.makespan_s <= 1.15 * plan.lower_bound_s()
    assert result.utilisation > 0.85
    assert groups <= len(result.records(ev.AttemptStarted)) <= 1.15 * groups


def test_bad_estimates_and_late_nodes_are_made_up_for() -> None:
    groups = draw_groups(random.Random(3), 300, error=0.9)
    plan = SimPlan({f"n{i}": 4 for i in range(5)}, groups, start_s=(1.0, 40.0))
    result = simulate(plan)
    _all_tuned_but(result)
    assert result.makespan_s <= 1.15 * plan.lower_bound_s() + 40.0
    # nothing goes to and fro: far fewer attempts are sent than twice the groups
    assert len(result.records(ev.Send)) < 1.3 * len(groups)


def test_the_tail_is_shared() -> None:
    """One node gets everything before the others are there."""
    groups = tuple(SimGroup(f"g{i}", (i,), (30.0,), 1.0) for i in range(1, 61))
    plan = SimPlan({"n1": 1, "n2": 1, "n3": 1}, groups, start_s=(1.0, 20.0))
    result = simulate(plan)
    _all_tuned_but(result)
    assert result.makespan_s < 1.1 * plan.lower_bound_s()


@pytest.mark.parametrize("unknown", [0.0, 1.0])
def test_poison_is_convicted_on_two_nodes_and_nobody_else(unknown: float) -> None:
    poison = {5: Poison(), 17: Poison(Reason.HANG), 18: Poison(Reason.OOM)}
    result = simulate(_plan(3, 2, 20, Faults(poison=poison, unknown=unknown)))
    _all_tuned_but(result, 5, 17, 18)
    for shape, p in poison.items():
        end = result.shapes[shape]
        assert (end.reason, end.confirmed) == (p.reason, True)
        nodes = {word for word in end.detail.replace(",", " ").split() if word.startswith("n")}
        assert len(nodes) == 2


def test_halving_finds_the_one_in_a_large_group() -> None:
    group = SimGroup("g1", tuple(range(1, 65)), (1.0,) * 64, 64.0)
    result = simulate(SimPlan({"n1": 1, "n2": 1}, (group,), Faults(poison={37: Poison()}, unknown=1.0)))
    _all_tuned_but(result, 37)
    ended = [r for _, r in result.journal if isinstance(r, ev.AttemptEnded) and r.outcome is Reason.FAULT]
    assert len(ended) <= 8  # 64 -> 32 -> 16 -> 8 -> 4 -> 2 -> 1, and once more elsewhere


def test_one_slot_cannot_confirm() -> None:
    result = simulate(_plan(1, 1, 5, Faults(poison={2: Poison()})))
    _all_tuned_but(result, 2)
    assert not result.shapes[2].confirmed


def test_an_intermittent_shape_is_tuned_in_the_end_or_convicted() -> None:
    ends = {simulate(_plan(2, 2, 5, Faults(poison={2: Poison(chance=0.5)}), seed=s)).shapes[2].end for s in range(12)}
    assert ends == {"tuned", "failed"}


@pytest.mark.parametrize("canary", [True, False])
def test_a_sick_slot_is_shut_and_no_shape_blamed(canary: bool) -> None:
    result = simulate(_plan(3, 2, 60, Faults(sick={("n2", "1"): Sickness(canary=canary)})))
    _all_tuned_but(result)
    assert _quarantined(result) == {("n2", "1")}


def test_a_sick_slot_that_recovers_is_taken_back() -> None:
    result = simulate(_plan(2, 1, 60, Faults(sick={("n1", "0"): Sickness(canary=False, until=100.0)})))
    _all_tuned_but(result)
    assert any(isinstance(r, ev.AskCanary) for _, r in result.journal)
    assert any(isinstance(r, ev.AttemptStarted) and r.node == "n1" for _, r in result.journal)


def test_the_only_slot_sick_leaves_the_shapes_pending() -> None:
    result = simulate(_plan(1, 1, 5, Faults(sick={("n1", "0"): Sickness(canary=False)})))
    assert result.end == "stuck"
    assert result.stuck == "n1 slot 0 is quarantined (the canary failed: wrong answer)"
    assert set(result.of("pending")) == set(result.shapes)
    assert len(result.records(ev.CanaryFailed)) == 3


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_shape_that_kills_its_worker_falls_after_three(nodes: int) -> None:
    result = simulate(_plan(nodes, 2, 15, Faults(worker_killers=frozenset({7}))))
    _all_tuned_but(result, 7)
    assert result.shapes[7].reason is Reason.KILLS_NODES
    assert len(result.shapes[7].attempts) == 3


@pytest.mark.parametrize("nodes", [3, 4, 8])
@pytest.mark.parametrize("kill_s", [0.01, 1.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_shape_that_kills_its_node_takes_three_with_it_and_no_more(nodes: int, kill_s: float, seed: int) -> None:
    """For good; with three nodes there are just enough to tune all else first."""
    result = simulate(_plan(nodes, 2, 20, Faults(node_killers={7: None}, kill_s=kill_s), seed=seed))
    _all_tuned_but(result, 7)
    assert result.shapes[7].reason is Reason.KILLS_NODES
    assert result.shapes[7].confirmed
    assert _kills(result, 7) == 3


def test_two_killers_on_nodes_that_come_back() -> None:
    result = simulate(_plan(4, 2, 20, Faults(node_killers={7: 120.0, 30: 120.0}, resumes=3)))
    _all_tuned_but(result, 7, 30)
    assert _kills(result, 7) <= 3
    assert _kills(result, 30) <= 3


def test_a_node_that_dies_for_good() -> None:
    result = simulate(_plan(3, 2, 40, Faults(outages=(Outage("n2", 40.0, None),))))
    _all_tuned_but(result)


def test_work_done_behind_a_broken_link_counts() -> None:
    result = simulate(_plan(2, 2, 40, Faults(outages=(Outage("n1", 20.0, 150.0, "link"),))))
    _all_tuned_but(result)
    lost = next(t for t, r in result.journal if isinstance(r, ev.NodeLost))
    sent_before = {r.attempt for t, r in result.journal if isinstance(r, ev.Send) and t < lost}
    late = [
        r.shape
        for t, r in result.journal
        if isinstance(r, ev.ShapeTuned) and t > lost and r.attempt in sent_before and r.attempt.startswith("g")
    ]
    assert len(late) > 3


def test_a_link_that_breaks_for_a_minute_costs_the_minute() -> None:
    calm = simulate(_plan(2, 2, 40))
    result = simulate(_plan(2, 2, 40, Faults(outages=(Outage("n1", 20.0, 60.0, "link"),))))
    _all_tuned_but(result)
    assert result.records(ev.NodeLost) == []
    assert result.makespan_s < calm.makespan_s + 60.0


def test_a_full_disk_sends_work_elsewhere_and_uses_no_tries() -> None:
    result = simulate(_plan(2, 2, 40, Faults(disk_full={"n1": Span(20.0, 200.0)})))
    _all_tuned_but(result)
    assert {node for node, _ in _quarantined(result)} == {"n1"}


def test_a_slot_that_dies_and_a_node_that_drains() -> None:
    result = simulate(_plan(3, 2, 60, Faults(dead_slots={("n1", "0"): 30.0}, drains={"n2": 50.0})))
    _all_tuned_but(result)
    after = [r for t, r in result.journal if isinstance(r, ev.AttemptStarted) and r.node == "n2" and t > 51.0]
    assert after == []


def test_a_controller_that_dies_repeats_at_most_what_was_in_flight() -> None:
    plan = _plan(2, 2, 40, Faults(controller=(Span(30.0, 80.0), Span(120.0, 121.0))))
    result = simulate(plan)
    _all_tuned_but(result)
    assert len(result.records(ev.Resumed)) == 3
    # the workers went on meanwhile: nothing was started twice
    assert {len(e.attempts) for e in result.shapes.values()} == {1}
    assert result.makespan_s < simulate(_plan(2, 2, 40)).makespan_s + 60.0


def test_stop_ends_with_everything_pending_that_had_not_started() -> None:
    faults = Faults(requests=((30.0, ev.StopAsked()),), controller=(Span(200.0, 300.0),))
    result = simulate(_plan(2, 2, 40, faults))
    _all_tuned_but(result)
    quiet = [r for t, r in result.journal if isinstance(r, ev.AttemptStarted) and 31.0 < t < 300.0]
    assert quiet == []


def test_failed_shapes_are_tried_again_on_request() -> None:
    shapes = (5, 17)
    faults = Faults(poison={5: Poison(), 17: Poison()}, requests=((280.0, ev.RetryAsked(shapes)),))
    result = simulate(_plan(3, 1, 30, faults))
    _all_tuned_but(result, 5, 17)
    failed = [r.shape for _, r in result.journal if isinstance(r, ev.FailShape)]
    assert sorted(failed) == [5, 5, 17, 17]


def test_verdicts_silence_rejections_and_cancellations() -> None:
    faults = Faults(refused={3: Reason.UNSUPPORTED}, silent={4: 1, 5: 99}, rejects=0.05, cancels=0.02)
    result = simulate(_plan(2, 2, 30, faults))
    _all_tuned_but(result, 3, 5)
    assert result.shapes[3].reason is Reason.UNSUPPORTED
    assert result.shapes[5].reason is Reason.NOT_DELIVERED


def test_the_same_plan_runs_the_same() -> None:
    plan = _plan(3, 2, 30, Faults(poison={5: Poison(chance=0.5)}, outages=(Outage("n1", 20.0, 100.0),), unknown=0.5))
    assert simulate(plan).journal == simulate(plan).journal


def test_the_story_in_the_docs_is_what_happens() -> None:
    groups = (
        SimGroup("g0001", (1, 2, 3), (20.0, 20.0, 20.0), 60.0),
        SimGroup("g0002", (4, 5), (20.0, 20.0), 40.0),
        SimGroup("g0003", (6,), (30.0,), 30.0),
        SimGroup("g0004", (7,), (10.0,), 10.0),
    )
    plan = SimPlan({"n1": 1, "n2": 1}, groups, Faults(poison={2: Poison()}), start_s=(1.0, 1.0))
    result = simulate(plan)
    _all_tuned_but(result, 2)
    happened = {f"{t:.1f}" for t, _ in result.journal}
    text = (ROOT / "docs" / "explanation" / "scheduling.md").read_text()
    told = re.findall(r"^\| ([0-9.]+) \|", text, re.M)
    assert len(told) == 7
    assert set(told) <= happened
    (failed,) = [(f"{t:.1f}", r.shape) for t, r in result.journal if isinstance(r, ev.FailShape)]
    assert failed == (told[-1], 2)
