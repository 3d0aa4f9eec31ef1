"""Connecting within a time limit: retries where that may help, and ends at once when it is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import tenacity

from orchestrator.errors import UnreachableError
from orchestrator.transport.ssh.link import Link
from orchestrator.transport.ssh.resolve import Hop
from orchestrator.transport.ssh.wire import Dialer

LOOK_S = 0.1
LAST_TRY_S = 0.3
"""Time left below which no other try is begun."""


class StopSignal:
    """A transport's own end or that of whoever uses it: an Event as tenacity wants it."""

    def __init__(self, outer: threading.Event | None) -> None:
        self._own = threading.Event()
        self._outer = outer

    def set(self) -> None:
        self._own.set()

    def clear(self) -> None:
        """Forget our own end; the other stays."""
        self._own.clear()

    def is_set(self) -> bool:
        return self._own.is_set() or (self._outer is not None and self._outer.is_set())

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until it is set."""
        until = time.monotonic() + seconds
        while not self.is_set() and (rest := until - time.monotonic()) > 0:
            self._own.wait(min(rest, LOOK_S))


def connect(
    node: str,
    resolve: Callable[[], Sequence[Hop]],
    *,
    accept_new: bool,
    timeout: float,
    stop: StopSignal,
    patient: bool = True,
) -> Link:
    """An open link; what is refused, reset or silent is tried again, with growing pauses, while there is time.

    Not `patient`: what is refused is refused.

    Raises TransportError.
    """
    deadline = time.monotonic() + timeout

    def may_help(e: BaseException) -> bool:
        if not isinstance(e, UnreachableError) or not e.transient or (e.refused and not patient):
            return False
        return time.monotonic() < deadline - LAST_TRY_S

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(may_help),
        wait=tenacity.wait_exponential(multiplier=0.1, max=1.0) + tenacity.wait_random(0, 0.1),
        stop=tenacity.stop_when_event_set(stop),  # type: ignore[arg-type]
        sleep=stop.sleep,
        reraise=True,
    )
    errors: list[UnreachableError] = []

    def once() -> Link:
        try:
            return _ConnectAttempt(node, resolve, accept_new, deadline).run(stop)
        except UnreachableError as e:
            if e.silent and errors and not e.greeted:  # cut short by our own limit: the error before is the reason
                raise errors[-1] from e
            errors.append(e)
            raise

    return retrying(once)


class _ConnectAttempt:
    """One try in a thread of its own: looking a name up, or a `Match exec`, cannot be interrupted, only left behind."""

    def __init__(self, node: str, resolve: Callable[[], Sequence[Hop]], accept_new: bool, deadline: float) -> None:
        self._node, self._resolve, self._accept_new, self._deadline = node, resolve, accept_new, deadline
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._left = False
        self._dialer: Dialer | None = None
        self._link: Link | None = None
        self._error: BaseException | None = None

    def run(self, stop: StopSignal) -> Link:
        if stop.is_set():
            raise UnreachableError(self._node, "connecting was stopped", transient=False)
        began = time.monotonic()
        threading.Thread(target=self._work, name=f"connect {self._node}", daemon=True).start()
        while not self._done.wait(min(LOOK_S, max(0.001, self._deadline - time.monotonic()))):
            if stop.is_set():
                self._leave()
                raise UnreachableError(self._node, "connecting was stopped", transient=False)
            if time.monotonic() >= self._deadline:
                greeted = self._dialer is not None and self._dialer.greeted
                at = self._leave()
                raise UnreachableError(
                    self._node,
                    f"{at} did not answer within {time.monotonic() - began:.0f} s",
                    silent=True,
                    greeted=greeted,
                )
        if self._error is not None:
            raise self._error
        assert self._link is not None
        return self._link

    def _work(self) -> None:
        try:
            hops = self._resolve()
            with self._lock:
                if self._was_left():
                    return
                self._dialer = Dialer(self._node, hops, accept_new=self._accept_new, deadline=self._deadline)
            self._dialer.dial()
            link = Link(self._node, self._dialer.connections)
            with self._lock:
                self._link = link
                if self._was_left():
                    link.close()
        except BaseException as e:  # noqa: BLE001  raised again in the thread that waits
            self._error = e
        finally:
            self._done.set()

    def _was_left(self) -> bool:
        return self._left

    def _leave(self) -> str:
        """StopSignal caring; what is open is closed. Returns the name of the host that kept us waiting."""
        with self._lock:
            self._left = True
            dialer = self._dialer
            if self._link is not None:
                self._link.close()
        if dialer is None:
            return "the ssh configuration"
        at = dialer.at
        dialer.abandon()
        return at
