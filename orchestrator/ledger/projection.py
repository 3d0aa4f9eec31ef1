"""Projection of journaled records onto the tables, in the record's own transaction, so that both agree."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Sequence

from orchestrator import events as ev
from orchestrator.errors import LedgerError

TAKEN_BACK = "taken_back"
"""The outcome of an attempt that was taken out of the inbox before a worker claimed it."""

_NUMBER = re.compile(r"-([0-9]{1,9})\Z")


def apply(conn: sqlite3.Connection, record: ev.Record, t: float) -> bool:
    """Apply one record at time `t`; True where it changed a table (a shape's settlement: where it settled it)."""
    run = conn.execute
    match record:
        case ev.GroupAdded():
            return add_group(conn, record.group, None, record.shapes, record.cost_s, t)
        case ev.RetryAsked():
            return _retry(conn, record.shapes)
        case ev.Send():
            return _send(conn, record, t)
        case ev.Split():
            return _split(conn, record, t)
        case ev.Requeue():
            return run("UPDATE groups SET why=? WHERE id=?", (record.why, record.group)).rowcount > 0
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
        case ev.Confirm():
            return _confirm(conn, record, t)
        case ev.ChargeSlot():
            judged = (*record.candidates, *record.earlier)
            return _judge(conn, record.shape, [(record.node, record.slot)], judged, "ran", t)
        case ev.ConvictCandidates():
            return _judge(conn, record.shape, record.places, record.candidates, "faulted", t)
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


def add_group(
    conn: sqlite3.Connection,
    group: str,
    parent: str | None,
    shapes: tuple[int, ...],
    cost_s: float,
    t: float | None,
) -> bool:
    """Put a group in, unless it is there already. Its shapes belong to it from now on."""
    sql = "INSERT OR IGNORE INTO groups (id, parent, cost_s, added_at) VALUES (?, ?, ?, ?)"
    if conn.execute(sql, (group, parent, cost_s, t)).rowcount == 0:
        return False
    pairs = [(group, s) for s in shapes]
    conn.executemany("INSERT INTO members VALUES (?, ?)", pairs)
    conn.executemany("UPDATE shapes SET grp=? WHERE id=?", pairs)
    return True


def _send(conn: sqlite3.Connection, r: ev.Send, t: float) -> bool:
    m = _NUMBER.search(r.attempt)
    if m:
        number = int(m[1])
    else:
        number = 1 + conn.execute("SELECT count(*) FROM attempts WHERE grp=?", (r.group,)).fetchone()[0]
    sql = "INSERT INTO attempts (id, grp, number, node, slot, seq, sent_at) VALUES (?, ?, ?, ?, ?, ?, ?)"
    return conn.execute(sql, (r.attempt, r.group, number, r.node, r.slot, r.seq, t)).rowcount > 0


def _split(conn: sqlite3.Connection, r: ev.Split, t: float) -> bool:
    found = conn.execute("SELECT cost_s FROM groups WHERE id=?", (r.group,)).fetchone()
    if found is None:
        raise LedgerError(f"group {r.group} cannot be split: there is no such group")
    of_parent = {s for (s,) in conn.execute("SELECT shape FROM members WHERE grp=?", (r.group,))}
    moved = [s for _, shapes in r.children for s in shapes]
    if len(set(moved)) != len(moved) or not of_parent.issuperset(moved):
        raise LedgerError(f"group {r.group} cannot be split so: a shape would be doubled or is not of the group")
    for child, shapes in r.children:
        add_group(conn, child, r.group, shapes, found[0] * len(shapes) / max(1, len(of_parent)), t)
    return conn.execute("UPDATE groups SET split_at=?, why=? WHERE id=?", (t, r.why, r.group)).rowcount > 0


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
    """Law 3: the first complete attempt settles the shape, without one the policy does; later rows change nothing."""
    sql = "SELECT id FROM rows WHERE attempt=? AND shape=? AND winner=1 ORDER BY id LIMIT 1"
    row = conn.execute(sql, (attempt, shape)).fetchone()
    if row is None:
        raise LedgerError(f"shape {shape} cannot be settled by {attempt}: there is no valid row of it in the ledger")
    sql = """UPDATE shapes SET state='tuned', attempt=?, row=?, settled_at=?, confirmed=?, detail=?
             WHERE id=? AND state='pending'"""
    confirmed, detail = (None, None) if why is None else (int(why.confirmed), why.detail)
    return conn.execute(sql, (attempt, row[0], t, confirmed, detail, shape)).rowcount > 0


def _confirm(conn: sqlite3.Connection, r: ev.Confirm, t: float) -> bool:
    """The shape goes on in a group of its own; one that was settled as unconfirmed is pending again."""
    found = conn.execute(
        "SELECT g.cost_s, (SELECT count(*) FROM members m WHERE m.grp=g.id) FROM groups g WHERE g.id=?", (r.group,)
    ).fetchone()
    if found is None:
        raise LedgerError(f"shape {r.shape} cannot leave group {r.group}: there is no such group")
    sql = """UPDATE shapes SET state='pending', reason=NULL, detail=NULL, attempt=NULL, row=NULL, confirmed=NULL,
             settled_at=NULL WHERE id=? AND state IN ('tuned', 'failed') AND confirmed=0"""
    conn.execute(sql, (r.shape,))
    add_group(conn, r.child, r.group, (r.shape,), found[0] / max(1, found[1]), t)
    return conn.execute("UPDATE groups SET why=? WHERE id=?", (r.why, r.child)).rowcount > 0


def identity(candidate: Sequence[str]) -> str:
    """A candidate's identity as the tables have it."""
    return json.dumps(list(candidate), separators=(",", ":"))


def _judge(
    conn: sqlite3.Connection,
    shape: int,
    places: Iterable[tuple[str, str]],
    candidates: Iterable[Sequence[str]],
    verdict: str,
    t: float,
) -> bool:
    sql = "UPDATE withheld SET verdict=?, judged_at=? WHERE shape=? AND node=? AND slot=? AND candidate=?"
    names = [identity(c) for c in candidates]
    rows = [(verdict, t, shape, node, slot, c) for node, slot in places for c in names]
    return conn.executemany(sql, rows).rowcount > 0
