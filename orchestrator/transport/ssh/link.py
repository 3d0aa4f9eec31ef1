"""Open connection to a node: sessions on channels with time limits, and how a command ended.

A write into a stalled link blocks until the link is closed: the watchdog does that, for calls that are not back in
time.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import UnreachableError


@dataclass(order=True, slots=True)
class _Limit:
    at: float
    number: int
    act: Callable[[], None] | None = field(compare=False)


class Watchdog:
    """One thread, started at the first need, that acts on the calls which are not back in time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limits: list[_Limit] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, at: float, act: Callable[[], None]) -> Iterator[None]:
        """Call `act` from another thread if the block is not left by `at` (time.monotonic()); it must not wait."""
        limit = _Limit(at, next(self._numbers), act)
        with self._changed:
            heapq.heappush(self._limits, limit)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="ssh watchdog", daemon=True)
                self._thread.start()
            elif self._limits[0] is limit:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                limit.act = None
                while self._limits and self._limits[0].act is None:
                    heapq.heappop(self._limits)

    def _watch(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                if not self._limits:
                    self._changed.wait()
                    continue
                if self._limits[0].at > now:
                    self._changed.wait(self._limits[0].at - now)
                    continue
                act = heapq.heappop(self._limits).act
            if act is not None:
                act()


WATCHDOG = Watchdog()


MAX_SESSIONS = 6
"""sshd's default MaxSessions is 10, and it counts a closed one a moment longer."""
TRY_S = 1.0
CHUNK = 32768 - 64
"""Payload of one packet of paramiko."""
MAX_WORDS = 256 * 1024
"""Bytes of standard error that are kept, from its end."""
INLINE_BYTES = 16 * 1024
"""Standard input of this size fits any host's first window; more is fed by a thread."""
SEND_CLOSE_S = 10.0


def left(deadline: float | None) -> float | None:
    """Seconds until then, at least a moment."""
    return None if deadline is None else max(0.001, deadline - time.monotonic())


class Sessions:
    """Counts the sessions in use. The host may allow fewer: then it learns that, and now and then tries one more."""

    def __init__(self) -> None:
        self.limit = MAX_SESSIONS
        self._used = 0
        self._tried = 0.0
        self._changed = threading.Condition()
        self._broken = False

    @property
    def full(self) -> bool:
        return self._used >= self.limit

    def take(self, deadline: float) -> bool:
        """Wait for a free session. False where there is none in time, or the connection is gone."""
        with self._changed:
            while not self._broken:
                now = time.monotonic()
                try_one = self._used < MAX_SESSIONS and now - self._tried >= TRY_S
                if self._used < self.limit or try_one:
                    if self._used >= self.limit:
                        self._tried = now
                    self._used += 1
                    return True
                if now >= deadline:
                    return False
                self._changed.wait(min(deadline - now, TRY_S))
            return False

    def opened(self) -> None:
        """The host has as many open as we think."""
        with self._changed:
            self.limit = max(self.limit, self._used)

    def refused(self, *, surely: bool) -> None:
        """The host refused one more; `surely`: and not only because it still counts one that has just ended."""
        with self._changed:
            if surely:
                self.limit = max(1, self._used - 1)
                self._tried = time.monotonic()
            self._used -= 1
            self._changed.notify_all()

    def give(self) -> None:
        """One of ours ended."""
        with self._changed:
            self._used -= 1
            self._changed.notify_all()

    def break_(self) -> None:
        """Wake up whoever waits: nothing will become free."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()


class SshChannel:
    """A command on the node: the Channel of `open`, and with time limits what `run` and the kept shell are made of."""

    def __init__(
        self, node: str, raw: Any, release: Callable[[], None], why: Callable[[], str], stuck: Callable[[], None]
    ) -> None:
        """`raw`: an open paramiko channel on which nothing runs yet. `why`: why the connection broke, or ""."""
        self.raw = raw
        """The paramiko channel, which is much like a socket; for those who must have one."""
        self._node = node
        self._release, self._why, self._stuck = release, why, stuck
        self._stderr = bytearray()
        self._ready = threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        raw.in_buffer.set_event(self._ready)
        raw.in_stderr_buffer.set_event(self._ready)

    # --- bytes ----------------------------------------------------------------------------------------------------

    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Return up to `size` bytes as soon as there are any, b"" at the end. Raise TimeoutError."""
        raw = self.raw
        while True:
            self._keep_stderr()
            if raw.recv_ready():
                return bytes(raw.recv(size))
            if raw.eof_received or raw.closed:
                return bytes(raw.recv(size)) if raw.recv_ready() else b""
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            self._ready.wait(left(deadline))

    def write(self, data: bytes) -> None:
        """Send all of `data` to its standard input. Raises TransportError where it does not take it any more."""
        try:
            self.send(data)
        except Exception as e:  # of paramiko, EOFError and OSError alike
            why = self._why()
            text = f"the connection broke ({why})" if why else "the command takes no more input"
            raise UnreachableError(self._node, text) from e

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Raises TimeoutError, or OSError where the command listens no more."""
        view = memoryview(data)
        while view:
            self.raw.settimeout(left(deadline))
            try:
                sent = self.raw.send(bytes(view[:CHUNK]))
            except TimeoutError:
                raise
            except (EOFError, OSError) as e:  # paramiko's for what broke while it wrote, or was closed before
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
        with contextlib.suppress(Exception):
            self.send(data, deadline)
            self.end_input()

    def end_input(self) -> None:
        """The command's standard input ends."""
        with contextlib.suppress(OSError, EOFError):
            self.raw.shutdown_write()

    def exit_code(self, deadline: float | None = None) -> int | None:
        """Exit code; negative: killed by that signal; None: unknown, as the connection broke. Raise TimeoutError."""
        if not self.raw.status_event.wait(left(deadline)):
            raise TimeoutError
        if self.raw.exit_status >= 0:
            return int(self.raw.exit_status)
        name = getattr(self.raw, "exit_signal", "")
        return -int(getattr(signal, f"SIG{name}", 1)) if name else None

    @property
    def stderr(self) -> bytes:
        """Standard error so far, its end."""
        self._keep_stderr()
        return bytes(self._stderr)

    @property
    def ended(self) -> bool:
        return bool(self.raw.closed or self.raw.eof_received)

    def _keep_stderr(self) -> None:
        while self.raw.recv_stderr_ready():
            self._stderr += self.raw.recv_stderr(65536)
            del self._stderr[:-MAX_WORDS]

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the command: its input ends, and nobody reads its output. Readers wake up; never waits for the link."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self.raw.closed:
            self._release()
            return
        # closing sends a packet, and a stalled link takes none
        thread = threading.Thread(target=self._say_goodbye, name="ssh close", daemon=True)
        thread.start()
        thread.join(1.0)

    def _say_goodbye(self) -> None:
        with WATCHDOG.limit(time.monotonic() + SEND_CLOSE_S, self._stuck):
            with contextlib.suppress(Exception):
                self.raw.close()
            self._release()

    def error(self) -> str:
        """Reason of its end: exit code and last message, or that of the broken connection."""
        try:
            code = self.exit_code(time.monotonic() + 2.0)
        except TimeoutError:
            code = None
        last = self.stderr.decode("utf-8", "replace").strip()[-1000:]
        if code is None:
            why = self._why()
            text = f"the connection broke ({why})" if why else "ended without an exit code"
        else:
            text = f"ended with code {code}"
        return text + (f": {last}" if last else "")


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
        """Reason why it is broken; "" while it is not."""
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
        # the first hop has the socket: once it is closed, no packet of the other hops can block
        for connection in self._connections:
            with contextlib.suppress(Exception):
                close_connection(connection)
        self.sessions.break_()


def close_connection(connection: Any) -> None:
    """Close without waiting: fabric's own close would send a packet through a link that may be stalled."""
    transport = connection.client.get_transport()
    if transport is not None:
        with contextlib.suppress(Exception):
            transport.close()
    with contextlib.suppress(Exception):
        connection.client.close()
