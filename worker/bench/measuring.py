"""Interface of the backends, and one of them on one shape: right first, then timed on operands that are in no cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from worker.bench.case import Case
from worker.bench.inputs import Inputs, needed_bytes
from worker.protocol import is_wrong
from worker.protocol.bench import Options
from worker.tuners.common.device import Device
from worker.tuners.common.measure import SamplingPolicy, Timer, measure
from worker.tuners.common.operands import copies, error_ratio, poison
from worker.tuners.common.problem import UnsupportedError

Call = Callable[[], torch.Tensor]
Alive = Callable[[], None]
POLICY = SamplingPolicy(min_samples=5, max_samples=51, target=0.005)


@dataclass(frozen=True, slots=True)
class BoundCase:
    """A case that a backend can run. `op` is what compares over dates and stacks, `kernel` what ran, as far as known.

    `make(inputs, out)` gives one call on one set of operands; what it prepares (shuffled weights) is not timed. The
    call returns the output, `out` or one of its own.
    `config`: the config file, bucket and values that it reads, where config sets are compared.
    """

    op: str
    kernel: str
    make: Callable[[Inputs, torch.Tensor], Call]
    config: str = ""


class Backend(Protocol):
    """One implementation of a GEMM."""

    def load(self) -> dict[str, Any]:
        """Import what is needed, once; facts for the record. Raises UnavailableError with the reason."""
        ...

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        """The case's call; `first` is a set of operands to try candidates on. Raises UnsupportedError."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case that was right, with calls on operands that are in no cache, and their timer."""

    calls: list[Call]
    timer: Timer

    def sample(self, seconds: float, alive: Alive) -> dict[str, Any]:
        """One run: the median of many calls."""
        found = measure(self.timer, POLICY, seconds, tick=alive)
        return {"us": found.us, "spread": found.spread, "samples": found.samples}

    def run(self, warmup: int, calls: int) -> None:
        """Call the kernel round the copies, for a profiler that watches."""
        for i in range(warmup + calls):
            self.calls[i % len(self.calls)]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def prepare(
    case: Case, backend: Backend, device: Device, options: Options, err_ratio: float, alive: Alive
) -> tuple[dict[str, Any], Prepared | None]:
    """Inputs, one call into an output full of NaN, the comparison; then the copies for timing, where it is right.

    Returns the answer (worker/bench/child.py) and what is to be timed. Raises UnsupportedError, UnavailableError and
    what the backend raises.
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
    wrong = is_wrong(err, err_ratio)
    answer = {
        "op": bound.op, "kernel": bound.kernel, "err": err, "status": "wrong" if wrong else "ok",
        "config": bound.config, "flops": case.flops, "bytes": case.moved_bytes,
    }  # fmt: skip
    if wrong:
        return answer, None
    del out, call
    calls = _copies(bound, first, device, options, alive)
    pairs: Any = [(c,) for c in calls]
    return answer, Prepared(calls, device.timer(_call, pairs, [()]))


def _call(x: Any, _: Any) -> torch.Tensor:
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
