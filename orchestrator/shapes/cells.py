"""The cell of a key column: its value, what was cleaned (counted for the notes of a list), its fault."""

from __future__ import annotations

import re
from collections.abc import Iterable

from orchestrator.tables.faults import did_you_mean, shown
from worker.families import Column, Limit
from worker.families.model import BOOLEANS

_SENTENCES = {
    "spaces": ("dropped spaces around 1 cell", "dropped spaces around {n} cells"),
    "quotes": (
        "read 1 line with quoted cells as if it had none",
        "read {n} lines with quoted cells as if they had none",
    ),
    "zeros": ("dropped leading zeros of 1 cell", "dropped leading zeros of {n} cells"),
    "booleans": ("wrote 1 cell as AITER's True or False", "wrote {n} cells as AITER's True or False"),
    "blank": ("dropped 1 blank line", "dropped {n} blank lines"),
    "repeats": ("dropped 1 duplicate row", "dropped {n} duplicate rows"),
}


class Notes:
    """Counts by kind (the keys above), each with the place where it first was."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def count(self, kind: str, line: int, like: int | None = None) -> None:
        """One more of `kind` in `line`; `like` is the line that it repeats."""
        n = self._counts.get(kind, 0)
        self._counts[kind] = n + 1
        if not n:
            self._first[kind] = f"line {line}" + (f" repeats line {like}" if like else "")

    def sentences(self) -> list[str]:
        """One sentence a kind, with the count and the first place."""
        out = []
        for kind, (one, many) in _SENTENCES.items():
            n = self._counts.get(kind, 0)
            if n:
                out.append(f"{(one if n == 1 else many).format(n=n)} (first: {self._first[kind]})")
        return out


MAX_INT = 2**31 - 1
BLANK = " \t"
"""Characters that may stand around a cell and are cleaned away."""

_DIGITS = re.compile(r"[0-9]+\Z")
_SIGNED = re.compile(r"[+-][0-9]+\Z")
_FLOAT = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?\Z|[+-]?(nan|inf|infinity)\Z", re.I)
_RANGE = f"a whole number from 1 to {MAX_INT}"
_BOOLEAN_OF = {v.lower(): v for v in BOOLEANS}


class CellError(ValueError):
    """The cell is wrong; the text says what it is and what to do."""


class NotLegalError(CellError):
    """The cell is none of the legal values. The nearest is sought only when the text is shown."""

    def __init__(self, text: str, legal: tuple[str, ...]) -> None:
        super().__init__(text, legal)
        self.text, self.legal = text, legal

    def __str__(self) -> str:
        near = did_you_mean(self.text, self.legal)
        return f"{shown(self.text)} is not legal{near} (legal: {', '.join(self.legal)})"


def default_of(column: Column) -> int | str:
    """The value of a key column that a list does not give."""
    return int(column.default or 0) if column.kind == "int" else column.default or ""


class CellReader:
    """Reader of the cells of one key column. `known` maps cells that needed no cleaning to their value, so that
    the reader of the file looks most cells up instead of checking them again."""

    def __init__(self, column: Column, limits: Iterable[Limit], notes: Notes) -> None:
        self.column = column
        self.known: dict[str, int | str] = {}
        self._limits = tuple(x for x in limits if x.column == column.name)
        self._notes = notes

    def read(self, cell: str, line: int) -> int | str:
        """The value of `cell`; notes what was cleaned. Raises CellError."""
        text = cell.strip(BLANK)
        _refuse_unsafe(text)
        value = self._int(text) if self.column.kind == "int" else self._text(text, line)
        if text != cell:
            self._notes.count("spaces", line)
        if str(value) == cell:
            self.known[cell] = value
        elif str(value) != text and self.column.kind == "int":
            self._notes.count("zeros", line)
        return value

    def _int(self, text: str) -> int:
        legal = self.column.legal
        if legal:
            if text not in legal:
                raise CellError(f"{shown(text)} is not legal: write {' or '.join(legal)}")
            return int(text)
        if not _DIGITS.match(text):
            raise CellError(_why_not_int(text))
        digits = text.lstrip("0")
        if not digits:
            raise CellError(f"is zero: write {_RANGE}")
        if len(digits) > len(str(MAX_INT)) or int(digits) > MAX_INT:
            raise CellError(f"{shown(text)} is too large: write {_RANGE}")
        value = int(digits)
        for limit in self._limits:
            if value % limit.multiple_of:
                name, of = limit.column, limit.multiple_of
                raise CellError(f"{value} is not a multiple of {of} ({limit.why}): drop the shape or pad {name}")
        return value

    def _text(self, text: str, line: int) -> str:
        legal = self.column.legal
        if text in legal:
            return text
        if not text:
            raise CellError(f"is empty: write {', '.join(legal)}, or drop the column for its default")
        if legal == BOOLEANS and text in ("TRUE", "FALSE", "true", "false"):
            self._notes.count("booleans", line)
            return _BOOLEAN_OF[text.lower()]
        raise NotLegalError(text, legal)


def _refuse_unsafe(text: str) -> None:
    if '"' in text or "'" in text:
        raise CellError(f"{shown(text)} holds a quote: a shapes file is plain, write the bare value")
    if text[:1] in ("=", "@"):
        raise CellError(f"{shown(text)} looks like a formula: write the value itself")
    if text[:1] in ("+", "-") and not _FLOAT.match(text):
        raise CellError(f"{shown(text)} looks like a formula: write the value itself")
    if not text.isascii() and any("\udc80" <= c <= "\udcff" for c in text):
        raise CellError(f"{shown(text)} holds bytes that are not UTF-8: save the file as UTF-8")


def _why_not_int(text: str) -> str:
    if not text:
        return f"is empty: write {_RANGE}"
    if _SIGNED.match(text):
        return f"{shown(text)} has a sign: write {_RANGE}"
    if _FLOAT.match(text):
        return f"{shown(text)} is not a whole number: write {_RANGE}"
    return f"{shown(text)} is not a number: write {_RANGE}"
