"""A user's file as text: regular files only, capped, UTF-8, physical lines."""

from __future__ import annotations

import csv
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.tables.faults import Faults

_MAGIC = (
    (b"PK\x03\x04", "a zip archive or a workbook: export it as CSV"),
    (b"\xd0\xcf\x11\xe0", "an old workbook: export it as CSV"),
    (b"\x1f\x8b", "compressed by gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it first"),
    (b"\xff\xfe", "UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "UTF-16: save it as UTF-8"),
)
_ENDS = {"LF": "\n", "CRLF": "\r\n", "CR": "\r"}


@dataclass(frozen=True, slots=True)
class Text:
    """`lines` are physical lines without their ends (`ends`: LF, CRLF or CR), one of them at least with
    content. Bytes that are not UTF-8 stay in them as surrogates."""

    lines: list[str]
    bom: bool
    ends: str


def has_content(line: str) -> bool:
    """Whether a line holds more than spaces and empty cells."""
    return bool(line.strip(" \t,"))


def split_cells(line: str) -> list[str]:
    """The cells of a physical line, without the quotes that spreadsheets put around whole cells (RFC 4180).

    A line whose quotes do not fit is only cut at its commas, so that its cells show the stray quote.
    """
    if '"' not in line:
        return line.split(",")
    try:
        (cells,) = csv.reader([line], strict=True, skipinitialspace=True)
    except (csv.Error, ValueError):
        return line.split(",")
    return cells


def read_bytes(path: str | Path, cap: int, error: type[InputError]) -> bytes:
    """The bytes of a regular file of at most `cap` bytes. Raises `error`."""
    faults = Faults(path)
    data = b""
    try:
        # Non-blocking, or opening a named pipe would wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as f:
            mode = os.fstat(f.fileno()).st_mode
            if stat.S_ISREG(mode):
                data = f.read(cap + 1)
            else:
                faults.add("is a directory, not a file" if stat.S_ISDIR(mode) else "is not a regular file")
    except IsADirectoryError:
        faults.add("is a directory, not a file")
    except FileNotFoundError:
        faults.add("no such file")
    except OSError as e:
        faults.add(f"cannot be read: {e.strerror}")
    except ValueError:  # a NUL in the path
        faults.add("is not a file name")
    if len(data) > cap:
        faults.add(f"is larger than {cap // 2**20} MiB, which is no list of this kind")
    faults.raise_as(error)
    return data


def decode(data: bytes, faults: Faults) -> Text | None:
    """`data` as text; None, with the fault added, where it is no text at all."""
    for magic, what in _MAGIC:
        if data.startswith(magic):
            faults.add(f"is {what}")
            return None
    nul = data.find(b"\0")
    if nul >= 0:
        faults.add("is a binary file (it holds a NUL byte), not a CSV", line=data.count(b"\n", 0, nul) + 1)
        return None
    # Kept as surrogates, bytes that are not UTF-8 are reported in the cell where they stand.
    text = data.decode("utf-8", "surrogateescape")
    bom = text.startswith("\ufeff")
    # A CR within a file of LF lines is no line end but a fault of its cell.
    ends = "CRLF" if "\r\n" in text else "CR" if "\r" in text and "\n" not in text else "LF"
    lines = text.removeprefix("\ufeff").replace(_ENDS[ends], "\n").split("\n")
    if not any(map(has_content, lines)):
        faults.add("is empty")
        return None
    return Text(lines, bom, ends)
