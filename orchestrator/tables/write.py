"""Write files of users: complete or not at all; tables with cells as AITER writes them, and no formula in a text."""

from __future__ import annotations

import csv
import io
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from orchestrator.errors import InputError
from orchestrator.tables.textfiles import escaped

Write = Callable[[TextIO], None]


def write_atomic(path: Path, content: str | Write, *, like: os.stat_result | None = None) -> None:
    """Write text, or let a function write, into a file beside `path`, make it durable and rename it over `path`; a
    link's target is replaced.

    `like`: take over mode and, where allowed, owner of what was there. Newlines are written as given.
    """
    target = Path(os.path.realpath(path))
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    aside.unlink(missing_ok=True)
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", newline="") as f:
            if isinstance(content, str):
                f.write(content)
            else:
                content(f)
            f.flush()
            if like is not None:
                _take_over(f.fileno(), like)
            os.fsync(f.fileno())
        os.rename(aside, target)
    except BaseException as e:
        aside.unlink(missing_ok=True)
        if isinstance(e, OSError):
            e.filename = e.filename or str(path)  # a write to a full disk names no file
        raise
    sync_folder(target.parent)


def _take_over(fd: int, like: os.stat_result) -> None:
    try:
        os.fchown(fd, like.st_uid, like.st_gid)
    except PermissionError:
        pass  # another user's file in a folder of ours: it becomes ours
    os.fchmod(fd, like.st_mode & 0o7777)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_csv(to: Path | TextIO, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV with LF line ends, to an open file or atomically to a path. Raises OSError."""

    def fill(f: TextIO) -> None:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(header)
        out.writerows(rows)

    if isinstance(to, Path):
        write_atomic(to, fill)
    else:
        fill(to)


def csv_text(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """The text of a CSV with LF line ends."""
    write_csv(text := io.StringIO(), header, rows)
    return text.getvalue()


def write_output(path: Path, text: str, hint: str = "") -> None:
    """Write a file that a user named; `hint` says what else can be done. Raises InputError."""
    try:
        write_atomic(path, text)
    except OSError as e:
        raise InputError(f"{escaped(str(path))}: cannot be written: {e.strerror or e}{hint}") from e


def refuse_overwriting(inputs: Iterable[Path], outputs: Sequence[Path]) -> None:
    """Raise InputError where an output is one of the inputs, or named twice."""
    paths = [p.resolve() for p in (*dict.fromkeys(inputs), *outputs)]
    if twice := next((p for p in outputs if paths.count(p.resolve()) > 1), None):
        raise InputError(f"{escaped(str(twice))}: is one of the inputs, or named twice: name another file")


def utc(t: float) -> str:
    """A time in epoch seconds as files have it: `2026-04-01T12:00:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t))


def cell(value: Any) -> str:
    """A value as AITER writes it: numbers above 1 with 4 decimals, below with 4 digits; "" for what is missing."""
    if value is None:
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        return repr(round(float(value), 4) if abs(value) >= 1 else float(f"{value:.4g}"))
    return str(value).strip()


def no_formula(text: str) -> str:
    """Text of a node or a file for a cell that no program reads: a `'` before what a spreadsheet would run."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") and text else text
