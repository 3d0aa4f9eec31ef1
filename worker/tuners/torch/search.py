"""The search over the candidates of one shape: check, measure, re-rank.

The budget is wall time for all of a shape. Each candidate's share of it is the rest of it over the candidates left; a
candidate may use less (it is steady, or hopeless), which the later ones get. RERANK of it is kept for the end.
A candidate that is reached when HARD_LIMIT budgets are used up is not run at all; its row has the status `timeout`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from worker.protocol import Choice, Row, SpecShape, is_wrong
from worker.tuners.base import Emit
from worker.tuners.common.device import Device, Operand, Run
from worker.tuners.common.measure import (
    RUNNER_UP,
    SETTLE_S,
    Measurement,
    Ranking,
    SamplingPolicy,
    Timer,
    leaders,
    measure,
    rerank,
    sustained,
)
from worker.tuners.common.operands import error_ratio, poison
from worker.tuners.common.rows import ended, is_fatal, ranked_row, row_of, status_of, why_no_winner
from worker.tuners.torch.operands import Operands
from worker.tuners.torch.spec import Options
from worker.tuners.torch.variants import Candidate, TooLargeError, Workspace, expand, variants

RERANK = 0.15
MEASURE_AT_LEAST = 0.4
"""Share of the budget for measuring even where making the inputs took long."""
HARD_LIMIT = 3
LEADERS, WITHIN = 4, 0.10
TRIES, SLOWER = 3, 1.3
"""A re-rank in which the winner is so many times slower than at first met the machine at other work: try again."""


class StageTimes:
    """Seconds by kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - start


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
        self, shape: SpecShape, operands: Operands, device: Device, options: Options, err_limit: float,
        emit: Emit, spent: StageTimes, started: float, candidates: list[Candidate] | None = None,
        only: Choice | None = None,
    ) -> None:  # fmt: skip
        """`only`: the only candidates to be measured, all of which are ranked; None: every one."""
        self._shape, self._operands, self._device, self._options = shape, operands, device, options
        self._emit, self._spent, self._err_limit = emit, spent, err_limit
        self._p = operands.problem
        budget = options.budget_s_per_shape
        self._started, self._budget = started, budget
        self._end = max(started + (1 - RERANK) * budget, time.perf_counter() + MEASURE_AT_LEAST * budget)
        self._sustained = device.gpu and self._p.is_sustained
        self._policy = SamplingPolicy(settle_s=SETTLE_S if self._sustained else 0.0)
        if candidates is None:
            candidates = expand(variants(self._p, device.gpu), device.modes(options.threads))
        self._named = only is not None
        self._candidates = [c for c in candidates if only is None or only.has((c.name,), c.name)]
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
        except TooLargeError as e:
            return self._row(c, "oom", str(e))
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
            self._device.enter(c.mode)
            err, cold = self._check(run, workspace, weights[0], reference)
        if is_wrong(err, self._err_limit):
            return self._row(c, "wrong", f"{err:.4f} of the elements are off; {self._err_limit:g} may be", err)
        now = time.perf_counter()
        share = max(0.01, (self._end - now) / left)
        if cold > share and cold * 1e6 > 10 * self._best:
            remark = "one call, the checked one: more than ten times the best so far"
            return self._row(c, "ok", remark, err, Measurement(cold * 1e6, 0.0, 1, 1, "hopeless"))
        timer = self._device.timer(run, self._operands.timed, weights, c.mode)
        with self._spent.on("measure"):
            m = measure(timer, self._policy, share, self._best, tick=self._emit.alive)
        if not m.valid:
            return self._row(c, "error", f"the clock says {m.us} us for a call")
        remark = f"early stop: over {self._policy.hopeless:g} times the best so far" if m.why == "hopeless" else ""
        row = self._row(c, "ok", remark, err, m)
        self._best = min(self._best, m.us)
        self._contenders.append(Contender(c, err, timer, m))
        if self._named:
            return row
        kept = leaders([x.measurement for x in self._contenders], 2 * WITHIN, 2 * LEADERS, LEADERS, RUNNER_UP)
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
        found = [x.measurement for x in self._contenders]
        kept = range(len(found)) if self._named else leaders(found, WITHIN, LEADERS, runner_up=RUNNER_UP)
        best = [self._contenders[k] for k in kept]
        calls, before = [b.measurement.calls for b in best], list[int]()
        if self._sustained:
            calls, before = sustained([b.measurement.us for b in best])
        rng = random.Random(repr(self._shape.key))
        tries: list[Ranking] = []
        with self._spent.on("measure"):
            while len(tries) < TRIES:
                left = self._started + self._budget - time.perf_counter()
                v = rerank(
                    [b.timer for b in best], calls, [b.candidate.simplicity for b in best], rng,
                    max(left, RERANK * self._budget), tick=self._emit.alive, before=before, again=self._options.again,
                )  # fmt: skip
                tries.append(v)
                if v.us[v.winner] <= SLOWER * best[v.winner].measurement.us:
                    break
        v = min(tries, key=lambda t: t.us[t.winner])
        rows = [
            self._row(
                b.candidate, "ok", _story(best, v) if i == v.winner else "ranked again", b.err,
                replace(b.measurement, us=v.us[i], spread=v.spread[i], samples=v.rounds),
            )
            for i, b in enumerate(best)
        ]  # fmt: skip
        others = sorted((i for i in range(len(best)) if i != v.winner), key=lambda i: v.us[i])
        for i in others if self._named else ():
            self._emit.row(self._shape.id, rows[i])
        self._emit.tuned(
            self._shape.id, ranked_row(rows[v.winner], v.margin), candidate=(best[v.winner].candidate.name,),
            ran=ended(self._rows) if self._named else (),
        )  # fmt: skip

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
