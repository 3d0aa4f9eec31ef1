"""Rows of a bench: one a run, one for a backend without a result, and the shape's result. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.bench.options import Options
from worker.protocol import BenchRow
from worker.protocol.repeats import mean_of_runs
from worker.tuners.common.rows import figure


@dataclass(frozen=True, slots=True)
class CaseFacts:
    """Answer of a backend to the preparation of a shape."""

    op: str
    kernel: str
    err: float
    flops: float
    bytes: float
    detail: str = ""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> CaseFacts:
        err, flops, size = (float(answer[n]) for n in ("err", "flops", "bytes"))
        return cls(str(answer["op"]), str(answer["kernel"]), err, flops, size, str(answer.get("detail", "")))


def run_row(env: str, backend: str, run: int, answer: Mapping[str, Any], timer: str, facts: CaseFacts) -> BenchRow:
    """Row of one run."""
    kernel = str(answer.get("kernel") or facts.kernel)
    about = BenchRow(
        run=run, status="ok", spread=round(float(answer["spread"]), 4), samples=int(answer["samples"]),
        detail=facts.detail,
    )  # fmt: skip
    return {**_row(env, backend, kernel, float(answer["us"]), timer, facts), **about}


def failed_row(env: str, backend: str, status: str, detail: str, timer: str, facts: CaseFacts | None) -> BenchRow:
    """Row of a backend without a result for the shape."""
    about = BenchRow(run=0, status=status, spread=0.0, samples=0, detail=detail[:1500])
    return {**_row(env, backend, facts.kernel if facts else backend, -1.0, timer, facts), **about}


def mean_row(env: str, backend: str, values: Sequence[float], options: Options, facts: CaseFacts) -> BenchRow:
    """Row of a shape's result: its fastest backend with the mean of its runs."""
    found = mean_of_runs(values, options.rule)
    detail = f"mean of {found.used} of {found.taken} runs{'' if found.status == 'ok' else ', ' + found.status}"
    about = BenchRow(run=0, status="ok", spread=round(found.spread, 4), samples=found.taken, detail=detail)
    return {**_row(env, backend, facts.kernel, found.us, options.timer, facts), **about}


def _row(env: str, backend: str, kernel: str, us: float, timer: str, facts: CaseFacts | None) -> BenchRow:
    measured = us > 0 and facts is not None
    return BenchRow(
        kernelId=0,
        splitK=0,
        us=round(us, 4),
        kernelName=kernel[:900] or backend,
        libtype=backend,
        tflops=figure(facts.flops / us / 1e6) if measured and facts else 0.0,
        bw=figure(facts.bytes / us / 1e3) if measured and facts else 0.0,
        errRatio=min(1.0, facts.err) if facts else 1.0,
        env=env,
        op=facts.op if facts else "",
        timer=timer,
    )
