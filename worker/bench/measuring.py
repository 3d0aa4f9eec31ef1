"""The interface of backends, and the measurement of one backend on one shape: it checks the result first, then times
calls on operands that are not in a cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from worker.bench.case import BLOCK8, MX4, PRE4, PRE8, ROW8, ROW16, Case
from worker.protocol import is_wrong
from worker.protocol.bench import Options
from worker.text import byte_words
from worker.tuners.common.device import Device
from worker.tuners.common.measure import SamplingPolicy, Timer, measure
from worker.tuners.common.operands import (
    copies,
    draw_rows,
    error_ratio,
    float_of,
    generator,
    levels,
    poison,
    unpack_codes,
    w_exponent,
    widen_rows,
)
from worker.tuners.common.problem import MX_GROUP, UnsupportedError

KINDS = {
    ROW16: ("none", "none"),
    ROW8: ("row", "row"),
    BLOCK8: ("block", "block"),
    MX4: ("mx", "mx"),
    PRE8: ("none", "tensor"),
    PRE4: ("none", "mx"),
}
"""Kinds of scales of X and of W (Problem.scale), by format."""


@dataclass(slots=True)
class Inputs:
    """One set of operands. In batched families, B is the first dimension of every shape.

    x [M, K] ([M, K/2] bytes for MXFP4), w [N, K] likewise. xs, ws: scales, as a row scale [R, 1] float32, a block scale
    ([M, K/128] and [N/128, K/128]) float32, e8m0 bytes [R, K/32], or one number [1]; None if the format has no scales.
    """

    case: Case
    x: torch.Tensor
    w: torch.Tensor
    xs: torch.Tensor | None = None
    ws: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @classmethod
    def make(cls, case: Case, device: torch.device, seed: int, turn: int) -> Inputs:
        """Draw one set by (seed, case, turn)."""
        draw = generator(device, seed, case, turn)
        x, xs = _operand(case, case.m, 0, draw, is_w=False)
        w, ws = _operand(case, case.n, w_exponent(case.k, mx=case.format in (MX4, PRE4)), draw, is_w=True)
        bias = levels((case.n,), draw).to(float_of(case.dtype)).mul_(2.0**-7) if case.bias else None
        return cls(case, x, w, xs, ws, bias)

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both scales of a format that has them."""
        assert self.xs is not None
        assert self.ws is not None
        return self.xs, self.ws

    def copy(self) -> Inputs:
        """The same values in other memory."""
        return replace(self, **{n: t.clone() for n in ("x", "w", "xs", "ws") if (t := getattr(self, n)) is not None})

    def output(self) -> torch.Tensor:
        """[M, N] ([B, M, N]) filled with NaN."""
        c = self.case
        form = (c.b, c.m, c.n) if c.b else (c.m, c.n)
        return torch.full(form, math.nan, dtype=float_of(c.outdtype), device=self.x.device)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.x, self.w, self.xs, self.ws) if t is not None)

    def reference(self) -> torch.Tensor:
        """[M, N] ([B * M, N]) in float32 from operands widened to float32."""
        c = self.case
        of_x, of_w = KINDS[c.format]
        if not c.b:
            out = _wide(of_x, c.k, self.x, self.xs) @ _wide(of_w, c.k, self.w, self.ws, blocked=True).t()
            return out if self.bias is None else out.add_(self.bias.float())
        xs, ws = ([s] * c.b if s is None or s.dim() == 1 else list(s) for s in (self.xs, self.ws))
        parts = [
            _wide(of_x, c.k, self.x[i], xs[i]) @ _wide(of_w, c.k, self.w[i], ws[i], blocked=True).t()
            for i in range(c.b)
        ]
        return torch.cat(parts)


def needed_bytes(case: Case) -> int:
    """Least memory of a case: operands twice, output, and float32 of everything for the reference."""
    return 2 * case.moved_bytes + 4 * (case.m * case.k + case.n * case.k + max(1, case.b) * case.m * case.n)


def _wide(kind: str, k: int, rows: torch.Tensor, scale: torch.Tensor | None, *, blocked: bool = False) -> torch.Tensor:
    """Rows in float32, scales applied: the meaning of the format, by the plain path."""
    scale = scale[..., 0] if kind == "row" and scale is not None else scale
    return widen_rows(kind, k, rows, scale, blocked=blocked)


