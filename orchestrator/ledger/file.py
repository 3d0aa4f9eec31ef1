"""An open ledger: raw queries with our errors, the run's own values, the journal."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orchestrator import events as ev
from orchestrator.families import get_family
from orchestrator.ledger import connect
from worker.families import Family

_CHUNK = 1000


class LedgerFile:
    """A ledger that is open: its queries, what the run is, its journal. A context manager; one thread's."""

    def __init__(self, conn: sqlite3.Connection, path: Path) -> None:
        self._conn, self.path = conn, path

    def close(self) -> None:
        self._conn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _all(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with connect.readable(self.path):
            return self._conn.execute(sql, values).fetchall()

    def query(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Any other question, in SQL (tables: orchestrator/ledger/schema.py)."""
        return self._all(sql, values)

    def _each(self, sql: str, values: tuple[Any, ...] = ()) -> Iterator[Any]:
        with connect.readable(self.path):
            cursor = self._conn.execute(sql, values)
        while True:
            with connect.readable(self.path):
                chunk = cursor.fetchmany(_CHUNK)
            if not chunk:
                return
            yield from chunk

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Everything read inside is of one moment, whatever a controller writes meanwhile."""
        if self._conn.in_transaction:
            yield
            return
        with connect.readable(self.path):
            self._conn.execute("BEGIN")
        try:
            yield
        finally:
            self._conn.execute("COMMIT")

    # --- the run --------------------------------------------------------------------------------------------

    def meta(self, key: str, default: Any = None) -> Any:
        """A value of the run (state, epoch, family, tuner, controller, ...), or `default`."""
        found = self._all("SELECT value FROM meta WHERE key=?", (key,))
        return json.loads(found[0][0]) if found else default

    @property
    def state(self) -> str:
        """planned, preparing, running, finished, interrupted or cancelled."""
        return str(self.meta("state", "planned"))

    @property
    def family(self) -> Family:
        """The family whose key columns `ShapeState.key` follows."""
        return get_family(str(self.meta("family", "")))

    def journal_records(self, after: int = 0) -> Iterator[tuple[float, ev.Record]]:
        """(time, record) in order: what resume replays. Types that this version does not know are left out."""
        for t, kind, data in self._each("SELECT t, type, data FROM journal WHERE id>? ORDER BY id", (after,)):
            if kind in ev.RECORD_TYPES:
                yield t, ev.from_json(kind, data)
