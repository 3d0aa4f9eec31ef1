"""The loop under more than it can take at once: nothing is lost, and no node is broken off for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.controller import loop as controller
from orchestrator.controller.drive import drive
from orchestrator.controller.messages import FromStream, Message
from orchestrator.controller.node import NodeDriver
from orchestrator.controller.prepare import RunRequest, prepare
from orchestrator.controller.timeouts import Timeouts
from orchestrator.engines import Engine
from orchestrator.ledger.reader import LedgerReader, reconcile
from orchestrator.transport import Transport
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
    monkeypatch.setattr(controller, "TURN_S", -1.0)  # one message a turn
    (tmp_path / "i.yaml").write_text(
        f"defaults: {{tuner: replay, workdir: {tmp_path / 'nodes'}}}\n"
        "nodes: {n1: {gpus: [0, 1]}, n2: {gpus: [2, 3]}}\n"
    )
    rows = [f"{m},{n},512" for m in (16, 32) for n in range(64, 64 * 13, 64)]
    (tmp_path / "s.csv").write_text("\n".join(["M,N,K", *rows, ""]))
    request = RunRequest(
        tmp_path / "s.csv", tmp_path / "runs", tmp_path / "i.yaml", "a16w16", options={"seconds_per_shape": 0.0}
    )
    paths = prepare(request).create()
    assert drive(paths, Nobody(), handle_signals=False).state == "finished"
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        assert ledger.counts().tuned == 24
        assert reconcile(ledger) == []
        assert ledger.query("SELECT * FROM offsets WHERE bad > 0") == []


class Channel:
    """A stream with one beat, after which the node is silent."""

    def __init__(self) -> None:
        beat = b'{"t":1.0,"epoch":1,"slots":{}}'
        self._data = b"B %d\n" % len(beat) + beat
        self.ended = threading.Event()

    def read(self, size: int) -> bytes:
        data, self._data = self._data, b""
        if not data:
            self.ended.wait()
        return data

    def close(self) -> None:
        self.ended.set()

    def error(self) -> str:
        return "closed"


class Deaf:
    """Transport to a node on which there is nothing; and its engine."""

    node = "n1"

    def __init__(self) -> None:
        self.channels: list[Channel] = []

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def put(self, folder: str, files: Mapping[str, Any], empty: Sequence[str] = ()) -> None: ...

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> Completed:
        return Completed(0, b"", b"")

    def open(self, argv: Sequence[str]) -> Channel:
        self.channels.append(Channel())
        return self.channels[-1]


def test_while_the_loop_is_behind_a_node_is_not_silent() -> None:
    any_silence = Timeouts(silence=-1.0)
    waits, goes_on = threading.Event(), threading.Event()

    def post(message: Message) -> None:
        if isinstance(message, FromStream):
            waits.set()
            goes_on.wait()

    deaf = Deaf()
    driver = NodeDriver(
        cast(Transport, deaf),
        cast(Engine, deaf),
        "folder",
        {},
        (),
        ("0",),
        {},
        1,
        {},
        post,
        launch=False,
        timeouts=any_silence,
    )

    def silent() -> bool:
        driver.check_pulse()
        return deaf.channels[0].ended.is_set()

    driver.start()
    try:
        wait_until(waits.is_set, "the loop is behind")
        driver.check_pulse()
        assert not deaf.channels[0].ended.is_set(), "it is the loop that says nothing"
        goes_on.set()
        wait_until(silent, "now it is the node")
    finally:
        goes_on.set()
        driver.leave()
