"""Verdicts on shapes, and faults that do not count as evidence."""

from __future__ import annotations

import pytest

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.policy.sentences import describe_wait
from orchestrator.reasons import Reason
from tests.support.policy_rig import Rig, fails, groups, of, proven_nodes

OTHERS = (201, 202, 203)
"""Shapes that keep the nodes a, b and c at work while another one is judged."""


@pytest.mark.parametrize("reason", [Reason.FAULT, Reason.OOM, Reason.HANG, Reason.ERROR])
def test_two_nodes_convict(reason: Reason) -> None:
    rig = proven_nodes()
    rig.singles(1, *OTHERS, cost_s=50.0)
    assert fails(rig.fault(1, reason)) == []
    rig.tune(OTHERS[0])
    while rig.shape(1).tries < 2:
        rig.fault(1, reason) if rig.where(1) else rig.tune(next(s for s in OTHERS if rig.where(s)))
    assert rig.shape(1).state == "pending", "not both slots have tuned something since"
    rig.singles(*range(301, 305), cost_s=50.0)
    while rig.shape(1).state == "pending":
        rig.tune(rig.policy.outstanding()[0].shapes[0])
    assert (rig.shape(1).reason, rig.shape(1).confirmed) == (reason, True)
    places = {f.place for f in rig.shape(1).faults}
    assert len(places) == 2
    assert all(rig.policy.state.gpus[p].tuned > 1 for p in places)


def test_the_verdict_does_not_wait_for_ever_nor_for_slots_that_get_nothing() -> None:
    rig = proven_nodes("a", "b")
    rig.singles(1)
    rig.fault(1)
    assert fails(rig.fault(1)) == [(1, Reason.FAULT, True)], "nothing else is left to run"
    rig.singles(*range(2, 8), cost_s=50.0)
    rig.fault(2)
    while rig.shape(2).tries < 2:
        if rig.where(2):
            rig.fault(2)
        else:
            rig.tune(next(a.shapes[0] for a in rig.policy.outstanding()))
    assert "for its verdict, until" in describe_wait(rig.policy.state, 2)
    assert fails(rig.tick(PolicySettings().proof_s - 1.0)) == []
    assert fails(rig.tick(1.0)) == [(2, Reason.FAULT, True)]


def test_the_shape_in_flight_runs_alone_next_and_the_rest_goes_back_unblamed() -> None:
    rig = proven_nodes("a", "b")
    rig.work(*range(1, 7), cost_s=20.0)
    mine = rig.attempt(1).shapes
    flying = mine[1]
    rig.tune(mine[0])
    out = rig.fault(flying)
    assert [shapes for _, shapes in groups(out) if flying in shapes] == [(flying,)]
    assert all(not rig.shape(s).faults and not rig.shape(s).tries for s in mine if s != flying)
    assert rig.shape(mine[0]).state == "tuned"


def test_unknown_in_flight_is_halved_and_uses_no_try() -> None:
    rig = Rig()
    rig.work(*range(1, 9), cost_s=1.0)
    rig.node("a")
    whole = rig.attempt(1).shapes
    out = rig.fault(1, known=False)
    half = (len(whole) + 1) // 2
    assert {s for _, shapes in groups(out) for s in shapes} <= set(whole)
    assert [shapes for _, shapes in groups(out)] == [whole[:half], whole[half:]]
    assert all(rig.shape(s).tries == 0 and not rig.shape(s).faults for s in whole)


def test_a_fault_on_a_slot_whose_canary_then_fails_is_not_held_against_the_shape() -> None:
    rig = proven_nodes()
    rig.singles(1)
    rig.bad_end(1)
    rig.canary(*rig.at(1), ok=False)
    assert rig.shape(1).faults == []
    assert rig.shape(1).tries == 0
    rig.fault(1)
    assert rig.shape(1).state == "pending"


def test_what_a_slot_said_since_its_last_good_end_is_void_once_it_is_shut() -> None:
    rig = proven_nodes()
    rig.singles(1, *OTHERS, cost_s=50.0)
    sick = rig.where(1)
    rig.fault(1)
    rig.fault(1)
    rig.do(ev.CanaryFailed(sick, "0", "wrong answer"))
    assert len(rig.shape(1).faults) == 1
    rig.tick(PolicySettings().proof_s)
    assert rig.shape(1).state == "pending", "one slot is left that speaks against it"


@pytest.mark.parametrize("were_well", [True, False])
def test_a_shape_after_which_the_canary_fails_on_two_nodes_that_were_well_fails(were_well: bool) -> None:
    rig = proven_nodes() if were_well else Rig()
    for node in "" if were_well else "abc":
        rig.node(node)
    rig.singles(1)
    rig.bad_end(1, Reason.HANG)
    rig.canary(*rig.at(1), ok=False)
    assert rig.shape(1).state == "pending"
    rig.bad_end(1, Reason.HANG)
    assert fails(rig.canary(*rig.at(1), ok=False)) == ([(1, Reason.HANG, True)] if were_well else [])


