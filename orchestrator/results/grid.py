"""Tables of texts, for a terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from orchestrator.tables.faults import escaped

MISSING = "-"
_STYLES = {MISSING: "dim", "none": "dim", "regression": "bold red", "boundary": "yellow", "unstable": "magenta",
           "improved": "green", "ignored": "dim"}  # fmt: skip


class Grid(NamedTuple):
    """A table of texts. `left`: columns that are aligned left; `bold`: for each row the column that stands out."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str]
    bold: Sequence[int | None] = ()


def on_terminal(grid: Grid, kept: Iterable[int] | None = None) -> Table:
    """A grid for a terminal, its columns `kept` or all. Only the first column is wrapped, and never cut."""
    out = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    kept = list(range(len(grid.heads)) if kept is None else kept)
    for i in kept:
        justify = "left" if grid.heads[i] in grid.left else "right"
        out.add_column(escaped(grid.heads[i]), justify=justify, no_wrap=i > 0, overflow="fold")  # type: ignore[arg-type]
    for n, row in enumerate(grid.rows):
        out.add_row(*(styled(row[i], bool(grid.bold) and i == grid.bold[n]) for i in kept))
    return out


def styled(text: str, bold: bool) -> Text:
    """A cell for a terminal, in the colour of what it says."""
    other = "bold green" if bold else "bold red" if text.endswith("!") else ""
    return Text(escaped(text), style=_STYLES.get(text, other))


def marked(grid: Grid) -> Iterator[str]:
    """A grid as lines of Markdown, after an empty line; nothing if it has no rows."""
    if grid.rows:
        yield from ("", f"| {' | '.join(map(safe, grid.heads))} |")
        yield f"|{'|'.join('---' if h in grid.left else '---:' for h in grid.heads)}|"
    for n, row in enumerate(grid.rows):
        at = grid.bold[n] if grid.bold else None
        yield f"| {' | '.join(f'**{safe(c)}**' if i == at else safe(c) for i, c in enumerate(row))} |"


def safe(text: str) -> str:
    """Text of a file as plain text in Markdown: neither markup, links, mentions nor HTML."""
    text = escaped(text).replace("&", "&amp;").replace("<", "&lt;").replace("@", "@&#8203;")
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text)
