"""Interface of transports, by which files and commands reach a node: `local` (this machine), `ssh` and `exec`.

Then the quoting of command lines and paths for the POSIX shell of a node, and what `ssh` and `exec` share: they reach a
node by commands alone.

Files go as one tar stream: it is unpacked aside on the node, then each file is renamed into place. The node needs sh,
tar (GNU, busybox or BSD), mkdir, mv and rm. The last member is a shell script that puts things in place: it is there
only if everything before it is. Where the folder does not exist yet, the whole tree becomes it by one rename.
"""

from __future__ import annotations

import io
import math
import posixpath
import secrets
import shlex
import tarfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from orchestrator.errors import TransportError, UnreachableError


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ended: exit code (negative: killed by that signal) and what it printed."""

    code: int
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        """The end of what it printed, for an error message."""
        return (self.err or self.out).decode("utf-8", "replace").strip()[-2000:]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to be put on a node."""

    data: bytes
    mode: int = 0o600


class _Output(io.RawIOBase):
    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def as_file(read: Callable[[int], bytes]) -> io.BufferedReader:
    """A command's output as a file. `read`: see Channel."""
    return io.BufferedReader(_Output(read), 65536)


class Channel(ABC):
    """A command that runs on: its standard output as it comes, its standard input open.

    One thread may read while another writes. A call with a deadline (time.monotonic()) ends by then with TimeoutError.
    """

    _node: str
    _over = False

    @abstractmethod
    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Return up to `size` bytes as soon as there are any; b"" at the end."""

    @abstractmethod
    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Send all of `data`; OSError where the command listens no more."""

    def write(self, data: bytes) -> None:
        """Send all of `data` to its standard input. Raises UnreachableError where it does not take it any more."""
        try:
            self.send(data)
        except OSError as e:
            text = f"the connection broke ({self.broken})" if self.broken else "the command takes no more input"
            raise UnreachableError(self._node, text) from e

    @property
    def broken(self) -> str:
        """Reason why its connection broke, "" where it did not."""
        return ""

    @property
    def ended(self) -> bool:
        """Return whether the command gives no more output."""
        return self._over

    @abstractmethod
    def close(self) -> None:
        """End the command. Safe from another thread, and more than once."""

    @abstractmethod
    def error(self) -> str:
        """Reason of its end (exit code, last message). The reader calls it once, after the end, and reads no more."""

    def _end(self, code: int | None, words: bytes | bytearray) -> str:
        """Reason of its end: exit code and last message, or that of the broken connection."""
        text = f"the connection broke ({self.broken})" if self.broken else "ended without an exit code"
        last = words.decode("utf-8", "replace").strip()[-1000:]
        return (text if code is None else f"ended with code {code}") + (f": {last}" if last else "")


class Transport(Protocol):
    """Every method may raise TransportError, and is safe to call from several threads after `connect`."""

    node: str

    def connect(self) -> None: ...

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        """Run a command to its end; a command that cannot start or takes too long is a TransportError."""

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        """Write files (paths relative to `folder`) aside and rename each into place; make folders 0700.

        `empty` names folders that must exist, too.
        """

    def rename(self, src: str, dst: str) -> bool:
        """Rename on the node; False where `src` is gone."""

    def open(self, argv: Sequence[str]) -> Channel: ...

    def close(self) -> None: ...


AnyTransport = TypeVar("AnyTransport", bound=Transport)


@contextmanager
def connected(transport: AnyTransport) -> Iterator[AnyTransport]:
    """Connect the transport, and close it at the end. Raise TransportError."""
    try:
        transport.connect()
        yield transport
    finally:
        transport.close()


def command_line(node: str, argv: Sequence[str]) -> str:
    """Command line for a node's login shell. `exec`: no built-in and no keyword of that shell can be meant.

    Raises TransportError for what no command line can carry.
    """
    if not argv or any("\0" in w for w in argv):
        raise TransportError(node, "a command needs words without NUL characters")
    return "exec " + " ".join(map(quote, argv))


