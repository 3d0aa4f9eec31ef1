"""The result of a command, before anybody prints it: a document for `--json`, and lines and tables for a person.

A command, or a module that knows how a result reads (`results/output.py`), adds lines and tables to a `Page`.
`cli/printer.py` makes text, Markdown or JSON of the page, and makes the text safe for a terminal. Nothing here formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.errors import OrchestratorError
from worker.text import plural

Document = dict[str, Any]
"""A JSON object that a command prints with --json, or a part of it (docs/reference/files.md, commands.md)."""
MOST_ROWS = 40
"""A list or a table shows this many entries, unless the caller names another number."""
ALL = "all with --json"
Cell = str | tuple[str, str]
"""A text, or (the text, its style), such as ("12.3", "bold green")."""


class Grid(NamedTuple):
    """A table of cells. `right`: names of the columns that are aligned right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: Sequence[str]
    caption: str = ""


class Page:
    """The result of a command. --json prints `document`; a person reads `parts`, in their order, and then `asides`.

    `code` is the exit code. `error` is raised after the page is printed.
    """

    def __init__(self, document: Mapping[str, Any] | Sequence[Any] | None = None, code: int = 0) -> None:
        self.document = document
        self.code = code
        self.error: OrchestratorError | None = None
        self.parts: list[str | Grid] = []
        """Lines and tables for standard output."""
        self.asides: list[str] = []
        """Lines for standard error."""

    def line(self, *texts: str) -> None:
        """Add sentences, one per line."""
        self.parts += texts

    def lines(self, texts: Iterable[str], what: str = "row", *, most: int = MOST_ROWS, more: str = ALL) -> None:
        """Add the first lines of a list, and how many more there are of `what`."""
        every = list(texts)
        self.parts += every[:most]
        self._count_rest(len(every) - most, what, more)

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
        every = list(rows)
        if every:
            self.parts.append(Grid(columns, every[:most], right, caption))
            self._count_rest(len(every) - most, what, more)

    def aside(self, *texts: str) -> None:
        """Add lines for standard error. A person sees them; --json leaves them out, because the document has them."""
        self.asides += texts

    def _count_rest(self, n: int, what: str, more: str) -> None:
        if n > 0:
            self.parts.append(f"... and {plural(n, f'more {what}')} ({more})")
