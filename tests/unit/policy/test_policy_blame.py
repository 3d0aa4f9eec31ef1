"""Blame of the shape or the slot when an attempt faults."""

from __future__ import annotations

import pytest

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.reasons import Reason
from tests.support.policy_rig import Rig, fails, kinds, of, proven_nodes, sends

FAULTS = [Reason.FAULT, Reason.OOM, Reason.HANG, Reason.ERROR]


@pytest.mark.parametrize("reason", FAULTS)
def test_two_nodes_convict(reason: Reason) -> None:
    rig = Rig()
    rig.group("g1", [1, 2, 3], 60.0)
    rig.node("a")
    rig.node("b")
    rig.start("g1-1", "a", shape=1)
    rig.tuned("g1-1", 1)
    rig.shape("g1-1", 2)
    out = rig.end("g1-1", reason, 2)
    split = of(ev.Split, out)
    assert isinstance(split[0], ev.Split)
    assert split[0].children == (("g1a", (2,)), ("g1b", (3,)))
    # alone next, on another node; the rest anywhere
    assert ("g1a-1", "b", None) in sends(out)
    assert {a for a, _, _ in sends(out)} == {"g1a-1", "g1b-1"}
    alone = {a.id: a.alone for a in rig.policy.outstanding()}
    assert alone == {"g1a-1": True, "g1b-1": False}
    rig.canary("a")
    rig.start("g1a-1", "b", shape=2)
    assert fails(rig.end("g1a-1", reason, 2)) == []  # not before b has shown that it is well
    assert "canary" in rig.policy.why("g1a")
    assert fails(rig.canary("b")) == []  # nor before the slot that is about to tune another shape has tuned it
    rig.start("g1b-1", *rig.outstanding()["g1b-1"][:1], shape=3)
    assert fails(rig.tuned("g1b-1", 3)) == [(2, reason, True)]
    assert "failed" in rig.policy.why(2)
    assert rig.policy.progress().done
    assert rig.replayed().digest() == rig.policy.digest()


def _faulted_twice(rig: Rig) -> None:
    """Shape 1 faulted on a and b, and both have work: g2 runs on a, g3 on b; c is there, too."""
    for node in ("a", "b", "c"):
        rig.node(node)
    rig.group("g1", [1])
    rig.start("g1-1", "a", shape=1)
    rig.fault("g1-1", 1)
    rig.start("g1-2", "b", shape=1)
    rig.group("g2", [2, 20])
    rig.group("g3", [3, 30])
    rig.group("g4", [4, 40])
    where = {node: attempt for attempt, (node, _) in rig.outstanding().items() if attempt != "g1-2"}
    rig.start(where["a"], "a", shape=2)
    assert fails(rig.fault("g1-2", 1)) == []
    rig.start(where["c"], "c", shape=3)


def test_the_verdict_waits_until_the_slots_tune_something_else() -> None:
    rig = Rig()
    _faulted_twice(rig)
    assert fails(rig.tick(5.0)) == []
    rig.tuned("g2-1", 2)
    rig.node("d")
    on_b = next(a for a, (node, _) in rig.outstanding().items() if node == "b")
    rig.start(on_b, "b", shape=4)
    assert fails(rig.tick(5.0)) == [], "b has tuned nothing since"
    rig.tuned(on_b, 4)
    assert fails(rig.tick(5.0)) == [(1, Reason.FAULT, True)]
    assert rig.replayed().digest() == rig.policy.digest()


def test_the_verdict_does_not_wait_for_ever() -> None:
    rig = Rig()
    _faulted_twice(rig)
    assert fails(rig.tick(119.0)) == []
    assert fails(rig.tick(1.0)) == [(1, Reason.FAULT, True)]


def test_a_slot_where_all_ends_badly_is_in_doubt() -> None:
    """Shape 1 faulted on a, which tunes on, and on b, as does the next one there."""
    rig = Rig(PolicySettings(bad_row=2))
    _faulted_twice(rig)
    rig.tuned("g2-1", 2)
    on_b = next(a for a, (node, _) in rig.outstanding().items() if node == "b")
    rig.start(on_b, "b", shape=4)
    made = rig.fault(on_b, 4)
    assert fails(made) == []
    assert ("g1-3", "c", None) in sends(made)
    rig.start("g1-3", "c", shape=1)
    rig.tuned("g1-3", 1)
    assert rig.policy.settled(1)
    assert rig.replayed().digest() == rig.policy.digest()


