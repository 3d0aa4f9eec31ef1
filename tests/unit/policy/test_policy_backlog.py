"""Supply, order, take-back, stop and drain: which group is sent where, and which comes back."""

from __future__ import annotations

from orchestrator.policy.book import Book

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.reasons import Reason
from tests.support.policy_rig import Rig, kinds, of, sends
from worker.protocol import ATTEMPT_RE


def test_nothing_is_sent_before_a_canary_passed() -> None:
    rig = Rig()
    rig.group("g1", [1])
    assert rig.do(ev.NodeJoined("a", ("0", "1"))) == []
    assert "slots: 0 starting, 1 starting" in rig.policy.why("g1")
    assert sends(rig.canary("a", "1")) == [("g1-1", "a", None)]


def test_longest_first_and_seq_grows() -> None:
    rig = Rig()
    for name, cost in (("g1", 10.0), ("g2", 300.0), ("g3", 100.0)):
        rig.group(name, [int(name[1])], cost)
    out = rig.node("a")
    assert sends(out) == [("g2-1", "a", None), ("g3-1", "a", None)]
    assert [d.seq for d in out if isinstance(d, ev.Send)] == [1, 2]
    assert sends(rig.start("g2-1", "a")) == [("g1-1", "a", None)]


def test_the_most_valuable_first_also_after_a_split() -> None:
    rig = Rig()
    for name, value, cost in (("g1", 1.0, 900.0), ("g2", 50.0, 10.0), ("g3", 50.0, 20.0)):
        rig.do(ev.GroupAdded(name, (10 * int(name[1]), 10 * int(name[1]) + 1), cost, value))
    assert [attempt for attempt, _, _ in sends(rig.node("a"))][:2] == ["g3-1", "g2-1"]
    rig.group("g4", [40, 41], 900.0)
    rig.start("g3-1", "a")
    rig.fault("g3-1", None)
    out = rig.start("g2-1", "a") + rig.tuned("g2-1", 20, 21) + rig.end("g2-1") + rig.start("g1-1", "a")
    assert [attempt for attempt, _, _ in sends(out)][:2] == ["g3a-1", "g3b-1"], "with their group's value"
    assert rig.replayed().digest() == rig.policy.digest()


def test_nothing_is_demanded_of_leases_once_no_work_is_started() -> None:
    rig = Rig()
    rig.group("g1", [1, 2], 500.0)
    assert rig.policy.backlog_s() == 500.0
    rig.do(ev.StopAsked("95% of the gain is won"))
    assert rig.policy.backlog_s() == 0.0
    rig.do(ev.Resumed(2))
    assert rig.policy.backlog_s() == 500.0


def test_backlog_is_two_groups_a_ready_slot_when_groups_are_long() -> None:
    rig = Rig()
    for i in range(1, 21):
        rig.group(f"g{i}", [i], 500.0)
    assert len(sends(rig.node("a", 3))) == 6
    # a running group does not count
    assert len(sends(rig.start("g1-1", "a"))) == 1
    assert rig.start("g2-1", "a", "1") != []


def test_long_groups_go_to_free_slots_only_where_another_node_could_have_them() -> None:
    rig = Rig()
    rig.node("a", 2)
    rig.do(ev.NodeExpected("b", ("0", "1")))
    for i in range(1, 7):
        rig.group(f"g{i}", [i], 500.0)
    assert rig.outstanding() == {"g1-1": ("a", None), "g2-1": ("a", None)}
    rig.start("g1-1", "a", "0")
    rig.start("g2-1", "a", "1")
    assert len(rig.outstanding()) == 2
    assert sends(rig.node("b", 2)) == [("g3-1", "b", None), ("g4-1", "b", None)]
    rig.tuned("g1-1", 1)
    assert sends(rig.end("g1-1")) == [("g5-1", "a", None)]


