"""The loop under more than it can take at once: nothing is lost, and no node is broken off for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller import loop
from orchestrator.controller.drive import drive
from orchestrator.controller.messages import FromStream, Message, Timeouts
from orchestrator.controller.node import NodeDriver
from orchestrator.controller.prepare import RunRequest, prepare
from orchestrator.ledger.reader import LedgerReader, reconcile
from orchestrator.transport.base import Completed
from orchestrator.view.status import RunStatus
from tests.waiting import wait_until


class Nobody:
    """A watcher who looks away."""

    def update(self, status: RunStatus) -> None: ...

    def note(self, text: str, *, bad: bool = False) -> None: ...


def test_turns_that_have_no_time_leave_their_messages_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "TURN_S", -1.0)  # one message a turn
    inventory, shapes = tmp_path / "i.yaml", tmp_path / "s.csv"
    nodes = "nodes: {n1: {gpus: [0, 1]}, n2: {gpus: [2, 3]}}\n"
    inventory.write_text(f"defaults: {{tuner: replay, workdir: {tmp_path / 'nodes'}}}\n{nodes}")
    shapes.write_text("M,N,K\n" + "".join(f"{m},{n},512\n" for m in (16, 32) for n in range(64, 64 * 13, 64)))
    request = RunRequest(shapes, tmp_path / "runs", inventory, "a16w16", options={"seconds_per_shape": 0.0})
    paths = prepare(request).create()
    assert drive(paths, Nobody(), handle_signals=False).state == "finished"
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        assert (ledger.counts().tuned, reconcile(ledger)) == (24, [])
        assert ledger.query("SELECT * FROM offsets WHERE bad > 0") == []


class Deaf:
    """A transport to a node that sends one beat and is silent then; also its channel, and its engine."""

    node = "n1"

    def __init__(self) -> None:
        beat = b'{"t":1.0,"epoch":1,"slots":{}}'
        self._data, self.ended = b"B %d\n" % len(beat) + beat, threading.Event()

    def run(self, argv: object, timeout: float = 0.0) -> Completed:
        return Completed(0, b"", b"")

    def open(self, argv: object) -> Deaf:
        return self

    def read(self, size: int) -> bytes:
        data, self._data = self._data, b""
        return data or (self.ended.wait() and b"") or b""

    def close(self) -> None:
        self.ended.set()

    def error(self) -> str:
        return "closed"

    def connect(self, *_: object) -> None: ...

    put = connect


def test_while_the_loop_is_behind_a_node_is_not_silent() -> None:
    waits, goes_on = threading.Event(), threading.Event()

    def post(message: Message) -> None:
        if isinstance(message, FromStream):
            waits.set()
            goes_on.wait()

    deaf: Any = Deaf()
    driver = NodeDriver(
        deaf, deaf, "f", {}, (), ("0",), {}, 1, {}, post, launch=False, timeouts=Timeouts(silence=-1.0)
    )  # fmt: skip

    def is_noticed() -> bool:
        driver.check_pulse()
        return bool(deaf.ended.is_set())

    driver.start()
    try:
        wait_until(waits.is_set, "the loop is behind")
        assert not is_noticed(), "it is the loop that says nothing"
        goes_on.set()
        wait_until(is_noticed, "now it is the node")
    finally:
        goes_on.set()
        driver.leave()
