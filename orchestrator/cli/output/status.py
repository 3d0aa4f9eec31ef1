"""Status of a run on the terminal, once or live."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

from orchestrator.cli.output.node_rows import (
    AWAY,
    MOST_NODES,
    by_node,
    needs_look,
    node_row,
    rest_words,
    status_rows,
)
from orchestrator.cli.output.terminal import console, plain
from orchestrator.command_hints import command
from orchestrator.view.status import NodeStatus, RunStatus
from orchestrator.view.words import duration, left_words
from worker.text import plural

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from orchestrator.paths import RunPaths
    from orchestrator.run.snapshot import RunSnapshot

AGAIN_S = 3.0
"""Time between two polls of a folder with --watch."""
MAX_LINES = 24
"""Lines of the live view."""
MOST_IN_CELL = 120
"""Characters of the last column of the live view."""


class View(Protocol):
    """Display of a run; every method is called from the controller's loop."""

    def update(self, status: RunStatus) -> None:
        """Show the new status (called a few times a second)."""
        ...

    def note(self, text: str, *, bad: bool = False) -> None:
        """Show an event, `bad` where it needs attention."""
        ...

    def close(self) -> None: ...


def make_view() -> View:
    """Return RichView where standard output is a terminal, LineView elsewhere."""
    return RichView() if sys.stdout.isatty() else LineView()


class LineView:
    """One line per event, and a summary at most every `every` seconds."""

    def __init__(self, every: float = 10.0) -> None:
        self._every, self._next, self._last = every, 0.0, ""

    def update(self, status: RunStatus) -> None:
        now = time.monotonic()
        line = summary_line(status)
        if now >= self._next and line != self._last:
            self._next, self._last = now + self._every, line
            print(line, flush=True)

    def note(self, text: str, *, bad: bool = False) -> None:
        print(("! " if bad else "") + plain(text), flush=True)

    def close(self) -> None:
        """Nothing to close."""


def summary_line(s: RunStatus) -> str:
    """Return `12/32 shapes tuned, 1 failed, 2 running, 9.1/min, 2 min 05 s left`."""
    parts = [f"{s.tuned}/{s.total} shapes {s.done}"]
    parts += [f"{n} {word}" for n, word in ((s.skipped, "skipped"), (s.failed, "failed"), (s.running, "running")) if n]
    if s.rate_per_min:
        parts.append(f"{s.rate_per_min:.1f}/min")
    if s.eta_s is not None and s.settled < s.total:
        parts.append(f"{left_of(s)} left")
    return ", ".join(parts)


def left_of(s: RunStatus) -> str:
    """Return the remaining time in words."""
    low, high = s.eta_range_s or (s.eta_s or 0.0, s.eta_s or 0.0)
    return left_words(low, s.eta_s or 0.0, high)


class RichView:
    """Progress bar and a line per slot, redrawn in place; notes scroll above."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console()
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._live.start()

    def update(self, status: RunStatus) -> None:
        self._live.update(picture(status))

    def note(self, text: str, *, bad: bool = False) -> None:
        from rich.text import Text

        self._console.print(Text(plain(text), style="red" if bad else "dim"), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def picture(s: RunStatus) -> RenderableType:
    """Return the live view of a run: progress, counts, and a line per slot (per node where there are many)."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    left = Text(f"{s.run}", style="bold")
    left.append(f"  {s.state}", style="cyan")
    bar = ProgressBar(total=max(1, s.total), completed=s.settled, complete_style="green", finished_style="green")
    head.add_row(left, bar, Text(f"{s.settled}/{s.total}"))
    counts = Text("  ")
    for n, word, style in (
        (s.tuned, s.done, "green"), (s.skipped, "skipped", "dim"), (s.failed, "failed", "red"),
        (s.running, "running", "yellow"), (s.pending, "pending", ""),
    ):  # fmt: skip
        counts.append(f"{n} {word}  ", style=style if n else "dim")
    if s.rate_per_min:
        counts.append(f"{s.rate_per_min:.1f} shapes/min  ")
    if s.eta_s is not None and s.settled < s.total:
        counts.append(f"{left_of(s)} left")
    table = Table(box=None, show_header=True, header_style="dim", padding=(0, 1), expand=True)
    for heading, width in (("node", 16), ("slot", 5), ("state", 12), ("for", 7)):
        table.add_column(heading, no_wrap=True, min_width=min(width, 5), max_width=width)
    table.add_column("GPU now" if any(x.gpu for n in s.nodes for x in n.slots) else "", no_wrap=True)
    table.add_column("measuring now", no_wrap=True, ratio=1)
    if by_node(s.nodes):
        nodes = sorted(s.nodes, key=lambda n: not needs_look(n))
        rows, more = [node_row(n) for n in nodes[:MAX_LINES]], rest_words(nodes[MAX_LINES:])
        more = more if len(nodes) > MAX_LINES else ""
    else:
        rows = [row for node in s.nodes for row in status_rows(node)]
        more = plural(len(rows) - MAX_LINES, "more slot") if len(rows) > MAX_LINES else ""
    for name, slot, state, _, _, since, gpu, doing in rows[:MAX_LINES]:
        table.add_row(plain(name, 16), slot, state, since, gpu, plain(doing, MOST_IN_CELL))
    parts: list[RenderableType] = [head, counts, table]
    parts += [Text(f"  ! {plain(words, 120)}", style="red") for words in s.standing_out[:4]]
    cut = [f"{n.name}: {n.detail}" for n in s.nodes if n.state in AWAY and len(n.detail) > MOST_IN_CELL]
    parts += [Text(f"  ! {plain(words)}", style="red") for words in cut[:2]]
    if more:
        parts.append(Text(f"  ... and {more}", style="dim"))
    return Group(*parts)


