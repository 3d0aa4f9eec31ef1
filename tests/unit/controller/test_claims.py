"""Attempts that a node should hold, compared with those of its beat."""

from __future__ import annotations

import io
import json
from pathlib import Path

from orchestrator.controller.stream import BEATS, Beat, GivenAttempts, read_frames
from worker.agent.follow import Stream
from worker.protocol import ANY_SLOT, InboxName, NodePaths

PATIENCE_S = 15.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_attempt_vanishes_once_after_two_beats_and_some_patience() -> None:
    clock = Clock()
    claims = GivenAttempts(PATIENCE_S, clock)
    claims.arrived(["g1-1", "g2-1"])
    assert [claims.compare({"g2-1"}) for _ in range(BEATS)] == [frozenset()] * BEATS  # the beats may be old ones
    clock.now = PATIENCE_S
    assert claims.compare({"g2-1"}) == {"g1-1"}
    assert claims.compare({"g2-1"}) == frozenset()


def test_one_beat_without_it_is_not_enough() -> None:
    clock = Clock()
    claims = GivenAttempts(PATIENCE_S, clock)
    claims.arrived(["g1-1"])
    clock.now = 2 * PATIENCE_S
    for held in ((), ("g1-1",), (), ("g1-1",)):
        assert claims.compare(held) == frozenset()


def test_what_was_taken_back_is_not_missed() -> None:
    clock = Clock()
    claims = GivenAttempts(PATIENCE_S, clock)
    claims.arrived(["g1-1"])
    claims.taken("g1-1")
    clock.now = 2 * PATIENCE_S
    assert [claims.compare(()) for _ in range(3)] == [frozenset()] * 3


def beat_of(stream: Stream) -> Beat:
    (beat,) = read_frames(io.BytesIO(stream.beat(1.0)).read)
    assert isinstance(beat, Beat)
    return beat


def test_the_beat_tells_what_waits_and_what_is_claimed_once_all_records_are_sent(tmp_path: Path) -> None:
    paths = NodePaths(tmp_path)
    for folder in (paths.inbox, paths.claimed("0"), paths.events("0").parent):
        folder.mkdir(parents=True)
    (paths.inbox / str(InboxName(3, ANY_SLOT, "g3-1"))).touch()
    (paths.claimed("0") / str(InboxName(2, "0", "g2-1"))).touch()
    paths.events("0").write_text(json.dumps({"type": "x"}) + "\n")
    stream = Stream(paths)
    stream.look()
    assert beat_of(stream).held is None  # a record is on its way
    list(stream.frames())
    assert beat_of(stream).held == frozenset({"g2-1", "g3-1"})
