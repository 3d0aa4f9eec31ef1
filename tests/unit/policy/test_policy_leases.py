"""Nodes that come later and go earlier: leases, several of which may be one host, or one GPU."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.policy.model import LEASE_ENDS
from orchestrator.reasons import Reason
from tests.support.policy_rig import Rig, fails, kinds, of, sends

# --- one GPU is one slot, whichever lease has it ----------------------------------------------------------------------


def test_a_fault_on_one_gpu_through_two_leases_is_one_slot_s_evidence() -> None:
    rig = Rig()
    rig.lease("a", "g1")
    rig.group("g1", [1])
    rig.start("g1-1", "a", shape=1)
    assert fails(rig.fault("g1-1", 1)) == []
    rig.tick(100.0)
    rig.ended("a")
    rig.lease("b", "g1")
    rig.start("g1-3", "b", shape=1)
    out = rig.fault("g1-3", 1)
    assert fails(out) == [(1, Reason.FAULT, False)]
    assert "seen on g1 GPU 0 (fault), g1 GPU 0 (fault); unconfirmed: only one slot" in out[-1].detail  # type: ignore[attr-defined]


def test_two_gpus_of_one_host_in_two_leases_are_two_slots_but_one_host() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.lease("a", "g1", "0")
    rig.start("g1-1", "a", shape=1)
    rig.lease("b", "g1", "1")
    assert sends(rig.fault("g1-1", 1)) == [("g1-2", "b", None)]
    rig.start("g1-2", "b", shape=1)
    assert fails(rig.fault("g1-2", 1)) == [(1, Reason.FAULT, True)]
    # where another host is there, two GPUs of one are not enough
    rig.group("g2", [2])
    rig.start("g2-1", "a", shape=2)
    rig.lease("c", "g2", "0")
    assert [n for _, n, _ in sends(rig.fault("g2-1", 2))] == ["c"]


def test_a_lease_that_comes_on_a_quarantined_gpu_starts_in_quarantine() -> None:
    rig = Rig()
    rig.lease("a", "g1", "01")
    rig.do(ev.CanaryFailed("a", "1", "wrong answer"))
    assert rig.policy.quarantined_hosts() == []
    rig.ended("a", "time_limit")
    rig.tick(10.0)
    rig.lease("b", "g1", "1")  # its canary passes, and that is not what the quarantine waits for
    rig.group("g1", [1])
    assert rig.outstanding() == {}
    assert rig.policy.quarantined_hosts() == ["g1"]
    assert rig.policy.quarantined_hosts(rig.now + 100.0) == []
    assert "b slots: 0 quarantined" in rig.policy.why("g1")
    out = rig.tick(50.0)
    assert [(d.node, d.slot) for d in out if isinstance(d, ev.AskCanary)] == [("b", "0")]
    assert sends(rig.canary("b")) == [("g1-1", "b", None)]
    assert rig.policy.quarantined_hosts() == []


def test_marks_of_a_gpu_are_counted_over_its_leases() -> None:
    rig = Rig()
    rig.lease("good", "g2")
    rig.group("g0", [100, 101], 900.0)
    rig.start("g0-1", "good", shape=100)
    shut = []
    for shape, name in enumerate("abc", 1):
        rig.lease(name, "g1")
        assert sends(rig.group(f"g{shape}", [shape])) == [(f"g{shape}-1", name, None)]
        rig.start(f"g{shape}-1", name, shape=shape)
        rig.fault(f"g{shape}-1", shape)
        rig.start(f"g{shape}-2", "good", shape=shape)
        shut = [(d.node, d.why) for d in rig.tuned(f"g{shape}-2", shape) if isinstance(d, ev.Quarantine)]
        rig.end(f"g{shape}-2")
        if name != "c":
            rig.ended(name)
    assert shut == [("c", "3 faults of 3 shapes that passed elsewhere")]
    assert rig.policy.quarantined_hosts() == ["g1"]


def test_candidates_that_fault_on_one_gpu_twice_are_not_convicted() -> None:
    rig = Rig()
    rig.lease("a", "g1")
    rig.do(ev.FleetMayGrow(True))
    rig.group("g1", [1])
    rig.start("g1-1", "a", shape=1)
    bad = (("c9",),)
    rig.do(ev.ShapeTuned("g1-1", 1, complete=False, best=("c1",), withheld=bad))
    rig.end("g1-1")
    rig.ended("a")
    assert sends(rig.lease("b", "g1")) == []  # the same GPU once more tells nothing
    out = rig.lease("c", "g1", "1")
    assert sends(out) == [("g1a-1", "c", None)]
    rig.start("g1a-1", "c", shape=1)
    out = rig.do(ev.ShapeTuned("g1a-1", 1, complete=False, best=("c1",), ran=(("c1",),), withheld=bad))
    convicted = of(ev.ConvictCandidates, out)[0]
    assert isinstance(convicted, ev.ConvictCandidates)
    # both names of the first GPU: each has a ledger entry or a worker of its own
    assert convicted.places == (("a", "0"), ("b", "0"), ("c", "0"))


def test_nodes_without_these_facts_are_what_they_were() -> None:
    rig = Rig()
    rig.node("a")
    rig.node("b")
    fleet = rig.policy._state.fleet
    assert (fleet.place("a", "0"), fleet.spot(("a", "0"))) == (("a", "0"), "a slot 0")
    assert fleet.nodes["a"].host == "a"
    assert '"host"' not in ev.to_json(ev.NodeJoined("a", ("0",)))


# --- leases that end --------------------------------------------------------------------------------------------------


def test_an_uncharged_end_gives_everything_back_at_once() -> None:
    rig = Rig(PolicySettings(max_tries=1))
    rig.group("g1", [1, 2, 3], 900.0)
    rig.group("g2", [4], 100.0)
    rig.lease("a", "g1")
    rig.start("g1-1", "a", shape=1)
    rig.tuned("g1-1", 1)
    rig.shape("g1-1", 2)
    out = rig.ended("a")
    assert [(d.group, d.why) for d in out if isinstance(d, ev.Requeue)] == [
        ("g1", "attempt g1-1 on a slot 0: its lease ended"),
        ("g2", "the lease a ended before attempt g2-1 started there"),
    ]
    shape = rig.policy._state.book.shapes[2]
    assert (shape.tries, shape.losses, len(shape.ends)) == (0, (), 1)
    assert sends(rig.lease("b", "g2")) == [("g1-2", "b", None), ("g2-2", "b", None)]


def test_a_charged_end_is_a_lost_node() -> None:
    rig = Rig()
    rig.group("g1", [1], 900.0)
    rig.lease("a", "g1")
    rig.start("g1-1", "a", shape=1)
    rig.ended("a", "node_failure", charged=True)
    assert len(rig.policy._state.book.shapes[1].losses) == 1
    assert rig.do(ev.NodeJoined("a", ("0",))) == []  # gone for good
    assert rig.do(ev.NodeExpected("a", ("0",))) == []
    assert rig.policy._state.fleet.nodes["a"].state == "gone"


def test_a_node_that_was_given_up_before_its_end_was_known_is_uncharged_after_all() -> None:
    rig = Rig()
    for name, host in (("a", "g1"), ("b", "g2"), ("c", "g3"), ("d", "g4")):
        rig.lease(name, host)
    rig.group("g1", [1, 2], 900.0)
    rig.start("g1-1", "a", shape=1)
    rig.lost("a")
    assert len(rig.policy._state.book.shapes[1].losses) == 1
    rig.ended("a", "preempted")
    for s in (1, 2):
        assert rig.policy._state.book.shapes[s].losses == ()
    assert len(rig.policy._state.book.shapes[1].ends) == 1


def lost_three_times(rig: Rig, word: bool = True) -> list[ev.Decision]:
    """A shape under which three leases are lost, the last of them while it is alone; all but the first have ended."""
    rig.group("g1", [1], 900.0)
    for name in "abc":
        rig.lease(name, f"h-{name}")
        (attempt,) = rig.outstanding()
        rig.start(attempt, name, shape=1)
        rig.tick(10.0)
        out = rig.lost(name)
        if name != "a" or word:
            out += rig.ended(name, "node_failure", charged=True)
    return out


def test_no_shape_fails_for_a_lost_lease_before_the_scheduler_s_word_on_it() -> None:
    rig = Rig()
    assert fails(lost_three_times(rig)) == [(1, Reason.KILLS_NODES, True)]
    # the word on the first is awaited: it was preempted, and the shape goes on
    rig = Rig()
    assert fails(lost_three_times(rig, word=False)) == []
    assert "waits for the scheduler's word on leases" in rig.policy.why("g1")
    assert rig.policy.progress().stuck is None
    assert rig.replayed().digest() == rig.policy.digest()
    out = rig.ended("a")
    assert kinds(out) == ["Requeue"]
    assert len(rig.policy._state.book.shapes[1].losses) == 2
    # its machine did die
    rig = Rig()
    lost_three_times(rig, word=False)
    assert fails(rig.ended("a", "node_failure", charged=True)) == [(1, Reason.KILLS_NODES, True)]
    # no word ever comes
    rig = Rig()
    lost_three_times(rig, word=False)
    assert rig.tick(500.0) == []
    assert fails(rig.tick(200.0)) == [(1, Reason.KILLS_NODES, True)]


def test_a_lease_that_closes_its_books_before_it_ends_has_ended_under_its_shape() -> None:
    """Its worker says that the attempt was cancelled before the scheduler says that the lease is over."""
    rig = Rig()
    rig.group("g1", [1])
    for n, name in enumerate("abcd"):
        rig.lease(name, f"h-{name}")
        (attempt,) = rig.outstanding()
        rig.start(attempt, name, shape=1)
        rig.tick(10.0)
        if n == 1:
            rig.do(ev.NodeDraining(name))  # else the shape is sent there again at once
        rig.end(attempt, Reason.CANCELLED, 1)
        assert bool(rig.outstanding()) == (n != 1)
        out = rig.ended(name, "time_limit")
        assert len(rig.policy._state.book.shapes[1].ends) == n + 1
        assert fails(out) == ([(1, Reason.OUTLIVES_LEASE, True)] if name == "d" else [])
    assert rig.replayed().digest() == rig.policy.digest()


def test_an_earlier_loss_of_a_lease_that_came_back_stays() -> None:
    rig = Rig()
    rig.lease("a", "g1")
    rig.group("g1", [1])
    rig.start("g1-1", "a", shape=1)
    rig.lost("a")
    rig.tick(10.0)
    rig.node("a")
    rig.start("g1-2", "a", shape=1)
    rig.lost("a")
    assert len(rig.policy._state.book.shapes[1].losses) == 2
    rig.tick(10.0)
    rig.ended("a")
    assert [x.attempt for x in rig.policy._state.book.shapes[1].losses] == ["g1-1"]


def test_a_lease_that_was_released_forgives_nothing() -> None:
    rig = Rig()
    rig.lease("a", "g1")
    rig.group("g1", [1, 2])
    rig.start("g1-1", "a", shape=1)
    rig.fault("g1-1", 1)
    rig.ended("a", "released")
    assert len(rig.policy._state.book.shapes[1].faults) == 1


def test_what_faulted_while_its_lease_was_being_ended_is_not_charged() -> None:
    """The scheduler ends a lease's processes before it says so: a tuner that was killed looks like one that died."""
    for outcome in (Reason.FAULT, Reason.WORKER_DIED, Reason.NOT_DELIVERED):
        for seconds, charged in ((5.0, False), (100.0, True)):
            rig = Rig()
            rig.group("g1", [1, 2], 900.0)
            rig.lease("a", "g1")
            rig.start("g1-1", "a", shape=1)
            rig.do(ev.NodeDraining("a"))
            rig.end("g1-1", outcome, 1)
            rig.tick(seconds)
            rig.ended("a", "preempted")
            shape = rig.policy._state.book.shapes[1]
            assert bool(shape.faults or shape.losses or shape.tries) is charged
            assert len(shape.ends) == (not charged)


