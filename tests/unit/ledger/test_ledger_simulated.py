"""The journals of simulated runs with faults, kept in a real ledger: it gives the state back, and says what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import events as ev
from orchestrator.ledger import Ledger, LedgerReader
from orchestrator.ledger.reader import reconcile
from orchestrator.ledger.writer import row_values
from tests.simulator.simulator import Simulator
from tests.support.drawn_plans import draw_plan, with_candidates, with_leases
from tests.support.ledger_kit import A8W8, DEVICE, ROW, shapes


def keep(ledger: Ledger, journal: list[tuple[float, ev.Record]]) -> None:
    places: dict[str, tuple[str, str]] = {}
    with ledger.transaction():
        for t, record in journal:
            if isinstance(record, ev.Send):
                places[record.attempt] = (record.node, record.slot)
            if isinstance(record, ev.ShapeTuned):
                node, slot = places[record.attempt]
                row = row_values(
                    attempt=record.attempt, shape=record.shape, node=node, slot=slot, t=t, row=ROW, winner=True,
                    device=DEVICE,
                )  # fmt: skip
                ledger.put_rows([row])
            ledger.journal(record, t)


@pytest.mark.parametrize("seed", range(60))
def test_state_and_journal_agree_whatever_happened(tmp_path: Path, seed: int) -> None:
    plan = draw_plan(seed)
    simulator = Simulator(plan if seed < 30 else with_candidates(plan) if seed < 45 else with_leases(plan))
    result = simulator.run()
    with Ledger.create(tmp_path / "ledger.db") as ledger:
        with ledger.transaction():
            ledger.add_shapes(shapes(max(result.shapes)), A8W8)
        keep(ledger, simulator.journal)
        assert list(ledger.journal_records()) == simulator.journal
        assert ledger.replayed == simulator.policy.state
        assert reconcile(ledger) == []
        said = {s.id: (s.state, s.reason, bool(s.confirmed)) for s in ledger.shapes()}
        assert said == {i: (e.end, e.reason.value if e.reason else None, e.confirmed) for i, e in result.shapes.items()}
        assert {s.id for s, _ in ledger.unconfirmed()} == {i for i, e in result.shapes.items() if e.unconfirmed}
        failed = [f.id for f in ledger.failed()]
        assert failed == sorted(result.of("failed"))

    with LedgerReader.open_readonly(tmp_path / "ledger.db") as reader:
        assert reader.replayed == simulator.policy.state
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        again = tuple(failed) or (1,)
        asked = ev.RetryAsked(again)
        records: list[ev.Record] = [asked, *simulator.policy.handle(asked, simulator.now)]
        keep(ledger, [(simulator.now, r) for r in records])
        assert reconcile(ledger) == []
        assert {s.id for s in ledger.shapes("pending")} == set(failed) | set(result.of("pending"))
