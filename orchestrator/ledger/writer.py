"""Writes of a ledger, by one process (the controller), each inside `with ledger.transaction():`.

A record is kept in the journal and projected onto the tables in one transaction, so that both agree.
"""

from __future__ import annotations

import functools
import itertools
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import events as ev
from orchestrator.errors import LedgerError
from orchestrator.ledger import clean, database
from orchestrator.ledger.model import NOT_WORTH_IT
from orchestrator.ledger.reader import LedgerReader
from orchestrator.reasons import Reason
from worker.families import Family
from worker.protocol import Row

if TYPE_CHECKING:
    from orchestrator.shapes import Shape


STATES = ("planned", "preparing", "running", "finished", "interrupted", "cancelled")

_KNOWN_ROW = frozenset(Row.__annotations__)
_ENTRY = ("key", "slot", "image", "driver", "t")
_ROW = f"(NULL, {', '.join('?' * 22)})"
_ROWS_AT_ONCE = 64


class Ledger(LedgerReader):
    """The controller's side. Every commit is on disk when `transaction` ends (synchronous=FULL)."""

    @classmethod
    def create(cls, path: Path) -> Ledger:
        """A new ledger. Raises LedgerError if there is one already."""
        return cls(database.create(path), path)

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """An existing ledger of this version. Raises LedgerError."""
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

    def skip_shapes(self, ids: Sequence[int], detail: str, t: float | None = None, *, reason: str | None = None) -> int:
        """Settle pending shapes as skipped; return how many were. `reason`: NOT_WORTH_IT, or none."""
        self._must_be_open()
        sql = "UPDATE shapes SET state='skipped', reason=?, detail=?, settled_at=? WHERE id=? AND state='pending'"
        return self._conn.executemany(sql, [(reason, detail, t, i) for i in ids]).rowcount if ids else 0

    def reopen_skipped(self) -> int:
        """Make shapes pending again that a limit left out; return how many were."""
        sql = """UPDATE shapes SET state='pending', reason=NULL, detail=NULL, settled_at=NULL
                 WHERE state='skipped' AND reason=?"""
        return self._conn.execute(sql, (NOT_WORTH_IT,)).rowcount

    # --- records --------------------------------------------------------------------------------------------

    def journal(self, record: ev.Record, t: float) -> bool:
        """Keep a record and apply it; True where it changed something (a settlement: where it settled the
        shape).

        `Tick` is not kept. Raises LedgerError for what would break the books (see `_project`).
        """
        self._must_be_open()
        if isinstance(record, ev.Tick):
            return False
        sql = "INSERT INTO journal (t, type, data) VALUES (?, ?, ?)"
        self._conn.execute(sql, (t, type(record).__name__, ev.to_json(record)))
        return _project(self._conn, record, t)

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
            there = self._all("SELECT conditions FROM attempts WHERE id=?", (attempt,))
            conditions = {**conditions, **json.loads((there and there[0][0]) or "{}")}
        self._run(
            """UPDATE attempts SET device=coalesce(device, ?), exit=coalesce(exit, ?), spent=coalesce(spent, ?),
               conditions=coalesce(?, conditions) WHERE id=?""",
            (_dumps(device), exit, _dumps(spent), _dumps(conditions), attempt),
        )

    def row(self, **values: Any) -> None:
        """Keep a measured candidate; arguments as of `row_values`."""
        self.put_rows([row_values(**values)])

    def put_rows(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Keep measured candidates (of `row_values`)."""
        self._must_be_open()
        # one statement for many: at the end of each, SQLite's caller has to wait for the interpreter's lock again
        for i in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[i : i + _ROWS_AT_ONCE]
            self._conn.execute(_put_rows(len(part)), [*itertools.chain.from_iterable(part)])

    def withheld(
        self, *, attempt: str, shape: int, node: str, slot: str, entries: Sequence[Mapping[str, Any]], ran: bool
    ) -> None:
        """Keep the candidates that an attempt left out of a result (worker.protocol.withheld_list), once each; `ran`:
        all others came to an end. With it goes what that says of those that another slot left out."""
        for e in entries:
            candidate, whole = _identity(e["candidate"]), {k: e[k] for k in _ENTRY}
            name, detail = clean.text(e["name"], 200), clean.text(e["detail"], 300)
            values = (
                attempt, shape, candidate, node, slot, json.dumps(whole), name, e["outcome"], detail, e["source"],
                int(e["confirmed"]),
            )  # fmt: skip
            self._run(f"INSERT OR IGNORE INTO withheld VALUES ({', '.join('?' * 11)}, NULL, NULL)", values)
        gpus = {_identity(e["candidate"]): e["slot"] for e in entries}
        others = "SELECT candidate, node, slot, entry FROM withheld WHERE shape=? AND (node<>? OR slot<>?)"
        for candidate, *there, entry in self._all(others, (shape, node, slot)):
            if candidate not in gpus:
                self._judge(shape, candidate, (there,) if ran else (), "ran")
            elif gpus[candidate] != json.loads(entry)["slot"]:
                self._judge(shape, candidate, (there, [node, slot]), "faulted")

    def _judge(self, shape: int, candidate: str, places: Iterable[Sequence[str]], verdict: str) -> None:
        sql = """UPDATE withheld SET verdict=?, judged_at=?
                 WHERE shape=? AND candidate=? AND node=? AND slot=? AND verdict IS NULL"""
        for place in places:
            self._run(sql, (verdict, time.time(), shape, candidate, *place))

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

    def advance_offset(self, node: str, slot: str, stream: str, by: int) -> None:
        """Move the offset of a stream on: commit it together with what was read."""
        self._run(
            """INSERT INTO offsets (node, slot, stream, offset) VALUES (?, ?, ?, ?)
               ON CONFLICT (node, slot, stream) DO UPDATE SET offset=offset+excluded.offset""",
            (node, slot, stream, by),
        )

    def note_bad(self, node: str, slot: str, stream: str, why: str) -> None:
        """Count a line of a stream that was no record, or an impossible one."""
        self._run(
            """INSERT INTO offsets (node, slot, stream, bad, last_bad) VALUES (?, ?, ?, 1, ?)
               ON CONFLICT (node, slot, stream) DO UPDATE SET bad=bad+1, last_bad=excluded.last_bad""",
            (node, slot, stream, clean.text(why, 300)),
        )


@functools.cache
def _put_rows(n: int) -> str:
    return f"INSERT INTO rows VALUES {', '.join([_ROW] * n)}"


def row_values(
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
) -> tuple[Any, ...]:
    """A measured candidate (worker.protocol.Row), cleaned, for `put_rows`. `device` gives gfx and cu_num."""
    device, get = device or {}, row.get
    us = clean.number(get("us"))
    extra = None if row.keys() <= _KNOWN_ROW else clean.document({k: row[k] for k in row if k not in _KNOWN_ROW})
    return (
        attempt, shape, node, slot, t, int(winner), -1.0 if us is None else us,
        clean.number(get("errRatio")), clean.text(get("status"), 40) or "ok",
        clean.integer(get("kernelId")), clean.integer(get("splitK")),
        clean.text(get("kernelName")), clean.text(get("libtype"), 100),
        clean.number(get("tflops")), clean.number(get("bw")), clean.number(get("spread")),
        clean.integer(get("samples")), clean.text(get("detail")),
        clean.text(device.get("gfx"), 64), clean.integer(device.get("cu_num")),
        json.dumps(extra) if extra else None, note,
    )  # fmt: skip


def _dumps(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(dict(value))


TAKEN_BACK = "taken_back"
"""The outcome of an attempt that was taken out of the inbox before a worker claimed it."""


def _project(conn: sqlite3.Connection, record: ev.Record, t: float) -> bool:
    """Apply one record at time `t`; True where it changed a table (a shape's settlement: where it settled it)."""
    run = conn.execute
    match record:
        case ev.RetryAsked():
            return _retry(conn, record.shapes)
        case ev.Send():
            return _send(conn, record, t)
        case ev.AttemptStarted():
            sql = """UPDATE attempts SET started_at=coalesce(started_at, ?), slot=?, lost_at=NULL
                     WHERE id=? AND ended_at IS NULL"""
            return run(sql, (t, record.slot, record.attempt)).rowcount > 0
        case ev.ShapeStarted():
            sql = "UPDATE attempts SET current=?, lost_at=NULL WHERE id=? AND ended_at IS NULL"
            return run(sql, (record.shape, record.attempt)).rowcount > 0
        case ev.ShapeTuned():
            _landed(conn, record.attempt, record.shape)
            return record.complete and _settle_tuned(conn, record.attempt, record.shape, t)
        case ev.SettleShape():
            return _settle_tuned(conn, record.attempt, record.shape, t, record)
        case ev.ShapeRefused():
            return _landed(conn, record.attempt, record.shape)
        case ev.AttemptEnded():
            sql = """UPDATE attempts SET ended_at=?, outcome=?, in_flight=?, detail=?, seconds=?, current=NULL
                     WHERE id=? AND ended_at IS NULL"""
            values = (
                t,
                record.outcome.value,
                record.in_flight,
                record.detail,
                record.seconds,
                record.attempt,
            )
            return run(sql, values).rowcount > 0
        case ev.AttemptTaken(won=True):
            sql = "UPDATE attempts SET ended_at=?, outcome=?, seconds=0 WHERE id=? AND ended_at IS NULL"
            return run(sql, (t, TAKEN_BACK, record.attempt)).rowcount > 0
        case ev.NodeJoined():
            return run("""UPDATE meta SET value='"running"' WHERE key='state' AND value='"preparing"'""").rowcount > 0
        case ev.LeaseEnded():
            outcome = Reason.NODE_LOST if record.charged else Reason.LEASE_ENDED
            sql = """UPDATE attempts SET ended_at=?, outcome=?, in_flight=current, detail=?, current=NULL
                     WHERE node=? AND ended_at IS NULL"""
            return run(sql, (t, outcome.value, record.detail, record.node)).rowcount > 0
        case ev.NodeLost():
            sql = "UPDATE attempts SET lost_at=? WHERE node=? AND ended_at IS NULL AND lost_at IS NULL"
            return run(sql, (t, record.node)).rowcount > 0
        case ev.SlotLost():
            sql = """UPDATE attempts SET lost_at=?
                     WHERE node=? AND slot=? AND ended_at IS NULL AND lost_at IS NULL"""
            return run(sql, (t, record.node, record.slot)).rowcount > 0
        case ev.FailShape():
            sql = """UPDATE shapes SET state='failed', reason=?, detail=?, attempt=?, confirmed=?,
                     settled_at=? WHERE id=? AND state='pending'"""
            failed = (
                record.reason.value,
                record.detail,
                record.attempt,
                int(record.confirmed),
                t,
                record.shape,
            )
            return run(sql, failed).rowcount > 0
        case ev.AskCanary():
            sql = "INSERT OR IGNORE INTO canaries VALUES (?, ?, ?, ?)"
            return run(sql, (record.attempt, record.node, record.slot, t)).rowcount > 0
    return False


def _send(conn: sqlite3.Connection, r: ev.Send, t: float) -> bool:
    """Put a group and its attempt in."""
    sql = "INSERT OR IGNORE INTO groups (id, cost_s, added_at) VALUES (?, 0, ?)"
    if conn.execute(sql, (r.attempt, t)).rowcount == 0:
        return False
    pairs = [(r.attempt, s) for s in r.shapes]
    conn.executemany("INSERT INTO members VALUES (?, ?)", pairs)
    conn.executemany("UPDATE shapes SET grp=? WHERE id=?", pairs)
    sql = "INSERT INTO attempts (id, grp, number, node, slot, seq, sent_at) VALUES (?, ?, 1, ?, ?, ?, ?)"
    return conn.execute(sql, (r.attempt, r.attempt, r.node, r.slot, r.seq, t)).rowcount > 0


def _retry(conn: sqlite3.Connection, shapes: tuple[int, ...]) -> bool:
    sql = """UPDATE shapes SET state='pending', reason=NULL, detail=NULL, attempt=NULL, confirmed=NULL,
             settled_at=NULL WHERE id=? AND state='failed'"""
    return conn.executemany(sql, [(s,) for s in shapes]).rowcount > 0


def _landed(conn: sqlite3.Connection, attempt: str, shape: int) -> bool:
    sql = "UPDATE attempts SET current=NULL WHERE id=? AND current=?"
    return conn.execute(sql, (attempt, shape)).rowcount > 0


def _settle_tuned(
    conn: sqlite3.Connection, attempt: str, shape: int, t: float, why: ev.SettleShape | None = None
) -> bool:
    """Settle a shape by its first complete attempt, else by the policy's decision; later rows change nothing."""
    sql = "SELECT id FROM rows WHERE attempt=? AND shape=? AND winner=1 ORDER BY id LIMIT 1"
    row = conn.execute(sql, (attempt, shape)).fetchone()
    if row is None:
        raise LedgerError(f"shape {shape} cannot be settled by {attempt}: there is no valid row of it in the ledger")
    sql = """UPDATE shapes SET state='tuned', attempt=?, row=?, settled_at=?, confirmed=?, detail=?
             WHERE id=? AND state='pending'"""
    confirmed, detail = (None, None) if why is None else (int(why.confirmed), why.detail)
    return conn.execute(sql, (attempt, row[0], t, confirmed, detail, shape)).rowcount > 0


def _identity(candidate: Sequence[str]) -> str:
    """A candidate's identity as the tables have it."""
    return json.dumps(list(candidate), separators=(",", ":"))