def lease_words(node: NodeStatus, now: float) -> str:
    """Return `lease 17 on g1, 41 min left`."""
    left = f", {duration(max(0.0, node.ends_at - now))} left" if node.ends_at else ""
    return plain(f"lease {node.lease} on {node.host}{left}", 120)


def show_status(paths: RunPaths, limit_s: float) -> None:
    """Print the status of a run: the ledger's at once, each node as it answers, last log lines, result files."""
    from rich.text import Text

    from orchestrator.nodes.check import poll
    from orchestrator.run.snapshot import RunSnapshot

    snapshot = RunSnapshot(paths)
    status, out = snapshot.status(), console()
    worked = f", worked for {status.worked}" if status.worked else ""
    out.print(
        f"run {status.run}: {status.state}, {status.family} with {status.tuner}{worked}", style="bold", highlight=False
    )
    out.print(summary_line(status), highlight=False)
    if status.controller:
        out.print(f"driven by {status.controller}", highlight=False)
    elif status.state in ("planned", "interrupted") and status.settled < status.total:
        out.print(f"no controller drives it; continue with: {command(f'resume {paths.named}')}", highlight=False)
    width = max([4, *(len(plain(n.name)) for n in status.nodes)])
    form = f"{{:{width}}}  {{:>4}}  {{:15}}  {{:>{len(status.done)}}}  {{:>6}}  {{:8}}  {{:30}}  {{}}"
    heads = ("node", "slot", "state", status.done, "failed", "for", "GPU now", "measuring now")
    out.print(form.format(*heads).rstrip(), style="bold", highlight=False, soft_wrap=True)
    polled, many, shown = {p.node for p in snapshot.plans}, by_node(status.nodes), list[NodeStatus]()

    def show(node: NodeStatus) -> None:
        if many and (len(shown) == MOST_NODES or not needs_look(node)):
            return
        shown.append(node)
        for row in [node_row(node)] if many else status_rows(node):
            out.print(Text(form.format(*row).rstrip()), soft_wrap=True)

    for node in status.nodes:  # leases: the controller's word is what there is
        if node.name not in polled:
            show(node)
    for answer in poll(snapshot.plans, limit_s):
        show(snapshot.add(status, answer))
    named = {n.name for n in shown}
    if rest := [n for n in status.nodes if n.name not in named]:
        where = command(f"status {paths.named} --json")
        out.print(f"{rest_words(rest)} ({where} has each)", highlight=False, soft_wrap=True)
    for words in status.standing_out:
        out.print(f"! {plain(words, 200)}", highlight=False)
    for node in shown:
        if node.host and node.state != "ended":
            out.print(f"{node.name} is {lease_words(node, time.time())}", highlight=False, style="dim")
        for line in node.log:
            out.print(Text(f"{node.name} {plain(line, 200)}", style="dim"))
    for file in status.files:
        age = duration(time.time() - file["written"])
        out.print(f"{file['path']} ({plural(file['bytes'], 'byte')}, {age} ago)", highlight=False, style="dim")


def watch_status(paths: RunPaths, limit_s: float) -> None:
    """Redraw the status twice a second until the run ends or Ctrl-C, polling the nodes all the while."""
    from rich.live import Live

    from orchestrator.dispatch.control import holder
    from orchestrator.nodes.check import Watch
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
    """Print a line per change of progress, of a node's reachability, or of a GPU's health."""
    from orchestrator.dispatch.control import holder
    from orchestrator.nodes.check import Watch

    last, printed = "", dict[str, str]()
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
                if words != printed.get(node.name, "answers"):
                    print(f"{plain(node.name)}: {plain(words)}", flush=True)
                printed[node.name] = words
            if not alive:
                return
            time.sleep(1.0)


def _health(node: NodeStatus) -> str:
    bad = [f"GPU {g['number']}: {g['health']}" for g in (node.live or {}).get("gpus", []) if g["health"] != "ok"]
    return "; ".join(["answers", *bad])
