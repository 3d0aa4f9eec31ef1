"""The transport `ssh`: one connection to a node. Each command has its own channel and a time limit.

`SshTransport.connect` opens the connection (ssh_connection.py) and keeps it as a `Link`, which starts commands; each is
an `SshChannel`.

A write into a stalled link blocks until the connection is closed, so a timer closes it when a call takes too long.
(fabric and paramiko are imported only on connecting, because that takes a fifth of a second.)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.transport.base import Channel, Completed
from orchestrator.transport.commands import (
    AFTERLIFE_S,
    CALL_S,
    MAX_OUTPUT,
    CommandTransport,
    command_line,
    limited,
)
from orchestrator.transport.ssh_config import HostRequest

if TYPE_CHECKING:
    from orchestrator.transport.ssh_connection import Hop

MAX_SESSIONS = 6
"""sshd's default MaxSessions is 10, and it still counts a closed session for a moment."""
CHUNK = 32768 - 64
"""Payload of one packet of paramiko."""
MAX_STDERR = 256 * 1024
"""Bytes that we keep of the end of standard error."""
INLINE_BYTES = 16 * 1024
"""Standard input up to this size fits any host's first window. A thread feeds larger input."""
GRACE_S = 2.0
"""A call that exceeds its limit by this much is stuck in a stalled link."""
RETRY_S = 0.05
"""Pause after the host refused a session, because it still counts one that we closed."""


def seconds_until(deadline: float | None) -> float | None:
    """Seconds until the deadline, always more than zero; None if there is no deadline."""
    return None if deadline is None else max(0.001, deadline - time.monotonic())


class SshChannel(Channel):
    """A command on the node. `open` returns it as a Channel; `run` uses it with time limits."""

    def __init__(self, node: str, raw: Any, release: Callable[[], None], why: Callable[[], str]) -> None:
        """`raw`: an open paramiko channel. `why`: why the connection broke, or ""."""
        self._node = node
        self._raw = raw
        self._release = release
        self._why = why
        self._stderr = bytearray()
        self._ready = threading.Event()
        self._closing = threading.Lock()
        raw.in_buffer.set_event(self._ready)
        raw.in_stderr_buffer.set_event(self._ready)

    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Return up to `size` bytes as soon as there are any, b"" at the end. Raise TimeoutError."""
        raw = self._raw
        # paramiko clears the event when a buffer is emptied, although the other one may have data by then: so standard
        # error is emptied first, and only then is standard output looked at
        self._keep_stderr()
        while not raw.recv_ready():
            if raw.eof_received or raw.closed:
                return bytes(raw.recv(size)) if raw.recv_ready() else b""
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            self._ready.wait(seconds_until(deadline))
            self._keep_stderr()
        return bytes(raw.recv(size))

    @property
    def broken(self) -> str:
        return self._why()

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Raises TimeoutError, or OSError if the command no longer reads its input."""
        view = memoryview(data)
        while view:
            self._raw.settimeout(seconds_until(deadline))
            try:
                sent = self._raw.send(bytes(view[:CHUNK]))
            except TimeoutError:
                raise
            except Exception as e:  # paramiko's too
                raise ConnectionResetError("the connection broke") from e
            if not sent:
                raise BrokenPipeError("the command reads no more")
            view = view[sent:]

    def feed(self, data: bytes, deadline: float) -> None:
        """Send the whole standard input; a large one in a thread, as the command may block until we read its output."""
        if len(data) <= INLINE_BYTES:
            self._feed(data, deadline)
        else:
            threading.Thread(target=self._feed, args=(data, deadline), name="ssh feed", daemon=True).start()

    def _feed(self, data: bytes, deadline: float) -> None:
        # a command may end before it has read everything; timeouts and breaks are reported by the reader of its output
        with contextlib.suppress(OSError, EOFError):
            self.send(data, deadline)
            self._raw.shutdown_write()

    def exit_code(self, deadline: float) -> int | None:
        """Exit code, or None if a signal ended the command or the connection broke. Raise TimeoutError."""
        if not self._raw.status_event.wait(seconds_until(deadline)):
            raise TimeoutError
        return int(self._raw.exit_status) if self._raw.exit_status >= 0 else None

    @property
    def stderr(self) -> bytes:
        """The end of standard error so far."""
        self._keep_stderr()
        return bytes(self._stderr)

    @property
    def ended(self) -> bool:
        return bool(self._raw.closed or self._raw.eof_received)

    def _keep_stderr(self) -> None:
        while self._raw.recv_stderr_ready():
            self._stderr += self._raw.recv_stderr(65536)
            del self._stderr[:-MAX_STDERR]

    def close(self) -> None:
        """End the command's input and stop reading its output. Wakes readers up; never waits for the link."""
        if not self._closing.acquire(blocking=False):
            return
        if self._raw.closed:
            self._release()
            return
        # closing sends a packet, and a stalled link takes none
        thread = threading.Thread(target=self._close_raw, name="ssh close", daemon=True)
        thread.start()
        thread.join(1.0)

    def _close_raw(self) -> None:
        with contextlib.suppress(Exception):
            self._raw.close()
        self._release()

    def error(self) -> str:
        """The reason why the command ended: its exit code and last message, or why the connection broke."""
        try:
            code = self.exit_code(time.monotonic() + 2.0)
        except TimeoutError:
            code = None
        return self._describe_end(code, self.stderr)


