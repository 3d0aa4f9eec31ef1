"""The database file of a ledger: its tables, and how it is created and opened. Errors say what to do.

It holds only facts: the journal, the rows, and the workers' reports. orchestrator/policy computes the state of a run
from the journal.

If the tables change, VERSION goes up. A ledger of another version is refused: the version that began a run finishes it.
Times are epoch seconds of the controller's clock, except `rows.t`, which is the node's.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from orchestrator.command_hints import command
from orchestrator.errors import LedgerError, RunBusyError
from orchestrator.paths import RunPaths, runs_option
from worker.protocol import FIELDS

APPLICATION_ID = 0x674D4C67
"""Marks a SQLite file as one of ours (`PRAGMA application_id`)."""
VERSION = 8
"""Version of the tables (`PRAGMA user_version`)."""
LAST_VERSION_OF_0_2 = 5
"""Development versions between 0.2 and 0.3 wrote 6 and 7; 0.2 cannot read those either."""


def _append_only(table: str) -> tuple[str, ...]:
    return tuple(
        f"CREATE TRIGGER {table}_no_{verb} BEFORE {verb} ON {table}"
        f" BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        for verb in ("DELETE", "UPDATE")
    )


COLUMNS = tuple(f for f in FIELDS if f.column)
"""Fields of a row (worker/protocol/records.py) that have a column of their own."""
_SQL = {float: "REAL", int: "INTEGER", str: "TEXT NOT NULL"}

TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID",
    """CREATE TABLE shapes (
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,       -- JSON list in the order of the family's key columns
        skipped TEXT,                   -- why it is not tuned: '' (a table has it), 'not_worth_it'; NULL: it is
        detail TEXT, skipped_at REAL
    ) STRICT""",
    # what workers reported about their attempts, beside the records
    """CREATE TABLE reports (
        attempt TEXT PRIMARY KEY, exit INTEGER, spent TEXT, device TEXT,
        conditions TEXT                 -- JSON: {"before": reading, "after": reading} of worker/conditions.py
    ) STRICT, WITHOUT ROWID""",
    f"""CREATE TABLE rows (
        id INTEGER PRIMARY KEY, attempt TEXT NOT NULL, shape INTEGER NOT NULL,
        node TEXT NOT NULL, slot TEXT NOT NULL,
        t REAL NOT NULL,
        winner INTEGER NOT NULL,        -- 1: valid; the shape's is the first one of the attempt that settled it
        {", ".join(f"{f.column} {_SQL[f.kind]}" for f in COLUMNS)},
        gfx TEXT NOT NULL, cu_num INTEGER,
        extra TEXT,                     -- JSON: fields without a column of their own
        note TEXT                       -- why a winner was not accepted
    ) STRICT""",
    "CREATE INDEX rows_by_attempt ON rows (attempt, shape)",
    "CREATE INDEX winners ON rows (attempt, shape) WHERE winner=1",
    *_append_only("rows"),
    # what each worker said of itself and its device
    """CREATE TABLE slots (
        node TEXT, slot TEXT, info TEXT, device TEXT, PRIMARY KEY (node, slot)
    ) STRICT, WITHOUT ROWID""",
    # how far the controller has read each stream (E: records, L: log), and how many bad records it dropped
    """CREATE TABLE offsets (
        node TEXT, slot TEXT, stream TEXT, offset INTEGER NOT NULL DEFAULT 0,
        bad INTEGER NOT NULL DEFAULT 0, last_bad TEXT,
        PRIMARY KEY (node, slot, stream)
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE journal (
        id INTEGER PRIMARY KEY, t REAL NOT NULL, type TEXT NOT NULL, data TEXT NOT NULL
    ) STRICT""",
    *_append_only("journal"),
    # candidates that an attempt did not measure, because they faulted in it or earlier
    """CREATE TABLE withheld (
        attempt TEXT NOT NULL, shape INTEGER NOT NULL,
        candidate TEXT NOT NULL,        -- JSON: its identity
        node TEXT NOT NULL, slot TEXT NOT NULL,
        entry TEXT NOT NULL,            -- JSON: key, slot, image, driver, t as the worker named them
        name TEXT NOT NULL, outcome TEXT NOT NULL, detail TEXT NOT NULL,
        source TEXT NOT NULL,           -- attempt: it faulted in it; blocklist: before
        confirmed INTEGER NOT NULL,     -- 1: the blocklist had it from two slots already
        PRIMARY KEY (attempt, shape, candidate)
    ) STRICT, WITHOUT ROWID""",
    "CREATE INDEX withheld_by_shape ON withheld (shape)",
)

BUSY_S = 10.0
"""A write waits this long for another process that writes."""
AUTOCHECKPOINT_PAGES = 8000
"""A commit copies the write-ahead log back by itself once the log is this long (32 MB)."""


def create(path: Path) -> sqlite3.Connection:
    """Create a ledger file. Raise LedgerError if there is one already.

    If the file system does not support a write-ahead log, SQLite uses another journal mode. Everything works then, but
    readers and the controller wait for each other; `drive` warns.
    """
    if path.exists():
        resume = command(f"resume {RunPaths(path.parent).named}")
        raise LedgerError(f"{path}: the run has a ledger already; to go on with it: {resume}")
    with plain_errors(path):
        conn = _connect(f"file:{quote(str(path.absolute()))}?mode=rwc")
        with _closed_on_error(conn):
            conn.execute("PRAGMA journal_mode=WAL")
            _for_writing(conn)
            conn.execute("BEGIN IMMEDIATE")
            for statement in TABLES:
                conn.execute(statement)
            conn.execute(f"PRAGMA application_id={APPLICATION_ID}")
            conn.execute(f"PRAGMA user_version={VERSION}")
            conn.execute("COMMIT")
    return conn


def open_writer(path: Path) -> sqlite3.Connection:
    """Open an existing ledger of this version to write. Raise LedgerError, RunBusyError."""
    _must_exist(path)
    with plain_errors(path):
        conn = _connect_to_write(path)
        with _closed_on_error(conn):
            _check_ours(conn, path)
            _for_writing(conn)
    return conn


def open_reader(path: Path, *, at_rest: bool) -> sqlite3.Connection:
    """Open an existing ledger to read, also while a controller writes.

    Even to read a WAL database, SQLite needs `-wal` and `-shm` files beside it. `at_rest`: leave no such files if the
    ledger was closed properly. Only for short reads, because nothing protects them from a controller that starts
    meanwhile.
    """
    _must_exist(path)
    logs = [path.with_name(path.name + end) for end in ("-wal", "-journal")]
    quiet = at_rest and not any(p.exists() and p.stat().st_size for p in logs)
    with plain_errors(path):
        conn = _connect(f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' if quiet else ''}")
        with _closed_on_error(conn):
            try:
                _check_ours(conn, path)
            except sqlite3.OperationalError as e:
                if "unable to open" in str(e) or "readonly" in str(e):
                    raise LedgerError(
                        f"{path}: cannot be read where it is: SQLite has to write {path.name}-shm beside it, and"
                        f" you may not write to {path.parent}; copy the run folder to a place where you may"
                        " write, and give that with --runs DIR"
                    ) from e
                raise
    return conn


@contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as LedgerError or RunBusyError."""
    try:
        yield
    except sqlite3.IntegrityError as e:
        raise LedgerError(f"{path}: refused by the ledger's own rules: {e}") from e
    except sqlite3.OperationalError as e:
        what = str(e)
        if "locked" in what or "busy" in what:
            raise RunBusyError(f"{path}: another process is writing to this ledger; try again when it is done") from e
        if "full" in what:
            raise LedgerError(
                f"{path}: the disk is full. All earlier results are safe. Free some space, then:"
                f" {command(f'resume {RunPaths(path.parent).named}')}"
            ) from e
        if "no such table" in what or "no such column" in what:
            raise LedgerError(f"{path}: is damaged, or not a ledger of gemmfleet ({what})") from e
        raise LedgerError(
            f"{path}: {what}; are the folder and the file yours to read and write, on a local disk?"
        ) from e
    except sqlite3.DatabaseError as e:
        raise LedgerError(
            f"{path}: is damaged, or not a ledger at all ({e}); tune again. The nodes' measurements are still in their"
            f" node folders. To save what can be read of the file: sqlite3 {path} .recover, or .dump if that fails"
        ) from e


@contextmanager
def _closed_on_error(conn: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        conn.close()
        raise


def _connect_to_write(path: Path) -> sqlite3.Connection:
    """Open an existing file, without checks. Raise sqlite3.Error."""
    return _connect(f"file:{quote(str(path.absolute()))}?mode=rw")


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S, cached_statements=256)


def _for_writing(conn: sqlite3.Connection) -> None:
    conn.execute("PRAGMA synchronous=FULL")
    conn.execute(f"PRAGMA wal_autocheckpoint={AUTOCHECKPOINT_PAGES}")
    conn.execute("PRAGMA temp_store=MEMORY")


def _must_exist(path: Path) -> None:
    if not path.is_file():
        listing = command(f"runs list{runs_option(path.parent.parent)}")
        raise LedgerError(f"{path}: there is no ledger; `{listing}` lists the runs")
    if not os.access(path, os.R_OK):
        raise LedgerError(f"{path}: may not be read by this user")


def _check_ours(conn: sqlite3.Connection, path: Path) -> None:
    if conn.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise LedgerError(f"{path}: is not a ledger of gemmfleet")
    version = int(conn.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise LedgerError(
            f"{path}: was written by a newer gemmfleet (ledger version {version}, this one knows {VERSION});"
            " use that version for this run, or update this one"
        )
    if version < VERSION:
        if version <= LAST_VERSION_OF_0_2:
            writer = "gemmfleet 0.2 or older"
            remedy = "use gemmfleet 0.2 for this run"
        else:
            writer = "a development version before 0.3"
            remedy = "use the commit that began this run"
        raise LedgerError(
            f"{path}: was written by {writer} (ledger version {version}, this one knows {VERSION}); {remedy}. Its CSV"
            f" files are still read by name, such as {path.parent / 'profile.csv'}"
        )


EVERY_S = 0.25
"""Seconds between two checkpoints."""


@contextlib.contextmanager
def checkpoints(path: Path) -> Iterator[None]:
    """While the context lasts, copy committed pages back from the write-ahead log, so that commits need not."""
    over = threading.Event()

    def work() -> None:
        # if it fails, commits do (AUTOCHECKPOINT_PAGES)
        with contextlib.suppress(sqlite3.Error), contextlib.closing(_connect_to_write(path)) as conn:
            while not over.wait(EVERY_S):
                conn.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    thread = threading.Thread(target=work, name="checkpoints", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
