"""Prints the results of all commands: as text for a person, as Markdown, or as one JSON document.

All text is made safe for a terminal here, so that commands need not do it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

from orchestrator.errors import OrchestratorError
from orchestrator.files.faults import escaped
from worker.text import plural, uncoloured

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST_ROWS = 40
PIPE_WIDTH = 10_000
"""Columns of output that does not go to a terminal. Nothing is wrapped or cut there."""
FOLDED = 16
"""The widest column of a table is folded to this width or more."""
ALL = "all with --json"
Cell = str | tuple[str, str]
"""A text, or (the text, its style)."""


def plain(text: str, limit: int | None = None) -> str:
    """Return text made safe for a terminal: colours are removed, and control characters are written as `\\x1b`.

    Give a `limit` of characters only for names and cells. A sentence may end with a command for the user to type.
    """
    clean = escaped(uncoloured(text).replace("\t", " ").rstrip())
    return clean if limit is None or len(clean) <= limit else clean[: limit - 3] + "..."


def console(to: TextIO | None = None) -> Console:
    """Return a console on `to` (default: standard output). If that is not a terminal, it is wide and cuts nothing."""
    from rich.console import Console

    wide = None if (to or sys.stdout).isatty() else PIPE_WIDTH
    return Console(file=to, width=wide, no_color=wide is not None or None, highlight=False, markup=False)


class Grid(NamedTuple):
    """A table of cells. `right`: columns that are aligned right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: Sequence[str]
    caption: str = ""

    def styled(self, room: int) -> Table:
        """Return it for a terminal with `room` columns, without lines. If it is too wide, its widest column is folded.
        If it is still too wide, rows continue on the next line. Nothing is cut."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", padding=(0, 1), caption=self.caption or None)
        rows = [[(c, "") if isinstance(c, str) else c for c in row] for row in self.rows]
        widths = [max(len(name), *(len(row[i][0]) for row in rows)) for i, name in enumerate(self.columns)]
        least = sum(2 + (min(w, FOLDED) if w == max(widths) else w) for w in widths)
        table.width = least if least > room else None
        for name, width in zip(self.columns, widths, strict=True):
            justify: Literal["left", "right"] = "right" if name in self.right else "left"
            table.add_column(plain(name), justify=justify, no_wrap=width < max(widths), overflow="fold")
        for row in rows:
            table.add_row(*(Text(plain(text), style=style) for text, style in row))
        return table

    def marked(self) -> str:
        """Return it as Markdown; a cell that is bold on a terminal is bold there."""
        lines = [self.columns, ["---:" if n in self.right else "---" for n in self.columns]]
        for row in self.rows:
            lines.append([safe(c) if isinstance(c, str) else f"**{safe(c[0])}**" for c in row])
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def safe(text: str) -> str:
    """Return text of a file as plain text in Markdown: neither markup, links, mentions nor HTML."""
    text = escaped(text).replace("&", "&amp;").replace("<", "&lt;").replace("@", "@&#8203;")
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text)


class Page:
    """The result of a command. --json prints `document`; a person reads the added parts, in their order.

    `code` is the exit code. `error` is raised after the page is printed.
    """

    def __init__(self, document: Mapping[str, Any] | Sequence[Any] | None = None, code: int = 0) -> None:
        self.document, self.code = document, code
        self.error: OrchestratorError | None = None
        self._parts: list[str | Grid] = []
        self._asides: list[str] = []

    def line(self, *texts: str) -> None:
        """Add sentences, one per line."""
        self._parts += texts

    def lines(self, texts: Iterable[str], what: str = "row", *, most: int = MOST_ROWS, more: str = ALL) -> None:
        """Add the first lines of a list, and how many more there are of `what`."""
        every = list(texts)
        self._parts += every[:most]
        self._more(len(every) - most, what, more)

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Cell]],
        what: str = "row",
        *,
        right: Sequence[str] = (),
        most: int = MOST_ROWS,
        more: str = ALL,
        caption: str = "",
    ) -> None:
        """Add the first rows of a table, and how many more there are of `what`; nothing if there are no rows."""
        if every := list(rows):
            self._parts.append(Grid(columns, every[:most], right, caption))
            self._more(len(every) - most, what, more)

    def aside(self, *texts: str) -> None:
        """Add lines for standard error. A person sees them; --json leaves them out, because the document has them."""
        self._asides += texts

    def print(self, *, as_json: bool = False, to: TextIO | None = None) -> None:
        """Print the document, or the text, to `to` (default: standard output)."""
        if as_json:
            print(json.dumps(self.document, indent=1), file=to)
            return
        for part in self._parts:
            if isinstance(part, str):
                print(plain(part), file=to)
            else:
                out = console(to)
                out.print(part.styled(out.width), crop=False)
        for text in self._asides:
            print(plain(text), file=sys.stderr)

    def markdown(self) -> str:
        """Return the text as Markdown: the first line is its title."""
        title, *parts = self._parts
        lines = (f"- {safe(p.strip())}\n" if isinstance(p, str) else f"\n{p.marked()}\n" for p in parts)
        return f"### {safe(str(title))}\n\n{''.join(lines)}"

    def finish(self, *, as_json: bool = False) -> int:
        """Print the document, or the text, and return the exit code. Raises the page's error."""
        self.print(as_json=as_json)
        if self.error is not None:
            raise self.error
        return int(self.code)

    def _more(self, n: int, what: str, more: str) -> None:
        if n > 0:
            self._parts.append(f"... and {plural(n, f'more {what}')} ({more})")
