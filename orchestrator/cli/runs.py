"""Commands on runs: `gemmfleet resume`, `retry`, `cancel`, `status`, `logs`, `explain`, `report`, `runs`."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import (
    BusyOpt,
    DetachOpt,
    GpuHoursOpt,
    JsonOpt,
    RunArg,
    RunsOpt,
    UntilGainOpt,
)
from orchestrator.cli.printer import plain, print_page
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, RunConfig, find_run, list_runs
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.paths import RunPaths


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
    from orchestrator.cli import tuning
    from orchestrator.ledger.reader import LedgerReader

    paths = find_run(runs, run)
    tuning.replace_inventory(paths, inventory)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        was_cancelled = ledger.state == "cancelled"
    RunConfig.change(paths.config, busy=busy, until_gain=tuning.share_of(until_gain), gpu_hours=gpu_hours)
    if was_cancelled:
        print(f"run {paths.run} was cancelled; it goes on with what is left", file=sys.stderr)
    return tuning.detach(paths) if detach else tuning.drive_here(paths, json_=json_)


def retry(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    reason: Annotated[str | None, typer.Option(help="Only shapes that failed for this reason.")] = None,
    group: Annotated[str | None, typer.Option(help="Only shapes of this group.", metavar="G")] = None,
    noisy: Annotated[bool, typer.Option("--noisy", help="Noisy winners, not failed shapes.")] = False,
    json_: JsonOpt = False,
) -> Page:
    """Queue the failed shapes of a run again, with fresh tries."""
    from orchestrator.cli import tuning

    if noisy and reason is not None:
        raise InputError("--noisy and --reason: a noisy winner did not fail; leave one of them out")
    return tuning.retry(find_run(runs, run), reason=reason, group=group, noisy=noisy, json_=json_)


def cancel(run: RunArg = None, runs: RunsOpt = DEFAULT_RUNS) -> None:
    """Stop a run and its workers; results so far are kept."""
    from orchestrator.cli import tuning

    tuning.cancel(find_run(runs, run))


def status(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    watch: Annotated[bool, typer.Option("--watch", help="Update until the run ends or Ctrl-C.")] = False,
    timeout: Annotated[float, typer.Option(min=0.5, help="Longest time to wait for a node.", metavar="SECONDS")] = 4.5,
    json_: JsonOpt = False,
) -> Page | None:
    """Show shapes, nodes, progress and expected end of a run.

    Polls every node: what each slot measures now, GPU use and health, the last log lines, the result files.
    """
    from orchestrator.cli import screen
    from orchestrator.controller.runs import polled_status

    paths = find_run(runs, run)
    if json_:
        return Page(polled_status(paths, timeout).to_json())
    (screen.watch_status if watch else screen.show_status)(paths, timeout)
    return None


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
    from orchestrator.paths import holder

    paths = find_run(runs, run)
    nodes = sorted(p.name for p in paths.nodes.iterdir()) if paths.nodes.is_dir() else []
    if node is not None and node not in nodes:
        raise InputError(f"no node {node!r} in run {paths.run} (there: {', '.join(nodes) or 'none yet'})")
    at, alive = Counter[Path](), True
    while alive:
        alive = follow and bool(holder(paths.lock))
        for line in _new_lines(paths.logs.glob(f"{node or '*'}.log"), at, lines):
            print(line, flush=True)
        lines = 0
        time.sleep(0.2 if alive else 0.0)
    if follow:
        print(plain(_how_it_ended(paths)), flush=True)


def _how_it_ended(paths: RunPaths) -> str:
    """Return why `logs --follow` has no more lines: the run's end, or that its controller died before."""
    from orchestrator.ledger.reader import LedgerReader
    from orchestrator.view.status import state_now

    with LedgerReader.open_readonly(paths.ledger) as ledger:
        kept = ledger.state
    state = state_now(kept, driven=False)
    if state == kept:
        return f"run {paths.run} is {state}"
    resume = command(f"resume {paths.named}")
    return f"the controller of run {paths.run} died; its workers finish what they have. Go on with: {resume}"


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
    from orchestrator.view.explain import explain as history_of

    # `explain g0001`: a single word that matches no run is a group of the latest run
    if run is not None and what is None and not Path(run).is_dir():
        known = any(p.run.startswith(run) for p in list_runs(runs))
        run, what = (run, None) if known else (None, run)
    history = history_of(find_run(runs, run), what)
    page = Page(history.to_json())
    page.line(*history.lines())
    return page


