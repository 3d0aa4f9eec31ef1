"""A node reached over SSH: one connection, opened by `connect` before threads share it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.transport.base import Completed
from orchestrator.transport.kept_shell import AFTERLIFE_S, MAX_OUTPUT, KeptShell, ShellLost
from orchestrator.transport.quoting import command_line, limited_line
from orchestrator.transport.shell import CALL_S, ShellTransport
from orchestrator.transport.ssh.connecting import StopSignal, connect
from orchestrator.transport.ssh.link import GRACE_S, WATCHDOG, Link, SshChannel
from orchestrator.transport.ssh.resolve import HostRequest, resolve


class SshTransport(ShellTransport):
    """The transport `ssh`."""

    def __init__(
        self,
        node: str,
        host: str,
        *,
        user: str | None = None,
        port: int | None = None,
        identity: str | None = None,
        proxy_jump: str | None = None,
        accept_new_host_keys: bool = False,
        connect_timeout: float = 5.0,
        patient: bool = True,
        config: Path | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """`host`: a name, an address or a Host of ssh_config; what is None there comes from that file.

        `connect_timeout`: seconds for all of `connect`, retries included. `patient`: a host that refuses the connection
        is tried again within them; without it that is its answer. `config`: an ssh_config to read instead of
        the user's and the system's. `stop`: set it, and a `connect` that is under way ends at once.
        """
        self.node = node
        self._ask = HostRequest(host, user, port, identity, proxy_jump)
        self._accept_new, self._connect_timeout, self._config = accept_new_host_keys, connect_timeout, config
        self._patient, self._stop = patient, StopSignal(stop)
        self._connecting = threading.Lock()
        self._link: Link | None = None
        self._shell: KeptShell | None = None

    # --- the connection -------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Make a new connection; an old one is closed. Raises UnreachableError, HostKeyError, LoginError."""
        with self._connecting:
            self._stop.clear()
            self._hang_up()
            link = connect(
                self.node,
                lambda: resolve(self.node, self._ask, self._config),
                accept_new=self._accept_new,
                timeout=self._connect_timeout,
                patient=self._patient,
                stop=self._stop,
            )
            self._link, self._shell = link, KeptShell(self.node, link.start)
            if self._stop.is_set():
                self._hang_up()

    def close(self) -> None:
        """Never waits; calls that are under way in other threads end with a TransportError."""
        self._stop.set()
        self._hang_up()

    def _hang_up(self) -> None:
        link, self._link, self._shell = self._link, None, None
        if link is not None:
            link.close()

    def _connected(self) -> tuple[Link, KeptShell]:
        link, shell = self._link, self._shell
        if link is None or shell is None:
            raise UnreachableError(self.node, "there is no connection")
        if not link.alive:
            raise link.broken()
        return link, shell

    def _start(self, command: str, deadline: float) -> SshChannel:
        link, shell = self._connected()
        return link.start(command, deadline, shell.make_room)

    # --- commands -------------------------------------------------------------------------------------------------

    def open(self, argv: Sequence[str]) -> SshChannel:
        """Run a command and read what it prints as it comes. Its input ends when the channel is closed."""
        try:
            line = command_line(argv)
        except ValueError as e:
            raise TransportError(self.node, str(e)) from e
        return self._start(line, time.monotonic() + CALL_S)

    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        link, _ = self._connected()
        deadline = time.monotonic() + timeout
        try:
            command = limited_line(argv, timeout + AFTERLIFE_S)
        except ValueError as e:
            raise TransportError(self.node, str(e)) from e
        try:
            with (
                closing(self._start(command, deadline)) as channel,
                WATCHDOG.limit(deadline + GRACE_S, lambda: link.close("the link takes no more data")),
            ):
                channel.feed(stdin, deadline)
                out = bytearray()
                while more := channel.read(1 << 20, deadline):
                    out += more
                    if len(out) > MAX_OUTPUT:
                        raise TransportError(self.node, f"{name} printed more than {MAX_OUTPUT >> 20} MiB")
                code = channel.exit_code(deadline)
                if code is None:
                    raise link.broken()
                return Completed(code, bytes(out), channel.stderr)
        except TimeoutError as e:
            raise SlowError(self.node, f"{name} took longer than {timeout:g} s") from e
        except OSError as e:
            raise UnreachableError(self.node, f"the connection broke ({link.why() or e})") from e

    # --- files ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _kept_shell(self, deadline: float) -> Iterator[KeptShell]:
        link, shell = self._connected()
        try:
            with WATCHDOG.limit(deadline + GRACE_S, lambda: link.close("the link takes no more data")):
                yield shell
        except ShellLost as e:
            if not link.alive:
                raise link.broken() from e
            raise
