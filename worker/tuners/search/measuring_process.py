"""The tuner's handle on the measuring process, the only one that owns the GPU.

If the process dies, or sends nothing for too long while it has work, it is ended; `ProcessDied` names the candidate
that it had begun. The caller decides whether it is restarted (`restart`). `measuring_server.py` is the other side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from worker.tuners.search.child_process import ChildProcess, Serve, now
from worker.tuners.search.messages import (
    Alive,
    CandidateBegan,
    CandidateMeasured,
    Command,
    DeviceOpened,
    Fatal,
    SetEnvironment,
)

OPEN_S = 240.0
"""Seconds until the device is open: a driver that was never loaded may take its time."""
POLL_S = 0.2


class NoDeviceError(Exception):
    """The measuring process does not come up."""


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """The process is gone. `index` is the candidate that it had begun, if any; `kind` is fault, hang or oom."""

    index: int | None
    kind: str
    detail: str


class MeasuringProcess:
    """One measuring process, and its successors."""

    def __init__(self, serve: Serve, env: dict[str, str], hang_s: float, args: tuple[Any, ...] = ()) -> None:
        """`serve(conn, *args)`: what the process does. `hang_s`: it is ended after such a silence while it has work."""
        self.hang_s = hang_s
        self.answers_owed = 0
        self.device: DeviceOpened | None = None
        self._serve = serve
        self._env = env
        self._args = args
        self._child: ChildProcess | None = None
        self._begun: int | None = None  # the candidate that is being measured
        self._heard_at = 0.0
        self._is_open = False

    @property
    def is_alive(self) -> bool:
        return self._child is not None

    @property
    def connections(self) -> list[Connection]:
        """Connections to wait on."""
        return [] if self._child is None else [self._child.conn]

    def restart(self, tick: Callable[[], None] = lambda: None) -> DeviceOpened:
        """Replace the process by a new one. Raises NoDeviceError with the reason."""
        self.end()
        self._child = ChildProcess(self._serve, self._env, *self._args)
        self._begun = None
        self._is_open = False
        self.answers_owed = 1
        message = self.wait_for_answer(OPEN_S, tick)
        if not isinstance(message, DeviceOpened):
            self.end()
            raise NoDeviceError(message.detail if isinstance(message, ProcessDied) else f"unexpected {message!r}")
        self.device = message
        self._is_open = True
        return message

    def set_environment(self, env: dict[str, str]) -> None:
        """Environment for this process and its successors. Waits until the process is warm."""
        assert self._child is not None
        self._env = {**self._env, **env}
        self._child.conn.send(SetEnvironment(env))
        self.wait_for_answer(OPEN_S)

    def wait_for_answer(self, seconds: float, tick: Callable[[], None] = lambda: None) -> Any:
        """The next answer; ProcessDied if no answer comes within this time."""
        until = now() + seconds
        while now() < until and self.is_alive:
            tick()
            for message in self.receive(POLL_S):
                if not isinstance(message, Alive):
                    return message
        return self._end_dead("hang", f"no answer within {seconds:g} s")

    def send(self, command: Command) -> None:
        """One command; one answer is owed for it."""
        assert self._child is not None
        if not self.answers_owed:
            self._heard_at = now()  # it had nothing to do until now
        self.answers_owed += 1
        with contextlib.suppress(OSError):  # it is gone: `receive` returns its death
            self._child.conn.send(command)

    def receive(self, timeout: float = 0.0) -> list[Any]:
        """Messages since the last call, in order; a `ProcessDied` comes last and once."""
        messages: list[Any] = []
        if self._child is None:
            return messages
        try:
            while self._child.conn.poll(timeout):
                timeout = 0.0
                message = self._child.conn.recv()
                if isinstance(message, Fatal):
                    return [*messages, self._end_dead("fault", message.detail)]
                self._take_note(message)
                messages.append(message)
        except (EOFError, OSError):
            return [*messages, self._end_dead("fault", "")]
        if self.answers_owed and self._is_open and now() - self._heard_at > self.hang_s:
            messages.append(self._end_dead("hang", f"no sign of life for {self.hang_s:g} s"))
        return messages

    def end(self) -> str:
        """End the process; a text of how it ended."""
        if self._child is None:
            return "it is gone"
        how = self._child.end()
        self._child = None
        self._begun = None
        self.answers_owed = 0
        return how

    def _take_note(self, message: Any) -> None:
        """Note what a message says of the process: what it is at, and what it still owes."""
        self._heard_at = now()
        if isinstance(message, Alive):
            return
        if isinstance(message, CandidateBegan):
            self._begun = message.index
            return
        self.answers_owed = max(0, self.answers_owed - 1)
        if isinstance(message, CandidateMeasured):
            self._begun = None

    def _end_dead(self, kind: str, detail: str) -> ProcessDied:
        """End it; its death with the candidate that it had begun."""
        index = self._begun
        if self._child is not None and not detail:
            self._child.await_end()
        how = self.end()
        return ProcessDied(index, kind, detail or f"the measuring process died: {how}")
