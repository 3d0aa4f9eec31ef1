"""The interface of transports, by which files and commands reach a node.

    local   this machine (local.py)
    ssh     one connection to a node, a channel for each command (ssh.py, ssh_config.py, ssh_connection.py)
    exec    the inside of a Slurm job or a pod, where a command is slow to start (exec.py, pod.py)

Whoever needs a node calls `connect`, then `run`, `put`, `rename` and `open` from any thread, and `close` at the end;
`with connected(transport)` does both ends. machines/node_link.py makes the transport of a node.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from orchestrator.errors import UnreachableError


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ended: its exit code (-N if signal N killed it) and what it printed."""

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
    """Adapts a `read` function to the io module."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def as_file(read: Callable[[int], bytes]) -> io.BufferedReader:
    """A command's output as a file, with `readline` and whole reads. `read`: as `Channel.read`."""
    return io.BufferedReader(_Output(read), 65536)


class Channel(ABC):
    """A command that goes on: we read its standard output as it comes, and its standard input stays open.

    One thread may read while another writes. A call with a deadline (in the seconds of time.monotonic()) raises
    TimeoutError if it is not done by then. At the end `read` returns b""; the reader then calls `error` once.
    """

    _node: str
    _over = False

    @abstractmethod
    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Return up to `size` bytes as soon as there are any; b"" at the end."""

    @abstractmethod
    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Send all of `data`. Raises OSError if the command no longer reads its input."""

    def write(self, data: bytes) -> None:
        """Send all of `data` to its standard input. Raises UnreachableError if it no longer takes any."""
        try:
            self.send(data)
        except OSError as e:
            text = f"the connection broke ({self.broken})" if self.broken else "the command takes no more input"
            raise UnreachableError(self._node, text) from e

    @property
    def broken(self) -> str:
        """Return why its connection broke, "" if it did not."""
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
        """Return why it ended: its exit code and last message. The reader calls it once, after the end."""

    def _describe_end(self, code: int | None, stderr: bytes | bytearray) -> str:
        """The text of `error`: the exit code, or without one why the connection broke, and the last message."""
        if code is not None:
            text = f"ended with code {code}"
        elif self.broken:
            text = f"the connection broke ({self.broken})"
        else:
            text = "ended without an exit code"
        last = stderr.decode("utf-8", "replace").strip()[-1000:]
        return f"{text}: {last}" if last else text


class Transport(Protocol):
    """A way to a node. Every method may raise TransportError, and is safe to call from several threads after
    `connect`."""

    node: str
    """Its name in messages."""

    def connect(self) -> None:
        """Make the connection, and close an old one. Call it again after a break."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        """Run a command to its end within `timeout` seconds; `stdin` is all its input. Raises TransportError if it
        cannot start or takes too long."""

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        """Write files (paths relative to `folder`) aside and rename each into place. Missing folders are made with
        mode 0700, those in `empty` too."""

    def rename(self, src: str, dst: str) -> bool:
        """Rename on the node; False if `src` is gone."""

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a command that goes on."""

    def close(self) -> None:
        """Close the connection; calls in other threads end with a TransportError."""


AnyTransport = TypeVar("AnyTransport", bound=Transport)


@contextmanager
def connected(transport: AnyTransport) -> Iterator[AnyTransport]:
    """Connect the transport, and close it at the end. Raise TransportError."""
    try:
        transport.connect()
        yield transport
    finally:
        transport.close()


def path_fault(names: Sequence[str]) -> str:
    """Sentence on the first bad one of these paths below a folder; "" if all are good."""
    for name in names:
        parts = name.split("/")
        if "\0" in name or name.startswith("/") or any(p in ("", ".", "..") for p in parts):
            return f"{name!r} is not a plain path within the folder"
    return ""
