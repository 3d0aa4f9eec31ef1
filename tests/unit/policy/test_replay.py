"""The state is a function of the journal, and deciding changes nothing."""

from __future__ import annotations

import copy
import random

import pytest

from orchestrator import events as ev
from orchestrator.policy import Policy
from orchestrator.policy.policy import decide
from tests.simulator.simulator import Simulator
from tests.support.drawn_plans import draw_plan, with_candidates, with_leases
from tests.support.policy_rig import Rig


def test_deciding_changes_nothing() -> None:
    rng = random.Random(1)

    def look(sim: Simulator) -> None:
        if rng.random() < 0.02:
            before = sim.policy.digest()
            decide(sim.policy.state, sim.now)
            assert sim.policy.digest() == before

    for seed in range(6):
        Simulator(with_leases(with_candidates(draw_plan(seed))), step=look).run()


def test_the_ledger_s_own_form_gives_the_same_state() -> None:
    sim = Simulator(with_leases(draw_plan(3)))
    sim.run()
    fresh = Policy()
    for t, record in sim.journal:
        fresh.apply(ev.from_json(type(record).__name__, ev.to_json(record)), t)
    assert fresh.digest() == sim.policy.digest()


def test_a_journal_cut_before_the_decisions_is_caught_up_with() -> None:
    rig = Rig()
    rig.singles(1, 2)
    rig.node("a")
    cut = next(i for i, (_, r) in enumerate(rig.journal) if isinstance(r, ev.Send))
    fresh = Policy()
    for t, record in rig.journal[:cut]:
        fresh.apply(record, t)
    assert fresh.handle(ev.Tick(), rig.now) == [r for _, r in rig.journal[cut:]]
    assert fresh.digest() == rig.policy.digest()


def test_a_tick_changes_nothing_by_itself() -> None:
    rig = Rig()
    rig.node("a")
    before = copy.deepcopy(rig.policy.state)
    rig.policy.apply(ev.Tick(), 10.0**9)
    assert repr(rig.policy.state) == repr(before)


def test_progress_counts() -> None:
    rig = Rig()
    rig.singles(1, 2, 3, cost_s=500.0)
    rig.node("a")
    rig.start(1)
    p = rig.policy.progress()
    assert (p.total, p.tuned, p.failed, p.running, p.pending, p.done, p.stuck) == (3, 0, 0, 1, 2, False, None)
    rig.tune(1, 2, 3)
    assert rig.policy.progress().done


@pytest.mark.parametrize("what", ["g9999", 99])
def test_what_is_not_of_the_run_is_said(what: str | int) -> None:
    assert "no group" in Rig().policy.why(what) or "not part" in Rig().policy.why(what)


def test_why_is_one_sentence_at_every_turn() -> None:
    seen = set()

    def ask(sim: Simulator) -> None:
        asked: list[str | int] = [*list(sim.policy.state.shapes)[:3], *list(sim.policy.state.attempts)[-2:]]
        for what in asked:
            text = sim.policy.why(what)
            assert text
            assert "\n" not in text
            seen.add(" ".join(text.split(" waits")[-1].split()[:3]) if " waits" in text else "")

    for seed in range(4):
        Simulator(with_leases(draw_plan(seed)), step=ask).run()
    assert len(seen) > 3


def test_the_state_holds_what_became_of_everything() -> None:
    sim = Simulator(draw_plan(5))
    sim.run()
    state = sim.policy.state
    starts = [r.attempt for _, r in sim.journal if isinstance(r, ev.AttemptStarted)]
    assert set(starts) <= set(state.attempts)
    for _, r in sim.journal:
        if isinstance(r, ev.AttemptEnded):
            assert state.attempts[r.attempt].outcome is not None
        if isinstance(r, ev.Quarantine):
            assert ("quarantined", r.why) in [h[1:] for h in state.nodes[r.node].slots[r.slot].history]
        if isinstance(r, ev.NodeLost):
            assert "lost" in [h[1] for h in state.nodes[r.node].history]
    for s in state.shapes.values():
        assert s.state == "pending" or s.settled_at > 0
        assert s.attempt == "" or s.attempt in s.attempts
