"""Candidates that faulted on one slot: tried on a second one, charged to the first, or reported as unconfirmed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator import events as ev
from orchestrator.policy import Policy
from orchestrator.reasons import Reason
from tests.support.policy_rig import Rig, fails, kinds, of, sends

CK, ASM, ASM2, TRITON = ("ck", "0"), ("asm", "1"), ("asm", "2"), ("triton", "3")


def partly(
    rig: Rig, attempt: str, shape: int, lost: Sequence[tuple[str, ...]], best: tuple[str, ...] = CK, **more: object
) -> list[ev.Decision]:
    """The attempt tuned the shape, but left candidates out."""
    return rig.do(ev.ShapeTuned(attempt, shape, False, best, withheld=tuple(lost), **more))  # type: ignore[arg-type]


def second(
    rig: Rig,
    attempt: str,
    shape: int,
    ran: Sequence[tuple[str, ...]],
    best: tuple[str, ...],
    lost: Sequence[tuple[str, ...]] = (),
) -> list[ev.Decision]:
    """The answer of an attempt on some candidates."""
    return rig.do(ev.ShapeTuned(attempt, shape, False, best, tuple(ran), tuple(lost), trials=len(ran)))


def none_ran(rig: Rig, attempt: str, shape: int, lost: Sequence[tuple[str, ...]]) -> list[ev.Decision]:
    return rig.do(ev.ShapeRefused(attempt, shape, Reason.NO_CANDIDATE, "none ran", False, withheld=tuple(lost)))


def settled(decisions: Sequence[ev.Record]) -> list[tuple[int, str, bool]]:
    return [(d.shape, d.attempt, d.confirmed) for d in decisions if isinstance(d, ev.SettleShape)]


def confirms(decisions: Sequence[ev.Record]) -> list[tuple[int, str, tuple[tuple[str, ...], ...]]]:
    return [(d.shape, d.child, d.only) for d in decisions if isinstance(d, ev.Confirm)]


def charged(decisions: Sequence[ev.Record]) -> list[tuple[str, str, int, tuple[tuple[str, ...], ...]]]:
    return [(d.node, d.slot, d.shape, d.candidates) for d in decisions if isinstance(d, ev.ChargeSlot)]


def begun(*nodes: str, shapes: int = 1, slots: int = 1) -> Rig:
    """Nodes in order; group g1 started on the first."""
    rig = Rig()
    rig.group("g1", range(1, shapes + 1))
    for n in nodes:
        rig.node(n, slots)
    rig.start("g1-1", nodes[0], shape=1)
    return rig


def same_after_replay(rig: Rig) -> None:
    fresh = Policy(rig.settings)
    for t, record in rig.journal:
        fresh.apply(ev.from_json(type(record).__name__, ev.to_json(record)), t)
    assert fresh.digest() == rig.policy.digest()


def test_an_incomplete_result_settles_nothing_and_another_node_tries_what_was_left_out() -> None:
    rig = begun("a", "b")
    out = partly(rig, "g1-1", 1, [ASM, ASM2])
    assert confirms(out) == [(1, "g1a", (ASM, ASM2, CK))]
    (sent,) = of(ev.Send, out)
    assert isinstance(sent, ev.Send)
    assert (sent.attempt, sent.node, sent.only) == ("g1a-1", "b", (ASM, ASM2, CK))
    assert rig.policy.progress().tuned == 0
    assert rig.end("g1-1") == []
    same_after_replay(rig)


def test_what_runs_on_the_second_slot_is_decided_there_and_charged_to_the_first() -> None:
    rig = begun("a", "b")
    partly(rig, "g1-1", 1, [ASM])
    rig.end("g1-1")
    rig.start("g1a-1", "b", shape=1)
    out = second(rig, "g1a-1", 1, [ASM, CK], ASM)
    assert charged(out) == [("a", "0", 1, (ASM,))]
    assert settled(out) == [(1, "g1a-1", True)]
    assert rig.policy.progress().done
    same_after_replay(rig)


def test_what_faults_there_too_stays_left_out() -> None:
    rig = begun("a", "b")
    partly(rig, "g1-1", 1, [ASM])
    rig.start("g1a-1", "b", shape=1)
    out = second(rig, "g1a-1", 1, [CK], CK, [ASM])
    assert charged(out) == []
    (found,) = of(ev.ConvictCandidates, out)
    assert isinstance(found, ev.ConvictCandidates)
    assert (found.candidates, found.places) == ((ASM,), (("a", "0"), ("b", "0")))
    assert settled(out) == [(1, "g1a-1", True)]


def test_the_best_so_far_may_fault_there_and_a_third_slot_decides() -> None:
    rig = begun("a", "b", "c")
    partly(rig, "g1-1", 1, [ASM])
    rig.start("g1a-1", "b", shape=1)
    out = second(rig, "g1a-1", 1, [ASM], ASM, [CK])
    assert {c[:2] for c in charged(out)} == {("a", "0"), ("b", "0")}
    assert confirms(out) == [(1, "g1b", (CK, ASM))]
    assert sends(out)[0][1] == "c"
    rig.start("g1b-1", "c", shape=1)
    assert settled(second(rig, "g1b-1", 1, [CK, ASM], ASM)) == [(1, "g1b-1", True)]


def test_with_one_slot_only_the_shape_is_unconfirmed() -> None:
    rig = begun("a")
    out = partly(rig, "g1-1", 1, [ASM])
    assert settled(out) == [(1, "g1-1", False)]
    (end,) = of(ev.SettleShape, out)
    assert isinstance(end, ev.SettleShape)
    assert "no second slot" in end.detail
    assert "a slot 0" in end.detail
    assert rig.policy.progress().done


def test_another_slot_of_the_same_node_will_do_and_only_that_slot_is_named() -> None:
    rig = begun("a", slots=2)
    out = partly(rig, "g1-1", 1, [ASM])
    assert sends(out) == [("g1a-1", "a", "1")]


def test_a_node_that_is_being_prepared_is_waited_for() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.do(ev.NodeExpected("b", ("0",)))
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    out = partly(rig, "g1-1", 1, [ASM])
    assert kinds(out) == ["Confirm"]
    assert "for a slot other than a slot 0" in rig.policy.why("g1a") or "no node" in rig.policy.why("g1a")
    assert sends(rig.node("b")) == [("g1a-1", "b", None)]


def test_a_node_that_is_not_coming_is_not_waited_for() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.do(ev.NodeExpected("b", ("0",)))
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    partly(rig, "g1-1", 1, [ASM])
    assert settled(rig.lost("b")) == [(1, "g1-1", False)]
    same_after_replay(rig)


@pytest.mark.parametrize("gone", [ev.NodeLost("b", "silent"), ev.SlotLost("b", "0", "gone")])
def test_the_second_slot_may_go_away_in_the_middle(gone: ev.Event) -> None:
    rig = begun("a", "b")
    partly(rig, "g1-1", 1, [ASM])
    rig.end("g1-1")
    rig.start("g1a-1", "b", shape=1)
    assert settled(rig.do(gone)) == [(1, "g1-1", False)]


def test_a_third_slot_takes_over_from_one_that_went_away() -> None:
    rig = begun("a", "b", "c")
    partly(rig, "g1-1", 1, [ASM])
    rig.start("g1a-1", "b", shape=1)
    (sent,) = of(ev.Send, rig.lost("b"))
    assert isinstance(sent, ev.Send)
    assert (sent.attempt, sent.node, sent.only) == ("g1a-2", "c", (ASM, CK))
    rig.start("g1a-2", "c", shape=1)
    assert settled(second(rig, "g1a-2", 1, [ASM, CK], CK)) == [(1, "g1a-2", True)]


def test_a_drained_second_node_finishes_what_runs_and_is_no_hope_for_the_rest() -> None:
    rig = begun("a", "b")
    partly(rig, "g1-1", 1, [ASM])
    rig.do(ev.NodeDraining("b"))
    assert settled(rig.taken("g1a-1")) == [(1, "g1-1", False)]
    rig = begun("a", "b")
    partly(rig, "g1-1", 1, [ASM])
    rig.start("g1a-1", "b", shape=1)
    rig.do(ev.NodeDraining("b"))
    assert settled(second(rig, "g1a-1", 1, [ASM, CK], ASM)) == [(1, "g1a-1", True)]


def test_a_stopped_run_leaves_it_pending_and_resume_confirms_it() -> None:
    rig = begun("a", "b")
    partly(rig, "g1-1", 1, [ASM])
    rig.end("g1-1")
    rig.do(ev.StopAsked())
    assert of(ev.SettleShape, rig.taken("g1a-1")) == []
    assert rig.policy.progress().pending == 1
    rig.do(ev.Resumed(2))
    rig.node("a")
    assert sends(rig.node("b")) == [("g1a-2", "b", None)]
    same_after_replay(rig)


def test_an_attempt_to_confirm_that_faults_twice_is_given_up() -> None:
    rig = begun("a", "b")
    partly(rig, "g1-1", 1, [ASM])
    rig.end("g1-1")
    rig.start("g1a-1", "b", shape=1)
    out = rig.fault("g1a-1", 1)
    assert sends(out) == [("g1a-2", "b", None)]
    rig.start("g1a-2", "b", shape=1)
    out = rig.fault("g1a-2", 1)
    assert settled(out) == [(1, "g1-1", False)]
    assert fails(out) == []


def test_where_every_candidate_faulted_a_second_slot_makes_a_full_attempt() -> None:
    rig = begun("a", "b")
    out = none_ran(rig, "g1-1", 1, [CK, ASM])
    assert confirms(out) == [(1, "g1a", ())]
    rig.start("g1a-1", "b", shape=1)
    out = rig.do(ev.ShapeTuned("g1a-1", 1, best=ASM, trials=2))
    assert charged(out) == [("a", "0", 1, (CK, ASM))]
    assert rig.policy.progress().tuned == 1


def test_where_they_fault_on_two_slots_the_shape_has_no_candidate() -> None:
    rig = begun("a", "b")
    none_ran(rig, "g1-1", 1, [CK, ASM])
    rig.start("g1a-1", "b", shape=1)
    assert fails(none_ran(rig, "g1a-1", 1, [CK, ASM])) == [(1, Reason.NO_CANDIDATE, True)]


def test_and_with_one_slot_only_that_is_unconfirmed() -> None:
    rig = begun("a")
    assert fails(none_ran(rig, "g1-1", 1, [CK, ASM])) == [(1, Reason.NO_CANDIDATE, False)]


def test_more_than_can_be_named_means_a_full_attempt() -> None:
    rig = begun("a", "b")
    assert confirms(partly(rig, "g1-1", 1, [ASM], cut=True)) == [(1, "g1a", ())]
    rig.start("g1a-1", "b", shape=1)
    assert settled(rig.do(ev.ShapeTuned("g1a-1", 1, best=ASM))) == []
    assert rig.policy.progress().tuned == 1  # complete: it settles by itself


def test_a_second_slot_on_which_nothing_is_right_does_not_take_the_winner_away() -> None:
    rig = begun("a", "b")
    partly(rig, "g1-1", 1, [ASM])
    rig.start("g1a-1", "b", shape=1)
    out = rig.do(ev.ShapeRefused("g1a-1", 1, Reason.WRONG_RESULT, "all wrong", False, (ASM, CK)))
    assert settled(out) == [(1, "g1-1", False)]
    rig = begun("a", "b")
    partly(rig, "g1-1", 1, [ASM])
    rig.start("g1a-1", "b", shape=1)
    assert settled(none_ran(rig, "g1a-1", 1, [ASM, CK])) == [(1, "g1-1", True)]  # ASM faulted on both


def test_what_the_second_slot_does_not_know_stays_open() -> None:
    rig = begun("a", "b")
    partly(rig, "g1-1", 1, [ASM])
    rig.start("g1a-1", "b", shape=1)
    out = second(rig, "g1a-1", 1, [CK], CK)
    assert charged(out) == []
    assert of(ev.ConvictCandidates, out) == []
    assert settled(out) == [(1, "g1a-1", False)]


def test_the_rest_of_a_group_goes_on_while_one_of_its_shapes_is_confirmed() -> None:
    rig = begun("a", "b", shapes=3)
    partly(rig, "g1-1", 1, [ASM])
    assert rig.policy.why(1).startswith("attempt g1a-1 is in the inbox of b")
    rig.shape("g1-1", 2)
    rig.tuned("g1-1", 2)
    rig.shape("g1-1", 3)
    assert partly(rig, "g1-1", 3, [ASM]) != []
    rig.end("g1-1")
    rig.start("g1a-1", "b", shape=1)
    second(rig, "g1a-1", 1, [ASM, CK], ASM)
    rig.end("g1a-1")
    rig.start("g1b-1", "b", shape=3)
    second(rig, "g1b-1", 3, [ASM, CK], ASM)
    assert rig.policy.progress().tuned == 3
    same_after_replay(rig)


def test_a_fault_in_a_group_runs_alone_then_without_the_candidate_then_is_confirmed() -> None:
    rig = begun("a", "b", shapes=2)
    out = rig.fault("g1-1", 1)
    assert ("g1a-1", "b", None) in sends(out)  # alone, elsewhere
    rig.start("g1a-1", "b", shape=1)
    out = partly(rig, "g1a-1", 1, [ASM])
    assert confirms(out) == [(1, "g1c", (ASM, CK))]
    assert ("g1c-1", "a", None) in sends(out)
    rig.start("g1c-1", "a", shape=1)
    assert settled(second(rig, "g1c-1", 1, [CK], CK, [ASM])) == [(1, "g1c-1", True)]


def test_shapes_that_a_slot_settled_alone_are_looked_at_again_when_it_is_charged() -> None:
    rig = begun("a", shapes=1)
    assert settled(partly(rig, "g1-1", 1, [ASM])) == [(1, "g1-1", False)]
    rig.end("g1-1")
    rig.group("g2", [2])
    rig.start("g2-1", "a", shape=2)
    rig.node("b")
    partly(rig, "g2-1", 2, [ASM])
    rig.end("g2-1")
    rig.start("g2a-1", "b", shape=2)
    out = second(rig, "g2a-1", 2, [ASM, CK], ASM)
    assert charged(out) == [("a", "0", 2, (ASM,))]
    assert confirms(out) == [(1, "g1a", (ASM, CK))]
    assert not rig.policy.progress().done
    same_after_replay(rig)
    rig.end("g2a-1")
    rig.start("g1a-1", "b", shape=1)
    assert settled(second(rig, "g1a-1", 1, [ASM, CK], ASM)) == [(1, "g1a-1", True)]
    assert rig.policy.progress().tuned == 2
    same_after_replay(rig)


def test_a_shape_is_looked_at_again_only_once() -> None:
    rig = begun("a", shapes=1)
    partly(rig, "g1-1", 1, [ASM])
    rig.end("g1-1")
    rig.node("b")
    seen = []
    for n in (2, 3):
        rig.group(f"g{n}", [n])
        found = rig.outstanding()[f"g{n}-1"][0]
        rig.start(f"g{n}-1", found, shape=n)
        if found != "a":
            rig.tuned(f"g{n}-1", n)
            rig.end(f"g{n}-1")
            continue
        partly(rig, f"g{n}-1", n, [ASM])
        rig.end(f"g{n}-1")
        rig.start(f"g{n}a-1", "b", shape=n)
        seen += confirms(second(rig, f"g{n}a-1", n, [ASM, CK], ASM))
        rig.end(f"g{n}a-1")
        if n == 2:
            rig.start("g1a-1", "b", shape=1)
            for number in (1, 2):
                rig.fault(f"g1a-{number}", 1)
                if number == 1:
                    rig.start("g1a-2", "b", shape=1)
    assert [s[0] for s in seen] == [1]
    assert rig.policy.progress().done


def lose_and_find(rig: Rig, shape: int, lost: Sequence[tuple[str, ...]], trials: int = 0) -> list[ev.Decision]:
    """A group of one shape on a loses candidates that then run on b."""
    rig.group(f"s{shape}", [shape])
    if f"s{shape}-1" not in rig.outstanding() or rig.outstanding()[f"s{shape}-1"][0] != "a":
        raise AssertionError(rig.outstanding())
    rig.start(f"s{shape}-1", "a", shape=shape)
    partly(rig, f"s{shape}-1", shape, lost, trials=trials)
    rig.end(f"s{shape}-1")
    rig.start(f"s{shape}a-1", "b", shape=shape)
    out = second(rig, f"s{shape}a-1", shape, [*lost, CK], CK)
    return out + rig.end(f"s{shape}a-1")


def quarantined(decisions: Sequence[ev.Record]) -> list[tuple[str, str]]:
    return [(d.node, d.slot) for d in decisions if isinstance(d, ev.Quarantine)]


def two_nodes() -> Rig:
    rig = Rig()
    rig.node("a")
    rig.node("b")
    return rig


def test_three_candidates_of_two_shapes_put_a_slot_into_quarantine() -> None:
    rig = two_nodes()
    assert quarantined(lose_and_find(rig, 1, [ASM, ASM2, TRITON])) == []  # of one shape
    out = lose_and_find(rig, 2, [ASM])
    assert quarantined(out) == [("a", "0")]
    (why,) = (d.why for d in out if isinstance(d, ev.Quarantine))
    assert why == "4 candidates of 2 shapes faulted here and ran elsewhere"
    same_after_replay(rig)


def test_two_candidates_do_not() -> None:
    rig = two_nodes()
    assert quarantined(lose_and_find(rig, 1, [ASM]) + lose_and_find(rig, 2, [ASM])) == []


def test_three_among_thousands_do_not_where_others_lose_as_many() -> None:
    rig = two_nodes()
    out = []
    rig.do(ev.GroupAdded("f", (99,), 1.0))
    where = rig.outstanding()["f-1"][0]
    rig.start("f-1", where, shape=99)
    rig.do(ev.ShapeTuned("f-1", 99, trials=0))
    rig.end("f-1")
    for shape in (1, 2, 3):
        out += lose_and_find(rig, shape, [ASM], trials=1000)
    assert charged(out) != []
    # three of 3,000 here and none of a handful elsewhere: elsewhere is too little to be compared with
    assert quarantined(out) == [("a", "0")]
    rig = two_nodes()
    rig.group("f", [99])
    rig.start("f-1", "a", shape=99)
    rig.do(ev.ShapeTuned("f-1", 99, trials=1000))
    rig.end("f-1")
    rig.group("h", [98])
    rig.start("h-1", "a", shape=98)
    rig.do(ev.ShapeTuned("h-1", 98, trials=1000))
    rig.end("h-1")
    credit_elsewhere(rig, 1000)
    out = [d for shape in (1, 2, 3) for d in lose_and_find(rig, shape, [ASM], trials=100)]
    assert len(charged(out)) == 3
    assert quarantined(out) == []


def credit_elsewhere(rig: Rig, trials: int) -> None:
    """Candidates that ran on b."""
    rig.do(ev.NodeDraining("a"))
    rig.group("e", [97])
    rig.start("e-1", "b", shape=97)
    rig.do(ev.ShapeTuned("e-1", 97, trials=trials))
    rig.end("e-1")
    rig.do(ev.Resumed(2))
    rig.do(ev.NodeJoined("a", ("0",)))
    rig.do(ev.NodeJoined("b", ("0",)))


def test_what_a_blocklist_left_out_from_earlier_runs_is_tried_and_not_charged() -> None:
    rig = begun("a", "b")
    partly(rig, "g1-1", 1, [ASM], earlier=(ASM,))
    rig.start("g1a-1", "b", shape=1)
    out = second(rig, "g1a-1", 1, [ASM, CK], ASM)
    (found,) = of(ev.ChargeSlot, out)
    assert isinstance(found, ev.ChargeSlot)
    assert (found.candidates, found.earlier) == ((), (ASM,))


def test_a_late_complete_result_settles_it_wherever_it_is() -> None:
    rig = begun("a", "b", "c")
    rig.lost("a")
    rig.start("g1-2", "b", shape=1)
    partly(rig, "g1-2", 1, [ASM])
    assert rig.outstanding()["g1a-1"][0] == "c"
    rig.do(ev.ShapeTuned("g1-1", 1, best=ASM))  # n1 is read to the end after all
    assert rig.policy.progress().tuned == 1


def test_a_late_incomplete_result_is_evidence_and_the_attempt_under_way_decides() -> None:
    rig = begun("a", "b", "c")
    rig.lost("a")
    rig.start("g1-2", "b", shape=1)
    partly(rig, "g1-2", 1, [ASM])
    assert kinds(partly(rig, "g1-1", 1, [ASM])) == ["ConvictCandidates"]
    rig.start("g1a-1", "c", shape=1)
    out = second(rig, "g1a-1", 1, [ASM, CK], ASM)
    assert settled(out) == [(1, "g1a-1", True)]


def test_a_person_s_retry_begins_anew() -> None:
    rig = begun("a")
    none_ran(rig, "g1-1", 1, [CK, ASM])
    rig.end("g1-1")
    out = rig.do(ev.RetryAsked((1,)))
    assert sends(out) == [("g1a-1", "a", None)]
    rig.start("g1a-1", "a", shape=1)
    rig.tuned("g1a-1", 1)
    assert rig.policy.progress().tuned == 1
    same_after_replay(rig)


def test_a_slot_that_loses_candidates_proves_nothing() -> None:
    rig = begun("a", "b")
    rig.do(ev.AttemptEnded("g1-1", Reason.FAULT, 1, "", 1.0))
    rig.canary("a")
    rig.start("g1-2", "b", shape=1)
    partly(rig, "g1-2", 1, [ASM])
    assert not rig.policy._state.fleet.nodes["b"].proven
