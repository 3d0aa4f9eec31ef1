"""The journal is the state: replay, progress, words, and the price of an event."""

from __future__ import annotations

import pytest
from orchestrator.policy.book import KeyedHeap

from orchestrator import events as ev
from orchestrator.policy import Policy
from orchestrator.reasons import Reason
from tests.support.policy_rig import Rig


def _busy_rig() -> Rig:
    rig = Rig()
    for i in range(1, 9):
        rig.group(f"g{i}", range(10 * i, 10 * i + 4), 50.0 * i)
    rig.node("a", 2)
    rig.node("b")
    rig.start("g8-1", "a", "0", 80)
    rig.start("g7-1", "a", "1", 70)
    rig.tuned("g7-1", 70)
    rig.fault("g8-1", 80)
    rig.end("g7-1", Reason.HANG, None)
    rig.do(ev.ShapeRefused("g6-1", 60, Reason.UNSUPPORTED, "no"))
    rig.lost("b")
    rig.do(ev.StopAsked())
    return rig


def test_replay_gives_the_same_state() -> None:
    rig = _busy_rig()
    fresh = rig.replayed()
    assert fresh.digest() == rig.policy.digest()
    assert fresh.outstanding() == rig.policy.outstanding()
    assert fresh.progress() == rig.policy.progress()
    # and goes on alike
    for event in (ev.Resumed(2), ev.NodeJoined("b", ("0",)), ev.NodeJoined("a", ("0", "1")), ev.Tick()):
        assert fresh.handle(event, rig.now) == rig.policy.handle(event, rig.now)
    assert fresh.digest() == rig.policy.digest()


def test_replay_survives_the_ledger_s_own_form() -> None:
    rig = _busy_rig()
    fresh = Policy()
    for t, record in rig.journal:
        fresh.apply(ev.from_json(type(record).__name__, ev.to_json(record)), t)
    assert fresh.digest() == rig.policy.digest()


def test_a_journal_cut_before_the_decisions_is_caught_up_with() -> None:
    """Events and decisions are journaled together; were they not, the next event would make up for it."""
    rig = Rig()
    rig.group("g1", [1, 2])
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    out = rig.end("g1-1", Reason.FAULT, 1)
    cut = Policy()
    for t, record in rig.journal[: -len(out)]:
        cut.apply(record, t)
    assert cut.handle(ev.Tick(), rig.now) == out
    assert cut.digest() == rig.policy.digest()


def test_a_tick_changes_nothing_by_itself() -> None:
    rig = _busy_rig()
    before = rig.policy.digest()
    assert rig.tick() == []
    assert rig.policy.digest() == before


def test_a_shape_planned_twice_is_a_mistake_of_ours() -> None:
    rig = Rig()
    rig.group("g1", [1, 2])
    with pytest.raises(ValueError, match=r"group g2: shapes \[2\] are planned twice"):
        rig.group("g2", [2, 3])
    assert rig.group("g1", [1, 2]) == []  # the same group again is what a resumed start may say


def test_progress_counts() -> None:
    rig = Rig()
    rig.group("g1", [1, 2, 3, 4], 40.0)
    rig.node("a")
    rig.start("g1-1", "a", shape=1)
    p = rig.policy.progress()
    assert (p.total, p.tuned, p.failed, p.running, p.pending, p.done) == (4, 0, 0, 1, 3, False)
    rig.tuned("g1-1", 1, 2)
    rig.do(ev.ShapeRefused("g1-1", 3, Reason.NO_CANDIDATE, "none"))
    p = rig.policy.progress()
    assert (p.tuned, p.failed, p.running, p.pending) == (2, 1, 1, 0)
    rig.tuned("g1-1", 4)
    assert rig.policy.progress().done


def test_why_is_one_sentence_at_every_turn() -> None:
    rig = Rig()
    why = rig.policy.why
    assert why("g1") == "there is no group g1"
    assert why(5) == "shape 5 is not part of this run"
    rig.group("g1", [1, 2], 500.0)
    rig.group("g2", [3], 400.0)
    rig.group("g3", [4], 300.0)
    rig.group("g4", [5], 200.0)
    assert why("g1") == "group g1 waits: no node has joined yet"
    rig.node("a")
    assert why("g2") == "attempt g2-1 is in the inbox of a with 1 other before it"
    assert why("g4") == "group g4 waits for its turn: every node has enough ahead"
    rig.start("g1-1", "a", shape=1)
    assert why(1) == "attempt g1-1 runs on a slot 0"
    rig.fault("g1-1", 1)
    assert why("g1") == "group g1 was split; what is left of it is in g1a, g1b"
    rig.do(ev.NodeDraining("a"))
    assert "being taken back from a" in why("g2")
    for name in ("g2-1", "g3-1", "g4-1", "g1a-1", "g1b-1"):
        rig.taken(name)
    assert why("g2") == "group g2 waits: a is draining"
    rig.do(ev.ShapeTuned("g1-1", 2))
    assert why(2) == "shape 2 is tuned"
    assert why("g1b") == "every shape of group g1b is settled"
    rig.do(ev.Resumed(2))
    assert why("g2") == "group g2 waits: no slot takes work now (a is being prepared)"


def test_the_least_comes_first_whatever_changed() -> None:
    heap = KeyedHeap()
    for n in range(200):
        heap.set("x", (float(n % 7), 0.0))
        heap.set("y", (3.5, 1.0))
    heap.set("x", (9.0, 0.0))
    assert heap.first() == "y"
    assert list(heap.walk()) == ["y", "x"]
    assert list(heap.walk()) == ["y", "x"]
    heap.discard("y")
    assert heap.first() == "x"
    assert "y" not in heap
    assert len(heap) == 1
