"""The next work for each slot."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.policy.sentences import describe_wait
from orchestrator.reasons import Reason
from tests.support.marks import drawn
from tests.support.policy_rig import Rig, groups, of, proven_nodes

S = PolicySettings()


def test_nothing_is_sent_before_a_canary_passed() -> None:
    rig = Rig()
    assert rig.singles(1) == []
    assert "no node has joined yet" in describe_wait(rig.policy.state, 1)
    assert rig.do(ev.NodeExpected("a", ("0",))) == []
    assert "is being prepared" in describe_wait(rig.policy.state, 1)
    assert rig.do(ev.NodeJoined("a", ("0",))) == []
    assert groups(rig.canary("a")) == [("a", (1,))]
    assert describe_wait(rig.policy.state, 1) == "attempt g0001 is in the inbox of a slot 0 with 0 others before it"
    rig.start(1)
    assert describe_wait(rig.policy.state, 1) == "attempt g0001 runs on a slot 0"


def test_the_longest_first_and_of_a_lower_tier_before_all_others() -> None:
    rig = Rig()
    rig.work(1, cost_s=10.0, kind="x")
    rig.work(2, cost_s=500.0, kind="y", tier=1)
    rig.work(3, cost_s=90.0, kind="z")
    rig.node("a", 3)
    assert [shapes for _, shapes in groups(r for _, r in rig.journal)] == [(3,), (1,), (2,)]


def test_a_group_is_the_longest_unit_and_every_kth_of_the_rest() -> None:
    rig = Rig()
    units, costs = tuple((s,) for s in range(1, 101)), tuple((float(s),) for s in range(1, 101))
    rig.do(ev.WorkAdded("", units, costs, shares_end=True))
    rig.do(ev.NodeExpected("a", tuple("0123")))
    rig.node("a", 4)
    first, *_ = [shapes for _, shapes in groups(r for _, r in rig.journal)]
    assert first[0] == 100
    assert max(a - b for a, b in itertools.pairwise(first)) <= 6, "evenly over all that waits"
    assert sum(first) == pytest.approx(5050 / (S.share * 4), rel=0.1)


@given(
    costs=st.lists(st.floats(0.1, 500.0) | st.just(0.0), min_size=1, max_size=60),
    nodes=st.integers(1, 4), size=st.integers(1, 3), mixes=st.booleans(), setup=st.sampled_from([0.0, 5.0]),
)  # fmt: skip
@example(costs=[0.0, 0.0], nodes=1, size=1, mixes=False, setup=5.0)
@drawn(60, fixed=True)
def test_units_are_never_cut_and_every_shape_is_dealt_once(
    costs: list[float], nodes: int, size: int, mixes: bool, setup: float
) -> None:
    rig = Rig()
    units = tuple(tuple(range(size * i, size * i + size)) for i in range(1, len(costs) + 1))
    each = tuple((c,) * size for c in costs)
    rig.do(ev.WorkAdded("x", units[::2], each[::2], setup_s=setup, shares_end=mixes))
    rig.do(ev.WorkAdded("y", units[1::2], each[1::2], setup_s=setup, shares_end=mixes))
    for n in range(nodes):
        rig.node(f"n{n}", 2)
    of_unit = {s: unit for unit in units for s in unit}
    state = rig.policy.state
    while not rig.policy.done:
        kinds = [kind for kind in state.kinds.values() if kind.waiting]
        assert state.kinds_by_longest[:1] == sorted(kind.by_longest for kind in kinds)[:1]
        assert state.kinds_by_seconds[:1] == sorted(kind.by_seconds for kind in kinds)[:1]
        a = next(a for a in rig.policy.outstanding() if not a.is_being_taken)
        for unit in dict.fromkeys(of_unit[s] for s in a.shapes):
            assert set(unit) <= set(a.shapes)
        rig.do(ev.AttemptStarted(a.id, a.node, a.slot))
        for s in a.shapes:
            rig.do(ev.ShapeTuned(a.id, s))
        rig.do(ev.AttemptEnded(a.id, Reason.DONE, None, "", 1.0))
        for late in [a for a in rig.policy.outstanding() if a.is_being_taken]:
            rig.do(ev.AttemptTaken(late.id, True))
    first = [s for _, r in rig.journal if isinstance(r, ev.Send) for s in r.shapes]
    assert set(first) == set(of_unit)
    assert all(len(rig.shape(s).attempts) <= 3 for s in of_unit)
    assert state.left_s == pytest.approx(0.0, abs=1e-6)
    assert state.waiting_s == 0.0


def test_no_group_is_shorter_than_its_set_up_is_worth_while_more_is_left() -> None:
    rig = Rig()
    for n in range(6):
        rig.node(f"n{n}")
    rig.work(*range(1, 1001), cost_s=1.0, kind="", setup_s=10.0, shares_end=True)
    sizes = [len(shapes) for _, shapes in groups(r for _, r in rig.journal)]
    assert sizes[0] == S.floor_setups * 10.0 > 1000 / S.share / 6


def test_kinds_that_may_not_be_mixed_and_risky_shapes_have_processes_of_their_own() -> None:
    rig = Rig()
    rig.work(1, 2, 3, cost_s=1.0, kind="x")
    rig.work(4, 5, cost_s=1.0, kind="y")
    rig.singles(6, 7, cost_s=1.0)
    rig.node("a")
    sent = [shapes for _, shapes in groups(r for _, r in rig.journal)]
    kinds = ({1, 2, 3}, {4, 5}, {6}, {7})
    assert all(any(set(shapes) <= kind for kind in kinds) for shapes in sent)


def test_a_slot_has_a_minute_ahead_and_no_more() -> None:
    rig = Rig()
    rig.singles(*range(1, 20), cost_s=25.0)
    rig.node("a")
    assert len(rig.policy.outstanding()) == 3
    cheap = Rig()
    cheap.singles(*range(1, 200), cost_s=0.0)
    cheap.node("a")
    assert len(cheap.policy.outstanding()) == S.most_queued


def test_an_idle_slot_gets_what_waits_behind_a_busy_one() -> None:
    rig = Rig()
    rig.singles(1, 2, 3, cost_s=20.0)
    rig.node("a")
    rig.start(rig.policy.outstanding()[0].shapes[0])
    last = rig.policy.outstanding()[-1]
    out = rig.node("b")
    assert of(ev.TakeBack, out) == [ev.TakeBack(last.id, "a")]
    assert of(ev.TakeBack, rig.tick()) == [], "one for each idle slot"
    assert groups(rig.do(ev.AttemptTaken(last.id, True))) == [("b", last.shapes)]
    (again,) = (r for r in rig.tick() + rig.node("c") if isinstance(r, ev.TakeBack))
    rig.do(ev.AttemptTaken(again.attempt, False))
    assert again.attempt in rig.policy.state.open_attempts, "it was claimed before"


def test_at_the_end_an_idle_slot_takes_the_later_half_from_the_end() -> None:
    rig = Rig()
    rig.work(*range(1, 9), cost_s=50.0, kind="", shares_end=True)
    rig.node("a")
    (whole,) = [a.shapes for a in rig.policy.outstanding()][:1]
    rig.start(whole[0])
    rest = [a.shapes for a in rig.policy.outstanding()][1:]
    assert rest == []
    out = groups(rig.node("b"))
    assert out == [("b", tuple(reversed(whole[len(whole) // 2 :])))]
    rig.tune(*out[0][1])
    assert all(rig.shape(s).state == "tuned" for s in out[0][1])


def test_nothing_is_done_twice_where_a_process_may_not_be_ended() -> None:
    rig = Rig()
    rig.work(*range(1, 9), cost_s=50.0, kind="")
    rig.node("a")
    rig.start(rig.policy.outstanding()[0].shapes[0])
    for node in "bcdefgh":
        rig.node(node)
    assert all(len(rig.shape(s).attempts) <= 2 for s in range(1, 9))
    held = [s for a in rig.policy.outstanding() if not a.is_being_taken for s in a.shapes]
    assert len(held) == len(set(held))


def test_a_unit_that_decides_the_run_starts_on_two_nodes() -> None:
    rig = proven_nodes("a", "b", "c")
    rig.work(1, cost_s=900.0)
    rig.work(2, 3, 4, cost_s=20.0, kind="z")
    nodes = [n for n, shapes in groups(r for _, r in rig.journal) if 1 in shapes]
    assert len(nodes) == len(set(nodes)) == 2
    rig.tune(1)
    assert rig.shape(1).state == "tuned"


def test_stop_takes_back_what_waits_and_sends_nothing() -> None:
    rig = Rig()
    rig.singles(1, 2, 3, cost_s=20.0)
    rig.node("a")
    first, *others = rig.policy.outstanding()
    rig.start(first.shapes[0])
    out = rig.do(ev.StopAsked("enough"))
    assert [r.attempt for r in of(ev.TakeBack, out)] == [a.id for a in others]
    assert all(not rig.do(ev.AttemptTaken(a.id, True)) for a in others)
    assert rig.policy.backlog_s() == 0.0
    assert "the run is stopped" in describe_wait(rig.policy.state, others[0].shapes[0])
    assert rig.tune(*first.shapes) == []
    assert rig.policy.state.stopped


def test_resume_waits_for_each_node_to_say_what_it_still_has() -> None:
    rig = Rig()
    rig.singles(1, 2, cost_s=500.0)
    rig.node("a")
    a = rig.policy.outstanding()[0]
    assert rig.do(ev.Resumed(2)) == []
    assert a.id in rig.policy.state.open_attempts
    rig.do(ev.AttemptTaken(a.id, True))  # it never arrived
    out = rig.do(ev.NodeJoined("a", ("0",)))
    assert [shapes for _, shapes in groups(out)] == [a.shapes]


def test_a_draining_node_finishes_and_gets_no_more_until_resume() -> None:
    rig = Rig()
    rig.singles(1, 2, 3, cost_s=20.0)
    rig.node("a")
    first, *others = rig.policy.outstanding()
    rig.start(first.shapes[0])
    out = rig.do(ev.NodeDraining("a"))
    assert len(of(ev.TakeBack, out)) == len(others)
    for a in others:
        assert rig.do(ev.AttemptTaken(a.id, True)) == []
    assert rig.tune(*first.shapes) == []
    assert rig.policy.stuck == "a is draining"
    rig.do(ev.Resumed(2))
    assert groups(rig.do(ev.NodeJoined("a", ("0",)))) != []


def test_done_is_judged_by_what_was_delivered() -> None:
    rig = Rig()
    rig.work(1, 2, cost_s=1.0)
    rig.node("a")
    a = rig.policy.outstanding()[0]
    rig.start(1)
    rig.do(ev.ShapeTuned(a.id, 1))
    rig.do(ev.AttemptEnded(a.id, Reason.DONE, None, "", 1.0))
    assert (rig.shape(1).state, rig.shape(2).tries) == ("tuned", 1)
    for _ in range(S.tries - 1):
        rig.do(ev.AttemptEnded(rig.attempt(2).id, Reason.DONE, None, "", 1.0))
    assert (rig.shape(2).state, rig.shape(2).reason) == ("failed", Reason.NOT_DELIVERED)
