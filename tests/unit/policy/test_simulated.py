"""The policy against simulated nodes: one kind of trouble at a time, and how long it takes without any."""

from __future__ import annotations

import random
import re

import pytest

from orchestrator import events as ev
from tests.paths import ROOT
from tests.simulator.plan import Faults, Poison, SimGroup, SimPlan, Span
from tests.simulator.simulator import Result, simulate
from tests.support.drawn_plans import draw_groups


def _plan(nodes: int, slots: int, groups: int, faults: Faults | None = None, seed: int = 1, **more: float) -> SimPlan:
    drawn = draw_groups(random.Random(seed), groups)
    return SimPlan({f"n{i + 1}": slots for i in range(nodes)}, drawn, faults or Faults(), seed, **more)  # type: ignore[arg-type]


def _all_tuned_but(result: Result, *guilty: int) -> None:
    assert result.end == "finished"
    assert [s for s, e in result.shapes.items() if e.end != "tuned"] == sorted(guilty)


@pytest.mark.parametrize(("nodes", "slots", "groups"), [(1, 1, 30), (1, 8, 150), (4, 2, 150), (12, 8, 1500)])
def test_makespan_is_near_the_lower_bound(nodes: int, slots: int, groups: int) -> None:
    plan = _plan(nodes, slots, groups)
    result = simulate(plan)
    _all_tuned_but(result)
    assert result.makespan_s <= 1.15 * plan.lower_bound_s()
    assert groups <= len(result.records(ev.AttemptStarted)) <= 1.15 * groups


def test_a_controller_that_dies_repeats_at_most_what_was_in_flight() -> None:
    plan = _plan(2, 2, 40, Faults(controller=(Span(30.0, 80.0), Span(120.0, 121.0))))
    result = simulate(plan)
    _all_tuned_but(result)
    assert len(result.records(ev.Resumed)) == 3
    # the workers went on meanwhile: nothing was started twice
    assert {len(e.attempts) for e in result.shapes.values()} == {1}
    assert result.makespan_s < simulate(_plan(2, 2, 40)).makespan_s + 60.0


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
    text = (ROOT / "benchmarks" / "results" / "scheduling.md").read_text().partition("## An example\n")[2]
    told = re.findall(r"^\| ([0-9.]+) \|", text, re.M)
    assert len(told) == 7
    assert set(told) <= happened
    (failed,) = [(f"{t:.1f}", r.shape) for t, r in result.journal if isinstance(r, ev.FailShape)]
    assert failed == (told[-1], 2)
