"""The stream of a node, however it is cut into reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.controller.messages import MAX_CHUNK, Beat, read_frames
from orchestrator.ledger.ingest import Chunk
from worker.protocol import ProtocolError


def reader(data: bytes, sizes: list[int]) -> Callable[[int], bytes]:
    """Serves `data` in pieces of these sizes, over and over."""
    rest, turns = bytearray(data), cycle(sizes)

    def read(size: int) -> bytes:
        out = bytes(rest[: min(size, next(turns))])
        del rest[: len(out)]
        return out

    return read


def wire(frame: Chunk | Beat) -> bytes:
    if isinstance(frame, Chunk):
        return f"{frame.stream} {frame.slot} {frame.offset} {len(frame.data)}\n".encode() + frame.data
    body = json.dumps({"t": frame.t, "epoch": frame.epoch, "slots": frame.slots}).encode()
    return f"B {len(body)}\n".encode() + body


chunks = st.builds(
    Chunk, st.sampled_from(["E", "L"]), st.sampled_from(["0", "17"]), st.integers(0, 10**12), st.binary(max_size=300)
)
beats = st.builds(Beat, st.just(1.5), st.integers(0, 9), st.just({"0": {"alive": True, "age": 0.1}}), st.just(""))
cuts = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(st.lists(chunks | beats, max_size=12), chunks.filter(lambda c: c.data), cuts)
def test_frames_survive_any_cutting_and_an_unfinished_last_one_is_dropped(
    frames: list[Chunk | Beat], last: Chunk, sizes: list[int]
) -> None:
    data = b"".join(map(wire, frames)) + wire(last)[:-1]
    assert list(read_frames(reader(data, sizes))) == frames


@pytest.mark.parametrize(
    "garbage",
    [b"hello\n", b"E 0 0\n", b"E a 0 1\nx", b"E 0 -1 1\nx", f"E 0 0 {MAX_CHUNK + 1}\n".encode(), b"x" * 200,
     b"B 2\n[]", b"B 4\nnull", b'B 13\n{"t":1,"e":2}'],
)  # fmt: skip
def test_what_is_no_frame_is_an_error(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(read_frames(reader(garbage, [64])))
