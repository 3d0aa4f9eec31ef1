"""Interface of transports, by which files and commands reach a node: `local` (this machine), `ssh` and `exec`.

At the end: the quoting of command lines and paths for the POSIX shell of a node.
"""

from __future__ import annotations

import io
import math
import shlex
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


class Channel(Protocol):
    """A command that runs on: its standard output as it comes, its standard input open.

    One thread may read while another writes.
    """

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes as soon as there are any; b"" at the end."""

    def write(self, data: bytes) -> None:
        """Send all of `data` to its standard input; TransportError where it does not take it any more."""

    def close(self) -> None:
        """End the command. Safe from another thread, and more than once."""

    def error(self) -> str:
        """Reason of its end (exit code, last message). The reader calls it once, after the end, and reads no more."""


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
    """A command's output as a file. `read`: returns up to so many bytes as soon as there are any; b"" at the end."""
    return io.BufferedReader(_Output(read), 65536)


class TimedChannel(ABC):
    """A Channel whose calls end by a deadline (time.monotonic()), with TimeoutError."""

    _node: str
    _over = False

    @abstractmethod
    def read(self, size: int, deadline: float | None = None) -> bytes: ...

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
    def close(self) -> None: ...

    @abstractmethod
    def error(self) -> str: ...

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


def command_line(argv: Sequence[str]) -> str:
    """Command line for the node's login shell. `exec`: no built-in and no keyword of that shell can be meant.

    Raises ValueError for what no command line can carry.
    """
    if not argv or any("\0" in w for w in argv):
        raise ValueError("a command needs words without NUL characters")
    return "exec " + " ".join(map(quote, argv))


def command_of(node: str, argv: Sequence[str]) -> str:
    """Command line for a node's login shell. Raises TransportError for what no command line can carry."""
    try:
        return command_line(argv)
    except ValueError as e:
        raise TransportError(node, str(e)) from e


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