def test_a_long_group_that_comes_back_is_claimed_before_short_ones() -> None:
    rig = Rig()
    rig.node("a")
    rig.node("b")
    rig.group("g1", [1], 500.0)
    for i in range(2, 9):
        rig.group(f"g{i}", [i], 20.0)
    node = rig.outstanding()["g1-1"][0]
    rig.start("g1-1", node)
    made = rig.do(ev.AttemptEnded("g1-1", Reason.CANCELLED, 1, "", 1.0))
    (sent,) = (d for d in made if isinstance(d, ev.Send) and d.group == "g1")
    assert sent.seq == 0
    assert all(d.seq > 0 for _, d in rig.journal if isinstance(d, ev.Send) and d.group not in ("g1",))


def test_backlog_is_seconds_of_work_when_groups_are_short() -> None:
    rig = Rig()
    for i in range(1, 101):
        rig.group(f"g{i}", [i], 10.0)
    assert len(sends(rig.node("a"))) == 12  # 120 s


def test_backlog_is_a_fair_share_when_work_runs_short() -> None:
    rig = Rig()
    for i in range(1, 21):
        rig.group(f"g{i}", [i], 10.0)
    rig.do(ev.NodeJoined("a", ("0",)))
    rig.do(ev.NodeJoined("b", ("0",)))
    assert len(sends(rig.canary("a"))) == 10  # half of 200 s, though 120 s would be allowed
    assert len(sends(rig.canary("b"))) == 10


def test_the_first_node_leaves_its_share_to_those_that_are_being_prepared() -> None:
    rig = Rig()
    for i in range(1, 21):
        rig.group(f"g{i}", [i], 5.0)
    for node in ("a", "b"):
        rig.do(ev.NodeExpected(node, ("0",)))
    assert len(sends(rig.node("a"))) == 10  # half of 100 s
    assert len(sends(rig.node("b"))) == 10


def test_the_share_of_a_node_that_never_came_goes_to_the_others() -> None:
    rig = Rig()
    for i in range(1, 21):
        rig.group(f"g{i}", [i], 5.0)
    for node in ("a", "b"):
        rig.do(ev.NodeExpected(node, ("0",)))
    assert len(sends(rig.node("a"))) == 10
    assert len(sends(rig.do(ev.NodeLost("b", "it does not answer")))) == 10
    assert rig.policy.progress().stuck is None


def test_a_node_that_waits_for_others_is_not_counted_on() -> None:
    rig = Rig()
    for i in range(1, 21):
        rig.group(f"g{i}", [i], 5.0)
    for node in ("a", "b"):
        rig.do(ev.NodeExpected(node, ("0",)))
    assert len(sends(rig.node("a"))) == 10
    assert len(sends(rig.do(ev.NodeBusy("b", "wait", "a container")))) == 10
    assert rig.policy.progress().stuck is None
    rig.do(ev.NodeBusy("b", "free", ""))
    rig.group("g21", [21], 5.0)
    assert len(sends(rig.node("b"))) == 1


def test_a_node_that_is_up_is_not_expected_again() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a")
    rig.do(ev.NodeExpected("a", ("0",)))
    assert rig.policy.why("g1").startswith("attempt g1-1 is in the inbox of a")


def test_groups_that_cost_nothing_are_capped_by_number() -> None:
    rig = Rig(PolicySettings(most_ahead=5))
    for i in range(1, 101):
        rig.group(f"g{i}", [i], 0.0)
    assert len(sends(rig.node("a", 2))) == 10


def test_work_goes_to_the_idlest_node() -> None:
    rig = Rig()
    rig.node("a", 2)
    rig.node("b", 2)
    assert [s[1] for i in range(1, 5) for s in sends(rig.group(f"g{i}", [i], 100.0))] == ["a", "b", "a", "b"]


