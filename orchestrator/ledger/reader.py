"""Reads of a ledger: the run's values, journal, counts, states, attempts, rows; and whether it adds up.

Safe while a controller writes.
"""

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
from orchestrator.ledger import database
from orchestrator.ledger.model import (
    Attempt,
    Counts,
    FailedShape,
    GroupState,
    LeftOut,
    Offset,
    ProfileRow,
    ShapeState,
    SlotInfo,
    Unconfirmed,
)
from worker.families import Family

_CHUNK = 1000


class LedgerFile:
    """An open ledger: queries, the run's own values, its journal. A context manager, for one thread."""

    def __init__(self, conn: sqlite3.Connection, path: Path) -> None:
        self._conn, self.path = conn, path

    def close(self) -> None:
        self._conn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _all(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with database.readable(self.path):
            return self._conn.execute(sql, values).fetchall()

    def query(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Rows of any other query (tables: orchestrator/ledger/database.py)."""
        return self._all(sql, values)

    def _each(self, sql: str, values: tuple[Any, ...] = ()) -> Iterator[Any]:
        with database.readable(self.path):
            cursor = self._conn.execute(sql, values)
        while True:
            with database.readable(self.path):
                chunk = cursor.fetchmany(_CHUNK)
            if not chunk:
                return
            yield from chunk

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read everything inside as of one moment, whatever a controller writes meanwhile."""
        if self._conn.in_transaction:
            yield
            return
        with database.readable(self.path):
            self._conn.execute("BEGIN")
        try:
            yield
        finally:
            self._conn.execute("COMMIT")

    # --- the run --------------------------------------------------------------------------------------------

    def meta(self, key: str, default: Any = None) -> Any:
        """Value of the run (state, epoch, family, tuner, controller, ...), or `default`."""
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

    def journal_records(self, after: int = 0, only: type[ev.Record] | None = None) -> Iterator[tuple[float, ev.Record]]:
        """(time, record) in order, of `only` one type: what resume replays."""
        sql = "SELECT t, type, data FROM journal WHERE id>? AND type=coalesce(?, type) ORDER BY id"
        for t, kind, data in self._each(sql, (after, only.__name__ if only else None)):
            yield t, ev.from_json(kind, data)


_ATTEMPT = """SELECT id, grp, number, node, slot, seq, sent_at, started_at, lost_at, ended_at, outcome, in_flight,
    exit, detail, seconds, spent, device, current, conditions FROM attempts"""
_ROW = """SELECT r.id, r.attempt, r.shape, s.key, r.node, r.slot, r.t, r.winner, r.us, r.err_ratio, r.status,
    r.kernel_id, r.split_k, r.kernel_name, r.libtype, r.tflops, r.bw, r.spread, r.samples, r.detail, r.gfx, r.cu_num,
    r.extra, r.note"""
_LEFT_OUT = """SELECT w.attempt, w.shape, w.candidate, w.node, w.slot, w.name, w.outcome, w.detail, w.source,
    w.confirmed, w.verdict, w.entry FROM withheld w"""
_OPEN = "a.ended_at IS NULL AND a.lost_at IS NULL"


class LedgerReader(LedgerFile):
    """Queries of a ledger. Use as a context manager, in the thread that opened it."""

    @classmethod
    def open_readonly(cls, path: Path, *, at_rest: bool = False) -> LedgerReader:
        """Raises LedgerError where it cannot be read. `at_rest`: see `open_reader` in database.py."""
        return LedgerReader(database.open_reader(path, at_rest=at_rest), path)

    # --- shapes and groups ----------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Shapes by state; total = tuned + skipped + failed + running + pending."""
        with self.snapshot():
            by = dict(self._all("SELECT state, count(*) FROM shapes GROUP BY state"))
            running = self._all(
                f"""SELECT count(DISTINCT a.current) FROM attempts a JOIN shapes s ON s.id = a.current
                    WHERE {_OPEN} AND a.started_at IS NOT NULL AND s.state='pending'"""
            )[0][0]
        pending = by.get("pending", 0) - running
        tuned, skipped, failed = (by.get(s, 0) for s in ("tuned", "skipped", "failed"))
        return Counts(sum(by.values()), tuned, skipped, failed, running, pending)

    def shapes(self, state: str | None = None) -> Iterator[ShapeState]:
        """Requested shapes, in the order of the file."""
        sql = "SELECT id, key, state, grp, reason, detail, confirmed, attempt, settled_at FROM shapes"
        where, values = (" WHERE state=?", (state,)) if state else ("", ())
        for id_, key, st, grp, reason, detail, sure, attempt, at in self._each(f"{sql}{where} ORDER BY id", values):
            confirmed = None if sure is None else bool(sure)
            yield ShapeState(id_, tuple(json.loads(key)), st, grp, reason, detail, confirmed, attempt, at)

    def key(self, shape: int) -> tuple[int | str, ...]:
        """The key columns of a shape; KeyError where there is none of that number."""
        found = self._all("SELECT key FROM shapes WHERE id=?", (shape,))
        if not found:
            raise KeyError(shape)
        return tuple(json.loads(found[0][0]))

    def group_shapes(self, group: str) -> tuple[int, ...]:
        """The shapes that the group was made of, settled or not; () where there is no such group."""
        return tuple(s for (s,) in self._all("SELECT shape FROM members WHERE grp=? ORDER BY shape", (group,)))

    def groups(self) -> list[GroupState]:
        """Every group, split ones too, in the order of their names."""
        rows = self._all(
            f"""SELECT g.id, g.parent, g.cost_s, g.split_at, g.why,
                (SELECT count(*) FROM members m WHERE m.grp=g.id),
                (SELECT count(*) FROM members m JOIN shapes s ON s.id=m.shape
                    WHERE m.grp=g.id AND s.state='pending' AND (s.grp=g.id OR g.split_at IS NOT NULL)),
                (SELECT count(*) FROM attempts a WHERE a.grp=g.id),
                (SELECT max(CASE WHEN a.started_at IS NULL THEN 1 ELSE 2 END) FROM attempts a
                    WHERE a.grp=g.id AND {_OPEN})
                FROM groups g ORDER BY length(g.id), g.id"""
        )
        out = []
        for id_, parent, cost, split_at, why, n, pending, tries, live in rows:
            if split_at is not None:
                state = "split"
            elif live:
                state = "running" if live == 2 else "sent"
            else:
                state = "waiting" if pending else "done"
            out.append(GroupState(id_, parent, cost, state, n, pending, tries, why))
        return out

    def failures(self) -> dict[str, int]:
        """Failed shapes by reason, the most frequent first."""
        sql = "SELECT reason, count(*) FROM shapes WHERE state='failed' GROUP BY reason ORDER BY 2 DESC, 1"
        return dict(self._all(sql))

    def failed(self, reason: str | None = None) -> list[FailedShape]:
        """Failed shapes with where they were seen last: the attempt blamed, else the last that a worker began."""
        rows = self._all(
            """SELECT s.id, s.key, s.reason, s.detail, s.confirmed,
                coalesce(s.attempt, (SELECT a.id FROM attempts a JOIN members m ON m.grp=a.grp
                    WHERE m.shape=s.id AND a.started_at IS NOT NULL
                    ORDER BY a.sent_at DESC, a.seq DESC LIMIT 1)),
                (SELECT count(*) FROM attempts a JOIN members m ON m.grp=a.grp
                    WHERE m.shape=s.id AND a.started_at IS NOT NULL)
               FROM shapes s WHERE s.state='failed' AND s.reason=coalesce(?, s.reason) ORDER BY s.id""",
            (reason,),
        )
        where = (
            {a: (node, slot or "") for a, node, slot in self._all("SELECT id, node, slot FROM attempts")}
            if rows
            else {}
        )
        return [
            FailedShape(id_, tuple(json.loads(key)), why, detail or "", bool(sure), a, *where.get(a, ("", "")), tries)
            for id_, key, why, detail, sure, a, tries in rows
        ]

    # --- attempts and nodes ---------------------------------------------------------------------------------

    def attempt(self, id_: str) -> Attempt | None:
        """The attempt of that id, if there is one."""
        found = self._all(f"{_ATTEMPT} WHERE id=?", (id_,))
        return _attempt(found[0]) if found else None

    def attempts(self, *, group: str | None = None, node: str | None = None, open_only: bool = False) -> list[Attempt]:
        """Attempts in the order they were sent. `open_only`: those that, as far as is known, are not over."""
        sql = f"{_ATTEMPT} AS a WHERE grp=coalesce(?, grp) AND node=coalesce(?, node)"
        sql += f" AND {_OPEN}" if open_only else ""
        return [_attempt(r) for r in self._all(f"{sql} ORDER BY sent_at, seq", (group, node))]

    def running_on(self, node: str, slot: str) -> list[str]:
        """Ids of the attempts that a worker of the slot began and that, as far as is known, are not over."""
        sql = f"SELECT a.id FROM attempts a WHERE node=? AND slot=? AND started_at IS NOT NULL AND {_OPEN} ORDER BY seq"
        return [a for (a,) in self._all(sql, (node, slot))]

    def is_canary(self, attempt: str) -> bool:
        """Return whether a canary of that id was requested; its result is in the journal."""
        return bool(self._all("SELECT 1 FROM canaries WHERE attempt=?", (attempt,)))

    def slots(self) -> list[SlotInfo]:
        """Latest information of the workers, by slot."""
        rows = self._all("SELECT node, slot, info, device FROM slots ORDER BY node, length(slot), slot")
        return [SlotInfo(n, s, json.loads(i or "{}"), json.loads(d or "{}")) for n, s, i, d in rows]

    def slot(self, node: str, slot: str) -> SlotInfo:
        """Latest information of one slot's workers; empty where nothing is known."""
        rows = self._all("SELECT info, device FROM slots WHERE node=? AND slot=?", (node, slot))
        return SlotInfo(node, slot, *(json.loads(v or "{}") for v in (rows[0] if rows else ("", ""))))

    def offsets(self, node: str) -> dict[tuple[str, str], int]:
        """Next byte to read of each (stream, slot) of a node; what is not there begins at 0."""
        return {(k, s): at for k, s, at in self._all("SELECT stream, slot, offset FROM offsets WHERE node=?", (node,))}

    def streams(self) -> list[Offset]:
        """Offsets of every stream, with the lines that were no records."""
        sql = """SELECT node, slot, stream, offset, bad, last_bad FROM offsets
                 ORDER BY node, length(slot), slot, stream"""
        return [Offset(*r) for r in self._all(sql)]

    # --- measurements ---------------------------------------------------------------------------------------

    def winners(self) -> Iterator[ProfileRow]:
        """One row per tuned shape: the row that settled it, in the order of the shapes."""
        sql = f"{_ROW} FROM shapes s JOIN rows r ON r.id=s.row WHERE s.state='tuned' ORDER BY s.id"
        return map(_row, self._each(sql))

    def profile_rows(self, shape: int | None = None) -> Iterator[ProfileRow]:
        """Every measured candidate (of one shape), in the order of arrival."""
        sql = f"{_ROW} FROM rows r JOIN shapes s ON s.id=r.shape"
        if shape is None:
            return map(_row, self._each(f"{sql} ORDER BY r.id"))
        tried = "SELECT a.id FROM members m JOIN attempts a ON a.grp=m.grp WHERE m.shape=?"
        return map(_row, self._each(f"{sql} WHERE r.attempt IN ({tried}) AND r.shape=? ORDER BY r.id", (shape, shape)))

    def trials(self, attempt: str, shape: int) -> int:
        """Candidates of the shape that came to an end in the attempt, right or wrong."""
        sql = "SELECT count(*) FROM rows WHERE attempt=? AND shape=? AND us>0 AND winner=0 AND note IS NULL"
        return int(self._all(sql, (attempt, shape))[0][0])

    def left_out(self, shape: int | None = None) -> list[LeftOut]:
        """Candidates that attempts (on one shape) left out because they faulted, in the order of the attempts."""
        sql = f"""{_LEFT_OUT} JOIN attempts a ON a.id=w.attempt WHERE w.shape=coalesce(?, w.shape)
                 ORDER BY w.shape, a.sent_at, a.seq, w.candidate"""
        return [_left_out(r) for r in self._all(sql, (shape,))]

    def unconfirmed(self) -> list[Unconfirmed]:
        """Tuned shapes for which candidates were left out on the evidence of one slot alone."""
        out = []
        shapes = [s for s in self.shapes("tuned") if s.confirmed is False]
        where = {a.id: a for a in self.attempts()} if shapes else {}
        for s in shapes:
            a = where[s.attempt or ""]
            # it ran elsewhere, but was not compared with the winner: as open as a candidate without a second try
            open_ = tuple(w for w in self.left_out(s.id) if not w.confirmed and w.verdict != "faulted")
            out.append(Unconfirmed(s.id, s.key, a.id, a.node, a.slot or "", s.detail or "", open_))
        return out

    def blocklist_verdicts(self, node: str) -> tuple[list[LeftOut], list[LeftOut]]:
        """Verdicts for the node's blocklist: entries whose candidates ran elsewhere, and those that faulted there too.
        Only those decided since the last attempt was sent that a worker of the node began.
        """
        sql = f"""{_LEFT_OUT} WHERE w.node=? AND w.judged_at IS NOT NULL AND w.judged_at >=
                 coalesce((SELECT max(sent_at) FROM attempts WHERE node=? AND started_at IS NOT NULL), 0)
                 ORDER BY w.judged_at DESC LIMIT 256"""
        found = [_left_out(r) for r in self._all(sql, (node, node))]
        return [w for w in found if w.verdict == "ran"], [w for w in found if w.verdict == "faulted"]

    def spent(self) -> dict[str, float]:
        """Seconds spent by kind, over all attempts that reported them (worker clock)."""
        out: dict[str, float] = {}
        for (raw,) in self._each("SELECT spent FROM attempts WHERE spent IS NOT NULL"):
            for kind, seconds in json.loads(raw).items():
                out[kind] = out.get(kind, 0.0) + seconds
        return out


def _attempt(r: Any) -> Attempt:
    args: list[Any] = [*r[:15], json.loads(r[15] or "{}"), json.loads(r[16] or "{}"), r[17], json.loads(r[18] or "{}")]
    return Attempt(*args)


def _left_out(r: Any) -> LeftOut:
    entry = json.loads(r[11])
    args: list[Any] = [*r[:11], tuple(entry["key"]), *(entry[k] for k in ("slot", "image", "driver", "t"))]
    args[2], args[9] = tuple(json.loads(r[2])), bool(r[9])
    return LeftOut(*args)


def _row(r: Any) -> ProfileRow:
    args: list[Any] = [*r]
    args[3], args[7], args[22] = tuple(json.loads(r[3])), bool(r[7]), json.loads(r[22] or "{}")
    return ProfileRow(*args)


UNFINISHED = ("planned", "preparing", "running", "interrupted", "cancelled")

_CHECKS = (
    (
        "shape {0} is tuned by {1} without a valid row of that attempt",
        """SELECT s.id, s.attempt FROM shapes s LEFT JOIN rows r ON r.id=s.row WHERE s.state='tuned'
           AND (r.id IS NULL OR r.shape<>s.id OR r.attempt<>s.attempt OR r.winner<>1)""",
    ),
    (
        "shape {0} is failed without a reason",
        "SELECT id FROM shapes WHERE state='failed' AND coalesce(reason, '')=''",
    ),
    (
        "row {0} is of shape {1}, which is not in the group of its attempt {2}",
        """SELECT r.id, r.shape, r.attempt FROM rows r LEFT JOIN attempts a ON a.id=r.attempt
           LEFT JOIN members m ON m.grp=a.grp AND m.shape=r.shape WHERE m.shape IS NULL""",
    ),
)


def reconcile(ledger: LedgerReader) -> list[str]:
    """Sentences on what does not add up; [] where total = tuned + skipped + failed (+ pending while not
    finished)."""
    faults = [words.format(*found) for words, sql in _CHECKS for found in ledger.query(sql)]
    counts = ledger.counts()
    if counts.total != counts.settled + counts.running + counts.pending:
        faults.append(f"{counts.total} shapes requested, but {counts}")
    if ledger.state not in UNFINISHED and counts.settled != counts.total:
        faults.append(f"the run is {ledger.state}, but {counts.total - counts.settled} shapes are not settled")
    return faults
