"""Tables on the terminal: the plan, the status, the results."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.cli.output.live_view import AWAY, doing_words, gpu_words, picture, plain, summary_line
from orchestrator.command_hints import command
from orchestrator.status import NodeStatus, duration

if TYPE_CHECKING:
    from orchestrator.paths import RunPaths
    from orchestrator.planning import Plan
    from orchestrator.run.snapshot import RunSnapshot
    from orchestrator.shapes import Shape
    from worker.families import Family

MOST_ROWS = 40


def console() -> Console:
    """Standard output; wide where it is no terminal, so that nothing is cut in a file."""
    return Console() if sys.stdout.isatty() else Console(width=160, no_color=True, highlight=False)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    t = Table(box=None, header_style="bold", padding=(0, 1))
    for c in columns:
        t.add_column(c, justify="right" if c in right else "left", no_wrap=True)
    return t


def plan_table(plan: Plan, family: Family, shapes: Sequence[Shape]) -> None:
    """Groups with what they share and what they cost, then what each node would do."""
    keys = {s.id: s.key_dict(family) for s in shapes}
    out = console()
    t = table("group", "shapes", family.m_column, "shared key", "cost", right=("shapes", "cost"))
    everywhere = _constant([keys[g.shapes[0]] for g in plan.groups])
    for g in plan.groups[:MOST_ROWS]:
        sizes = [int(keys[i][family.m_column]) for i in g.shapes]
        shared = " ".join(f"{k}={v}" for k, v in keys[g.shapes[0]].items() if k not in (family.m_column, *everywhere))
        span = str(sizes[0]) if len(sizes) == 1 else f"{min(sizes)}..{max(sizes)}"
        t.add_row(g.id, str(len(sizes)), span, shared, f"{g.cost_s:.1f} s")
    out.print(t)
    if len(plan.groups) > MOST_ROWS:
        out.print(f"... and {len(plan.groups) - MOST_ROWS} more groups (all with --json)")
    if everywhere:
        out.print(f"all groups: {' '.join(f'{k}={v}' for k, v in everywhere.items())}", highlight=False)
    n = table("node", "slots", "groups", "shapes", "work", right=("slots", "groups", "shapes", "work"))
    for share in plan.nodes:
        n.add_row(share.node, str(share.slots), str(share.groups), str(share.shapes), duration(share.cost_s))
    out.print(n)
    out.print(f"cost: {plan.cost_source}")


def _constant(keys: Sequence[Mapping[str, int | str]]) -> dict[str, int | str]:
    """The text columns that have the same value in all keys."""
    return {k: v for k, v in keys[0].items() if isinstance(v, str) and all(o[k] == v for o in keys)} if keys else {}


def show_status(paths: RunPaths, limit_s: float) -> None:
    """One picture of a run: the ledger's at once, then each node as it answers, last log lines, result files."""
    from orchestrator.nodes.poll import poll
    from orchestrator.run.snapshot import RunSnapshot

    snapshot = RunSnapshot(paths)
    status, out = snapshot.status(), console()
    took = f", at it for {status.worked}" if status.worked else ""
    out.print(
        f"run {status.run}: {status.state}, {status.family} with {status.tuner}{took}", style="bold", highlight=False
    )
    out.print(summary_line(status), highlight=False)
    if status.controller:
        out.print(f"driven by {status.controller}", highlight=False)
    elif status.state in ("planned", "interrupted") and status.settled < status.total:
        out.print(f"no controller drives it; pick it up with: {command(f'resume {paths.named}')}", highlight=False)
    width = max([4, *(len(plain(n.name)) for n in status.nodes)])
    form = f"{{:{width}}}  {{:>4}}  {{:15}}  {{:>5}}  {{:>6}}  {{:8}}  {{:30}}  {{}}"
    heads = ("node", "slot", "state", "tuned", "failed", "for", "GPU now", "measuring now")
    out.print(form.format(*heads).rstrip(), style="bold", highlight=False, soft_wrap=True)
    for answer in poll(snapshot.plans, limit_s):
        for row in status_rows(snapshot.add(status, answer)):
            out.print(Text(form.format(*row).rstrip()), soft_wrap=True)
    for node in status.nodes:
        for line in node.log:
            out.print(Text(f"{node.name} {plain(line, 200)}", style="dim"))
    for file in status.files:
        age = duration(time.time() - file["written"])
        out.print(f"{file['path']} ({file['bytes']} bytes, {age} ago)", highlight=False, style="dim")


def status_rows(node: NodeStatus) -> list[tuple[str, ...]]:
    """A row a slot; what is to be said of the node stands in the first."""
    rows: list[tuple[str, ...]] = []
    for i, slot in enumerate(node.slots):
        state = node.state if node.state in (*AWAY, "draining", "preparing") else slot.state
        since = duration(time.time() - slot.since) if slot.attempt and slot.since else ""
        name, tuned, failed = (plain(node.name), str(node.tuned), str(node.failed)) if i == 0 else ("", "", "")
        doing = plain(doing_words(node, i), 160)
        rows.append((name, slot.slot, plain(state, 40), tuned, failed, since, gpu_words(slot.gpu), doing))
    return rows or [(plain(node.name), "", node.state, str(node.tuned), str(node.failed), "", "", plain(node.detail))]


def watch_status(paths: RunPaths, limit_s: float) -> None:
    """The picture, renewed twice a second until the run is over or Ctrl-C; the nodes are asked all the while."""
    from rich.live import Live

    from orchestrator.dispatch.control import holder
    from orchestrator.nodes.poll import Watch
    from orchestrator.run.snapshot import RunSnapshot

    snapshot = RunSnapshot(paths)
    if not sys.stdout.isatty():
        _watch_lines(paths, snapshot, limit_s)
        return
    with (
        closing(Watch(snapshot.plans, limit_s)) as watch,
        Live(console=console(), refresh_per_second=4, transient=True) as live,
    ):
        while True:
            alive = bool(holder(paths.lock))
            status = snapshot.status()
            for answer in watch.answers():
                snapshot.add(status, answer)
            live.update(picture(status), refresh=True)
            if not alive:
                break
            time.sleep(0.5)
    show_status(paths, limit_s)


def _watch_lines(paths: RunPaths, snapshot: RunSnapshot, limit_s: float) -> None:
    """A line when the run moved on, and one when a node fell silent, came back, or a GPU's health changed."""
    from orchestrator.dispatch.control import holder
    from orchestrator.nodes.poll import Watch

    last, said = "", dict[str, str]()
    with closing(Watch(snapshot.plans, limit_s)) as watch:
        while True:
            alive = bool(holder(paths.lock))
            status = snapshot.status()
            line = summary_line(status)
            if line != last:
                print(line, flush=True)
            last = line
            for answer in watch.answers():
                node = snapshot.add(status, answer)
                words = answer.error or _health(node)
                if words != said.get(node.name, "answers"):
                    print(f"{plain(node.name)}: {plain(words)}", flush=True)
                said[node.name] = words
            if not alive:
                return
            time.sleep(1.0)


def _health(node: NodeStatus) -> str:
    bad = [f"GPU {g['number']}: {g['health']}" for g in (node.live or {}).get("gpus", []) if g["health"] != "ok"]
    return "; ".join(["answers", *bad])
