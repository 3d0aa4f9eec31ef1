"""`gemmfleet status`: the status of a run, once, live, or as a document."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from typing import Annotated

import typer
from rich.console import Console

from orchestrator.cli.live_view import make_view, summary_line
from orchestrator.cli.options import JsonOpt, RunArg, RunsOpt
from orchestrator.cli.printer import console, plain
from orchestrator.cli.status_rows import describe_rest, needs_look, node_row, shows_nodes, slot_rows
from orchestrator.command_hints import command
from orchestrator.controller.run_snapshot import RunSnapshot, polled_status
from orchestrator.machines.node_poll import Watch, poll
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, RunPaths, find_run, holder
from orchestrator.view.formatting import duration
from orchestrator.view.status import NodeStatus, RunStatus
from worker.text import plural

MOST_NODES = 40
"""Number of nodes above which the others are summed up."""
WIDTH_SINCE = 11
"""Characters of the column `for`: those of `59 min 59 s`. It is wider for a shape that began more than 100 h ago."""
LOOK_S = 0.5
"""Seconds between two looks of `status --watch`."""


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
    paths = find_run(runs, run)
    if json_:
        return Page(polled_status(paths, timeout).to_json())
    if watch:
        watch_status(paths, timeout)
    else:
        show_status(paths, timeout)
    return None


def show_status(paths: RunPaths, limit_s: float) -> None:
    """Print the status of a run: the ledger's at once, each node as it answers, last log lines, result files."""
    snapshot = RunSnapshot(paths)
    status = snapshot.status()
    screen = Screen(status)
    screen.show_run(paths)
    polled = {plan.node for plan in snapshot.plans}
    for node in status.nodes:  # leases: the controller's word is all that we have
        if node.name not in polled:
            screen.show_node(node)
    for answer in poll(snapshot.plans, limit_s):
        screen.show_node(snapshot.add(status, answer))
    screen.show_rest(paths)


class Screen:
    """Prints a status line by line: `show_run`, then `show_node` for each node as it answers, then `show_rest`."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        self._console: Console = console()
        self._shows_nodes = shows_nodes(status.nodes)
        self._shown: list[NodeStatus] = []
        """Nodes with a row. If there are too many slots, those that need a look."""
        name = max([4, *(len(plain(node.name)) for node in status.nodes)])
        since = max([WIDTH_SINCE, *(len(row.since) for node in status.nodes for row in slot_rows(node))])
        done = len(status.done)
        self._form = f"{{:{name}}}  {{:>4}}  {{:15}}  {{:>{done}}}  {{:>6}}  {{:{since}}}  {{:30}}  {{}}"

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(plain(text), style=style, soft_wrap=True)

    def show_run(self, paths: RunPaths) -> None:
        """Print what is known of the run, and the heads of the nodes' rows."""
        status = self._status
        worked = f", worked for {status.worked}" if status.worked else ""
        self._say(f"run {status.run}: {status.state}, {status.family} with {status.tuner}{worked}", "bold")
        self._say(summary_line(status))
        if status.controller:
            self._say(f"driven by {status.controller}")
        elif status.state in ("planned", "interrupted") and status.counts.settled < status.counts.total:
            self._say(f"no controller drives it; continue with: {command(f'resume {paths.named}')}")
        heads = ("node", "slot", "state", status.done, "failed", "for", "GPU now", "measuring now")
        self._say(self._form.format(*heads), "bold")

    def show_node(self, node: NodeStatus) -> None:
        """Print the row or rows of a node. Of many slots, only nodes that need a look."""
        if self._shows_nodes and (len(self._shown) == MOST_NODES or not needs_look(node)):
            return
        self._shown.append(node)
        for row in [node_row(node)] if self._shows_nodes else slot_rows(node):
            self._say(self._form.format(*row))

    def show_rest(self, paths: RunPaths) -> None:
        """Print what stands below the rows: the other nodes, slots that stand out, leases, log lines, files."""
        shown = {node.name for node in self._shown}
        rest = [node for node in self._status.nodes if node.name not in shown]
        if rest:
            self._say(f"{describe_rest(rest)} ({command(f'status {paths.named} --json')} has each)")
        for words in self._status.standing_out:
            self._say(f"! {words}")
        for node in self._shown:
            if node.host and node.state != "ended":
                left = f", {duration(max(0.0, node.ends_at - time.time()))} left" if node.ends_at else ""
                self._say(f"{node.name} is lease {node.lease} on {node.host}{left}", "dim")
            for line in node.log:
                self._say(f"{node.name} {plain(line, 200)}", "dim")
        for file in self._status.files:
            age = duration(time.time() - file["written"])
            self._say(f"{file['path']} ({plural(file['bytes'], 'byte')}, {age} ago)", "dim")


def watch_status(paths: RunPaths, limit_s: float) -> None:
    """Show the status until the run ends or Ctrl-C, polling the nodes all the while.

    A note tells when a node's reachability or a GPU's health changes.
    """
    snapshot = RunSnapshot(paths)
    noted: dict[str, str] = {}
    is_alive = True
    with closing(Watch(snapshot.plans, limit_s)) as watch, closing(make_view(every=0.0, needs_reader=True)) as view:
        while is_alive:
            is_alive = bool(holder(paths.lock))
            status = snapshot.status()
            for answer in watch.answers():
                node = snapshot.add(status, answer)
                health = answer.error or _describe_health(node)
                if health != noted.get(node.name, "answers"):
                    view.note(f"{node.name}: {health}")
                noted[node.name] = health
            view.update(status)
            if is_alive:
                time.sleep(LOOK_S)
    if sys.stdout.isatty():
        show_status(paths, limit_s)


def _describe_health(node: NodeStatus) -> str:
    gpus = (node.live or {}).get("gpus", [])
    return "; ".join(["answers", *(f"GPU {gpu['number']}: {gpu['health']}" for gpu in gpus if gpu["health"] != "ok")])
