"""A node reached over SSH: one connection, whose commands run on channels of their own, each with a time limit.

A write into a stalled link blocks until the connection is closed: a timer does that for a call that is not back in
time. (Imports fabric and paramiko only when it connects: they take a fifth of a second.)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import SlowError, TransportError, UnreachableError
from orchestrator.transport.base import Completed, TimedChannel, command_of, limited
from orchestrator.transport.kept_shell import AFTERLIFE_S, MAX_OUTPUT
from orchestrator.transport.shell import CALL_S, CommandTransport

if TYPE_CHECKING:
    from orchestrator.transport.ssh_connection import Hop

MAX_SESSIONS = 6
"""sshd's default MaxSessions is 10, and it counts a closed one a moment longer."""
CHUNK = 32768 - 64
"""Payload of one packet of paramiko."""
MAX_WORDS = 256 * 1024
"""Bytes of standard error that are kept, from its end."""
INLINE_BYTES = 16 * 1024
"""Standard input of this size fits any host's first window; more is fed by a thread."""
GRACE_S = 2.0
"""A call that is so much over its limit hangs in a stalled link."""
RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class HostRequest:
    """A requested host; None: as in the ssh_config."""

    host: str
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    proxy_jump: str | None = None
    """Hops as in ssh_config: `[user@]host[:port]`, several separated by commas, or `none`."""
    config: Path | None = None
    """An ssh_config to read instead of the user's and the system's."""


def left(deadline: float | None) -> float | None:
    """Seconds until then, at least a moment."""
    return None if deadline is None else max(0.001, deadline - time.monotonic())


class SshChannel(TimedChannel):
    """A command on the node: the Channel of `open`, and with time limits what `run` is made of."""

    def __init__(self, node: str, raw: Any, release: Callable[[], None], why: Callable[[], str]) -> None:
        """`raw`: an open paramiko channel. `why`: why the connection broke, or ""."""
        self._node, self._raw, self._release, self._why = node, raw, release, why
        self._stderr = bytearray()
        self._ready = threading.Event()
        self._closing = threading.Lock()
        raw.in_buffer.set_event(self._ready)
        raw.in_stderr_buffer.set_event(self._ready)

    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Return up to `size` bytes as soon as there are any, b"" at the end. Raise TimeoutError."""
        raw = self._raw
        while not raw.recv_ready():
            self._keep_stderr()
            if raw.eof_received or raw.closed:
                return bytes(raw.recv(size)) if raw.recv_ready() else b""
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            self._ready.wait(left(deadline))
        return bytes(raw.recv(size))

    @property
    def broken(self) -> str:
        return self._why()

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Raises TimeoutError, or OSError where the command listens no more."""
        view = memoryview(data)
        while view:
            self._raw.settimeout(left(deadline))
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
        """Send all of a command's standard input; in another thread where it might wait for its output to be read."""
        if len(data) <= INLINE_BYTES:
            self._feed(data, deadline)
        else:
            threading.Thread(target=self._feed, args=(data, deadline), name="ssh feed", daemon=True).start()

    def _feed(self, data: bytes, deadline: float) -> None:
        # a command may end without having read everything; a time limit or a break shows where the output is read
        with contextlib.suppress(OSError, EOFError):
            self.send(data, deadline)
            self._raw.shutdown_write()

    def exit_code(self, deadline: float) -> int | None:
        """Exit code; None: unknown, as a signal ended it or the connection broke. Raise TimeoutError."""
        if not self._raw.status_event.wait(left(deadline)):
            raise TimeoutError
        return int(self._raw.exit_status) if self._raw.exit_status >= 0 else None

    @property
    def stderr(self) -> bytes:
        """Standard error so far, its end."""
        self._keep_stderr()
        return bytes(self._stderr)

    @property
    def ended(self) -> bool:
        return bool(self._raw.closed or self._raw.eof_received)

    def _keep_stderr(self) -> None:
        while self._raw.recv_stderr_ready():
            self._stderr += self._raw.recv_stderr(65536)
            del self._stderr[:-MAX_WORDS]

    def close(self) -> None:
        """End the command: its input ends, and nobody reads its output. Readers wake up; never waits for the link."""
        if not self._closing.acquire(blocking=False):
            return
        if self._raw.closed:
            self._release()
            return
        # closing sends a packet, and a stalled link takes none
        thread = threading.Thread(target=self._say_goodbye, name="ssh close", daemon=True)
        thread.start()
        thread.join(1.0)

    def _say_goodbye(self) -> None:
        with contextlib.suppress(Exception):
            self._raw.close()
        self._release()

    def error(self) -> str:
        """Reason of its end: exit code and last message, or that of the broken connection."""
        try:
            code = self.exit_code(time.monotonic() + 2.0)
        except TimeoutError:
            code = None
        return self._end(code, self.stderr)


