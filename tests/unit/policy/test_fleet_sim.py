"""The benchmark of the policy: its workload is fixed, its bound is one, and verdicts are held against the truth."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import fleet_sim
from benchmarks.fleet_sim import Blame, even_split_s
from benchmarks.fleet_workload import Workload, workload
from tests.simulator.plan import Faults
from tests.simulator.simulator import simulate


def lower_bound_s(work: Workload) -> float:
    return fleet_sim.lower_bound_s(work.plan, work.guilty, whole=work.whole)


def few(**faults: object) -> Workload:
    """96 shapes on two nodes, so that something that faults can be seen at two."""
    work = workload("few", 1, faults=False)
    plan = replace(work.plan, nodes={"n01": 8, "n02": 8}, faults=Faults(**faults), slow={("n01", "0"): 1.3})  # type: ignore[arg-type]
    return replace(work, plan=plan, guilty=frozenset(plan.faults.poison))


def test_nothing_ends_before_the_bound_and_nobody_is_accused_where_nothing_is_wrong() -> None:
    work = few()
    result = simulate(work.plan)
    assert lower_bound_s(work) <= result.makespan_s <= 2 * lower_bound_s(work)
    blame = Blame(work, result)
    assert (blame.false_shapes, blame.false_slots, blame.missed, blame.spoiled) == ([], [], [], 0)
    assert even_split_s(work) >= lower_bound_s(work) - 0.1


def test_one_document_with_the_numbers_of_every_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet_sim.main(["--job", "few", "--seed", "3", "--seeds", "2", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [r["seed"] for r in out["runs"]] == [3, 4]
    wanted = ("makespan_over_bound", "speedup_over_even_split", "healthy_untuned")
    assert {*wanted, "false_shape_blame", "false_slot_blame", "missed_blame"} <= out.keys()
    assert out["makespan_over_bound"] >= 1.0
    assert out["guilty_found"] == 1.0
