"""The search over torch's candidates for a shape: each is checked and measured, then the leaders are ranked again.

tuner.py calls `tune` for a spec. operands.py has the operands, variants.py the candidates.

The budget is wall time for all of a shape. Each candidate's share of it is the rest of it over the candidates that
remain; a candidate may use less (it is steady, or hopeless), which the later ones get. RERANK of it is kept for the
end. A candidate that is reached when HARD_LIMIT budgets are used up is not run; its row has the status `timeout`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from worker.protocol import Row, Spec, SpecShape, is_wanted, is_wrong
from worker.text import byte_words
from worker.tuners.base import Emit
from worker.tuners.common.device import Device, Operand, Run
from worker.tuners.common.measure import (
    SETTLE_S,
    Finalist,
    Measurement,
    Ranking,
    SamplingPolicy,
    Timer,
    leaders,
    measure,
    rerank,
)
from worker.tuners.common.operands import error_ratio, poison
from worker.tuners.common.problem import (
    Problem,
    UnsupportedError,
    is_fatal,
    parse,
    row_of,
    status_of,
    why_no_winner,
)
from worker.tuners.torch.operands import Operands, Weights, needed_bytes
from worker.tuners.torch.spec import TorchOptions
from worker.tuners.torch.variants import Candidate, Workspace, candidates_of

RERANK = 0.15
"""Share of the budget that is kept for the re-rank."""
MEASURE_AT_LEAST = 0.4
"""Share of the budget for measuring even if making the inputs took long."""
HARD_LIMIT = 3
"""Budgets after which no further candidate is run."""
MEMORY_SHARE = 0.9
"""Share of the free memory that a shape may need."""
LEADERS = 4
"""Candidates that are ranked again, at most."""
WITHIN = 0.10
"""They are at most this much slower than the fastest."""
TRIES = 3
"""Rankings at most,"""
SLOWER = 1.3
"""while the winner of each is this many times slower than at first: the machine was disturbed."""


def tune(spec: Spec, options: TorchOptions, device: Device, emit: Emit) -> dict[str, float]:
    """Tune the shapes of a spec; seconds by kind. W is kept for the next shape as long as it is the same."""
    start = time.perf_counter()
    spent = Spent()
    weights: Weights | None = None
    try:
        with torch.inference_mode():
            for shape in spec.shapes:
                shape_began = time.perf_counter()
                emit.started(shape.id)
                try:
                    problem = parse(spec.family, shape.key)
                    if weights is not None and weights.problem.group_key != problem.group_key:
                        weights = None  # from here on its memory is free
                    with spent.on("inputs"):
                        _check_memory(problem, device, has_weights=weights is not None)
                        rotate_bytes = options.rotate_mb << 20 or device.rotate_bytes
                        weights = weights or Weights.make(problem, device.torch, rotate_bytes, device.available)
                        operands = Operands.make(problem, weights)
                except UnsupportedError as e:
                    emit.failed(shape.id, "unsupported", str(e))
                    continue
                emit.alive()
                only = spec.only_of(shape.id)
                candidates = candidates_of(problem, device, options.threads)
                wanted = [candidate for candidate in candidates if is_wanted(only, candidate.name)]
                Search(shape, operands, device, options, spec.err_ratio, emit, spent, shape_began).run(wanted)
                del operands
    finally:
        device.leave()
    return {**spent, "other": max(0.0, time.perf_counter() - start - sum(spent.values()))}


def _check_memory(problem: Problem, device: Device, *, has_weights: bool) -> None:
    """Raises UnsupportedError if a shape does not fit. `has_weights`: its W is in memory already."""
    needed = needed_bytes(problem)
    to_allocate = needed - problem.w_bytes if has_weights else needed
    free = device.available()
    if to_allocate > MEMORY_SHARE * free:
        raise UnsupportedError(
            f"operands, output and reference need {byte_words(needed)}, {byte_words(free)} are available"
        )


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
    """One shape's search. `run` is called once, and ends with exactly one `tuned` or `failed`."""

    def __init__(
        self,
        shape: SpecShape,
        operands: Operands,
        device: Device,
        options: TorchOptions,
        err_limit: float,
        emit: Emit,
        spent: Spent,
        began: float,
    ) -> None:
        """`began`: when the work on the shape began (time.perf_counter): the inputs count for the budget."""
        self._shape = shape
        self._operands = operands
        self._problem = operands.problem
        self._device = device
        self._options = options
        self._err_limit = err_limit
        self._emit = emit
        self._spent = spent
        self._began = began
        self._budget = options.budget_s_per_shape
        # all candidates are measured by then
        self._end = max(began + (1 - RERANK) * self._budget, time.perf_counter() + MEASURE_AT_LEAST * self._budget)
        self._is_sustained = device.gpu and self._problem.is_sustained
        self._policy = SamplingPolicy(settle_s=SETTLE_S if self._is_sustained else 0.0)
        self._best_us = float("inf")
        self._contenders: list[Contender] = []
        self._rows: list[Row] = []

    def run(self, candidates: Sequence[Candidate]) -> None:
        with self._spent.on("check"):
            reference = self._operands.reference(self._emit.alive)
        for i, candidate in enumerate(candidates):
            self._emit.alive()
            row = self._try(candidate, reference, remaining=len(candidates) - i)
            self._rows.append(row)
            self._emit.row(self._shape.id, row)
        if self._contenders:
            self._conclude()
        else:
            self._emit.failed(self._shape.id, *why_no_winner(self._rows, self._err_limit))

    def _try(self, candidate: Candidate, reference: torch.Tensor, remaining: int) -> Row:
        """A candidate's row: its time, or why it has none. `remaining`: candidates from this one on."""
        used = time.perf_counter() - self._began
        if self._contenders and used > HARD_LIMIT * self._budget:
            detail = f"not run: {used:.1f} s of a budget of {self._budget:g} s were used up"
            return self._row(candidate, "timeout", detail)
        try:
            return self._check_and_measure(candidate, reference, remaining)
        except Exception as e:  # a candidate may raise anything: it is the detail of its row
            if is_fatal(e):
                raise
            return self._row(candidate, status_of(e), f"{type(e).__name__}: {e}")

    def _check_and_measure(self, candidate: Candidate, reference: torch.Tensor, remaining: int) -> Row:
        with self._spent.on("inputs"):
            weights = self._operands.weights.layout(candidate.variant.layout)
        with self._spent.on("check"):
            workspace = Workspace(self._problem, self._device.torch, self._operands.bias, self._device.available())
            run = candidate.variant.make(workspace)
            self._device.enter(candidate.threads)
            err, first_call_s = self._check(run, workspace, weights[0], reference)
        if is_wrong(err, self._err_limit):
            detail = f"{err:.4f} of the elements are off; {self._err_limit:g} may be"
            return self._row(candidate, "wrong", detail, err)
        share_s = max(0.01, (self._end - time.perf_counter()) / remaining)
        if first_call_s > share_s and first_call_s * 1e6 > 10 * self._best_us:
            detail = "one call, the checked one: more than ten times the best so far"
            first_call = Measurement(first_call_s * 1e6, 0.0, 1, 1, "hopeless")
            return self._row(candidate, "ok", detail, err, first_call)
        timer = self._device.timer(run, self._operands.timed, weights, candidate.threads)
        with self._spent.on("measure"):
            measured = measure(timer, self._policy, share_s, self._best_us, tick=self._emit.alive)
        if not measured.valid:
            return self._row(candidate, "error", f"the clock says {measured.us} us for a call")
        self._best_us = min(self._best_us, measured.us)
        self._keep_leaders(Contender(candidate, err, timer, measured))
        detail = ""
        if measured.why == "hopeless":
            detail = f"early stop: over {self._policy.hopeless:g} times the best so far"
        return self._row(candidate, "ok", detail, err, measured)

    def _keep_leaders(self, newcomer: Contender) -> None:
        """The candidates that may win; the others may free their buffers. Twice as many as are ranked in the end."""
        contenders = [*self._contenders, newcomer]
        measurements = [contender.measurement for contender in contenders]
        self._contenders = [contenders[i] for i in leaders(measurements, 2 * WITHIN, 2 * LEADERS, LEADERS)]

    def _check(self, run: Run, workspace: Workspace, w: Operand, reference: torch.Tensor) -> tuple[float, float]:
        """errRatio and seconds of a first call on poisoned buffers and the X that nothing else uses."""
        poison(workspace.buffers)
        self._device.sync()
        start = time.perf_counter()
        out = run(self._operands.checked, w)
        self._device.sync()
        seconds = time.perf_counter() - start
        err = error_ratio(out, reference)
        poison([out])
        return err, seconds

    def _conclude(self) -> None:
        """Rank the leaders and report the winner, with its time of the re-rank."""
        measurements = [contender.measurement for contender in self._contenders]
        ranked = [self._contenders[i] for i in leaders(measurements, WITHIN, LEADERS)]
        with self._spent.on("measure"):
            ranking = self._rank(ranked)
        best = ranked[ranking.winner]
        us = ranking.us[ranking.winner]
        measured = replace(best.measurement, us=us, spread=ranking.spread[ranking.winner], samples=ranking.rounds)
        row = self._row(best.candidate, "ok", _describe_ranking(ranked, ranking), best.err, measured)
        if ranking.margin is not None:
            row["margin"] = round(ranking.margin, 2)
        self._emit.tuned(self._shape.id, row, candidate=(best.candidate.name,))

    def _rank(self, contenders: Sequence[Contender]) -> Ranking:
        """Rank the leaders, again if the winner is much slower than at first; the ranking with the fastest winner."""
        rng = random.Random(repr(self._shape.key))
        finalists = [
            Finalist(contender.timer, contender.measurement, contender.candidate.simplicity) for contender in contenders
        ]
        rankings: list[Ranking] = []
        while len(rankings) < TRIES:
            remaining_s = self._began + self._budget - time.perf_counter()
            ranking = rerank(
                finalists,
                rng,
                max(remaining_s, RERANK * self._budget),
                tick=self._emit.alive,
                sustained=self._is_sustained,
                again=self._options.again,
            )
            rankings.append(ranking)
            at_first = contenders[ranking.winner].measurement
            if ranking.us[ranking.winner] <= SLOWER * at_first.us:
                break
        return min(rankings, key=lambda ranking: ranking.us[ranking.winner])

    def _row(
        self, candidate: Candidate, status: str, detail: str, err: float = 1.0, measured: Measurement | None = None
    ) -> Row:
        """A candidate's row; without a measurement it has no time."""
        if measured is None:
            measured = Measurement(-1.0, 0.0, 0, 0, "")
        return row_of(
            self._problem,
            "torch",
            candidate.name,
            candidate.kernel_id,
            candidate.variant.split_k,
            status,
            measured.us,
            err,
            measured.spread,
            measured.samples,
            detail,
        )


def _describe_ranking(contenders: Sequence[Contender], ranking: Ranking) -> str:
    """Summary of the re-rank: rounds, and the contenders' times."""
    others = []
    for i, contender in enumerate(contenders):
        if i != ranking.winner:
            tied = " (tied)" if i in ranking.tied else ""
            others.append(f"{contender.candidate.name} {ranking.us[i]:.4g} us{tied}")
    summary = f"re-rank of {len(contenders)}, {ranking.rounds} rounds"
    return f"{summary}: next {', '.join(others)}" if others else summary
