"""`gemmfleet gain`: what a run won over the calls of a workload."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import DEFAULT_RUNS, JsonOpt, RunsOpt
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
    json_: JsonOpt = False,
) -> None:
    """Sum what a run won over the calls of a workload.

    GEMM time before and after, with its spread: the bound of what can be won end to end.
    """
    from orchestrator.cli.output.terminal import MOST_ROWS, console, table
    from orchestrator.errors import InputError
    from orchestrator.ledger import LedgerReader
    from orchestrator.paths import RunPaths, find_run
    from orchestrator.results.gain import gain as gain_of
    from orchestrator.results.gain import times_before
    from orchestrator.shapes import describe
    from orchestrator.shapes.writing import read_calls

    paths = RunPaths(Path(run)) if Path(run).is_dir() else find_run(runs, run)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        family = ledger.family
        calls = read_calls(workload, family)
        found = gain_of(ledger, calls, times_before(paths, ledger, before, family), family)
    if not found.rows:
        raise InputError(
            f"{paths.run}: none of {plural(len(calls), 'shape')} of {workload} has a time before the run; name the"
            " table of then with --before"
        )
    share, sigma = found.won_us / found.before_us, found.sigma_us / found.before_us
    bound = found.won_us / seconds / 1e6 if seconds else None
    if json_:
        rows = [{"shape": describe(r.key), **asdict(r), "won_us": r.won_us} for r in found.rows]
        sums = {"before_us": found.before_us, "won_us": found.won_us, "sigma_us": found.sigma_us, "share": share}
        left = [describe(k) for k in found.left_out]
        print(json.dumps({"run": paths.run, **sums, "end_to_end": bound, "rows": rows, "left_out": left}, indent=1))
        return
    t = table("shape", "calls", "us before", "us after", "won, ms", right=("calls", "us before", "us after", "won, ms"))
    for r in found.rows[:MOST_ROWS]:
        t.add_row(describe(r.key), f"{r.calls:g}", f"{r.before_us:.2f}", f"{r.after_us:.2f}", f"{r.won_us / 1e3:.3f}")
    console().print(t)
    if found.left_out:
        names = and_more([describe(k) for k in found.left_out], 4)
        print(f"left out, without a time before: {plural(len(found.left_out), 'shape')}: {names}")
    ms, of = found.won_us / 1e3, found.before_us / 1e3
    won = f"{ms:.3f} ms +- {found.sigma_us / 1e3:.3f} ms of it won ({share:.1%} +- {sigma:.1%})"
    print(f"GEMM time of {plural(len(found.rows), 'shape')}: {of:.3f} ms before, {won}")
    print(f"end to end at most that{f': {bound:.2%} of {seconds:g} s' if bound is not None else ''}")
