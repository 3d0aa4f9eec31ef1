"""Checkpoints of a ledger that is written to: by a thread beside the writer, which does not wait for them.

A checkpoint copies pages from the write-ahead log (`ledger.db-wal`) into the database and waits for the disk. SQLite
has the writer do that in a commit once the log is long (`AUTOCHECKPOINT_PAGES` in database.py); what a thread has
copied by then is not copied again, and such a commit is short (https://sqlite.org/wal.html, section 3).
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from orchestrator.ledger import database

EVERY_S = 0.25


@contextlib.contextmanager
def checkpoints(path: Path, every_s: float = EVERY_S) -> Iterator[None]:
    """Copy what was committed, now and then, while the context lasts."""
    over = threading.Event()

    def work() -> None:
        # without it the writer copies by itself, as before
        with contextlib.suppress(sqlite3.Error), contextlib.closing(database.connect(path)) as conn:
            while not over.wait(every_s):
                conn.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    thread = threading.Thread(target=work, name="checkpoints", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
