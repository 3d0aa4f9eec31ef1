"""A node where every command costs a start: so short ones share a few shells that are kept open."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.transport.base import Channel, Completed
from orchestrator.transport.kept_shell import KeptShell, ShellError, ShellLost, TimedChannel
from orchestrator.transport.local import LocalTransport, ProcessChannel
from orchestrator.transport.quoting import command_line
from orchestrator.transport.shell import CALL_S, ShellTransport
from orchestrator.transport.ssh import SshTransport
from orchestrator.transport.ssh.link import SshChannel

MAX_SHELLS = 4
"""Shells at once: a command that takes long holds one."""
CONNECT_S = 30.0
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--unbuffered", "--quiet")


class Opener(Protocol):
    """Starts commands on a node."""

    def connect(self) -> None:
        """Make ready for `start`, again where a connection broke. Raises TransportError."""

    def start(self, command: str, deadline: float) -> TimedChannel:
        """Start a line of shell text. Raises TransportError."""

    def close(self) -> None:
        """Let go of what `connect` made."""


class SrunOpener:
    """Starts steps that share a Slurm job's resources with all its other steps."""

    def __init__(self, transport: LocalTransport | SshTransport, way: Sequence[str]) -> None:
        """`transport`: to where `srun` runs, for this alone. `way`: options for the job and its CPUs."""
        self._transport, self._argv = transport, (*SRUN, *way, "sh", "-c")
        self.connect, self.close = transport.connect, transport.close

    def start(self, command: str, deadline: float) -> ProcessChannel | SshChannel:
        """Start a line of shell text as a step. Raises TransportError."""
        return self._transport.open([*self._argv, command])


class ExecTransport(ShellTransport):
    """The transport `exec`."""

    def __init__(self, node: str, opener: Opener, prelude: str = "") -> None:
        """`prelude`: shell text before every command, which goes to the folder where commands begin."""
        self.node = node
        self._opener, self._prelude, self._open = opener, prelude, False
        self._shells = [KeptShell(node, self._start) for _ in range(MAX_SHELLS)]
        self._free: queue.LifoQueue[KeptShell] = queue.LifoQueue()
        for shell in self._shells:
            self._free.put(shell)

    def connect(self) -> None:
        """Start a first shell; older ones are closed. Raises TransportError."""
        self._drop_shells()
        self._opener.connect()
        self._open = True
        deadline = time.monotonic() + CONNECT_S
        with self._kept_shell(deadline) as shell:
            shell.open(deadline)

    def close(self) -> None:
        """Calls that are under way in other threads end with a TransportError."""
        self._open = False
        self._drop_shells()
        self._opener.close()

    def _drop_shells(self) -> None:
        for shell in self._shells:
            shell.close()

    def open(self, argv: Sequence[str]) -> Channel:
        """Run a command and read what it prints as it comes. Its input ends when the channel is closed."""
        return self._start(_line(self.node, argv), time.monotonic() + CALL_S)

    def _start(self, command: str, deadline: float) -> TimedChannel:
        if not self._open:
            raise UnreachableError(self.node, "there is no connection")
        return self._opener.start(self._prelude + command, deadline)

    @contextmanager
    def _kept_shell(self, deadline: float) -> Iterator[KeptShell]:
        """A shell that nobody else uses, as soon as there is one."""
        try:
            shell = self._free.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TransportError(self.node, "the shells on the node are busy for too long") from None
        try:
            yield shell
        except ShellLost as e:
            raise UnreachableError(self.node, str(e)) from e
        finally:
            self._free.put(shell)

    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        _line(self.node, argv)
        try:
            with self._kept_shell(time.monotonic() + CALL_S) as shell:
                return shell.run(argv, stdin, timeout, time.monotonic() + timeout)
        except SlowError as e:
            raise SlowError(self.node, f"{name} took longer than {timeout:g} s") from e
        except ShellError as e:
            raise TransportError(self.node, f"{name}: {e}") from e


def _line(node: str, argv: Sequence[str]) -> str:
    try:
        return command_line(argv)
    except ValueError as e:
        raise TransportError(node, str(e)) from e
