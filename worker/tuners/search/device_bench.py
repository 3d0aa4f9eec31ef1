"""The GPU as the measuring process uses it, or Triton's interpreter on the CPU. Imports torch and triton."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing.connection import Connection
from typing import Any

import torch
import triton

from worker.tuners.common.device import Device, canary, keep_asleep, timed_canary
from worker.tuners.common.operands import error_ratio, poison
from worker.tuners.common.problem import Problem, UnavailableError, UnsupportedError
from worker.tuners.search import target
from worker.tuners.search.compiling import compiling, gpu_target
from worker.tuners.search.measuring import MeasuringServer
from worker.tuners.search.source import Call, Candidate, KernelSource
from worker.tuners.search.target import Clock, clock_of

SAMPLE_S = 300e-6  # a graph holds as many rounds over the copies as take so long
MAX_CALLS = 512
LAUNCH_S = 60e-6  # queueing a replay on the host takes at most so long; until then the GPU is kept asleep
ROOM = 0.9  # share of the free memory that the operands may take


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
        self._source, self._interpreted = source, interpreted
        self._device = Device("cpu" if interpreted else "cuda")
        self.target = target.known(90) if interpreted else target.of_device()
        self.clock = Clock("unknown: the interpreter has no clock") if interpreted else _clock(self.target.backend)
        self._problem: Problem | None = None
        self._operands: list[Any] = []  # those that are checked, then the copies that are timed
        self._right = self._out = torch.empty(0)
        if not interpreted:
            torch.zeros(1, device=self._device.torch)  # the context, before a thread needs it
        source.enter(self.target if interpreted else None)

    def info(self) -> dict[str, Any]:
        """gfx, cu_num, device, torch, cuda or hip, triton, and where throttling is seen."""
        own: dict[str, Any] = {"triton": triton.__version__, "clock": self.clock.source}
        if self._interpreted:
            own["interpreter"] = "right answers only: its times are no GPU's"
        return {**self._device.info(), **own}

    def enter_thread(self) -> None:
        if not self._interpreted:
            torch.cuda.set_device(self._device.torch)

    def warm(self) -> None:
        """Build Triton's driver module, which its disk cache keeps, and let the libraries initialise.

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
        return canary(self._device)

    def time_canary(self) -> tuple[float, float]:
        self._free()
        return timed_canary(self._device)

    def prepare(self, problem: Problem, seed: int, rotate_bytes: int, tick: Callable[[], None]) -> str:
        """Operands that are checked, other ones that are timed in copies, the float32 reference, an output.

        X of the checked operands is used in no timed call, so what a kernel leaves unwritten cannot hold an earlier
        right answer.
        """
        self._free()
        source, device = self._source, self._device
        need, free = source.needed_bytes(problem), device.available()
        if need > ROOM * free:
            return f"operands, output and reference need {need} bytes, {free} are available"
        try:
            checked = source.inputs(problem, device.torch, seed, 0)
            self._right, self._out = checked.reference(), checked.output()
            self._operands = [source.operands(checked)]
            tick()
            timed = source.inputs(problem, device.torch, seed, 1)
            span = 0 if self._interpreted else rotate_bytes
            count = max(1, min(MAX_CALLS, -(-span // timed.bytes), device.available() // 2 // timed.bytes))
            for i in range(count):
                self._operands.append(source.operands(timed if i == 0 else timed.copy()))
                tick()
        except (UnsupportedError, UnavailableError) as e:
            return str(e)
        self._problem = problem
        device.sync()
        return ""

    def load(self, candidate: Candidate) -> LoadedCandidate:
        """Bind it to the operands, compile (a hit in the disk cache) and load."""
        assert self._problem is not None
        checked, *timed = self._source.launch(self._problem, candidate, self._operands, self._out)
        if not self._interpreted:
            with compiling() as kernels:
                checked()
            for kernel in kernels:
                _ = kernel.run  # Triton loads it then
        return LoadedCandidate(candidate, checked, timed)

    def check(self, loaded: LoadedCandidate) -> float:
        poison([self._out])
        loaded.checked()
        n = self._right.shape[-1]
        return error_ratio(self._out.view(-1, n), self._right.view(-1, n))

    def timer(self, loaded: LoadedCandidate) -> GraphTimer | WallTimer:
        return (WallTimer if self._interpreted else GraphTimer)(loaded.timed)

    def _free(self) -> None:
        """Let go of everything of the last problem."""
        self._problem, self._operands = None, []
        self._right = self._out = torch.empty(0)


def _clock(backend: str) -> Clock:
    p: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        pci = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    except AttributeError:  # an older torch
        return Clock(f"unknown: torch {torch.__version__} has no PCI address of a device")
    return clock_of(backend, pci)


class GraphTimer:
    """Device time of calls, by replays of one graph that makes `size` calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """Capture: one round over the copies, and where that is short as many as last SAMPLE_S. Raises what calls do.

        A kernel's first call is no measure of its speed (its code is fetched, the host may be late); a graph is.
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
        keep_asleep(LAUNCH_S * (1 + replays))
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
        self._calls = cycle(calls)

    def __call__(self, calls: int) -> float:
        start = time.perf_counter_ns()
        for call in islice(self._calls, calls):
            call()
        return (time.perf_counter_ns() - start) / 1e9


def _event() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


def serve(conn: Connection, source: KernelSource) -> None:
    """Main function of the measuring process: on the GPU, or in Triton's interpreter with TRITON_INTERPRET=1."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    MeasuringServer(conn, lambda: DeviceBench(source, interpreted=interpreted)).serve()
