"""The device under test: its name, memory, CPU threads and clock, and its canaries.

The canary is a GEMM that proves the device. The timed canary is two known kernels, timed alike on every GPU, by which
slots are compared: one is compute-bound, one memory-bound. Each runs at the clock that the GPU can sustain. The times
say which GPU is slow; no candidate's time is ever scaled by them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from worker.device import cpu_gfx, cpu_model, numbers, usable_cores
from worker.tuners.common.measure import SamplingPolicy, Timer, measure

GPU_ROTATE = 512 << 20
"""Bytes that the copies of an operand span: more than any cache (last level on MI300 and MI355X: 256 MB)."""
CPU_ROTATE = 256 << 20
CGROUP = Path("/sys/fs/cgroup")
QUEUE = 400
"""Calls queued behind a sleeping GPU at most: its queue holds about a thousand launches."""
LAUNCH_S = 20e-6
"""Seconds that queueing a call takes on the host, until it was measured."""
CYCLES_PER_S = 2e9
"""Clock cycles that a GPU is put to sleep for a second: GPUs clock below 2.5 GHz."""
MAX_SLEEP_S = 0.05

CANARY_LOG = 8
"""The canary's matrices have 2^8 rows."""
CANARY_SHIFT = 3
SIZE = 4096
"""M, N and K of the timed product in bfloat16."""
CPU_SIZE = 512
"""On a CPU, in float32."""
COPIED = 1 << 30
"""Bytes of the copy's source: more than four times the last-level cache (MI300 and MI355X: 256 MB)."""
CPU_COPIED = 64 << 20
TIMED_POLICY = SamplingPolicy(min_sample_s=0.01, min_samples=5, max_samples=5, settle_s=0.05)
TIMED_CAP_S = 2.0

Operand = tuple[torch.Tensor, ...]
"""A matrix with its scales."""
Run = Callable[[Operand, Operand], torch.Tensor]
"""(X operand, W operand) -> output [M, N]"""


