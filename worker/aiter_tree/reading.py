"""Files of a tree as text and syntax trees. A file that cannot be used is a sentence in `problems`, no exception."""

from __future__ import annotations

import ast
import os
import re
import stat
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worker.text import clean

MAX_BYTES = 4 << 20
"""The largest file that is read is some 300 KB (2026-08)."""
MAX_EVIDENCE = 200


@dataclass(frozen=True, slots=True)
class Evidence:
    """Place of a finding: a file below the tree's root, its line (0: none in particular), its text."""

    file: str
    line: int
    text: str

    def as_json(self) -> dict[str, object]:
        return {"file": self.file, "line": self.line, "text": self.text}

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" if self.line else f"{self.file}: {self.text}"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file's text. `tree` is None where it is no Python that this interpreter can parse."""

    path: Path
    name: str
    text: str
    tree: ast.Module | None

    def at(self, line: int, text: str = "") -> Evidence:
        """Evidence from a line (counted from 1), with the line itself where no text is given."""
        lines = self.text.split("\n")
        there = text or (lines[line - 1] if 0 < line <= len(lines) else "")
        return Evidence(self.name, line, clean(there, MAX_EVIDENCE))

    def find(self, pattern: str) -> Evidence | None:
        """The first line that a regular expression matches."""
        for number, line in enumerate(self.text.split("\n"), 1):
            if re.search(pattern, line):
                return self.at(number)
        return None

    def missing(self, what: str) -> Evidence:
        """Evidence that something is not in this file."""
        return Evidence(self.name, 0, clean(what, MAX_EVIDENCE))

    def walk(self) -> Iterator[ast.AST]:
        yield from ast.walk(self.tree) if self.tree else ()


class TreeReader:
    """The files of one tree, each read once. `problems`: what could not be read or parsed, a sentence each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[str] = []
        self._known: dict[Path, SourceFile | None] = {}

    def source(self, path: Path | None) -> SourceFile | None:
        """The file, or None where it is not there or cannot be read (then `problems` says why)."""
        if path is None:
            return None
        if path not in self._known:
            self._known[path] = self._read(path)
        return self._known[path]

    def name(self, path: Path) -> str:
        """The path below the tree's root, as it stands in evidence."""
        try:
            return path.relative_to(self.root).as_posix()
        except ValueError:
            return path.as_posix()

    def _read(self, path: Path) -> SourceFile | None:
        name = clean(self.name(path), MAX_EVIDENCE)
        try:
            text = read_text(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as e:
            why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
            self.problems.append(f"{name} cannot be read: {why}")
            return None
        tree = None
        if path.suffix == ".py":
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of escapes in strings: not ours
                    tree = ast.parse(text)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
                line = f"line {e.lineno}: " if isinstance(e, SyntaxError) and e.lineno else ""
                self.problems.append(f"{name} is no Python that can be parsed here: {line}{clean(str(e), 120)}")
        return SourceFile(path, name, text, tree)


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """A regular file's text, bytes that are no UTF-8 replaced. Raises OSError, and ValueError where it is too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for a writer for ever
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_size > limit:
            raise ValueError(f"it has {found.st_size} bytes, more than the {limit} that such a file may have")
        with open(fd, "rb", closefd=False) as f:
            return f.read(limit).decode(errors="replace")
    finally:
        os.close(fd)


def strings(node: ast.AST | None) -> list[str] | None:
    """The texts of a list or tuple that holds nothing but text; None for anything else."""
    if not isinstance(node, (ast.List, ast.Tuple)):
        return None
    out = [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
    return out if len(out) == len(node.elts) else None


def called(node: ast.AST) -> str:
    """The last name of what a call calls: `add_argument` of `self.parser.add_argument(...)`; "" for no call."""
    if not isinstance(node, ast.Call):
        return ""
    f = node.func
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""