def test_an_idle_node_gets_the_tail_of_the_fullest() -> None:
    rig = Rig()
    for i, cost in enumerate((400.0, 300.0, 200.0), 1):
        rig.group(f"g{i}", [i], cost)
    rig.node("a")
    rig.start("g1-1", "a")
    assert rig.outstanding() == {"g1-1": ("a", "0"), "g2-1": ("a", None), "g3-1": ("a", None)}
    assert rig.node("b") == [ev.TakeBack("g3-1", "a")]
    assert rig.tick() == []  # one idle slot, one take-back
    out = rig.taken("g3-1")
    assert kinds(out) == ["Requeue", "Send"]
    assert sends(out) == [("g3-2", "b", None)]
    # a has g2 ahead of a busy slot, b has g3 for its idle one: nothing goes to and fro
    assert rig.tick() == []
    assert rig.start("g3-2", "b") == []
    assert rig.end("g1-1") != []


def test_a_lost_race_leaves_the_attempt_where_it_is() -> None:
    rig = Rig()
    for i in (1, 2):
        rig.group(f"g{i}", [i])
    rig.node("a")
    rig.start("g1-1", "a")
    assert rig.node("b") == [ev.TakeBack("g2-1", "a")]
    assert rig.taken("g2-1", won=False) == []
    assert "claimed" in rig.policy.why("g2")
    assert rig.start("g2-1", "a") == []
    assert rig.policy.is_outstanding("g2-1")


def test_what_an_idle_slot_is_about_to_claim_is_not_taken_from_it() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.group("g2", [2])
    rig.node("a", 2)
    assert rig.node("b", 2) == []


def test_what_waits_for_a_busy_slot_is_not_taken_back_to_wait_for_it_again() -> None:
    rig = Rig()
    rig.group("g1", [10, 11])
    rig.node("a", 2)
    rig.start("g1-1", "a", "0")
    rig.tuned("g1-1", 10)
    rig.group("g2", [20])
    rig.start("g2-1", "a", "1")
    rig.group("g3", [30], 50.0)
    rig.node("b")
    rig.taken("g3-1")
    rig.start("g3-2", "b")
    rig.fault("g2-1", 20)
    out = rig.fault("g3-2", 30)
    assert sends(out) == [("g3-3", "a", "0")], "the one slot elsewhere that tuned something is busy"
    assert of(ev.TakeBack, out) == []
    # slot 1 of a has nothing to do, yet nothing that it should get
    assert sends(rig.start("g2-2", "b")) == []
    assert rig.tick() == []
    assert "in the inbox of a slot 0" in rig.policy.why("g3")


def test_a_slot_in_doubt_gets_the_shortest_group_before_a_long_one() -> None:
    rig = Rig()
    for i, node in ((8, "c"), (9, "a")):
        rig.node(node)
        rig.group(f"g{i}", [i], 900.0)
        rig.start(f"g{i}-1", node)
    rig.node("b")
    rig.canary("b", ok=False)
    for i, cost in ((1, 600.0), (2, 200.0), (3, 500.0)):
        rig.group(f"g{i}", [i], cost)
    rig.tick(60.0)
    assert sends(rig.canary("b")) == [("g2-1", "b", "0")]
    rig.start("g2-1", "b")
    rig.tuned("g2-1", 2)
    assert sends(rig.end("g2-1")) == [("g1-1", "b", None)], "it has tuned a shape"
    assert rig.replayed().digest() == rig.policy.digest()


def test_a_suspect_goes_to_a_node_where_it_starts_at_once() -> None:
    rig = Rig()
    for node, groups in (("a", (1, 2, 3)), ("b", (4, 5)), ("c", (6,))):
        rig.node(node, len(groups))
        for slot, i in enumerate(groups):
            rig.group(f"g{i}", [10 * i, 10 * i + 1])
            rig.start(f"g{i}-1", node, str(slot))
            rig.tuned(f"g{i}-1", 10 * i)
    for i in (2, 3):  # two slots of a end badly, with nothing left to do
        rig.tuned(f"g{i}-1", 10 * i + 1)
        rig.fault(f"g{i}-1", None)
    rig.tuned("g5-1", 51)
    rig.end("g5-1")
    # a is the idlest node, but its one slot with nothing against it is busy
    assert sends(rig.fault("g6-1", 61)) == [("g6-2", "b", None)]


