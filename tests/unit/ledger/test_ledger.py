"""The ledger's books: what each record does, and what can never be."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import events as ev
from orchestrator.errors import LedgerError
from orchestrator.ledger import Ledger, LedgerReader
from orchestrator.ledger.reader import reconcile
from orchestrator.reasons import Reason
from orchestrator.run.drive import report_faults
from orchestrator.run.explain import of_group, of_node, of_shape
from tests.support.ledger_kit import A8W8, BadNotes, Run, ended, per_node, row, shapes, started


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path) as r:
        yield r


def group_state(run: Run, group: str) -> str:
    return next(g.state for g in run.ledger.groups() if g.id == group)


def test_a_group_goes_from_waiting_to_done_and_its_shapes_are_settled(run: Run) -> None:
    assert group_state(run, "g0001") == "waiting"
    run.send("g0001-1")
    assert group_state(run, "g0001") == "sent"
    run.says(started("g0001-1"), {"type": "shape_started", "t": 1.0, "attempt": "g0001-1", "shape": 1})
    assert group_state(run, "g0001") == "running"
    counts = run.ledger.counts()
    assert (counts.total, counts.running, counts.pending) == (3, 1, 2)
    run.tune("g0001-1", 1, 2)
    run.says(ended("g0001-1"))
    assert group_state(run, "g0001") == "done"
    counts = run.ledger.counts()
    assert (counts.tuned, counts.running, counts.pending, counts.settled) == (2, 0, 1, 2)
    attempt = run.attempt("g0001-1")
    assert (attempt.number, attempt.outcome, attempt.slot, attempt.exit) == (1, "done", "0", 0)
    assert attempt.spent == {"import": 1.0, "measure": 3.0}
    assert attempt.device["gfx"] == "gfx950"
    assert run.ledger.spent() == {"import": 1.0, "measure": 3.0}
    assert reconcile(run.ledger) == []


def test_the_first_valid_winner_settles_and_later_ones_are_kept_and_change_nothing(run: Run) -> None:
    run.send("g0002-1", node="n1")
    run.send("g0002-2", node="n2")
    run.tune("g0002-2", 3, node="n2", us=20.0)
    run.tune("g0002-1", 3, node="n1", us=5.0)
    (winner,) = run.ledger.winners()
    assert (winner.attempt, winner.us, winner.node) == ("g0002-2", 20.0, "n2")
    assert [r.us for r in run.ledger.profile_rows(3) if r.winner] == [20.0, 5.0]
    assert run.journal(ev.ShapeTuned("g0002-1", 3)) == [False]
    assert reconcile(run.ledger) == []


def test_a_shape_is_not_settled_without_a_row(run: Run) -> None:
    run.send("g0002-1")
    with pytest.raises(LedgerError, match="no valid row"):
        run.journal(ev.ShapeTuned("g0002-1", 3))
    assert run.ledger.counts().tuned == 0
    assert not list(run.ledger.journal_records(after=1)), "the record went with the transaction"


def test_fail_retry_and_tune_keeps_the_history(run: Run) -> None:
    run.send("g0002-1")
    run.says(started("g0002-1"), ended("g0002-1", "fault", in_flight=3, exit=-6, detail="SIGABRT"))
    fail = ev.FailShape(3, Reason.FAULT, "twice", "g0002-1", confirmed=True)
    assert run.journal(fail, fail) == [True, False]
    (failed,) = run.ledger.failed()
    assert (failed.key, failed.reason, failed.node, failed.attempts) == ((3, 64, 128), "fault", "n1", 1)
    assert failed.confirmed
    assert run.ledger.failures() == {"fault": 1}
    assert run.ledger.failed("oom") == []
    assert run.journal(ev.RetryAsked((3,))) == [True]
    assert run.ledger.failed() == []
    run.send("g0002-2")
    run.tune("g0002-2", 3)
    assert [a.outcome for a in run.ledger.attempts(group="g0002")] == ["fault", None]
    assert per_node(run.ledger) == {"n1": (1, 0)}
    kinds = [type(r).__name__ for _, r in of_shape(run.ledger, 3, run.ledger.journal_records())]
    assert kinds == [
        "Send", "AttemptStarted", "AttemptEnded", "FailShape", "FailShape", "RetryAsked",
        "Send", "AttemptStarted", "ShapeStarted", "ShapeTuned",
    ]  # fmt: skip


def test_a_failed_shape_without_blame_names_where_it_ran_last(run: Run) -> None:
    run.send("g0002-1", node="n1")
    run.says(started("g0002-1"))
    run.send("g0002-2", node="n2")
    run.says(started("g0002-2"), node="n2", slot="3")
    run.send("g0002-3", node="n9")
    run.journal(ev.FailShape(3, Reason.KILLS_NODES, "three times", None, confirmed=False))
    (failed,) = run.ledger.failed()
    assert (failed.attempt, failed.node, failed.slot, failed.attempts) == ("g0002-2", "n2", "3", 2)


def test_a_split_moves_the_shapes_to_the_children(run: Run) -> None:
    run.journal(ev.Split("g0001", (("g0001a", (1,)), ("g0001b", (2,))), "find the poison"))
    assert [(g.id, g.state, g.parent) for g in run.ledger.groups() if g.id.startswith("g0001")] == [
        ("g0001", "split", None), ("g0001a", "waiting", "g0001"), ("g0001b", "waiting", "g0001"),
    ]  # fmt: skip
    assert [s.group for s in run.ledger.shapes()] == ["g0001a", "g0001b", "g0002"]
    assert [g.cost_s for g in run.ledger.groups() if g.parent] == [2.5, 2.5]
    assert reconcile(run.ledger) == []


@pytest.mark.parametrize("children", [(("a", (1,)), ("b", (1, 2))), (("a", (1, 2, 3)),)], ids=["doubled", "foreign"])
def test_a_split_that_doubles_or_takes_foreign_shapes_is_refused(
    run: Run, children: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    with pytest.raises(LedgerError, match="cannot be split so"):
        run.journal(ev.Split("g0001", children, ""))


def test_what_does_not_add_up_is_noted_when_a_run_ends(run: Run) -> None:
    watcher = BadNotes()
    report_faults(run.ledger, watcher)
    assert watcher.bad == []
    run.journal(ev.Split("g0001", (("g0001a", (1,)),), ""))
    report_faults(run.ledger, watcher)
    assert watcher.bad == ["the ledger does not add up: shape 2 is pending but in no group that is still whole"]


def test_a_lost_attempt_comes_back_with_its_next_sign_of_life(run: Run) -> None:
    run.send("g0001-1")
    run.says(started("g0001-1"), {"type": "shape_started", "t": 1.0, "attempt": "g0001-1", "shape": 1})
    run.journal(ev.NodeLost("n1", "silent"))
    assert group_state(run, "g0001") == "waiting"
    assert run.ledger.attempts(open_only=True) == []
    assert run.ledger.counts().running == 0
    run.says({"type": "shape_started", "t": 1.0, "attempt": "g0001-1", "shape": 2})
    assert [a.id for a in run.ledger.attempts(open_only=True)] == ["g0001-1"]
    run.journal(ev.SlotLost("n1", "0", "died too often"))
    assert run.ledger.attempts(node="n1", open_only=True) == []


@pytest.mark.parametrize(("charged", "outcome"), [(False, "lease_ended"), (True, "node_lost")])
def test_attempts_of_a_lease_end_with_it_for_good(run: Run, charged: bool, outcome: str) -> None:
    run.send("g0001-1")
    run.says(started("g0001-1"), {"type": "shape_started", "t": 1.0, "attempt": "g0001-1", "shape": 1})
    assert run.journal(ev.LeaseEnded("n1", "preempted", "PREEMPTED", charged)) == [True]
    attempt = run.attempt("g0001-1")
    assert (attempt.outcome, attempt.detail, attempt.in_flight) == (outcome, "PREEMPTED", 1)
    # what was in its files and comes home later opens nothing again
    run.says({"type": "shape_started", "t": 1.0, "attempt": "g0001-1", "shape": 2})
    assert run.ledger.attempts(open_only=True) == []
    run.tune("g0001-1", 1)
    assert next(s.state for s in run.ledger.shapes()) == "tuned"


def test_taken_back_attempts_end_so_and_lost_answers_change_nothing(run: Run) -> None:
    run.send("g0001-1")
    assert run.journal(ev.AttemptTaken("g0001-1", won=False)) == [False]
    assert run.journal(ev.AttemptTaken("g0001-1", won=True)) == [True]
    attempt = run.attempt("g0001-1")
    assert attempt.outcome == "taken_back"
    assert group_state(run, "g0001") == "waiting"


def test_an_attempt_ends_once_but_the_worker_may_still_say_what_it_spent(run: Run) -> None:
    run.send("g0001-1")
    assert run.journal(ev.AttemptEnded("g0001-1", Reason.NODE_LOST, None, "gone", 0.0)) == [True]
    run.says(ended("g0001-1", exit=-9))
    attempt = run.attempt("g0001-1")
    assert (attempt.outcome, attempt.detail, attempt.exit) == ("node_lost", "gone", -9)
    assert attempt.spent["measure"] == 3.0


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM journal",
        "UPDATE journal SET t=0",
        "DELETE FROM rows",
        "UPDATE rows SET us=1",
        "UPDATE shapes SET state='tuned', row=NULL WHERE id=3",
        "UPDATE shapes SET state='failed' WHERE id=3",
    ],
)
def test_the_journal_and_rows_are_append_only_and_a_settled_shape_has_its_row_or_reason(run: Run, sql: str) -> None:
    run.send("g0001-1")
    run.tune("g0001-1", 1)
    run.says(ended("g0001-1", "fault", in_flight=2))
    conn = sqlite3.connect(run.ledger.path, isolation_level=None)
    with pytest.raises(sqlite3.IntegrityError):
        conn.execute(sql)
    conn.close()


def test_every_kind_of_record_is_kept_and_read_back_as_it_was(run: Run) -> None:
    samples: dict[str, object] = {
        "group": "g0001", "shapes": (1, 2), "cost_s": 1.5, "epoch": 2, "node": "n1", "slots": ("0", "1"), "slot": "0",
        "detail": "why \u2028 not", "us": 3.5, "attempt": "g0001-1", "shape": 1, "reason": Reason.WRONG_RESULT,
        "outcome": Reason.HANG, "in_flight": None, "seconds": 2.5, "won": False, "seq": 4, "why": "so",
        "children": (("g0001a", (1,)), ("g0001b", (2,))), "confirmed": True, "until": 99.0, "since": 98.0,
        "doing": "wait", "complete": False, "best": ("a", "1"), "ran": (("a", "1"),), "withheld": (("b", "2"),),
        "earlier": (), "cut": True, "trials": 9, "only": (("a", "1"), ("b", "2")), "barred": (("n1", "0"),),
        "places": (("n1", "0"), ("n2", "0")), "candidates": (("b", "2"),), "child": "g0001c",
        "final": True, "host": "h1", "leases": (("17_3", "Priority"),),
        "gpus": ("3", "7"), "lease": "17_3", "pool": "mi355", "cause": "preempted",
        "charged": True, "more": True, "ends_at": 1700000000.5, "compute_us": 110.5, "memory_us": 250.0,
        "device": "MI355X", "temperature_c": 71.0, "power_cap_w": 1400.0, "value": 2.5,
    }  # fmt: skip
    run.send("g0001-0")
    run.says(started("g0001-0"))
    records = [
        cls(**{f.name: samples[f.name] for f in dataclasses.fields(cls)})
        for name, cls in ev.RECORD_TYPES.items()
        if name not in ("Tick", "ShapeTuned", "SettleShape")
    ]
    before = len(list(run.ledger.journal_records()))
    run.journal(*records)
    assert [r for _, r in run.ledger.journal_records()][before:] == records
    assert run.journal(ev.Tick()) == [False]
    assert len(list(run.ledger.journal_records())) == before + len(records)


def test_group_added_again_adds_nothing(run: Run) -> None:
    assert run.journal(ev.GroupAdded("g0001", (1, 2), 5.0)) == [False]
    assert run.journal(ev.GroupAdded("g0009", (3,), 5.0)) == [True]
    assert run.ledger.group_shapes("g0009") == (3,)


def test_skipped_shapes_stay_skipped(run: Run) -> None:
    with run.ledger.transaction():
        assert run.ledger.skip_shapes([3], "in the table", 5.0) == 1
        assert run.ledger.skip_shapes([], "nothing") == 0
    assert run.journal(ev.FailShape(3, Reason.FAULT, "", None, confirmed=False)) == [False]
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


def test_a_run_is_prepared_until_its_first_node_is_up(run: Run) -> None:
    for state, then in (("preparing", "running"), ("interrupted", "interrupted")):
        with run.ledger.transaction():
            run.ledger.set_meta("state", state)
        assert run.journal(ev.Resumed(1), ev.NodeJoined("n1", ("0",))) == [False, state != then]
        assert run.ledger.state == then


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


def test_history_of_a_group_and_a_node(run: Run) -> None:
    run.send("g0001-1", node="n1")
    run.tune("g0001-1", 1)
    run.send("g0002-1", node="n2")
    run.tune("g0002-1", 3, node="n2")
    run.journal(
        ev.FailShape(2, Reason.HANG, "", "g0001-1", confirmed=False),
        ev.Quarantine("n1", "0", "faults", 5.0),
        ev.RetryAsked((2,)),
        ev.Split("g0001", (("g0001a", (2,)),), "again"),
    )
    assert [type(r).__name__ for _, r in of_group(run.ledger, "g0001", run.ledger.journal_records())] == [
        "Send", "AttemptStarted", "ShapeStarted", "ShapeTuned", "FailShape", "RetryAsked", "Split",
    ]  # fmt: skip
    assert [type(r).__name__ for _, r in of_group(run.ledger, "g0001a", run.ledger.journal_records())] == [
        "RetryAsked",
        "Split",
    ]
    on_n1 = [type(r).__name__ for _, r in of_node(run.ledger, "n1", run.ledger.journal_records())]
    assert on_n1 == ["Send", "AttemptStarted", "FailShape", "Quarantine"]


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


def test_what_is_looked_up_for_each_attempt_does_not_read_all_attempts(run: Run) -> None:
    earlier = 2000
    with run.ledger.transaction():
        for n in range(1, earlier + 1):
            run.ledger.journal(ev.Send(f"g0001-{n}", "g0001", "n1", None, n), 1.0)
            run.ledger.journal(ev.AttemptStarted(f"g0001-{n}", "n1", "0"), 1.0)
            if n % 2:  # the others were never read to their end, on another slot
                run.ledger.journal(ev.AttemptEnded(f"g0001-{n}", Reason.DONE, None, "", 1.0), 1.0)
            else:
                run.ledger.journal(ev.AttemptStarted(f"g0001-{n}", "n1", "1"), 1.0)
    steps: list[int] = []
    run.ledger._conn.set_progress_handler(lambda: steps.append(1), 100)
    assert run.ledger.running_on("n1", "0") == []
    assert run.ledger.blocklist_verdicts("n1") == ([], [])
    assert len(steps) < earlier / 100, "fewer than one of SQLite's steps for each attempt"


def test_many_rows_of_one_read_are_kept_in_order(run: Run) -> None:
    run.send("g0001-1")
    run.says(started("g0001-1"), *(row("row", "g0001-1", 1, us=float(us)) for us in range(1, 151)))
    assert [r.us for r in run.ledger.profile_rows(1)] == [float(us) for us in range(1, 151)]
