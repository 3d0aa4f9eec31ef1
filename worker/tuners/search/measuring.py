"""The measuring process, the only one that owns the GPU: its messages, the handle on it, and what it does.

The tuner holds a `MeasuringProcess`. If the process dies, or sends nothing for too long while it has work, it is ended;
`ProcessDied` names the candidate that it had begun. The caller decides whether it is restarted (`restart`).

In the process a `MeasuringServer` prepares a problem, checks and times candidates, and ranks. Commands come in order. A
thread takes them in and loads the compiled kernels of the candidates that were sent ahead (a hit in the disk cache:
milliseconds), while the main thread measures, so that the GPU does not wait for the loading. An error that leaves the
device in doubt ends the process, with `Fatal` as its last message.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from worker.protocol import is_wrong
from worker.tuners.base import ALIVE_EVERY_S
from worker.tuners.common.measure import (
    RUNNER_UP,
    Measurement,
    Ranking,
    SamplingPolicy,
    Timer,
    measure,
    rerank,
)
from worker.tuners.common.problem import Problem, UnavailableError, is_fatal, status_of
from worker.tuners.search.compiling import ChildProcess, Serve, now
from worker.tuners.search.source import Candidate, KernelSource, Target


@dataclass(frozen=True, slots=True)
class Settle:
    """Environment from now on; answered when all is done that is paid once."""

    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Ask:
    """Call a method of the bench without arguments: `canary` or `time_canary`."""

    what: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make operands, copies and the reference of a problem; those of the last one are freed."""

    problem: Problem
    seed: int
    rotate_bytes: int
    policy: SamplingPolicy
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
    again: int = 0  # repeats while the margin is small
    today: int | None = None  # one to whom the ratios of all are wanted


@dataclass(frozen=True, slots=True)
class Opened:
    """The device is there."""

    info: dict[str, Any]
    target: Target


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to `Ask`, and to `Settle`: the environment is in force."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """The problem is ready, or `refused` has the reason why it cannot be."""

    refused: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Began:
    """A candidate is being measured from now on: the death of the process is charged to it."""

    index: int


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate's end: `status` as in a row, `m` its time if it is right. `spent`: seconds by kind."""

    index: int
    status: str
    detail: str
    err: float = 1.0
    spent: dict[str, float] = field(default_factory=dict)
    m: Measurement | None = None


@dataclass(frozen=True, slots=True)
class Ranked:
    """Second measurement of the leaders `indexes`; `err` is the winner's errRatio after all of it."""

    indexes: tuple[int, ...]
    ranking: Ranking
    err: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Alive:
    """Something moved."""


@dataclass(frozen=True, slots=True)
class Fatal:
    """The device or the process is no longer to be trusted; the process ends itself after this."""

    detail: str


