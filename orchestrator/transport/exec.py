"""The transport for nodes where each command is slow to start. Short commands share a few shells that stay open."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.transport.base import Channel, Completed, RemoteFile, TimedChannel, command_of
from orchestrator.transport.kept_shell import KeptShell, ShellError
from orchestrator.transport.local import LocalTransport, ProcessChannel
from orchestrator.transport.shell import CALL_S, CommandTransport
from orchestrator.transport.ssh import SshChannel, SshTransport

MAX_SHELLS = 4
"""Most shells at a time. A slow command keeps one busy."""
SMALL_FILES, SMALL_BYTES = 4, 256 * 1024
"""Limits for a kept shell. Anything larger is sent as a tar stream."""
CONNECT_S = 30.0
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--unbuffered", "--quiet")
T = TypeVar("T")


class Opener(Protocol):
    """Starts commands on a node."""

    def connect(self) -> None:
        """Prepare for `start`; call it again after a broken connection. Raises TransportError."""

    def start(self, command: str, deadline: float) -> TimedChannel:
        """Start a line of shell text. Raises TransportError."""

    def close(self) -> None:
        """Undo `connect`."""


class SrunOpener:
    """Starts steps of a Slurm job. All steps share the job's resources."""

    def __init__(self, transport: LocalTransport | SshTransport, way: Sequence[str]) -> None:
        """`transport`: reaches the machine where `srun` runs; nothing else uses it. `way`: srun's options for the job
        and its CPUs."""
        self._transport, self._argv = transport, (*SRUN, *way, "sh", "-c")
        self.connect, self.close = transport.connect, transport.close

    def start(self, command: str, deadline: float) -> ProcessChannel | SshChannel:
        """Start a line of shell text as a step. Raises TransportError."""
        return self._transport.open([*self._argv, command])


class ExecTransport(CommandTransport):
    """The transport `exec`."""

    def __init__(self, node: str, opener: Opener, prelude: str = "") -> None:
        """`prelude`: shell text that runs before every command and changes to its folder."""
        self.node = node
        self._opener, self._prelude, self._open = opener, prelude, False
        self._shells = [KeptShell(node, self._start) for _ in range(MAX_SHELLS)]
        self._free: queue.LifoQueue[KeptShell] = queue.LifoQueue()
        for shell in self._shells:
            self._free.put(shell)

    def connect(self) -> None:
        """Close any old shells and start a first one. Raises TransportError."""
        self._drop_shells()
        self._opener.connect()
        self._open = True
        self._ask(lambda shell, deadline: shell.open(deadline), "cannot start a shell", CONNECT_S)

    def close(self) -> None:
        """Calls in progress in other threads end with a TransportError."""
        self._open = False
        self._drop_shells()
        self._opener.close()

    def _drop_shells(self) -> None:
        for shell in self._shells:
            shell.close()

    def open(self, argv: Sequence[str]) -> Channel:
        """Run a command and stream its output. Its input ends when the channel is closed."""
        return self._start(command_of(self.node, argv), time.monotonic() + CALL_S)

    def _start(self, command: str, deadline: float) -> TimedChannel:
        if not self._open:
            raise UnreachableError(self.node, "there is no connection")
        return self._opener.start(self._prelude + command, deadline)

    def _ask(self, ask: Callable[[KeptShell, float], T], what: str, seconds: float = CALL_S) -> T:
        """Wait for a free shell and return its answer. `what`: the start of its error messages."""
        deadline = time.monotonic() + seconds
        try:
            shell = self._free.get(timeout=seconds)
        except queue.Empty:
            raise TransportError(self.node, "the shells on the node are busy for too long") from None
        try:
            return ask(shell, deadline)
        except ShellError as e:
            raise TransportError(self.node, f"{what}: {e}") from e
        finally:
            self._free.put(shell)

    def _put(self, folder: str, files: Mapping[str, RemoteFile], empty: Sequence[str]) -> None:
        if not files or empty or len(files) > SMALL_FILES or sum(len(f.data) for f in files.values()) > SMALL_BYTES:
            super()._put(folder, files, empty)
            return
        for name, file in files.items():
            path = f"{folder}/{name}"
            self._ask(lambda shell, until, p=path, f=file: shell.write(p, f, until), f"cannot write {path}")  # type: ignore[misc]

    def _rename(self, src: str, dst: str) -> bool:
        return self._ask(lambda shell, deadline: shell.rename(src, dst, deadline), f"cannot rename {src}")

    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        command_of(self.node, argv)

        def run(shell: KeptShell, deadline: float) -> Completed:
            return shell.run(argv, stdin, timeout, time.monotonic() + timeout)

        try:
            return self._ask(run, name)
        except SlowError as e:
            raise SlowError(self.node, f"{name} took longer than {timeout:g} s") from e