def test_rows_that_come_home_after_the_end_settle_their_shapes() -> None:
    rig = Rig()
    rig.group("g1", [1, 2])
    rig.lease("a", "g1")
    rig.start("g1-1", "a", shape=1)
    rig.ended("a")
    rig.tuned("g1-1", 1)
    assert rig.policy.settled(1)
    assert rig.end("g1-1", Reason.WORKER_DIED, 2) == []
    assert rig.policy._state.book.shapes[2].losses == ()


def test_after_three_ends_it_runs_alone_on_a_fresh_lease_and_then_fails() -> None:
    rig = Rig()
    rig.group("g1", [1, 2], 900.0)
    for i in range(LEASE_ENDS):
        rig.lease(f"n{i}", "h")
        rig.start(f"g1-{i + 1}", f"n{i}", shape=1)
        out = rig.ended(f"n{i}", "time_limit")
    split = of(ev.Split, out)[0]
    assert isinstance(split, ev.Split)
    assert split.children == (("g1a", (1,)), ("g1b", (2,)))
    assert rig.policy.why("g1a") == "group g1a waits: 3 leases ended, the last one n2"
    rig.do(ev.FleetMayGrow(True))
    assert rig.policy.why("g1a") == "group g1a waits: every lease has ended, and another is awaited"
    # the rest goes first, and makes the lease a used one
    rig.lease("n3", "h")
    assert rig.outstanding() == {"g1b-1": ("n3", None)}
    assert "for a lease of its own: 3 ended under it" in rig.policy.why("g1a")
    rig.start("g1b-1", "n3", shape=2)
    # one that nothing ran on is about to come: it waits for that
    rig.do(ev.NodeExpected("n4", ("0",), "h", ("1",), "job-n4", "pool"))
    rig.tuned("g1b-1", 2)
    assert sends(rig.end("g1b-1")) == []
    assert sends(rig.lease("n4", "h", "1")) == [("g1a-1", "n4", None)]
    rig.start("g1a-1", "n4", shape=1)
    out = rig.ended("n4", "time_limit")
    assert fails(out) == [(1, Reason.OUTLIVES_LEASE, True)]
    assert out[0].detail == (  # type: ignore[attr-defined]
        "4 leases ended under it (n0: time limit, n1: time limit, n2: time limit, n4: time limit), the last time with"
        " the shape alone on it from its start; ask for a longer time limit (time:)"
    )
    assert rig.policy.progress().done


