"""Opening ledgers: what is created, migrated, refused, and what the refusal says."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import LedgerError, RunBusyError
from orchestrator.ledger import Ledger, LedgerReader, database
from orchestrator.ledger.checkpoint import checkpoints
from orchestrator.ledger.database import MIGRATIONS, Migration, migrate
from tests.support.ledger_kit import Run
from tests.waiting import wait_until

MOUNTS = """22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 27 0:40 / /home rw,relatime shared:2 master:1 - nfs4 server:/home rw
31 30 0:41 / /home/me/disk rw - xfs /dev/sdb rw
32 27 0:42 / /mnt/my\\040share rw - cifs //server/share rw
33 27 0:43 / /data rw - ext4 /dev/sdc rw
34 27 0:44 / /data rw - fuse.sshfs me@host:/ rw
not a line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/you/runs", "nfs4"), ("/home", "nfs4"), ("/homework/runs", "ext4"), ("/home/me/disk/runs", "xfs"),
        ("/mnt/my share/runs", "cifs"), ("/data/runs", "fuse.sshfs"), ("/", "ext4"),
    ],
)  # fmt: skip
def test_the_file_system_is_that_of_the_longest_and_latest_mount(path: str, kind: str) -> None:
    assert database.file_system(path, MOUNTS)[0] == kind
    assert (kind in database.NETWORK) == (kind in ("nfs4", "cifs", "fuse.sshfs"))


def test_no_mount_is_no_file_system() -> None:
    assert database.file_system("/x", "") == ("", "")


def test_a_ledger_on_a_network_file_system_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger.create(tmp_path / "ledger.db").close()
    kind, _ = database.file_system(str(tmp_path), Path("/proc/self/mountinfo").read_text())
    assert kind not in database.NETWORK, "the tests themselves need a local disk"
    monkeypatch.setattr(database, "NETWORK", frozenset((kind,)))
    for attempt in (Ledger.open, Ledger.create):
        with pytest.raises(LedgerError, match=rf"network file system \({kind}\).*--runs DIR"):
            attempt(tmp_path / "ledger.db")


def test_a_ledger_is_created_once_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "odd name?#%.db"
    Ledger.create(path).close()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(LedgerError, match="already"):
        Ledger.create(path)
    with Ledger.open(path) as ledger:
        assert ledger.query("PRAGMA journal_mode") == [("wal",)]
        assert ledger.query("PRAGMA synchronous") == [(2,)]
        assert ledger.query("SELECT number, name FROM migrations") == [(m.number, m.name) for m in MIGRATIONS]


@pytest.mark.parametrize("open_", [Ledger.open, LedgerReader.open_readonly], ids=["write", "read"])
class TestRefused:
    def test_missing(self, tmp_path: Path, open_: object) -> None:
        self.refuses(tmp_path / "ledger.db", open_, "there is no ledger.*runs list")

    def test_no_database(self, tmp_path: Path, open_: object) -> None:
        (tmp_path / "ledger.db").write_bytes(b"M,N,K\n1,2,3\n" * 400)
        self.refuses(tmp_path / "ledger.db", open_, "damaged or no ledger at all")

    def test_empty(self, tmp_path: Path, open_: object) -> None:
        (tmp_path / "ledger.db").touch()
        self.refuses(tmp_path / "ledger.db", open_, "no ledger of gemmfleet")

    def test_another_database(self, tmp_path: Path, open_: object) -> None:
        conn = sqlite3.connect(tmp_path / "ledger.db")
        conn.execute("CREATE TABLE mine (x)")
        conn.close()
        self.refuses(tmp_path / "ledger.db", open_, "no ledger of gemmfleet")

    def test_newer(self, tmp_path: Path, open_: object) -> None:
        Ledger.create(tmp_path / "ledger.db").close()
        conn = sqlite3.connect(tmp_path / "ledger.db")
        conn.execute("PRAGMA user_version=99")
        conn.close()
        self.refuses(tmp_path / "ledger.db", open_, "newer gemmfleet .*version 99.*use that version")

    def refuses(self, path: Path, open_: object, why: str) -> None:
        assert callable(open_)
        with pytest.raises(LedgerError, match=why):
            open_(path)


