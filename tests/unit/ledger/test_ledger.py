"""The ledger stores records, reads them back, and refuses impossible ones."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import events as ev
from orchestrator.controller.drive import report_faults
from orchestrator.errors import LedgerError
from orchestrator.ledger.reader import LedgerReader, reconcile
from orchestrator.ledger.writer import Ledger, row_values
from orchestrator.paths import RunConfig
from orchestrator.reasons import Reason
from orchestrator.results.export import make_provenance, write_profile
from orchestrator.results.run_results import RunResults
from tests.kits.fleet import records
from tests.kits.results import A8W8, DEVICE, ROW, BadNotes, Run, blocked, ended, row, shapes, started, tuned
from tests.simulator.simulator import Simulator
from tests.support.drawn_plans import draw_plan, with_candidates, with_leases


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path) as r:
        yield r


def test_the_first_valid_winner_settles_and_later_ones_are_kept_and_change_nothing(run: Run) -> None:
    run.send("g0002-1", node="n1")
    run.send("g0002-2", node="n2")
    run.tune("g0002-2", 3, node="n2", us=20.0)
    run.tune("g0002-1", 3, node="n1", us=5.0)
    (winner,) = run.ledger.winners()
    assert (winner.attempt, winner.us, winner.node) == ("g0002-2", 20.0, "n2")
    assert [r.us for r in run.ledger.profile_rows() if r.winner] == [20.0, 5.0]
    run.tune("g0002-2", 3, node="n2", us=1.0)
    assert [w.us for w in run.ledger.winners()] == [20.0], "nor does a second row of the attempt that settled it"
    assert reconcile(run.ledger) == []


def test_counts_and_reports_of_a_shape_that_failed_and_was_tuned_after_a_retry(run: Run) -> None:
    run.send("g0002-1")
    run.says(started("g0002-1"), ended("g0002-1", "fault", in_flight=3, exit=-6, detail="SIGABRT"))
    run.journal(ev.FailShape(3, Reason.FAULT, "twice", "g0002-1", confirmed=True))
    (failed,) = run.ledger.failed()
    assert (failed.key, failed.reason, failed.node, failed.attempts) == ((3, 64, 128), "fault", "n1", 1)
    run.journal(ev.RetryAsked((3,)))
    run.send("g0002-2")
    run.tune("g0002-2", 3)
    run.says(ended("g0002-2"))
    counts = run.ledger.counts()
    assert (counts.failed, counts.tuned, counts.running, counts.pending, counts.settled) == (0, 1, 0, 2, 1)
    assert (run.ledger.report("g0002-1").exit, run.ledger.spent()) == (-6, {"import": 2.0, "measure": 6.0})


def test_what_does_not_add_up_is_noted_when_a_run_ends(run: Run) -> None:
    watcher = BadNotes()
    report_faults(run.ledger, watcher)
    assert watcher.bad == []
    run.send("g0002-1")
    run.journal(ev.ShapeTuned("g0002-1", 3))
    run.says(row("row", "g0002-1", 3))
    run.state.attempts["g0002-1"].shapes = ()
    with run.ledger.transaction():
        run.ledger.set_meta("state", "finished")
    report_faults(run.ledger, watcher)
    assert [said.removeprefix("the ledger does not add up: ") for said in watcher.bad] == [
        "shape 3 is tuned by g0002-1 without a valid row of that attempt",
        "there are rows of shape 3 in attempt g0002-1, which does not have it",
        "the run is finished, but 2 shapes are not settled",
    ]


@pytest.mark.parametrize(
    "sql", ["DELETE FROM journal", "UPDATE journal SET t=0", "DELETE FROM rows", "UPDATE rows SET us=1"]
)
def test_the_journal_and_rows_are_append_only(run: Run, sql: str) -> None:
    run.send("g0001-1")
    run.tune("g0001-1", 1)
    conn = sqlite3.connect(run.ledger.path, isolation_level=None)
    with pytest.raises(sqlite3.IntegrityError):
        conn.execute(sql)
    conn.close()


@given(st.sampled_from([*ev.RECORD_TYPES.values()]).flatmap(st.from_type))
def test_every_kind_of_record_is_read_back_as_it_was(record: ev.Record) -> None:
    back = ev.from_json(type(record).__name__, ev.to_json(record))
    assert repr(back) == repr(record)  # nan is not equal to itself


def test_writes_only_inside_a_transaction_which_is_all_or_nothing(run: Run) -> None:
    with pytest.raises(LedgerError, match="only written inside"):
        run.ledger.set_meta("state", "running")
    with contextlib.suppress(ZeroDivisionError), run.ledger.transaction():
        run.ledger.set_meta("state", "running")
        raise ZeroDivisionError
    assert run.ledger.state == "planned"
    with run.ledger.transaction(), pytest.raises(LedgerError, match="open already"), run.ledger.transaction():
        pass
    with pytest.raises(LedgerError, match="UNIQUE"), run.ledger.transaction():
        run.ledger.add_shapes([dataclasses.replace(shapes(1)[0], id=9)], A8W8)


def test_readers_see_whole_transactions_while_a_controller_writes(run: Run) -> None:
    with LedgerReader.open_readonly(run.ledger.path) as reader:
        with run.ledger.transaction():
            run.ledger.set_meta("state", "running")
            assert reader.state == "planned"
        with reader.snapshot():
            assert (reader.state, reader.counts().skipped) == ("running", 0)
            with run.ledger.transaction():
                run.ledger.skip_shapes([3], "in the table")
            assert reader.counts().skipped == 0
        assert reader.counts().skipped == 1
        for attempt, shape in (("g0001-1", 1), ("g0002-1", 3)):
            run.send(attempt)
            run.tune(attempt, shape)
            assert reader.replayed == run.state == run.ledger.replayed


def test_many_rows_of_one_read_are_kept_in_order(run: Run) -> None:
    run.send("g0001-1")
    run.says(started("g0001-1"), *(row("row", "g0001-1", 1, us=float(us)) for us in range(1, 151)))
    assert [r.us for r in run.ledger.profile_rows()] == [float(us) for us in range(1, 151)]


ASM, CK = ["asm", "7"], ["ck", "3"]


def test_a_result_with_candidates_left_out_settles_nothing_until_it_is_decided(run: Run, tmp_path: Path) -> None:
    run.send("g0002-1")
    _, event = run.says(started("g0002-1"), tuned("g0002-1", blocked(ASM)))
    assert (event, run.ledger.counts().tuned) == (ev.ShapeTuned("g0002-1", 3, (("asm", "7"),)), 0)
    run.journal(ev.SettleShape(3, "g0002-1", False, "no second slot"))
    ((found, kept),) = run.ledger.unconfirmed()
    assert (found.id, found.confirmed, found.detail, found.node, found.slot) == (3, False, "no second slot", "n1", "0")
    assert [(w.candidate, w.name, w.gpu, w.verdict) for w in kept] == [(("asm", "7"), "asm kernel", "gpu-1", None)]
    assert reconcile(run.ledger) == []
    write_profile(RunResults.read(run.ledger), tmp_path / "profile.csv")
    with open(tmp_path / "profile.csv") as f:
        assert [(r["M"], r["winner"], r["unconfirmed"]) for r in csv.DictReader(f)] == [("3", "1", "1")]
    config = RunConfig("r", 0.0, [], "", "", "", "", "", "")
    (unconfirmed,) = make_provenance(RunResults.read(run.ledger), config)["unconfirmed"]
    assert unconfirmed["shape"] == {"M": 3, "N": 64, "K": 128}
    assert unconfirmed["withheld"][0]["elsewhere"] == "not tried"


def test_what_two_slots_saw_before_leaves_the_attempt_complete(run: Run) -> None:
    run.send("g0002-1")
    _, event = run.says(started("g0002-1"), tuned("g0002-1", blocked(ASM, confirmed=True, source="blocklist")))
    assert event == ev.ShapeTuned("g0002-1", 3)
    (event,) = run.says(tuned("g0002-1", blocked(ASM, source="blocklist"), withheld_more=2))
    assert event == ev.ShapeTuned("g0002-1", 3, (("asm", "7"),), (("asm", "7"),), True), "entries are told apart"


def test_other_gpus_judge_a_candidate_and_its_node_is_told_until_it_has_begun_something_else(run: Run) -> None:
    for node, withheld in (("n1", [blocked(ASM), blocked(CK)]), ("n2", [blocked(CK, slot="gpu-9")])):
        attempt = f"g0002-{node[1]}"
        assert run.ledger.blocked_verdicts("n1") == ([], [])
        run.send(attempt, node)
        run.says(started(attempt), tuned(attempt, *withheld), node=node)
    run.journal(ev.SettleShape(3, "g0002-2", True, "1 candidate"))
    ran, faulted = run.ledger.blocked_verdicts("n1")
    assert [w.candidate for w in ran] == [("asm", "7")]
    assert [w.candidate for w in faulted] == [("ck", "3")]
    assert [w.candidate for w in run.ledger.blocked_verdicts("n2")[1]] == [("ck", "3")]
    run.says(ended("g0002-1"))
    run.send("g0001-1")
    assert run.ledger.blocked_verdicts("n1")[0] != []  # sent, and not begun: it may yet be taken back
    run.says(started("g0001-1"))
    assert run.ledger.blocked_verdicts("n1") == ([], [])


def keep(ledger: Ledger, journal: list[tuple[float, ev.Record]]) -> None:
    """Keep a simulated journal, with a row for each winner."""
    places = {r.attempt: (r.node, r.slot) for _, r in journal if isinstance(r, ev.Send)}
    with ledger.transaction():
        for t, r in journal:
            if isinstance(r, ev.ShapeTuned):
                node, slot = places[r.attempt]
                made = row_values(
                    attempt=r.attempt, shape=r.shape, node=node, slot=slot, t=t, row=ROW, winner=True, device=DEVICE
                )
                ledger.put_rows([made])
            ledger.journal(r, t)


@pytest.mark.parametrize("seed", range(60))
def test_state_and_journal_agree_whatever_happened(tmp_path: Path, seed: int) -> None:
    plan = draw_plan(seed)
    simulator = Simulator(plan if seed < 30 else with_candidates(plan) if seed < 45 else with_leases(plan))
    result = simulator.run()
    with Ledger.create(tmp_path / "ledger.db") as ledger:
        with ledger.transaction():
            ledger.add_shapes(shapes(max(result.shapes)), A8W8)
        keep(ledger, simulator.journal)
        assert records(ledger) == simulator.journal
        assert reconcile(ledger) == []
        said = {s.id: (s.state, s.reason, bool(s.confirmed)) for s in ledger.shapes()}
        assert said == {i: (e.end, e.reason.value if e.reason else None, e.confirmed) for i, e in result.shapes.items()}
        assert {s.id for s, _ in ledger.unconfirmed()} == {i for i, e in result.shapes.items() if e.unconfirmed}
    with LedgerReader.open_readonly(tmp_path / "ledger.db") as reader:
        assert reader.replayed == simulator.policy.state
