"""Faults of a simulation from YAML: every mistake is named with its entry, what is left open is drawn by the seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.reasons import Reason
from orchestrator.simulation.faults_file import read_faults, with_faults
from orchestrator.simulation.plan import Faults, Outage, Poison, SimGroup, SimPlan, Span
from tests.paths import ROOT

PLAN = SimPlan(
    {"n1": 2, "n2": 2},
    tuple(SimGroup(f"g{i}", (3 * i + 1, 3 * i + 2, 3 * i + 3), (10.0,) * 3, 30.0) for i in range(20)),
)


def drawn(tmp_path: Path, text: str, plan: SimPlan = PLAN, gone: tuple[str, ...] = ()) -> SimPlan:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    return with_faults(plan, read_faults(path), gone)


def test_what_is_named_is_taken_as_it_is(tmp_path: Path) -> None:
    plan = drawn(
        tmp_path,
        """
        - {kind: poison, shapes: [7], reason: hang, chance: 0.5}
        - {kind: poison, shapes: [8], reason: no_candidate}
        - {kind: wedge, shapes: [9], seconds: 100}
        - {kind: kills_worker, shapes: [10]}
        - {kind: kills_node, shapes: [11], seconds: 60}
        - {kind: sick, node: n2, slot: "1", at: 30, seconds: 50, canary: false}
        - {kind: lost, node: n1, at: 20}
        - {kind: link, node: n1, at: 40, seconds: 5}
        - {kind: drain, node: n2, at: 90}
        - {kind: controller, at: 50, seconds: 10}
        """,
    )
    faults = plan.faults
    assert faults.poison == {7: Poison(Reason.HANG, 0.5)}
    assert faults.refused == {8: Reason.NO_CANDIDATE}
    assert faults.wedges == {9: 100.0}
    assert faults.worker_killers == frozenset({10})
    assert faults.node_killers == {11: 60.0}
    sick = faults.sick["n2", "1"]
    assert (sick.canary, sick.since, sick.until, sick.only) == (False, 30.0, 80.0, None)
    assert faults.outages == (Outage("n1", 20.0, None), Outage("n1", 40.0, 5.0, "link"))
    assert (faults.drains, faults.controller) == ({"n2": 90.0}, (Span(50.0, 60.0),))


def test_what_is_open_is_drawn_by_the_seed_and_nothing_twice(tmp_path: Path) -> None:
    text = """
        - {kind: poison, count: 2, one_group: true}
        - {kind: poison, share: 0.1, chance: 0.3}
        - {kind: wedge}
        - {kind: sick, largest: 0.1}
        - {kind: sick, slot: all, at: [10%, 50%]}
        """
    plan = drawn(tmp_path, text)
    pair = [s for s, p in plan.faults.poison.items() if p.chance == 1.0]
    assert len({(s - 1) // 3 for s in pair}) == 1
    assert len(pair) == 2
    assert len(plan.faults.poison) == 2 + 6
    assert not plan.faults.wedges.keys() & plan.faults.poison.keys()
    (large,) = [x for x in plan.faults.sick.values() if x.only]
    assert len(large.only or ()) == 6
    whole = [x for x in plan.faults.sick.values() if x.only is None]
    assert len(whole) == 2
    assert 0.1 * plan.lower_bound_s() <= whole[0].since <= 0.5 * plan.lower_bound_s()
    assert drawn(tmp_path, text) == plan
    assert drawn(tmp_path, text, replace(PLAN, seed=1)).faults != plan.faults


def test_faults_come_beside_those_of_the_plan_and_a_lease_ends(tmp_path: Path) -> None:
    own = replace(PLAN, faults=Faults(poison={1: Poison()}, worker_killers=frozenset({2})))
    text = "[{kind: poison, shapes: [7]}, {kind: kills_worker, shapes: [8]}, {kind: lease_ends, node: n2, at: 60%}]"
    plan = drawn(tmp_path, text, own)
    assert set(plan.faults.poison) == {1, 7}
    assert plan.faults.worker_killers == frozenset({2, 8})
    lease = plan.leases["n2"]
    assert (lease.host, lease.gpus) == ("n2", ("0", "1"))
    assert lease.until == pytest.approx(0.6 * own.lower_bound_s())


def test_faults_of_a_node_that_is_left_out_are_left_out(tmp_path: Path) -> None:
    text = "[{kind: lost, node: n3, at: 5}, {kind: lost, node: n1, at: 5}]"
    assert drawn(tmp_path, text, gone=("n3",)).faults.outages == (Outage("n1", 5.0, None),)


def test_more_entries_than_nodes_share_them(tmp_path: Path) -> None:
    assert len(drawn(tmp_path, "[" + "{kind: lost, at: 5}, " * 5 + "]").faults.outages) == 5


def test_the_example_fits_two_nodes() -> None:
    assert with_faults(PLAN, read_faults(ROOT / "examples" / "faults.yaml")).faults.sick


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("- {kind: poisn}", "f.yaml: entry 1: kind: Input should be 'poison', "),
        (
            "[{kind: lost}, {kind: lost, nod: n1}]",
            "f.yaml: entry 2: nod: unknown key; did you mean node? (legal: kind, ",
        ),
        ("- {kind: poison, chance: 2}", "f.yaml: entry 1: chance: Input should be less than or equal to 1 (it is '2')"),
        ("- {kind: lost, at: soon}", "f.yaml: entry 1: at: "),
        ("kind: lost", "f.yaml: Input should be a valid list"),
        ("- {kind: lost", "f.yaml:1: is no valid YAML"),
        (
            "- {kind: poison, shapes: [61]}",
            "entry 1 of the faults (poison): there is no shape 61 (they count from 1 to 60)",
        ),
        ("- {kind: lost, node: n4}", "entry 1 of the faults (lost): there is no node 'n4'; did you mean "),
        ("- {kind: sick, node: n1, slot: '7'}", "entry 1 of the faults (sick): node n1 has no slot '7' (slots: 0, 1)"),
        ("- {kind: poison, count: 99}", "entry 1 of the faults (poison): needs 99 shapes, and 60 are left: take fewer"),
    ],
)
def test_a_mistake_is_named_with_its_entry(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(InputError) as caught:
        drawn(tmp_path, text)
    assert fault in str(caught.value)
