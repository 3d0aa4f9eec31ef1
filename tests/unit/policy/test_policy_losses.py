"""Losses: workers and nodes that go away with work in flight."""

from __future__ import annotations

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.reasons import Reason
from tests.support.policy_rig import Rig, fails, kinds, of, sends


def test_a_lost_node_is_an_ordinary_event() -> None:
    rig = Rig(PolicySettings(max_tries=1))
    for name in "abcd":
        rig.node(name)
    rig.group("g1", [1, 2, 3], 90.0)
    rig.start("g1-1", "a", shape=1)
    rig.tuned("g1-1", 1)
    rig.shape("g1-1", 2)
    for i in range(2, 6):
        rig.group(f"g{i}", [10 * i], 100.0)
    assert rig.outstanding()["g5-1"] == ("a", None)
    out = rig.lost("a")
    # no try, no split: what is left of it goes on elsewhere, and so does what never started
    assert of(ev.Split, out) == []
    assert [d.group for d in out if isinstance(d, ev.Requeue)] == ["g1", "g5"]
    assert {(a, n) for a, n, _ in sends(out)} == {("g1-2", "b"), ("g5-2", "c")}
    assert rig.policy.shapes_of("g1") == (2, 3)


def test_a_loss_with_the_shape_in_flight_uses_up_no_try() -> None:
    rig = Rig(PolicySettings(max_tries=2))
    for name in "abcd":
        rig.node(name)
    rig.group("g1", [1])
    for attempt in ("g1-1", "g1-2"):  # lost with its node, then ended without a result: its first try
        rig.start(attempt, rig.outstanding()[attempt][0], shape=1)
        if attempt == "g1-1":
            rig.lost(rig.outstanding()[attempt][0])
    assert fails(rig.end("g1-2")) == []
    rig.start("g1-3", rig.outstanding()["g1-3"][0], shape=1)
    assert [shape for shape, _, _ in fails(rig.end("g1-3"))] == [1]


def test_with_few_nodes_what_was_in_flight_goes_last_and_by_itself() -> None:
    rig = Rig()
    rig.group("g1", [1, 11, 12], 900.0)
    for i in range(2, 6):
        rig.group(f"g{i}", [i], 100.0 - i)
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    split = of(ev.Split, rig.lost("a"))[0]
    assert isinstance(split, ev.Split)
    # 11 too: 1 may have ended unheard of, and 11 have done the harm
    assert split.children == (("g1a", (1,)), ("g1b", (11,)), ("g1c", (12,)))
    assert [a for a, _, _ in sends(rig.node("b"))] == ["g1c-1", "g2-2"]
    assert "few nodes" in rig.policy.why("g1a")


def test_with_many_nodes_it_goes_at_once() -> None:
    rig = Rig()
    rig.node("a")
    rig.group("g1", [1], 900.0)
    for name in "bcd":
        rig.node(name)
    rig.start("g1-1", "a", shape=1)
    assert sends(rig.lost("a")) == [("g1-2", "b", None)]


def test_three_losses_with_its_node_and_the_last_alone() -> None:
    rig = Rig()
    nodes = "abcd"
    for name in nodes:
        rig.node(name)
    rig.group("g1", [1, 2], 900.0)
    rig.start("g1-1", "a", shape=1)
    assert sends(rig.lost("a")) == [("g1-2", "b", None)]
    rig.start("g1-2", "b", shape=1)
    out = rig.lost("b")
    # the one after it may have done the harm unheard of: both run by themselves, and alone on a node
    assert of(ev.Split, out)[0] == ev.Split(
        "g1",
        (("g1a", (1,)), ("g1b", (2,))),
        "attempt g1-2 on b slot 0: the node was lost; what was in flight runs alone",
    )
    assert sends(out) == [("g1a-1", "c", None), ("g1b-1", "d", None)]
    rig.start("g1a-1", "c", shape=1)
    rig.start("g1b-1", "d", shape=2)
    # nothing else goes to their nodes meanwhile
    assert rig.group("g2", [3], 1.0) == []
    rig.tuned("g1b-1", 2)
    assert sends(rig.end("g1b-1")) == [("g2-1", "d", None)]
    out = rig.lost("c")
    assert fails(out) == [(1, Reason.KILLS_NODES, True)]
    rig.tuned("g2-1", 3)
    assert rig.policy.progress().done