def test_two_slots_of_the_only_node_are_enough_and_of_one_among_others_are_not() -> None:
    rig = Rig()
    rig.node("a", 2)
    rig.singles(1)
    rig.fault(1)
    assert fails(rig.fault(1)) == [(1, Reason.FAULT, True)]
    rig.node("b")
    rig.singles(2)
    first = rig.where(2)
    rig.fault(2)
    assert {first[0], rig.where(2)[0]} == {"a", "b"}


def test_two_nodes_of_one_host_are_one_for_blame() -> None:
    rig = Rig()
    rig.lease("a", "h1", "0")
    rig.lease("b", "h1", "1")
    rig.lease("c", "h2", "0")
    rig.singles(1)
    first = rig.policy.state.nodes[rig.where(1)].host
    rig.fault(1)
    assert rig.policy.state.nodes[rig.where(1)].host != first


def test_one_slot_cannot_confirm_and_waits_while_another_may_come() -> None:
    rig = Rig()
    rig.do(ev.FleetMayGrow(True))
    rig.node("a")
    rig.singles(1)
    rig.fault(1)
    assert rig.where(1) == ""
    assert rig.policy.hosts_needed() == 2
    assert "for a slot other than a slot 0" in describe_wait(rig.policy.state, 1)
    rig.do(ev.FleetMayGrow(False))
    assert fails(rig.fault(1)) == [(1, Reason.FAULT, False)]
    assert "only one slot" in rig.shape(1).detail


def test_a_suspect_goes_to_a_slot_whose_last_end_was_good() -> None:
    rig = proven_nodes("a", "b", "c")
    rig.singles(1, 2)
    first, second = rig.where(1), rig.where(2)
    (third,) = {"a", "b", "c"} - {first, second}
    rig.bad_end(2)
    out = rig.fault(1)
    assert ("", third) == (rig.where(1), third) or groups(out)[-1][0] == third


def test_a_limit_on_tries_and_on_rejected_specs() -> None:
    rig = Rig()
    rig.node("a")
    rig.singles(1)
    for _ in range(PolicySettings().tries):
        assert rig.shape(1).state == "pending"
        rig.bad_end(1, Reason.REJECTED, known=False)
    assert (rig.shape(1).reason, rig.shape(1).confirmed) == (Reason.REJECTED, False)


def test_cancelled_and_a_full_disk_use_no_try() -> None:
    rig = proven_nodes("a", "b")
    rig.singles(1)
    rig.bad_end(1, Reason.CANCELLED)
    where = rig.where(1)
    out = rig.bad_end(1, Reason.DISK_FULL)
    assert [(q.node, "disk is full" in q.why) for q in of(ev.Quarantine, out)] == [(where, True)]
    assert rig.shape(1).tries == 0


def test_a_verdict_of_the_tuner_is_final_and_a_retry_gives_a_fresh_start() -> None:
    rig = Rig()
    rig.node("a")
    rig.singles(1)
    rig.start(1)
    out = rig.do(ev.ShapeRefused(rig.attempt(1).id, 1, Reason.WRONG_RESULT, "all wrong"))
    assert fails(out) == [(1, Reason.WRONG_RESULT, True)]
    rig.do(ev.AttemptEnded(rig.attempt(1).id, Reason.DONE, None, "", 1.0))
    rig.do(ev.RetryAsked((1,)))
    assert (rig.shape(1).state, rig.shape(1).tries, rig.where(1)) == ("pending", 0, "a")


def test_an_incomplete_result_settles_nothing_and_the_first_complete_one_counts() -> None:
    rig = proven_nodes("a", "b")
    rig.singles(1)
    first = rig.where(1)
    rig.incomplete(1, "x")
    assert rig.shape(1).state == "pending"
    assert rig.where(1) not in ("", first)
    second = rig.attempt(1).id
    rig.tune(1)
    assert (rig.shape(1).state, rig.shape(1).attempt, rig.shape(1).confirmed) == ("tuned", second, None)


def test_what_faults_on_two_slots_is_left_out_for_sure() -> None:
    rig = proven_nodes("a", "b")
    rig.singles(1)
    rig.incomplete(1, "x")
    rig.incomplete(1, "x", "y")
    shape = rig.shape(1)
    assert (shape.state, shape.confirmed) == ("tuned", True)
    assert shape.attempt == shape.attempts[0], "the second lacks y, which may run"


def test_with_one_slot_only_the_result_is_unconfirmed() -> None:
    rig = Rig()
    rig.node("a")
    rig.singles(1, 2)
    rig.incomplete(1, "x")
    rig.tune(2)
    shape = rig.shape(1)
    assert (shape.state, shape.confirmed) == ("tuned", False)
    assert "only one slot" in shape.detail


def test_what_faulted_before_this_run_says_nothing_of_the_slot() -> None:
    rig = proven_nodes("a", "b")
    for shape in range(1, 8):
        rig.singles(shape)
        rig.incomplete(shape, "x", earlier=["x"])
        rig.tune(shape)
    assert not of(ev.Quarantine, (r for _, r in rig.journal))
