"""Canaries, quarantine, and what a slot says of itself."""

from __future__ import annotations

import pytest

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.policy.sentences import describe_wait
from orchestrator.reasons import Reason
from tests.support.policy_rig import Rig, digest, groups, of, proven_nodes

S = PolicySettings()


def shut(rig: Rig) -> list[str]:
    return [r.node for _, r in rig.journal if isinstance(r, ev.Quarantine)]


def test_a_failed_canary_shuts_the_slot_until_one_passes() -> None:
    rig = Rig()
    rig.do(ev.NodeJoined("a", ("0",)))
    (q,) = of(ev.Quarantine, rig.canary("a", ok=False))
    assert isinstance(q, ev.Quarantine)
    assert (q.node, q.slot, q.until) == ("a", "0", rig.now + S.first_cool_down_s)
    assert groups(rig.singles(1)) == []
    assert "slots: 0 quarantined" in describe_wait(rig.policy.state, 1)
    assert of(ev.AskCanary, rig.tick(1.0)) == []
    assert of(ev.AskCanary, rig.tick(S.first_cool_down_s)) == [ev.AskCanary("a", "0", "canary-0")]
    assert groups(rig.canary("a")) == [("a", (1,))]


def test_the_cool_down_doubles_until_something_is_tuned_there() -> None:
    rig = proven_nodes("a", "b")
    waits = []
    for _ in range(3):
        (q,) = of(ev.Quarantine, rig.canary("a", ok=False))
        assert isinstance(q, ev.Quarantine)
        waits.append(q.until - rig.now)
        rig.tick(waits[-1])
    assert waits == [S.cool_down_s, 2 * S.cool_down_s, 4 * S.cool_down_s]
    rig.canary("a")
    rig.singles(1, 2)
    rig.tune(1, 2)
    (q,) = of(ev.Quarantine, rig.canary("a", ok=False))
    assert isinstance(q, ev.Quarantine)
    assert q.until - rig.now == S.cool_down_s


def test_the_only_slot_sick_is_the_end_after_three_canaries_or_at_once_where_its_tuner_cannot_start() -> None:
    rig = Rig()
    rig.singles(1)
    rig.do(ev.NodeJoined("a", ("0",)))
    for n in range(S.max_quarantines):
        assert rig.policy.stuck is None
        rig.canary("a", ok=False)
        rig.tick(S.max_cool_down_s if n < S.max_quarantines - 1 else 0.0)
    assert rig.policy.stuck == "a slot 0 is quarantined (the canary failed: wrong answer)"
    other = Rig()
    other.singles(1)
    other.do(ev.NodeJoined("a", ("0", "1")))
    other.do(ev.CanaryFailed("a", "0", "no such module", final=True))
    other.do(ev.CanaryFailed("a", "1", "no such module", final=True))
    assert other.policy.stuck == "a slot 0, a slot 1 are quarantined (the canary failed: no such module)"


@pytest.mark.parametrize(("at_work", "seconds"), [(False, S.canary_s), (True, S.orphan_canary_s)])
def test_a_canary_that_is_never_answered_counts_as_failed_later_if_the_slot_was_at_work(
    at_work: bool, seconds: float
) -> None:
    rig = proven_nodes("a", "b")
    rig.singles(1, 2)
    node = rig.where(1)
    if at_work:
        rig.start(1)
    else:
        rig.tune(1, 2)
    rig.lost(node)
    assert of(ev.AskCanary, rig.do(ev.NodeJoined(node, ("0",)))) != []
    rig.tick(seconds - 1.0)
    assert shut(rig) == []
    rig.tick(1.0)
    assert shut(rig) == [node]


def test_what_waits_for_a_slot_that_is_shut_is_taken_back() -> None:
    rig = proven_nodes("a", "b")
    rig.singles(*range(1, 20), cost_s=20.0)
    node = rig.where(1)
    rig.start(1)
    queued = list(rig.policy.state.nodes[node].slots["0"].queued)
    assert queued
    out = rig.canary(node, ok=False)
    assert [r.attempt for r in out if isinstance(r, ev.TakeBack)] == queued
    back = rig.policy.state.attempts[queued[0]].shapes
    rig.do(ev.AttemptTaken(queued[0], True))
    assert rig.where(back[0]) != node


def test_three_faults_of_shapes_that_pass_elsewhere_shut_the_slot() -> None:
    rig = proven_nodes("a", "b")
    gpu = rig.policy.state.nodes["a"].slots["0"].gpu
    for shape in range(1, 40):
        rig.singles(shape)
        if rig.where(shape) == "a":
            rig.fault(shape)
            rig.singles(shape + 100)
            rig.tune(shape + 100) if rig.where(shape + 100) else None
        rig.tune(shape)
        if gpu.quarantine_why:
            break
    assert shut(rig) == ["a"]
    assert "3 faults here passed elsewhere" in gpu.quarantine_why


def test_a_row_of_bad_ends_shuts_a_slot_if_few_shapes_fault_elsewhere_and_a_later_one_at_once() -> None:
    rig = Rig()
    for node in "ab":
        rig.node(node)
    rig.singles(*range(1, 60), cost_s=100.0)
    bad = 0
    while not shut(rig):
        for a in list(rig.policy.outstanding()):
            if a.state == "sent" and a.node == "a":
                rig.fault(a.shapes[0])
                bad += 1
                break
            if a.state == "sent" and a.node == "b" and not rig.shape(a.shapes[0]).faults:
                rig.tune(a.shapes[0])
                break
    assert shut(rig) == ["a"]
    assert bad >= S.least_streak
    assert "in a row" in rig.policy.state.nodes["a"].slots["0"].why
    rig.tick(S.cool_down_s)
    rig.canary("a")
    again = next(a for a in rig.policy.outstanding() if a.node == "a")
    rig.fault(again.shapes[0])
    assert shut(rig) == ["a", "a"]


def test_the_last_slot_is_not_shut_for_a_bad_end() -> None:
    rig = Rig()
    rig.node("a")
    for shape in range(1, 9):
        rig.singles(shape)
        rig.fault(shape)
        rig.fault(shape)
    assert shut(rig) == []


def test_a_slot_that_was_shut_gets_the_shortest_unit_first() -> None:
    rig = proven_nodes("a")
    rig.canary("a", ok=False)
    rig.work(1, cost_s=500.0)
    rig.work(2, cost_s=5.0)
    rig.tick(S.cool_down_s)
    assert groups(rig.canary("a")) == [("a", (2,))]


def test_events_of_strangers_are_ignored() -> None:
    rig = proven_nodes("a")
    before = digest(rig.policy)
    for event in (
        ev.CanaryPassed("x", "0", 1.0), ev.CanaryFailed("a", "9", "?"), ev.SlotLost("x", "0", ""), ev.NodeLost("x", ""),
        ev.AttemptStarted("x", "a", "0"), ev.ShapeTuned("x", 1), ev.AttemptEnded("x", Reason.DONE, None, "", 0.0),
        ev.AttemptTaken("x", True), ev.LeaseEnded("x", "preempted", ""), ev.NodeDraining("x"), ev.ShapeStarted("x", 1),
    ):  # fmt: skip
        assert rig.do(event) == []
    assert digest(rig.policy) == before