OPEN_S = 240.0  # a driver that was never loaded may take its time


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
        self.owed = 0  # answers that are to come
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
        said = self.wait(OPEN_S, tick)
        if not isinstance(said, Opened):
            self.end()
            raise NoDeviceError(said.detail if isinstance(said, ProcessDied) else f"unexpected {said!r}")
        self.opened, self._up = said, True
        return said

    def settle(self, env: dict[str, str]) -> None:
        """Environment for this process and its successors. Waits until the process is warm."""
        assert self._helper is not None
        self._env = {**self._env, **env}
        self._helper.conn.send(Settle(env))
        self.wait(OPEN_S)

    def wait(self, seconds: float, tick: Callable[[], None] = lambda: None) -> Any:
        """The next answer; ProcessDied if no answer comes within this time."""
        until = now() + seconds
        while now() < until and self.alive:
            tick()
            for message in self.receive(0.2):
                if not isinstance(message, Alive):
                    return message
        return self._dead("hang", f"no answer within {seconds:g} s")

    def send(self, command: Ask | Prepare | Try | Rank) -> None:
        """One command; one answer is owed for it."""
        assert self._helper is not None
        if not self.owed:
            self._heard = now()
        self.owed += 1
        with contextlib.suppress(OSError):  # it is gone: `receive` returns its death
            self._helper.conn.send(command)

    def receive(self, timeout: float = 0.0) -> list[Any]:
        """Messages since the last call, in order; a `ProcessDied` comes last and once."""
        out: list[Any] = []
        if self._helper is None:
            return out
        try:
            while self._helper.conn.poll(timeout):
                timeout = 0.0
                message = self._helper.conn.recv()
                self._heard = now()
                if isinstance(message, Fatal):
                    return [*out, self._dead("fault", message.detail)]
                if isinstance(message, Began):
                    self._begun = message.index
                elif not isinstance(message, Alive):
                    self.owed = max(0, self.owed - 1)
                    self._begun = None if isinstance(message, Tried) else self._begun
                out.append(message)
        except (EOFError, OSError):
            return [*out, self._dead("fault", "")]
        if self.owed and self._up and now() - self._heard > self.hang_s:
            return [*out, self._dead("hang", f"no sign of life for {self.hang_s:g} s")]
        return out

    def end(self) -> str:
        """End the process; a text of how it ended."""
        if self._helper is None:
            return "it is gone"
        how = self._helper.end()
        self._helper, self._begun, self.owed = None, None, 0
        return how

    def _dead(self, kind: str, detail: str) -> ProcessDied:
        """End it; its death with the candidate that it had begun."""
        index = self._begun
        if self._helper is not None and not detail:
            self._helper.await_end()
        how = self.end()
        return ProcessDied(index, kind, detail or f"the measuring process died: {how}")


KEPT = RUNNER_UP  # timers are kept for the ranking if the candidate takes at most this many times as long as the best
# The two threads hand Python to each other so often (5 ms otherwise: as long as a short measurement takes).
SWITCH_S = 0.0005
CANDIDATE_S = 2.0  # no candidate is measured for longer, however it spreads


@dataclass(slots=True)
class Contender:
    """A candidate that may be ranked."""

    loaded: Any
    timer: Timer
    m: Measurement


