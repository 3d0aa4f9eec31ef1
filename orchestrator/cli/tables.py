"""Tables on the terminal: the plan, the status, the results."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.cli.view import picture, plain, summary_line
from orchestrator.status import RunStatus, duration

if TYPE_CHECKING:
    from orchestrator.families import Family
    from orchestrator.paths import RunPaths
    from orchestrator.planning import Plan
    from orchestrator.shapes import Shape

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


def show_status(paths: RunPaths, status: RunStatus) -> None:
    """One picture of a run, with last log lines and result files."""
    out = console()
    out.print(
        f"run {status.run}: {status.state}, {status.family} with {status.tuner}",
        style="bold",
        highlight=False,
    )
    out.print(summary_line(status), highlight=False)
    if status.controller:
        out.print(f"driven by {status.controller}", highlight=False)
    elif status.state in ("planned", "interrupted") and status.settled < status.total:
        out.print(f"no controller drives it; pick it up with: gemmfleet resume {status.run}", highlight=False)
    t = table("node", "slot", "state", "tuned", "failed", "for", "measuring now", right=("tuned", "failed"))
    for node in status.nodes:
        for i, slot in enumerate(node.slots):
            state = node.state if node.state in ("unreachable", "draining", "preparing") else slot.state
            since = duration(time.time() - slot.since) if slot.attempt and slot.since else ""
            first = i == 0
            t.add_row(
                plain(node.name) if first else "", slot.slot, state, str(node.tuned) if first else "",
                str(node.failed) if first else "", since, plain(slot.doing or (node.detail if first else ""), 100),
            )  # fmt: skip
    out.print(t)
    for node in status.nodes:
        for line in node.log:
            out.print(Text(f"{node.name} {plain(line, 200)}", style="dim"))
    files = [p for p in paths.results() if p.exists()]
    for path in files:
        age = duration(time.time() - path.stat().st_mtime)
        out.print(f"{path} ({path.stat().st_size} bytes, {age} ago)", highlight=False, style="dim")


def watch_status(paths: RunPaths) -> None:
    """The picture, renewed twice a second until the run is over or Ctrl-C."""
    from rich.live import Live

    from orchestrator.dispatch.lock import holder
    from orchestrator.survey import survey

    if not sys.stdout.isatty():
        last = ""
        while True:
            alive = bool(holder(paths.lock))
            line = summary_line(survey(paths, poll=False))
            if line != last:
                print(line, flush=True)
            last = line
            if not alive:
                return
            time.sleep(1.0)
    with Live(console=console(), refresh_per_second=4, transient=True) as live:
        while True:
            alive = bool(holder(paths.lock))
            live.update(picture(survey(paths, poll=False)))
            if not alive:
                break
            time.sleep(0.5)
    show_status(paths, survey(paths))