def limited(line: str, seconds: float) -> str:
    """Command line for a command (of `command_line`) that the node itself ends, with all that it started in its process
    group, when it takes longer; where the node has `timeout` (of GNU, or a busybox: there the command alone). Who
    started it need not live. Its code is 128 and the number of the signal that ended it.
    """
    return (
        f"set -- {line.removeprefix('exec ')}; if timeout -s KILL 9 true 2>/dev/null;"
        f' then timeout -s KILL {math.ceil(seconds)} "$@"; else (exec "$@"); fi; exit "$?"'
    )


def quote(word: str) -> str:
    """Quote as shlex.quote; also `A=b` and a `~` at the beginning."""
    return (
        shlex.quote(word) if "=" not in word and not word.startswith("~") else "'" + word.replace("'", "'\"'\"'") + "'"
    )


def absolute(folder: str) -> str:
    """A path that no command takes for an option; relative ones begin where commands do."""
    return folder if folder.startswith("/") else f"./{folder}"


CALL_S = 60.0
"""Time for a put or rename, beside that of its bytes."""
BYTES_A_SECOND = 250_000
"""The slowest link that still is one."""

AFTERLIFE_S = 2.0
"""Seconds after its time limit at which a command is ended by its node: our own error comes first."""
MAX_OUTPUT = 64 * 1024 * 1024
"""A command that prints more than this, in bytes, is an error."""
RENAME = """\
if [ -d "$2" ]; then echo "$2: Is a directory" >&2; exit 1; fi
mv -f -- "$1" "$2" && exit 0
[ -e "$1" ] || [ -L "$1" ] || exit 3
exit 1
"""


