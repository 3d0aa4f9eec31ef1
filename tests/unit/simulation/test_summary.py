"""Numbers of a simulated run: where the slots' time went, and a bound that counts what a schedule cannot change."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from orchestrator.simulation.plan import Faults, Outage, Poison, Sickness, SimGroup, SimLease, SimPlan
from orchestrator.simulation.simulator import simulate
from orchestrator.simulation.summary import lower_bound_s, summarise
from tests.support.drawn_plans import draw_groups

GROUPS = tuple(SimGroup(f"g{i:02d}", (2 * i + 1, 2 * i + 2), (30.0, 30.0), 60.0) for i in range(8))
PLAN = SimPlan({"n1": 2, "n2": 2}, GROUPS, setup_s=5.0, cold_s=20.0, start_s=(1.0, 1.0))


def test_the_bound_counts_start_set_up_speed_and_absence() -> None:
    start = 1.0 + 1.0 + 20.0  # the node, its canary, the first process
    assert lower_bound_s(PLAN) == pytest.approx(start + 8 * 60.0 / 4, abs=0.02)
    slow = replace(PLAN, slow={("n1", "0"): 2.0})
    assert lower_bound_s(slow) == pytest.approx(start + 8 * 60.0 / 3.5, abs=0.02)
    half = replace(PLAN, faults=Faults(outages=(Outage("n2", 0.0, None),)))
    assert lower_bound_s(half) == pytest.approx(start + 8 * 60.0 / 2, abs=0.02)
    later = replace(PLAN, leases={"n2": SimLease("h", ("0", "1"), since=60.0)})
    assert lower_bound_s(later) == pytest.approx(start + (8 * 60.0 + 2 * 60.0) / 4, abs=0.02)
    sick = replace(PLAN, faults=Faults(sick={("n1", "0"): Sickness(since=0.0)}))
    assert lower_bound_s(sick) == pytest.approx(start + 8 * 60.0 / 3, abs=0.02)
    link = replace(PLAN, faults=Faults(outages=(Outage("n2", 0.0, None, "link"),)))
    assert lower_bound_s(link) == lower_bound_s(PLAN)


def test_the_bound_is_at_least_the_longest_shape_or_group() -> None:
    long = replace(PLAN, groups=(*GROUPS, SimGroup("long", (98, 99), (200.0, 150.0), 350.0)))
    assert lower_bound_s(long, whole=True) == pytest.approx(22.0 + 350.0, abs=0.02)
    assert lower_bound_s(long) == pytest.approx(22.0 + (8 * 60.0 + 350.0) / 4, abs=0.02)
    assert lower_bound_s(long, left_out={98, 99}) == lower_bound_s(PLAN)


def test_nothing_ends_before_the_bound() -> None:
    for seed in range(10):
        groups = draw_groups(random.Random(seed), 60)
        plan = SimPlan({"n1": 3, "n2": 2}, groups, seed=seed, setup_s=3.0, cold_s=9.0, slow={("n2", "1"): 1.5})
        assert simulate(plan).makespan_s >= lower_bound_s(plan)


def test_the_shares_of_a_run_without_faults_add_up() -> None:
    found = summarise(PLAN, simulate(PLAN))
    assert (found.tuned, found.failed, found.pending, found.groups) == (16, 0, 0, 8)
    assert (found.end, found.repeated, found.again, found.quarantined) == ("finished", 0.0, 0, ())
    slots_s = 4 * (found.makespan_s - 2.0)
    assert found.setup == pytest.approx((4 * 20.0 + 4 * 5.0) / slots_s, abs=1e-6)
    assert found.idle == pytest.approx(1.0 - (100.0 + 480.0) / slots_s, abs=1e-6)
    assert found.over_bound == pytest.approx(found.makespan_s / found.bound_s)


def test_work_that_settles_nothing_is_repeated_work() -> None:
    plan = replace(PLAN, faults=Faults(poison={1: Poison()}))
    result = simulate(plan)
    found = summarise(plan, result)
    assert (found.tuned, found.failed) == (15, 1)
    assert found.again == 1
    vain = result.worked_s - result.setup_s - result.measured_s
    assert vain == pytest.approx(2 * 15.0), "it faults half-way, on two nodes"
    assert found.bound_s < lower_bound_s(plan)


def test_time_on_a_node_that_is_lost_counts_up_to_its_loss() -> None:
    plan = replace(PLAN, faults=Faults(outages=(Outage("n2", 40.0, None),)))
    result = simulate(plan)
    assert len(result.of("tuned")) == 16
    assert result.worked_s - result.setup_s - result.measured_s == pytest.approx(2 * (40.0 - 2.05 - 20.0), abs=0.5)


def test_a_batch_sets_up_a_process_again() -> None:
    plan = replace(PLAN, groups=(SimGroup("g", tuple(range(1, 8)), (10.0,) * 7, 70.0),), nodes={"n1": 1})
    assert simulate(plan).setup_s == 20.0
    assert simulate(replace(plan, batch=3)).setup_s == 20.0 + 2 * 5.0
    assert simulate(replace(plan, batch=3)).makespan_s == pytest.approx(simulate(plan).makespan_s + 10.0)
