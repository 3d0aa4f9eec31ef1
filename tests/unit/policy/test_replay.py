"""The state is a function of the journal, and deciding changes nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from orchestrator import events as ev
from orchestrator.policy import Policy
from orchestrator.policy.apply import apply
from orchestrator.policy.decide import decide
from orchestrator.policy.sentences import describe_wait
from orchestrator.reasons import Reason
from tests.simulator.simulator import Simulator
from tests.support.drawn_plans import draw_plan, with_candidates, with_leases
from tests.support.policy_rig import Rig, digest


def test_deciding_changes_nothing() -> None:
    rng = random.Random(1)

    def look(sim: Simulator) -> None:
        if rng.random() < 0.02:
            before = digest(sim.policy)
            decide(sim.policy.state, sim.now)
            assert digest(sim.policy) == before

    for seed in range(6):
        Simulator(with_leases(with_candidates(draw_plan(seed))), step=look).run()


def test_a_journal_cut_before_the_decisions_is_caught_up_with() -> None:
    rig = Rig()
    rig.singles(1, 2)
    rig.node("a")
    cut = next(i for i, (_, r) in enumerate(rig.journal) if isinstance(r, ev.Send))
    fresh = Policy()
    for t, record in rig.journal[:cut]:
        apply(fresh.state, record, t)
    assert fresh.handle(ev.Tick(), rig.now) == [r for _, r in rig.journal[cut:]]
    assert digest(fresh) == digest(rig.policy)


@dataclass(frozen=True, slots=True)
class Doubted(ev.Event):
    """A record whose reason has another name, beside a text that is called as another record's reason."""

    cause: Reason
    earlier: Reason | None = None
    outcome: str = ""


def test_a_reason_comes_back_as_a_reason_whatever_its_field_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ev.RECORD_TYPES, "Doubted", Doubted)
    back = ev.from_json("Doubted", '{"cause":"hang","earlier":"oom","outcome":"as the node said"}')
    assert back == Doubted(Reason.HANG, Reason.OOM, "as the node said")
    assert isinstance(back, Doubted)
    assert isinstance(back.cause, Reason)


def test_why_is_one_sentence_at_every_turn() -> None:
    seen = set()

    def ask(sim: Simulator) -> None:
        for what in list(sim.policy.state.shapes)[:3]:
            if sim.policy.state.shapes[what].state != "pending":
                continue
            text = describe_wait(sim.policy.state, what)
            assert text
            assert "\n" not in text
            seen.add(" ".join(text.split(" waits")[-1].split()[:3]) if " waits" in text else "")

    for seed in range(4):
        Simulator(with_leases(draw_plan(seed)), step=ask).run()
    assert len(seen) > 3