class Device:
    """The first GPU if torch sees one, else the CPU."""

    def __init__(self, prefer: str | None = None) -> None:
        if prefer is None:
            prefer = "cuda" if torch.cuda.is_available() else "cpu"
        self.torch = torch.device("cpu")
        if prefer == "cuda":
            self.torch = torch.device("cuda", torch.cuda.current_device())
        self.cores = usable_cores()
        self._threads = 0
        torch.set_num_threads(self.cores)
        torch.set_float32_matmul_precision("highest")  # the reference must be float32, not TF32

    @property
    def gpu(self) -> bool:
        return self.torch.type != "cpu"

    @property
    def rotate_bytes(self) -> int:
        return GPU_ROTATE if self.gpu else CPU_ROTATE

    def info(self) -> dict[str, Any]:
        """gfx, cu_num, device, and the versions that a result depends on."""
        versions: dict[str, Any] = {"torch": torch.__version__, "threads": self.cores}
        if not self.gpu:
            mkldnn: Any = torch.backends.mkldnn  # whether oneDNN is built in decides about the kernels
            known = "on" if mkldnn.is_available() else "off"
            return {"gfx": cpu_gfx(), "cu_num": self.cores, "device": cpu_model(), "mkldnn": known, **versions}
        properties: Any = torch.cuda.get_device_properties(self.torch)
        if torch.version.hip:
            gfx = properties.gcnArchName.split(":")[0]
            versions["hip"] = torch.version.hip
        else:
            gfx = f"sm_{properties.major}{properties.minor}"
            versions["cuda"] = torch.version.cuda
        return {"gfx": gfx, "cu_num": properties.multi_processor_count, "device": properties.name, **versions}

    def available(self) -> int:
        """Bytes that can be allocated now."""
        if not self.gpu:
            return host_available()
        free = torch.cuda.mem_get_info(self.torch)[0]
        return int(free) + torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)

    def thread_counts(self, given: Sequence[int] = ()) -> Sequence[int]:
        """The counts of CPU threads to try, those that are given or the usual ones; 0 alone on a GPU."""
        if self.gpu:
            return [0]
        return given or sorted({self.cores, max(1, self.cores // 2), 1}, reverse=True)

    def enter(self, threads: int) -> bool:
        """Use that many CPU threads (0: as many as before); True if it was another number."""
        if threads in (0, self._threads):
            return False
        torch.set_num_threads(threads)
        self._threads = threads
        return True

    def leave(self) -> None:
        """Use all cores again."""
        torch.set_num_threads(self.cores)
        self._threads = 0

    def sync(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.torch)

    def timer(
        self,
        run: Run,
        xs: Sequence[Operand],
        ws: Sequence[Operand],
        threads: int | None = None,
        *,
        launched: bool = True,
    ) -> Timer:
        """A timer that rotates over the copies of both operands. `threads`: of a CPU (None: the usual count); the
        first call with another count is not timed. `launched`: a GPU begins when all calls are launched."""
        pairs = zip(cycle(xs), cycle(ws), strict=True)
        if self.gpu:
            return GpuTimer(run, pairs, launched=launched)
        return CpuTimer(self, run, pairs, self.thread_counts()[0] if threads is None else threads)


class CpuTimer:
    """Wall time of calls back to back."""

    def __init__(self, device: Device, run: Run, pairs: Iterator[tuple[Operand, Operand]], threads: int) -> None:
        self._device = device
        self._run = run
        self._pairs = pairs
        self._threads = threads

    def __call__(self, calls: int) -> float:
        run = self._run
        pairs = list(islice(self._pairs, calls))
        if self._device.enter(self._threads):
            run(*pairs[0])
        start = time.perf_counter_ns()
        for x, w in pairs:
            run(x, w)
        return (time.perf_counter_ns() - start) / 1e9


class GpuTimer:
    """Device time between two events. If the GPU sleeps until the calls are launched, launching costs nothing."""

    def __init__(self, run: Run, pairs: Iterator[tuple[Operand, Operand]], *, launched: bool) -> None:
        self._run = run
        self._pairs = pairs
        self._launched = launched
        self._launch_s = LAUNCH_S

    def __call__(self, calls: int) -> float:
        seconds = 0.0
        while calls:
            pairs = list(islice(self._pairs, min(calls, QUEUE)))
            calls -= len(pairs)
            asleep_s = 0.0
            if self._launched:
                asleep_s = len(pairs) * self._launch_s * 1.5 + LAUNCH_S
            seconds += device_seconds(functools.partial(self._queue, pairs), asleep_s)
        return seconds

    def _queue(self, pairs: Sequence[tuple[Operand, Operand]]) -> None:
        start = time.perf_counter()
        for x, w in pairs:
            self._run(x, w)
        self._launch_s = min(1e-3, (time.perf_counter() - start) / len(pairs))


def device_seconds(queue: Callable[[], object], asleep_s: float) -> float:
    """Device time of the work that `queue` starts on the current stream. The GPU sleeps for `asleep_s` meanwhile."""
    event: Any = torch.cuda.Event
    start = event(enable_timing=True)
    end = event(enable_timing=True)
    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(int(min(asleep_s, MAX_SLEEP_S) * CYCLES_PER_S))
    start.record()
    queue()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def host_available() -> int:
    """Bytes a process may still take: MemAvailable, less where a cgroup limits it."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError, KeyError):
        free = numbers(Path("/proc/meminfo").read_text().replace(":", " "))["MemAvailable"] * 1024
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
            used = int((CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # no cgroup v2 here
    return free


def canary(device: Device) -> tuple[bool, float, str]:
    """(every element right, microseconds of a bfloat16 product, detail).

    H is Sylvester's Hadamard matrix of order n: H[i, k] = (-1)^popcount(i & k). Its rows are orthogonal, so with the
    rows of a second copy shifted by s, H @ shifted^T is n where i = (j + s) mod n, else 0: each element a sum of n
    terms of 1 and -1 that must cancel exactly. All of it is exact in bfloat16 and float32.
    """
    size = 1 << CANARY_LOG
    h = functools.reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]])] * CANARY_LOG)
    right = size * torch.roll(torch.eye(size), -CANARY_SHIFT, dims=1)
    us = -1.0
    for dtype in (torch.float32, torch.bfloat16):
        a = h.to(dtype).to(device.torch)
        b = torch.roll(h, -CANARY_SHIFT, dims=0).to(dtype).to(device.torch)
        out = torch.full((size, size), math.nan, dtype=dtype, device=device.torch)

        def run(x: Operand, w: Operand, out: torch.Tensor = out) -> torch.Tensor:
            return torch.mm(x[0], w[0].t(), out=out)

        run((a,), (b,))
        wrong = int((out.float().cpu() != right).sum())
        if wrong:
            return False, -1.0, f"{wrong} of {size * size} elements of a {size}x{size}x{size} {dtype} product are wrong"
        us = measure(device.timer(run, [(a,)], [(b,)]), SamplingPolicy(), 0.2).us
    device.leave()
    return True, round(us, 4), f"{size}x{size}x{size} product exact in float32 and bfloat16"


def timed_canary(device: Device) -> tuple[float, float]:
    """Microseconds of a product of random matrices and of a copy; -1 each where the memory has no room for them."""
    copied_bytes = COPIED if device.gpu else CPU_COPIED
    if device.available() < 4 * copied_bytes:
        return -1.0, -1.0
    try:
        return _time_product(device), _time_copy(device, copied_bytes)
    finally:
        device.leave()


def _time_product(device: Device) -> float:
    size = SIZE if device.gpu else CPU_SIZE
    dtype = torch.bfloat16 if device.gpu else torch.float32
    draw = torch.Generator(device=device.torch).manual_seed(0)
    a, b = (torch.rand(size, size, generator=draw, device=device.torch).sub_(0.5).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return _time_us(device, lambda x, w: torch.mm(x[0], w[0], out=product), a, b)


def _time_copy(device: Device, size: int) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device.torch)
    return _time_us(device, lambda x, w: w[0].copy_(x[0]), source, torch.empty_like(source))


def _time_us(device: Device, run: Run, x: torch.Tensor, w: torch.Tensor) -> float:
    return round(measure(device.timer(run, [(x,)], [(w,)]), TIMED_POLICY, TIMED_CAP_S).us, 4)
