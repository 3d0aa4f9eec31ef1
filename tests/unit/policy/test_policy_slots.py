"""Canaries, quarantine, cool-down, and when nothing is left."""

from __future__ import annotations

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.reasons import Reason
from tests.support.policy_rig import Rig, kinds, of, sends


def test_a_failed_canary_shuts_the_slot_until_one_passes() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.do(ev.NodeJoined("a", ("0",)))
    out = rig.canary("a", ok=False)
    assert out == [ev.Quarantine("a", "0", "the canary failed: wrong answer", 1005.0)]
    assert rig.tick(4.0) == []
    assert rig.tick(1.0) == [ev.AskCanary("a", "0", "canary-1")]
    assert rig.tick(10.0) == []
    assert sends(rig.canary("a")) == [("g1-1", "a", None)]


def test_the_cool_down_doubles_until_something_is_tuned_there() -> None:
    rig = Rig(PolicySettings(cool_down_s=60.0, max_cool_down_s=200.0, max_strikes=99))
    rig.group("g1", [1, 2, 3])
    rig.do(ev.NodeJoined("a", ("0",)))
    rig.canary("a")
    waits = []
    for _ in range(4):
        q = of(ev.Quarantine, rig.canary("a", ok=False))[0]
        assert isinstance(q, ev.Quarantine)
        waits.append(q.until - rig.now)
        assert kinds(rig.tick(waits[-1])) == ["AskCanary"]
    assert waits == [60.0, 120.0, 200.0, 200.0]
    rig.canary("a")
    rig.start("g1-1", "a", shape=1)
    rig.tuned("g1-1", 1)
    rig.end("g1-1", Reason.FAULT, 2)
    q = of(ev.Quarantine, rig.canary("a", ok=False))[0]
    assert isinstance(q, ev.Quarantine)
    assert q.until - rig.now == 60.0


def test_the_only_slot_sick_is_the_end_after_three_canaries() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.do(ev.NodeJoined("a", ("0",)))
    for _ in range(2):
        rig.canary("a", ok=False)
        assert rig.policy.progress().stuck is None
        rig.tick(3600.0)
    rig.canary("a", ok=False)
    assert rig.policy.progress().stuck == "a slot 0 is quarantined (the canary failed: wrong answer)"
    assert rig.policy.progress().pending == 1
    # a person who resumes hopes again
    rig.do(ev.Resumed(2))
    assert rig.policy.progress().stuck is None
    rig.do(ev.NodeJoined("a", ("0",)))
    assert kinds(rig.tick(3600.0)) == ["AskCanary"]
    assert sends(rig.canary("a")) == [("g1-1", "a", None)]


def test_a_tuner_that_can_never_start_ends_its_slot_at_once() -> None:
    """No canary is repeated, and where nothing else is left the run ends with its words."""
    rig = Rig()
    rig.group("g1", [1])
    rig.do(ev.NodeJoined("a", ("0",)))
    made = rig.do(ev.CanaryFailed("a", "0", "it needs triton", final=True))
    assert kinds(made) == ["Quarantine"]
    assert rig.policy.progress().stuck == "a slot 0 is quarantined (the canary failed: it needs triton)"
    assert kinds(rig.tick(600.0)) == []
    rig.do(ev.Resumed(2))
    assert rig.policy.progress().stuck is None


def test_a_canary_that_is_never_answered_counts_as_failed() -> None:
    rig = Rig(PolicySettings(canary_timeout_s=300.0))
    rig.group("g1", [1])
    rig.do(ev.NodeJoined("a", ("0",)))
    rig.canary("a", ok=False)
    for wait in (10.0, 20.0):
        assert kinds(rig.tick(3600.0)) == ["AskCanary"]
        assert rig.tick(299.0) == []
        out = rig.tick(1.0)
        assert out == [ev.Quarantine("a", "0", "no answer to its canary for 300 s", rig.now + wait)]
    assert rig.policy.progress().stuck is not None


def _adrift(rig: Rig) -> None:
    """The node is lost and joins again; its worker is still at what it had, and does not say so."""
    rig.node("a")
    rig.group("g1", [1, 2])
    rig.start("g1-1", "a", shape=1)
    rig.lost("a")
    assert kinds(rig.do(ev.NodeJoined("a", ("0",)))) == ["AskCanary"]
    assert kinds(rig.tick(300.0)) == ["AskCanary"]


def test_a_slot_that_was_at_work_when_its_node_was_lost_may_take_long_to_answer() -> None:
    """One shape takes longer than a canary's answer may; once it ends, the answer may take as long as any."""
    rig = Rig()
    _adrift(rig)
    rig.tick(200.0)
    rig.end("g1-1")
    assert kinds(rig.tick(299.0)) == []
    assert sends(rig.canary("a"))
    assert kinds(rig.tick(600.0)) == []
    assert rig.replayed().digest() == rig.policy.digest()


