"""status, logs, explain: the commands that snapshot at a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import DEFAULT_RUNS, JsonOpt, RunArg, RunsOpt


def status(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until the run ends or Ctrl-C.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.5, help="Seconds that a node may take to answer.", metavar="SECONDS")
    ] = 4.5,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="With --folder: the nodes to ask.")
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder", metavar="PATH", help="Jobs started by hand: their folder on the nodes, without a run."
        ),
    ] = None,
    limit: Annotated[
        str | None, typer.Option("--limit", metavar="LABEL", help="With --folder: only nodes with this label or name.")
    ] = None,
    json_: JsonOpt = False,
) -> None:
    """Show shapes, nodes, progress and expected end of a run.

    Polls every node: what each slot measures now, GPU use and health, the last log lines, the result files.
    """
    from orchestrator.errors import InputError

    if folder is not None:
        from orchestrator.cli.output.folder_status import show_folder

        raise typer.Exit(show_folder(inventory, folder, run, limit, timeout, watch=watch, json_=json_))
    if inventory is not None or limit is not None:
        raise InputError("-i and --limit belong to --folder PATH: a run knows its own nodes")
    from orchestrator.paths import find_run
    from orchestrator.run.snapshot import polled_status, to_json

    paths = find_run(runs, run)
    if json_:
        print(to_json(polled_status(paths, timeout)))
        return
    from orchestrator.cli.output.tables import show_status, watch_status

    if watch:
        watch_status(paths, timeout)
    else:
        show_status(paths, timeout)


def logs(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    node: Annotated[str | None, typer.Option(help="Only this node.", metavar="N")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run ends or Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Begin with the last lines of each node; 0: all.")
    ] = 50,
) -> None:
    """Print the merged log of a run's workers.

    Each line begins with its node and slot.
    """
    from orchestrator.cli.output.log_tail import LogTail
    from orchestrator.dispatch.control import holder
    from orchestrator.errors import InputError
    from orchestrator.paths import find_run

    paths = find_run(runs, run)
    tail = LogTail(paths.logs, node)
    nodes = sorted(p.name for p in paths.nodes.iterdir()) if paths.nodes.is_dir() else []
    if node is not None and node not in nodes:
        raise InputError(f"no node {node!r} in run {paths.run} (there: {', '.join(nodes) or 'none yet'})")
    for line in tail.last(lines):
        print(line)
    while follow:
        alive = bool(holder(paths.lock))
        for line in tail.more():
            print(line, flush=True)
        if not alive:
            return
        time.sleep(0.2)


def explain(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run; default: the latest.")] = None,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[GROUP]",
            help="A group (g0001), shape (16x1280x8192) or node; default: all that did not go well.",
        ),
    ] = None,
    runs: RunsOpt = DEFAULT_RUNS,
    json_: JsonOpt = False,
) -> None:
    """Explain why a group waits, failed, moved or was split.

    Prints the history of a group, shape or node in sentences with times.
    """
    import json

    from orchestrator.cli.output.live_view import plain
    from orchestrator.paths import find_run, list_runs
    from orchestrator.run.explain import explain as tell

    # `explain g0001`: one word that is no run is a group of the latest run
    if run is not None and what is None and not any(p.run.startswith(run) for p in list_runs(Path(runs))):
        run, what = None, run
    story = tell(find_run(runs, run), what)
    if json_:
        print(json.dumps(story.to_json(), indent=1))
        return
    for line in story.lines():
        print(plain(line, 2000))
