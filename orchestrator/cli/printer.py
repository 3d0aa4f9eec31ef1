"""Prints pages (`orchestrator/pages.py`) of all commands: as text for a person, as Markdown, or as one JSON document.

All text is made safe for a terminal here, so that commands need not do it.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Literal, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.files.faults import escaped
from orchestrator.pages import Cell, Grid, Page
from worker.text import uncoloured

PIPE_WIDTH = 10_000
"""Columns of output that does not go to a terminal. Nothing is wrapped or cut there."""
FOLDED = 16
"""The widest column of a table is folded to this width or more."""
PADDING = 2
"""Columns of a terminal between two columns of a table."""


def plain(text: str, limit: int | None = None) -> str:
    """Return text made safe for a terminal: colours are removed, and control characters are written as `\\x1b`.

    Give a `limit` of characters only for names and cells. A sentence may end with a command for the user to type.
    """
    clean = escaped(uncoloured(text).replace("\t", " ").rstrip())
    if limit is None or len(clean) <= limit:
        return clean
    return clean[: limit - 3] + "..."


def console(to: TextIO | None = None) -> Console:
    """Return a console on `to` (default: standard output). If that is not a terminal, it is wide and cuts nothing."""
    if (to or sys.stdout).isatty():
        return Console(file=to, highlight=False, markup=False)
    return Console(file=to, width=PIPE_WIDTH, no_color=True, highlight=False, markup=False)


def print_page(page: Page, *, as_json: bool = False, to: TextIO | None = None) -> None:
    """Print the page's document, or its text, to `to` (default: standard output)."""
    if as_json:
        print(json.dumps(page.document, indent=1), file=to)
        return
    for part in page.parts:
        if isinstance(part, str):
            print(plain(part), file=to)
        else:
            out = console(to)
            out.print(terminal_table(part, out.width), crop=False)
    for text in page.asides:
        print(plain(text), file=sys.stderr)


def finish_page(page: Page, *, as_json: bool = False) -> int:
    """Print the page's document, or its text, and return the exit code. Raises the page's error."""
    print_page(page, as_json=as_json)
    if page.error is not None:
        raise page.error
    return int(page.code)


def page_as_markdown(page: Page) -> str:
    """Return the page's text as Markdown: the first line is its title."""
    title, *parts = page.parts
    text = f"### {markdown_text(str(title))}\n\n"
    for part in parts:
        if isinstance(part, str):
            text += f"- {markdown_text(part.strip())}\n"
        else:
            text += f"\n{markdown_table(part)}\n"
    return text


def terminal_table(grid: Grid, room: int) -> Table:
    """Return the table for a terminal with `room` columns, without lines. If it is too wide, its widest column is
    folded. If it is still too wide, rows continue on the next line. Nothing is cut."""
    table = Table(box=None, header_style="bold", padding=(0, 1), caption=grid.caption or None)
    widths = [max(len(name), *(len(_text_of(row[i])) for row in grid.rows)) for i, name in enumerate(grid.columns)]
    widest = max(widths)
    least = sum(PADDING + (min(width, FOLDED) if width == widest else width) for width in widths)
    if least > room:
        table.width = least
    for name, width in zip(grid.columns, widths, strict=True):
        justify: Literal["left", "right"] = "right" if name in grid.right else "left"
        table.add_column(plain(name), justify=justify, no_wrap=width < widest, overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(plain(_text_of(cell)), style=_style_of(cell)) for cell in row))
    return table


def _text_of(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell[0]


def _style_of(cell: Cell) -> str:
    return "" if isinstance(cell, str) else cell[1]


def markdown_table(grid: Grid) -> str:
    """Return the table as Markdown; a cell with a style is bold there."""
    lines = [grid.columns, ["---:" if name in grid.right else "---" for name in grid.columns]]
    for row in grid.rows:
        lines.append([_markdown_cell(cell) for cell in row])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _markdown_cell(cell: Cell) -> str:
    text = markdown_text(_text_of(cell))
    return text if isinstance(cell, str) else f"**{text}**"


def markdown_text(text: str) -> str:
    """Return text of a file as plain text in Markdown: neither markup, links, mentions nor HTML."""
    text = escaped(text).replace("&", "&amp;").replace("<", "&lt;").replace("@", "@&#8203;")
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text)
