"""Supervises a slot's tuner process: starts it, waits for its ready message, and proves the slot with a canary.

loop.py calls `bring_up` if there is no process, `wait` while it is idle, and `drop` after an attempt that the process
is not fit for any more. If the canary fails, the slot is `sick`: it has no process, and gets a new one only to answer a
canary spec (`answer_canary`), which the controller sends when it wants to try the slot again.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from worker.agent.attempt import LAST_MESSAGES, AttemptEnd, with_log
from worker.agent.control import NOW, Control
from worker.agent.records import RecordFile
from worker.agent.tuner_process import TunerProcess, ending_of, oom_counters
from worker.protocol import NodeConfig, Spec, record
from worker.text import clean

SHARE = 0.01
"""Largest share of the slot's time for timed canaries."""
STARTS = 2
"""Starts in a row if the process is lost before its canary; an answer is final at once."""
IDLE_DEATHS = 3
"""A slot is sick after this number of deaths without work ..."""
IDLE_DEATHS_WITHIN_S = 60.0
"""... within these seconds."""
MISSING = re.compile(r"No module named '?([\w.]+)")
MAX_DEVICE_BYTES = 16 * 1024
NOT_STARTED = "the tuner did not start"


class StoppedError(Exception):
    """A request to stop or cancel arrived meanwhile."""


class TunerFailedError(Exception):
    """The tuner did not start or answer."""

    def __init__(
        self, outcome: str, detail: str, exit: int | None = None, *, lost: bool = False, final: bool = False
    ) -> None:
        """`exit`: the status of its process if that ended. `lost`: it died without a message. `final`: a retry is
        useless."""
        super().__init__(detail)
        self.outcome = outcome
        self.final = final
        self.exit = exit
        self.lost = lost


