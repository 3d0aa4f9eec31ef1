"""One attempt from the spec to its end: the tuner's messages become records as they come, under a watchdog.

Outcome of an attempt, in order of precedence:

- the tuner went through all shapes: `done`, whatever else was going on;
- the agent ended it: `hang` (no message for watchdog_s), `cancelled`, `disk_full`, or `error` (the tuner
  broke the protocol);
- the tuner sent the reason: `error`, `oom` (MemoryError, or an exception with "out of memory"), `disk_full`, or the
  outcome of its TunerFault: `fault` and `hang` of a process of the tuner's own, with its status;
- its process was killed by a SIGKILL that was not ours while a counter of the kernel's out-of-memory killer
  rose: `oom`. A SIGKILL of unknown origin is a `fault`, with that in its detail;
- any other end of the process, a clean exit too: `fault`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from worker.agent.inbox import NOW, Control
from worker.agent.message_check import SHAPE_MESSAGES, MessageCheck
from worker.agent.records import Records
from worker.agent.tuner_process import TunerProcess, ending_of, oom_counters
from worker.process import Stopwatch
from worker.protocol import ProtocolError, Spec, record
from worker.text import MAX_DETAIL, clean, tail

TICK_S = 0.1

LAST_WORDS = ("done", "error", "oom", "disk_full", "fault", "hang", "interrupted")


@dataclass(frozen=True, slots=True)
class Ended:
    """End of an attempt. `exit`: the process's status if it ended too, else None."""

    outcome: str
    in_flight: int | None
    exit: int | None
    detail: str
    spent: dict[str, float] = field(default_factory=dict)

    @property
    def process_is_fit(self) -> bool:
        """True where the tuner's process may take the next attempt as it is."""
        return self.exit is None and self.outcome in ("done", "cancelled", "disk_full")

    def with_evidence(self, words: str) -> Ended:
        """The same, `words` (of hardware errors and the like) first in its detail."""
        return replace(self, detail=clean(f"{words}; {self.detail}" if self.detail else words)) if words else self

    def record(
        self, attempt: str, seconds: float, start_s: float = 0.0, conditions: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The attempt_ended record. `start_s`: seconds that the process took to be ready, if not yet on record."""
        optional = {"conditions": dict(conditions)} if conditions else {}
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
            **optional,
        )


class Attempt:
    """Runs a spec on a tuner's process that is ready."""

    def __init__(self, spec: Spec, proc: TunerProcess, records: Records, control: Control, log_fd: int) -> None:
        self._spec = spec
        self._log = log_fd
        self._proc = proc
        self._records = records
        self._control = control
        self._check = MessageCheck(spec)
        self._why = ""
        self._broken = ""
        self._last: dict[str, Any] | None = None

    def run(self, line: bytes) -> Ended:
        """Send the spec (`line`: JSON on one line), follow it to its end, reap the process if it died."""
        counters, log_start = oom_counters(self._proc.pid), os.fstat(self._log).st_size
        self._proc.send(b"T " + line)
        self._follow()
        if self._last is None:
            self._take(self._proc.reap())
            self._records.sync()
        outcome, detail = self._judge(counters)
        if outcome not in ("done", "cancelled"):
            detail = with_log(detail, self._log, log_start)
        spent = self._last.get("spent", {}) if self._last else {}
        return Ended(outcome, self._check.in_flight, self._proc.exit, detail, _seconds(spent))

    def _follow(self) -> None:
        """Take its messages until the last one or the end of the process."""
        quiet = since_interrupt = 0.0
        watch = Stopwatch()
        while self._last is None and not self._proc.gone:
            messages = self._proc.pump(TICK_S)
            self._take(messages)
            self._records.sync()
            self._control.tick()
            step = watch.turn()
            quiet = 0.0 if messages else quiet + step
            if self._why:
                since_interrupt += step
                if since_interrupt > self._spec.grace_s or self._broken:
                    self._proc.kill()
                    return
            elif self._last is None:
                self._why = self._reason_to_end(quiet)
                if self._why:
                    self._proc.interrupt()

    def _reason_to_end(self, quiet: float) -> str:
        if self._broken:
            return "error"
        if self._records.full:
            return "disk_full"
        if self._control.stop == NOW or self._control.cancelled(self._spec.attempt):
            return "cancelled"
        return "hang" if quiet > self._spec.watchdog_s else ""

    def _take(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if self._broken or message["type"] == "alive":
                continue
            if message["type"] in LAST_WORDS:
                self._last = message
                continue
            try:
                if message["type"] not in SHAPE_MESSAGES:
                    raise ProtocolError(str(message.get("detail", f"unknown message {message['type']!r}")))
                made = self._check.take(message, time.time())
                if made is not None:
                    self._records.append(made)
                if message["type"] == "shape_started":
                    self._proc.send(b"A %d" % message["shape"])
            except ProtocolError as e:
                self._broken = clean(f"the tuner broke the protocol: {e}")

    def _judge(self, counters: dict[str, int]) -> tuple[str, str]:
        """Outcome by the module's docstring, and detail."""
        last = self._last["type"] if self._last else ""
        detail = clean(str(self._last.get("detail", ""))) if self._last else ""
        if self._broken:
            return "error", self._broken
        if self._why == "disk_full" or self._records.full:
            return "disk_full", detail or "the records could not be written: no space left"
        if last == "done":
            return "done", ""
        if self._why == "hang":
            stuck = ", and its process cannot be killed" if self._proc.stuck else ""
            return "hang", f"no sign of progress for {self._spec.watchdog_s:g} s{stuck}"
        if self._why:
            return self._why, ""
        if last == "interrupted":
            return "error", "interrupted by a SIGINT that the worker did not send"
        if last:
            return last, detail
        return ending_of(self._proc, counters)


def with_log(detail: str, log_fd: int, since: int) -> str:
    """`detail` and after it as much of the log's end as a record's detail may hold."""
    room = MAX_DETAIL - len(detail.encode()) - 20
    lines = tail(log_fd, since, room) if room > 80 else ""
    return f"{detail}; the log ends: {lines}" if lines else detail


def _seconds(spent: Any) -> dict[str, float]:
    if not isinstance(spent, dict):
        return {}
    known = [(str(k)[:40], v) for k, v in spent.items() if isinstance(v, (int, float)) and 0 <= v < 1e9]
    return {k: round(v, 6) for k, v in known[:50]}
