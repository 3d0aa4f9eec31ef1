"""Reads a ledger: the run's values, its journal and the state that follows from it, its rows, and whether they add up.

It is safe while a controller writes. Open it with `LedgerReader.open_readonly` as a context manager; reads that must
fit together go inside `with ledger.snapshot():`. The tables are in database.py, the writer in writer.py. A damaged
value is looked for only after something broke on it (damage.py).
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orchestrator import events as ev
from orchestrator.errors import LedgerError
from orchestrator.families import get_family
from orchestrator.ledger import database
from orchestrator.ledger.blocked import BLOCKED, BlockedCandidate, judge_blocked
from orchestrator.ledger.damage import BROKEN_BY_VALUES, find_damage, is_key, is_value
from orchestrator.policy.apply import apply
from orchestrator.policy.model import Attempt, State
from orchestrator.policy.settings import PolicySettings
from orchestrator.tables.decision import Time, is_noisy, spread_of_noisy
from worker.families import Family
from worker.protocol import MAX_VERDICTS, Row
from worker.triton_configs.point_record import PointRecord


@dataclass(frozen=True, slots=True)
class Counts:
    """Shapes by state. `running` are unsettled shapes in flight, `pending` the other unsettled ones."""

    total: int = 0
    tuned: int = 0
    skipped: int = 0
    failed: int = 0
    running: int = 0
    pending: int = 0

    @classmethod
    def of(cls, state: State, total: int, skipped: int) -> Counts:
        """The counts of a run; total = tuned + skipped + failed + running + pending."""
        running = sum(1 for shape in state.shapes_in_flight if state.shapes[shape].state == "pending")
        pending = total - skipped - state.tuned - state.failed - running
        return cls(total, state.tuned, skipped, state.failed, running, pending)

    @property
    def settled(self) -> int:
        return self.tuned + self.skipped + self.failed

    def to_json(self) -> dict[str, int]:
        return asdict(self)


NOT_WORTH_IT = "not_worth_it"
"""Reason of shapes that were skipped because a limit of the run was reached."""


@dataclass(frozen=True, slots=True)
class ShapeState:
    """A requested shape with its key. state: pending, tuned, skipped or failed.

    `attempt`: the attempt that settled it; for a failed shape without one, the last that a worker began. `node`,
    `slot`: where that ran. `confirmed` of a tuned shape: None if no candidates were left out, False if some were left
    out on the evidence of one slot. `attempts` of a failed shape: how many a worker began.
    """

    id: int
    key: tuple[int | str, ...]
    state: str
    reason: str | None = None
    detail: str = ""
    confirmed: bool | None = None
    attempt: str = ""
    settled_at: float | None = None
    node: str = ""
    slot: str = ""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's report on an attempt, beside its records; {} and None if it sent no report.

    `conditions`: readings of worker/conditions.py, `before` and `after`.
    """

    device: dict[str, Any]
    exit: int | None
    spent: dict[str, float]
    conditions: dict[str, dict[str, Any]]


NO_REPORT = Report({}, None, {}, {})


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """A measured candidate (worker/protocol/records.py) and its shape's key. `note`: why a winner was not accepted."""

    id: int
    attempt: str
    shape: int
    key: tuple[int | str, ...]
    node: str
    slot: str
    t: float
    winner: bool
    gfx: str
    cu_num: int | None
    note: str | None
    row: Row

    @property
    def us(self) -> float:
        """Device time in microseconds, -1 if it was not measured."""
        return float(self.row["us"])

    @property
    def status(self) -> str:
        """`ok`, or why the candidate cannot win."""
        return str(self.row["status"])

    @property
    def kernel_name(self) -> str:
        """The kernel."""
        return str(self.row["kernelName"])


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """The latest that a slot's workers reported: `info` of worker_started, `device` of tuner_ready."""

    node: str
    slot: str
    info: dict[str, Any]
    device: dict[str, Any]


_CHUNK = 1000
"""Rows that are fetched at once."""
_JOURNAL = "SELECT id, t, type, data FROM journal WHERE id>? ORDER BY id"


