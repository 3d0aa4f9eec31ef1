"""One backend on one shape: right first, then timed on operands that do not sit in a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from worker.bench.backends.inputs import Inputs, needed_bytes
from worker.bench.backends.interface import Backend, BoundCase, Call
from worker.bench.case import Case
from worker.bench.options import Options
from worker.tuners.common.check import error_ratio, poison
from worker.tuners.common.device import Device
from worker.tuners.common.measure import SamplingPolicy, Timer, measure
from worker.tuners.common.operands import copies
from worker.tuners.common.problem import UnsupportedError

POLICY = SamplingPolicy(min_samples=5, max_samples=51, target=0.005)
Alive = Callable[[], None]


@dataclass(slots=True)
class Prepared:
    """A case that was run once and compared with the reference; `timer` is there where it is right."""

    case: Case
    bound: BoundCase
    err: float
    status: str
    calls: list[Call]
    timer: Timer | None = None

    @property
    def timed(self) -> bool:
        return self.bound.timed

    def as_answer(self) -> dict[str, Any]:
        """Fields of the answer to `prepare`."""
        c, b = self.case, self.bound
        return {
            "op": b.op, "kernel": b.kernel, "detail": b.detail, "timed": b.timed, "err": self.err,
            "status": self.status, "flops": c.flops, "bytes": c.moved_bytes,
        }  # fmt: skip

    def sample(self, seconds: float, alive: Alive) -> dict[str, Any]:
        """One run: the median of many calls."""
        assert self.timer is not None
        found = measure(self.timer, POLICY, seconds, tick=alive)
        return {"us": found.us, "spread": found.spread, "samples": found.samples}

    def run(self, warmup: int, calls: int) -> None:
        """So many calls round the copies, for a profiler that watches."""
        for i in range(warmup + calls):
            self.calls[i % len(self.calls)]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def prepare(case: Case, backend: Backend, device: Device, options: Options, err_ratio: float, alive: Alive) -> Prepared:
    """Inputs, one call into an output full of NaN, the comparison; then the copies for timing.

    Raises UnsupportedError, UnavailableError and what the backend raises.
    """
    need, free = needed_bytes(case), device.available()
    if need > 0.9 * free:
        raise UnsupportedError(f"operands, output and reference need {need} bytes, {free} are available")
    first = Inputs.make(case, device.torch, options.seed, 0)
    alive()
    bound = backend.bind(case, first)
    call = bound.make(first, first.output())
    out = call()
    alive()
    device.sync()
    err = error_ratio(out.reshape(-1, case.n), first.reference())
    poison([out])
    alive()
    if err > err_ratio or not bound.timed:
        return Prepared(case, bound, err, "wrong" if err > err_ratio else "ok", [])
    del out, call
    calls = _copies(bound, first, device, options, alive)
    mode = device.modes()[0]
    pairs: Any = [(c,) for c in calls]
    timer = device.timer(lambda x, _: _call(x), pairs, [()], mode)
    return Prepared(case, bound, err, "ok", calls, timer)


def _call(x: Any) -> torch.Tensor:
    made: torch.Tensor = x[0]()
    return made


def _copies(bound: BoundCase, checked: Inputs, device: Device, options: Options, alive: Alive) -> list[Call]:
    """Calls on other operands than the checked ones, as many as span what the caches hold, where there is room."""
    timed = Inputs.make(checked.case, device.torch, options.seed, 1)
    out = checked.output()
    size = timed.bytes + out.numel() * out.element_size()
    span = options.rotate_mb << 20 or device.rotate_bytes
    count = max(1, min(copies(size, span), device.available() // 4 // size))
    calls = [bound.make(timed, out)]
    for _ in range(count - 1):
        calls.append(bound.make(timed.copy(), torch.empty_like(out)))
        alive()
    return calls
