"""Jobs under settings: other nodes, slots, batches; groups are cut anew where the number of slots changes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from orchestrator.errors import InputError
from orchestrator.planning import CostModel
from orchestrator.shapes import Shape
from orchestrator.simulation.job import Job, Setting, plan_of
from orchestrator.simulation.plan import Faults, Outage, Sickness, SimGroup, SimLease, SimPlan
from worker.families import FAMILIES

FAMILY = FAMILIES["a16w16"]
DTYPES = ("False", "torch.bfloat16", "torch.bfloat16", "False", "False")
SHAPES = [Shape(8 * n + m + 1, (16 * (m + 1), 128 * (n + 1), 4096, *DTYPES)) for n in range(6) for m in range(8)]
COST = CostModel(10.0, 20.0, 0.0, 0.0, "made up")
LISTED = Job("s.csv", FAMILY, "torch", SHAPES, COST, SimPlan({}, (), setup_s=10.0))
GROUPS = tuple(SimGroup(f"g{n}", tuple(range(8 * n + 1, 8 * n + 9)), (25.0,) * 8, 170.0) for n in range(6))
RUN = replace(
    LISTED,
    plan=SimPlan({"a": 2, "b": 2, "c": 1}, GROUPS, setup_s=10.0),
    seconds=dict.fromkeys(range(1, 49), 25.0),
    gaps={2: 5.0},
)


def test_a_list_is_cut_by_the_planner_and_its_kinds_are_off_by_up_to_two() -> None:
    plan = plan_of(LISTED, Setting(nodes=2, slots=4), 1)
    assert plan.nodes == {"n1": 4, "n2": 4}
    assert sorted(s for g in plan.groups for s in g.shapes) == list(range(1, 49))
    factors: dict[int, set[float]] = {}
    for g in plan.groups:
        assert g.estimate_s == pytest.approx(10.0 + 20.0 * len(g.shapes))
        for shape, seconds in zip(g.shapes, g.seconds, strict=True):
            factors.setdefault((shape - 1) // 8, set()).add(round(seconds / 20.0, 6))
    assert all(len(f) == 1 for f in factors.values()), "one factor a kind"
    assert all(0.5 <= x <= 2.0 for f in factors.values() for x in f)
    assert plan_of(LISTED, Setting(nodes=2, slots=4), 1) == plan
    assert plan_of(LISTED, Setting(nodes=2, slots=4), 2).groups != plan.groups


def test_a_run_as_it_was_keeps_its_groups_and_times() -> None:
    plan = plan_of(RUN, Setting(), 3)
    assert plan == replace(RUN.plan, seed=3)


def test_more_nodes_are_added_fewer_are_the_first_and_groups_are_cut_anew() -> None:
    plan = plan_of(RUN, Setting(nodes=5), 1)
    assert plan.nodes == {"a": 2, "b": 2, "c": 1, "n1": 2, "n2": 2}
    assert len(plan.groups) > 6
    assert {s: t for g in plan.groups for s, t in zip(g.shapes, g.seconds, strict=True)} == RUN.seconds
    assert plan_of(RUN, Setting(nodes=1), 1).nodes == {"a": 2}
    assert plan_of(RUN, Setting(slots=4), 1).nodes == {"a": 4, "b": 4, "c": 4}
    assert plan_of(RUN, Setting(without=("b",)), 1).nodes == {"a": 2, "c": 1}
    assert plan_of(RUN, Setting(without=("b",), nodes=3), 1).nodes == {"a": 2, "c": 1, "n1": 2}


def test_what_happened_on_a_node_goes_with_it() -> None:
    faults = Faults(
        sick={("a", "1"): Sickness(), ("b", "0"): Sickness()},
        outages=(Outage("b", 1.0, 5.0), Outage("c", 1.0, 5.0)),
        dead_slots={("a", "1"): 9.0},
        drains={"b": 3.0},
    )
    leases = {"b": SimLease("h", ("0", "1"))}
    job = replace(RUN, plan=replace(RUN.plan, faults=faults, leases=leases))
    left = plan_of(job, Setting(without=("b",)), 1)
    assert (list(left.faults.sick), left.faults.outages, left.leases) == ([("a", "1")], (Outage("c", 1.0, 5.0),), {})
    assert left.faults.drains == {}
    fewer = plan_of(job, Setting(slots=1), 1)
    assert (list(fewer.faults.sick), fewer.faults.dead_slots) == ([("b", "0")], {})


def test_a_batch_leaves_out_the_gaps_of_the_run_and_sets_up_by_itself() -> None:
    plan = plan_of(RUN, Setting(batch=4), 1)
    assert plan.batch == 4
    assert plan.groups[0].seconds == (25.0, 20.0, *[25.0] * 6)


@pytest.mark.parametrize(
    ("job", "setting", "fault"),
    [
        (RUN, Setting(without=("d",)), "--without d: there is no such node (nodes: a, b, c)"),
        (
            LISTED,
            Setting(nodes=2, without=("n1",)),
            "--without n1: there is no such node: a list of shapes has no nodes",
        ),
        (RUN, Setting(without=("a", "b", "c")), "no node is left to simulate: name their number with --nodes"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(job: Job, setting: Setting, fault: str) -> None:
    with pytest.raises(InputError, match=re.escape(fault)):
        plan_of(job, setting, 1)
