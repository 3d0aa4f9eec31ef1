"""Progress of a running run: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.run.view.status import left_words
from orchestrator.status import NodeStatus, RunStatus, duration
from worker.text import plural, uncoloured

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class View(Protocol):
    """Display of a run; every method is called from the controller's loop."""

    def update(self, status: RunStatus) -> None:
        """Show the new status (called a few times a second)."""
        ...

    def note(self, text: str, *, bad: bool = False) -> None:
        """Show an event, `bad` where it needs attention."""
        ...

    def close(self) -> None: ...


def plain(text: str, limit: int = 400) -> str:
    """Return text from a node made safe for a terminal: without escape sequences and control characters, cut."""
    line = uncoloured(text).replace("\t", " ").strip()
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


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
    parts = [f"{s.tuned}/{s.total} shapes tuned"]
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

        self._console.print(Text(plain(text), style="red" if bad else "dim"))

    def close(self) -> None:
        self._live.stop()


MAX_SLOT_LINES = 24
AWAY = ("unreachable", "slow")
"""States of a node without current data."""


def picture(s: RunStatus) -> RenderableType:
    """Return the live view of a run: progress, counts, and a line per slot."""
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
        (s.tuned, "tuned", "green"), (s.skipped, "skipped", "dim"), (s.failed, "failed", "red"),
        (s.running, "running", "yellow"), (s.pending, "pending", ""),
    ):  # fmt: skip
        counts.append(f"{n} {word}  ", style=style if n else "dim")
    if s.rate_per_min:
        counts.append(f"{s.rate_per_min:.1f} shapes/min  ")
    if s.eta_s is not None and s.settled < s.total:
        counts.append(f"{left_of(s)} left")
    table = Table(box=None, show_header=True, header_style="dim", padding=(0, 1), expand=True)
    for name, width in (("node", 16), ("slot", 5), ("state", 12), ("for", 7)):
        table.add_column(name, no_wrap=True, min_width=min(width, 5), max_width=width)
    table.add_column("GPU now" if any(x.gpu for n in s.nodes for x in n.slots) else "", no_wrap=True)
    table.add_column("measuring now", no_wrap=True, ratio=1)
    lines = 0
    for node in s.nodes:
        for row in _slot_rows(node):
            if lines < MAX_SLOT_LINES:
                table.add_row(*row)
            lines += 1
    parts: list[RenderableType] = [head, counts, table]
    if lines > MAX_SLOT_LINES:
        parts.append(Text(f"  ... and {plural(lines - MAX_SLOT_LINES, 'more slot')}", style="dim"))
    return Group(*parts)


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


def doing_words(node: NodeStatus, i: int) -> str:
    """Return what slot number `i` measures, or why its node does not answer."""
    detail = node.detail if i == 0 else ""
    return (detail or node.slots[i].doing) if node.state in AWAY else (node.slots[i].doing or detail)


def _slot_rows(node: NodeStatus) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for i, slot in enumerate(node.slots):
        state = node.state if node.state in (*AWAY, "draining", "preparing") else slot.state
        since = duration(time.time() - slot.since) if slot.since and slot.attempt else ""
        doing = doing_words(node, i)
        name = plain(node.name, 16) if i == 0 else ""
        rows.append((name, slot.slot, plain(state, 40), since, gpu_words(slot.gpu), plain(doing, 120)))
    return rows or [(plain(node.name, 16), "", node.state, "", "", plain(node.detail, 120))]
