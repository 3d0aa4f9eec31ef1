"""The benchmark of the policy: its workload is fixed, its bound is one, and verdicts are held against the truth."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from benchmarks import fleet_sim
from benchmarks.fleet_sim import Blame, even_split_s
from benchmarks.fleet_workload import GROUPS, Workload, workload
from tests.simulator.plan import Faults, Outage, Poison, Sickness, SimGroup, SimLease, SimPlan
from tests.simulator.simulator import simulate
from tests.support.drawn_plans import draw_groups


def lower_bound_s(work: Workload) -> float:
    return fleet_sim.lower_bound_s(work.plan, work.guilty, whole=work.whole)


def few(**faults: object) -> Workload:
    """96 shapes on two nodes, so that something that faults can be seen at two."""
    work = workload("few", 1, faults=False)
    plan = replace(work.plan, nodes={"n01": 8, "n02": 8}, faults=Faults(**faults), slow={("n01", "0"): 1.3})  # type: ignore[arg-type]
    return replace(work, plan=plan, guilty=frozenset(plan.faults.poison))


def test_the_workload_is_the_same_shapes_for_every_seed_in_two_thousand_groups() -> None:
    one, other = workload("groups", 1, faults=False), workload("groups", 2, faults=True)
    assert one.seconds == other.seconds
    assert len(one.plan.groups) == len(other.plan.groups) == GROUPS
    assert sorted(i for g in one.plan.groups for i in g.shapes) == sorted(one.seconds)
    assert workload("tables", 1, faults=False).seconds == one.seconds
    assert workload("groups", 2, faults=True).plan == other.plan
    assert len(other.guilty) > 0.03 * len(one.seconds)


def test_the_night_has_every_fault_of_the_workload() -> None:
    plan = workload("groups", 3, faults=True).plan
    faults = plan.faults
    groups = {s: g.id for g in plan.groups for s in g.shapes}
    certain = [s for s, p in faults.poison.items() if p.chance == 1.0]
    assert len(certain) == 2 + round(0.03 * len(groups))
    assert len({groups[s] for s in certain[:2]}) == 1
    assert sorted(p.chance for p in faults.poison.values())[:6] == [0.3] * 5 + [1.0]
    assert len(faults.wedges) == 1
    whole = [n for n in plan.nodes if all((n, str(s)) in faults.sick for s in range(plan.nodes[n]))]
    assert (len(whole), len(faults.sick)) == (1, 11)
    assert sorted((x.only is not None, x.salvage) for p, x in faults.sick.items() if p[0] not in whole) == [
        (False, False),
        (False, True),
        (True, False),
    ]
    assert sorted((o.kind, o.seconds is None, o.at == 0.0) for o in faults.outages) == [
        ("link", False, False),
        ("link", False, False),
        ("power", False, True),
        ("power", True, False),
    ]
    assert len(plan.leases) == len(faults.controller) == 1
    struck = {n for n, _ in faults.sick} | {o.node for o in faults.outages} | set(plan.leases)
    assert len(struck) == 9, "each on a node of its own"


def test_nothing_ends_before_the_bound_and_nobody_is_accused_where_nothing_is_wrong() -> None:
    work = few()
    result = simulate(work.plan)
    assert lower_bound_s(work) <= result.makespan_s <= 2 * lower_bound_s(work)
    blame = Blame(work, result)
    assert (blame.false_shapes, blame.false_slots, blame.missed, blame.spoiled) == ([], [], [], 0)
    assert even_split_s(work) >= lower_bound_s(work) - 0.1


def test_a_slot_that_is_away_or_sick_makes_the_bound_higher() -> None:
    sick = {("n01", str(s)): Sickness(since=0.0) for s in range(8)}
    assert lower_bound_s(few(sick=sick)) > 1.6 * lower_bound_s(few())
    assert lower_bound_s(few(drains={"n02": 50.0})) > 1.2 * lower_bound_s(few())


def test_the_guilty_who_are_found_are_no_miss_and_the_innocent_are_tuned() -> None:
    work = few(poison={5: Poison()}, sick={("n02", "3"): Sickness()})
    result = simulate(work.plan)
    blame = Blame(work, result)
    assert result.of("failed") == [5]
    assert (blame.false_shapes, blame.false_slots, blame.missed) == ([], [], [])
    innocent = replace(work, guilty=frozenset())
    assert Blame(innocent, result).false_shapes == [5], "were it innocent, its failure would be a false one"


def test_one_document_with_the_numbers_of_every_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet_sim.main(["--job", "few", "--seed", "3", "--seeds", "2", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [r["seed"] for r in out["runs"]] == [3, 4]
    wanted = ("makespan_over_bound", "speedup_over_even_split", "healthy_untuned")
    assert {*wanted, "false_shape_blame", "false_slot_blame", "missed_blame"} <= out.keys()
    assert out["makespan_over_bound"] >= 1.0
    assert out["guilty_found"] == 1.0


FEW = tuple(SimGroup(f"g{i:02d}", (2 * i + 1, 2 * i + 2), (30.0, 30.0), 60.0) for i in range(8))
PLAN = SimPlan({"n1": 2, "n2": 2}, FEW, setup_s=5.0, cold_s=20.0, start_s=(1.0, 1.0))


def test_the_bound_counts_start_set_up_speed_and_absence() -> None:
    start = 1.0 + 1.0 + 20.0  # the node, its canary, the first process
    assert fleet_sim.lower_bound_s(PLAN) == pytest.approx(start + 8 * 60.0 / 4, abs=0.02)
    slow = replace(PLAN, slow={("n1", "0"): 2.0})
    assert fleet_sim.lower_bound_s(slow) == pytest.approx(start + 8 * 60.0 / 3.5, abs=0.02)
    half = replace(PLAN, faults=Faults(outages=(Outage("n2", 0.0, None),)))
    assert fleet_sim.lower_bound_s(half) == pytest.approx(start + 8 * 60.0 / 2, abs=0.02)
    later = replace(PLAN, leases={"n2": SimLease("h", ("0", "1"), since=60.0)})
    assert fleet_sim.lower_bound_s(later) == pytest.approx(start + (8 * 60.0 + 2 * 60.0) / 4, abs=0.02)
    sick = replace(PLAN, faults=Faults(sick={("n1", "0"): Sickness(since=0.0)}))
    assert fleet_sim.lower_bound_s(sick) == pytest.approx(start + 8 * 60.0 / 3, abs=0.02)
    link = replace(PLAN, faults=Faults(outages=(Outage("n2", 0.0, None, "link"),)))
    assert fleet_sim.lower_bound_s(link) == fleet_sim.lower_bound_s(PLAN)


def test_the_bound_is_at_least_the_longest_shape_or_group() -> None:
    long = replace(PLAN, groups=(*FEW, SimGroup("long", (98, 99), (200.0, 150.0), 350.0)))
    assert fleet_sim.lower_bound_s(long, whole=True) == pytest.approx(22.0 + 350.0, abs=0.02)
    assert fleet_sim.lower_bound_s(long) == pytest.approx(22.0 + (8 * 60.0 + 350.0) / 4, abs=0.02)
    assert fleet_sim.lower_bound_s(long, left_out={98, 99}) == fleet_sim.lower_bound_s(PLAN)


def test_nothing_ends_before_the_bound() -> None:
    for seed in range(10):
        groups = draw_groups(random.Random(seed), 60)
        plan = SimPlan({"n1": 3, "n2": 2}, groups, seed=seed, setup_s=3.0, cold_s=9.0, slow={("n2", "1"): 1.5})
        assert simulate(plan).makespan_s >= fleet_sim.lower_bound_s(plan)