class TunerSupervisor:
    """Owns the slot's TunerProcess."""

    def __init__(
        self,
        name: str,
        config: NodeConfig,
        spawn: Callable[[], TunerProcess],
        records: RecordFile,
        control: Control,
        log_fd: int,
    ) -> None:
        self._name = name
        self._config = config
        self._spawn = spawn
        self._records = records
        self._control = control
        self._log = log_fd
        self._deaths: deque[float] = deque(maxlen=IDLE_DEATHS)
        self._start_s = 0.0
        self._since = time.monotonic()
        self._timed_s = 0.0
        """Seconds that timed canaries took."""
        self._next_timed_s = math.inf
        """Expected seconds of the next one; infinite: do not try one."""
        self.proc: TunerProcess | None = None
        """None between processes and while `sick`."""
        self.device: dict[str, Any] = {}
        """Returned by the tuner's `open`: gfx, cu_num, device, versions."""
        self.sick = False

    def bring_up(self) -> None:
        """Start a process and run its canary; become sick if it fails. Raises StoppedError."""
        for start in range(1, STARTS + 1):
            try:
                self._start()
                self._canary(None, self._config.canary_timeout_s)
                return
            except TunerFailedError as e:
                self.drop()
                if not e.lost or start == STARTS:
                    self._record_canary(False, -1.0, str(e), None, final=e.final)
                    return

    def answer_canary(self, spec: Spec) -> AttemptEnd:
        """Run a canary spec, on a new process if the slot was sick. The verdict is the canary record."""
        try:
            if self.proc is None:
                self._start(spec.attempt)
            self._canary(spec.attempt, spec.watchdog_s)
        except StoppedError:
            self.drop()
            return AttemptEnd("cancelled", None, None, "")
        except TunerFailedError as e:
            self.drop()
            self._record_canary(False, -1.0, str(e), spec.attempt, final=e.final)
            return AttemptEnd(e.outcome, None, e.exit, str(e))
        return AttemptEnd("done", None, None, "")

    def time_canary(self, conditions: Callable[[], Mapping[str, Any]]) -> None:
        """Time the tuner's two known kernels if the budget allows it. Record the times with the conditions after it.

        A tuner that cannot do it is not asked again. If the process dies, it is replaced like any other.
        """
        began = time.monotonic()
        if self.proc is None or self.proc.gone or self._control.stop:
            return
        if self._timed_s + self._next_timed_s > SHARE * (began - self._since):
            return
        self.proc.send(b"P")
        try:
            message = self._wait_for("canary_timed", self._config.canary_timeout_s, None)
        except (TunerFailedError, StoppedError) as e:
            if isinstance(e, StoppedError) or e.lost or e.outcome == "hang":
                self.drop()
            self._timed_s = math.inf
            return
        seconds = time.monotonic() - began
        self._next_timed_s = seconds
        self._timed_s += seconds
        compute_us = _positive(message.get("compute_us"))
        memory_us = _positive(message.get("memory_us"))
        if compute_us < 0 and memory_us < 0:
            return
        self._records.append(
            record(
                "canary_timed",
                time.time(),
                compute_us=compute_us,
                memory_us=memory_us,
                seconds=round(seconds, 6),
                conditions=conditions(),
            )
        )

    def wait(self, seconds: float) -> None:
        """Idle for this many seconds. Notices if the process dies meanwhile."""
        if self.proc is None:
            time.sleep(seconds)
            return
        self.proc.pump(seconds)
        if not self.proc.gone:
            return
        self.proc.reap()
        _, words = ending_of(self.proc, {})
        self.drop()
        self._deaths.append(time.monotonic())
        if len(self._deaths) == IDLE_DEATHS and self._deaths[-1] - self._deaths[0] < IDLE_DEATHS_WITHIN_S:
            self._record_canary(False, -1.0, f"{words}, without work, {IDLE_DEATHS} times in a row", None)

    def drop(self) -> None:
        """End the process, if there is one. The next one needs a canary again."""
        if self.proc is not None:
            self.proc.kill()
        self.close()

    def close(self) -> None:
        """Let the process end by itself, within its grace."""
        if self.proc is not None:
            self.proc.close()
            self.proc = None

    def take_start_s(self) -> float:
        """Seconds from spawn to ready, only once for each process; 0 after that."""
        seconds = self._start_s
        self._start_s = 0.0
        return seconds

    def _start(self, attempt: str | None = None) -> None:
        try:
            self.proc = self._spawn()
        except OSError as e:
            raise TunerFailedError("error", f"the tuner's process cannot be started: {e}") from e
        message = self._wait_for("ready", self._config.start_timeout_s, attempt)
        device = message.get("device")
        if not isinstance(device, dict) or len(json.dumps(device)) > MAX_DEVICE_BYTES:
            raise TunerFailedError("error", "the tuner's ready does not describe its device")
        self.device = device
        expected = _positive(message.get("timed_canary_s"))
        if expected > 0 and not self._timed_s:
            self._next_timed_s = expected
        self._start_s = round(time.monotonic() - self.proc.spawned, 6)
        self._records.append(record("tuner_ready", time.time(), tuner=self._name, device=device, seconds=self._start_s))

    def _canary(self, attempt: str | None, timeout_s: float) -> None:
        assert self.proc is not None
        self.proc.send(b"C")
        message = self._wait_for("canary", timeout_s, attempt)
        us = message.get("us")
        has_passed = message.get("ok") is True and isinstance(us, (int, float)) and 0 <= us < math.inf
        us = float(us) if has_passed and us is not None else -1.0
        self._record_canary(has_passed, us, str(message.get("detail")), attempt)
        if not has_passed:
            self.drop()

    def _record_canary(self, ok: bool, us: float, detail: str, attempt: str | None, *, final: bool = False) -> None:
        self.sick = not ok
        self._records.append(
            record("canary", time.time(), ok=ok, us=us, detail=clean(detail), attempt=attempt, final=final)
        )

    def _wait_for(self, want: str, timeout_s: float, attempt: str | None) -> dict[str, Any]:
        """Wait for a message of that type. Raises TunerFailedError or StoppedError; the process may still run then."""
        assert self.proc is not None
        what = NOT_STARTED if want == "ready" else "the canary did not end"
        counters = oom_counters(self.proc.pid)
        waited = 0.0
        for messages, step in self.proc.turns(self._control.tick):
            for message in messages:
                if message["type"] == want:
                    return message
                if message["type"] in (*LAST_MESSAGES, "garbled"):
                    raise self._failure(message, what)
            waited += step
            if self.proc.exit is None and self._stopped(attempt):
                raise StoppedError
            if self.proc.exit is None and waited > timeout_s:
                raise TunerFailedError("hang", f"{what}: no answer within {timeout_s:g} s")
        outcome, words = ending_of(self.proc, counters)
        raise TunerFailedError(outcome, with_log(f"{what}: {words}", self._log, 0), self.proc.exit, lost=True)

    def _failure(self, message: Mapping[str, Any], what: str) -> TunerFailedError:
        """The error for a message other than the awaited one. A missing Python module needs no second try."""
        outcome = message["type"] if message["type"] in ("oom", "disk_full") else "error"
        detail = clean(str(message.get("detail", "")))
        missing = MISSING.search(detail)
        if missing and what == NOT_STARTED:
            return TunerFailedError(outcome, _describe_missing_module(self._name, missing[1], detail), final=True)
        return TunerFailedError(outcome, f"{what}: {detail}")

    def _stopped(self, attempt: str | None) -> bool:
        """Return whether to give up: without a spec at any stop; with a spec only at `now`, or if it was cancelled."""
        if attempt is None:
            return bool(self._control.stop)
        return self._control.stop == NOW or self._control.cancelled(attempt)


def _positive(value: Any) -> float:
    """A finite number above 0, else -1."""
    return float(value) if isinstance(value, (int, float)) and 0 < value < math.inf else -1.0


def _describe_missing_module(tuner: str, module: str, detail: str) -> str:
    return (
        f"the tuner {tuner} cannot start here: it needs the Python module {module}, which {sys.executable} does not "
        f"have ({detail}); install it there, or name another interpreter (python:) or image in the inventory"
    )
