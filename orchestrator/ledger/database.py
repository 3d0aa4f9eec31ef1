"""Database file of a ledger: its tables, as numbered migrations; create, migrate, or refuse with a way out.

A released migration is never edited: add one. Each is applied in one transaction together with its record
(`migrations` and `PRAGMA user_version`). Times are epoch seconds of the controller's clock, but `rows.t`, which is the
node's.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from orchestrator.command_hints import command
from orchestrator.errors import LedgerError, RunBusyError

APPLICATION_ID = 0x674D4C67
"""Marks a SQLite file as one of ours (`PRAGMA application_id`)."""


READABLE = 2
"""The oldest version that is read as it is; what it lacks is taken to be empty. A writer brings it up to date."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema."""

    number: int
    name: str
    statements: tuple[str, ...]


def _append_only(table: str) -> tuple[str, ...]:
    return tuple(
        f"CREATE TRIGGER {table}_no_{verb} BEFORE {verb} ON {table}"
        f" BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        for verb in ("DELETE", "UPDATE")
    )


_FIRST = (
    """CREATE TABLE migrations (
        number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL
    ) STRICT""",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID",
    """CREATE TABLE shapes (
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,       -- JSON list in the order of the family's key columns
        state TEXT NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'tuned', 'skipped', 'failed')),
        grp TEXT,                       -- the youngest group that holds it
        reason TEXT, detail TEXT, confirmed INTEGER,
        attempt TEXT,                   -- the settling attempt
        row INTEGER,                    -- the settling row
        settled_at REAL,
        CHECK (state <> 'tuned' OR (row IS NOT NULL AND attempt IS NOT NULL)),
        CHECK (state <> 'failed' OR reason IS NOT NULL)
    ) STRICT""",
    "CREATE INDEX shapes_by_state ON shapes (state, settled_at)",
    """CREATE TRIGGER shapes_settled BEFORE UPDATE OF state, row, attempt ON shapes
        WHEN OLD.state IN ('tuned', 'skipped')
        BEGIN SELECT RAISE(ABORT, 'a tuned or skipped shape stays so'); END""",
    "CREATE TRIGGER shapes_no_DELETE BEFORE DELETE ON shapes BEGIN SELECT RAISE(ABORT, 'shapes stay'); END",
    """CREATE TABLE groups (
        id TEXT PRIMARY KEY, parent TEXT, cost_s REAL NOT NULL, added_at REAL,
        split_at REAL, why TEXT         -- why it was split, or waits
    ) STRICT""",
    "CREATE TABLE members (grp TEXT, shape INTEGER, PRIMARY KEY (grp, shape)) STRICT, WITHOUT ROWID",
    "CREATE INDEX members_by_shape ON members (shape)",
    """CREATE TABLE attempts (
        id TEXT PRIMARY KEY, grp TEXT NOT NULL, number INTEGER NOT NULL, node TEXT NOT NULL,
        slot TEXT,                      -- where it runs; NULL until a worker claims what any slot may take
        seq INTEGER NOT NULL,
        sent_at REAL NOT NULL, started_at REAL,
        lost_at REAL,                   -- its node or slot was given up; NULL again at a sign of life
        ended_at REAL, outcome TEXT, in_flight INTEGER, exit INTEGER, detail TEXT, seconds REAL, spent TEXT,
        device TEXT,
        current INTEGER                 -- the shape in flight, as far as is known
    ) STRICT""",
    "CREATE INDEX attempts_by_group ON attempts (grp)",
    "CREATE INDEX attempts_open ON attempts (node) WHERE ended_at IS NULL",
    "CREATE TRIGGER attempts_no_DELETE BEFORE DELETE ON attempts"
    " BEGIN SELECT RAISE(ABORT, 'attempts is append-only'); END",
    """CREATE TRIGGER attempts_history BEFORE UPDATE ON attempts
        WHEN OLD.id IS NOT NEW.id OR OLD.grp IS NOT NEW.grp OR OLD.node IS NOT NEW.node
            OR OLD.number IS NOT NEW.number OR OLD.seq IS NOT NEW.seq OR OLD.sent_at IS NOT NEW.sent_at
        BEGIN SELECT RAISE(ABORT, 'what was sent is not rewritten'); END""",
    """CREATE TRIGGER attempts_end BEFORE UPDATE ON attempts
        WHEN OLD.ended_at IS NOT NULL AND (
            OLD.ended_at IS NOT NEW.ended_at OR OLD.outcome IS NOT NEW.outcome
            OR OLD.in_flight IS NOT NEW.in_flight OR OLD.detail IS NOT NEW.detail
            OR OLD.seconds IS NOT NEW.seconds
            OR (OLD.exit IS NOT NULL AND OLD.exit IS NOT NEW.exit)
            OR (OLD.spent IS NOT NULL AND OLD.spent IS NOT NEW.spent))
        BEGIN SELECT RAISE(ABORT, 'an attempt ends once'); END""",
    """CREATE TABLE rows (
        id INTEGER PRIMARY KEY, attempt TEXT NOT NULL, shape INTEGER NOT NULL,
        node TEXT NOT NULL, slot TEXT NOT NULL,
        t REAL NOT NULL,
        winner INTEGER NOT NULL,        -- 1: a valid winner; whether it settled the shape says shapes.row
        us REAL NOT NULL,               -- -1 where there is none
        err_ratio REAL, status TEXT NOT NULL, kernel_id INTEGER, split_k INTEGER, kernel_name TEXT NOT NULL,
        libtype TEXT NOT NULL, tflops REAL, bw REAL, spread REAL, samples INTEGER, detail TEXT NOT NULL,
        gfx TEXT NOT NULL, cu_num INTEGER,
        extra TEXT,                     -- JSON: columns of a family beyond these
        note TEXT                       -- why a winner was not accepted
    ) STRICT""",
    "CREATE INDEX rows_by_attempt ON rows (attempt, shape)",
    *_append_only("rows"),
    """CREATE TABLE slots (
        node TEXT, slot TEXT, info TEXT, device TEXT, PRIMARY KEY (node, slot)
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE offsets (
        node TEXT, slot TEXT, stream TEXT, offset INTEGER NOT NULL DEFAULT 0,
        bad INTEGER NOT NULL DEFAULT 0, last_bad TEXT,
        PRIMARY KEY (node, slot, stream)
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE canaries (
        attempt TEXT PRIMARY KEY, node TEXT NOT NULL, slot TEXT NOT NULL, asked_at REAL NOT NULL
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE journal (
        id INTEGER PRIMARY KEY, t REAL NOT NULL, type TEXT NOT NULL, data TEXT NOT NULL
    ) STRICT""",
    *_append_only("journal"),
)