_ROW = f"""SELECT r.id, r.attempt, r.shape, s.key, r.node, r.slot, r.t, r.winner, r.gfx, r.cu_num, r.note, r.extra,
    {", ".join(f"r.{f.column}" for f in database.COLUMNS)} FROM rows r JOIN shapes s ON s.id=r.shape"""
_FIRST_AND_LAST = """SELECT last.extra, first.us, coalesce(first.spread, 0), last.us, coalesce(last.spread, 0)
    FROM rows last JOIN rows first ON first.attempt=last.attempt AND first.shape=last.shape
    AND first.kernel_name=last.kernel_name AND first.libtype=last.libtype AND first.split_k IS last.split_k
    AND first.winner=0 AND first.status='ok' AND first.us>0
    WHERE last.winner=1 AND last.attempt=? AND last.shape=? ORDER BY last.id, first.id LIMIT 1"""
Skipped = tuple[str, str, float | None]
"""(reason, detail, time) of a shape that was left out; the reason is "" or NOT_WORTH_IT."""


@dataclass(slots=True)
class Replay:
    """A journal that is replayed up to record `read`. The next reader of the same ledger can go on from there."""

    state: State = field(default_factory=lambda: State(PolicySettings()))
    read: int = 0
    keys: dict[int, tuple[int | str, ...]] = field(default_factory=dict)