def test_a_shape_that_passes_alone_is_tuned_like_any_other() -> None:
    rig = Rig()
    rig.group("g1", [1])
    for i in range(LEASE_ENDS):
        rig.lease(f"n{i}", f"h{i}")
        rig.start(f"g1-{i + 1}", f"n{i}", shape=1)
        rig.ended(f"n{i}")
    rig.lease("n", "h0")
    rig.start("g1-4", "n", shape=1)
    rig.tuned("g1-4", 1)
    assert rig.policy.progress().tuned == 1


def test_a_used_lease_must_do_where_no_fresh_one_comes_and_its_end_is_not_the_last_word() -> None:
    rig = Rig()
    rig.group("g1", [1])
    for i in range(LEASE_ENDS):
        rig.lease(f"n{i}", "h")
        rig.start(f"g1-{i + 1}", f"n{i}", shape=1)
        rig.ended(f"n{i}")
    rig.group("g2", [2])
    rig.lease("used", "h")
    rig.start("g2-1", "used", shape=2)
    rig.tuned("g2-1", 2)
    assert sends(rig.end("g2-1")) == [("g1-4", "used", None)]
    rig.start("g1-4", "used", shape=1)
    assert fails(rig.ended("used")) == []
    rig.lease("fresh", "h")
    rig.start("g1-5", "fresh", shape=1)
    assert fails(rig.ended("fresh")) == [(1, Reason.OUTLIVES_LEASE, True)]