class Link:
    """The open connections on the way to a node, the node's own last."""

    def __init__(self, node: str, route: Sequence[Hop]) -> None:
        self._node, self._route = node, route
        self._transport = route[-1].connection.transport
        self._room = threading.Semaphore(MAX_SESSIONS)
        self._closed = ""

    def why(self) -> str:
        """Reason why it is broken; "" while it is not."""
        if self._closed or self._transport.is_active():
            return self._closed
        return str(self._transport.saved_exception or "") or "the other side hung up"

    def broken(self) -> UnreachableError:
        return UnreachableError(self._node, f"the connection broke ({self.why() or 'the command ended untimely'})")

    @contextmanager
    def limited(self, deadline: float) -> Iterator[None]:
        """Close the connection if the block is not left by then."""
        timer = threading.Timer((left(deadline) or 0.0) + GRACE_S, self.close, ["the link takes no more data"])
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
        if not self._room.acquire(timeout=left(deadline)):
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
        """An open paramiko channel; None, after a pause, where the host refused one more."""
        import paramiko

        if self.why():
            raise self.broken()
        try:
            return self._transport.open_session(timeout=left(deadline))
        except (paramiko.SSHException, EOFError, OSError) as e:
            if self.why():
                raise self.broken() from e
            # of two that were refused at once, one gets this
            refused = isinstance(e, paramiko.ChannelException) or "Unable to open channel" in str(e)
            if not refused:
                # it may yet be opened, and would then count for ever; a host that does not answer this is gone anyway
                self.close("the host did not answer in time")
                raise UnreachableError(self._node, "the host did not answer in time") from e
            if time.monotonic() + RETRY_S >= deadline:
                raise no_room from e
            time.sleep(RETRY_S)
            return None

    def close(self, why: str = "closed") -> None:
        """Break it off; whoever waits for it wakes up. Never waits for the link."""
        from orchestrator.transport.ssh_connection import hang_up

        self._closed = self._closed or why
        hang_up(self._route)


class SshTransport(CommandTransport):
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
    ) -> None:
        """`host`: a name, an address or a Host of ssh_config; what is None there comes from that file.

        `connect_timeout`: seconds for all of `connect`, retries included. `patient`: a host that refuses the connection
        is tried again within them; without it that is its answer. `config`: an ssh_config to read instead of
        the user's and the system's.
        """
        self.node = node
        self._ask = HostRequest(host, user, port, identity, proxy_jump, config)
        self._accept_new, self._connect_timeout, self._patient = accept_new_host_keys, connect_timeout, patient
        self._stop = threading.Event()
        self._connecting = threading.Lock()
        self._link: Link | None = None

    def connect(self) -> None:
        """Make a new connection; an old one is closed. Raises UnreachableError, HostKeyError, LoginError."""
        from orchestrator.transport.ssh_connection import connect

        with self._connecting:
            self._stop.clear()
            self._hang_up()
            route = connect(
                self.node, self._ask, accept_new=self._accept_new, timeout=self._connect_timeout,
                patient=self._patient, stop=self._stop,
            )  # fmt: skip
            self._link = Link(self.node, route)
            if self._stop.is_set():
                self._hang_up()

    def close(self) -> None:
        """Never waits; calls that are under way in other threads end with a TransportError."""
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
        """Run a command and read what it prints as it comes. Its input ends when the channel is closed."""
        return self._connected().start(command_of(self.node, argv), time.monotonic() + CALL_S)

    def _run(self, argv: Sequence[str], stdin: bytes, timeout: float, name: str) -> Completed:
        link, deadline = self._connected(), time.monotonic() + timeout
        command = limited(command_of(self.node, argv), timeout + AFTERLIFE_S)
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
