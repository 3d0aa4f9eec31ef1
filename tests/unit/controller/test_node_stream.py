"""Frames of a node's stream: the node is up, occupied, or prepared again after an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.controller.messages import Beat, FromStream, Message, NodeUp
from orchestrator.controller.node_stream import NodeStream, follow_argument
from orchestrator.errors import TransportError
from orchestrator.ledger.ingest import Chunk
from worker.protocol import ProtocolError

UP = NodeUp("a", 3, frozenset({"a1"}))


def beat(waits: str = "", error: str = "") -> Beat:
    return Beat(1.0, 2, {"0": {"alive": True, "waits": waits}}, error)


class Heard:
    """A stream, and all that it told."""

    def __init__(self) -> None:
        self.posted: list[Message] = []
        self.busy: list[tuple[str, str]] = []
        self.locks: list[str] = []
        self.offsets = {("E", "0"): 10}
        admission: Any = SimpleNamespace(decide=lambda present, report: self.locks.append(present[0].id))
        self.stream = NodeStream(UP, self.offsets, admission, self.posted.append, lambda *told: self.busy.append(told))


def test_a_node_is_up_from_the_first_frame_on() -> None:
    heard = Heard()
    frames: list[Chunk | Beat] = [beat(), Chunk("E", "0", 10, b"12345"), Chunk("L", "0", 0, b"12")]
    for frame in frames:
        heard.stream.handle(frame)
    assert heard.posted == [UP, *(FromStream("a", frame) for frame in frames)]
    assert follow_argument(heard.offsets) == {"E": {"0": 15}, "L": {"0": 2}}
    with pytest.raises(ProtocolError, match="continues at 14, not 15"):
        heard.stream.handle(Chunk("E", "0", 14, b"5"))


def test_a_node_whose_workers_wait_is_occupied_until_they_do_not() -> None:
    heard = Heard()
    for frame in (beat("r1/0"), beat("r1/0"), beat()):
        heard.stream.handle(frame)
    assert heard.busy == [("wait", "workers of run r1"), ("free", "its devices are ours now")]
    assert [type(message) for message in heard.posted] == [FromStream, FromStream, NodeUp, FromStream]
    with pytest.raises(TransportError, match="held by workers of run r2"):
        heard.stream.handle(beat("r2/0"))


def test_a_lock_that_cannot_be_opened_is_decided_upon_once() -> None:
    heard = Heard()
    for _ in range(2):
        heard.stream.handle(beat("/tmp/locks/gpu-1 of bob (Permission denied)"))
    assert heard.locks == ["lock /tmp/locks/gpu-1"]


def test_records_that_cannot_be_read_end_the_stream_and_logs_do_not() -> None:
    heard = Heard()
    heard.stream.handle(beat(error="0.log shrank from 9 to 0 bytes"))
    with pytest.raises(ProtocolError, match=r"0\.jsonl shrank"):
        heard.stream.handle(beat(error="0.log shrank from 9 to 0 bytes; 0.jsonl shrank from 9 to 0 bytes"))