_CONDITIONS = (
    # JSON: {"before": reading, "after": reading} of worker/device/health.py, as far as the worker sent them
    "ALTER TABLE attempts ADD COLUMN conditions TEXT",
)

_WITHHELD = (
    # candidates that an attempt did not measure because they faulted, there or before
    """CREATE TABLE withheld (
        attempt TEXT NOT NULL, shape INTEGER NOT NULL,
        candidate TEXT NOT NULL,        -- JSON: its identity
        node TEXT NOT NULL, slot TEXT NOT NULL,
        entry TEXT NOT NULL,            -- JSON: key, slot, image, driver, t as the worker named them
        name TEXT NOT NULL, outcome TEXT NOT NULL, detail TEXT NOT NULL,
        source TEXT NOT NULL,           -- attempt: it faulted in it; blocklist: before
        confirmed INTEGER NOT NULL,     -- 1: the blocklist had it from two slots already
        verdict TEXT CHECK (verdict IN ('ran', 'faulted')),     -- what another slot made of it
        judged_at REAL,
        PRIMARY KEY (attempt, shape, candidate)
    ) STRICT, WITHOUT ROWID""",
    "CREATE INDEX withheld_by_shape ON withheld (shape)",
    "CREATE INDEX withheld_judged ON withheld (node, judged_at) WHERE judged_at IS NOT NULL",
    "CREATE TRIGGER withheld_no_DELETE BEFORE DELETE ON withheld"
    " BEGIN SELECT RAISE(ABORT, 'withheld is append-only'); END",
    "DROP TRIGGER shapes_settled",
    """CREATE TRIGGER shapes_settled BEFORE UPDATE OF state, row, attempt ON shapes
        WHEN OLD.state='skipped' OR (OLD.state='tuned' AND (OLD.confirmed IS NOT 0 OR NEW.state<>'pending'))
        BEGIN SELECT RAISE(ABORT, 'a tuned or skipped shape stays so'); END""",
)

