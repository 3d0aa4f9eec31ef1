"""Runs an attempt from its spec to its end, under a watchdog. The tuner's messages become records as they arrive.

The outcome of an attempt is the first of these that applies:

- The tuner broke the protocol: `error`. What it says afterwards does not count, not even that it is done.
- A record could not be written: `disk_full`, also if the tuner went through all shapes, because rows are missing.
- The tuner went through all shapes: `done`, even if the agent was about to end it, or its process died afterwards.
- The agent ended it: `hang` (no message for watchdog_s), or `cancelled`.
- The tuner sent the reason: `error` (also after a SIGINT that the agent did not send), `oom` (MemoryError, or an
  exception with "out of memory"), `disk_full`, or the outcome of its TunerFault: `fault` or `hang` of a process that
  the tuner started, with its status.
- Its process was killed by a SIGKILL that was not ours, while a counter of the kernel's out-of-memory killer rose:
  `oom`. A SIGKILL of unknown origin is a `fault`, and its detail says so.
- The process ended in any other way, even with a clean exit: `fault`.

The tuner is third-party code, so `MessageCheck` checks each message against the attempt's spec before it reaches the
record file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from worker.agent.control import NOW, Control
from worker.agent.records import RecordFile
from worker.agent.tuner_process import TunerProcess, ending_of, oom_counters
from worker.protocol import (
    SHAPE_VERDICTS,
    ProtocolError,
    Spec,
    SpecShape,
    blocked_records,
    checked_row,
    identity,
    record,
)
from worker.text import MAX_DETAIL, clean, tail

SHAPE_MESSAGES = ("shape_started", "shape_parked", "row", "shape_tuned", "shape_failed")


class MessageCheck:
    """Follows the messages of one attempt, and knows the state of its shapes:

    open -> in flight (shape_started) -> settled (shape_tuned or shape_failed)
            in flight -> parked (shape_parked) -> in flight again, or settled

    A parked shape was measured and waits for its verdict, because the tuner writes after several shapes. Faults in the
    meantime do not count against it.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._open = {shape.id for shape in spec.shapes}
        """Shapes that are not settled."""
        self._parked: set[int] = set()
        self.in_flight: int | None = None
        """The shape that a fault would be evidence about."""

    def take(self, message: Mapping[str, Any], t: float) -> dict[str, Any] | None:
        """The record for a tuner's message on a shape, None if it needs no record.

        Raises ProtocolError if the message breaks the rules.
        """
        kind = message["type"]
        shape = message.get("shape")
        if kind == "shape_started":
            if self.in_flight is not None:
                raise ProtocolError(f"shape {shape} was started while {self.in_flight} was in flight")
            if type(shape) is not int or shape not in self._open:
                raise ProtocolError(f"shape {shape!r} is not an open shape of the attempt")
            self.in_flight = shape
            self._parked.discard(shape)
            return record(kind, t, attempt=self._spec.attempt, shape=shape)
        misplaced = ProtocolError(f"{kind} of shape {shape!r} while {self.in_flight} was in flight")
        if type(shape) is not int:  # it may be anything, also what cannot be looked up
            raise misplaced
        is_in_flight = shape == self.in_flight
        if not is_in_flight and (shape not in self._parked or kind == "shape_parked"):
            raise misplaced
        if kind == "shape_parked":
            self._parked.add(shape)
            self.in_flight = None
            return None
        fields = self._verdict(message) if kind == "shape_failed" else self._row(message)
        if kind != "row":
            fields |= _candidate_fields(message)
            self._open.discard(shape)
            self._parked.discard(shape)
            if is_in_flight:
                self.in_flight = None
        return record(kind, t, attempt=self._spec.attempt, shape=shape, **fields)

    def _verdict(self, message: Mapping[str, Any]) -> dict[str, Any]:
        reason = message.get("reason")
        detail = message.get("detail")
        if reason not in SHAPE_VERDICTS or not isinstance(detail, str):
            raise ProtocolError(f"shape_failed with reason {reason!r}")
        return {"reason": reason, "detail": clean(detail)}

    def _row(self, message: Mapping[str, Any]) -> dict[str, Any]:
        row = checked_row(message.get("row"), self._spec.err_ratio)
        is_winner = message["type"] == "shape_tuned"
        if is_winner and row.get("us", -1) <= 0:
            raise ProtocolError("shape_tuned without a time")
        if is_winner and row.get("status", "ok") == "wrong":
            raise ProtocolError(f"shape_tuned with errRatio {row.get('errRatio')}, over {self._spec.err_ratio}")
        return {"row": row}


