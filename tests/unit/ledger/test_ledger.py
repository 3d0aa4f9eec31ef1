"""The ledger's books: what is kept, what is read back of it, and what can never be."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import events as ev
from orchestrator.controller.drive import report_faults
from orchestrator.errors import LedgerError
from orchestrator.ledger import Ledger, LedgerReader
from orchestrator.ledger.reader import reconcile
from orchestrator.reasons import Reason
from tests.support.ledger_kit import A8W8, BadNotes, Run, ended, per_node, row, shapes, started


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path) as r:
        yield r


def test_a_group_is_worked_at_and_its_shapes_are_settled(run: Run) -> None:
    run.send("g0001-1")
    run.says(started("g0001-1"), {"type": "shape_started", "t": 1.0, "attempt": "g0001-1", "shape": 1})
    counts = run.ledger.counts()
    assert (counts.total, counts.running, counts.pending) == (3, 1, 2)
    run.tune("g0001-1", 1, 2)
    run.says(ended("g0001-1"))
    counts = run.ledger.counts()
    assert (counts.tuned, counts.running, counts.pending, counts.settled) == (2, 0, 1, 2)
    report = run.ledger.report("g0001-1")
    assert (report.exit, report.spent, report.device["gfx"]) == (0, {"import": 1.0, "measure": 3.0}, "gfx950")
    assert run.ledger.spent() == {"import": 1.0, "measure": 3.0}
    assert reconcile(run.ledger) == []


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


def test_the_state_is_that_of_the_journal_read_at_once_bit_by_bit_or_while_it_is_written(run: Run) -> None:
    with LedgerReader.open_readonly(run.ledger.path) as reader:
        for attempt, shape in (("g0001-1", 1), ("g0002-1", 3)):
            run.send(attempt)
            run.tune(attempt, shape)
            assert reader.replayed == run.state == run.ledger.replayed
    with LedgerReader.open_readonly(run.ledger.path) as reader:
        assert reader.replayed == run.state


def test_fail_retry_and_tune_keeps_the_history(run: Run) -> None:
    run.send("g0002-1")
    run.says(started("g0002-1"), ended("g0002-1", "fault", in_flight=3, exit=-6, detail="SIGABRT"))
    fail = ev.FailShape(3, Reason.FAULT, "twice", "g0002-1", confirmed=True)
    run.journal(fail, dataclasses.replace(fail, detail="again"))
    (failed,) = run.ledger.failed()
    assert (failed.key, failed.reason, failed.node, failed.attempts) == ((3, 64, 128), "fault", "n1", 1)
    assert (failed.confirmed, failed.detail) == (True, "twice")
    assert run.ledger.failures() == {"fault": 1}
    assert run.ledger.failed("oom") == []
    run.journal(ev.RetryAsked((3,)))
    assert run.ledger.failed() == []
    run.send("g0002-2")
    run.tune("g0002-2", 3)
    assert [a.outcome for a in run.state.attempts.values()] == [Reason.FAULT, None]
    assert per_node(run.ledger) == {"n1": (1, 0)}


def test_a_failed_shape_without_blame_names_where_it_ran_last(run: Run) -> None:
    run.send("g0002-1", node="n1")
    run.says(started("g0002-1"))
    run.send("g0002-2", node="n2", slot="3")
    run.says(started("g0002-2"), node="n2", slot="3")
    run.send("g0002-3", node="n9")
    run.journal(ev.FailShape(3, Reason.KILLS_NODES, "three times", None, confirmed=False))
    (failed,) = run.ledger.failed()
    assert (failed.attempt, failed.node, failed.slot, failed.attempts) == ("g0002-2", "n2", "3", 2)


def test_what_does_not_add_up_is_noted_when_a_run_ends(run: Run) -> None:
    watcher = BadNotes()
    report_faults(run.ledger, watcher)
    assert watcher.bad == []
    run.send("g0002-1")
    run.journal(ev.ShapeTuned("g0002-1", 3))
    run.says(row("row", "g0002-1", 3))
    run.state.attempts["g0002-1"].shapes = ()
    report_faults(run.ledger, watcher)
    assert watcher.bad == [
        "the ledger does not add up: shape 3 is tuned by g0002-1 without a valid row of that attempt",
        "the ledger does not add up: there are rows of shape 3 in attempt g0002-1, which does not have it",
    ]


def test_an_attempt_ends_once_but_the_worker_may_still_say_what_it_spent(run: Run) -> None:
    run.send("g0001-1")
    run.journal(ev.AttemptEnded("g0001-1", Reason.NODE_LOST, None, "gone", 0.0))
    run.says(ended("g0001-1", exit=-9))
    attempt, report = run.state.attempts["g0001-1"], run.ledger.report("g0001-1")
    assert (attempt.outcome, attempt.detail, report.exit) == (Reason.NODE_LOST, "gone", -9)
    assert report.spent["measure"] == 3.0


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


def test_every_kind_of_record_is_kept_and_read_back_as_it_was(run: Run) -> None:
    samples: dict[str, object] = {
        "kind": "k", "units": ((1, 2), (3,)), "costs_s": ((1.5, 2.0), (0.5,)), "tier": 1, "alone": True, "setup_s": 4.0,
        "shares_end": True, "shapes": (1, 2), "epoch": 2, "node": "n1", "slots": ("0", "1"), "slot": "0",
        "detail": "why \u2028 not", "us": 3.5, "attempt": "g0001-1", "shape": 1, "reason": Reason.WRONG_RESULT,
        "outcome": Reason.HANG, "in_flight": None, "seconds": 2.5, "won": False, "seq": 4, "why": "so",
        "confirmed": True, "until": 99.0, "since": 98.0, "doing": "wait", "withheld": (("b", "2"),), "earlier": (),
        "cut": True, "final": True, "host": "h1", "leases": (("17_3", "Priority"),), "gpus": ("3", "7"),
        "lease": "17_3", "pool": "mi355", "cause": "preempted", "charged": True, "more": True,
        "ends_at": 1700000000.5, "compute_us": 110.5, "memory_us": 250.0, "device": "MI355X", "temperature_c": 71.0,
        "power_cap_w": 1400.0,
    }  # fmt: skip
    kinds = [cls for name, cls in ev.RECORD_TYPES.items() if name != "Tick"]
    records = [cls(**{f.name: samples[f.name] for f in dataclasses.fields(cls)}) for cls in kinds]
    before = len(list(run.ledger.journal_records()))
    with run.ledger.transaction():
        for r in (*records, ev.Tick()):
            run.ledger.journal(r, 5.0)
    assert list(run.ledger.journal_records())[before:] == [(5.0, r) for r in records]


def test_skipped_shapes_are_left_out_until_they_are_taken_in_again(run: Run) -> None:
    with run.ledger.transaction():
        assert run.ledger.skip_shapes([3], "in the table", 5.0) == 1
        assert run.ledger.skip_shapes([], "nothing") == 0
        assert run.ledger.skip_shapes([2, 3], "the limit", 6.0, reason="not_worth_it") == 1
    assert [(s.id, s.reason, s.detail) for s in run.ledger.shapes("skipped")] == [
        (2, "not_worth_it", "the limit"),
        (3, None, "in the table"),
    ]
    with run.ledger.transaction():
        assert run.ledger.reopen_skipped() == 1
    assert run.ledger.counts().skipped == 1


def test_a_key_is_asked_for_once(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.db") as ledger:
        doubled = [*shapes(2), dataclasses.replace(shapes(1)[0], id=9)]
        with pytest.raises(LedgerError, match="UNIQUE"), ledger.transaction():
            ledger.add_shapes(doubled, A8W8)
        assert ledger.counts().total == 0


def test_writes_only_inside_a_transaction_which_is_all_or_nothing(run: Run) -> None:
    with pytest.raises(LedgerError, match="only written inside"):
        run.ledger.set_meta("state", "running")
    with contextlib.suppress(ZeroDivisionError), run.ledger.transaction():
        run.ledger.set_meta("state", "running")
        raise ZeroDivisionError
    assert run.ledger.state == "planned"
    with run.ledger.transaction(), pytest.raises(LedgerError, match="open already"), run.ledger.transaction():
        pass
    with pytest.raises(LedgerError, match="no state of a run"), run.ledger.transaction():
        run.ledger.set_meta("state", "fine")


def test_readers_see_whole_transactions_while_a_controller_writes(run: Run) -> None:
    with LedgerReader.open_readonly(run.ledger.path) as reader:
        with run.ledger.transaction():
            run.ledger.set_meta("state", "running")
            assert reader.state == "planned"
        assert reader.state == "running"
        with reader.snapshot():
            assert reader.counts().skipped == 0
            with run.ledger.transaction():
                run.ledger.skip_shapes([3], "in the table")
            assert reader.counts().skipped == 0
        assert reader.counts().skipped == 1


def test_a_finished_run_with_unsettled_shapes_does_not_add_up(run: Run) -> None:
    with run.ledger.transaction():
        run.ledger.set_meta("state", "finished")
    assert reconcile(run.ledger) == ["the run is finished, but 3 shapes are not settled"]


def test_a_profile_row_keeps_what_the_family_needs_beyond_the_usual(run: Run) -> None:
    run.send("g0002-1")
    run.says(started("g0002-1"), row("row", "g0002-1", 3, block_m=32, us=float("inf"), status="timeout"))
    (kept,) = run.ledger.profile_rows()
    assert (kept.us, kept.status, kept.row["block_m"]) == (-1.0, "timeout", 32)
    assert (kept.gfx, kept.cu_num, kept.key) == ("gfx950", 256, (3, 64, 128))


def test_many_rows_of_one_read_are_kept_in_order(run: Run) -> None:
    run.send("g0001-1")
    run.says(started("g0001-1"), *(row("row", "g0001-1", 1, us=float(us)) for us in range(1, 151)))
    assert [r.us for r in run.ledger.profile_rows()] == [float(us) for us in range(1, 151)]
