"""`gemmfleet gain`: what a run won over the calls of a workload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import RunsOpt
from orchestrator.configs.winners import engine_of_winners
from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, find_run
from orchestrator.results.gain import (
    SUM_ERROR,
    ShapeGain,
    WorkloadGain,
    calls_of_run,
    gain_of_engine,
    gain_of_workload,
    times_before,
)
from orchestrator.shapes.aiter_log import read_calls
from orchestrator.shapes.model import describe
from worker.families import Family
from worker.text import and_more, plural

SUM_OF_CALLS = (
    f"the times of single calls add up to that of a step within {100 * SUM_ERROR:.0f} % (decode steps replayed as CUDA"
    " graphs; one model, one H200)"
)


def gain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id or a prefix of it, or its folder.")],
    workload: Annotated[
        Path | None,
        typer.Option(
            metavar="LOG", help="AITER's log, or a shape list with a column count; default: the run's own shapes."
        ),
    ] = None,
    before: Annotated[
        Path | None, typer.Option(metavar="TABLE", help="Tuned table before; default: what the run's merge met.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds that the workload took in all, or one step.", metavar="S")
    ] = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Sum what a run won over the calls of a workload.

    GEMM time before and after, with its spread: the bound of what can be won end to end.
    """
    paths = find_run(runs, run)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        family = ledger.family
        engine = engine_of_winners(paths.root)
        if before and engine:
            raise InputError(f"--before: leave it out, because the tuner {engine} measured the times before as well")
        calls = read_calls(workload, family) if workload else calls_of_run(paths, ledger)
        if engine:
            won = gain_of_engine(paths.root, calls, family)
        else:
            winners = ledger.winners()
            won = gain_of_workload(winners, calls, times_before(paths, winners, before, family), family)
    if not won.rows:
        fault = (
            f"{paths.run}: none of {plural(len(calls), 'shape')} of {workload or 'the run'} has a time before the run"
        )
        way_out = "give a list of layers and M that it measured" if engine else "name the table of then with --before"
        raise InputError(f"{fault}; {way_out}")
    steps = _steps(won, family)
    is_by_step = workload is None and len(steps) > 1
    if seconds is not None:
        _check_seconds(seconds, steps.values() if is_by_step else [won])
    page = Page(_document(paths.run, won, steps, seconds))
    _add_rows(page, won)
    _add_sum(page, won)
    if is_by_step:
        _add_steps(page, steps, seconds)
    else:
        bound = "" if seconds is None else f": {won.won_us / seconds / 1e6:.2%} of {seconds:g} s"
        page.line(f"end to end at most that{bound}")
    if workload is None:
        page.line(SUM_OF_CALLS)
        if set(calls.values()) == {1.0}:
            page.aside("note: each shape counts once, because the run's list has no other `count`")
    return page


def _check_seconds(seconds: float, parts: Iterable[WorkloadGain]) -> None:
    """Raise InputError if none of the parts, each of which may have run for `seconds`, fits in this time."""
    shortest = min(parts, key=lambda part: part.before_us)
    if not shortest.fits_in(seconds):
        raise InputError(
            f"--seconds {seconds:g}: a step of {1e3 * seconds:g} ms cannot hold these calls, which alone took"
            f" {shortest.before_us / 1e3:.3f} ms; give the seconds in which all of them ran, or the calls of one step"
            " with --workload"
        )


def _document(
    run: str, won: WorkloadGain, steps: Mapping[int, WorkloadGain], seconds: float | None
) -> dict[str, object]:
    """Return the document of --json."""
    by_m = {m: {"before_us": step.before_us, "won_us": step.won_us} for m, step in steps.items()}
    return {
        "run": run,
        "before_us": won.before_us,
        "won_us": won.won_us,
        "sigma_us": won.sigma_us,
        "share": won.won_us / won.before_us,
        "end_to_end": None if seconds is None else won.share_of(seconds),
        "left_out": [describe(key) for key in won.left_out],
        "rows": [{"shape": describe(row.key), **asdict(row), "won_us": row.won_us} for row in won.rows],
        "by_m": by_m,
    }


def _add_rows(page: Page, won: WorkloadGain) -> None:
    """Add the table of shapes."""
    heads = ("shape", "calls", "us before", "us after", "won, ms")
    rows = []
    for row in won.rows:
        us = (f"{row.before_us:.2f}", f"{row.after_us:.2f}")
        rows.append((describe(row.key), f"{row.calls:g}", *us, f"{row.won_us / 1e3:.3f}"))
    page.table(heads, rows, "shape", right=heads[1:])
    if won.left_out:
        shapes = plural(len(won.left_out), "shape")
        names = [describe(key) for key in won.left_out]
        page.line(f"left out, without a time before: {shapes}: {and_more(names, 4)}")


def _add_sum(page: Page, won: WorkloadGain) -> None:
    """Add the sums of all shapes. An engine's tuner keeps no spread."""
    won_ms = f"{won.won_us / 1e3:.3f} ms"
    share = f"{won.won_us / won.before_us:.1%}"
    if won.sigma_us:
        won_ms += f" +- {won.sigma_us / 1e3:.3f} ms"
        share += f" +- {won.sigma_us / won.before_us:.1%}"
    before_ms = f"{won.before_us / 1e3:.3f} ms before"
    page.line(f"GEMM time of {plural(len(won.rows), 'shape')}: {before_ms}, {won_ms} of it won ({share})")


def _steps(won: WorkloadGain, family: Family) -> dict[int, WorkloadGain]:
    """Return the part of each M: one step of a server runs one M."""
    place = family.key_names.index(family.m_column)
    by_m: dict[int, list[ShapeGain]] = {}
    for row in won.rows:
        by_m.setdefault(int(row.key[place]), []).append(row)
    return {m: WorkloadGain(tuple(by_m[m]), ()) for m in sorted(by_m)}


def _add_steps(page: Page, steps: Mapping[int, WorkloadGain], seconds: float | None) -> None:
    """Add the sums of each M, with their share of a step's seconds if its GEMMs fit in them."""
    rows = []
    too_long = []
    for m, step in steps.items():
        share = None if seconds is None else step.share_of(seconds)
        if seconds is not None and share is None:
            too_long.append(str(m))
        bound = "" if share is None else f"{share:.2%}"
        rows.append((str(m), f"{step.before_us / 1e3:.3f}", f"{step.won_us / 1e3:.3f}", bound))
    heads = ("M", "GEMM time before, ms", "won, ms", "" if seconds is None else f"of {seconds:g} s at most")
    page.table(heads, rows, "M", right=heads)
    page.line("one step of a server runs one M: it wins at most what the line of its M says")
    if too_long:
        page.line(f"no share for M {and_more(too_long, 4)}: the GEMMs of such a step take longer than {seconds:g} s")