class LedgerReader:
    """An open ledger to read. Use as a context manager, in the thread that opened it."""

    def __init__(self, conn: sqlite3.Connection, path: Path, replay: Replay | None = None) -> None:
        self._conn = conn
        self.path = path
        self._replay = replay or Replay()

    @classmethod
    def open_readonly(cls, path: Path, *, at_rest: bool = False, replay: Replay | None = None) -> LedgerReader:
        """Raises LedgerError if it cannot be read. `at_rest`: see `open_reader` in database.py. `replay`: what an
        earlier reader of the same ledger replayed; this one goes on from there."""
        return LedgerReader(database.open_reader(path, at_rest=at_rest), path, replay)

    def close(self) -> None:
        self._conn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        """Close the ledger. If the block broke on a damaged value in it, raise LedgerError that names the value."""
        try:
            if isinstance(e, BROKEN_BY_VALUES) and (damage := find_damage(self)):
                raise LedgerError(
                    f"{self.path}: is damaged: {damage}; restore the file from a copy, or tune again. The run's CSV"
                    f" files are still read by name, such as {self.path.parent / 'profile.csv'}"
                ) from e
        finally:
            self.close()

    def query(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """Rows of a query (tables: orchestrator/ledger/database.py)."""
        with database.plain_errors(self.path):
            return self._conn.execute(sql, values).fetchall()

    def _each(self, sql: str, values: tuple[Any, ...] = ()) -> Iterator[Any]:
        with database.plain_errors(self.path):
            cursor = self._conn.execute(sql, values)
        while True:
            with database.plain_errors(self.path):
                chunk = cursor.fetchmany(_CHUNK)
            if not chunk:
                return
            yield from chunk

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads inside see the ledger as of one moment, even if a controller writes meanwhile."""
        if self._conn.in_transaction:
            yield
            return
        with database.plain_errors(self.path):
            self._conn.execute("BEGIN")
        try:
            yield
        finally:
            with database.plain_errors(self.path):
                self._conn.execute("COMMIT")

    def meta(self, key: str, default: Any = None) -> Any:
        """Value of the run (state, epoch, family, tuner, controller, ...), or `default`."""
        rows = self.query("SELECT value FROM meta WHERE key=?", (key,))
        if not rows:
            return default
        value = json.loads(rows[0][0])
        if not is_value(key, value):
            raise TypeError(f"value `{key}` of the run is not of its type")  # `__exit__` tells the user
        return value

    @property
    def state(self) -> str:
        """planned, preparing, running, finished, interrupted or cancelled."""
        return str(self.meta("state", "planned"))

    @property
    def family(self) -> Family:
        """The family whose key columns `ShapeState.key` follows."""
        return get_family(str(self.meta("family", "")))

    @property
    def replayed(self) -> State:
        """The state of the run: its journal, replayed up to now."""
        self._catch_up()
        return self._replay.state

    def _catch_up(self) -> None:
        replay = self._replay
        for number, t, kind, data in self._each(_JOURNAL, (replay.read,)):
            apply(replay.state, ev.from_json(kind, data), t)
            replay.read = number

    @property
    def keys(self) -> dict[int, tuple[int | str, ...]]:
        """Key columns of each requested shape, in the order of the file."""
        if not self._replay.keys:
            rows = self._each("SELECT id, key FROM shapes ORDER BY id")
            keys = {id_: json.loads(key) for id_, key in rows}
            family = self.family
            if not all(is_key(family, key) for key in keys.values()):
                raise ValueError("a key of another family")  # `__exit__` names it
            self._replay.keys = {id_: tuple(key) for id_, key in keys.items()}
        return self._replay.keys

    def skipped(self) -> dict[int, Skipped]:
        """(reason, detail, when) of the shapes that were left out."""
        sql = "SELECT id, skipped, detail, skipped_at FROM shapes WHERE skipped IS NOT NULL ORDER BY id"
        return {i: (why, detail or "", t) for i, why, detail, t in self.query(sql)}

    def counts(self) -> Counts:
        """Shapes by state."""
        with self.snapshot():
            return Counts.of(self.replayed, len(self.keys), len(self.skipped()))

    def shapes(self, only: str | None = None) -> Iterator[ShapeState]:
        """Requested shapes (of one state), in the order of the file."""
        with self.snapshot():
            state = self.replayed
            skipped = self.skipped()
            keys = self.keys
        for id_, key in keys.items():
            if id_ in skipped:
                why, detail, t = skipped[id_]
                shape = ShapeState(id_, key, "skipped", why or None, detail, settled_at=t)
            elif id_ in state.shapes:
                if only not in (None, state.shapes[id_].state):
                    continue
                shape = _shape_state(state, id_, key)
            else:
                shape = ShapeState(id_, key, "pending")
            if only in (None, shape.state):
                yield shape

    def failed(self, reason: str | None = None) -> list[ShapeState]:
        """Failed shapes (for one reason)."""
        return [shape for shape in self.shapes("failed") if reason in (None, shape.reason)]

    def failures(self) -> dict[str, int]:
        """Failed shapes by reason, the most frequent first."""
        shapes = self.replayed.shapes.values()
        reasons = Counter(shape.reason.value for shape in shapes if shape.state == "failed" and shape.reason)
        return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))

    def unconfirmed(self) -> list[tuple[ShapeState, list[BlockedCandidate]]]:
        """Tuned shapes for which candidates were left out on the evidence of one slot, with those candidates."""
        shapes = [shape for shape in self.shapes("tuned") if shape.confirmed is False]
        return [(shape, self._open_candidates(shape.id)) for shape in shapes]

    def _open_candidates(self, shape: int) -> list[BlockedCandidate]:
        """The blocked candidates of a shape that may still be good. One that ran elsewhere was not compared with the
        winner: it is as open as one without a second try."""
        blocked = self.blocked_candidates(shape)
        return [candidate for candidate in blocked if not candidate.confirmed and candidate.verdict != "faulted"]

    def reports(self) -> dict[str, Report]:
        """Reports of workers by attempt."""
        sql = "SELECT attempt, device, exit, spent, conditions FROM reports"
        return {a: _report(*values) for a, *values in self._each(sql)}

    def report(self, attempt: str) -> Report:
        """The worker's report on one attempt."""
        rows = self.query("SELECT device, exit, spent, conditions FROM reports WHERE attempt=?", (attempt,))
        return _report(*rows[0]) if rows else NO_REPORT

    def spent(self) -> dict[str, float]:
        """Seconds spent by kind, over all attempts that reported them (worker clock)."""
        total: Counter[str] = Counter()
        for (text,) in self._each("SELECT spent FROM reports WHERE spent IS NOT NULL"):
            for kind, seconds in json.loads(text).items():
                total[kind] += seconds
        return dict(total)

    def slots(self) -> list[SlotInfo]:
        """The latest that the workers reported, by slot."""
        rows = self.query("SELECT node, slot, info, device FROM slots ORDER BY node, length(slot), slot")
        return [SlotInfo(n, s, _object_in(i), _object_in(d)) for n, s, i, d in rows]

    def slot(self, node: str, slot: str) -> SlotInfo:
        """The latest that one slot's workers reported; empty if they reported nothing."""
        rows = self.query("SELECT info, device FROM slots WHERE node=? AND slot=?", (node, slot))
        info, device = rows[0] if rows else ("", "")
        return SlotInfo(node, slot, _object_in(info), _object_in(device))

    def offsets(self, node: str) -> dict[tuple[str, str], int]:
        """Next byte to read of each (stream, slot) of a node; streams that are not listed begin at 0."""
        rows = self.query("SELECT stream, slot, offset FROM offsets WHERE node=?", (node,))
        return {(stream, slot): offset for stream, slot, offset in rows}

    def winners(self) -> list[ProfileRow]:
        """One row per tuned shape: the row that settled it, in the order of the shapes."""
        with self.snapshot():
            shapes = self.replayed.shapes
            winners: dict[int, ProfileRow] = {}
            for row in self.winner_rows():
                shape = shapes.get(row.shape)
                if shape is not None and shape.state == "tuned" and shape.attempt == row.attempt:
                    winners.setdefault(row.shape, row)
        return [winners[id_] for id_ in sorted(winners)]

    def winner_rows(self, after: int = 0) -> Iterator[ProfileRow]:
        """The winners of all attempts, whether they settled their shape or not, in the order of arrival. `after`: only
        those with an id above this."""
        for row in map(_row, self._each(f"{_ROW} WHERE r.winner=1 AND r.id>? ORDER BY r.id", (after,))):
            if not 0 < row.us < inf:
                raise ValueError("a winner without a time")  # `__exit__` names it
            yield row

    def points(self) -> list[PointRecord]:
        """All measured M of config files, of every attempt; none of a run of 0.3.0, whose ledger has no such table."""
        if not self.query(database.HAS_POINTS):
            return []
        return [PointRecord.from_document(json.loads(text)) for (text,) in self.query("SELECT point FROM points")]

    def noise(self, attempt: str, shape: int) -> float:
        """The spread of an attempt's winner if it is noisy: its last time differs from its own first time by more than
        the spreads of both explain. Else 0. A row that keeps today's entry is not noisy, and no mean of a bench is."""
        for extra, first_us, first_spread, us, spread in self.query(_FIRST_AND_LAST, (attempt, shape)):
            first = Time(first_us, first_spread)
            last = Time(us, spread)
            more = _object_in(extra)
            if is_noisy(first, last) and "run" not in more and not keeps_today(more):
                return spread_of_noisy(first, last)
        return 0.0

    def noisy(self, winners: Sequence[ProfileRow] | None = None) -> dict[int, float]:
        """The shapes whose winner is noisy, with its spread; without unconfirmed ones, which no table takes. `winners`:
        if they have been read already."""
        unconfirmed = {shape.id for shape in self.shapes("tuned") if shape.confirmed is False}
        rows = self.winners() if winners is None else winners
        spreads = {winner.shape: self.noise(winner.attempt, winner.shape) for winner in rows}
        return {shape: spread for shape, spread in spreads.items() if spread and shape not in unconfirmed}

    def profile_rows(self) -> Iterator[ProfileRow]:
        """Every measured candidate, in the order of arrival."""
        return map(_row, self._each(f"{_ROW} ORDER BY r.id"))

    def blocked_candidates(self, shape: int | None = None) -> list[BlockedCandidate]:
        """Candidates that attempts (on one shape) left out because they faulted, in the order of the attempts."""
        with self.snapshot():
            return judge_blocked(self.replayed, self.query(f"{BLOCKED} WHERE shape=coalesce(?, shape)", (shape,)))

    def blocked_verdicts(self, node: str) -> tuple[list[BlockedCandidate], list[BlockedCandidate]]:
        """Verdicts for the node's blocked candidates: those that ran elsewhere, and those that faulted there too.

        Only for shapes that were settled after the node's latest running attempt was sent.
        """
        state = self.replayed
        slots = state.nodes[node].slots.values() if node in state.nodes else ()
        since = max((state.attempts[slot.running].sent_at for slot in slots if slot.running), default=0.0)
        sql = f"{BLOCKED} WHERE shape IN (SELECT shape FROM withheld WHERE node=?)"
        judged = []
        for candidate in judge_blocked(state, self.query(sql, (node,))):
            is_of_node = candidate.node == node and candidate.verdict is not None
            if is_of_node and state.shapes[candidate.shape].settled_at >= since:
                judged.append(candidate)
        latest = judged[-MAX_VERDICTS:]
        ran = [candidate for candidate in latest if candidate.verdict == "ran"]
        return ran, [candidate for candidate in latest if candidate.verdict == "faulted"]


def _object_in(cell: str | None) -> dict[str, Any]:
    """The JSON object in a cell, empty for an empty one. Raises TypeError: then `__exit__` tells what is damaged."""
    value = json.loads(cell or "{}")
    if not isinstance(value, dict):
        raise TypeError(f"is not an object: {cell!r}")
    return value


def _shape_state(state: State, id_: int, key: tuple[int | str, ...]) -> ShapeState:
    """A shape that the state has, with the attempt that settled it."""
    shape = state.shapes[id_]
    attempt = state.attempts.get(shape.attempt)
    begun: list[Attempt] = []
    if shape.state == "failed":
        begun = [state.attempts[name] for name in shape.attempts if state.attempts[name].started_at is not None]
        if attempt is None and begun:
            attempt = begun[-1]
    return ShapeState(
        id_,
        key,
        shape.state,
        shape.reason.value if shape.reason else None,
        shape.detail,
        shape.confirmed,
        attempt.id if attempt else "",
        shape.settled_at or None,
        attempt.node if attempt else "",
        attempt.slot if attempt else "",
        len(begun),
    )


def keeps_today(row: Row) -> bool:
    """Return whether a row of a config tuner says that today's entry stays."""
    try:
        return not json.loads(row["triton_config"])["values"]
    except (KeyError, TypeError, ValueError):
        return False


def _report(device: str | None, exit: int | None, spent: str | None, conditions: str | None) -> Report:
    return Report(_object_in(device), exit, _object_in(spent), _object_in(conditions))


def _row(raw: Any) -> ProfileRow:
    id_, attempt, shape, key, node, slot, t, winner, gfx, cu_num, note, extra, *values = raw
    row = {field.name: value for field, value in zip(database.COLUMNS, values, strict=True) if value is not None}
    row |= _object_in(extra)
    return ProfileRow(id_, attempt, shape, tuple(json.loads(key)), node, slot, t, bool(winner), gfx, cu_num, note, row)


MAY_HAVE_UNSETTLED = ("planned", "preparing", "running", "interrupted", "cancelled")
"""States of a run in which shapes may be neither tuned nor skipped nor failed."""


def reconcile(ledger: LedgerReader) -> list[str]:
    """Sentences about what does not add up in a run's ledger, [] if all does: a tuned shape has a valid row of its
    attempt, a failed one a reason, rows are of shapes that their attempt had, the numbers of shapes add up, and a
    finished run has settled all of them."""
    state = ledger.replayed
    counts = ledger.counts()
    with_row = {winner.shape for winner in ledger.winners()}
    faults = []
    for shape in state.shapes.values():
        if shape.state == "tuned" and shape.id not in with_row:
            faults.append(f"shape {shape.id} is tuned by {shape.attempt} without a valid row of that attempt")
    for shape in state.shapes.values():
        if shape.state == "failed" and not shape.reason:
            faults.append(f"shape {shape.id} is failed without a reason")
    for name, id_ in ledger.query("SELECT DISTINCT attempt, shape FROM rows"):
        attempt = state.attempts.get(name)
        if attempt is None or id_ not in attempt.shapes:
            faults.append(f"there are rows of shape {id_} in attempt {name}, which does not have it")
    if counts.total != counts.settled + counts.running + counts.pending or counts.pending < 0:
        faults.append(f"{counts.total} shapes requested, but {counts}")
    if ledger.state not in MAY_HAVE_UNSETTLED and counts.settled != counts.total:
        faults.append(f"the run is {ledger.state}, but {counts.total - counts.settled} shapes are not settled")
    return faults
