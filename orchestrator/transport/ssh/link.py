"""An open connection to a node: it starts commands on session channels, and breaks as a whole."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.transport.ssh.channel import Sessions, SshChannel, left
from orchestrator.transport.ssh.deadlines import WATCHDOG
from orchestrator.transport.ssh.errors import UnreachableError
from orchestrator.transport.ssh.wire import close_connection

GRACE_S = 2.0
"""A call that is so much over its limit hangs in a stalled link."""
RETRY_S, LOOK_S = 0.02, 0.2
PATIENT_REFUSALS = 3
"""The host counts a session that has just ended a moment longer than we do."""


class Link:
    """The connections of a node, the node's own last."""

    def __init__(self, node: str, connections: Sequence[Any]) -> None:
        self._node = node
        self._connections = list(connections)
        self._transport = connections[-1].transport
        self.sessions = Sessions()
        self._why = ""
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        return bool(self._transport.is_active()) and not self._why

    def why(self) -> str:
        """Why it is broken; "" while it is not."""
        if self._why or self._transport.is_active():
            return self._why
        saved = self._transport.saved_exception
        return str(saved) or "the other side hung up" if saved is not None else "the other side hung up"

    def broken(self) -> UnreachableError:
        return UnreachableError(self._node, f"the connection broke ({self.why() or 'the command ended untimely'})")

    def start(self, command: str, deadline: float, make_room: Callable[[], object] | None = None) -> SshChannel:
        """Start a command on a channel of its own, as soon as the host has room for one. Raises TransportError.

        `make_room` is called, again and again, while there is none.
        """
        refusals = 0
        while True:
            if make_room is not None and self.sessions.full:
                make_room()
            if not self.sessions.take(min(deadline, time.monotonic() + LOOK_S)):
                if not self.alive:
                    raise self.broken()
                if time.monotonic() >= deadline:
                    raise self._no_room()
                continue
            try:
                raw = self._session(deadline)
            except BaseException:
                self.sessions.give()
                raise
            if raw is not None:
                self.sessions.opened()
                return self._exec(
                    SshChannel(self._node, raw, self.sessions.give, self.why, self._stuck), command, deadline
                )
            refusals += 1
            self.sessions.refused(surely=refusals > PATIENT_REFUSALS)
            if time.monotonic() >= deadline:
                raise self._no_room()
            time.sleep(RETRY_S * min(refusals, 10))

    def _session(self, deadline: float) -> Any:
        """An open paramiko channel; None where the host refused one more."""
        import paramiko

        try:
            with WATCHDOG.limit(deadline + GRACE_S, self._stuck):
                return self._transport.open_session(timeout=left(deadline))
        except paramiko.ChannelException:
            return None
        except (paramiko.SSHException, EOFError, OSError) as e:
            if self.alive and "Unable to open channel" in str(e):
                return None  # two were refused at once, and the other thread got the exception
            if self.alive and time.monotonic() >= deadline:
                # it may yet be opened, and would then count for ever; a host that does not answer this is gone anyway
                self.close("the host did not answer in time")
                raise UnreachableError(self._node, "the host did not answer in time") from e
            raise self.broken() from e

    def _exec(self, channel: SshChannel, command: str, deadline: float) -> SshChannel:
        import paramiko

        try:
            with WATCHDOG.limit(deadline + GRACE_S, self._stuck):
                channel.raw.exec_command(command.encode("utf-8", "surrogateescape"))
        except (paramiko.SSHException, EOFError, OSError) as e:
            channel.close()
            if self.alive:
                raise UnreachableError(self._node, f"the host starts no command for us: {e}", transient=False) from e
            raise self.broken() from e
        return channel

    def _no_room(self) -> UnreachableError:
        return UnreachableError(
            self._node,
            f"no session became free in time: the host allows {self.sessions.limit} at once on a connection "
            f"(MaxSessions in its sshd_config; 4 are needed, 10 are the default)",
        )

    def _stuck(self) -> None:
        self.close("the link takes no more data")

    def close(self, why: str = "closed") -> None:
        """Break it off; whoever waits for it wakes up. Never waits."""
        with self._lock:
            self._why = self._why or why
        # the first hop has the socket: with it closed, nothing that the others say can block
        for connection in self._connections:
            with contextlib.suppress(Exception):
                close_connection(connection)
        self.sessions.break_()