class CommandTransport(ABC):
    """The part of a Transport that is made of commands: files, and the words of errors."""

    node: str

    @abstractmethod
    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        """Run a command to its end; `name` stands for it in errors."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        """Run a command to its end. A code is negative where a signal ended it."""
        done = self._run(argv, stdin, timeout, argv[0])
        words = done.err.decode("utf-8", "replace")
        if done.code in (126, 127) and ("exec: " in words or "timeout: " in words) and argv[0] in words:
            raise TransportError(self.node, f"cannot run {argv[0]}: {words.strip()[-300:]}")
        return done

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        """Write files aside and rename each into place."""
        wrong = faults([*files, *empty])
        if wrong or "\0" in folder or not folder:
            raise TransportError(self.node, wrong or f"{folder!r} is not a folder")
        self._put(absolute(folder).rstrip("/") or "/", files, empty)

    def _put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str]) -> None:
        token = f".put-{secrets.token_hex(8)}"
        data = stream(token, files, empty)
        limit = CALL_S + len(data) / BYTES_A_SECOND
        done = self._run(unpack_argv(folder, token), data, limit, f"writing to {folder}")
        if done.code != 0:
            raise TransportError(self.node, f"cannot write to {folder}: {done.text or f'code {done.code}'}")

    def rename(self, src: str, dst: str) -> bool:
        """Rename on the node; False where `src` is gone. TransportError where that is unknown: the connection broke."""
        src = absolute(src)
        dst = absolute(dst)
        if "\0" in src + dst:
            raise TransportError(self.node, f"cannot rename {src!r}: no path has a NUL character")
        return self._rename(src, dst)

    def _rename(self, src: str, dst: str) -> bool:
        done = self._run(["sh", "-c", RENAME, "sh", src, dst], b"", CALL_S, f"renaming {src}")
        if done.code not in (0, 3):
            raise TransportError(self.node, f"cannot rename {src}: {done.text or f'code {done.code}'}")
        return done.code == 0


UNPACK = """\
d=$1 t=$2
LC_ALL=C; export LC_ALL; umask 077
w=$d; [ -e "$d" ] || w=${d%/*}
mkdir -p -- "${w:=/}" && mkdir -- "$w/$t" || exit 1
# what a put left behind that its node did not survive; not our own, whatever the clock of a file server says
find "$w" -maxdepth 1 -type d -name '.put-*' ! -name "$t" -mmin +60 -exec rm -rf -- {} + 2>/dev/null
trap 'rm -rf -- "$w/$t"' 0
tar -xmpof - -C "$w/$t" || exit 1
[ -f "$w/$t/place" ] || { echo "the stream broke off" >&2; exit 1; }
r=$w/$t/$t
if [ ! -e "$d" ]; then
    mv -- "$r" "$d" || exit 1
    [ -e "$d/$t" ] || exit 0
    r=$d/$t # another process made the folder at the same time: this is now inside
fi
. "$w/$t/place"
"""
MAX_WORDS_BYTES = 64 * 1024
"""Limit of one command; Linux allows 128 KiB an argument and 2 MiB in all."""


def faults(names: Sequence[str]) -> str:
    """Problem of names relative to a folder; "" for none."""
    for name in names:
        parts = name.split("/")
        if "\0" in name or name.startswith("/") or any(p in ("", ".", "..") for p in parts):
            return f"{name!r} is not a plain path within the folder"
    return ""


def unpack_argv(folder: str, token: str) -> list[str]:
    """The command that reads `stream` from its standard input."""
    return ["sh", "-c", UNPACK, "sh", folder.rstrip("/") or "/", token]


def stream(token: str, files: Mapping[str, RemoteFile], empty: Sequence[str]) -> bytes:
    """The tar stream: a tree `<token>/` and the script `place`. GNU format, which busybox reads, too."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        now = int(time.time())
        for folder in ("", *_folders(files, empty)):
            tar.addfile(_member(posixpath.join(token, folder).rstrip("/"), 0o700, now, tarfile.DIRTYPE))
        for name, file in files.items():
            tar.addfile(_member(f"{token}/{name}", file.mode, now, size=len(file.data)), io.BytesIO(file.data))
        script = "".join(_place(files, empty)).encode("utf-8", "surrogateescape")
        tar.addfile(_member("place", 0o600, now, size=len(script)), io.BytesIO(script))
    return archive.getvalue()


def _member(name: str, mode: int, now: int, kind: bytes = tarfile.REGTYPE, size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode = mode
    info.type = kind
    info.size = size
    info.mtime = now
    return info


def _folders(files: Mapping[str, RemoteFile], empty: Sequence[str]) -> list[str]:
    """Every folder of the tree below its root, parents first."""
    found: set[str] = set()
    for folder in (*empty, *(posixpath.dirname(n) for n in files)):
        while folder and folder not in found:
            found.add(folder)
            folder = posixpath.dirname(folder)
    return sorted(found)


def _place(files: Mapping[str, RemoteFile], empty: Sequence[str]) -> Iterator[str]:
    """The script: $r is the tree, $d the folder. One mv a folder, which renames file by file."""
    for words in _batches([f'"$d"/{quote(f)}' for f in _folders(files, empty)]):
        yield f"mkdir -p -- {words} || exit 1\n"
    by_folder: dict[str, list[str]] = {}
    for name in files:
        by_folder.setdefault(posixpath.dirname(name), []).append(f'"$r"/{quote(name)}')
    for folder, names in by_folder.items():
        for words in _batches(names):
            yield f'mv -f -- {words} "$d"/{quote(folder) if folder else ""} || exit 1\n'


def _batches(words: Sequence[str]) -> Iterator[str]:
    batch: list[str] = []
    size = 0
    for word in words:
        if batch and size + len(word) > MAX_WORDS_BYTES:
            yield " ".join(batch)
            batch = []
            size = 0
        batch.append(word)
        size += len(word) * 4 + 200  # UTF-8, and "$d" and "$r" are longer than they look
    if batch:
        yield " ".join(batch)