def test_the_verdict_waits_through_a_restart_of_the_controller() -> None:
    rig = Rig()
    _faulted_twice(rig)
    assert fails(rig.do(ev.Resumed(2)) + rig.tick(5.0)) == [], "the nodes are about to join again, and work on"
    assert fails(rig.tick(115.0)) == [(1, Reason.FAULT, True)]


def test_a_fault_on_a_slot_with_marks_does_not_count_while_a_node_is_left() -> None:
    """Shape 1 faults on a, by chance, and on b, which falls sick and whose canary passes all the same."""
    rig = Rig()
    rig.node("a")
    rig.node("b")
    rig.do(ev.NodeExpected("c", ("0",)))
    rig.group("g1", [1])
    rig.start("g1-1", "a", shape=1)
    assert sends(rig.fault("g1-1", 1)) == [("g1-2", "b", None)]
    rig.start("g1-2", "b", shape=1)
    rig.group("g5", [5])
    rig.start("g5-1", "a", shape=5)
    assert fails(rig.fault("g1-2", 1)) == []
    assert sends(rig.group("g2", [2])) == [("g2-1", "b", None)]
    rig.start("g2-1", "b", shape=2)
    assert ("g2-2", "a", None) in sends(rig.fault("g2-1", 2))
    assert sends(rig.group("g6", [6])) == [("g6-1", "b", None)]
    rig.start("g6-1", "b", shape=6)
    rig.tuned("g5-1", 5)
    rig.end("g5-1")
    rig.start("g2-2", "a", shape=2)
    rig.tuned("g2-2", 2)  # a mark against b, which has tuned nothing since
    assert fails(rig.tick(120.0)) == []
    assert "a node other than a, b" in rig.policy.why("g1")
    assert ("g1-3", "c", None) in sends(rig.node("c"))
    rig.start("g1-3", "c", shape=1)
    assert fails(rig.tuned("g1-3", 1)) == []
    assert rig.policy.settled(1)


def test_a_shape_after_which_the_canary_fails_on_two_nodes_fails() -> None:
    rig = proven_nodes()
    rig.group("g1", [1])
    first = rig.outstanding()["g1-1"][0]
    rig.start("g1-1", first, shape=1)
    rig.end("g1-1", Reason.HANG, 1)
    assert kinds(rig.canary(first, ok=False)) == ["Quarantine"]
    second = rig.outstanding()["g1-2"][0]
    rig.start("g1-2", second, shape=1)
    rig.end("g1-2", Reason.HANG, 1)
    out = rig.canary(second, ok=False)
    assert fails(out) == [(1, Reason.HANG, True)]
    detail = next(d.detail for d in out if isinstance(d, ev.FailShape))
    assert detail == f"the canary failed after it on {first} slot 0 and {second} slot 0, which had tuned shapes before"
    assert rig.replayed().digest() == rig.policy.digest()


def test_slots_that_never_tuned_anything_speak_against_no_shape_by_their_canaries() -> None:
    rig = Rig()
    for node in ("a", "b", "c"):
        rig.node(node)
    rig.group("g1", [1])
    for n in (1, 2):
        node = rig.outstanding()[f"g1-{n}"][0]
        rig.start(f"g1-{n}", node, shape=1)
        rig.end(f"g1-{n}", Reason.HANG, 1)
        assert fails(rig.canary(node, ok=False)) == []
    assert "g1-3" in rig.outstanding()


def test_two_nodes_of_one_host_are_one_for_blame() -> None:
    rig = Rig()
    rig.group("g1", [1])
    for node, host in (("a", "h"), ("b", "h"), ("c", "")):
        rig.do(ev.NodeExpected(node, ("0",), host))
    rig.node("a")
    rig.node("b")
    rig.start("g1-1", "a", shape=1)
    assert sends(rig.fault("g1-1", 1)) == []  # c is on another host, and in a moment there
    assert "a node other than h" in rig.policy.why("g1")
    assert sends(rig.node("c")) == [("g1-2", "c", None)]
    rig.start("g1-2", "c", shape=1)
    assert fails(rig.fault("g1-2", 1)) == [(1, Reason.FAULT, True)]
    assert rig.replayed().digest() == rig.policy.digest()


