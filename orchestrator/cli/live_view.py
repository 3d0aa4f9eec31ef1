"""The view of a run that goes on: a picture that is redrawn on a terminal, or plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.cli.printer import console, plain
from orchestrator.cli.status_rows import AWAY, StatusRow, describe_rest, needs_look, node_row, shows_nodes, slot_rows
from orchestrator.view.formatting import describe_time_left, describe_uncounted_wait
from orchestrator.view.status import NodeStatus, RunStatus
from worker.text import plural

MAX_LINES = 24
"""Rows of the picture."""
MOST_IN_CELL = 120
"""Characters of the last column of the picture."""
MOST_STANDING_OUT = 4
MOST_DETAILS = 2
"""Details of nodes that are too long for their cell, and are repeated below the table."""


def make_view(every: float = 10.0, *, quiet: bool = False, needs_reader: bool = False) -> RichView | LineView:
    """Return RichView if standard output is a terminal that can be redrawn, else LineView: rich shows nothing on a
    terminal whose TERM is dumb. `quiet` and `needs_reader`: of LineView."""
    can_redraw = sys.stdout.isatty() and not console().is_dumb_terminal
    return RichView() if can_redraw and not quiet else LineView(every, quiet=quiet, needs_reader=needs_reader)


class LineView:
    """One line per event, and a summary at most every `every` seconds. `quiet`: only notes, on standard error.

    A run goes on if nobody reads its lines any more: Ctrl-C ends the `tee` of `tune | tee log` as well, and the run
    must still come to its orderly end. With `needs_reader` BrokenPipeError is raised instead.
    """

    def __init__(self, every: float = 10.0, *, quiet: bool = False, needs_reader: bool = False) -> None:
        self._every = every
        self._quiet = quiet
        self._needs_reader = needs_reader
        self._next = 0.0
        """Time of the monotonic clock before which no summary is printed."""
        self._last = ""

    def update(self, status: RunStatus) -> None:
        line = "" if self._quiet else summary_line(status)
        now = time.monotonic()
        if now >= self._next and line != self._last:
            self._next = now + self._every
            self._last = line
            self._print(line, sys.stdout)

    def note(self, text: str, *, bad: bool = False) -> None:
        line = f"! {plain(text)}" if bad else plain(text)
        self._print(line, sys.stderr if self._quiet else sys.stdout)

    def close(self) -> None:
        """Nothing to close."""

    def _print(self, line: str, stream: TextIO) -> None:
        try:
            print(line, file=stream, flush=True)
        except BrokenPipeError:
            if self._needs_reader:
                raise
            _discard_output(stream)


def _discard_output(broken: TextIO) -> None:
    """From now on throw away what is written into the same pipe as `broken`, which is standard output or error."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if os.path.sameopenfile(stream.fileno(), broken.fileno())]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def summary_line(status: RunStatus) -> str:
    """Return `12/32 shapes tuned, 1 failed, 2 running, 9.1/min, 2 min 05 s left`."""
    counts = status.counts
    parts = [f"{counts.tuned}/{counts.total} shapes {status.done}"]
    for n, state in ((counts.skipped, "skipped"), (counts.failed, "failed"), (counts.running, "running")):
        if n:
            parts.append(f"{n} {state}")
    if status.rate_per_min:
        parts.append(f"{status.rate_per_min:.1f}/min")
    left = _describe_left(status)
    if left:
        parts.append(left)
    return ", ".join(parts)


def _describe_left(status: RunStatus) -> str:
    """Return `2 min 05 s left`, "" if all is settled, the time is not known, or nothing works on it (0)."""
    if not status.eta_s or status.counts.settled >= status.counts.total:
        return ""
    low, high = status.eta_range_s or (status.eta_s, status.eta_s)
    return f"{describe_time_left(low, status.eta_s, high)} left{describe_uncounted_wait(status.waits_for)}"


class RichView:
    """Progress bar and a line per slot, redrawn in place; notes scroll above."""

    def __init__(self) -> None:
        self._console = console()
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._live.start()

    def update(self, status: RunStatus) -> None:
        self._live.update(picture(status))

    def note(self, text: str, *, bad: bool = False) -> None:
        self._console.print(plain(text), style="red" if bad else "dim", soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def picture(status: RunStatus) -> RenderableType:
    """Return the live view of a run: progress, counts, and a row per slot (per node where there are many)."""
    table, more = _table(status.nodes)
    parts: list[RenderableType] = [_progress(status), _counts(status), table]
    long_details = [
        f"{node.name}: {node.detail}" for node in status.nodes if node.state in AWAY and len(node.detail) > MOST_IN_CELL
    ]
    for words in (*status.standing_out[:MOST_STANDING_OUT], *long_details[:MOST_DETAILS]):
        parts.append(Text(f"  ! {plain(words)}", style="red"))
    if more:
        parts.append(Text(f"  ... and {more}", style="dim"))
    return Group(*parts)


def _progress(status: RunStatus) -> Table:
    """Return the first line: the run, its state, a bar, and the number of settled shapes."""
    counts = status.counts
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(
        total=max(1, counts.total), completed=counts.settled, complete_style="green", finished_style="green"
    )
    title = Text.assemble((status.run, "bold"), (f"  {status.state}", "cyan"))
    line.add_row(title, bar, Text(f"{counts.settled}/{counts.total}"))
    return line


def _counts(status: RunStatus) -> Text:
    """Return the second line: `  12 tuned  0 skipped  1 failed  2 running  17 pending  9.1 shapes/min  ...`."""
    counts = status.counts
    line = Text("  ")
    for n, word, style in (
        (counts.tuned, status.done, "green"),
        (counts.skipped, "skipped", "dim"),
        (counts.failed, "failed", "red"),
        (counts.running, "running", "yellow"),
        (counts.pending, "pending", ""),
    ):
        line.append(f"{n} {word}  ", style if n else "dim")
    if status.rate_per_min:
        line.append(f"{status.rate_per_min:.1f} shapes/min  ")
    line.append(_describe_left(status))
    return line


def _table(nodes: Sequence[NodeStatus]) -> tuple[Table, str]:
    """Return the table of slots or nodes, and what it does not show."""
    rows: list[StatusRow]
    more = ""
    if shows_nodes(nodes):
        worst_first = sorted(nodes, key=lambda node: not needs_look(node))
        rows = [node_row(node) for node in worst_first[:MAX_LINES]]
        if len(nodes) > MAX_LINES:
            more = describe_rest(worst_first[MAX_LINES:])
    else:
        rows = [row for node in nodes for row in slot_rows(node)]
        if len(rows) > MAX_LINES:
            more = plural(len(rows) - MAX_LINES, "more slot")
    table = Table(box=None, show_header=True, header_style="dim", padding=(0, 1), expand=True)
    for heading, width in (("node", 16), ("slot", 5), ("state", 12), ("for", 7)):
        table.add_column(heading, no_wrap=True, min_width=min(width, 5), max_width=width)
    has_readings = any(slot.gpu for node in nodes for slot in node.slots)
    table.add_column("GPU now" if has_readings else "", no_wrap=True)
    table.add_column("measuring now", no_wrap=True, ratio=1)
    for row in rows[:MAX_LINES]:
        cells = (plain(row.name, 16), row.slot, row.state, row.since, row.gpu, plain(row.doing, MOST_IN_CELL))
        table.add_row(*map(Text, cells))
    return table, more