_NOT_WORTH_IT = (
    "DROP TRIGGER shapes_settled",
    """CREATE TRIGGER shapes_settled BEFORE UPDATE OF state, row, attempt ON shapes
        WHEN (OLD.state='skipped' AND (OLD.reason IS NOT 'not_worth_it' OR NEW.state<>'pending'))
            OR (OLD.state='tuned' AND (OLD.confirmed IS NOT 0 OR NEW.state<>'pending'))
        BEGIN SELECT RAISE(ABORT, 'a tuned or skipped shape stays so'); END""",
)

_MANY_ATTEMPTS = (
    # looked up at each start of an attempt, and for each spec: neither may read all attempts of the run
    "DROP INDEX attempts_open",
    "CREATE INDEX attempts_open ON attempts (node, slot) WHERE ended_at IS NULL",
    "CREATE INDEX attempts_begun ON attempts (node, sent_at) WHERE started_at IS NOT NULL",
)

MIGRATIONS: tuple[Migration, ...] = (
    Migration(1, "the first tables", _FIRST),
    Migration(2, "conditions of attempts", _CONDITIONS),
    Migration(3, "withheld candidates", _WITHHELD),
    Migration(4, "shapes that a limit left out", _NOT_WORTH_IT),
    Migration(5, "attempts by node and slot", _MANY_ATTEMPTS),
)


# fmt: off
NETWORK = frozenset((
    "nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "9p", "ceph", "lustre", "gpfs",
    "beegfs", "glusterfs", "orangefs", "pvfs2", "panfs", "ocfs2", "gfs2", "quobyte", "weka", "wekafs", "davfs",
    "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs", "fuse.rclone", "fuse.juicefs",
    "fuse.gcsfuse", "fuse.goofys", "fuse.davfs2", "fuse.beegfs", "fuse.cvmfs2", "fuse.quobyte",
    "fuse.blobfuse2", "fuse.lustre",
))
# fmt: on
"""Names of network and cluster file systems as /proc/self/mountinfo gives them (proc(5))."""


def file_system(path: str, mountinfo: str) -> tuple[str, str]:
    """(type, mount point) of an absolute, resolved path, from the text of /proc/self/mountinfo.

    The longest mount point that holds the path wins, the later of two equal ones. ("", "") where none does.
    """
    best = ("", "")
    for line in mountinfo.splitlines():
        left, dash, right = line.partition(" - ")
        fields, after = left.split(" "), right.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = _unescape(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[1]):
            best = (after[0], point)
    return best


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def require_local(path: Path) -> None:
    """Raise LedgerError where `path` would lie on a network file system. Does nothing where there is no /proc."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return
    kind, point = file_system(os.path.realpath(path), mountinfo)
    if kind in NETWORK:
        raise LedgerError(
            f"{path}: {point} is a network file system ({kind}), where the ledger's database can be damaged;"
            " keep runs on a local disk: --runs DIR (for example --runs /var/tmp/gemmfleet-runs)"
        )


BUSY_S = 10.0
AUTOCHECKPOINT_PAGES = 8000
"""Length of the write-ahead log (32 MB) from which on commits copy it back by themselves."""


def create(path: Path) -> sqlite3.Connection:
    """Create a ledger file. Raise LedgerError where one exists already or the file system does not suit."""
    require_local(path.parent)
    if path.exists():
        raise LedgerError(f"{path}: a ledger is there already; a run is begun once, then: {command('resume')}")
    with readable(path):
        conn = _connect(f"file:{quote(str(path.absolute()))}?mode=rwc")
        with _closed_on_error(conn):
            conn.execute("PRAGMA journal_mode=WAL")
            conn.execute(f"PRAGMA application_id={APPLICATION_ID}")
            _for_writing(conn)
            migrate(conn, path)
    return conn


def open_writer(path: Path) -> sqlite3.Connection:
    """Open an existing ledger to write, migrated to this version."""
    require_local(path.parent)
    _must_exist(path)
    with readable(path):
        conn = connect(path)
        with _closed_on_error(conn):
            _check_ours(conn, path)
            _for_writing(conn)
            migrate(conn, path)
    return conn


def open_reader(path: Path, *, at_rest: bool) -> sqlite3.Connection:
    """Open an existing ledger to read, also while a controller writes.

    SQLite needs `-wal` and `-shm` files beside a WAL database even to read it. `at_rest`: leave none behind
    where the ledger was closed in order; only for reads of a moment, since nothing then guards against a
    controller that starts meanwhile.
    """
    _must_exist(path)
    wal = path.with_name(path.name + "-wal")
    quiet = at_rest and not (wal.exists() and wal.stat().st_size)
    with readable(path):
        conn = _connect(f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' if quiet else ''}")
        with _closed_on_error(conn):
            try:
                _check_ours(conn, path)
                version = _version(conn)
            except sqlite3.OperationalError as e:
                if "unable to open" in str(e) or "readonly" in str(e):
                    raise LedgerError(
                        f"{path}: cannot be read where it is: SQLite has to write {path.name}-shm beside it, and"
                        f" {path.parent} may not be written to; copy the run folder to a place where you may"
                        " write, and give that with --runs DIR"
                    ) from e
                raise
            if version < READABLE:
                raise LedgerError(
                    f"{path}: is of ledger version {version}, this gemmfleet reads {READABLE} to {len(MIGRATIONS)};"
                    f" bring it up to date with: {command('resume')}"
                )
    return conn


def migrate(conn: sqlite3.Connection, path: Path, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Apply the missing migrations, one transaction each. Raise LedgerError on a ledger of a newer version."""
    for m in migrations:
        if m.number <= _version(conn):
            continue
        conn.execute("BEGIN IMMEDIATE")
        try:
            if _version(conn) < m.number:
                for statement in m.statements:
                    conn.execute(statement)
                conn.execute("INSERT INTO migrations VALUES (?, ?, ?)", (m.number, m.name, time.time()))
                conn.execute(f"PRAGMA user_version={m.number}")
            conn.execute("COMMIT")
        except BaseException:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            raise
    if _version(conn) > len(migrations):
        raise _newer(path, _version(conn), len(migrations))