def test_an_attempt_that_never_arrived_is_sent_again() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.node("a")
    out = rig.taken("g1-1")
    assert kinds(out) == ["Requeue", "Send"]
    assert sends(out) == [("g1-2", "a", None)]
    assert rig.taken("g1-1") == []


def test_stop_takes_back_what_waits_and_sends_nothing() -> None:
    rig = Rig()
    for i in (1, 2, 3):
        rig.group(f"g{i}", [i])
    rig.node("a")
    rig.start("g1-1", "a")
    out = rig.do(ev.StopAsked())
    assert out == [ev.TakeBack("g2-1", "a"), ev.TakeBack("g3-1", "a")]
    assert kinds(rig.taken("g2-1")) == ["Requeue"]
    assert kinds(rig.taken("g3-1")) == ["Requeue"]
    assert rig.policy.progress().stopped
    assert "stopped" in rig.policy.why("g2")
    assert list(rig.outstanding()) == ["g1-1"]
    rig.tuned("g1-1", 1)
    assert rig.end("g1-1") == []
    assert rig.outstanding() == {}
    assert rig.policy.progress().pending == 2


def test_resume_waits_for_each_node_to_say_what_it_still_has() -> None:
    rig = Rig()
    for i in (1, 2):
        rig.group(f"g{i}", [i])
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    rig.do(ev.StopAsked())
    rig.taken("g2-1")
    assert rig.do(ev.Resumed(2)) == []
    assert not rig.policy.progress().stopped
    assert rig.policy.is_outstanding("g1-1")
    assert sends(rig.do(ev.NodeJoined("a", ("0",)))) == [("g2-2", "a", None)]
    # what ran through it all counts
    rig.tuned("g1-1", 1)
    assert rig.end("g1-1") == []
    assert rig.policy.settled(1)


def test_a_draining_node_finishes_and_gets_no_more() -> None:
    rig = Rig()
    for i in (1, 2, 3):
        rig.group(f"g{i}", [i])
    rig.node("a")
    rig.start("g1-1", "a")
    assert rig.do(ev.NodeDraining("a")) == [ev.TakeBack("g2-1", "a"), ev.TakeBack("g3-1", "a")]
    assert kinds(rig.taken("g2-1")) == ["Requeue"]
    assert kinds(rig.taken("g3-1")) == ["Requeue"]
    assert rig.do(ev.NodeJoined("a", ("0",))) == []  # a link that broke and is back changes nothing
    assert rig.policy.progress().stuck is None
    rig.tuned("g1-1", 1)
    rig.end("g1-1")
    assert rig.policy.progress().stuck == "a is draining"
    assert sends(rig.node("b")) == [("g2-2", "b", None), ("g3-2", "b", None)]
    assert rig.policy.progress().stuck is None


def test_cancelled_and_rejected_attempts_come_again() -> None:
    rig = Rig(PolicySettings(max_tries=2))
    rig.group("g1", [1, 2])
    rig.node("a")
    for n in (1, 2, 3):
        rig.start(f"g1-{n}", "a", shape=1)
        assert sends(rig.end(f"g1-{n}", Reason.CANCELLED, 1)) == [(f"g1-{n + 1}", "a", None)]
    assert sends(rig.end("g1-4", Reason.REJECTED)) == [("g1-5", "a", None)]
    out = rig.end("g1-5", Reason.REJECTED)
    assert [d.shape for d in out if isinstance(d, ev.FailShape)] == [1, 2]
    assert {d.reason for d in out if isinstance(d, ev.FailShape)} == {Reason.REJECTED}
    assert rig.policy.progress().done


