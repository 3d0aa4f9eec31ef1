"""Turns a worker's records into ledger writes and policy events. A node's data is checked and cleaned, never trusted.

controller/node_reports.py calls `Ingest.feed_chunk` with bytes of a slot's records, inside a transaction, and gives the
events to the policy. worker/protocol/records.py lists the records and their fields; `_take` is where each is handled.

An impossible record (unknown attempt, an attempt of another node, a shape that the group does not have) is dropped and
counted in `offsets.bad`. An invalid winner is kept as a row with a note, and settles nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator import clean
from orchestrator import events as ev
from orchestrator.ledger.writer import Ledger, row_values
from orchestrator.policy.model import Attempt, State
from orchestrator.reasons import Reason
from worker.protocol import (
    MAX_RECORD_BYTES,
    OUTCOMES,
    SHAPE_VERDICTS,
    ProtocolError,
    blocked_records,
    parse_record,
)
from worker.triton_configs.point_record import PointRecord

EVENTS = "E"
"""The stream of records, as worker.protocol's frames call it; logs are `L`."""

MAX_NAME = 1000
_GFX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+-]{0,63}\Z")
_MAX_T = 1e11


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a slot's events (`E`) or log (`L`) file, starting at `offset`."""

    stream: str
    slot: str
    offset: int
    data: bytes

    def after(self, start: int) -> Chunk:
        """The part of the chunk that follows the first `start` bytes of the file; it may be empty."""
        begin = max(start, self.offset)
        return self if begin == self.offset else replace(self, offset=begin, data=self.data[begin - self.offset :])


def split_lines(buffer: bytes) -> tuple[list[bytes], int]:
    """Return (whole lines without their ends, bytes consumed). A torn last line waits for its rest.

    If a line is longer than any record, its bytes so far are returned as one (bad) line, so that it cannot fill the
    memory.
    """
    end = buffer.rfind(b"\n") + 1
    lines = buffer[:end].split(b"\n")[:-1] if end else []
    if len(buffer) - end > MAX_RECORD_BYTES:
        return [*lines, buffer[end:]], len(buffer)
    return lines, end


def winner_fault(row: Mapping[str, Any], device: Mapping[str, Any]) -> str | None:
    """The reason why a row cannot be a shape's winner; None if it can. The worker has judged its error (`status`)."""
    us = clean.number(row.get("us"))
    err = clean.number(row.get("errRatio"))
    name = row.get("kernelName")
    if us is None or us <= 0:
        return f"its time is {_shown(row.get('us'))}"
    if err is None or not 0 <= err <= 1:
        return f"its errRatio is {_shown(row.get('errRatio'))}, not a share"
    if row.get("status", "ok") != "ok":
        return f"its status is {_shown(row.get('status'))}"
    if not isinstance(name, str) or not name or len(name) > MAX_NAME:
        return "it names no kernel" if not name else "its kernelName is not a name"
    if clean.text(name) != name or name[0] in "=+-@":
        return "its kernelName is not plain text"
    gfx = device.get("gfx")
    cu_num = clean.integer(device.get("cu_num"))
    if not isinstance(gfx, str) or not _GFX.match(gfx) or cu_num is None or cu_num < 1:
        return f"the device is not named (gfx {_shown(gfx)}, cu_num {_shown(device.get('cu_num'))})"
    return None


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, (dict, list)):
        return "no scalar"
    return clean.text(str(value)[:200], 60)


class _Odd(Exception):
    """A record is impossible; the text says why. It is dropped and counted."""


@dataclass(slots=True)
class _Source:
    """The attempt that a slot reports on, and the device there. It is looked up once, because it has many rows."""

    attempt: Attempt
    shapes: frozenset[int]
    device: dict[str, Any]


def _shape_of(source: _Source, raw: Mapping[str, Any]) -> int:
    """The shape that a record is about. Raise _Odd."""
    shape = raw["shape"]
    if type(shape) is not int or shape not in source.shapes:
        raise _Odd(f"attempt {source.attempt.id} has no shape {_shown(shape)}")
    return shape


