"""Session channels of a connection: how many at once, bytes both ways with time limits, and how a command ended."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from orchestrator.transport.ssh.deadlines import WATCHDOG
from orchestrator.transport.ssh.errors import UnreachableError

MAX_SESSIONS = 6
"""sshd's default MaxSessions is 10, and it counts a closed one a moment longer."""
TRY_S = 1.0
CHUNK = 32768 - 64
"""What paramiko puts into one packet."""
MAX_WORDS = 256 * 1024
"""Of standard error only the end is kept, in bytes."""
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
        self._words = bytearray()
        self._ready = threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        raw.in_buffer.set_event(self._ready)
        raw.in_stderr_buffer.set_event(self._ready)

    # --- bytes ----------------------------------------------------------------------------------------------------

    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Up to `size` bytes as soon as there are any, b"" at the end. Raises TimeoutError."""
        raw = self.raw
        while True:
            self._keep_words()
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
            sent = self.raw.send(bytes(view[:CHUNK]))
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
        """Negative: killed by that signal; None: not told, because the connection broke. Raises TimeoutError."""
        if not self.raw.status_event.wait(left(deadline)):
            raise TimeoutError
        if self.raw.exit_status >= 0:
            return int(self.raw.exit_status)
        name = getattr(self.raw, "exit_signal", "")
        return -int(getattr(signal, f"SIG{name}", 1)) if name else None

    @property
    def words(self) -> bytes:
        """The end of its standard error so far."""
        self._keep_words()
        return bytes(self._words)

    @property
    def ended(self) -> bool:
        return bool(self.raw.closed or self.raw.eof_received)

    def _keep_words(self) -> None:
        while self.raw.recv_stderr_ready():
            self._words += self.raw.recv_stderr(65536)
            del self._words[:-MAX_WORDS]

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
        # the goodbye is a packet, and a stalled link takes none
        thread = threading.Thread(target=self._say_goodbye, name="ssh close", daemon=True)
        thread.start()
        thread.join(1.0)

    def _say_goodbye(self) -> None:
        with WATCHDOG.limit(time.monotonic() + SEND_CLOSE_S, self._stuck):
            with contextlib.suppress(Exception):
                self.raw.close()
            self._release()

    def error(self) -> str:
        """Why it ended: its exit code and last words, or what became of the connection."""
        try:
            code = self.exit_code(time.monotonic() + 2.0)
        except TimeoutError:
            code = None
        words = self.words.decode("utf-8", "replace").strip()[-1000:]
        if code is None:
            why = self._why()
            text = f"the connection broke ({why})" if why else "ended without an exit code"
        else:
            text = f"ended with code {code}"
        return text + (f": {words}" if words else "")
