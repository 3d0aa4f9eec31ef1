"""Writes to a ledger (`database.py` has its tables). Only one process does it, the controller, and always inside
`with ledger.transaction():`.

A run's controller calls `drive` once with the state of its policy; from then on it applies each record to the state and
journals it. ingest.py keeps what workers report: rows, blocked candidates, measured M, and how far a stream was read. A
commit takes a wait for the disk, so all of a turn is one transaction (controller/loop.py).
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import clean
from orchestrator import events as ev
from orchestrator.errors import LedgerError
from orchestrator.ledger import database
from orchestrator.ledger.reader import NOT_WORTH_IT, LedgerReader, Replay
from orchestrator.policy.model import State
from worker.families import Family
from worker.triton_configs.point_record import PointRecord

if TYPE_CHECKING:
    from orchestrator.shapes.model import Shape


_FIELDS_WITH_COLUMN = frozenset(f.name for f in database.COLUMNS)
"""Names of the fields of a row that have a column; the others go into `extra`."""
_ENTRY = ("key", "slot", "image", "driver", "t")
"""Fields of a blocked candidate that make up the column `entry`."""
_ROW = f"(NULL, {', '.join('?' * (len(database.COLUMNS) + 10))})"
"""The values of one row: its id, which SQLite gives, and what `row_values` returns."""
_ROWS_AT_ONCE = 64
"""Rows that one statement inserts."""


class Ledger(LedgerReader):
    """The ledger as the controller uses it. Every commit is on disk when `transaction` ends (synchronous=FULL)."""

    _is_driven = False
    """`drive` was called: whoever journals also applies each record to the state."""

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
        """Commit everything inside, or nothing. Cannot be nested. Raise LedgerError, RunBusyError."""
        if self._writing():
            raise LedgerError("a transaction is open already")
        with database.plain_errors(self.path):
            self._conn.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._conn.execute("COMMIT")
            except BaseException:
                if self._writing():  # some errors of SQLite have rolled back by themselves
                    self._conn.execute("ROLLBACK")
                raise

    def _run(self, sql: str, values: Sequence[Any]) -> None:
        self._must_be_open()
        self._conn.execute(sql, values)

    def _writing(self) -> bool:
        return self._conn.in_transaction

    def _must_be_open(self) -> None:
        if not self._writing():
            raise LedgerError("the ledger is only written inside `with ledger.transaction():`")

    def set_meta(self, key: str, value: Any) -> None:
        """Keep a JSON value of the run."""
        self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def add_shapes(self, shapes: Sequence[Shape], family: Family) -> None:
        """Add the requested shapes. Raise LedgerError if a key comes twice."""
        self._must_be_open()
        self.set_meta("family", family.name)
        rows = ((s.id, json.dumps(s.key, separators=(",", ":"))) for s in shapes)
        self._conn.executemany("INSERT INTO shapes (id, key) VALUES (?, ?)", rows)

    def skip_shapes(self, ids: Sequence[int], detail: str, t: float | None = None, *, reason: str = "") -> None:
        """Leave shapes out of the run. `reason`: NOT_WORTH_IT, or ""."""
        self._must_be_open()
        sql = "UPDATE shapes SET skipped=?, detail=?, skipped_at=? WHERE id=? AND skipped IS NULL"
        self._conn.executemany(sql, [(reason, detail, t, i) for i in ids])

    def reopen_skipped(self) -> None:
        """Take the shapes that a limit left out into the run again."""
        self._run("UPDATE shapes SET skipped=NULL, detail=NULL, skipped_at=NULL WHERE skipped=?", (NOT_WORTH_IT,))

    def drive(self, state: State) -> None:
        """Replay the journal into a fresh state. The caller then applies each record that it journals to this state."""
        self._replay = Replay(state, keys=self._replay.keys)
        self._is_driven = True
        self._catch_up()

    def journal(self, record: ev.Record, t: float) -> None:
        """Keep a record. `Tick` is not kept."""
        self._must_be_open()
        if not isinstance(record, ev.Tick):
            sql = "INSERT INTO journal (t, type, data) VALUES (?, ?, ?)"
            cursor = self._conn.execute(sql, (t, type(record).__name__, ev.to_json(record)))
            if self._is_driven:
                self._replay.read = cursor.lastrowid or 0

    def keep_report(
        self,
        attempt: str,
        *,
        device: Mapping[str, Any] | None = None,
        exit: int | None = None,
        spent: Mapping[str, float] | None = None,
        conditions: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Keep a worker's report on its attempt beside the events; existing values stay.

        `conditions`: readings of worker/conditions.py as `before` or `after`.
        """
        if conditions:
            conditions = {**conditions, **self.report(attempt).conditions}
        self._run(
            """INSERT INTO reports (attempt, device, exit, spent, conditions) VALUES (?, ?, ?, ?, ?)
               ON CONFLICT (attempt) DO UPDATE SET device=coalesce(device, excluded.device),
               exit=coalesce(exit, excluded.exit), spent=coalesce(spent, excluded.spent),
               conditions=coalesce(excluded.conditions, conditions)""",
            (attempt, _dumps(device), exit, _dumps(spent), _dumps(conditions)),
        )

    def put_rows(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Keep measured candidates, each as `row_values` makes it."""
        self._must_be_open()
        # one statement for many rows: after each statement we have to wait for the interpreter's lock again
        for i in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[i : i + _ROWS_AT_ONCE]
            self._conn.execute(_insert_statement(len(part)), [*itertools.chain.from_iterable(part)])

    def keep_blocked(
        self, *, attempt: str, shape: int, node: str, slot: str, entries: Iterable[Mapping[str, Any]]
    ) -> None:
        """Store the blocked candidates of an attempt (worker.protocol.blocked_records), once each."""
        for entry in entries:
            values = (
                attempt,
                shape,
                json.dumps(list(entry["candidate"]), separators=(",", ":")),
                node,
                slot,
                json.dumps({field: entry[field] for field in _ENTRY}),
                clean.text(entry["name"], 200),
                entry["outcome"],
                clean.text(entry["detail"], 300),
                entry["source"],
                int(entry["confirmed"]),
            )
            self._run(f"INSERT OR IGNORE INTO withheld VALUES ({', '.join('?' * 11)})", values)

    def keep_point(self, attempt: str, record: PointRecord) -> None:
        """Keep a measured M of a config file."""
        document = json.dumps(record.to_document(), separators=(",", ":"))
        self._run("INSERT INTO points (attempt, point) VALUES (?, ?)", (attempt, document))

    def keep_slot_info(
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
        """Count a line of a stream that is not a record, or an impossible one."""
        self._run(
            """INSERT INTO offsets (node, slot, stream, bad, last_bad) VALUES (?, ?, ?, 1, ?)
               ON CONFLICT (node, slot, stream) DO UPDATE SET bad=bad+1, last_bad=excluded.last_bad""",
            (node, slot, stream, clean.text(why, 300)),
        )


@functools.cache
def _insert_statement(n: int) -> str:
    """The SQL that inserts n rows."""
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
    """A measured candidate (worker.protocol.Row), cleaned, for `put_rows`: the columns of the table `rows` but its id.
    `device` gives gfx and cu_num; `note`: why a winner was not accepted."""
    cells = {field.name: _clean_cell(row.get(field.name), field.kind, field.limit) for field in database.COLUMNS}
    if cells["us"] is None:
        cells["us"] = -1.0
    cells["status"] = cells["status"] or "ok"
    extra = {}
    if not row.keys() <= _FIELDS_WITH_COLUMN:
        extra = clean.document({name: value for name, value in row.items() if name not in _FIELDS_WITH_COLUMN})
    device = device or {}
    return (
        attempt,
        shape,
        node,
        slot,
        t,
        int(winner),
        *cells.values(),
        clean.text(device.get("gfx"), 64),
        clean.integer(device.get("cu_num")),
        json.dumps(extra) if extra else None,
        note,
    )


def _clean_cell(value: object, kind: type, limit: int) -> float | int | str | None:
    if kind is float:
        return clean.number(value)
    if kind is int:
        return clean.integer(value)
    return clean.text(value, limit)


def _dumps(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(dict(value))
