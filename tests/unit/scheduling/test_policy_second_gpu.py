"""Complete winners that were drawn: ranked again with their runners-up on a second slot, settled in any case."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator import events as ev
from orchestrator.reasons import Reason
from tests.support.policy_rig import Rig, kinds, of, proven_nodes, sends
from tests.unit.scheduling.test_policy_confirm import begun, charged, confirms, same_after_replay, second, settled

WON, NEXT, THIRD = ("won",), ("next",), ("third",)


def drawn(rig: Rig, attempt: str, shape: int) -> list[ev.Decision]:
    """A complete result of a shape that was drawn."""
    return rig.do(ev.ShapeTuned(attempt, shape, best=WON, runners=(NEXT, THIRD)))


def details(decisions: Sequence[ev.Record]) -> list[str]:
    return [d.detail for d in decisions if isinstance(d, ev.SettleShape)]


def looked_at() -> Rig:
    """Shape 1 is tuned on a, and its leaders are being ranked on b."""
    rig = begun("a", "b")
    drawn(rig, "g1-1", 1)
    rig.end("g1-1")
    rig.start("g1a-1", "b", shape=1)
    return rig


def test_a_drawn_winner_is_ranked_on_another_node_and_its_own_attempt_settles_it() -> None:
    rig = begun("a", "b")
    out = drawn(rig, "g1-1", 1)
    assert confirms(out) == [(1, "g1a", (WON, NEXT, THIRD))]
    (sent,) = of(ev.Send, out)
    assert isinstance(sent, ev.Send)
    assert (sent.attempt, sent.node, sent.only) == ("g1a-1", "b", (WON, NEXT, THIRD))
    assert sent.seq > 0, "nothing else waits for it"
    assert rig.policy.progress().tuned == 0
    same_after_replay(rig)
    rig.end("g1-1")
    rig.start("g1a-1", "b", shape=1)
    out = second(rig, "g1a-1", 1, [WON, NEXT, THIRD], NEXT)
    assert settled(out) == [(1, "g1-1", True)], "the other GPU's choice decides nothing"
    assert details(out) == ["ranked again on b slot 0 (g1a-1)"]
    assert charged(out) == []
    assert rig.policy.progress().done
    same_after_replay(rig)


def test_another_gpu_of_the_same_node_will_do() -> None:
    rig = begun("a", slots=2)
    assert sends(drawn(rig, "g1-1", 1)) == [("g1a-1", "a", "1")]


def test_with_one_slot_the_winner_is_settled_at_once_and_is_no_less_sure() -> None:
    out = drawn(begun("a"), "g1-1", 1)
    assert settled(out) == [(1, "g1-1", True)]
    assert details(out) == ["not ranked on a second GPU: there is none"]


def test_no_lease_is_awaited_or_asked_for() -> None:
    rig = begun("a")
    rig.do(ev.FleetMayGrow(True))
    assert settled(drawn(rig, "g1-1", 1)) == [(1, "g1-1", True)]
    rig = looked_at()
    rig.do(ev.FleetMayGrow(True))
    assert rig.policy.places_awaited() == 0


def test_a_second_slot_that_goes_before_it_began_is_not_waited_for() -> None:
    rig = begun("a", "b", shapes=2)
    rig.do(ev.FleetMayGrow(True))
    drawn(rig, "g1-1", 1)
    out = rig.lost("b")
    assert settled(out) == [(1, "g1-1", True)]
    same_after_replay(rig)


@pytest.mark.parametrize("how", [Reason.FAULT, Reason.HANG, Reason.NOT_DELIVERED, Reason.WORKER_DIED])
def test_one_bad_end_is_enough_and_the_winner_stays(how: Reason) -> None:
    rig = looked_at()
    out = rig.end("g1a-1", how, 1)
    assert settled(out) == [(1, "g1-1", True)]
    assert details(out)[0].startswith("not ranked on a second GPU: attempt g1a-1 on b slot 0")
    assert rig.policy.progress().done


def test_a_canary_that_fails_after_it_fails_no_shape_that_is_tuned() -> None:
    """Shape 1 wedged one node before it was tuned on another, and wedges the one that ranks its winner."""
    rig = proven_nodes()
    rig.group("g1", [1])
    for attempt in ("g1-1", "g1-2", "g1a-1"):
        node = rig.outstanding()[attempt][0]
        rig.start(attempt, node, shape=1)
        if attempt == "g1-2":
            drawn(rig, attempt, 1)
            rig.end(attempt)
        else:
            rig.end(attempt, Reason.HANG, 1)
            assert kinds(rig.canary(node, ok=False)) == ["Quarantine"]
    assert rig.policy.progress().tuned == 4
    same_after_replay(rig)


def test_a_lost_node_or_a_verdict_settles_it_too() -> None:
    assert settled(looked_at().lost("b")) == [(1, "g1-1", True)]
    rig = looked_at()
    out = rig.do(ev.ShapeRefused("g1a-1", 1, Reason.WRONG_RESULT, "all off", False, withheld=()))
    assert settled(out) == [(1, "g1-1", True)]
    assert "no candidate ran on b slot 0" in details(out)[0]


def test_what_faults_there_is_evidence_against_that_slot() -> None:
    rig = looked_at()
    out = second(rig, "g1a-1", 1, [WON, THIRD], WON, [NEXT])
    assert charged(out) == [("b", "0", 1, (NEXT,))]
    assert settled(out) == [(1, "g1-1", True)]


def test_a_stop_settles_what_waits_and_what_runs() -> None:
    rig = looked_at()
    out = rig.do(ev.StopAsked())
    assert settled(out) == [(1, "g1-1", True)]
    assert details(out) == ["not ranked on a second GPU: the run was stopped"]
    rig = begun("a", "b")
    rig.do(ev.StopAsked())
    assert settled(drawn(rig, "g1-1", 1)) == [(1, "g1-1", True)]


def test_an_attempt_taken_back_waits_for_its_turn_again() -> None:
    rig = begun("a", "b", "c")
    drawn(rig, "g1-1", 1)
    node = next(a.node for a in rig.policy.outstanding() if a.id == "g1a-1")
    rig.do(ev.NodeDraining(node))
    out = rig.taken("g1a-1")
    assert kinds(out)[0] == "Requeue"
    assert sends(out)[0][1] not in ("a", node)


def test_a_complete_result_from_elsewhere_meanwhile_settles_it() -> None:
    """Node a was given up, its group went to b; a's result arrives, then it may still be ranked on b."""
    rig = begun("a", "b")
    rig.lost("a")
    (again,) = [a.id for a in rig.policy.outstanding()]
    rig.start(again, "b", shape=1)
    out = drawn(rig, "g1-1", 1)
    assert confirms(out)[0][0] == 1 or settled(out) == [(1, "g1-1", True)]
    rig.do(ev.ShapeTuned(again, 1, best=WON, runners=(NEXT,)))
    rig.end(again)
    assert rig.policy.progress().done
    same_after_replay(rig)


def test_it_says_what_it_waits_for() -> None:
    rig = begun("a", "b", shapes=2)
    rig.group("g2", [3])
    rig.start("g2-1", "b", shape=3)
    out = drawn(rig, "g1-1", 1)
    (found,) = of(ev.Confirm, out)
    assert isinstance(found, ev.Confirm)
    assert found.second
    assert "second GPU" in found.why