class MeasuringServer:
    """One device, one problem at a time."""

    def __init__(self, conn: Connection, make: Callable[[], Any]) -> None:
        """`make`: opens the device, a DeviceBench (worker/tuners/search/device_bench.py) or its like in a test."""
        self._conn, self._make = conn, make
        self._lock = threading.Lock()
        self._sent_at = 0.0
        self._policy, self._err_limit, self._sustained = SamplingPolicy(), 0.0, False
        self._contenders: dict[int, Contender] = {}
        self._todo: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._prepared = threading.Event()

    def serve(self) -> None:
        """Serve until the pipe closes. An exception of `make` is the first message, and the end."""
        try:
            self._bench = self._make()
        except Exception as e:  # noqa: BLE001 - a driver may raise anything
            self._send(Fatal(str(e) if isinstance(e, UnavailableError) else f"{type(e).__name__}: {e}"))
            return
        self._send(Opened(self._bench.info(), self._bench.target))
        threading.Thread(target=self._load, daemon=True).start()
        while True:
            command, loaded = self._todo.get()
            if command is None:
                return
            try:
                self._obey(command, loaded)
            except Exception as e:  # noqa: BLE001 - as above
                self._send(Fatal(f"{type(e).__name__}: {e}"))
                return

    def _load(self) -> None:
        """Loading thread: take commands in, and load the candidates that they name."""
        self._bench.enter_thread()
        sys.setswitchinterval(SWITCH_S)
        while True:
            try:
                command = self._conn.recv()
            except (EOFError, OSError):
                self._todo.put((None, None))
                return
            loaded: Any = None
            if isinstance(command, Settle):
                os.environ.update(command.env)
                with contextlib.suppress(Exception):  # a fault shows when a kernel is loaded
                    self._bench.warm()
                self._send(Answer())
                continue
            if isinstance(command, Prepare):
                self._prepared.clear()
            elif isinstance(command, Try):
                self._prepared.wait()
                try:
                    loaded = self._bench.load(command.candidate)
                except Exception as e:  # noqa: BLE001 - reported with the candidate
                    loaded = e
            self._todo.put((command, loaded))

    def _obey(self, command: Any, loaded: Any) -> None:
        if isinstance(command, Prepare):
            self._prepare(command)
        elif isinstance(command, Try):
            self._try(command, loaded)
        elif isinstance(command, Rank):
            self._rank(command)
        elif isinstance(command, Ask):
            self._contenders.clear()
            self._send(Answer(getattr(self._bench, command.what)()))

    def _prepare(self, command: Prepare) -> None:
        start = now()
        self._contenders.clear()
        self._policy, self._err_limit = command.policy, command.err_limit
        self._sustained = command.problem.is_sustained
        refused = self._bench.prepare(command.problem, command.seed, command.rotate_bytes, self._tick)
        self._send(Prepared(refused, now() - start))
        self._prepared.set()

    def _try(self, command: Try, loaded: Any) -> None:
        self._send(Began(command.index))
        try:
            if isinstance(loaded, Exception):
                raise loaded
            self._send(self._check_and_time(command.index, loaded))
        except Exception as e:  # a candidate may raise anything: it is the detail of its row
            if is_fatal(e):
                raise
            self._send(Tried(command.index, status_of(e), f"{type(e).__name__}: {e}"))

    def _check_and_time(self, index: int, loaded: Any) -> Tried:
        start = now()
        err = self._bench.check(loaded)
        checked = now()
        spent = {"check": checked - start}
        if is_wrong(err, self._err_limit):
            return Tried(index, "wrong", f"{err:.4f} of the elements are off; {self._err_limit:g} may be", err, spent)
        best = min((c.m.us for c in self._contenders.values()), default=float("inf"))
        timer = self._bench.timer(loaded)
        policy = replace(self._policy, max_calls=timer.size)  # a sample is one replay
        m = measure(timer, policy, CANDIDATE_S, best, tick=self._tick)
        spent["measure"] = now() - checked
        if not m.valid:
            return Tried(index, "error", f"the clock says {m.us} us for a call", err, spent)
        remark = timer.remark or ("early stop: clearly slower than the best so far" if m.why == "hopeless" else "")
        if m.us <= KEPT * best:
            self._contenders[index] = Contender(loaded, timer, m)
            for other in [i for i, c in self._contenders.items() if c.m.us > KEPT * min(best, m.us)]:
                del self._contenders[other]
        return Tried(index, "ok", remark, err, spent, m)

    def _rank(self, command: Rank) -> None:
        start = now()
        indexes = tuple(i for i in command.indexes if i in self._contenders)
        found = [self._contenders[i] for i in indexes]
        ranking = rerank(
            [c.timer for c in found],
            [c.m for c in found],
            [(*c.loaded.candidate.simplicity, i) for i, c in zip(indexes, found, strict=True)],
            random.Random(command.seed),
            command.cap_s,
            tick=self._tick,
            sustained=self._sustained,
            again=command.again,
            today=indexes.index(command.today) if command.today in indexes else None,
        )
        err = self._bench.check(found[ranking.winner].loaded)  # also after thousands of calls it is right
        self._send(Ranked(indexes, ranking, err, now() - start))

    def _tick(self) -> None:
        if now() - self._sent_at >= ALIVE_EVERY_S:
            self._send(Alive())

    def _send(self, message: Any) -> None:
        with self._lock:
            self._sent_at = now()
            self._conn.send(message)


def serve(conn: Connection, source: KernelSource) -> None:
    """Main function of the measuring process: on the GPU, or in Triton's interpreter with TRITON_INTERPRET=1."""
    from worker.tuners.search.device_bench import DeviceBench  # it imports torch; the tuner's own process does not

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    MeasuringServer(conn, lambda: DeviceBench(source, interpreted=interpreted)).serve()
