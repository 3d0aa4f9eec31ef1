"""Writes files whole or not at all: aside, made durable, and renamed over the old file.

`write_atomic` writes any text, `write_csv` a table, `write_output` a file that a user named. `history.py` keeps old
states of a user's files and restores them.
"""

from __future__ import annotations

import csv
import fcntl
import glob
import io
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from orchestrator.errors import InputError
from orchestrator.files.faults import escaped

Write = Callable[[TextIO], None]


def write_atomic(path: Path, content: str | Write, *, like: os.stat_result | None = None) -> None:
    """Write text, or let a function write, into `.<name>.<pid>.tmp` beside `path`, make it durable and rename it over
    `path`; a link's target is replaced.

    `like`: the old file, whose mode and, if that is allowed, owner the new one gets. Newlines are written as they are.
    Raises OSError; the old file is then as it was.
    """
    target = Path(os.path.realpath(path))
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    aside.unlink(missing_ok=True)
    remove_dead_temporaries(target)
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with os.fdopen(fd, "w", encoding="utf-8", newline="") as f:
            if isinstance(content, str):
                f.write(content)
            else:
                content(f)
            f.flush()
            if like is not None:
                with suppress(PermissionError):  # another user's file in a folder of ours: it becomes ours
                    os.fchown(f.fileno(), like.st_uid, like.st_gid)
                os.fchmod(f.fileno(), like.st_mode & 0o7777)
            os.fsync(f.fileno())
        os.rename(aside, target)
    except BaseException as e:
        aside.unlink(missing_ok=True)
        if isinstance(e, OSError):
            e.filename = e.filename or str(path)  # a write to a full disk names no file
        raise
    sync_folder(target.parent)


def remove_dead_temporaries(target: Path) -> None:
    """Remove what writers of this file left when they were killed: `.<name>.<pid>.tmp`.

    A writer is dead if its file can be locked, which says something of other machines too, and no process of this
    machine has its number. Where either cannot be known, the file stays.
    """
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        pid = path.name[len(target.name) + 2 : -len(".tmp")]
        if not pid.isdecimal() or _is_process(int(pid)):
            continue
        with suppress(OSError), open(path, "rb", opener=_open_no_link) as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _is_process(pid: int) -> bool:
    """Return whether a process of this machine has this number, or may have it."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV with LF line ends atomically. Raises OSError."""
    write_atomic(path, lambda f: _write_rows(f, header, rows))


def csv_text(header: Sequence[str], rows: Iterable[Iterable[Any]] = ()) -> str:
    """The text of a CSV with LF line ends."""
    _write_rows(text := io.StringIO(), header, rows)
    return text.getvalue()


def _write_rows(f: TextIO, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    out = csv.writer(f, lineterminator="\n")
    out.writerow(header)
    out.writerows(rows)


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
