"""Status of a run on the terminal, once or live.

A line is a slot, or a node if there are many slots; nodes that need a look come first.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from orchestrator.cli.printer import console, plain
from orchestrator.command_hints import command
from orchestrator.paths import RunPaths, holder
from orchestrator.view.status import NodeStatus, RunStatus
from orchestrator.view.words import duration, left_words, wait_words
from worker.text import plural

if TYPE_CHECKING:
    from rich.console import RenderableType


MAX_LINES = 24
"""Lines of the live view."""
MOST_IN_CELL = 120
"""Characters of the last column of the live view."""
AWAY = ("unreachable", "slow")
"""States of a node without current data."""
MOST_SLOTS = 128
"""Number of slots above which a line is a node."""
MOST_NODES = 40
"""Number of nodes above which the others are summed up."""
_WELL = ("idle", "busy", "starting")


def make_view(every: float = 10.0, *, quiet: bool = False) -> RichView | LineView:
    """Return RichView if standard output is a terminal, else LineView. `quiet`: only notes, on standard error."""
    return RichView() if sys.stdout.isatty() and not quiet else LineView(every, quiet=quiet)


class LineView:
    """One line per event, and a summary at most every `every` seconds. `quiet`: only notes, on standard error."""

    def __init__(self, every: float = 10.0, *, quiet: bool = False) -> None:
        self._every, self._next, self._last, self._quiet = every, 0.0, "", quiet

    def update(self, status: RunStatus) -> None:
        line, now = "" if self._quiet else summary_line(status), time.monotonic()
        if now >= self._next and line != self._last:
            self._next, self._last = now + self._every, line
            print(line, flush=True)

    def note(self, text: str, *, bad: bool = False) -> None:
        print(("! " if bad else "") + plain(text), file=sys.stderr if self._quiet else sys.stdout, flush=True)

    def close(self) -> None:
        """Nothing to close."""


def summary_line(s: RunStatus) -> str:
    """Return `12/32 shapes tuned, 1 failed, 2 running, 9.1/min, 2 min 05 s left`."""
    c = s.counts
    parts = [f"{c.tuned}/{c.total} shapes {s.done}"]
    parts += [f"{n} {word}" for n, word in ((c.skipped, "skipped"), (c.failed, "failed"), (c.running, "running")) if n]
    if s.rate_per_min:
        parts.append(f"{s.rate_per_min:.1f}/min")
    if s.eta_s is not None and c.settled < c.total:
        parts.append(f"{left_of(s)} left{wait_words(s.waits_for)}")
    return ", ".join(parts)


def left_of(s: RunStatus) -> str:
    """Return the remaining time in words."""
    low, high = s.eta_range_s or (s.eta_s or 0.0, s.eta_s or 0.0)
    return left_words(low, s.eta_s or 0.0, high)


def by_node(nodes: Sequence[NodeStatus]) -> bool:
    """Return whether there are too many slots for a line each."""
    return sum(len(n.slots) for n in nodes) > MOST_SLOTS


def needs_look(node: NodeStatus) -> bool:
    """Return whether something is wrong with a node, a slot or a GPU of it."""
    if node.detail or node.state not in ("ready", "busy", "preparing", "ended"):
        return True
    return any(s.state not in _WELL or (s.gpu or {}).get("health", "ok") != "ok" for s in node.slots)


def node_row(node: NodeStatus) -> tuple[str, ...]:
    """Return the row of a node with all its slots, in the columns of `status_rows`."""
    sick = next((gpu_words(s.gpu) for s in node.slots if (s.gpu or {}).get("health", "ok") != "ok"), "")
    words = ": ".join(filter(None, (_counted(_slot_states([node])), node.detail)))
    name, n = plain(node.name), f"{len(node.slots)}x"
    return (name, n, plain(node.state, 40), str(node.tuned), str(node.failed), "", sick, plain(words))


def rest_words(nodes: Sequence[NodeStatus]) -> str:
    """Return `187 more nodes with 1,496 slots: 1,490 busy, 6 idle; 41,233 tuned, 3 failed`."""
    slots = sum(len(n.slots) for n in nodes)
    of = f"{plural(len(nodes), 'more node')} with {plural(slots, 'slot')}: {_counted(_slot_states(nodes))}"
    return f"{of}; {sum(n.tuned for n in nodes):,} tuned, {sum(n.failed for n in nodes):,} failed"


def _slot_states(nodes: Sequence[NodeStatus]) -> Counter[str]:
    return Counter(_state(n, s.state) for n in nodes for s in n.slots)


def _state(node: NodeStatus, slot: str) -> str:
    return node.state if node.state in (*AWAY, "draining", "preparing") else slot


def _counted(states: Counter[str]) -> str:
    return ", ".join(f"{n:,} {plain(state, 40)}" for state, n in states.most_common())


def status_rows(node: NodeStatus) -> list[tuple[str, ...]]:
    """Return a row per slot; the first one carries what concerns the node."""
    rows: list[tuple[str, ...]] = []
    for i, slot in enumerate(node.slots):
        state = _state(node, slot.state)
        since = duration(time.time() - slot.since) if slot.attempt and slot.since else ""
        name, tuned, failed = (plain(node.name), str(node.tuned), str(node.failed)) if i == 0 else ("", "", "")
        detail = node.detail if i == 0 else ""  # of a node that is away it says more than the shape
        doing = (detail or slot.doing) if node.state in AWAY else (slot.doing or detail)
        doing = plain(doing) if doing == node.detail else plain(doing, 160)
        rows.append((name, slot.slot, plain(state, 40), tuned, failed, since, gpu_words(slot.gpu), doing))
    return rows or [(plain(node.name), "", node.state, str(node.tuned), str(node.failed), "", "", plain(node.detail))]


def gpu_words(gpu: dict[str, Any] | None) -> str:
    """Return `97 %, 12/288 GiB, 68 C`, a fault first; "" where nothing is known."""
    if not gpu:
        return ""
    parts = [] if gpu["health"] == "ok" else [f"! {gpu['health']}"]
    parts += [f"{gpu['use_pct']:.0f} %"] if "use_pct" in gpu else []
    if gpu.get("memory_total"):
        parts.append(f"{gpu.get('memory_used', 0) / 2**30:.0f}/{gpu['memory_total'] / 2**30:.0f} GiB")
    if gpu.get("temperature_c"):
        parts.append(f"{max(gpu['temperature_c'].values()):.0f} C")
    return plain(", ".join(parts), 60)


class RichView:
    """Progress bar and a line per slot, redrawn in place; notes scroll above."""

    def __init__(self) -> None:
        from rich.live import Live

        self._console = console()
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._live.start()

    def update(self, status: RunStatus) -> None:
        self._live.update(picture(status))

    def note(self, text: str, *, bad: bool = False) -> None:
        self._console.print(plain(text), style="red" if bad else "dim", soft_wrap=True)

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
    c = s.counts
    bar = ProgressBar(total=max(1, c.total), completed=c.settled, complete_style="green", finished_style="green")
    head.add_row(Text.assemble((s.run, "bold"), (f"  {s.state}", "cyan")), bar, Text(f"{c.settled}/{c.total}"))
    words = (
        (c.tuned, s.done, "green"), (c.skipped, "skipped", "dim"), (c.failed, "failed", "red"),
        (c.running, "running", "yellow"), (c.pending, "pending", ""),
    )  # fmt: skip
    counts = Text.assemble("  ", *((f"{n} {word}  ", style if n else "dim") for n, word, style in words))
    counts.append(f"{s.rate_per_min:.1f} shapes/min  " if s.rate_per_min else "")
    counts.append(f"{left_of(s)} left{wait_words(s.waits_for)}" if s.eta_s is not None and c.settled < c.total else "")
    table = Table(box=None, show_header=True, header_style="dim", padding=(0, 1), expand=True)
    for heading, width in (("node", 16), ("slot", 5), ("state", 12), ("for", 7)):
        table.add_column(heading, no_wrap=True, min_width=min(width, 5), max_width=width)
    table.add_column("GPU now" if any(x.gpu for n in s.nodes for x in n.slots) else "", no_wrap=True)
    table.add_column("measuring now", no_wrap=True, ratio=1)
    if by_node(s.nodes):
        nodes = sorted(s.nodes, key=lambda n: not needs_look(n))
        rows = [node_row(n) for n in nodes[:MAX_LINES]]
        more = rest_words(nodes[MAX_LINES:]) if len(nodes) > MAX_LINES else ""
    else:
        rows = [row for node in s.nodes for row in status_rows(node)]
        more = plural(len(rows) - MAX_LINES, "more slot") if len(rows) > MAX_LINES else ""
    for name, slot, state, _, _, since, gpu, doing in rows[:MAX_LINES]:
        table.add_row(*map(Text, (plain(name, 16), slot, state, since, gpu, plain(doing, MOST_IN_CELL))))
    cut = [f"{n.name}: {n.detail}" for n in s.nodes if n.state in AWAY and len(n.detail) > MOST_IN_CELL]
    red = [Text(f"  ! {plain(words)}", style="red") for words in (*s.standing_out[:4], *cut[:2])]
    return Group(head, counts, table, *red, *[Text(f"  ... and {more}", style="dim")] * bool(more))


def show_status(paths: RunPaths, limit_s: float) -> None:
    """Print the status of a run: the ledger's at once, each node as it answers, last log lines, result files."""
    from orchestrator.controller.runs import RunSnapshot
    from orchestrator.machines.node_poll import poll

    snapshot, out = RunSnapshot(paths), console()
    status = snapshot.status()

    def say(text: str, style: str | None = None) -> None:
        out.print(plain(text), style=style, soft_wrap=True)

    worked = f", worked for {status.worked}" if status.worked else ""
    say(f"run {status.run}: {status.state}, {status.family} with {status.tuner}{worked}", "bold")
    say(summary_line(status))
    if status.controller:
        say(f"driven by {status.controller}")
    elif status.state in ("planned", "interrupted") and status.counts.settled < status.counts.total:
        say(f"no controller drives it; continue with: {command(f'resume {paths.named}')}")
    width = max([4, *(len(plain(n.name)) for n in status.nodes)])
    form = f"{{:{width}}}  {{:>4}}  {{:15}}  {{:>{len(status.done)}}}  {{:>6}}  {{:8}}  {{:30}}  {{}}"
    say(form.format("node", "slot", "state", status.done, "failed", "for", "GPU now", "measuring now"), "bold")
    polled, many, shown = {p.node for p in snapshot.plans}, by_node(status.nodes), list[NodeStatus]()

    def show(node: NodeStatus) -> None:
        if many and (len(shown) == MOST_NODES or not needs_look(node)):
            return
        shown.append(node)
        for row in [node_row(node)] if many else status_rows(node):
            say(form.format(*row))

    for node in status.nodes:  # leases: the controller's word is what there is
        if node.name not in polled:
            show(node)
    for answer in poll(snapshot.plans, limit_s):
        show(snapshot.add(status, answer))
    named = {n.name for n in shown}
    if rest := [n for n in status.nodes if n.name not in named]:
        say(f"{rest_words(rest)} ({command(f'status {paths.named} --json')} has each)")
    for words in status.standing_out:
        say(f"! {words}")
    for node in shown:
        if node.host and node.state != "ended":
            left = f", {duration(max(0.0, node.ends_at - time.time()))} left" if node.ends_at else ""
            say(f"{node.name} is lease {node.lease} on {node.host}{left}", "dim")
        for line in node.log:
            say(f"{node.name} {plain(line, 200)}", "dim")
    for file in status.files:
        age = duration(time.time() - file["written"])
        say(f"{file['path']} ({plural(file['bytes'], 'byte')}, {age} ago)", "dim")


def watch_status(paths: RunPaths, limit_s: float) -> None:
    """Show the status until the run ends or Ctrl-C, polling the nodes all the while.

    A note tells when a node's reachability or a GPU's health changes.
    """
    from orchestrator.controller.runs import RunSnapshot
    from orchestrator.machines.node_poll import Watch

    snapshot, printed, alive = RunSnapshot(paths), dict[str, str](), True
    with closing(Watch(snapshot.plans, limit_s)) as watch, closing(make_view(every=0.0)) as view:
        while alive:
            alive, status = bool(holder(paths.lock)), snapshot.status()
            for answer in watch.answers():
                node = snapshot.add(status, answer)
                words = answer.error or _health(node)
                if words != printed.get(node.name, "answers"):
                    view.note(f"{node.name}: {words}")
                printed[node.name] = words
            view.update(status)
            time.sleep(0.5 if alive else 0.0)
    if sys.stdout.isatty():
        show_status(paths, limit_s)


def _health(node: NodeStatus) -> str:
    bad = [f"GPU {g['number']}: {g['health']}" for g in (node.live or {}).get("gpus", []) if g["health"] != "ok"]
    return "; ".join(["answers", *bad])