def test_a_drained_lease_finishes_what_runs_and_gives_the_rest_back_unharmed() -> None:
    rig = Rig()
    rig.group("g1", [1], 90.0)
    rig.group("g2", [2], 80.0)
    rig.lease("a", "g1")
    rig.start("g1-1", "a", shape=1)
    assert rig.do(ev.NodeDraining("a")) == [ev.TakeBack("g2-1", "a")]
    rig.taken("g2-1")
    rig.tuned("g1-1", 1)
    assert sends(rig.end("g1-1")) == []
    assert rig.policy.idle_nodes() == ["a"]
    assert rig.ended("a", "released") == []
    shape = rig.policy._state.book.shapes[2]
    assert (shape.tries, shape.losses, shape.ends) == (0, (), ())
    assert sends(rig.lease("b", "g1")) == [("g2-2", "b", None)]


def test_a_node_that_is_gone_is_never_waited_for() -> None:
    rig = Rig()
    rig.group("g1", [1])
    rig.lease("a", "g1")
    rig.ended("a")
    assert rig.policy.progress().stuck == "1 lease ended, the last one a"
    rig.do(ev.FleetMayGrow(True))
    assert rig.policy.progress().stuck is None
    rig.do(ev.Resumed(2))
    rig.do(ev.FleetMayGrow(False))
    assert rig.policy.progress().stuck is not None
    assert rig.policy.idle_nodes() == []


# --- a fleet that may grow --------------------------------------------------------------------------------------------


