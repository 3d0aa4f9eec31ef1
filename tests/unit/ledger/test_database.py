"""Opening ledgers: what is created, refused, and what the refusal says."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.controller.drive import warn_without_wal
from orchestrator.errors import LedgerError, RunBusyError
from orchestrator.ledger import database
from orchestrator.ledger.database import VERSION
from orchestrator.ledger.reader import LedgerReader
from orchestrator.ledger.writer import Ledger
from tests.kits.results import BadNotes, Run, simulated_run


def test_a_ledger_is_created_once_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "odd name?#%.db"
    Ledger.create(path).close()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(LedgerError, match="already"):
        Ledger.create(path)
    with Ledger.open(path) as ledger:
        assert ledger.query("PRAGMA journal_mode") == [("wal",)]
        assert ledger.query("PRAGMA synchronous") == [(2,)]
        assert ledger.query("PRAGMA user_version") == [(VERSION,)]


def test_a_file_system_without_a_write_ahead_log_is_named_and_the_ledger_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, notes, connect = tmp_path / "ledger.db", BadNotes(), database._connect
    with Ledger.create(tmp_path / "usual.db") as ledger:
        warn_without_wal(ledger, notes)
    assert notes.bad == []
    # SQLite's locking for file systems without locks: it has no shared memory, which a write-ahead log needs
    monkeypatch.setattr(database, "_connect", lambda uri: connect(f"{uri}&vfs=unix-dotfile"))
    with Ledger.create(path) as ledger:
        warn_without_wal(ledger, notes)
        with ledger.transaction():
            ledger.set_meta("state", "running")
        assert ledger.state == "running"
    (said,) = notes.bad
    assert said.startswith(f"{path}: SQLite's write-ahead log does not work on this file system (journal mode delete)")


def sql(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as conn:
        conn.execute(statement)


def of_version(path: Path, version: int) -> None:
    Ledger.create(path).close()
    sql(path, f"PRAGMA user_version={version}")


@pytest.mark.parametrize("open_", [Ledger.open, LedgerReader.open_readonly], ids=["write", "read"])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "there is no ledger.*runs list"),
        (lambda path: path.write_bytes(b"M,N,K\n1,2,3\n" * 400), "damaged, or not a ledger at all.*dump if that fails"),
        (Path.touch, "not a ledger of gemmfleet"),
        (lambda path: sql(path, "CREATE TABLE mine (x)"), "not a ledger of gemmfleet"),
        (lambda path: of_version(path, 5), "0.2 or older .*version 5.*use gemmfleet 0.2"),
        (lambda path: of_version(path, 6), "a development version before 0.3 .*version 6.*use the commit that"),
        (lambda path: of_version(path, VERSION - 1), f"a development version before 0.3 .*version {VERSION - 1}"),
        (lambda path: of_version(path, 99), "newer gemmfleet .*version 99.*use that version"),
    ],
)
def test_what_is_no_ledger_of_ours_is_refused(
    tmp_path: Path, make: Callable[[Path], object], why: str, open_: Callable[[Path], object]
) -> None:
    make(tmp_path / "ledger.db")
    with pytest.raises(LedgerError, match=why):
        open_(tmp_path / "ledger.db")


def _first(table: str, column: str) -> str:
    return f"UPDATE {table} SET {column}=? WHERE rowid=(SELECT min(rowid) FROM {table})"


@pytest.mark.parametrize(
    ("edit", "value", "names"),
    [
        ("UPDATE meta SET value=? WHERE key='family'", "x{", "value `family`"),
        ("UPDATE meta SET value=? WHERE key='ended'", "9" * 100_000, "value `ended`"),
        ("UPDATE meta SET value=? WHERE key='ended'", '"soon"', "value `ended`"),
        ("INSERT OR REPLACE INTO meta VALUES ('cost', ?)", "[1]", "value `cost`"),
        (_first("shapes", "key"), "zz", "key of shape 1"),
        (_first("shapes", "key"), "[1]", "key of shape 1"),
        (_first("shapes", "key"), '["x",1280,8192,"torch.float8_e4m3fn"]', "key of shape 1"),
        (_first("shapes", "key"), '[1e400,1280,8192,"torch.float8_e4m3fn"]', "key of shape 1"),
        ("UPDATE meta SET value=? WHERE key='ended'", "Infinity", "value `ended`"),
        ("UPDATE shapes SET id=? WHERE id=1", 77, "shape 1 of the journal has no key"),
        ("UPDATE journal SET data=? WHERE type='AttemptEnded'", "x", "journal record"),
        ("UPDATE journal SET data=? WHERE type='AttemptEnded'", "[]", "journal record"),
        ("DELETE FROM journal WHERE id > ?", 0, "has rows, and the journal does not name it"),
        ("UPDATE journal SET type=? WHERE type='AttemptEnded'", "Nonsense", "(Nonsense)"),
        ("UPDATE journal SET data=json_set(data, '$.nope', ?)", 1, "nope"),
        ("UPDATE journal SET data=json_set(data, '$.outcome', ?) WHERE type='AttemptEnded'", "no", "(AttemptEnded)"),
        ("UPDATE journal SET data=json_set(data, '$.node', ?) WHERE type='Send'", 5, "(Send)"),
        ("UPDATE journal SET data=json_set(data, '$.seconds', ?) WHERE type='AttemptEnded'", "no", "seconds"),
        ("UPDATE rows SET extra=?", "x", "`extra` of rows"),
        ("UPDATE rows SET shape=?", 77, "is of no shape"),
        ("UPDATE rows SET us=?", None, "is a winner without a time"),
        ("UPDATE rows SET us=?", 0.0, "is a winner without a time"),
        ("UPDATE rows SET us=?", 9e999, "is a winner without a time"),
        ("UPDATE slots SET device=?", "[1]", "`device` of slots n1/0"),
        (
            "INSERT OR REPLACE INTO reports (attempt, spent) VALUES ('g0001-1', ?)",
            '{"tune": "x"}',
            "`spent` of reports g0001-1",
        ),
        (
            "INSERT OR REPLACE INTO reports (attempt, conditions) VALUES ('g0001-1', ?)",
            "[3]",
            "`conditions` of reports g0001-1",
        ),
    ],
)
def test_a_damaged_value_is_one_error_that_names_it(tmp_path: Path, edit: str, value: object, names: str) -> None:
    (runs := tmp_path / "runs").mkdir()
    paths = simulated_run(runs, 12)
    with contextlib.closing(sqlite3.connect(paths.ledger)) as conn:
        for table, verb in itertools.product(("rows", "journal"), ("DELETE", "UPDATE")):
            conn.execute(f"DROP TRIGGER {table}_no_{verb}")
        conn.execute(edit, (value,))
        conn.commit()
    commands = (["explain"], ["report"], ["status", "--json"], ["resume"])
    errors = [CliRunner().invoke(app, [*words, paths.run, "--runs", str(runs)]).exception for words in commands]
    said = [str(e) for e in errors if isinstance(e, LedgerError)]
    assert said
    assert [e for e in errors if not isinstance(e, (LedgerError, SystemExit, type(None)))] == []
    assert names in said[0]
    assert f"{paths.ledger}: is damaged: " in said[0]


def test_an_error_that_no_value_is_to_blame_for_stays_as_it_is(tmp_path: Path) -> None:
    paths = simulated_run(tmp_path, 4)
    with pytest.raises(KeyError), LedgerReader.open_readonly(paths.ledger):
        raise KeyError("ours")


def test_reading_at_rest_leaves_nothing_behind_and_still_sees_what_a_dead_controller_wrote(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with LedgerReader.open_readonly(run.ledger.path, at_rest=True) as reader:
        assert reader.counts().total == 3, "written, but so far only in the -wal file"
    run.ledger.close()
    with LedgerReader.open_readonly(run.ledger.path, at_rest=True) as reader:
        assert reader.counts().total == 3
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.db"]


def test_a_second_writer_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    with Run(tmp_path).ledger as first, Ledger.open(first.path) as second:
        with first.transaction(), pytest.raises(RunBusyError, match="another process is writing"), second.transaction():
            pass
        with second.transaction():
            second.set_meta("state", "running")
        assert first.state == "running"


def test_a_full_disk_is_said_and_what_was_committed_stays(tmp_path: Path) -> None:
    with Run(tmp_path).ledger as ledger:
        pages = ledger.query("PRAGMA page_count")[0][0]
        ledger.query(f"PRAGMA max_page_count={pages + 2}")
        with pytest.raises(LedgerError, match=r"disk is full.*gemmfleet resume"), ledger.transaction():
            ledger.set_meta("much", "x" * 100_000)
        assert ledger.meta("much") is None
        with ledger.transaction():
            ledger.set_meta("little", 1)
        assert ledger.meta("little") == 1