class Ingest:
    """Reads records into a ledger. Call it inside `ledger.transaction()`; the events are for policy and journal.

    `state`: the run's state, up to date with the journal.
    """

    def __init__(self, ledger: Ledger, state: State) -> None:
        from pydantic_core import from_json  # not at the top: a command that only reads a ledger decodes no records

        self._decode = from_json
        self._ledger = ledger
        self._state = state
        self._ends: set[str] = set()
        """Attempts whose end is in the bytes being read, but not in the ledger yet."""
        self._torn: dict[tuple[str, str], bytes] = {}
        """The unfinished last line of a slot's stream. The ledger's offset does not include it, so a new controller
        receives it again."""
        self._next: dict[tuple[str, str], int] = {}
        """The next byte to read of a slot's stream, torn lines included."""
        self._sources: dict[tuple[str, str], _Source] = {}
        """By (node, slot)."""
        self._rows: list[tuple[Any, ...]] = []
        """Rows of the bytes being read; they go into the ledger together."""

    def feed_chunk(self, node: str, chunk: Chunk) -> list[ev.Event]:
        """Read a part of a slot's records. Bytes that were read before are left out: an ended lease leaves whole files,
        of which most was streamed before."""
        key = (node, chunk.slot)
        if key not in self._next:
            self._next[key] = self._ledger.offsets(node).get((EVENTS, chunk.slot), 0)
        unread = chunk.after(self._next[key])
        self._next[key] = unread.offset + len(unread.data)
        return self.feed(node, chunk.slot, unread.data)[0]

    def feed(self, node: str, slot: str, data: bytes) -> tuple[list[ev.Event], int]:
        """Read the bytes after those of the last call (after a restart: after the ledger's offset).

        Returns the events, and by how many bytes the slot's offset moved on: up to the end of the last line. A line
        that is longer than a record may be counts as ended where the data ends.
        """
        buffer = self._torn.pop((node, slot), b"") + data
        lines, consumed = split_lines(buffer)
        self._ends.clear()
        if consumed < len(buffer):
            self._torn[node, slot] = buffer[consumed:]
        events: list[ev.Event] = []
        for line in lines:
            if not line.strip():
                continue
            try:
                raw = parse_record(line, self._decode)
            except ProtocolError as e:
                self._ledger.note_bad(node, slot, EVENTS, str(e))
                continue
            try:
                events += self._take(node, slot, raw)
            except _Odd as e:
                self._ledger.note_bad(node, slot, EVENTS, f"{clean.text(raw.get('type'), 40)}: {e}")
        self._put_rows()
        if consumed:
            self._ledger.advance_offset(node, slot, EVENTS, consumed)
        return events, consumed

    def _put_rows(self) -> None:
        self._ledger.put_rows(self._rows)
        self._rows.clear()

    def _take(self, node: str, slot: str, raw: Mapping[str, Any]) -> list[ev.Event]:
        """Store a record, and return its events. Raise _Odd."""
        match raw["type"]:
            case "row":  # by far the most
                source = self._source(node, slot, raw["attempt"])
                if source is not None:
                    self._add_row(source, _shape_of(source, raw), slot, raw)
            case "worker_started":
                self._ledger.keep_slot_info(node, slot, info=clean.document(raw["info"]))
            case "tuner_ready":
                self._ledger.keep_slot_info(node, slot, device=clean.document(raw["device"]))
                self._sources.pop((node, slot), None)
            case "canary":
                return [self._canary(node, slot, raw)]
            case "canary_timed":
                return [self._canary_timed(node, slot, raw)]
            case "worker_stopped":
                pass
            case _:
                return self._take_of_attempt(node, slot, raw)
        return []

    def _canary(self, node: str, slot: str, raw: Mapping[str, Any]) -> ev.Event:
        us = clean.number(raw["us"])
        if raw["ok"] is True:
            return ev.CanaryPassed(node, slot, us if us is not None and us > 0 else 0.0)
        detail = clean.text(raw["detail"]) or "it gave no detail"
        return ev.CanaryFailed(node, slot, detail, raw.get("final") is True)

    def _canary_timed(self, node: str, slot: str, raw: Mapping[str, Any]) -> ev.Event:
        device = self._ledger.slot(node, slot).device
        reading = clean.document(raw.get("conditions"))
        names = [clean.text(str(device[name]), 64) for name in ("device", "gfx", "cu_num") if device.get(name)]
        power_cap_w = clean.number(reading.get("power_cap_w")) or 0.0
        hottest_c = _hottest(reading.get("temperature_c"))
        compute_us = _positive_us(raw["compute_us"])
        memory_us = _positive_us(raw["memory_us"])
        return ev.CanaryTimed(node, slot, compute_us, memory_us, " ".join(names), hottest_c, power_cap_w)

    def _source(self, node: str, slot: str, name: object) -> _Source | None:
        """The attempt with that name; None if it is a canary. Raise _Odd."""
        source = self._sources.get((node, slot))
        if source is not None and source.attempt.id == name:
            return source
        attempt = self._state.attempts.get(name) if isinstance(name, str) else None
        if attempt is None:
            if isinstance(name, str) and name in self._state.canaries:
                return None
            raise _Odd(f"unknown attempt {_shown(name)}")
        if attempt.node != node:
            raise _Odd(f"attempt {attempt.id} was not sent to this node")
        device = {**self._ledger.slot(node, slot).device, **self._ledger.report(attempt.id).device}
        source = _Source(attempt, frozenset(attempt.shapes), device)
        self._sources[node, slot] = source
        return source

    def _take_of_attempt(self, node: str, slot: str, raw: Mapping[str, Any]) -> list[ev.Event]:
        source = self._source(node, slot, raw["attempt"])
        if source is None:
            return []
        attempt = source.attempt
        match raw["type"]:
            case "attempt_started":
                device = clean.document(raw["device"])
                known = self._ledger.report(attempt.id).device
                self._ledger.keep_report(attempt.id, device=device, conditions=_conditions("before", raw))
                if not known:
                    source.device |= device
                return [*self._overtaken(attempt, slot), ev.AttemptStarted(attempt.id, node, slot)]
            case "attempt_ended":
                return [self._ended(source, raw)]
            case "spec_rejected":
                detail = clean.text(raw["detail"])
                return [ev.AttemptEnded(attempt.id, Reason.REJECTED, None, detail, 0.0)]
        shape = _shape_of(source, raw)
        match raw["type"]:
            case "point_timed":
                self._ledger.keep_point(attempt.id, _point_of(raw["point"]))
            case "shape_started":
                return [ev.ShapeStarted(attempt.id, shape)]
            case "shape_tuned":
                candidates = self._store_blocked(attempt, shape, slot, raw)
                if self._add_row(source, shape, slot, raw, is_winner=True):
                    self._put_rows()
                    if self._ledger.noise(attempt.id, shape):
                        candidates["withheld"] += (ev.NOISE,)
                        candidates["earlier"] += (ev.NOISE,)
                    return [ev.ShapeTuned(attempt.id, shape, **candidates)]
            case "shape_failed":
                if raw["reason"] not in SHAPE_VERDICTS:
                    raise _Odd(f"reason {_shown(raw['reason'])} is not one of {', '.join(SHAPE_VERDICTS)}")
                candidates = self._store_blocked(attempt, shape, slot, raw)
                detail = clean.text(raw["detail"])
                return [ev.ShapeRefused(attempt.id, shape, Reason(raw["reason"]), detail, **candidates)]
        return []

    def _store_blocked(self, attempt: Attempt, shape: int, slot: str, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Store the candidates that were left out, and return them for the event of the shape's end. Raise _Odd."""
        try:
            entries, more = blocked_records(raw.get("withheld", ()), raw.get("withheld_more", 0))
        except ProtocolError as e:
            raise _Odd(str(e)) from e
        self._ledger.keep_blocked(attempt=attempt.id, shape=shape, node=attempt.node, slot=slot, entries=entries)
        unconfirmed = [entry for entry in entries if not entry["confirmed"]]
        return {
            "withheld": tuple(tuple(entry["candidate"]) for entry in unconfirmed),
            "earlier": tuple(tuple(entry["candidate"]) for entry in unconfirmed if entry["source"] == "blocklist"),
            "cut": more > 0,
        }

    def _add_row(
        self, source: _Source, shape: int, slot: str, raw: Mapping[str, Any], *, is_winner: bool = False
    ) -> bool:
        """Add a row to those that go into the ledger; return whether it is a valid winner. Raise _Odd."""
        row = raw["row"]
        attempt = source.attempt
        if not isinstance(row, dict):
            raise _Odd("its row is not a JSON object")
        fault = winner_fault(row, source.device) if is_winner else None
        t = clean.number(raw.get("t"))
        self._rows.append(
            row_values(
                attempt=attempt.id,
                shape=shape,
                node=attempt.node,
                slot=slot,
                t=t if t is not None and 0 <= t < _MAX_T else 0.0,
                row=row,
                winner=is_winner and fault is None,
                device=source.device,
                note=f"no valid winner: {fault}" if fault else None,
            )
        )
        if fault:
            why = f"shape_tuned: {attempt.id}, shape {shape}: {fault}"
            self._ledger.note_bad(attempt.node, slot, EVENTS, why)
        return is_winner and fault is None

    def _overtaken(self, attempt: Attempt, slot: str) -> list[ev.Event]:
        """A slot does one attempt at a time. If the end of an earlier one was lost (a torn record), end it now."""
        known = self._state.slot(attempt.node, slot)
        earlier = known.running if known is not None else None
        if earlier in (None, attempt.id) or earlier in self._ends:
            return []
        return [
            ev.AttemptEnded(
                str(earlier), Reason.DONE, None, f"its end was not read; the slot went on to {attempt.id}", 0.0
            )
        ]

    def _ended(self, source: _Source, raw: Mapping[str, Any]) -> ev.Event:
        attempt = source.attempt
        self._ends.add(attempt.id)
        self._ledger.keep_report(
            attempt.id,
            exit=clean.integer(raw["exit"]),
            spent=clean.seconds_by_kind(raw["spent"]),
            conditions=_conditions("after", raw),
        )
        in_flight = raw["in_flight"]
        if type(in_flight) is not int or in_flight not in source.shapes:
            in_flight = None
        detail = clean.text(raw["detail"])
        if raw["outcome"] in OUTCOMES:
            outcome = Reason(raw["outcome"])
        else:
            outcome = Reason.ERROR
            detail = f"ended as {_shown(raw['outcome'])}, which is not an outcome; {detail}"
        seconds = clean.number(raw["seconds"])
        return ev.AttemptEnded(attempt.id, outcome, in_flight, detail, max(0.0, seconds or 0.0))


def _point_of(raw: object) -> PointRecord:
    """The measured M of a config file, with clean texts. Raise _Odd."""
    try:
        return PointRecord.from_document(clean.document(raw))
    except ValueError as e:
        raise _Odd(str(e)) from e


def _positive_us(value: object) -> float:
    """A time in microseconds, -1 if there is none."""
    us = clean.number(value)
    return us if us is not None and us > 0 else -1.0


def _hottest(temperatures: object) -> float:
    """The highest of the temperatures by sensor, 0 if none was read."""
    if not isinstance(temperatures, dict):
        return 0.0
    degrees = [clean.number(value) or 0.0 for value in temperatures.values()]
    return max((value for value in degrees if value), default=0.0)


def _conditions(when: str, raw: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """A reading of worker/conditions.py, if the record has one."""
    reading = clean.document(raw.get("conditions"))
    return {when: reading} if reading else None