def test_two_nodes_of_one_host_confirm_where_there_is_no_other() -> None:
    rig = Rig()
    rig.group("g1", [1])
    for node in ("a", "b"):
        rig.do(ev.NodeExpected(node, ("0",), "h"))
        rig.node(node)
    rig.start("g1-1", "a", shape=1)
    assert sends(rig.fault("g1-1", 1)) == [("g1-2", "b", None)]  # another slot of the same host
    rig.start("g1-2", "b", shape=1)
    assert fails(rig.fault("g1-2", 1)) == [(1, Reason.FAULT, True)]


def test_the_reason_is_that_of_the_last_fault() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a")
    rig.node("b")
    rig.start("g1-1", "a", shape=1)
    rig.fault("g1-1", 1, Reason.OOM)
    rig.start("g1-2", "b", shape=1)
    out = rig.fault("g1-2", 1, Reason.HANG)
    assert fails(out) == [(1, Reason.HANG, True)]
    detail = next(d.detail for d in out if isinstance(d, ev.FailShape))
    assert detail == "detail; seen on a slot 0 (oom), b slot 0 (hang)"


def test_it_passes_elsewhere() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a")
    rig.node("b")
    rig.start("g1-1", "a", shape=1)
    assert sends(rig.fault("g1-1", 1)) == [("g1-2", "b", None)]
    rig.start("g1-2", "b", shape=1)
    rig.tuned("g1-2", 1)
    assert rig.end("g1-2") == []
    assert rig.policy.progress().tuned == 1


def test_one_node_with_two_slots_convicts_on_both() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a", 2)
    rig.start("g1-1", "a", "0", 1)
    out = rig.fault("g1-1", 1)
    assert sends(out) == [("g1-2", "a", "1")]  # named: not where it faulted
    rig.start("g1-2", "a", "1", 1)
    assert fails(rig.fault("g1-2", 1)) == [(1, Reason.FAULT, True)]


def test_one_slot_cannot_confirm() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    assert sends(rig.fault("g1-1", 1)) == [("g1-2", "a", None)]
    rig.start("g1-2", "a", shape=1)
    out = rig.fault("g1-2", 1)
    assert fails(out) == [(1, Reason.FAULT, False)]
    assert next(d.detail for d in out if isinstance(d, ev.FailShape)).endswith("unconfirmed: only one slot")


def test_the_verdict_waits_for_another_node_that_is_coming() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a", 2)
    rig.start("g1-1", "a", "0", 1)
    rig.do(ev.NodeJoined("b", ("0",)))  # its canary still runs
    assert sends(rig.fault("g1-1", 1)) == []
    assert "other than a" in rig.policy.why("g1")
    assert sends(rig.canary("b")) == [("g1-2", "b", None)]


def test_the_verdict_waits_for_a_node_that_is_being_prepared() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.do(ev.NodeExpected("b", ("0",)))
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    assert sends(rig.fault("g1-1", 1)) == []
    assert sends(rig.node("b")) == [("g1-2", "b", None)]


def test_two_slots_of_a_node_are_not_enough_when_another_node_is_there() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a", 2)
    rig.start("g1-1", "a", "0", 1)
    assert sends(rig.fault("g1-1", 1)) == [("g1-2", "a", "1")]
    rig.start("g1-2", "a", "1", 1)
    rig.node("b")
    out = rig.fault("g1-2", 1)
    assert fails(out) == []
    assert sends(out) == [("g1-3", "b", None)]
    rig.start("g1-3", "b", shape=1)
    assert fails(rig.fault("g1-3", 1)) == [(1, Reason.FAULT, True)]


def test_a_node_that_goes_away_leaves_the_verdict_to_who_is_left() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a")
    rig.node("b")
    rig.start("g1-1", "a", shape=1)
    assert sends(rig.fault("g1-1", 1)) == [("g1-2", "b", None)]
    rig.now += 100
    assert sends(rig.lost("b")) == [("g1-3", "a", None)]


