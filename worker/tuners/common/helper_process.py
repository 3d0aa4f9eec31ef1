"""A process that works for us, may die of its work, and is replaced then.

There are three kinds: the compilers of a search (`worker/tuners/search/compile_pool.py`), its measuring process
(`worker/tuners/search/measuring_process.py`), and the backends of a bench (`worker/bench/runner.py`). They differ in
how the process is started and how its messages are written (`HelperChannel`). The rest is here:

    start -> send a job -> receive its messages until the answer has come -> send the next ... -> end
                              |
                              +-> HelperDied, HelperTimedOut: it is ended already; `start` begins its successor
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Protocol

from worker.process import Stopwatch

POLL_S = 0.1


class HelperError(Exception):
    """A helper gave no answer. `status`: the status of a row that has no result for this reason."""

    status = "error"


class HelperDied(HelperError):
    """The process is gone: it crashed, or its last message says why it has to end itself."""

    status = "fault"


class HelperTimedOut(HelperError):
    """The process had work and sent nothing for as long as it may. It was ended."""

    status = "timeout"


class HelperRefused(HelperError):
    """The process cannot do this job, and says why. It goes on."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class HelperChannel(Protocol):
    """A process that runs, and our end of the pipe to it."""

    @property
    def connection(self) -> Connection:
        """Our end of the pipe, for `multiprocessing.connection.wait`."""

    def send(self, job: Any) -> None:
        """Write one job. Raises OSError if the pipe is closed."""

    def receive(self) -> Any:
        """Read one message. Raises EOFError or OSError if the pipe is closed."""

    def describe_death(self) -> str:
        """End a process whose pipe is closed; a sentence of how it ended."""

    def end(self) -> None:
        """End the process by force."""


class HelperProcess:
    """One helper at a time: the process, or its successor after a death.

    Each job has one answer. Other messages say that the work goes on; `is_answer` tells them apart. A process may send
    `last_words` before it ends itself.
    """

    silence = "no sign of life"
    """The words of HelperTimedOut for what there was."""

    def __init__(self, start_channel: Callable[[], HelperChannel], limit_s: float) -> None:
        """`start_channel` starts a process. `limit_s`: while it has work it may be silent for this many seconds."""
        self.limit_s = limit_s
        self.answers_owed = 0
        """The jobs that were sent and are not answered."""
        self._start_channel = start_channel
        self._channel: HelperChannel | None = None
        self._silent_s = 0.0
        self._stopwatch = Stopwatch()

    @property
    def is_alive(self) -> bool:
        """True from `start` until `end`, or until its death was noticed."""
        return self._channel is not None

    @property
    def connections(self) -> list[Connection]:
        """The connection to wait on, if there is a process."""
        return [] if self._channel is None else [self._channel.connection]

    def is_answer(self, message: Any) -> bool:
        """False for a message that only says that the work goes on."""
        return True

    def last_words(self, message: Any) -> str:
        """The reason for which a process ends itself after this message; "" if it goes on."""
        return ""

    def start(self, *, greets: bool = False) -> None:
        """Start the process; one that runs is ended. `greets`: its first message answers no job. Raises OSError."""
        self.end()
        self._channel = self._start_channel()
        self.answers_owed = int(greets)
        self._hear()

    def send(self, job: Any) -> bool:
        """Send a job. False if the process is gone; `receive` then raises HelperDied, which says how."""
        assert self._channel is not None
        if not self.answers_owed:
            self._hear()  # it had nothing to say until now
        self.answers_owed += 1
        try:
            self._channel.send(job)
        except OSError:
            return False
        return True

    def receive(self, wait_s: float = 0.0, limit_s: float | None = None) -> Any:
        """The next message; None if none comes within `wait_s` seconds, or no process runs.

        `limit_s`: another limit than usual. Raises HelperDied, HelperTimedOut.
        """
        if self._channel is None:
            return None
        try:
            message = self._channel.receive() if self._channel.connection.poll(wait_s) else None
        except (EOFError, OSError):
            detail = self._channel.describe_death()
            self._forget()
            raise HelperDied(detail) from None
        if message is None:
            self._check_silence(self.limit_s if limit_s is None else limit_s)
            return None
        self._hear()
        reason = self.last_words(message)
        if reason:
            self.end()
            raise HelperDied(reason)
        if self.is_answer(message):
            self.answers_owed = max(0, self.answers_owed - 1)
        return message

    def messages(self) -> Iterator[Any]:
        """The messages that have come. Raises HelperDied, HelperTimedOut after the last of them."""
        message = self.receive()
        while message is not None:
            yield message
            message = self.receive()

    def wait_for_answer(self, limit_s: float | None = None, alive: Callable[[], None] = lambda: None) -> Any:
        """The next answer; `alive` is called again and again meanwhile. Raises HelperDied, HelperTimedOut."""
        while True:
            alive()
            message = self.receive(POLL_S, limit_s)
            if message is not None and self.is_answer(message):
                return message

    def end(self) -> None:
        """End the process by force, if there is one."""
        if self._channel is not None:
            self._channel.end()
        self._forget()

    def _hear(self) -> None:
        self._silent_s = 0.0
        self._stopwatch.turn()

    def _check_silence(self, limit_s: float) -> None:
        self._silent_s += self._stopwatch.turn()
        if self.answers_owed and self._silent_s > limit_s:
            self.end()
            raise HelperTimedOut(f"{self.silence} for {limit_s:g} s")

    def _forget(self) -> None:
        self._channel = None
        self.answers_owed = 0
