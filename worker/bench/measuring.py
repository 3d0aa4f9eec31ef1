"""Checks one backend's result on one case, then times its calls on operands that are in no cache.

The process of a backend (child.py) calls `prepare` for each shape, then `ReadyCase.sample` once for each run. It also
states what a backend is: `Backend` and `BoundCase`, which backends.py and torch_backend.py implement. inputs.py draws
the operands; worker/tuners/common/measure.py decides how many samples a time needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from worker.protocol import is_wrong
from worker.protocol.bench import BenchOptions
from worker.text import byte_words
from worker.tuners.common.case import Case
from worker.tuners.common.device import Device
from worker.tuners.common.inputs import Inputs, needed_bytes
from worker.tuners.common.measure import SamplingPolicy, Timer, measure
from worker.tuners.common.operands import count_copies, error_ratio, poison
from worker.tuners.common.problem import UnsupportedError

Call = Callable[[], torch.Tensor]
"""One call of a kernel on one set of operands; it returns the output."""
Alive = Callable[[], None]
"""Reports progress, so that the watchdog stays quiet."""
POLICY = SamplingPolicy(min_samples=5, max_samples=51, target=0.005)
MEMORY_SHARE = 0.9
"""Share of the free memory that a case may need."""
COPIES_SHARE = 0.25
"""Share of the memory that is still free then, which the copies for timing may take."""


@dataclass(frozen=True, slots=True)
class BoundCase:
    """A case that a backend can run."""

    op: str
    """The operator's name, the same for all dates and stacks, such as `gemm_a8w8`. `compare` joins rows by it."""
    kernel: str
    """The kernel that runs, if known, else the function that was called: `aiter.ops.triton.gemm_a8w8.gemm_a8w8`."""
    make: Callable[[Inputs, torch.Tensor], Call]
    """`make(inputs, out)` makes a call on one set of operands. Its preparations (shuffled weights) are not timed. The
    call returns `out`, or a tensor of its own."""
    config: str = ""
    """`FILE BUCKET VALUES` of the config file that it reads, if config sets are compared."""


class Backend(Protocol):
    """One implementation of GEMMs. `load` is called once, then `bind` for each case."""

    def load(self) -> dict[str, Any]:
        """Import what is needed; return facts for the record. Raises UnavailableError with the reason."""

    def bind(self, case: Case) -> BoundCase:
        """Find the function that runs the case. Raises UnsupportedError."""


@dataclass(frozen=True, slots=True)
class ReadyCase:
    """A case whose result was right, with its calls on operands that are in no cache, and their timer."""

    calls: list[Call]
    timer: Timer

    def sample(self, options: BenchOptions, alive: Alive) -> dict[str, Any]:
        """One run: the median of many calls, or, with `iters`, their mean as the FP4 guide takes it.

        Returns {us, spread, samples}.
        """
        if options.iters:
            self.call(options.warmup)
            us = self.timer(options.iters) / options.iters * 1e6
            return {"us": us, "spread": 0.0, "samples": options.iters}
        measured = measure(self.timer, POLICY, options.sample_s, tick=alive)
        return {"us": measured.us, "spread": measured.spread, "samples": measured.samples}

    def call(self, times: int) -> None:
        """Call the kernel a number of times, round the copies: a warm-up, or calls for a profiler that watches."""
        for i in range(times):
            self.calls[i % len(self.calls)]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def prepare(
    case: Case, backend: Backend, device: Device, options: BenchOptions, err_ratio: float, alive: Alive
) -> tuple[dict[str, Any], ReadyCase | None]:
    """Check one call's result against float32; if it is right, make the copies for timing.

    Returns the answer to `prepare` (child.py has its form), and the case to be timed, or None if the result is wrong:
    more than the share `err_ratio` of its elements is off. Raises UnsupportedError, UnavailableError and what the
    backend raises.
    """
    _check_memory(case, device)
    checked = Inputs.make(case, device.torch, options.seed, 0)
    alive()
    bound = backend.bind(case)
    err = _error_of_one_call(bound, checked, device, alive)
    is_result_wrong = is_wrong(err, err_ratio)
    answer = {
        "op": bound.op,
        "kernel": bound.kernel,
        "err": err,
        "status": "wrong" if is_result_wrong else "ok",
        "config": bound.config,
        "flops": case.flops,
        "bytes": case.moved_bytes,
    }
    if is_result_wrong:
        return answer, None
    calls = _calls_on_copies(bound, checked, device, options, alive)
    timer = device.timer(
        lambda call, _: call[0](),  # type: ignore[operator]
        [(call,) for call in calls],  # type: ignore[misc]
        [()],
        launched=not options.iters,
    )
    return answer, ReadyCase(calls, timer)


def _check_memory(case: Case, device: Device) -> None:
    """Raises UnsupportedError if the case does not fit."""
    needed = needed_bytes(case)
    free = device.available()
    if needed > MEMORY_SHARE * free:
        raise UnsupportedError(
            f"operands, output and reference need {byte_words(needed)}, {byte_words(free)} are available"
        )


def _error_of_one_call(bound: BoundCase, inputs: Inputs, device: Device, alive: Alive) -> float:
    """Share of wrong elements after one call into an output full of NaN."""
    out = bound.make(inputs, inputs.output())()
    alive()
    device.sync()
    err = error_ratio(out.reshape(-1, inputs.case.n), inputs.reference())
    poison([out])  # a later output in this memory must not look right by chance
    alive()
    return err


def _calls_on_copies(
    bound: BoundCase, checked: Inputs, device: Device, options: BenchOptions, alive: Alive
) -> list[Call]:
    """Calls on other operands than the checked ones: enough to exceed the caches, if memory allows.

    For the mean of `iters` calls it is one, as in the FP4 guide.
    """
    timed = Inputs.make(checked.case, device.torch, options.seed, 1)
    out = checked.output()
    size = timed.bytes + out.nbytes
    rotate_bytes = 0 if options.iters else options.rotate_mb << 20 or device.rotate_bytes
    count = count_copies(size, rotate_bytes, room=int(device.available() * COPIES_SHARE) // size)
    calls = [bound.make(timed, out)]
    for _ in range(count - 1):
        calls.append(bound.make(timed.copy(), torch.empty_like(out)))
        alive()
    return calls