def test_a_shape_that_may_kill_waits_until_all_else_is_started() -> None:
    rig = Rig()
    for name in "ab":
        rig.node(name)
    rig.group("g1", [1], 900.0)
    for name in "ab":
        attempt = next(iter(rig.outstanding()))
        rig.start(attempt, name, shape=1)
        rig.lost(name)
    rig.group("g2", [2], 10.0)
    rig.node("c", 2)
    rig.start("g2-1", "c")
    assert "node of its own" in rig.policy.why("g1")
    assert sends(rig.tick()) == []
    rig.tuned("g2-1", 2)
    assert sends(rig.end("g2-1")) == [("g1-3", "c", None)]
    assert rig.policy.outstanding()[0].alone


def test_an_innocent_bystander_passes_its_lonely_trial() -> None:
    rig = Rig()
    for name in "abc":
        rig.node(name)
    rig.group("g1", [1])
    for name in "ab":
        attempt = next(iter(rig.outstanding()))
        rig.start(attempt, name, shape=1)
        rig.lost(name)
    rig.start("g1-3", "c", shape=1)
    rig.tuned("g1-3", 1)
    assert rig.policy.progress().tuned == 1


def test_two_that_were_lost_once_do_not_run_side_by_side() -> None:
    rig = Rig()
    rig.group("g1", [1], 90.0)
    rig.group("g2", [2], 80.0)
    rig.node("a", 2)
    rig.start("g1-1", "a", "0", 1)
    rig.start("g2-1", "a", "1", 2)
    rig.lost("a")
    assert sends(rig.node("b", 2)) == [("g1-2", "b", None)]
    assert "one such group" in rig.policy.why("g2")
    rig.start("g1-2", "b", "0", 1)
    assert sends(rig.tuned("g1-2", 1)) == [("g2-2", "b", None)]


def test_a_start_unheard_of_counts() -> None:
    """News from a node are some milliseconds old: what an idle slot was about to claim may have killed it."""
    rig = Rig()
    for name in "abcd":
        rig.node(name)
    rig.group("g1", [1])
    for name in "abc":
        assert rig.outstanding() == {f"g1-{'abc'.index(name) + 1}": (name, None)}
        out = rig.lost(name)
    assert fails(out) == [(1, Reason.KILLS_NODES, True)]


def test_what_lay_deep_in_the_inbox_is_just_requeued() -> None:
    rig = Rig()
    rig.node("a")
    for i in range(1, 4):
        rig.group(f"g{i}", [i, 10 + i], 900.0)
    rig.start("g1-1", "a", shape=1)
    rig.lost("a")
    rig.node("b")
    # two shapes to go in g1, so g2 was not reached; neither has a loss and both may run side by side
    assert [a for a in rig.outstanding() if not a.startswith("g1")] == ["g2-2", "g3-2"]


def test_worker_deaths_need_no_empty_node() -> None:
    rig = Rig()
    rig.group("g1", [1, 2], 90.0)
    rig.node("a")
    rig.node("b")
    rig.start("g1-1", "a", shape=1)
    out = rig.fault("g1-1", 1, Reason.WORKER_DIED)
    assert kinds(out)[:1] == ["Requeue"]
    assert ("g1-2", "b", None) in sends(out)
    rig.start("g1-2", "b", shape=1)
    rig.group("g2", [3, 4], 900.0)
    out = rig.fault("g1-2", 1, Reason.WORKER_DIED)
    assert of(ev.Split, out) != []
    # alone in its attempt, yet beside others on its node
    where = {**rig.outstanding()}
    assert "g1a-1" in where
    rig.start("g1a-1", where["g1a-1"][0], shape=1)
    out = rig.fault("g1a-1", 1, Reason.WORKER_DIED)
    assert fails(out) == [(1, Reason.KILLS_NODES, True)]


def test_unknown_in_flight_counts_for_all_that_are_left() -> None:
    rig = Rig()
    rig.group("g1", [1, 2, 3])
    rig.node("a")
    rig.start("g1-1", "a")
    rig.tuned("g1-1", 1)
    assert kinds(rig.fault("g1-1", None, Reason.WORKER_DIED))[0] == "Requeue"
    rig.start("g1-2", "a")
    out = rig.fault("g1-2", None, Reason.WORKER_DIED)
    split = of(ev.Split, out)[0]
    assert isinstance(split, ev.Split)
    assert split.children == (("g1a", (2,)), ("g1b", (3,)))


