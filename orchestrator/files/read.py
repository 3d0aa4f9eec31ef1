"""Reads files of users: only regular UTF-8 files, with size limits. A fault names the file, and the line if it has one.

There are three ways to read: the whole file (`read_bytes`, `read_text`); physical lines that keep odd bytes for a
message (`decode`, for lists that people write); one line at a time in bounded memory (`text_lines`, `csv_records`, for
tables of any size). `orchestrator/files/write.py` writes files.
"""

from __future__ import annotations

import csv
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, tee
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.errors import InputError, TunedDBError
from orchestrator.files.faults import Faults, escaped
from worker.text import and_more

MAX_LINE = 1 << 20
"""Most bytes of a line. The longest line of AITER's tables has less than 1,000."""
MAX_BYTES = 512 << 20
"""Most bytes of a tuned table that we hold in memory."""
_MAGIC = (
    (b"PK\x03\x04", "a zip archive or a workbook: export it as CSV"),
    (b"\xd0\xcf\x11\xe0", "an old workbook: export it as CSV"),
    (b"\x1f\x8b", "compressed by gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it first"),
    (b"\xff\xfe", "UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "UTF-16: save it as UTF-8"),
)
_ENDS = {"LF": "\n", "CRLF": "\r\n", "CR": "\r"}


def open_file(path: str | Path, error: type[InputError]) -> BinaryIO:
    """Open a regular file for reading. Raises `error`, which says what it is instead."""
    where = escaped(str(path))
    try:
        # non-blocking, or opening a named pipe would wait for its writer
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise error(f"{where}: no such file") from None
    except OSError as e:
        raise error(f"{where}: cannot be read: {e.strerror or e}") from e
    except ValueError:  # a NUL in the path
        raise error(f"{where}: is not a file name") from None
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return open(fd, "rb")
    os.close(fd)
    raise error(f"{where}: is {'a directory, not a file' if stat.S_ISDIR(mode) else 'not a regular file'}")


def read_bytes(path: str | Path, cap: int, error: type[InputError]) -> bytes:
    """The bytes of a regular file of at most `cap` bytes. Raises `error`."""
    where = escaped(str(path))
    with open_file(path, error) as f:
        try:
            data = f.read(cap + 1)
        except OSError as e:
            raise error(f"{where}: cannot be read: {e.strerror or e}") from e
    if len(data) > cap:
        raise error(f"{where}: is larger than {cap // 2**20} MiB, too large for a file of this kind")
    return data


def read_text(path: str | Path, cap: int, error: type[InputError], *, errors: str = "strict") -> str:
    """The text of a file without its byte order mark; `errors` as in `bytes.decode`. Raises `error`."""
    data = read_bytes(path, cap, error)
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise error(f"{escaped(str(path))}:{line}: holds bytes that are not UTF-8") from e


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of ours. Raises InputError, also for a number of more digits than Python reads."""
    try:
        document = json.loads(read_bytes(path, MAX_BYTES, InputError))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: is damaged ({e}); restore it from a copy, or move it away") from e
    if not isinstance(document, dict):
        raise InputError(f"{path}: is damaged (no JSON object); restore it from a copy, or move it away")
    return document


def read_head(path: str | Path, size: int, error: type[InputError]) -> str:
    """The first `size` bytes of a file as text, even if they are not. Raises `error`."""
    with open_file(path, error) as f:
        return f.read(size).decode("utf-8", "replace").removeprefix("\ufeff")


def text_lines(path: Path, cap: int | None = MAX_BYTES) -> Iterator[str]:
    """The lines of a tuned table with their ends, one at a time. Raises TunedDBError, which names the line if there is
    one.

    `cap`: the most bytes that the file may have; None for files that are never held in memory.
    """
    where = escaped(str(path))
    try:
        with open_file(path, TunedDBError) as f:
            if cap is not None and os.fstat(f.fileno()).st_size > cap:
                raise TunedDBError(f"{where}: is larger than {cap // 2**20} MB, too large for a tuned table")
            for number, raw in enumerate(iter(partial(f.readline, MAX_LINE + 1), b""), 1):
                try:
                    text = raw.decode()
                except UnicodeDecodeError:
                    text = "\0"
                if "\0" in text or len(raw) > MAX_LINE:
                    raise TunedDBError(f"{where}:{number}: {_fault(raw)}; is it a CSV?")
                yield text
    except OSError as e:
        raise TunedDBError(f"{where}: cannot be read: {e.strerror or e}") from e


def _fault(raw: bytes) -> str:
    if len(raw) > MAX_LINE:
        return f"is longer than {MAX_LINE // 2**20} MB, too long for a row"
    return "holds a NUL byte" if b"\0" in raw else "holds bytes that are not UTF-8"


def is_conflict_marker(line: str) -> bool:
    """True for a line that git writes around two versions."""
    return line.startswith(("<<<<<<< ", "||||||| ", ">>>>>>> ")) or line.rstrip("\r\n") == "======="


def describe_conflict(lines: Iterable[str]) -> str:
    """The fault of a file with markers of a merge conflict."""
    numbers = [str(number) for number, line in enumerate(lines, 1) if is_conflict_marker(line)]
    return f"markers of a merge conflict in line {and_more(numbers, 6)}: choose between the two versions first"


def csv_records(path: Path, cap: int | None = MAX_BYTES) -> Iterator[tuple[int, str, Sequence[str]]]:
    """(first line, text, stripped cells) of each record of a tuned table or profile, with its header and blank lines.

    `cap` as in `text_lines`. Raises TunedDBError with the line.
    """
    lines, texts = tee(text_lines(path, cap))
    reader = csv.reader(lines, strict=True)
    begin = 0  # lines before the record
    try:
        for record in reader:
            end = reader.line_num
            if record and is_conflict_marker(record[0]):
                raise TunedDBError(f"{path}: {describe_conflict(text_lines(path, cap))}")
            text = next(texts) if end == begin + 1 else "".join(islice(texts, end - begin))
            # most records of a table have nothing to strip, and this is read for millions
            is_plain = text.isascii() and not (" " in text or "\t" in text or '"' in text)
            yield begin + 1, text, record if is_plain else list(map(str.strip, record))
            begin = end
    except csv.Error as e:
        raise TunedDBError(f"{path}:{reader.line_num}: is not a CSV line: {e}") from e


@dataclass(frozen=True, slots=True)
class Text:
    """A decoded file."""

    lines: list[str]
    """Physical lines without their ends; at least one has content. Bytes that are not UTF-8 are surrogates in them."""
    bom: bool
    """It begins with a byte order mark."""
    ends: str
    """The ends of its lines: LF, CRLF or CR."""


def decode(data: bytes, faults: Faults) -> Text | None:
    """`data` as text. If it is not text at all, add the fault and return None."""
    for magic, what in _MAGIC:
        if data.startswith(magic):
            faults.add(f"is {what}")
            return None
    nul = data.find(b"\0")
    if nul >= 0:
        faults.add("is a binary file (it holds a NUL byte), not a CSV", line=data.count(b"\n", 0, nul) + 1)
        return None
    # Bytes that are not UTF-8 are kept as surrogates and reported in the cell where they are.
    text = data.decode("utf-8", "surrogateescape")
    bom = text.startswith("\ufeff")
    # In a file with LF lines, a CR is not a line end but a fault of its cell.
    ends = "CRLF" if "\r\n" in text else "CR" if "\r" in text and "\n" not in text else "LF"
    lines = text.removeprefix("\ufeff").replace(_ENDS[ends], "\n").split("\n")
    if not any(map(has_content, lines)):
        faults.add("is empty")
        return None
    if any(map(is_conflict_marker, lines)):
        faults.add(describe_conflict(lines))
        return None
    return Text(lines, bom, ends)


def has_content(line: str) -> bool:
    """Return whether a line holds more than spaces and empty cells."""
    return bool(line.strip(" \t,"))


def split_cells(line: str) -> list[str]:
    """The cells of a physical line, without the quotes that spreadsheets put around whole cells (RFC 4180).

    A line with unbalanced quotes is only cut at its commas, so that its cells show the stray quote.
    """
    if '"' not in line:
        return line.split(",")
    try:
        (cells,) = csv.reader([line], strict=True, skipinitialspace=True)
    except (csv.Error, ValueError):
        return line.split(",")
    return cells
