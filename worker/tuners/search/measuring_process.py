"""The measuring process as the tuner sees it: the messages over its pipe, the handle on it, its death as a message.

A process that dies, or sends nothing for too long while it has work, is ended; `ProcessDied` names the candidate that
it had begun. The caller decides whether it is restarted (`restart`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from worker.tuners.common.measure import Ranking
from worker.tuners.common.problem import Problem
from worker.tuners.search.compiling import ChildProcess, Serve, now
from worker.tuners.search.source import Candidate
from worker.tuners.search.target import Target


@dataclass(frozen=True, slots=True)
class Settle:
    """Environment from now on; answered when all is done that is paid once."""

    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Canary:
    """Prove the device."""


@dataclass(frozen=True, slots=True)
class TimeCanary:
    """Time the two kernels of the timed canary; the operands of the last problem are freed."""


@dataclass(frozen=True, slots=True)
class CanaryTimes:
    """Microseconds of the compute-bound and of the memory-bound kernel."""

    compute_us: float
    memory_us: float


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make operands, copies and the reference of a problem; those of the last one are freed."""

    problem: Problem
    seed: int
    rotate_bytes: int
    min_samples: int
    max_samples: int
    err_limit: float


@dataclass(frozen=True, slots=True)
class Try:
    """Check a compiled candidate and time it. Several may be sent ahead."""

    index: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Rank:
    """Measure these candidates again, interleaved, for at most `cap_s` seconds, and check the winner once more."""

    indexes: tuple[int, ...]
    cap_s: float
    seed: str
    again: int = 0
    """Repeats while the margin is small."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The device is there."""

    info: dict[str, Any]
    target: Target


@dataclass(frozen=True, slots=True)
class Settled:
    """The environment is in force, and the one-time work of the process is done."""


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """The canary's answer: every element right, microseconds, detail."""

    ok: bool
    us: float
    detail: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """The problem is ready, or `refused` has the reason why it cannot be."""

    refused: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Began:
    """A candidate is being measured from now on: the death of the process is charged to it."""

    index: int
    start: float


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate's end: `status` as in a row."""

    index: int
    status: str
    us: float
    spread: float
    samples: int
    err: float
    detail: str
    start: float
    end: float
    spent: dict[str, float] = field(default_factory=dict)
    dropped: int = 0
    """Samples that were dropped because the clock was throttled."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Second measurement of the leaders `indexes`; `err` is the winner's errRatio after all of it."""

    indexes: tuple[int, ...]
    ranking: Ranking
    err: float
    start: float
    end: float
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Alive:
    """Something moved."""


@dataclass(frozen=True, slots=True)
class Fatal:
    """The device or the process is no longer to be trusted; the process ends itself after this."""

    detail: str


OPEN_S = 240.0
"""A driver that was never loaded may take its time."""


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
        self._serve, self._env, self._args = serve, env, args
        self.hang_s = hang_s
        self._helper: ChildProcess | None = None
        self._begun: int | None = None
        self._heard = 0.0
        self._up = False
        self.owed = 0
        """Answers that are to come."""
        self.opened: Opened | None = None

    @property
    def alive(self) -> bool:
        return self._helper is not None

    @property
    def connections(self) -> list[Connection]:
        """Connections to wait on."""
        return [] if self._helper is None else [self._helper.conn]

    def restart(self, tick: Callable[[], None] = lambda: None) -> Opened:
        """Replace the process by a new one. Raises NoDeviceError with the reason."""
        self.end()
        self._helper = ChildProcess(self._serve, self._env, *self._args)
        self._begun, self.owed, self._up = None, 1, False
        until = now() + OPEN_S
        while now() < until:
            tick()
            for message in self._receive(0.2):
                if isinstance(message, Opened):
                    self.opened, self.owed, self._up = message, 0, True
                    return message
                why = message.detail if isinstance(message, (Fatal, ProcessDied)) else f"unexpected {message!r}"
                self.end()
                raise NoDeviceError(why)
        self.end()
        raise NoDeviceError(f"it did not open the device within {OPEN_S:g} s")

    def settle(self, env: dict[str, str]) -> None:
        """Environment for this process and its successors. Waits until the process is warm."""
        assert self._helper is not None
        self._env = {**self._env, **env}
        self._helper.conn.send(Settle(env))
        until = now() + OPEN_S
        while now() < until and self.alive:
            if any(isinstance(message, Settled) for message in self._receive(0.2)):
                return

    def send(self, command: Canary | TimeCanary | Prepare | Try | Rank) -> None:
        """One command; one answer is owed for it."""
        assert self._helper is not None
        if not self.owed:
            self._heard = now()
        self.owed += 1
        try:
            self._helper.conn.send(command)
        except OSError:
            pass  # it is gone: `receive` returns its death

    def receive(self, timeout: float = 0.0) -> list[Any]:
        """Messages since the last call, in order; a `ProcessDied` comes last and once."""
        return self._receive(timeout) if self._helper is not None else []

    def end(self) -> str:
        """End the process; a text of how it ended."""
        if self._helper is None:
            return "it is gone"
        how = self._helper.end()
        self._helper, self._begun, self.owed = None, None, 0
        return how

    def _receive(self, timeout: float) -> list[Any]:
        assert self._helper is not None
        out: list[Any] = []
        try:
            while self._helper.conn.poll(timeout):
                timeout = 0.0
                message = self._helper.conn.recv()
                self._heard = now()
                if isinstance(message, Fatal):
                    return [*out, self._dead("fault", message.detail)] if self._up else [*out, message]
                self._note(message)
                out.append(message)
        except (EOFError, OSError):
            return [*out, self._dead("fault", "")]
        if self.owed and self._up and now() - self._heard > self.hang_s:
            return [*out, self._dead("hang", f"no sign of life for {self.hang_s:g} s")]
        return out

    def _note(self, message: Any) -> None:
        if isinstance(message, Began):
            self._begun = message.index
        elif not isinstance(message, Alive):
            self.owed = max(0, self.owed - 1)
            if isinstance(message, Tried):
                self._begun = None

    def _dead(self, kind: str, detail: str) -> ProcessDied:
        """End it; its death with the candidate that it had begun."""
        assert self._helper is not None
        index = self._begun
        if not detail:
            self._helper.ended_by_itself()
        how = self.end()
        return ProcessDied(index, kind, detail or f"the measuring process died: {how}")
