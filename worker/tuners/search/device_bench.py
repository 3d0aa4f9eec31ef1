"""The GPU and its clock as the measuring process uses them, or Triton's interpreter. Imports torch and triton.

A sample does not count if the clock was slowed for heat, by the board, or by a power brake while it was taken.
The power cap is another matter: a large GEMM runs into it all the time, so that is its true speed; it is not counted.
Without NVML (through ctypes) and amdsmi (ROCm's Python module) the clock is unknown.

NVML: nvmlDeviceGetCurrentClocksThrottleReasons and the nvmlClocksThrottleReason* bits of nvml.h. amdsmi:
`throttle_status` of amdsmi_get_gpu_metrics_info, in the driver's common bits (SMU_THROTTLER_*, amdgpu_smu.h): 0 to 15
are power limits, 16 to 31 currents, 32 to 55 temperatures, 56 and up others such as PROCHOT.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
import triton

from worker.device import driver_version
from worker.text import byte_words, plural
from worker.tuners.common.device import Device, canary, device_seconds, timed_canary
from worker.tuners.common.operands import count_copies, error_ratio, poison
from worker.tuners.common.problem import Problem, UnavailableError, UnsupportedError
from worker.tuners.search.compiling import compiling, gpu_target
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


THROTTLE_BITS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}  # nvmlClocksThrottleReasonHwSlowdown, SwThermalSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown
AMD_THROTTLE_BITS = ~0xFFFF  # all of SMU_THROTTLER_* but the power limits
TRIES = 5
PAUSE_S = 0.05


class Clock(NamedTuple):
    """A GPU's clock. `source`: who says whether it is throttled, or why that is unknown. `throttled`: the reason for
    which it is throttled now, "" if it is not."""

    source: str
    throttled: Callable[[], str] = lambda: ""


def clock_of(backend: str) -> Clock:
    """The clock of the GPU in use, `backend` being cuda or hip."""
    try:
        p: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        pci = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        if backend == "cuda":
            return Clock("nvml", _nvml(pci))
        return Clock("amdsmi", _amdsmi(pci, importlib.import_module("amdsmi")))
    except (OSError, ImportError, AttributeError) as e:  # an older torch names no PCI address
        return Clock(f"unknown: {e}")


def _nvml(pci: str) -> Callable[[], str]:
    """Throttling of an NVIDIA GPU. Raises OSError if NVML or the device is not there."""
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    if lib.nvmlInit_v2() != 0:
        raise OSError("nvmlInit failed")
    device = ctypes.c_void_p()
    reasons = ctypes.c_ulonglong()
    if lib.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), ctypes.byref(device)) != 0:
        raise OSError(f"NVML knows no device {pci}")

    def status() -> int:
        return int(lib.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(reasons)))

    if status() != 0:
        raise OSError("NVML reports no throttle reasons")

    def throttled() -> str:
        bits = reasons.value if status() == 0 else 0
        return ", ".join(words for bit, words in THROTTLE_BITS.items() if bits & bit)

    return throttled


def _amdsmi(pci: str, smi: Any) -> Callable[[], str]:
    """Throttling of an AMD GPU through ROCm's `amdsmi`. Raises OSError if it reports no throttle status."""
    try:
        smi.amdsmi_init()
        handles = {str(smi.amdsmi_get_gpu_device_bdf(h)).lower(): h for h in smi.amdsmi_get_processor_handles()}
    except Exception as e:  # the module has exceptions of its own
        raise OSError(f"amdsmi: {e}") from e
    if pci.lower() not in handles:
        raise OSError(f"amdsmi knows no device {pci}")

    def status() -> int | None:
        try:
            status = smi.amdsmi_get_gpu_metrics_info(handles[pci.lower()]).get("throttle_status")
        except Exception:  # noqa: BLE001 - as above
            return None
        return status if isinstance(status, int) else None

    if status() is None:
        raise OSError("amdsmi reports no throttle status")

    def throttled() -> str:
        bits = (status() or 0) & AMD_THROTTLE_BITS
        return f"throttle status {bits:#x}" if bits else ""

    return throttled


class Unthrottled:
    """A timer that drops a sample taken while the clock was throttled and takes another, up to TRIES times in a row.

    After that the sample counts as it is, and `remark` says so.
    """

    def __init__(
        self, clock: Clock, timer: GraphTimer | WallTimer, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.size = timer.size
        self.remark = ""
        self._clock = clock
        self._timer = timer
        self._pause = pause
        self._kept = 0

    def __call__(self, calls: int) -> float:
        for _ in range(TRIES):
            before = self._clock.throttled()
            seconds = self._timer(calls)
            why = before or self._clock.throttled()
            if not why:
                return seconds
            self._pause(PAUSE_S)
        self._kept += 1
        self.remark = f"{plural(self._kept, 'sample')} while the clock was throttled ({why})"
        return seconds


def _hash_sources() -> None:
    """Have Triton hash its own files, which it does once a process: the fork server does it for all that it forks."""
    for place in ("triton.runtime.cache", "triton.compiler.compiler"):  # it moved between versions
        key = getattr(importlib.import_module(place), "triton_key", None)
        if key is not None:
            key()


_hash_sources()