def test_a_fault_waits_for_a_second_slot_while_one_may_come() -> None:
    rig = Rig()
    rig.do(ev.FleetMayGrow(True))
    rig.group("g1", [1])
    rig.lease("a", "g1")
    rig.start("g1-1", "a", shape=1)
    assert rig.policy.places_awaited() == 0
    assert sends(rig.fault("g1-1", 1)) == []
    assert rig.policy.places_awaited() == 2
    assert rig.policy.why("g1") == "group g1 waits for a slot other than g1 GPU 0, where it went wrong"
    assert rig.policy.idle_nodes() == ["a"]
    # none comes: as with one slot
    assert sends(rig.do(ev.FleetMayGrow(False))) == [("g1-2", "a", None)]
    rig.start("g1-2", "a", shape=1)
    assert fails(rig.fault("g1-2", 1)) == [(1, Reason.FAULT, False)]


def test_candidates_wait_for_a_second_slot_while_one_may_come() -> None:
    for comes in (True, False):
        rig = Rig()
        rig.do(ev.FleetMayGrow(True))
        rig.group("g1", [1])
        rig.lease("a", "g1")
        rig.start("g1-1", "a", shape=1)
        out = rig.do(ev.ShapeTuned("g1-1", 1, complete=False, best=("c1",), withheld=(("c9",),)))
        assert kinds(out) == ["Confirm"]
        rig.end("g1-1")
        assert rig.policy.places_awaited() == 2
        if comes:
            assert sends(rig.lease("b", "g2")) == [("g1a-1", "b", None)]
            assert rig.policy.places_awaited() == 0
        else:
            settled = rig.do(ev.FleetMayGrow(False))
            assert [(d.shape, d.confirmed) for d in settled if isinstance(d, ev.SettleShape)] == [(1, False)]


def test_the_backlog_is_what_is_not_settled() -> None:
    rig = Rig()
    rig.group("g1", [1, 2, 3], 90.0)
    rig.group("g2", [4], 10.0)
    assert rig.policy.backlog_s() == 100.0
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    rig.tuned("g1-1", 1)
    assert rig.policy.backlog_s() == 70.0
    rig.tuned("g1-1", 2, 3)
    rig.do(ev.ShapeRefused("g2-1", 4, Reason.UNSUPPORTED, "no"))
    assert rig.policy.backlog_s() == 0.0
    rig.do(ev.RetryAsked((4,)))
    assert rig.policy.backlog_s() == 10.0


# --- the journal ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=5, max_size=60))
def test_a_replay_of_leases_gives_the_same_state(steps: list[tuple[int, int]]) -> None:
    """Leases that come and go in any order while shapes fault, pass and are lost."""
    rig = Rig()
    rig.do(ev.FleetMayGrow(True))
    for g in range(4):
        rig.group(f"g{g}", [10 * g, 10 * g + 1], 60.0 + g)
    known = 0
    for what, which in steps:
        live = [n.name for n in rig.policy._state.fleet.nodes.values() if n.state != "gone"]
        waiting = [a for a in rig.policy.outstanding() if a.state == "sent"]
        running = [a for a in rig.policy.outstanding() if a.state == "started"]
        if what == 0 and len(live) < 3:
            rig.lease(f"n{known}", f"h{which % 2}", "01"[: which or 1])
            known += 1
        elif what == 1 and live:
            rig.ended(live[which % len(live)], charged=which == 2)
        elif what == 2 and waiting:
            a = waiting[which % len(waiting)]
            slot = a.slot or "0"
            if rig.policy._state.fleet.nodes[a.node].slots[slot].running is None:
                rig.start(a.id, a.node, slot, rig.policy.shapes_of(a.group)[0])
        elif what == 3 and running:
            a = running[which % len(running)]
            rig.tuned(a.id, *rig.policy.shapes_of(a.group))
            rig.end(a.id)
        elif what == 4 and running:
            a = running[which % len(running)]
            rig.fault(a.id, a.in_flight, (Reason.FAULT, Reason.WORKER_DIED, Reason.CANCELLED)[which])
        else:
            rig.tick(30.0)
    assert rig.replayed().digest() == rig.policy.digest()
    left = sum(s.cost_s for s in rig.policy._state.book.shapes.values() if s.state == "pending")
    assert abs(rig.policy.backlog_s() - left) < 1e-6
    for shape in rig.policy._state.book.shapes.values():
        assert not (shape.reason is Reason.OUTLIVES_LEASE and len(shape.ends) <= LEASE_ENDS)
