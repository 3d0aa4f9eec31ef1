"""The tuner's process from within: one tuner, kept between attempts, executes the agent's commands.

`python -m worker child` calls `serve`. tuner_process.py is the agent's side; it has the commands and messages.

SIGINT ends the running attempt, with the message `interrupted`; between attempts it is ignored. An exception of the
tuner is a message and no crash. If its libraries end the process (a GPU fault, an abort), the agent notices.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from worker.process import die_with, write_all
from worker.protocol import Spec
from worker.text import clean
from worker.tuners.base import Configurable, Emit, Judging, Place, Timed, Tuner, TunerFault
from worker.tuners.catalog import TunerNotFoundError, make_tuner

NO_START = 3
"""Exit status if the tuner did not start; the message before it has the reason."""


def serve(tuner: str, options: str, fd: int, parent: int, place: Place) -> int:
    """Be the tuner's process until stdin ends; the exit status."""
    os.set_inheritable(fd, False)
    die_with(parent)
    faulthandler.enable()
    _offer_to_oom_killer()
    wire = Wire(fd)
    try:
        held = make_tuner(tuner)
        if isinstance(held, Configurable):
            held.configure(json.loads(options), place)
        ready: dict[str, Any] = {"type": "ready", "device": held.open()}
        if isinstance(held, Timed):
            ready["timed_canary_s"] = held.timed_canary_s
        wire.send(ready)
    except BaseException as e:  # noqa: BLE001 - whatever it was, the agent must know
        wire.send(_error(e))
        return NO_START
    for line in iter(sys.stdin.buffer.readline, b""):
        if not line.startswith(b"A"):  # an answer to what was interrupted meanwhile
            wire.send(wire.interruptible(partial(_execute, line, held, wire)))
    return 0


def _execute(line: bytes, tuner: Tuner, wire: Wire) -> dict[str, Any]:
    """Execute one command; its last message."""
    try:
        if line.startswith(b"C"):
            ok, us, detail = tuner.canary()
            return {"type": "canary", "ok": bool(ok), "us": float(us), "detail": clean(str(detail))}
        if line.startswith(b"P"):
            assert isinstance(tuner, Timed)
            compute, memory = tuner.time_canary()
            return {"type": "canary_timed", "compute_us": float(compute), "memory_us": float(memory)}
        if line.startswith(b"V"):
            if isinstance(tuner, Judging):
                tuner.judge(Spec.loads(line[2:]))
            return {"type": "alive"}
        spent = tuner.tune(Spec.loads(line[2:]), Emit(wire.send_in_tune))
        return {"type": "done", "spent": {str(k): float(v) for k, v in spent.items()}}
    except Exception as e:  # noqa: BLE001 - a tuner may raise anything
        return _error(e)


class Wire:
    """Pipe to the agent, with the handling of SIGINT: it never tears a message and never ends an idle child."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._is_working = False
        """A command is being executed: SIGINT counts."""
        self._is_sending = False
        """The main thread writes a message."""
        self._is_interrupt_due = False
        """SIGINT came while a message was written."""
        signal.signal(signal.SIGINT, self._on_sigint)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def send(self, message: dict[str, Any]) -> None:
        """Write one message whole. A tuner's helper threads may call it as well."""
        line = json.dumps(message, separators=(",", ":"), default=_plain).encode() + b"\n"
        is_main_thread = threading.current_thread() is threading.main_thread()
        with self._lock:
            self._is_sending = is_main_thread
            try:
                write_all(self._fd, line)
            finally:
                self._is_sending = False
        if is_main_thread and self._is_interrupt_due:
            self._is_interrupt_due = False
            raise KeyboardInterrupt

    def send_in_tune(self, message: dict[str, Any]) -> None:
        """Send a message; a shape's start returns only when it is on record, so that whatever happens names it."""
        self.send(message)
        if message["type"] != "shape_started":
            return
        answer = b"A %d\n" % message["shape"]
        for line in iter(sys.stdin.buffer.readline, b""):
            if line == answer:
                return
        os._exit(0)  # the agent is gone

    def interruptible(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The last message of `work`, or `interrupted` if SIGINT came while it ran."""
        try:
            self._is_working = True
            try:
                return work()
            finally:
                self._is_working = False
        except KeyboardInterrupt:
            self._is_working = False
            self._is_interrupt_due = False
            return {"type": "interrupted"}

    def _on_sigint(self, _signal: int, _frame: FrameType | None) -> None:
        if not self._is_working:
            return
        if self._is_sending:
            self._is_interrupt_due = True
            return
        raise KeyboardInterrupt


def _offer_to_oom_killer() -> None:
    """Have the kernel kill the tuner before the agent, which reports it, where memory runs out."""
    path = Path("/proc/self/oom_score_adj")
    with suppress(OSError, ValueError):
        path.write_text(str(min(1000, int(path.read_text()) + 300)))


def _error(e: BaseException) -> dict[str, Any]:
    """The message for an exception: `oom`, `disk_full` or `error`. Its traceback goes to the log."""
    if isinstance(e, TunerFault):  # its text is complete, a traceback adds nothing
        return {"type": e.outcome, "detail": clean(str(e))}
    name = type(e).__name__
    text = str(e)
    kind = "error"
    if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
        kind = "disk_full"
    if isinstance(e, MemoryError) or name == "OutOfMemoryError" or "out of memory" in text.lower():
        traceback.clear_frames(e.__traceback__)  # let go of what filled the memory
        kind = "oom"
    if not isinstance(e, TunerNotFoundError):
        with suppress(OSError):  # the log's disk may be full
            traceback.print_exception(type(e), e, e.__traceback__)
    return {"type": kind, "detail": clean(f"{name}: {text}" if text else name)}


def _plain(value: Any) -> Any:
    """JSON for numpy's and torch's scalars."""
    return value.item() if hasattr(value, "item") else str(value)
