"""`gemmfleet runs`: list runs, and remove old ones."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from orchestrator.cli.options import DEFAULT_RUNS, JsonOpt, RunsOpt


def list_(runs: RunsOpt = DEFAULT_RUNS, json_: JsonOpt = False) -> None:
    """List the runs, oldest first."""
    import json

    from orchestrator.cli.output.terminal import console, table
    from orchestrator.run.prune import summaries

    found = summaries(runs)
    if json_:
        print(json.dumps([s.to_json() for s in found], indent=1))
        return
    if not found:
        print(f"no runs in {runs}/")
        return
    t = table(
        "run",
        "state",
        "tuned",
        "skipped",
        "failed",
        "of",
        "family",
        "shapes",
        right=("tuned", "skipped", "failed", "of"),
    )
    for s in found:
        t.add_row(s.run, s.state, str(s.tuned), str(s.skipped), str(s.failed), str(s.total), s.family, s.shapes)
    console().print(t)


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
    from orchestrator.run.prune import prunable, remove_run

    old = prunable(runs, keep=keep, older_s=older * 86400, unfinished=also_unfinished, now=time.time())
    for s in old:
        if yes:
            for trouble in remove_run(s.paths):
                print(f"! {trouble}")
        print(f"{'removed' if yes else 'would remove'} {s.run} ({s.state}, {s.tuned} tuned)")
    if not old:
        print("nothing to remove")
    elif not yes:
        print("run it again with --yes to remove them")