def _operand(
    c: Case, rows: int, exponent: int, draw: torch.Generator, *, is_w: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    form = (c.b, rows) if c.b else (rows,)
    if c.format == PRE4 and not is_w:
        codes, scale = draw_rows("mx", c.dtype, form, c.k, exponent, draw)
        assert scale is not None
        flat = unpack_codes(codes.view(-1, c.k // 2), scale.view(-1, c.k // MX_GROUP), torch.bfloat16)
        return flat.view(*form, c.k), None
    if c.format == PRE8 and is_w:
        return levels((*form, c.k), draw), torch.full((1,), 2.0 ** (exponent - 7), device=draw.device)
    kind, dtype = KINDS[c.format][is_w], "bfloat16" if c.format == PRE8 else c.dtype
    made, scale = draw_rows(kind, dtype, form, c.k, exponent, draw, blocked=is_w)
    return made, scale[..., None] if kind == "row" and scale is not None else scale


Call = Callable[[], torch.Tensor]
Alive = Callable[[], None]
POLICY = SamplingPolicy(min_samples=5, max_samples=51, target=0.005)


@dataclass(frozen=True, slots=True)
class BoundCase:
    """A case that a backend can run. `op`: a name that is the same for all dates and stacks, for comparisons. `kernel`:
    the kernel that ran, if known.

    `make(inputs, out)` makes a call on one set of operands. Its preparations (shuffled weights) are not timed. The call
    returns the output: `out`, or a tensor of its own. `config`: the config file, bucket and values that it reads, if
    config sets are compared.
    """

    op: str
    kernel: str
    make: Callable[[Inputs, torch.Tensor], Call]
    config: str = ""


class Backend(Protocol):
    """One implementation of a GEMM."""

    def load(self) -> dict[str, Any]:
        """Import what is needed, once; facts for the record. Raises UnavailableError with the reason."""

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        """The case's call; `first` is a set of operands to try candidates on. Raises UnsupportedError."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case that was right, with calls on operands that are in no cache, and their timer."""

    calls: list[Call]
    timer: Timer

    def sample(self, options: Options, alive: Alive) -> dict[str, Any]:
        """One run: the median of many calls, or, with `iters`, their mean as the FP4 guide takes it."""
        if options.iters:
            self.run(options.warmup)
            us = self.timer(options.iters) / options.iters * 1e6
            return {"us": us, "spread": 0.0, "samples": options.iters}
        found = measure(self.timer, POLICY, options.sample_s, tick=alive)
        return {"us": found.us, "spread": found.spread, "samples": found.samples}

    def run(self, calls: int) -> None:
        """Call the kernel round the copies to the end: a warm-up, or calls for a profiler that watches."""
        for i in range(calls):
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
        raise UnsupportedError(
            f"operands, output and reference need {byte_words(need)}, {byte_words(free)} are available"
        )
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
        "op": bound.op,
        "kernel": bound.kernel,
        "err": err,
        "status": "wrong" if wrong else "ok",
        "config": bound.config,
        "flops": case.flops,
        "bytes": case.moved_bytes,
    }
    if wrong:
        return answer, None
    del out, call
    calls = _copies(bound, first, device, options, alive)
    held: Any = [(call,) for call in calls]
    timer = device.timer(lambda x, _: x[0](), held, [()], launched=not options.iters)  # type: ignore[operator]
    return answer, Prepared(calls, timer)


def _copies(bound: BoundCase, checked: Inputs, device: Device, options: Options, alive: Alive) -> list[Call]:
    """Calls on other operands than the checked ones: enough to exceed the caches, if memory allows; for the plain mean
    one."""
    timed = Inputs.make(checked.case, device.torch, options.seed, 1)
    out = checked.output()
    size = timed.bytes + out.numel() * out.element_size()
    wanted = 1 if options.iters else copies(size, options.rotate_mb << 20 or device.rotate_bytes)
    count = max(1, min(wanted, device.available() // 4 // size))
    calls = [bound.make(timed, out)]
    for _ in range(count - 1):
        calls.append(bound.make(timed.copy(), torch.empty_like(out)))
        alive()
    return calls
