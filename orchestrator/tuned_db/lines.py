"""A CSV of anybody's as lines, in bounded memory: regular files only, no endless line, UTF-8."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from orchestrator.errors import TunedDBError

MAX_LINE = 1024 * 1024
"""Bytes. The longest line of AITER's tables has under 1,000."""
MAX_BYTES = 512 * 1024 * 1024
BLOCK = 1024 * 1024


def text_lines(path: Path, cap: int | None = MAX_BYTES) -> Iterator[str]:
    """The lines of a file with their ends, one at a time. Raises TunedDBError, with file and line where there is one.

    `cap`: the most bytes that such a file may have; None for files that are read to the end and never held.
    """
    try:
        # non-blocking, or opening a named pipe would wait for its writer
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as f:
            status = os.fstat(f.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise TunedDBError(f"{path}: is no file")
            if cap is not None and status.st_size > cap:
                raise TunedDBError(f"{path}: is larger than {cap // 2**20} MB, which no tuned table is")
            n, rest = 0, b""
            while block := f.read(BLOCK):
                whole, end, rest = (rest + block).rpartition(b"\n")
                if end:
                    yield from (lines := _lines(path, n, whole + end))
                    n += len(lines)
                if len(rest) > MAX_LINE:
                    raise _too_long(path, n + 1)
            if rest:
                yield _decoded(path, n + 1, rest)
    except IsADirectoryError:
        raise TunedDBError(f"{path}: is no file") from None
    except FileNotFoundError:
        raise TunedDBError(f"{path}: there is no such file") from None
    except OSError as e:
        raise TunedDBError(f"{path}: cannot be read: {e.strerror or e}") from e


def _lines(path: Path, n: int, block: bytes) -> list[str]:
    """The lines of a block of whole ones, of which `n` come before."""
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    lines = [f"{line}\n" for line in text.split("\n")[:-1]]
    if "\0" in text or (len(block) > MAX_LINE and max(map(len, block.split(b"\n"))) > MAX_LINE):
        return [_decoded(path, i, raw + b"\n") for i, raw in enumerate(block.split(b"\n")[:-1], n + 1)]
    return lines


def _too_long(path: Path, n: int) -> TunedDBError:
    return TunedDBError(f"{path}:{n}: is longer than {MAX_LINE // 2**20} MB, which no row is; is it a CSV?")


def _decoded(path: Path, n: int, raw: bytes) -> str:
    if len(raw) > MAX_LINE:
        raise _too_long(path, n)
    if b"\0" in raw:
        raise TunedDBError(f"{path}:{n}: holds a NUL byte; is it a CSV?")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise TunedDBError(f"{path}:{n}: holds bytes that are not UTF-8; is it a CSV?") from e
