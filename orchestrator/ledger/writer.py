"""Writes of a ledger, by one process (the controller), each inside `with ledger.transaction():`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import events as ev
from orchestrator.errors import LedgerError
from orchestrator.ledger import clean, database, projection
from orchestrator.ledger.reader import LedgerReader
from worker.families import Family
from worker.protocol import Row

if TYPE_CHECKING:
    from orchestrator.shapes import Shape

STATES = ("planned", "preparing", "running", "finished", "interrupted", "cancelled")

_KNOWN_ROW = frozenset(Row.__annotations__)
_ENTRY = ("key", "slot", "image", "driver", "t")
_PUT_ROW = f"INSERT INTO rows VALUES (NULL, {', '.join('?' * 22)})"


class Ledger(LedgerReader):
    """The controller's side. Every commit is on disk when `transaction` ends (synchronous=FULL)."""

    @classmethod
    def create(cls, path: Path) -> Ledger:
        """A new ledger. Raises LedgerError where there is one, or on a network file system."""
        return cls(database.create(path), path)

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """An existing ledger, migrated to this version. Raises LedgerError."""
        return cls(database.open_writer(path), path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything inside, or nothing. Not nested. Raise LedgerError, RunBusyError."""
        if self._writing():
            raise LedgerError("a transaction is open already")
        with database.readable(self.path):
            self._conn.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._conn.execute("COMMIT")
            except BaseException:
                if self._writing():  # some errors of SQLite have rolled back by themselves
                    self._conn.execute("ROLLBACK")
                raise

    def _run(self, sql: str, values: Sequence[Any]) -> int:
        self._must_be_open()
        return self._conn.execute(sql, values).rowcount

    def _writing(self) -> bool:
        return self._conn.in_transaction

    def _must_be_open(self) -> None:
        if not self._writing():
            raise LedgerError("the ledger is only written inside `with ledger.transaction():`")

    # --- the plan -------------------------------------------------------------------------------------------

    def set_meta(self, key: str, value: Any) -> None:
        """Keep a JSON value of the run."""
        if key == "state" and value not in STATES:
            raise LedgerError(f"{value!r} is no state of a run ({', '.join(STATES)})")
        self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def add_shapes(self, shapes: Sequence[Shape], family: Family) -> None:
        """Add the requested shapes. Raise LedgerError where a key comes twice."""
        self._must_be_open()
        self.set_meta("family", family.name)
        rows = ((s.id, json.dumps(s.key, separators=(",", ":"))) for s in shapes)
        self._conn.executemany("INSERT INTO shapes (id, key) VALUES (?, ?)", rows)

    def skip_shapes(self, ids: Sequence[int], detail: str, t: float | None = None) -> int:
        """Settle pending shapes as skipped; return how many were."""
        self._must_be_open()
        sql = "UPDATE shapes SET state='skipped', detail=?, settled_at=? WHERE id=? AND state='pending'"
        return self._conn.executemany(sql, [(detail, t, i) for i in ids]).rowcount if ids else 0

    # --- records --------------------------------------------------------------------------------------------

    def journal(self, record: ev.Record, t: float) -> bool:
        """Keep a record and apply it; True where it changed something (a settlement: where it settled the
        shape).

        `Tick` is not kept. Raises LedgerError for what would break the books (see projection.py).
        """
        self._must_be_open()
        if isinstance(record, ev.Tick):
            return False
        sql = "INSERT INTO journal (t, type, data) VALUES (?, ?, ?)"
        self._conn.execute(sql, (t, type(record).__name__, ev.to_json(record)))
        return projection.apply(self._conn, record, t)

    def attempt_report(
        self,
        attempt: str,
        *,
        device: Mapping[str, Any] | None = None,
        exit: int | None = None,
        spent: Mapping[str, float] | None = None,
        conditions: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Keep a worker's report on its attempt beside the events; existing values stay.

        `conditions`: readings of worker/device/health.py as `before` or `after`.
        """
        if conditions:
            there = self.attempt(attempt)
            conditions = {**conditions, **there.conditions} if there else conditions
            self._run("UPDATE attempts SET conditions=? WHERE id=?", (_dumps(conditions), attempt))
        self._run(
            """UPDATE attempts SET device=coalesce(device, ?), exit=coalesce(exit, ?), spent=coalesce(spent, ?)
               WHERE id=?""",
            (_dumps(device), exit, _dumps(spent), attempt),
        )

    def row(
        self,
        *,
        attempt: str,
        shape: int,
        node: str,
        slot: str,
        t: float,
        row: Mapping[str, Any],
        winner: bool = False,
        device: Mapping[str, Any] | None = None,
        note: str | None = None,
    ) -> None:
        """Keep a measured candidate (worker.protocol.Row), cleaned. `device` gives gfx and cu_num."""
        device = device or {}
        us = clean.number(row.get("us"))
        extra = clean.document({k: v for k, v in row.items() if k not in _KNOWN_ROW})
        values = (
            attempt, shape, node, slot, t, int(winner), -1.0 if us is None else us,
            clean.number(row.get("errRatio")), clean.text(row.get("status"), 40) or "ok",
            clean.integer(row.get("kernelId")), clean.integer(row.get("splitK")),
            clean.text(row.get("kernelName")), clean.text(row.get("libtype"), 100),
            clean.number(row.get("tflops")), clean.number(row.get("bw")), clean.number(row.get("spread")),
            clean.integer(row.get("samples")), clean.text(row.get("detail")),
            clean.text(device.get("gfx"), 64), clean.integer(device.get("cu_num")),
            json.dumps(extra) if extra else None, note,
        )  # fmt: skip
        self._run(_PUT_ROW, values)

    def withheld(self, *, attempt: str, shape: int, node: str, slot: str, entries: Iterable[Mapping[str, Any]]) -> None:
        """Keep the candidates that an attempt left out (worker.protocol.withheld_list), once each."""
        for e in entries:
            candidate, whole = projection.identity(e["candidate"]), {k: e[k] for k in _ENTRY}
            name, detail = clean.text(e["name"], 200), clean.text(e["detail"], 300)
            values = (
                attempt, shape, candidate, node, slot, json.dumps(whole), name, e["outcome"], detail, e["source"],
                int(e["confirmed"]),
            )  # fmt: skip
            self._run(f"INSERT OR IGNORE INTO withheld VALUES ({', '.join('?' * 11)}, NULL, NULL)", values)

    # --- nodes ----------------------------------------------------------------------------------------------

    def slot_info(
        self,
        node: str,
        slot: str,
        info: Mapping[str, Any] | None = None,
        device: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the latest information of a slot's worker; None leaves the existing value."""
        self._run(
            """INSERT INTO slots VALUES (?, ?, ?, ?) ON CONFLICT (node, slot)
               DO UPDATE SET info=coalesce(excluded.info, info), device=coalesce(excluded.device, device)""",
            (node, slot, _dumps(info), _dumps(device)),
        )

    def set_offset(self, node: str, slot: str, stream: str, offset: int) -> None:
        """Set the offset up to which a stream was read: commit it together with what was read."""
        self._run(
            """INSERT INTO offsets (node, slot, stream, offset) VALUES (?, ?, ?, ?)
               ON CONFLICT (node, slot, stream) DO UPDATE SET offset=excluded.offset""",
            (node, slot, stream, offset),
        )

    def note_bad(self, node: str, slot: str, stream: str, why: str) -> None:
        """Count a line of a stream that was no record, or an impossible one."""
        self._run(
            """INSERT INTO offsets (node, slot, stream, bad, last_bad) VALUES (?, ?, ?, 1, ?)
               ON CONFLICT (node, slot, stream) DO UPDATE SET bad=bad+1, last_bad=excluded.last_bad""",
            (node, slot, stream, clean.text(why, 300)),
        )


def _dumps(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(dict(value))
