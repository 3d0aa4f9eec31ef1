"""The GPU, or Triton's interpreter, as the measuring process uses it. Imports torch and triton.

`measuring_server.py` opens one `DeviceBench` and calls `prepare` for each problem; then for each candidate `load` (from
a thread of its own), `check`, and `timer`, whose samples it takes. `gpu_clock.py` says which samples do not count.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import triton

from worker import without_gc
from worker.device import driver_version
from worker.text import byte_words
from worker.tuners.common.device import Device, canary, device_seconds, timed_canary
from worker.tuners.common.operands import count_copies, error_ratio, poison
from worker.tuners.common.problem import Problem, UnavailableError, UnsupportedError
from worker.tuners.search.compiling import compiling, gpu_target
from worker.tuners.search.gpu_clock import Clock, Unthrottled, clock_of
from worker.tuners.search.source import Call, Candidate, KernelSource
from worker.tuners.search.target import datasheet_target, target_of_gpu

SAMPLE_S = 300e-6
"""A graph holds as many rounds over the copies as fit into this time."""
MAX_CALLS = 512
LAUNCH_S = 60e-6
"""Longest time to queue a replay on the host; until then the GPU is kept asleep."""
ROOM = 0.9
"""Share of the free memory that the operands may take."""


@dataclass(slots=True)
class LoadedCandidate:
    """A loaded candidate: a call on the checked operands, and one on each copy that is timed."""

    candidate: Candidate
    checked: Call
    timed: Sequence[Call]


class DeviceBench:
    """A GPU (or the interpreter) with the operands of one problem on it."""

    def __init__(self, source: KernelSource, *, interpreted: bool) -> None:
        """Open the device and import the kernels. Raises UnavailableError."""
        if not interpreted and not torch.cuda.is_available():
            raise UnavailableError("this tuner needs a GPU, and torch sees none here; --tuner torch works without one")
        self._source = source
        self._interpreted = interpreted
        self._device = Device("cpu" if interpreted else "cuda")
        self.target = datasheet_target(90) if interpreted else target_of_gpu()
        self._clock = Clock("unknown: an interpreter") if interpreted else clock_of(self.target.backend)
        self._problem: Problem | None = None
        self._operands: list[Any] = []  # those that are checked, then the copies that are timed
        self._references: list[torch.Tensor] = []  # of each product of a call; `_out` has them one behind the other
        self._out = torch.empty(0)
        if not interpreted:
            torch.zeros(1, device=self._device.torch)  # the context, before a thread needs it
        source.enter(self.target if interpreted else None)

    def info(self) -> dict[str, Any]:
        """gfx, cu_num, device, driver, torch, cuda or hip, triton, and where throttling is seen."""
        info = {**self._device.info(), "triton": triton.__version__, "clock": self._clock.source}
        if self._interpreted:
            info["interpreter"] = "right answers only: its times are no GPU's"
        else:
            info["driver"] = driver_version()
        return info

    def enter_thread(self) -> None:
        """Make the device current in this thread."""
        if not self._interpreted:
            torch.cuda.set_device(self._device.torch)

    def warm(self) -> None:
        """Build Triton's driver module, which its disk cache keeps, and let the libraries initialise; the environment
        is settled by now.

        A product (the reference's), a graph and its pool, events, a check.
        """
        if self._interpreted:
            return
        triton.runtime.driver.active.get_current_target()
        triton.compiler.make_backend(gpu_target(self.target))
        x = torch.ones(128, 128, dtype=torch.bfloat16, device=self._device.torch)
        out = torch.empty_like(x)
        poison([out])
        error_ratio(out, x.float() @ x.float().t())

        def product() -> None:
            torch.mm(x, x.t(), out=out)

        GraphTimer([product])(1)
        self._device.sync()

    def canary(self) -> tuple[bool, float, str]:
        """A small problem with a known answer: (ok, microseconds, detail)."""
        return canary(self._device)

    def time_canary(self) -> tuple[float, float]:
        """Times of two known kernels; frees the last problem."""
        self._free()
        return timed_canary(self._device)

    def prepare(self, problem: Problem, seed: int, rotate_bytes: int, tick: Callable[[], None]) -> str:
        """Operands that are checked, other ones that are timed in copies, the float32 reference, an output; why that
        cannot be, "" if it was done.

        X of the checked operands is used in no timed call, so what a kernel leaves unwritten cannot hold an earlier
        right answer.
        """
        self._free()
        source = self._source
        device = self._device
        needed = source.needed_bytes(problem)
        free = device.available()
        if needed > ROOM * free:
            return f"operands, output and reference need {byte_words(needed)}, {byte_words(free)} are available"
        try:
            checked = source.inputs(problem, device.torch, seed, 0)
            reference = checked.reference()
            self._references = [reference] if isinstance(reference, torch.Tensor) else list(reference)
            self._out = checked.output()
            self._operands = [source.operands(checked)]
            tick()
            timed = source.inputs(problem, device.torch, seed, 1)
            span = 0 if self._interpreted else rotate_bytes
            count = count_copies(timed.bytes, span, device.available() // 2 // timed.bytes, most=MAX_CALLS)
            self._operands.append(source.operands(timed))
            tick()
            for _ in range(count - 1):
                self._operands.append(source.operands(timed.copy()))
                tick()
        except (UnsupportedError, UnavailableError) as e:
            return str(e)
        self._problem = problem
        device.sync()
        return ""

    def load(self, candidate: Candidate) -> LoadedCandidate:
        """Bind it to the operands, compile (a hit in the disk cache) and load. Called from the loading thread."""
        assert self._problem is not None
        checked, *timed = self._source.launch(self._problem, candidate, self._operands, self._out)
        if not self._interpreted:
            with compiling() as kernels:
                checked()
            for kernel in kernels:
                _ = kernel.run  # Triton loads it then
        return LoadedCandidate(candidate, checked, timed)

    def check(self, loaded: LoadedCandidate) -> float:
        """errRatio of one call on a poisoned output; of several products the worst."""
        poison([self._out])
        loaded.checked()
        flat = self._out.view(-1)
        errs: list[float] = []
        start = 0
        for reference in self._references:
            end = start + reference.numel()
            errs.append(error_ratio(flat[start:end].view_as(reference), reference))
            start = end
        return max(errs)

    def timer(self, loaded: LoadedCandidate) -> Unthrottled:
        """A Timer (worker/tuners/common/measure.py) of the rotated copies that makes `size` calls at once. `remark` has
        what a row has to say of its samples."""
        timer = WallTimer(loaded.timed) if self._interpreted else GraphTimer(loaded.timed)
        return Unthrottled(self._clock, timer)

    def _free(self) -> None:
        """Let go of everything of the last problem."""
        self._problem = None
        self._operands = []
        self._references = []
        self._out = torch.empty(0)


class GraphTimer:
    """Device time of calls, by replays of one graph that makes `size` calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """Capture: one round over the copies, and where that is short as many as last SAMPLE_S. Raises what calls do.

        A kernel's first call is slower: its code is fetched, and the host may be late. So we time a graph.
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
        seconds = device_seconds(partial(self._replay, replays), LAUNCH_S * (1 + replays))
        return seconds / (replays * self.size) * calls

    def _replay(self, times: int) -> None:
        for _ in range(times):
            self._graph.replay()


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of the calls. Other threads may go on using the device (loading kernels) meanwhile."""
    graph = torch.cuda.CUDAGraph()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    # The garbage of a candidate that failed may hold its graph, and to free a graph is not permitted during a capture.
    with without_gc(), torch.cuda.stream(stream):
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
        self._calls = cycle(calls)

    def __call__(self, calls: int) -> float:
        start = time.perf_counter_ns()
        for call in islice(self._calls, calls):
            call()
        return (time.perf_counter_ns() - start) / 1e9


def _hash_sources() -> None:
    """Have Triton hash its own files, which it does once a process: the fork server does it for all that it forks."""
    for place in ("triton.runtime.cache", "triton.compiler.compiler"):  # it moved between versions
        key = getattr(importlib.import_module(place), "triton_key", None)
        if key is not None:
            key()


_hash_sources()