def test_nor_is_its_answer_awaited_for_ever_after_the_end() -> None:
    rig = Rig()
    _adrift(rig)
    rig.end("g1-1")
    assert kinds(rig.tick(300.0)) == ["Quarantine"]


def test_a_slot_whose_work_at_the_loss_never_ends_is_quarantined_in_the_end() -> None:
    rig = Rig()
    _adrift(rig)
    asked = [kinds(rig.tick(300.0)) for _ in range(11)]
    assert asked == [["AskCanary"]] * 10 + [["Quarantine"]]


def test_what_was_named_for_a_sick_slot_comes_back() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a", 2)
    rig.start("g1-1", "a", "0", 1)
    rig.fault("g1-1", 1)
    assert rig.outstanding() == {"g1-2": ("a", "1")}
    out = rig.canary("a", "1", ok=False)
    assert kinds(out) == ["Quarantine", "TakeBack"]
    assert sends(rig.taken("g1-2")) == [("g1-3", "a", None)]


def test_what_any_slot_may_claim_stays_where_the_sick_one_refuses_by_itself() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a", 2)
    assert kinds(rig.canary("a", "1", ok=False)) == ["Quarantine"]
    assert rig.outstanding() == {"g1-1": ("a", None)}
    # with no slot left to claim it, it comes back
    assert kinds(rig.canary("a", "0", ok=False)) == ["Quarantine", "TakeBack"]


def _sick_slot(rig: Rig, shape: int) -> list[ev.Decision]:
    """The shape faults on b slot 0 and passes on a; the decisions of its passing."""
    assert sends(rig.group(f"g{shape}", [shape])) == [(f"g{shape}-1", "b", None)]
    rig.start(f"g{shape}-1", "b", "0", shape)
    again, node, _ = sends(rig.fault(f"g{shape}-1", shape))[0]
    assert node == "a"
    rig.start(again, "a", "0", shape)
    return rig.tuned(again, shape) + rig.end(again)


def test_three_faults_of_shapes_that_pass_elsewhere_shut_the_slot() -> None:
    rig = Rig()
    rig.node("b", 2)
    rig.node("a")
    assert _sick_slot(rig, 1) == []
    assert _sick_slot(rig, 2) == []
    assert _sick_slot(rig, 3) == [ev.Quarantine("b", "0", "3 faults of 3 shapes that passed elsewhere", 1060.0)]
    # its worker is well by its own canary, so work for the node names the other slot from now on
    assert sends(rig.group("g4", [4])) == [("g4-1", "b", "1")]
    # and that canary does not lift it: only the one that is asked for at the end of the cool-down does
    assert rig.canary("b", "0") == []
    rig.start("g4-1", "b", "1")
    assert sends(rig.group("g5", [5])) == [("g5-1", "a", None)]
    assert sends(rig.group("g6", [6])) == [("g6-1", "b", "1")]
    assert rig.tick(60.0) == [ev.AskCanary("b", "0", "canary-1")]
    # the slot is back, and what was named for the busy one is wanted on it
    assert rig.canary("b", "0") == [ev.TakeBack("g6-1", "b")]
    assert sends(rig.taken("g6-1")) == [("g6-2", "b", None)]


def test_a_slot_that_was_shut_is_shut_by_one_bad_end_until_it_tunes_something() -> None:
    rig = Rig()
    rig.node("b")
    rig.node("a")
    for shape in (1, 2, 3):
        _sick_slot(rig, shape)
    rig.tick(60.0)
    rig.canary("b")
    rig.group("g4", [4])
    rig.start("g4-1", "b", "0", 4)
    why = "a bad end after its quarantine, and nothing tuned since"
    out = rig.end("g4-1", Reason.FAULT, 4)
    assert of(ev.Quarantine, out) == [ev.Quarantine("b", "0", why, rig.now + 120.0)]
    rig.canary("b")
    assert sends(rig.tick()) == [], "its own canary lifts nothing"
    rig.tick(120.0)
    rig.canary("b")
    rig.group("g5", [5])
    rig.start("g5-1", "b", "0", 5)
    rig.tuned("g5-1", 5)
    rig.end("g5-1")
    assert _sick_slot(rig, 6) == []


def _faults_in_turn(tuned_elsewhere: int, *, between: bool = False) -> list[ev.Record]:
    """Three shapes, each its own group, fault on b, and are still to be tried on a; the quarantines that follow."""
    rig = Rig()
    rig.node("a")
    rig.group("g1", range(1, 201))
    rig.start("g1-1", "a")
    rig.tuned("g1-1", *range(1, tuned_elsewhere + 1))
    rig.node("b")
    out: list[ev.Decision] = []
    for i in (2, 3, 4):
        assert sends(rig.group(f"g{i}", [1000 * i])) == [(f"g{i}-1", "b", None)]
        rig.start(f"g{i}-1", "b")
        out += rig.fault(f"g{i}-1", 1000 * i)
        if between:
            rig.group(f"g{i}0", [1000 * i + 1])
            rig.start(f"g{i}0-1", "b")
            rig.tuned(f"g{i}0-1", 1000 * i + 1)
            rig.end(f"g{i}0-1")
    assert rig.replayed().digest() == rig.policy.digest()
    return of(ev.Quarantine, out)


