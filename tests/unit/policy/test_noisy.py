"""Noisy winners: measured once more on another slot, within a tenth of the run's time; the newer result counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator import events as ev
from orchestrator.reasons import Reason
from tests.simulator.simulator import Simulator
from tests.support.drawn_plans import draw_plan
from tests.support.marks import PLANS
from tests.support.policy_rig import Rig, digest, fails, groups, of, proven_nodes
from tests.unit.policy.test_laws import faults_in_the_books, groups_in_the_books

SHAPE, OTHERS = 1, range(2, 41)


def noisy(rig: Rig, shape: int) -> list[ev.Decision]:
    """The shape's attempt gives a complete result whose winner is noisy, and ends."""
    a = rig.attempt(shape)
    out = rig.start(shape) + rig.do(ev.ShapeTuned(a.id, shape, (ev.NOISE,), (ev.NOISE,)))
    return out + rig.do(ev.AttemptEnded(a.id, Reason.DONE, None, "", 1.0))


def with_noise(*nodes: str) -> tuple[Rig, str]:
    """A rig with room in its tenth; shape 1 has a noisy result. Return the rig and the attempt of the result."""
    rig = proven_nodes(*nodes)
    rig.singles(*OTHERS, cost_s=1.0)
    rig.tune(*OTHERS)
    rig.singles(SHAPE, cost_s=10.0)
    first = rig.attempt(SHAPE).id
    noisy(rig, SHAPE)
    return rig, first


def settled_by(rig: Rig) -> tuple[str, str, bool | None]:
    shape = rig.shape(SHAPE)
    return shape.state, shape.attempt, shape.confirmed


@pytest.mark.parametrize("nodes", [("a", "b"), ("a",)])
def test_a_noisy_winner_is_measured_again_elsewhere_and_the_newer_result_counts(nodes: tuple[str, ...]) -> None:
    rig, first = with_noise(*nodes)
    assert settled_by(rig)[0] == "pending"
    again = rig.attempt(SHAPE)
    place = rig.policy.state.attempts[first].node
    assert again.id != first
    assert (again.node != place) == (len(nodes) > 1)
    rig.tune(SHAPE)
    assert settled_by(rig) == ("tuned", again.id, None)
    assert digest(rig.replayed()) == digest(rig.policy)


def test_noisy_twice_the_newer_result_counts_at_once() -> None:
    rig, _ = with_noise("a", "b")
    again = rig.attempt(SHAPE).id
    out = noisy(rig, SHAPE)
    (settled,) = of(ev.SettleShape, out)
    assert (settled.attempt, settled.confirmed) == (again, True), "an older reader sees this decision too"
    assert settled_by(rig) == ("tuned", again, True)


ENDS: dict[str, Callable[[Rig], object]] = {
    "fault": lambda rig: rig.fault(SHAPE),
    "refused": lambda rig: (
        rig.start(SHAPE),
        rig.do(ev.ShapeRefused(rig.attempt(SHAPE).id, SHAPE, Reason.WRONG_RESULT, "all are wrong")),
    ),
    "incomplete": lambda rig: rig.incomplete(SHAPE, "c1"),
    "limit": lambda rig: rig.do(ev.StopAsked("3 of 3 GPU hours are used")),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_second_measurement_without_a_complete_result_leaves_the_first(end: str) -> None:
    rig, first = with_noise("a", "b")
    ENDS[end](rig)
    rig.tick(rig.settings.proof_s + 1)
    assert settled_by(rig) == ("tuned", first, True)
    assert not fails([d for _, d in rig.journal])


def test_second_measurements_take_a_tenth_of_the_run_and_a_retry_queues_the_rest() -> None:
    rig = Rig()
    rig.node("a")
    rig.node("b")
    rig.singles(*range(1, 21), cost_s=10.0)
    while not rig.policy.done:
        (shape,) = rig.policy.outstanding()[0].shapes
        if len(rig.shape(shape).attempts) == 1:
            noisy(rig, shape)
        else:
            rig.tune(shape)
    again = [s for s in range(1, 21) if len(rig.shape(s).attempts) > 1]
    assert len(again) == 2, "20 of 200 s"
    rest = next(s for s in range(1, 21) if s not in again)
    first = rig.shape(rest).attempt
    rig.do(ev.RetryAsked((rest, rest)))
    assert (rig.shape(rest).state, rig.policy.state.tuned) == ("pending", 19)
    assert rig.where(rest) != rig.policy.state.attempts[first].node
    rig.tune(rest)
    assert rig.policy.done
    assert rig.shape(rest).attempt != first
    assert digest(rig.replayed()) == digest(rig.policy)


def test_shapes_that_are_decided_together_are_measured_again_together() -> None:
    rig = proven_nodes("a", "b")
    rig.do(ev.WorkAdded("k", ((1, 2, 3),), ((1.0, 1.0, 1.0),)))
    a = rig.attempt(1)
    rig.start(1)
    rig.do(ev.ShapeTuned(a.id, 1))
    rig.do(ev.ShapeTuned(a.id, 2, (ev.NOISE,), (ev.NOISE,)))
    rig.do(ev.ShapeTuned(a.id, 3))
    assert [rig.shape(s).state for s in (1, 2, 3)] == ["pending"] * 3
    out = rig.do(ev.AttemptEnded(a.id, Reason.DONE, None, "", 1.0))
    assert [set(shapes) for _, shapes in groups(out)] == [{1, 2, 3}]
    again = rig.attempt(1)
    rig.tune(1, 2, 3)
    assert {rig.shape(s).attempt for s in (1, 2, 3)} == {again.id}


@pytest.mark.plans
def test_a_noisy_winner_is_final_only_after_a_second_measurement_while_the_tenth_lasts() -> None:
    kept = 0
    for seed in range(PLANS):
        drawn = draw_plan(seed)
        plan = replace(drawn, mixes=bool(seed % 2), faults=replace(drawn.faults, noisy=0.05))
        simulator = Simulator(plan)
        result = simulator.run()
        assert faults_in_the_books(plan, result) + groups_in_the_books(result) == [], seed
        assert simulator.reload(), seed
        state = simulator.policy.state
        tenth = state.settings.remeasure * state.total_s
        assert state.remeasure_s <= tenth
        told = {(r.attempt, r.shape): i for i, (_, r) in enumerate(result.journal) if isinstance(r, ev.ShapeTuned)}
        for shape in state.shapes.values():
            at = told.get((shape.attempt, shape.id))
            event = result.journal[at][1] if at is not None else None
            if not (isinstance(event, ev.ShapeTuned) and event.noisy and event.complete):
                continue
            kept += 1
            sent = {r.attempt for _, r in result.journal if isinstance(r, ev.Send) and shape.id in r.shapes}
            assert len(sent) > 1 or state.remeasure_s + shape.cost_s + state.setup_s > tenth, (seed, shape)
    assert kept > PLANS / 10
