"""Timers of calls: a GPU's own clock around a graph of calls, and a wall clock for the interpreter.

A call is everything that a GEMM needs, whatever kernels it launches. The calls go round the copies of the operands,
so that none finds its data in a cache. On a GPU they are captured into a graph once; a sample is one replay or
several, between two events, queued behind a short sleep so that launching costs nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], None]

SAMPLE_S = 300e-6
"""A graph holds as many rounds over the copies as take so long."""
MAX_CALLS = 512
LAUNCH_S = 60e-6
"""What queueing a replay takes on the host at most; for that long the GPU is kept asleep."""


class GraphTimer:
    """Device time of calls, by replays of one graph that makes `size` calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """Capture: one round over the copies, and where that is short as many as last SAMPLE_S. Raises what calls do.

        The first call of a kernel tells little of its speed (its code is fetched, the host may be late), a graph does.
        """
        self.size = len(calls)
        self._graph = capture(calls)
        self(1)
        rounds = math.ceil(SAMPLE_S / max(self(1), 1e-7) / len(calls))
        if rounds > 1:
            self.size = min(rounds * len(calls), max(len(calls), MAX_CALLS))
            self._graph = capture([calls[i % len(calls)] for i in range(self.size)])

    def __call__(self, calls: int) -> float:
        replays = max(1, round(calls / self.size))
        start, end = _event(), _event()
        _sleep(LAUNCH_S * (1 + replays))
        start.record()
        for _ in range(replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / (replays * self.size) * calls


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of the calls. Other threads may go on using the device (loading kernels) meanwhile."""
    graph = torch.cuda.CUDAGraph()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


class WallTimer:
    """Wall time of calls back to back, where there is no device clock (the interpreter)."""

    size = 1

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls, self._next = calls, 0

    def __call__(self, calls: int) -> float:
        start = time.perf_counter_ns()
        for _ in range(calls):
            self._calls[self._next]()
            self._next = (self._next + 1) % len(self._calls)
        return (time.perf_counter_ns() - start) / 1e9


def _event() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


def _sleep(seconds: float) -> None:
    torch.cuda._sleep(int(min(seconds, 0.02) * 2e9))  # type: ignore[no-untyped-call]  # cycles, below 2.5 GHz
