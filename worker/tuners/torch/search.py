"""The operands of a shape for torch's candidates, and the search over these: check, measure, re-rank.

W is stored in the layouts in use, each in copies that timing rotates over. The X that is checked is used in no timed
call: what a candidate leaves unwritten cannot hold an earlier right answer.

The budget is wall time for all of a shape. Each candidate's share of it is the rest of it over the candidates left; a
candidate may use less (it is steady, or hopeless), which the later ones get. RERANK of it is kept for the end.
A candidate that is reached when HARD_LIMIT budgets are used up is not run at all; its row has the status `timeout`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from worker.protocol import Row, Spec, SpecShape, TableKernel, is_wanted, is_wrong
from worker.text import byte_words
from worker.tuners.base import Emit
from worker.tuners.common.device import Device, Operand, Run
from worker.tuners.common.measure import (
    SETTLE_S,
    Measurement,
    Ranking,
    SamplingPolicy,
    Timer,
    leaders,
    measure,
    rerank,
)
from worker.tuners.common.operands import (
    CHUNK_BYTES,
    count_copies,
    draw_bias,
    draw_rows,
    error_ratio,
    generator,
    poison,
    unpack_codes,
    w_exponent,
    widen_rows,
)
from worker.tuners.common.problem import (
    Problem,
    UnsupportedError,
    is_fatal,
    parse,
    row_of,
    status_of,
    why_no_winner,
)
from worker.tuners.torch.spec import Options
from worker.tuners.torch.variants import Candidate, Workspace, op, variants

RERANK = 0.15
MEASURE_AT_LEAST = 0.4  # share of the budget for measuring even if making the inputs took long
HARD_LIMIT = 3
LEADERS, WITHIN = 4, 0.10
TRIES, SLOWER = 3, 1.3  # try a re-rank again if its winner is this many times slower than at first


@dataclass(slots=True)
class Weights:
    """W of a group of shapes, in the layouts in use, each as rotated copies; shared by the group."""

    problem: Problem
    device: torch.device
    master: Operand
    rotate_bytes: int
    available: Callable[[], int]
    _layouts: dict[str, list[Operand]]

    @classmethod
    def make(cls, p: Problem, device: torch.device, rotate_bytes: int, available: Callable[[], int]) -> Weights:
        """Draw W, the same for every M."""
        draw, exponent = generator(device, "W", p.group_key), w_exponent(p.k, mx=p.scale == "mx")
        master = _operand(draw_rows(p.scale, p.dtype, (p.n,), p.k, exponent, draw))
        return cls(p, device, master, rotate_bytes, available, {})

    def layout(self, name: str) -> list[Operand]:
        """The copies of a layout, made on first use. Raises MemoryError."""
        if name not in self._layouts:
            size = layout_bytes(self.problem, name)
            if size * 1.1 > self.available():
                self._layouts.clear()  # those of slower candidates may go; a contender holds its own
            free = self.available()
            if size * 1.1 > free:
                raise MemoryError(f"layout {name} of W needs {byte_words(size)}, {byte_words(free)} are available")
            count = count_copies(size, self.rotate_bytes, room=free // 4 // size)
            first = _stored(self.problem, self.master, name)
            self._layouts[name] = [first] + [tuple(t.clone() for t in first) for _ in range(count - 1)]
        return self._layouts[name]


@dataclass(slots=True)
class Operands:
    """All that the candidates of one shape are run on."""

    problem: Problem
    weights: Weights
    checked: Operand  # X for the check, never timed
    timed: list[Operand]  # X for timing, rotated
    bias: torch.Tensor | None

    @classmethod
    def make(cls, p: Problem, weights: Weights) -> Operands:
        """Draw X (and the bias) by the whole problem."""
        draw = generator(weights.device, "X", p)
        size = max(1, p.x_bytes + p.scale_bytes)
        room = weights.available() // 8 // size
        count = count_copies(size + p.w_bytes, weights.rotate_bytes, room)
        xs = [_operand(draw_rows(p.scale, p.dtype, (p.m,), p.k, 0, draw)) for _ in range(1 + count)]
        bias = draw_bias(p.n, p.dtype, draw) if p.bias else None
        return cls(p, weights, xs[0], xs[1:], bias)

    def reference(self, tick: Callable[[], None]) -> torch.Tensor:
        """[M, N] in float32: both operands dequantised to float32, float32 product, scales, bias."""
        p = self.problem
        out = torch.empty(p.m, p.n, dtype=torch.float32, device=self.weights.device)
        x, step = widen_rows(p.scale, p.k, *self.checked), max(1, CHUNK_BYTES // (4 * p.k))
        for n in range(0, p.n, step):
            rows = (t[n : n + step] for t in self.weights.master)
            out[:, n : n + step] = x @ widen_rows(p.scale, p.k, *rows).t()
            tick()
        return out if self.bias is None else out.add_(self.bias.float())


def needed_bytes(p: Problem) -> int:
    """Least memory of a shape: both operands, output, reference, and a float32 block of W."""
    block = min(4 * p.n * p.k, CHUNK_BYTES + 4 * p.k)
    return p.w_bytes + 2 * p.x_bytes + p.scale_bytes + 4 * p.m * p.k + p.out_bytes + 4 * p.m * p.n + block


def layout_bytes(p: Problem, name: str) -> int:
    """Memory of one copy of a layout of W."""
    dequantised = p.scale != "none" and name in ("bf16", "packed")
    return (2 * p.n * p.k if dequantised else p.w_bytes) + p.scale_bytes


def _operand(drawn: tuple[torch.Tensor, torch.Tensor | None]) -> Operand:
    return tuple(t for t in drawn if t is not None)


def _stored(p: Problem, master: Operand, name: str) -> Operand:
    """W in a layout: `nk` as given (N rows of K), `kn` transposed, `bf16` dequantised, `packed` in oneDNN's own
    blocked order (dequantised too)."""
    if name == "nk":
        return tuple(t.clone() for t in master)
    w, *scale = master
    if p.scale == "row" and name != "kn":
        w = w.to(torch.bfloat16)
    elif p.scale == "mx":  # in blocks, so that the steps between stay small
        pairs = zip(torch.split(w, 512), torch.split(scale[0], 512), strict=True)
        w = torch.cat([unpack_codes(c, s, torch.bfloat16) for c, s in pairs])
    if name == "packed":
        return (op("ops.mkldnn._reorder_linear_weight")(w, None), *scale)
    return (w.t().contiguous() if name == "kn" else w, *scale)


def tune(spec: Spec, options: Options, device: Device, emit: Emit) -> dict[str, float]:
    """Tune the shapes of a spec; seconds by kind. W is kept for the next shape as long as it is the same."""
    start, spent = time.perf_counter(), Spent()
    weights: Weights | None = None
    try:
        with torch.inference_mode():
            for shape in spec.shapes:
                started = time.perf_counter()
                emit.started(shape.id)
                try:
                    p = parse(spec.family, shape.key)
                    if weights is not None and weights.problem.group_key != p.group_key:
                        weights = None
                    with spent.on("inputs"):
                        need, free = needed_bytes(p) - (p.w_bytes if weights else 0), device.available()
                        if need > 0.9 * free:
                            raise UnsupportedError(
                                f"operands, output and reference need {byte_words(needed_bytes(p))},"
                                f" {byte_words(free)} are available"
                            )
                        rotate = options.rotate_mb << 20 or device.rotate_bytes
                        weights = weights or Weights.make(p, device.torch, rotate, device.available)
                        operands = Operands.make(p, weights)
                except UnsupportedError as e:
                    emit.failed(shape.id, "unsupported", str(e))
                    continue
                emit.alive()
                Search(
                    shape, operands, device, options, spec.err_ratio, emit, spent, started, only=spec.only_of(shape.id)
                ).run()
                del operands
    finally:
        device.leave()
    return {**spent, "other": max(0.0, time.perf_counter() - start - sum(spent.values()))}


class Spent(dict[str, float]):
    """Seconds by kind."""

    def __init__(self) -> None:
        super().__init__(inputs=0.0, check=0.0, measure=0.0)

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self[kind] += time.perf_counter() - start


@dataclass(slots=True)
class Contender:
    """A candidate that may win, with its timer for the re-rank."""

    candidate: Candidate
    err: float
    timer: Timer
    measurement: Measurement


class Search:
    """One shape's search. `run` ends with exactly one `tuned` or `failed`."""

    def __init__(
        self,
        shape: SpecShape,
        operands: Operands,
        device: Device,
        options: Options,
        err_limit: float,
        emit: Emit,
        spent: Spent,
        started: float,
        candidates: list[Candidate] | None = None,
        only: Sequence[TableKernel] | None = None,
    ) -> None:
        """`only`: the only kernels to be measured; None: every one."""
        self._shape, self._operands, self._device, self._options = shape, operands, device, options
        self._emit, self._spent, self._err_limit = emit, spent, err_limit
        self._p = operands.problem
        budget = options.budget_s_per_shape
        self._started, self._budget = started, budget
        self._end = max(started + (1 - RERANK) * budget, time.perf_counter() + MEASURE_AT_LEAST * budget)
        self._sustained = device.gpu and self._p.is_sustained
        self._policy = SamplingPolicy(settle_s=SETTLE_S if self._sustained else 0.0)
        if candidates is None:
            of, counts = variants(self._p, device.gpu), device.thread_counts(options.threads)
            candidates = [Candidate(v, t) for i, t in enumerate(counts) for v in of if v.every_count or i == 0]
        self._candidates = [c for c in candidates if is_wanted(only, c.name)]
        self._best = float("inf")
        self._contenders: list[Contender] = []
        self._rows: list[Row] = []

    def run(self) -> None:
        with self._spent.on("check"):
            reference = self._operands.reference(self._emit.alive)
        for i, candidate in enumerate(self._candidates):
            self._emit.alive()
            row = self._try(candidate, reference, len(self._candidates) - i)
            self._rows.append(row)
            self._emit.row(self._shape.id, row)
        if self._contenders:
            self._conclude()
        else:
            self._emit.failed(self._shape.id, *why_no_winner(self._rows, self._err_limit))

    def _try(self, c: Candidate, reference: torch.Tensor, left: int) -> Row:
        """A candidate's row: its time, or why it has none."""
        used = time.perf_counter() - self._started
        if self._contenders and used > HARD_LIMIT * self._budget:
            return self._row(c, "timeout", f"not run: {used:.1f} s of a budget of {self._budget:g} s were used up")
        try:
            return self._check_and_measure(c, reference, left)
        except Exception as e:  # a candidate may raise anything: it is the detail of its row
            if is_fatal(e):
                raise
            return self._row(c, status_of(e), f"{type(e).__name__}: {e}")

    def _check_and_measure(self, c: Candidate, reference: torch.Tensor, left: int) -> Row:
        with self._spent.on("inputs"):
            weights = self._operands.weights.layout(c.variant.layout)
        with self._spent.on("check"):
            workspace = Workspace(self._p, self._device.torch, self._operands.bias, self._device.available())
            run = c.variant.make(workspace)
            self._device.enter(c.threads)
            err, cold = self._check(run, workspace, weights[0], reference)
        if is_wrong(err, self._err_limit):
            return self._row(c, "wrong", f"{err:.4f} of the elements are off; {self._err_limit:g} may be", err)
        now = time.perf_counter()
        share = max(0.01, (self._end - now) / left)
        if cold > share and cold * 1e6 > 10 * self._best:
            remark = "one call, the checked one: more than ten times the best so far"
            return self._row(c, "ok", remark, err, Measurement(cold * 1e6, 0.0, 1, 1, "hopeless"))
        timer = self._device.timer(run, self._operands.timed, weights, c.threads)
        with self._spent.on("measure"):
            m = measure(timer, self._policy, share, self._best, tick=self._emit.alive)
        if not m.valid:
            return self._row(c, "error", f"the clock says {m.us} us for a call")
        remark = f"early stop: over {self._policy.hopeless:g} times the best so far" if m.why == "hopeless" else ""
        row = self._row(c, "ok", remark, err, m)
        self._best = min(self._best, m.us)
        self._contenders.append(Contender(c, err, timer, m))
        kept = leaders([x.measurement for x in self._contenders], 2 * WITHIN, 2 * LEADERS, LEADERS)
        self._contenders = [self._contenders[k] for k in kept]  # the rest may free their buffers
        return row

    def _check(self, run: Run, workspace: Workspace, w: Operand, reference: torch.Tensor) -> tuple[float, float]:
        """errRatio and seconds of a first call on poisoned buffers and the X that nothing else uses."""
        poison(workspace.buffers)
        self._device.sync()
        start = time.perf_counter()
        out = run(self._operands.checked, w)
        self._device.sync()
        cold = time.perf_counter() - start
        err = error_ratio(out, reference)
        poison([out])
        return err, cold

    def _conclude(self) -> None:
        """Rank the leaders and report the winner, with its time of the re-rank."""
        kept = leaders([x.measurement for x in self._contenders], WITHIN, LEADERS)
        best = [self._contenders[k] for k in kept]
        measured = [b.measurement for b in best]
        rng = random.Random(repr(self._shape.key))
        tries: list[Ranking] = []
        with self._spent.on("measure"):
            while len(tries) < TRIES:
                left = self._started + self._budget - time.perf_counter()
                v = rerank(
                    [b.timer for b in best],
                    measured,
                    [b.candidate.simplicity for b in best],
                    rng,
                    max(left, RERANK * self._budget),
                    tick=self._emit.alive,
                    sustained=self._sustained,
                    again=self._options.again,
                )
                tries.append(v)
                if v.us[v.winner] <= SLOWER * best[v.winner].measurement.us:
                    break
        v = min(tries, key=lambda t: t.us[t.winner])
        first = best[v.winner]
        m = replace(first.measurement, us=v.us[v.winner], spread=v.spread[v.winner], samples=v.rounds)
        row = self._row(first.candidate, "ok", _story(best, v), first.err, m)
        won = row if v.margin is None else {**row, "margin": round(v.margin, 2)}
        self._emit.tuned(self._shape.id, won, candidate=(first.candidate.name,))

    def _row(self, c: Candidate, status: str, detail: str, err: float = 1.0, m: Measurement | None = None) -> Row:
        """A candidate's row; without a measurement it has no time."""
        us, spread, samples = (m.us, m.spread, m.samples) if m else (-1.0, 0.0, 0)
        split = c.variant.split_k
        return row_of(self._p, "torch", c.name, c.kernel_id, split, status, us, err, spread, samples, detail)


def _story(best: list[Contender], v: Ranking) -> str:
    """Summary of the re-rank: rounds, and the contenders' times."""
    others = [
        f"{b.candidate.name} {v.us[i]:.4g} us" + (" (tied)" if i in v.tied else "")
        for i, b in enumerate(best)
        if i != v.winner
    ]
    return f"re-rank of {len(best)}, {v.rounds} rounds" + (": next " + ", ".join(others) if others else "")
