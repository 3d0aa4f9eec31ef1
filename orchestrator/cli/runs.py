"""Commands on runs: `gemmfleet resume`, `logs`, `explain`, `runs list` and `runs prune`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.driving import detach as detach_run
from orchestrator.cli.driving import drive_here, replace_inventory
from orchestrator.cli.options import (
    BusyOpt,
    DetachOpt,
    GpuHoursOpt,
    JsonOpt,
    RunArg,
    RunsOpt,
    UntilGainOpt,
    parse_share,
)
from orchestrator.cli.printer import plain, print_page
from orchestrator.command_hints import command
from orchestrator.controller.ended_runs import prunable, remove_leftovers, remove_run
from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, RunConfig, RunPaths, find_run, holder, list_runs
from orchestrator.view.explain import explain as explain_run
from orchestrator.view.run_list import listed_runs
from orchestrator.view.status import state_now
from worker.text import plural

LOOK_S = 0.2
"""Seconds between two looks for new lines of `logs --follow`."""


DAY_S = 86400.0


def resume(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", help="Replace the run's inventory.", metavar="INV")
    ] = None,
    busy: BusyOpt = None,
    until_gain: UntilGainOpt = None,
    gpu_hours: GpuHoursOpt = None,
    json_: JsonOpt = False,
    detach: DetachOpt = False,
) -> Page:
    """Continue a run whose controller died or was interrupted.

    Repeats at most what was in flight.
    """
    paths = find_run(runs, run)
    replace_inventory(paths, inventory)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        was_cancelled = ledger.state == "cancelled"
    RunConfig.change(paths.config, busy=busy, until_gain=parse_share(until_gain), gpu_hours=gpu_hours)
    if was_cancelled:
        print(f"run {paths.run} was cancelled; it goes on with what is left", file=sys.stderr)
    if detach:
        return detach_run(paths)
    return drive_here(paths, json_=json_)


def logs(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    node: Annotated[str | None, typer.Option(help="Only this node.", metavar="N")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends or Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each node to begin with; 0: all.")] = 50,
) -> None:
    """Print the merged log of a run's workers.

    Each line begins with its node and slot.
    """
    paths = find_run(runs, run)
    nodes = sorted(folder.name for folder in paths.nodes.iterdir()) if paths.nodes.is_dir() else []
    if node is not None and node not in nodes:
        raise InputError(f"no node {node!r} in run {paths.run} (there: {', '.join(nodes) or 'none yet'})")
    offsets = Counter[Path]()
    is_alive = True
    while is_alive:
        is_alive = follow and bool(holder(paths.lock))
        for line in _new_lines(paths.logs.glob(f"{node or '*'}.log"), offsets, lines):
            print(line, flush=True)
        lines = 0  # after the first look, every line
        if is_alive:
            time.sleep(LOOK_S)
    if follow:
        print(plain(_how_it_ended(paths)), flush=True)


def _how_it_ended(paths: RunPaths) -> str:
    """Return why `logs --follow` has no more lines: the run's end, or that its controller died before."""
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        recorded_state = ledger.state
    state = state_now(recorded_state, driven=False)
    if state == recorded_state:
        return f"run {paths.run} is {state}"
    hint = command(f"resume {paths.named}")
    return f"the controller of run {paths.run} died; its workers finish what they have. Go on with: {hint}"


def explain(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run; default: the latest.")] = None,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[GROUP]",
            help="Group (g0001), shape (16x1280x8192) or node; default: all failures and delays.",
        ),
    ] = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Explain why a group waits, failed, moved or was split.

    Prints the history of a group, shape or node in sentences with times.
    """
    # `explain g0001`: a single word that matches no run is a group of the latest run
    if run is not None and what is None and not Path(run).is_dir():
        is_run = any(paths.run.startswith(run) for paths in list_runs(runs))
        if not is_run:
            run, what = None, run
    explanation = explain_run(find_run(runs, run), what)
    page = Page(explanation.to_json())
    page.line(*explanation.lines())
    return page


def _new_lines(files: Iterable[Path], offsets: Counter[Path], most: int) -> Iterator[str]:
    """Yield the whole lines behind the `offsets` of growing `logs/<node>.log` files, of each the last `most` (0: all).

    Each line begins with its node and is safe for a terminal.
    """
    for path in sorted(files):
        with path.open("rb") as f:
            f.seek(offsets[path])
            data = f.read()
        whole_lines = data[: data.rfind(b"\n") + 1]
        offsets[path] += len(whole_lines)
        for line in whole_lines.decode("utf-8", "replace").splitlines()[-most:]:
            yield f"{path.stem} {plain(line)}"


def list_all_runs(runs: RunsOpt = DEFAULT_RUNS) -> Page:
    """List the runs, oldest first."""
    found = listed_runs(runs)
    page = Page([summary.to_json() for summary in found])
    rows = []
    for summary in found:
        counts = [summary.counts.tuned, summary.counts.skipped, summary.counts.failed, summary.counts.total]
        rows.append((summary.run, summary.state, *map(str, counts), summary.family, summary.source))
    numeric = ("done", "skipped", "failed", "of")
    page.table(("run", "state", *numeric, "family", "shapes"), rows, "run", right=numeric, most=len(found))
    if not found:
        page.line(f"no runs in {runs}/")
    return page


def prune(
    runs: RunsOpt = DEFAULT_RUNS,
    keep: Annotated[int, typer.Option(min=0, help="Finished runs to keep, newest first.")] = 10,
    older: Annotated[float, typer.Option(min=0, help="Only runs older than this.", metavar="DAYS")] = 0.0,
    also_unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also remove interrupted and cancelled runs.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; otherwise only list them.")] = False,
) -> None:
    """Remove old runs here and their folders on the nodes.

    A run with a live controller is never removed.
    """
    if yes:
        remove_leftovers(runs)
    old = prunable(runs, keep=keep, older_s=older * DAY_S, unfinished=also_unfinished, now=time.time())
    page = Page()
    for summary in old:
        if yes:
            page.line(*(f"! {trouble}" for trouble in remove_run(summary.paths)))
        done = f"({summary.state}, {plural(summary.counts.tuned, 'shape')} done)"
        page.line(f"{'removed' if yes else 'would remove'} {summary.run} {done}")
    if not old:
        page.line("nothing to remove")
    elif not yes:
        page.line("run it again with --yes to remove them")
    print_page(page)
