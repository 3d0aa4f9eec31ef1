"""The one printer of the command line: what a command found, as text for a person or as one JSON document.

All text is made safe for a terminal here, so that commands need not think of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.errors import OrchestratorError
from orchestrator.tables.textfiles import escaped
from worker.text import plural, uncoloured

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST_ROWS = 40
PIPE_WIDTH = 10_000
"""Columns of output that is no terminal: nothing is wrapped or cut."""
ALL = "all with --json"
Cell = str | tuple[str, str]
"""A text, or (the text, its style)."""


def plain(text: str, limit: int | None = None) -> str:
    """Return text made safe for a terminal: colours are gone, and control characters are written as `\\x1b`.

    Give a `limit` of characters only for names and cells. A sentence may end with a command that the user is to type.
    """
    clean = escaped(uncoloured(text).replace("\t", " ").rstrip())
    return clean if limit is None or len(clean) <= limit else clean[: limit - 3] + "..."


def console() -> Console:
    """Return a console on standard output; wide where that is no terminal, so that nothing is cut in a file."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=wide, no_color=wide is not None or None, highlight=False, markup=False)


def styled(columns: Sequence[str], rows: Iterable[Sequence[Cell]], right: Sequence[str] = ()) -> Table:
    """Return a table without lines; `right`: columns that are aligned right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in columns:
        table.add_column(plain(name), justify="right" if name in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(plain(c)) if isinstance(c, str) else Text(plain(c[0]), style=c[1]) for c in row))
    return table


class Page:
    """The result of a command. --json prints `document`; a person reads the parts that are added, in their order.

    `code` is the exit code; `error` is raised once the page is printed.
    """

    def __init__(self, document: Mapping[str, Any] | Sequence[Any] | None = None, code: int = 0) -> None:
        self.document, self.code = document, code
        self.error: OrchestratorError | None = None
        self._parts: list[str | Table] = []
        self._asides: list[str] = []

    def line(self, *texts: str | Table) -> None:
        """Add sentences, a line each, or tables that are drawn already."""
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
            table = styled(columns, every[:most], right)
            table.caption = caption or None
            self._parts.append(table)
            self._more(len(every) - most, what, more)

    def aside(self, *texts: str) -> None:
        """Add lines for standard error, which a person sees and --json leaves out, because the document has them."""
        self._asides += texts

    def print(self, *, as_json: bool = False) -> None:
        """Print the document, or the text."""
        if as_json:
            print(json.dumps(self.document, indent=1))
            return
        for part in self._parts:
            if isinstance(part, str):
                print(plain(part))
            else:
                console().print(part)
        for text in self._asides:
            print(plain(text), file=sys.stderr)

    def finish(self, *, as_json: bool = False) -> int:
        """Print the document, or the text, and return the exit code. Raises the page's error."""
        self.print(as_json=as_json)
        if self.error is not None:
            raise self.error
        return int(self.code)

    def _more(self, n: int, what: str, more: str) -> None:
        if n > 0:
            self._parts.append(f"... and {plural(n, f'more {what}')} ({more})")