@pytest.mark.parametrize("in_flight", [None, 1])
def test_unknown_in_flight_is_halved(in_flight: int | None) -> None:
    """No shape, or one that was settled before, is in flight: it died between shapes."""
    rig = Rig()
    rig.group("g1", [1, 2, 3, 4, 5, 6], 60.0)
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    rig.tuned("g1-1", 1)
    out = rig.fault("g1-1", in_flight)
    split = of(ev.Split, out)[0]
    assert isinstance(split, ev.Split)
    assert split.children == (("g1a", (2, 3, 4)), ("g1b", (5, 6)))
    assert "halves" in split.why
    rig.start("g1a-1", "a")
    rig.tuned("g1a-1", 2, 3, 4)
    assert rig.end("g1a-1") == []
    rig.start("g1b-1", "a")
    assert of(ev.Split, rig.fault("g1b-1", None)) == [
        ev.Split("g1b", (("g1c", (5,)), ("g1d", (6,))), split.why.replace("g1-1", "g1b-1"))
    ]
    rig.start("g1c-1", "a")
    rig.tuned("g1c-1", 5)
    rig.end("g1c-1")
    # one is left: it is that one
    rig.start("g1d-1", "a")
    assert kinds(rig.fault("g1d-1", None))[:2] == ["Requeue", "Send"]
    rig.start("g1d-2", "a")
    assert fails(rig.fault("g1d-2", None)) == [(6, Reason.FAULT, False)]


def test_the_last_that_is_left_was_in_flight() -> None:
    rig = Rig()
    rig.group("g1", [1, 2])
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    rig.tuned("g1-1", 1)
    assert kinds(rig.fault("g1-1", None)) == ["Requeue", "Send"]
    assert rig.policy.outstanding()[0].alone


def test_progress_names_the_shape_where_the_worker_does_not() -> None:
    rig = Rig()
    rig.group("g1", [1, 2, 3])
    rig.node("a")
    rig.start("g1-1", "a", shape=2)
    split = of(ev.Split, rig.fault("g1-1", None))[0]
    assert isinstance(split, ev.Split)
    assert split.children == (("g1a", (2,)), ("g1b", (1, 3)))


def test_halving_does_not_use_up_tries() -> None:
    rig = Rig(PolicySettings(max_tries=2))
    rig.group("g1", range(1, 65), 60.0)
    rig.node("a")
    rig.start("g1-1", "a")
    out = rig.fault("g1-1", None)
    for _ in range(5):
        assert fails(out) == []
        attempt = sends(out)[-1][0]
        rig.start(attempt, "a")
        out = rig.fault(attempt, None)
    assert rig.policy.progress().failed == 0


def test_a_cap_on_all_tries() -> None:
    """Rejections go on as long as they are let."""
    rig = Rig(PolicySettings(max_tries=3))
    rig.group("g1", [1])
    rig.node("a")
    for n in (1, 2):
        assert sends(rig.end(f"g1-{n}", Reason.REJECTED)) == [(f"g1-{n + 1}", "a", None)]
    assert fails(rig.end("g1-3", Reason.REJECTED)) == [(1, Reason.REJECTED, False)]


def test_a_fault_on_a_slot_whose_canary_then_fails_is_not_held_against_the_shape() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a")
    rig.node("b")
    rig.start("g1-1", "a", shape=1)
    rig.fault("g1-1", 1)
    rig.start("g1-2", "b", shape=1)
    rig.end("g1-2", Reason.FAULT, 1)
    out = rig.canary("b", ok=False)
    assert fails(out) == []
    assert kinds(out) == ["Requeue", "Quarantine", "Send"]
    assert sends(out) == [("g1-3", "a", None)]
    rig.start("g1-3", "a", shape=1)
    rig.tuned("g1-3", 1)
    assert rig.policy.progress().tuned == 1


def test_a_verdict_does_not_wait_for_ever_for_a_canary() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a")
    rig.node("b")
    rig.start("g1-1", "a", shape=1)
    rig.fault("g1-1", 1)
    rig.start("g1-2", "b", shape=1)
    rig.end("g1-2", Reason.FAULT, 1)
    assert rig.tick(30.0) == []
    assert fails(rig.tick(31.0)) == [(1, Reason.FAULT, True)]


def test_a_suspect_goes_to_a_slot_that_has_proven_itself() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("b", 2)
    rig.start("g1-1", "b", "0", 1)
    assert sends(rig.fault("g1-1", 1)) == [("g1-2", "b", "1")]
    rig.start("g1-2", "b", "1", 1)
    rig.tuned("g1-2", 1)
    rig.end("g1-2")
    # slot 0 of b is in doubt now, slot 1 is proven
    rig.node("a")
    assert sends(rig.group("g2", [2])) == [("g2-1", "b", None)]
    assert sends(rig.group("g3", [3])) == [("g3-1", "a", None)]
    rig.start("g3-1", "a", shape=3)
    assert sends(rig.fault("g3-1", 3)) == [("g3-2", "b", "1")]
