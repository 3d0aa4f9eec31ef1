"""Shows text of users' files safely in a message, and collects the faults of a file so that all are told at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from orchestrator.errors import InputError

MAX_FAULTS = 50
"""Most faults that are spelled out; the rest are counted."""
MAX_TEXT = 40
"""Most characters that we show of a user's cell or key."""


def escaped(text: str) -> str:
    """`text` with control characters and bytes that were not UTF-8 written as \\x1b and the like."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(c: str) -> str:
    if "\udc80" <= c <= "\udcff":  # a byte kept by errors="surrogateescape"
        return f"\\x{ord(c) - 0xDC00:02x}"
    return ascii(c)[1:-1]


def shown(text: str, cap: int = MAX_TEXT) -> str:
    """`text` for a message: escaped, cut at `cap` characters, in quotes."""
    cut = escaped(text[:cap]) + ("..." if len(text) > cap else "")
    return f'"{cut}"' if "'" in cut else f"'{cut}'"


def listed(lines: Iterable[str], most: int, indent: str = "  ") -> list[str]:
    """The first lines, indented, and a last line that counts the others."""
    every = list(lines)
    more = [f"{indent}... and {len(every) - most} more"] if len(every) > most else []
    return [*(indent + line for line in every[:most]), *more]


class Faults:
    """The faults of one file in the order in which they were found: `file:line:column: what, and what to do`."""

    def __init__(self, source: str | Path) -> None:
        self.source = escaped(str(source))
        self.count = 0
        self._kept: list[tuple[int, str]] = []

    def add(self, what: object, *, line: int | None = None, column: str | None = None) -> None:
        """Add a fault. `str(what)` is only called if the fault is spelled out. `line` counts from 1."""
        self.count += 1
        if self.count <= MAX_FAULTS:
            where = ":".join(str(p) for p in (self.source, line, column) if p is not None)
            self._kept.append((line or 0, f"{where}: {what}"))

    @property
    def texts(self) -> list[str]:
        """The faults, with a last line that counts those beyond MAX_FAULTS."""
        more = self.count - len(self._kept)
        return [text for _, text in self._kept] + ([f"... and {more} more"] if more else [])

    def by_line(self) -> list[str]:
        """`texts` sorted from the top of the file to its end, for readers that find faults in another order."""
        self._kept.sort(key=lambda kept: kept[0])
        return self.texts

    def raise_as(self, error: type[InputError]) -> None:
        """Raise `error` with all faults if there are any."""
        if self.count:
            raise error(self.texts)
