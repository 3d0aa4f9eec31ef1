"""The measuring process itself: it prepares a problem, checks and times candidates, and ranks them.

Commands come in order (`messages.py`). A thread takes them in and loads the compiled kernels of the candidates that
were sent ahead (a hit in the disk cache: milliseconds), while the main thread measures, so that the GPU does not wait
for the loading. An error that leaves the device in doubt ends the process, with `Fatal` as its last message.
`measuring_process.py` is the tuner's side.
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
from typing import Any

from worker.protocol import is_wrong
from worker.tuners.base import ALIVE_EVERY_S
from worker.tuners.common.measure import RUNNER_UP, Finalist, Measurement, SamplingPolicy, Timer, measure, rerank
from worker.tuners.common.problem import UnavailableError, is_fatal, status_of
from worker.tuners.search.forked_process import now
from worker.tuners.search.messages import (
    Alive,
    Answer,
    CallBench,
    CandidateBegan,
    CandidateMeasured,
    CandidatesRanked,
    DeviceOpened,
    Fatal,
    MeasureCandidate,
    PrepareProblem,
    ProblemPrepared,
    RankCandidates,
    SetEnvironment,
)
from worker.tuners.search.source import KernelSource

SWITCH_S = 0.0005
"""The two threads hand Python to each other so often (5 ms otherwise: as long as a short measurement takes)."""
CANDIDATE_S = 2.0
"""No candidate is measured for longer, however it spreads."""


@dataclass(slots=True)
class TimedCandidate:
    """A candidate that may be ranked: loaded, with its timer and its first measurement."""

    loaded: Any
    timer: Timer
    measurement: Measurement


class MeasuringServer:
    """One device, one problem at a time."""

    def __init__(self, conn: Connection, open_bench: Callable[[], Any]) -> None:
        """`open_bench`: opens the device, a DeviceBench (worker/tuners/search/device_bench.py) or its like in a
        test."""
        self._conn = conn
        self._open_bench = open_bench
        self._send_lock = threading.Lock()
        self._sent_at = 0.0
        self._policy = SamplingPolicy()
        self._err_limit = 0.0
        self._is_sustained = False
        self._rankable: dict[int, TimedCandidate] = {}
        self._todo: queue.Queue[tuple[Any, Any]] = queue.Queue()  # (command, its loaded candidate); None at the end
        self._is_prepared = threading.Event()

    def serve(self) -> None:
        """Serve until the pipe closes. An exception of `open_bench` is the first message, and the end."""
        try:
            self._bench = self._open_bench()
        except Exception as e:  # noqa: BLE001 - a driver may raise anything
            self._send(Fatal(str(e) if isinstance(e, UnavailableError) else f"{type(e).__name__}: {e}"))
            return
        self._send(DeviceOpened(self._bench.info(), self._bench.target))
        threading.Thread(target=self._take_in_commands, daemon=True).start()
        while True:
            command, loaded = self._todo.get()
            if command is None:
                return
            try:
                self._obey(command, loaded)
            except Exception as e:  # noqa: BLE001 - as above
                self._send(Fatal(f"{type(e).__name__}: {e}"))
                return

    def _take_in_commands(self) -> None:
        """Loading thread: take commands in, and load the candidates that they name."""
        self._bench.enter_thread()
        sys.setswitchinterval(SWITCH_S)
        while True:
            try:
                command = self._conn.recv()
            except (EOFError, OSError):
                self._todo.put((None, None))
                return
            if isinstance(command, SetEnvironment):
                self._set_environment(command.env)
                continue
            loaded: Any = None
            if isinstance(command, PrepareProblem):
                self._is_prepared.clear()
            elif isinstance(command, MeasureCandidate):
                self._is_prepared.wait()
                try:
                    loaded = self._bench.load(command.candidate)
                except Exception as e:  # noqa: BLE001 - reported with the candidate
                    loaded = e
            self._todo.put((command, loaded))

    def _set_environment(self, env: dict[str, str]) -> None:
        os.environ.update(env)
        with contextlib.suppress(Exception):  # a fault shows when a kernel is loaded
            self._bench.warm()
        self._send(Answer())

    def _obey(self, command: Any, loaded: Any) -> None:
        if isinstance(command, PrepareProblem):
            self._prepare(command)
        elif isinstance(command, MeasureCandidate):
            self._measure(command, loaded)
        elif isinstance(command, RankCandidates):
            self._rank(command)
        elif isinstance(command, CallBench):
            self._rankable.clear()
            self._send(Answer(getattr(self._bench, command.method)()))

    def _prepare(self, command: PrepareProblem) -> None:
        start = now()
        self._rankable.clear()
        self._policy = command.policy
        self._err_limit = command.err_limit
        self._is_sustained = command.problem.is_sustained
        refused = self._bench.prepare(command.problem, command.seed, command.rotate_bytes, self._tick)
        self._send(ProblemPrepared(refused, now() - start))
        self._is_prepared.set()

    def _measure(self, command: MeasureCandidate, loaded: Any) -> None:
        self._send(CandidateBegan(command.index))
        try:
            if isinstance(loaded, Exception):
                raise loaded
            self._send(self._check_and_time(command.index, loaded))
        except Exception as e:  # a candidate may raise anything: it is the detail of its row
            if is_fatal(e):
                raise
            self._send(CandidateMeasured(command.index, status_of(e), f"{type(e).__name__}: {e}"))

    def _check_and_time(self, index: int, loaded: Any) -> CandidateMeasured:
        start = now()
        err = self._bench.check(loaded)
        checked_at = now()
        spent = {"check": checked_at - start}
        if is_wrong(err, self._err_limit):
            detail = f"{err:.4f} of the elements are off; {self._err_limit:g} may be"
            return CandidateMeasured(index, "wrong", detail, err, spent)
        best_us = self._best_us()
        timer = self._bench.timer(loaded)
        policy = replace(self._policy, max_calls=timer.size)  # a sample is one replay
        measurement = measure(timer, policy, CANDIDATE_S, best_us, tick=self._tick)
        spent["measure"] = now() - checked_at
        if not measurement.valid:
            return CandidateMeasured(index, "error", f"the clock says {measurement.us} us for a call", err, spent)
        remark = timer.remark
        if not remark and measurement.why == "hopeless":
            remark = "early stop: clearly slower than the best so far"
        if measurement.us <= RUNNER_UP * best_us:
            self._rankable[index] = TimedCandidate(loaded, timer, measurement)
            self._forget_slow()
        return CandidateMeasured(index, "ok", remark, err, spent, measurement)

    def _best_us(self) -> float:
        return min((timed.measurement.us for timed in self._rankable.values()), default=float("inf"))

    def _forget_slow(self) -> None:
        """Keep the timers of those that take at most RUNNER_UP times as long as the best."""
        most_us = RUNNER_UP * self._best_us()
        self._rankable = {i: timed for i, timed in self._rankable.items() if timed.measurement.us <= most_us}

    def _rank(self, command: RankCandidates) -> None:
        start = now()
        indexes = tuple(i for i in command.indexes if i in self._rankable)
        timed = [self._rankable[i] for i in indexes]
        finalists = [
            Finalist(t.timer, t.measurement, (*t.loaded.candidate.simplicity, i))
            for i, t in zip(indexes, timed, strict=True)
        ]
        ranking = rerank(
            finalists,
            random.Random(command.seed),
            command.cap_s,
            tick=self._tick,
            sustained=self._is_sustained,
            again=command.again,
            today=indexes.index(command.today) if command.today in indexes else None,
        )
        err = self._bench.check(timed[ranking.winner].loaded)  # also after thousands of calls it is right
        self._send(CandidatesRanked(indexes, ranking, err, now() - start))

    def _tick(self) -> None:
        if now() - self._sent_at >= ALIVE_EVERY_S:
            self._send(Alive())

    def _send(self, message: Any) -> None:
        with self._send_lock:
            self._sent_at = now()
            self._conn.send(message)


def serve_measuring(conn: Connection, source: KernelSource) -> None:
    """Main function of the measuring process: on the GPU, or in Triton's interpreter with TRITON_INTERPRET=1."""
    from worker.tuners.search.device_bench import DeviceBench  # it imports torch; the tuner's own process does not

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    MeasuringServer(conn, lambda: DeviceBench(source, interpreted=interpreted)).serve()
