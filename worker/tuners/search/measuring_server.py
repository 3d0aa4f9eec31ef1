"""The measuring process, the only one that owns the GPU: prepares a problem, checks and times candidates, ranks.

Commands come in order. A thread takes them in and loads the compiled kernels of the candidates that were sent ahead
(a hit in the disk cache: milliseconds), while the main thread measures: so the GPU does not wait for the loading. An
error that leaves the device in doubt ends the process, with `Fatal` as its last message.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from worker.protocol import is_wrong
from worker.text import plural
from worker.tuners.base import ALIVE_EVERY_S
from worker.tuners.common.measure import (
    RUNNER_UP,
    SETTLE_S,
    Measurement,
    SamplingPolicy,
    Timer,
    measure,
    rerank,
    sustained,
)
from worker.tuners.common.problem import Problem, UnavailableError
from worker.tuners.common.rows import is_fatal, status_of
from worker.tuners.search.compiling import now
from worker.tuners.search.measuring_process import (
    Alive,
    Began,
    Canary,
    CanaryResult,
    CanaryTimes,
    Fatal,
    Opened,
    Prepare,
    Prepared,
    Rank,
    Ranked,
    Settle,
    Settled,
    TimeCanary,
    Tried,
    Try,
)
from worker.tuners.search.target import GpuClock, Target, Unthrottled

KEPT = RUNNER_UP
"""Timers of candidates up to so many times slower than the best are kept for the ranking."""
SWITCH_S = 0.0005
"""The two threads hand Python to each other so often (5 ms otherwise: as long as a short measurement takes)."""
CANDIDATE_S = 2.0
"""No candidate is measured for longer, however it spreads."""


class Bench(Protocol):
    """A device with the operands of one problem on it."""

    target: Target
    clock: GpuClock

    def info(self) -> dict[str, Any]:
        """gfx, cu_num, device, and the versions that a result depends on."""

    def enter_thread(self) -> None:
        """Make the device current in this thread."""

    def warm(self) -> None:
        """Do the one-time work of a first load, and forget loaded kernels; the environment is settled."""

    def canary(self) -> tuple[bool, float, str]:
        """A small problem with a known answer: (ok, microseconds, detail)."""

    def time_canary(self) -> tuple[float, float]:
        """Times of two known kernels (worker.tuners.common.device.py); frees the last problem."""

    def prepare(self, problem: Problem, seed: int, rotate_bytes: int, tick: Callable[[], None]) -> str:
        """Make operands, copies and reference; why that cannot be, "" where it was done."""

    def load(self, candidate: Any) -> Any:
        """Load and bind a candidate, which the result holds as `candidate`. Called from the loading thread."""

    def check(self, loaded: Any) -> float:
        """errRatio of one call on a poisoned output and the X that no timed call uses."""

    def timer(self, loaded: Any) -> Any:
        """A Timer (worker/tuners/common/measure.py) of the rotated copies that makes `size` calls at once."""


@dataclass(slots=True)
class Contender:
    """A candidate that may be ranked."""

    loaded: Any
    timer: Timer
    m: Measurement
    simplicity: tuple[int, ...]


class MeasuringServer:
    """One device, one problem at a time."""

    def __init__(self, conn: Connection, make: Callable[[], Bench]) -> None:
        self._conn, self._make = conn, make
        self._lock = threading.Lock()
        self._sent_at = 0.0
        self._policy, self._err_limit, self._sustained = SamplingPolicy(), 0.0, False
        self._contenders: dict[int, Contender] = {}
        self._todo: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._prepared = threading.Event()
        self._load_s: dict[int, float] = {}

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
                self._send(Settled())
                continue
            if isinstance(command, Prepare):
                self._prepared.clear()
            elif isinstance(command, Try):
                self._prepared.wait()
                start = now()
                try:
                    loaded = self._bench.load(command.candidate)
                except Exception as e:  # noqa: BLE001 - reported with the candidate
                    loaded = e
                self._load_s[command.index] = now() - start
            self._todo.put((command, loaded))

    def _obey(self, command: Any, loaded: Any) -> None:
        if isinstance(command, Prepare):
            self._prepare(command)
        elif isinstance(command, Try):
            self._try(command, loaded)
        elif isinstance(command, Rank):
            self._rank(command)
        elif isinstance(command, Canary):
            self._send(CanaryResult(*self._bench.canary()))
        elif isinstance(command, TimeCanary):
            self._contenders.clear()
            self._send(CanaryTimes(*self._bench.time_canary()))

    def _prepare(self, command: Prepare) -> None:
        start = now()
        self._contenders.clear()
        self._sustained = command.problem.is_sustained
        self._policy = SamplingPolicy(
            min_sample_s=1.0, min_samples=command.min_samples, max_samples=command.max_samples, target=0.004,
            hopeless=1.2, hopeless_after=3, far=1.6, settle_s=SETTLE_S if self._sustained else 0.0,
        )  # fmt: skip
        self._err_limit = command.err_limit
        refused = self._bench.prepare(command.problem, command.seed, command.rotate_bytes, self._tick)
        self._send(Prepared(refused, start, now()))
        self._prepared.set()

    def _try(self, command: Try, loaded: Any) -> None:
        start = now()
        self._send(Began(command.index, start))
        try:
            if isinstance(loaded, Exception):
                raise loaded
            self._send(replace(self._check_and_time(command, loaded, start), start=start, end=now()))
        except Exception as e:  # a candidate may raise anything: it is the detail of its row
            if is_fatal(e):
                raise
            failed = Tried(command.index, status_of(e), -1.0, 0.0, 0, 1.0, f"{type(e).__name__}: {e}", start, now())
            self._send(failed)

    def _check_and_time(self, command: Try, loaded: Any, start: float) -> Tried:
        index = command.index
        err = self._bench.check(loaded)
        checked = now()
        spent = {"check": checked - start, "load": self._load_s.pop(index, 0.0)}
        if is_wrong(err, self._err_limit):
            detail = f"{err:.4f} of the elements are off; {self._err_limit:g} may be"
            return Tried(index, "wrong", -1.0, 0.0, 0, err, detail, start, checked, spent)
        best = min((c.m.us for c in self._contenders.values()), default=float("inf"))
        plain = self._bench.timer(loaded)
        guard = Unthrottled(self._bench.clock)
        timer = guard.around(plain)
        policy = replace(self._policy, max_calls=plain.size)  # a sample is one replay
        m = measure(timer, policy, CANDIDATE_S, best, tick=self._tick)
        spent["measure"] = now() - checked
        if not m.valid:
            return Tried(index, "error", -1.0, 0.0, 0, err, f"the clock says {m.us} us for a call", start, 0, spent)
        remark = "early stop: clearly slower than the best so far" if m.why == "hopeless" else ""
        if guard.kept:
            remark = f"{plural(guard.kept, 'sample')} while the clock was throttled ({guard.why})"
        if m.us <= KEPT * best:
            simple = (*loaded.candidate.simplicity, index)
            self._contenders[index] = Contender(loaded, plain, m, simple)
            for other in [i for i, c in self._contenders.items() if c.m.us > KEPT * min(best, m.us)]:
                del self._contenders[other]
        return Tried(index, "ok", m.us, m.spread, m.samples, err, remark, start, 0, spent, guard.dropped)

    def _rank(self, command: Rank) -> None:
        start = now()
        indexes = tuple(i for i in command.indexes if i in self._contenders)
        found = [self._contenders[i] for i in indexes]
        guard = Unthrottled(self._bench.clock)
        calls, before = sustained([c.m.us for c in found]) if self._sustained else ([c.m.calls for c in found], [])
        ranking = rerank(
            [guard.around(c.timer) for c in found],
            calls,
            [c.simplicity for c in found],
            random.Random(command.seed),
            command.cap_s,
            tick=self._tick,
            before=before,
            again=command.again,
        )
        err = self._bench.check(found[ranking.winner].loaded)  # also after thousands of calls it is right
        self._send(Ranked(indexes, ranking, err, start, now(), guard.dropped))

    def _tick(self) -> None:
        if now() - self._sent_at >= ALIVE_EVERY_S:
            self._send(Alive())

    def _send(self, message: Any) -> None:
        with self._lock:
            self._sent_at = now()
            self._conn.send(message)
