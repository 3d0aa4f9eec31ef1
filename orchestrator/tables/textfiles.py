"""Reads users' files with size limits, collects their faults, shows their text safely; writes them whole or not at all.

Only regular UTF-8 files are read. Every fault names the file, and the line if it has one.

There are three ways to read: the whole file (`read_bytes`, `read_text`); physical lines that keep odd bytes for a
message (`decode`, for lists that people write); one line at a time in bounded memory (`text_lines`, `csv_records`, for
tables of any size).
"""

from __future__ import annotations

import csv
import fcntl
import glob
import io
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, tee
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from orchestrator.errors import InputError, TunedDBError
from worker.text import and_more

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


def text_lines(path: Path, cap: int | None = MAX_BYTES, error: type[InputError] = TunedDBError) -> Iterator[str]:
    """The lines of a file with their ends, one at a time. Raises `error`, which names the line if there is one.

    `cap`: the most bytes that such a file may have; None for files that are never held in memory.
    """
    try:
        with open_file(path, error) as f:
            if cap is not None and os.fstat(f.fileno()).st_size > cap:
                raise error(f"{escaped(str(path))}: is larger than {cap // 2**20} MB, too large for a tuned table")
            for n, raw in enumerate(iter(partial(f.readline, MAX_LINE + 1), b""), 1):
                try:
                    text = raw.decode()
                except UnicodeDecodeError:
                    text = "\0"
                if "\0" in text or len(raw) > MAX_LINE:
                    raise error(f"{escaped(str(path))}:{n}: {_fault(raw)}; is it a CSV?")
                yield text
    except OSError as e:
        raise error(f"{escaped(str(path))}: cannot be read: {e.strerror or e}") from e


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
    begin = 0
    try:
        for record in reader:
            at, end = begin + 1, reader.line_num
            if record and is_conflict_marker(record[0]):
                raise TunedDBError(f"{path}: {describe_conflict(text_lines(path, cap))}")
            text = next(texts) if end == at else "".join(islice(texts, end - begin))
            begin = end
            plain = text.isascii() and not (" " in text or "\t" in text or '"' in text)
            yield at, text, record if plain else list(map(str.strip, record))
    except csv.Error as e:
        raise TunedDBError(f"{path}:{reader.line_num}: is not a CSV line: {e}") from e


@dataclass(frozen=True, slots=True)
class Text:
    """A decoded file. `lines`: physical lines without their ends (`ends`: LF, CRLF or CR); at least one has content.
    Bytes that are not UTF-8 stay in them as surrogates."""

    lines: list[str]
    bom: bool
    ends: str


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


FORMULA_MARKS = ("=", "+", "-", "@")
Write = Callable[[TextIO], None]


def write_atomic(path: Path, content: str | Write, *, like: os.stat_result | None = None) -> None:
    """Write text, or let a function write, into a file beside `path`, make it durable and rename it over `path`; a
    link's target is replaced.

    `like`: take over mode and, where allowed, owner of what was there. Newlines are written as given.
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


def cell_fault(text: str) -> str:
    """The reason why text of a node or of a foreign file may not stand in a cell of a user's table; "" if it may.

    A number may begin with a sign; any other text that begins so is a formula to a spreadsheet.
    """
    if not text.isprintable():
        return "holds control characters"
    if text[:1] not in FORMULA_MARKS:
        return ""
    try:
        float(text)
    except ValueError:
        return "is a formula to a spreadsheet"
    return ""


def no_formula(text: str) -> str:
    """Text of a node or a file for a cell that no program reads: a `'` before what a spreadsheet would run."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") and text else text