def _candidate_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """The optional fields of a shape's end."""
    entries, more = blocked_records(message.get("withheld") or ())
    for entry in entries:
        entry["name"] = clean(entry["name"])
        entry["detail"] = clean(entry["detail"])
    fields: dict[str, Any] = {"withheld": entries, "withheld_more": more}
    if message.get("candidate") is not None:
        fields["candidate"] = list(identity(message["candidate"], "candidate"))
    return fields


LAST_MESSAGES = ("done", "error", "oom", "disk_full", "fault", "hang", "interrupted")
"""Types of the message after which no other comes."""


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """The end of an attempt, as its record has it."""

    outcome: str
    """One of OUTCOMES (worker/protocol/records.py)."""
    in_flight: int | None
    exit: int | None
    """The status of the process if that ended too, else None."""
    detail: str
    spent: dict[str, float] = field(default_factory=dict)

    @property
    def process_is_fit(self) -> bool:
        """Return whether the tuner's process may take the next attempt without a restart."""
        return self.exit is None and self.outcome in ("done", "cancelled", "disk_full")

    def with_evidence(self, words: str) -> AttemptEnd:
        """The same with `words` (about hardware errors and the like; "" for none) before its detail."""
        if not words:
            return self
        return replace(self, detail=clean(f"{words}; {self.detail}" if self.detail else words))

    def record(
        self, attempt: str, seconds: float, start_s: float = 0.0, conditions: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The attempt_ended record. `start_s`: seconds until the process was ready, if not recorded yet."""
        return record(
            "attempt_ended",
            time.time(),
            attempt=attempt,
            outcome=self.outcome,
            in_flight=self.in_flight,
            exit=self.exit,
            detail=self.detail,
            seconds=round(seconds, 6),
            spent={**self.spent, "start": start_s} if start_s else self.spent,
            conditions=dict(conditions or {}),
        )


class Attempt:
    """Runs a spec on a tuner's process, which must be ready."""

    def __init__(
        self,
        spec: Spec,
        proc: TunerProcess,
        records: RecordFile,
        control: Control,
        log_fd: int,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` gets a line at the begin and at the end of each shape, for people who watch the log."""
        self._spec = spec
        self._tell = tell
        self._begun: dict[int, float] = {}
        """The time at which each shape began."""
        self._sizes = {shape.id: _describe_sizes(shape) for shape in spec.shapes}
        self._log = log_fd
        self._proc = proc
        self._records = records
        self._control = control
        self._check = MessageCheck(spec)
        self._our_reason = ""
        """The outcome for which we end the attempt: error, disk_full, cancelled or hang."""
        self._violation = ""
        """The first message that broke the protocol, in words."""
        self._last: dict[str, Any] | None = None
        """The tuner's last message."""

    def run(self, line: bytes) -> AttemptEnd:
        """Send the spec (`line`: JSON on one line), follow it to its end, reap the process if it died."""
        counters = oom_counters(self._proc.pid)
        log_start = os.fstat(self._log).st_size
        self._proc.send(b"T " + line)
        self._follow()
        outcome, detail = self._judge(counters)
        if outcome not in ("done", "cancelled"):
            detail = with_log(detail, self._log, log_start)
        spent = self._last.get("spent", {}) if self._last else {}
        return AttemptEnd(outcome, self._check.in_flight, self._proc.exit, detail, _seconds(spent))

    def _follow(self) -> None:
        """Take messages until the last one, or until the process ends."""
        quiet = since_interrupt = 0.0
        for messages, step in self._proc.turns(self._control.tick):
            self._take(messages)
            if self._last is not None or self._proc.exit is not None:
                return
            quiet = 0.0 if messages else quiet + step
            if not self._our_reason:
                self._our_reason = self._reason_to_end(quiet)
                if self._our_reason:
                    self._proc.interrupt()
                continue
            since_interrupt += step
            if since_interrupt > self._spec.grace_s or self._violation:
                self._proc.kill()
                self._take(self._proc.reap())
                return

    def _reason_to_end(self, quiet: float) -> str:
        if self._violation:
            return "error"
        if self._records.full:
            return "disk_full"
        if self._control.stop == NOW or self._control.cancelled(self._spec.attempt):
            return "cancelled"
        return "hang" if quiet > self._spec.watchdog_s else ""

    def _take(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if self._violation or message["type"] == "alive":
                continue
            if message["type"] in LAST_MESSAGES:
                self._last = message
                continue
            try:
                if message["type"] not in SHAPE_MESSAGES:
                    raise ProtocolError(str(message.get("detail", f"unknown message {message['type']!r}")))
                entry = self._check.take(message, time.time())
                if entry is not None:
                    self._records.append(entry)
                    self._tell_shape(entry)
                if message["type"] == "shape_started":
                    self._proc.send(b"A %d" % message["shape"])
            except ProtocolError as e:
                self._violation = clean(f"the tuner broke the protocol: {e}")
        self._records.sync()

    def _tell_shape(self, entry: Mapping[str, Any]) -> None:
        shape = entry["shape"]
        if entry["type"] == "shape_started":
            self._begun[shape] = entry["t"]
            self._tell(f"shape {self._sizes[shape]} begun")
        elif entry["type"] != "row":
            seconds = entry["t"] - self._begun[shape]
            self._tell(f"shape {self._sizes[shape]}: {_describe_result(entry)}, after {seconds:.1f} s")

    def _judge(self, counters: dict[str, int]) -> tuple[str, str]:
        """(outcome, detail). See the module's docstring."""
        last = self._last["type"] if self._last else ""
        detail = clean(str(self._last.get("detail", ""))) if self._last else ""
        if self._violation:
            return "error", self._violation
        if self._our_reason == "disk_full" or self._records.full:
            return "disk_full", detail or "the records could not be written: no space left"
        if last == "done":
            return "done", ""
        if self._our_reason == "hang":
            stuck = ", and its process cannot be killed" if self._proc.stuck else ""
            return "hang", f"no sign of progress for {self._spec.watchdog_s:g} s{stuck}"
        if self._our_reason:
            return self._our_reason, ""
        if last == "interrupted":
            return "error", "interrupted by a SIGINT that the worker did not send"
        if last:
            return last, detail
        return ending_of(self._proc, counters)


def _describe_sizes(shape: SpecShape) -> str:
    """The numbers of a shape's key: `16x512x1024`."""
    return "x".join(str(value) for value in shape.key.values() if isinstance(value, int))


def _describe_result(entry: Mapping[str, Any]) -> str:
    """`winner ck_123, 12.3 us, 456 TFLOPS` of a record shape_tuned, or why the shape has no winner."""
    if entry["type"] == "shape_failed":
        return f"no winner ({entry['reason']}: {entry['detail']})"
    row = entry["row"]
    rate = f", {row['tflops']:.4g} TFLOPS" if row.get("tflops") else ""
    return f"winner {row.get('kernelName', '?')}, {row['us']:.4g} us{rate}"


def with_log(detail: str, log_fd: int, since: int) -> str:
    """`detail`, followed by as much of the log's end as fits into a record's detail."""
    room = MAX_DETAIL - len(detail.encode()) - 20
    lines = tail(log_fd, since, room) if room > 80 else ""
    return f"{detail}; the log ends: {lines}" if lines else detail


def _seconds(spent: Any) -> dict[str, float]:
    """The tuner's seconds by kind, of at most 50 kinds."""
    if not isinstance(spent, dict):
        return {}
    seconds: dict[str, float] = {}
    for kind, value in spent.items():
        if isinstance(value, (int, float)) and 0 <= value < 1e9 and len(seconds) < 50:
            seconds[str(kind)[:40]] = round(value, 6)
    return seconds
