"""The benchmark of many nodes: nodes are prepared a batch at a time, and its figures are of its window alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from benchmarks import scale
from orchestrator.engines import Engine
from orchestrator.errors import TransportError
from orchestrator.transport import Transport
from orchestrator.transport.base import Completed
from tests.waiting import wait_until


class Beats:
    """A stream with one beat, open until it is closed."""

    def __init__(self) -> None:
        beat = b'{"t":1.0,"epoch":1,"slots":{}}'
        self._data = b"B %d\n" % len(beat) + beat
        self._closed = threading.Event()

    def read(self, size: int) -> bytes:
        data, self._data = self._data, b""
        if not data:
            self._closed.wait()
        return data

    def close(self) -> None:
        self._closed.set()

    def error(self) -> str:
        return "closed"


class Line:
    """Transport to a node that is reached once `goes` is set, and then fails or not; and its engine."""

    def __init__(self, node: str, *, fails: bool = False) -> None:
        self.node, self.fails = node, fails
        self.called, self.goes = threading.Event(), threading.Event()

    def connect(self) -> None:
        self.called.set()
        self.goes.wait()
        if self.fails:
            raise TransportError(self.node, "no answer")

    def close(self) -> None: ...

    def put(self, folder: str, files: Mapping[str, Any], empty: Sequence[str] = ()) -> None: ...

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        return Completed(0, b"", b"")

    def open(self, argv: Sequence[str]) -> Beats:
        return Beats()


def test_a_node_is_prepared_when_one_before_it_is_up_or_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale.BatchedDriver, "_batch", threading.BoundedSemaphore(1))
    lines = [Line("up"), Line("failed", fails=True), Line("last")]
    drivers = [
        scale.BatchedDriver(
            cast(Transport, x), cast(Engine, x), "folder", {}, (), ("0",), {}, 1, {}, lambda _: None, launch=False
        )
        for x in lines
    ]

    try:
        for driver in drivers:
            driver.start()
        waiting = list(lines)
        while waiting:
            wait_until(lambda: any(x.called.is_set() for x in waiting), "one has its turn")
            (line,) = (x for x in waiting if x.called.is_set())  # and no other
            waiting.remove(line)
            line.goes.set()
    finally:
        for line, driver in zip(lines, drivers, strict=True):
            line.goes.set()
            driver.leave()


def test_cpu_time_is_that_of_the_window() -> None:
    samples = [[float(t), 0.5 * t, 2.0 * t] for t in range(10)]
    assert scale._spent(samples, 2.0, 7.0, 1) == 2.0
    assert scale._spent(samples, 2.0, 7.0, 2) == 8.0