@contextmanager
def readable(path: Path) -> Iterator[None]:
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
                f"{path}: the disk is full; what was written before is safe: free some space, then: {command('resume')}"
            ) from e
        if "no such table" in what or "no such column" in what:
            raise LedgerError(f"{path}: is damaged or no ledger of gemmfleet ({what})") from e
        raise LedgerError(f"{path}: {what}; are the folder and the file yours to read and write?") from e
    except sqlite3.DatabaseError as e:
        raise LedgerError(
            f"{path}: is damaged or no ledger at all ({e}); what the nodes measured is still in their"
            " node folders, and what can be saved of the file comes out of: sqlite3 ledger.db .recover"
        ) from e


@contextmanager
def _closed_on_error(conn: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        conn.close()
        raise


def connect(path: Path) -> sqlite3.Connection:
    """Connection to a file that is there, for writing, unchecked. Raise sqlite3.Error."""
    return _connect(f"file:{quote(str(path.absolute()))}?mode=rw")


def _connect(uri: str) -> sqlite3.Connection:
    conn = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S, cached_statements=256)
    conn.execute("PRAGMA foreign_keys=ON")
    return conn


def _for_writing(conn: sqlite3.Connection) -> None:
    conn.execute("PRAGMA synchronous=FULL")
    conn.execute(f"PRAGMA wal_autocheckpoint={AUTOCHECKPOINT_PAGES}")
    conn.execute("PRAGMA temp_store=MEMORY")


def _must_exist(path: Path) -> None:
    if not path.is_file():
        raise LedgerError(f"{path}: there is no ledger; `{command('runs list')}` shows the runs that there are")
    if not os.access(path, os.R_OK):
        raise LedgerError(f"{path}: may not be read by this user")


def _version(conn: sqlite3.Connection) -> int:
    return int(conn.execute("PRAGMA user_version").fetchone()[0])


def _check_ours(conn: sqlite3.Connection, path: Path) -> None:
    if conn.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise LedgerError(f"{path}: is no ledger of gemmfleet")
    if _version(conn) > len(MIGRATIONS):
        raise _newer(path, _version(conn), len(MIGRATIONS))


def _newer(path: Path, theirs: int, ours: int) -> LedgerError:
    return LedgerError(
        f"{path}: was written by a newer gemmfleet (ledger version {theirs}, this one knows {ours});"
        " use that version for this run, or update this one"
    )