def _new_lines(files: Iterable[Path], at: Counter[Path], most: int = 0) -> Iterator[str]:
    """Yield the whole lines beyond `at` of growing `logs/<node>.log` files, of each the last `most` (0: all).

    Each line begins with its node and is safe for a terminal.
    """
    for path in sorted(files):
        with path.open("rb") as f:
            f.seek(at[path])
            data = f.read()
        data = data[: data.rfind(b"\n") + 1]
        at[path] += len(data)
        yield from (f"{path.stem} {plain(x)}" for x in data.decode("utf-8", "replace").splitlines()[-most:])


def list_(runs: RunsOpt = DEFAULT_RUNS) -> Page:
    """List the runs, oldest first."""
    from orchestrator.controller.runs import summaries

    found = summaries(runs)
    page = Page([s.to_json() for s in found])
    heads = ("run", "state", "done", "skipped", "failed", "of", "family", "shapes")
    counts = [(s, s.counts) for s in found]
    page.table(heads, (
        (s.run, s.state, str(c.tuned), str(c.skipped), str(c.failed), str(c.total), s.family, s.source)
        for s, c in counts
    ), "run", right=heads[2:6], most=len(found))  # fmt: skip
    page.line(*[f"no runs in {runs}/"] * (not found))
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
    from orchestrator.controller.runs import prunable, remove_run

    old, page = prunable(runs, keep=keep, older_s=older * 86400, unfinished=also_unfinished, now=time.time()), Page()
    for s in old:
        page.line(*(f"! {trouble}" for trouble in (remove_run(s.paths) if yes else ())))
        page.line(f"{'removed' if yes else 'would remove'} {s.run} ({s.state}, {plural(s.counts.tuned, 'shape')} done)")
    if not (old and yes):
        page.line("run it again with --yes to remove them" if old else "nothing to remove")
    print_page(page)


def report(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write the page here; default: report.html in the run's folder.", metavar="F"),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Write no file: show the page live in a browser here, until Ctrl-C."),
    ] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="With --live: port; 0: any free one.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
    json_: JsonOpt = False,
) -> Page | None:
    """Write the page of a run: one HTML file, no server needed.

    With --live: the same page from a server, read-only, updated as the run goes on.
    """
    from orchestrator.report.page import write_report

    paths = find_run(runs, run)
    if live and (out is not None or json_):
        raise InputError("--live writes no file: leave --out and --json out")
    if live:
        _serve(paths, port, open_=open_)
        return None
    file, document = write_report(paths, out)
    about = {"run": document["run"], "state": document["state"], "shapes": document["counts"]}
    page = Page({**about, "file": str(file), "bytes": file.stat().st_size})
    page.line(*document["sentences"], str(file))
    if open_:
        webbrowser.open(file.absolute().as_uri())
    return page


def _serve(paths: RunPaths, port: int, *, open_: bool) -> None:
    from orchestrator.ledger.reader import LedgerReader

    try:
        from orchestrator.report.live import PageServer
    except ModuleNotFoundError as e:
        raise InputError(
            f"--live needs {e.name}, which is not installed: make report ARGS=--live, or"
            f" pip install '.[live]' in a checkout of gemmfleet; {command(f'report {paths.named}')} without"
            " --live does not need it"
        ) from e
    LedgerReader.open_readonly(paths.ledger).close()  # a fault of the ledger is reported before anything listens
    server = PageServer(paths, port)
    print(f"run {paths.run}: {server.url}", flush=True)
    print(
        "for the browser of this machine only; from elsewhere: ssh -L PORT:127.0.0.1:PORT; Ctrl-C ends it", flush=True
    )
    if open_:
        webbrowser.open(server.url)
    try:
        server.run()
    except KeyboardInterrupt:
        print("server ended; the run is not affected")
