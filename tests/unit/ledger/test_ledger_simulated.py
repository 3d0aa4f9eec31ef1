"""The journals of simulated runs with faults, kept in a real ledger: its tables say what the journal says."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import events as ev
from orchestrator.ledger import Ledger
from orchestrator.ledger.reader import reconcile
from orchestrator.policy import Policy
from tests.simulator.simulator import Simulator
from tests.support.drawn_plans import draw_plan, with_candidates
from tests.support.ledger_kit import A8W8, DEVICE, ROW, shapes


def keep(ledger: Ledger, journal: list[tuple[float, ev.Record]]) -> None:
    with ledger.transaction():
        for t, record in journal:
            if isinstance(record, ev.ShapeTuned):
                attempt = ledger.attempt(record.attempt)
                assert attempt is not None
                ledger.row(
                    attempt=attempt.id, shape=record.shape, node=attempt.node, slot=attempt.slot or "", t=t,
                    row=ROW, winner=True, device=DEVICE,
                )  # fmt: skip
            ledger.journal(record, t)


@pytest.mark.parametrize("seed", range(60))
def test_tables_and_journal_agree_whatever_happened(tmp_path: Path, seed: int) -> None:
    simulator = Simulator(draw_plan(seed) if seed < 40 else with_candidates(draw_plan(seed)))
    result = simulator.run()
    with Ledger.create(tmp_path / "ledger.db") as ledger:
        with ledger.transaction():
            ledger.add_shapes(shapes(max(result.shapes)), A8W8)
        keep(ledger, simulator.journal)
        assert reconcile(ledger) == []
        said = {s.id: (s.state, s.reason, bool(s.confirmed)) for s in ledger.shapes()}
        assert said == {i: (e.end, e.reason.value if e.reason else None, e.confirmed) for i, e in result.shapes.items()}
        assert list(ledger.journal_records()) == simulator.journal
        assert {u.id for u in ledger.unconfirmed()} == {i for i, e in result.shapes.items() if e.unconfirmed}
        failed = [f.id for f in ledger.failed()]
        assert failed == sorted(result.of("failed"))

        policy = Policy()
        for t, record in ledger.journal_records():
            policy.apply(record, t)
        again = tuple(failed) or (1,)
        retried: list[ev.Record] = [ev.RetryAsked(again), *policy.handle(ev.RetryAsked(again), simulator.now)]
        keep(ledger, [(simulator.now, r) for r in retried])
        assert reconcile(ledger) == []
        pending = {s.id for s in ledger.shapes("pending")}
        assert pending == set(failed) | set(result.of("pending"))