class Link:
    """The open connections on the way to a node; the last one is to the node itself."""

    def __init__(self, node: str, route: Sequence[Hop]) -> None:
        self._node = node
        self._route = route
        self._transport = route[-1].connection.transport
        self._room = threading.Semaphore(MAX_SESSIONS)
        self._closed = ""

    def why(self) -> str:
        """The reason why it broke; "" while it works."""
        if self._closed or self._transport.is_active():
            return self._closed
        return str(self._transport.saved_exception or "") or "the other side hung up"

    def broken(self) -> UnreachableError:
        return UnreachableError(self._node, f"the connection broke ({self.why() or 'the command ended untimely'})")

    @contextmanager
    def limited(self, deadline: float) -> Iterator[None]:
        """Close the connection if the block takes longer than this."""
        timer = threading.Timer((seconds_until(deadline) or 0.0) + GRACE_S, self.close, ["the link takes no more data"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def start(self, command: str, deadline: float) -> SshChannel:
        """Start a command on a channel of its own, as soon as the host has room for one. Raises TransportError."""
        no_room = UnreachableError(
            self._node,
            f"no session became free in time: the host allows few at once, or {MAX_SESSIONS} are in use (MaxSessions in"
            " its sshd_config; 4 are needed, 10 are the default)",
        )
        if not self._room.acquire(timeout=seconds_until(deadline)):
            raise no_room
        channel = None
        try:
            with self.limited(deadline):
                while channel is None:
                    channel = self._session(deadline, no_room)
                channel.exec_command(command.encode("utf-8", "surrogateescape"))
        except BaseException as e:
            self._room.release()
            if isinstance(e, TransportError) or not isinstance(e, Exception):
                raise
            if self.why():
                raise self.broken() from e
            raise UnreachableError(self._node, f"the host starts no command for us: {e}", transient=False) from e
        return SshChannel(self._node, channel, self._room.release, self.why)

    def _session(self, deadline: float, no_room: UnreachableError) -> Any:
        """An open paramiko channel; None, after a pause, if the host refused another one."""
        import paramiko

        if self.why():
            raise self.broken()
        try:
            return self._transport.open_session(timeout=seconds_until(deadline))
        except (paramiko.SSHException, EOFError, OSError) as e:
            if self.why():
                raise self.broken() from e
            # if two are refused at once, one of them gets this error
            refused = isinstance(e, paramiko.ChannelException) or "Unable to open channel" in str(e)
            if not refused:
                # the host may still open it, and would count it for ever. If it does not answer, it is gone anyway.
                self.close("the host did not answer in time")
                raise UnreachableError(self._node, "the host did not answer in time") from e
            if time.monotonic() + RETRY_S >= deadline:
                raise no_room from e
            time.sleep(RETRY_S)
            return None

    def close(self, why: str = "closed") -> None:
        """Close the connection and wake up everyone who waits for it. Never waits for the link."""
        from orchestrator.transport.ssh_connection import hang_up

        self._closed = self._closed or why
        hang_up(self._route)


class SshTransport(CommandTransport):
    """The transport `ssh` (base.py::Transport)."""

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
    ) -> None:
        """`host`: a name, an address or a Host of ssh_config. Options that are None come from that file.

        `connect_timeout`: seconds for all of `connect`, retries included. `patient`: if a host refuses the connection,
        try again within these seconds; otherwise fail at once. `config`: an ssh_config to read instead of the user's
        and the system's.
        """
        self.node = node
        self._request = HostRequest(host, user, port, identity, proxy_jump, config)
        self._accept_new = accept_new_host_keys
        self._connect_timeout = connect_timeout
        self._patient = patient
        self._stop = threading.Event()
        self._connecting = threading.Lock()
        self._link: Link | None = None

    def connect(self) -> None:
        """Close any old connection and make a new one. Raises UnreachableError, HostKeyError, LoginError."""
        from orchestrator.transport.ssh_connection import connect

        with self._connecting:
            self._stop.clear()
            self._hang_up()
            route = connect(
                self.node,
                self._request,
                accept_new=self._accept_new,
                timeout=self._connect_timeout,
                patient=self._patient,
                stop=self._stop,
            )
            self._link = Link(self.node, route)
            if self._stop.is_set():
                self._hang_up()

    def close(self) -> None:
        """Never waits. Calls in progress in other threads end with a TransportError."""
        self._stop.set()
        self._hang_up()

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _connected(self) -> Link:
        if self._link is None:
            raise UnreachableError(self.node, "there is no connection")
        return self._link

    def open(self, argv: Sequence[str]) -> SshChannel:
        """Run a command and stream its output. Its input ends when the channel is closed."""
        return self._connected().start(command_line(self.node, argv), time.monotonic() + CALL_S)

    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        link = self._connected()
        deadline = time.monotonic() + timeout
        command = limited(command_line(self.node, argv), timeout + AFTERLIFE_S)
        try:
            with closing(link.start(command, deadline)) as channel, link.limited(deadline):
                channel.feed(stdin, deadline)
                out = bytearray()
                while more := channel.read(1 << 20, deadline):
                    out += more
                    if len(out) > MAX_OUTPUT:
                        raise TransportError(self.node, f"{name} printed more than {MAX_OUTPUT >> 20} MiB")
                code = channel.exit_code(deadline)
                if code is None:
                    raise link.broken()
                return Completed(code if code <= 128 else 128 - code, bytes(out), channel.stderr)
        except TimeoutError as e:
            raise SlowError(self.node, f"{name} took longer than {timeout:g} s") from e
        except OSError as e:
            raise UnreachableError(self.node, f"the connection broke ({link.why() or e})") from e
