"""Interface of transports, by which files and commands reach a node: `local` (this machine), `ssh` and `exec`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar


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
        ...

    def write(self, data: bytes) -> None:
        """Send all of `data` to its standard input; TransportError where it does not take it any more."""
        ...

    def close(self) -> None:
        """End the command. Safe from another thread, and more than once."""
        ...

    def error(self) -> str:
        """Reason of its end (exit code, last message). The reader calls it once, after the end, and reads no more."""
        ...


class Transport(Protocol):
    """Every method may raise TransportError, and is safe to call from several threads after `connect`."""

    node: str

    def connect(self) -> None: ...

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        """Run a command to its end; a command that cannot start or takes too long is a TransportError."""
        ...

    def put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str] = ()) -> None:
        """Write files (paths relative to `folder`) aside and rename each into place; make folders 0700.

        `empty` names folders that must exist, too.
        """
        ...

    def rename(self, src: str, dst: str) -> bool:
        """Rename on the node; False where `src` is gone."""
        ...

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