def test_done_is_judged_by_what_was_delivered() -> None:
    rig = Rig()
    rig.group("g1", [1, 2, 3])
    rig.node("a")
    rig.start("g1-1", "a")
    rig.tuned("g1-1", 1, 2, 3)
    # a bad end after the last row changes nothing
    assert rig.end("g1-1", Reason.FAULT, 3) == []
    assert rig.policy.progress().done
    assert rig.policy.progress().tuned == 3


def test_what_was_not_delivered_is_tried_elsewhere_and_then_failed() -> None:
    rig = Rig()
    rig.group("g1", [1, 2, 3])
    rig.node("a")
    rig.node("b")
    rig.start("g1-1", "a")
    rig.tuned("g1-1", 1)
    out = rig.end("g1-1")
    assert kinds(out) == ["Requeue", "Send"]
    assert sends(out) == [("g1-2", "b", None)]
    assert rig.policy.shapes_of("g1") == (2, 3)
    rig.start("g1-2", "b")
    rig.tuned("g1-2", 2)
    out = rig.end("g1-2")
    assert [(d.shape, d.reason, d.confirmed) for d in out if isinstance(d, ev.FailShape)] == [
        (3, Reason.NOT_DELIVERED, True)
    ]


def test_a_verdict_of_the_tuner_is_final() -> None:
    rig = Rig()
    rig.group("g1", [1, 2])
    rig.node("a")
    rig.start("g1-1", "a")
    out = rig.do(ev.ShapeRefused("g1-1", 1, Reason.WRONG_RESULT, "err 0.4"))
    assert out == [ev.FailShape(1, Reason.WRONG_RESULT, "err 0.4", "g1-1", True)]
    assert rig.do(ev.ShapeRefused("g1-1", 1, Reason.WRONG_RESULT, "err 0.4")) == []
    assert rig.tuned("g1-1", 1) == []  # settled once, settled for good
    assert rig.policy.progress().failed == 1


def test_retry_gives_failed_shapes_a_fresh_start() -> None:
    rig = Rig()
    rig.group("g1", [1, 2, 3])
    rig.group("g2", [4])
    rig.node("a")
    rig.node("b")
    for s in (1, 2):
        rig.do(ev.ShapeRefused("g1-1", s, Reason.NO_CANDIDATE, "none"))
    rig.do(ev.ShapeRefused("g2-1", 4, Reason.NO_CANDIDATE, "none"))
    out = rig.do(ev.RetryAsked((1, 2, 3, 4, 99)))
    assert of(ev.Split, out) == [
        ev.Split("g1", (("g1a", (1, 2)),), "tried again on request"),
        ev.Split("g2", (("g2a", (4,)),), "tried again on request"),
    ]
    assert {a for a, _, _ in sends(out)} == {"g1a-1", "g2a-1"}
    assert rig.policy.progress().failed == 0
    # the group that still runs keeps its own
    assert rig.policy.is_outstanding("g1-1")
    rig.tuned("g1-1", 3)
    assert rig.end("g1-1") == []
    rig.tuned("g1a-1", 1, 2)
    rig.tuned("g2a-1", 4)
    assert rig.policy.progress().done


def test_names_of_children_are_legal_and_new() -> None:
    book = Book()
    parent = book.add("g0001", range(1, 1001), 10.0)
    book.add("g0001b", [2000], 1.0)  # somebody else took that name
    seen = {"g0001", "g0001b"}
    for s in range(1, 1000):
        # the rest of the rest of the rest: names stay short
        names = book.child_names(parent)
        alone, rest = next(names), next(names)
        book.adopt(parent, alone, (s,), ())
        parent = book.adopt(parent, rest, range(s + 1, 1001), ())
        for name in (alone, rest):
            assert name not in seen
            assert ATTEMPT_RE.match(f"{name}-99")
            seen.add(name)
    assert {"g0001a", "g0001c", "g0001z", "g0001aa"} <= seen
    assert max(len(name) for name in seen) == 8