def test_a_slot_where_group_after_group_faults_is_shut_before_any_passes_elsewhere() -> None:
    why = "shapes of 3 groups faulted here, one after the other"
    assert _faults_in_turn(100) == [ev.Quarantine("b", "0", why, 1060.0)]
    assert _faults_in_turn(20) == [], "too little is known of how often shapes fault elsewhere"
    assert _faults_in_turn(100, between=True) == [], "it tunes others"


def test_the_last_slot_is_not_shut_for_a_bad_end() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.group("g2", [2])
    rig.node("a")
    rig.canary("a", ok=False)
    rig.tick(60.0)
    rig.canary("a")
    attempt, _, _ = next((a, n, s) for a, (n, s) in rig.outstanding().items())
    rig.start(attempt, "a", "0", 1)
    assert of(ev.Quarantine, rig.fault(attempt, 1)) == []


def test_a_slot_that_works_on_while_its_node_is_given_up_owes_no_canary_until_it_is_done() -> None:
    rig = Rig()
    rig.group("g1", [1, 2])
    rig.node("a")
    rig.start("g1-1", "a", "0", 1)
    rig.lost("a")
    assert kinds(rig.do(ev.NodeJoined("a", ("0",)))) == ["AskCanary"]
    rig.tuned("g1-1", 1)  # its link was gone, it was not
    assert kinds(rig.tick(300.0)) == ["AskCanary"], "it cannot answer now: no quarantine, and the request is repeated"
    rig.tuned("g1-1", 2)
    rig.end("g1-1")
    assert kinds(rig.tick(299.0)) == []
    assert kinds(rig.tick(1.0)) == ["Quarantine"], "from now on it could have answered"
    assert rig.replayed().digest() == rig.policy.digest()


def test_faults_of_one_shape_alone_do_not_shut_a_slot() -> None:
    rig = Rig(PolicySettings(marks=1))
    rig.node("b")
    rig.node("a")
    assert _sick_slot(rig, 1) == []
    assert _sick_slot(rig, 2) != []


def test_a_riddle_is_held_against_the_slot_once_all_of_it_passed_elsewhere() -> None:
    rig = Rig(PolicySettings(marks=1, mark_shapes=1))
    rig.node("b")
    rig.node("a")
    rig.group("g1", [1, 2])
    rig.start("g1-1", "b", "0")
    out = rig.fault("g1-1", None)
    assert [(a, n) for a, n, _ in sends(out)] == [("g1a-1", "a"), ("g1b-1", "a")]
    rig.start("g1a-1", "a", "0", 1)
    assert rig.tuned("g1a-1", 1) == []
    rig.end("g1a-1")
    rig.start("g1b-1", "a", "0", 2)
    assert kinds(rig.tuned("g1b-1", 2)) == ["Quarantine"]


def test_a_node_that_was_lost_owes_canaries() -> None:
    rig = Rig()
    rig.node("a", 2)
    rig.group("g1", [1])
    rig.lost("a")
    assert rig.policy.progress().stuck == "a is lost"
    out = rig.do(ev.NodeJoined("a", ("0", "1")))
    assert out == [ev.AskCanary("a", "0", "canary-1"), ev.AskCanary("a", "1", "canary-2")]
    # its link breaks again before the answer: what was asked went with the inbox
    assert kinds(rig.do(ev.NodeJoined("a", ("0", "1")))) == ["AskCanary", "AskCanary"]
    assert sends(rig.canary("a", "0")) == [("g1-2", "a", None)]


def test_events_of_strangers_are_ignored() -> None:
    rig = Rig()
    rig.group("g1", [1])
    before = rig.policy.digest()
    for event in (
        ev.CanaryPassed("x", "0", 1.0),
        ev.CanaryFailed("x", "0", ""),
        ev.SlotLost("x", "0", ""),
        ev.NodeLost("x", ""),
        ev.NodeDraining("x"),
        ev.AttemptStarted("g9-1", "x", "0"),
        ev.ShapeStarted("g9-1", 1),
        ev.ShapeTuned("g9-1", 77),
        ev.ShapeRefused("g9-1", 77, Reason.UNSUPPORTED, ""),
        ev.AttemptEnded("g9-1", Reason.FAULT, 1, "", 0.0),
        ev.AttemptTaken("g9-1", True),
        ev.RetryAsked((1, 77)),
    ):
        assert rig.do(event) == []
    assert rig.policy.digest() == before
