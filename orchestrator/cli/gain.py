"""`gemmfleet gain`: what a run won over the calls of a workload."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import RunsOpt
from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, find_run
from orchestrator.results.gain import gain_of_workload, times_before
from orchestrator.shapes.aiter_log import read_calls
from orchestrator.shapes.model import describe
from worker.text import and_more, plural


def gain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id or a prefix of it, or its folder.")],
    workload: Annotated[
        Path, typer.Option(metavar="LOG", help="AITER's log of the workload, or a shape list with a column count.")
    ],
    before: Annotated[
        Path | None, typer.Option(metavar="TABLE", help="Tuned table before; default: what the run's merge met.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds that the workload took in all.", metavar="S")
    ] = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Sum what a run won over the calls of a workload.

    GEMM time before and after, with its spread: the bound of what can be won end to end.
    """
    paths = find_run(runs, run)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        family = ledger.family
        calls = read_calls(workload, family)
        winners = ledger.winners()
        won = gain_of_workload(winners, calls, times_before(paths, winners, before, family), family)
    if not won.rows:
        raise InputError(
            f"{paths.run}: none of {plural(len(calls), 'shape')} of {workload} has a time before the run; name the"
            " table of then with --before"
        )
    share = won.won_us / won.before_us
    end_to_end = won.won_us / seconds / 1e6 if seconds else None
    without_time = [describe(key) for key in won.left_out]
    page = Page(
        {
            "run": paths.run,
            "before_us": won.before_us,
            "won_us": won.won_us,
            "sigma_us": won.sigma_us,
            "share": share,
            "end_to_end": end_to_end,
            "left_out": without_time,
            "rows": [{"shape": describe(row.key), **asdict(row), "won_us": row.won_us} for row in won.rows],
        }
    )
    heads = ("shape", "calls", "us before", "us after", "won, ms")
    rows = [
        (
            describe(row.key),
            f"{row.calls:g}",
            f"{row.before_us:.2f}",
            f"{row.after_us:.2f}",
            f"{row.won_us / 1e3:.3f}",
        )
        for row in won.rows
    ]
    page.table(heads, rows, "shape", right=heads[1:])
    if without_time:
        shapes = plural(len(without_time), "shape")
        page.line(f"left out, without a time before: {shapes}: {and_more(without_time, 4)}")
    won_ms = f"{won.won_us / 1e3:.3f} ms +- {won.sigma_us / 1e3:.3f} ms of it won"
    won_share = f"({share:.1%} +- {won.sigma_us / won.before_us:.1%})"
    before_ms = f"{won.before_us / 1e3:.3f} ms before"
    page.line(f"GEMM time of {plural(len(won.rows), 'shape')}: {before_ms}, {won_ms} {won_share}")
    bound = "" if end_to_end is None else f": {end_to_end:.2%} of {seconds:g} s"
    page.line(f"end to end at most that{bound}")
    return page