def test_a_lost_slot_loses_what_it_ran_and_gives_back_what_was_named_for_it() -> None:
    rig = Rig()
    rig.group("g1", [1, 2])
    rig.node("a", 2)
    rig.start("g1-1", "a", "0", 1)
    rig.end("g1-1", Reason.FAULT, 1)
    assert rig.outstanding()["g1a-1"] == ("a", "1")
    out = rig.do(ev.SlotLost("a", "1", "gone"))
    assert out == [ev.TakeBack("g1a-1", "a")]
    assert sends(rig.taken("g1a-1")) == [("g1a-2", "a", None)]
    rig.start("g1b-1", "a", "0", 2)
    out = rig.do(ev.SlotLost("a", "0", "gone"))
    assert [d.group for d in out if isinstance(d, ev.Requeue)] == ["g1b"]
    assert rig.policy.progress().stuck is None  # g1a-2 may still come back
    rig.taken("g1a-2")
    assert rig.policy.progress().stuck == "a slot 0 is lost (gone); a slot 1 is lost (gone)"
    assert sends(rig.node("a", 2)) != []


def test_a_row_that_comes_late_settles_its_shape_where_it_is_now() -> None:
    rig = Rig(PolicySettings(small_fleet=0))
    rig.group("g1", [1, 2])
    rig.group("g2", [3])
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    rig.lost("a")
    assert rig.tuned("g1-1", 1) == []
    assert rig.policy.settled(1)
    rig.node("b")
    assert rig.policy.shapes_of("g1") == (2,)  # it was dropped from what waited
    # the other is settled while its new attempt is in an inbox: not worth running any more
    rig.start("g2-2", "b")
    assert rig.outstanding()["g1-2"] == ("b", None)
    assert rig.tuned("g1-1", 2) == [ev.TakeBack("g1-2", "b")]
    assert rig.taken("g1-2") == []
    rig.tuned("g2-2", 3)
    assert rig.policy.progress().done


def test_late_news_of_a_lost_attempt_do_no_harm() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.group("g2", [2])
    rig.node("a")
    rig.node("b")
    rig.lost("a")
    assert rig.outstanding()["g1-2"] == ("b", None)
    out = rig.do(ev.NodeJoined("a", ("0",)))
    assert out == [ev.AskCanary("a", "0", "canary-1")]  # its worker may have lived on and owe none
    assert rig.start("g1-1", "a", shape=1) == []
    # the slot is busy with it: nothing is taken from b for it
    assert rig.canary("a") == []
    out = rig.end("g1-1", Reason.FAULT, 1)
    assert fails(out) == []
    assert of(ev.Split, out) == []
    assert rig.policy.is_outstanding("g1-2")


def test_a_node_that_is_back_says_what_was_really_in_flight() -> None:
    rig = Rig()
    for name in "abcd":
        rig.node(name)
    rig.group("g1", [1, 2, 3])
    rig.start("g1-1", "a", shape=1)
    rig.lost("a")
    rig.start("g1-2", "b", shape=1)
    rig.tuned("g1-2", 1)
    rig.shape("g1-2", 2)
    out = rig.do(ev.NodeJoined("a", ("0",)))
    # it was 3 that took a down, not 1 and not 2
    rig.end("g1-1", Reason.WORKER_DIED, 3)
    out = rig.lost("b")
    # 2 and 3 were charged with b; with a that makes two for 3 and one for 2
    split = of(ev.Split, out)[0]
    assert isinstance(split, ev.Split)
    assert split.children == (("g1a", (3,)), ("g1b", (2,)))


def test_a_full_disk_blames_the_node() -> None:
    rig = Rig(PolicySettings(max_tries=1))
    rig.group("g1", [1, 2])
    rig.node("a", 2)
    rig.node("b")
    rig.start("g1-1", "a", shape=1)
    out = rig.end("g1-1", Reason.DISK_FULL, 1)
    assert [(d.slot, d.until) for d in out if isinstance(d, ev.Quarantine)] == [("0", 1060.0), ("1", 1060.0)]
    assert sends(out) == [("g1-2", "b", None)]
    assert fails(out) == []
    assert kinds(rig.tick(60.0)) == ["AskCanary", "AskCanary"]