def test_damage_inside_is_said_when_it_is_met(tmp_path: Path) -> None:
    run = Run(tmp_path, groups=(tuple(range(1, 2000)),))
    path = run.ledger.path
    run.ledger.close()
    size = path.stat().st_size
    with path.open("r+b") as f:
        f.seek(8192)
        f.write(b"\xff" * (size - 8192))
    with LedgerReader.open_readonly(path) as reader, pytest.raises(LedgerError, match="damaged"):
        list(reader.shapes())


@pytest.fixture
def nobody() -> Iterator[None]:
    """Root may write anywhere: be nobody for the test. Another user already may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_a_folder_that_cannot_be_written_is_a_clear_error_unless_read_at_rest(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path_factory.mktemp("readonly")
    Ledger.create(folder / "ledger.db").close()
    parents = [p for p in folder.parents if p.stat().st_uid == os.geteuid() and p != Path("/")]
    modes = {p: p.stat().st_mode & 0o7777 for p in parents}
    for p in parents:
        p.chmod(modes[p] | 0o555)
    folder.chmod(0o555)
    request.getfixturevalue("nobody")
    try:
        with pytest.raises(LedgerError, match=r"ledger\.db-shm.*copy the run folder"):
            LedgerReader.open_readonly(folder / "ledger.db")
        with LedgerReader.open_readonly(folder / "ledger.db", at_rest=True) as reader:
            assert reader.counts().total == 0
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        folder.chmod(0o755)
        for p, mode in modes.items():
            p.chmod(mode)


def test_reading_at_rest_leaves_nothing_behind_and_still_sees_what_a_dead_controller_wrote(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with LedgerReader.open_readonly(run.ledger.path, at_rest=True) as reader:
        assert reader.counts().total == 3, "written, but so far only in the -wal file"
    run.ledger.close()
    with LedgerReader.open_readonly(run.ledger.path, at_rest=True) as reader:
        assert reader.counts().total == 3
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.db"]


def test_a_migration_is_applied_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger.create(path)
    ledger.close()
    number = len(MIGRATIONS) + 1
    good = Migration(number, "one more", ("CREATE TABLE extra (x INTEGER) STRICT",))
    bad = Migration(number, "broken", (*good.statements, "CREATE TABLE extra (y)"))
    conn = sqlite3.connect(path, isolation_level=None)
    with pytest.raises(sqlite3.OperationalError):
        migrate(conn, path, (*MIGRATIONS, bad))
    assert conn.execute("SELECT name FROM sqlite_master WHERE name='extra'").fetchall() == []
    migrate(conn, path, (*MIGRATIONS, good))
    migrate(conn, path, (*MIGRATIONS, good))
    assert conn.execute("SELECT number, name FROM migrations ORDER BY 1 DESC").fetchone() == (number, "one more")
    conn.close()
    with pytest.raises(LedgerError, match="newer gemmfleet"):
        Ledger.open(path)


def test_an_older_ledger_is_not_read_before_it_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger.create(tmp_path / "ledger.db").close()
    monkeypatch.setattr(database, "READABLE", len(MIGRATIONS) + 1)
    with pytest.raises(LedgerError, match="bring it up to date"):
        LedgerReader.open_readonly(tmp_path / "ledger.db")


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


KILLED = """
import os, signal, sys
from pathlib import Path
from orchestrator.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]))
with ledger.transaction():
    ledger.set_offset("n1", "0", "E", 100)
with ledger.transaction():
    ledger.set_offset("n1", "0", "E", 200)
    ledger.set_meta("much", "x" * 5_000_000)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_controller_killed_in_a_transaction_leaves_the_one_before(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        path = run.ledger.path
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with Ledger.open(path) as ledger:
        assert ledger.offsets("n1") == {("E", "0"): 100}
        assert ledger.meta("much") is None


def test_checkpoints_are_made_beside_a_writer_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"

    def in_the_file() -> int:
        with contextlib.closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as conn:
            try:
                return int(conn.execute("SELECT count(*) FROM meta WHERE key LIKE 'k%'").fetchone()[0])
            except sqlite3.DatabaseError:  # it is being written
                return 0

    with Ledger.create(path) as ledger, checkpoints(path, every_s=0.001):
        for i in range(100):
            with ledger.transaction():
                ledger.set_meta(f"k{i}", i)
        wait_until(lambda: in_the_file() == 100, "what was committed is in the database file")
        with ledger.transaction():
            ledger.set_meta("k100", 100)
    with LedgerReader.open_readonly(path) as reader:
        assert [reader.meta(f"k{i}") for i in range(101)] == list(range(101))
