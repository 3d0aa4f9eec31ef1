"""The stream of a node as frames: bytes in, chunks and beats out (format: worker/protocol/records.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from worker.protocol import SLOT_RE, ProtocolError

MAX_CHUNK = 256 * 1024
"""`worker follow` sends less; the controller queues some hundred frames a time, and a node must not fill its memory."""
MAX_HEADER = 128


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a slot's events (`E`) or log (`L`) file, from `offset` on."""

    stream: str
    slot: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Beat:
    """The node's sign of life: its epoch, whether it was told to stop, and its slots.

    `held`: the attempts that wait or are claimed there; None while records of theirs are still on their way.
    """

    t: float
    epoch: int
    slots: dict[str, dict[str, Any]]
    error: str
    held: frozenset[str] | None = None


def read_frames(read: Callable[[int], bytes]) -> Iterator[Chunk | Beat]:
    """Frames until the end of the stream; an unfinished last frame is dropped. Raises ProtocolError on garbage."""
    buffer = bytearray()

    def fill(size: int) -> bool:
        while len(buffer) < size:
            more = read(max(65536, size - len(buffer)))
            if not more:
                return False
            buffer.extend(more)
        return True

    while True:
        end = buffer.find(b"\n", 0, MAX_HEADER)
        while end < 0:
            if len(buffer) >= MAX_HEADER:
                raise ProtocolError(f"not a frame: {bytes(buffer[:60])!r}")
            if not fill(len(buffer) + 1):
                return
            end = buffer.find(b"\n", 0, MAX_HEADER)
        head = _header(bytes(buffer[:end]))
        del buffer[: end + 1]
        if not fill(head.length):
            return
        body = bytes(buffer[: head.length])
        del buffer[: head.length]
        yield _beat(body) if head.kind == "B" else Chunk(head.kind, head.slot, head.offset, body)


@dataclass(frozen=True, slots=True)
class _Header:
    kind: str
    slot: str
    offset: int
    length: int


def _header(line: bytes) -> _Header:
    words = line.decode("ascii", "replace").split(" ")
    try:
        if words[0] == "B" and len(words) == 2:
            head = _Header("B", "", 0, int(words[1]))
        elif words[0] in ("E", "L") and len(words) == 4 and SLOT_RE.match(words[1]):
            head = _Header(words[0], words[1], int(words[2]), int(words[3]))
        else:
            raise ValueError
        if head.offset < 0 or not 0 <= head.length <= MAX_CHUNK:
            raise ValueError
    except ValueError:
        raise ProtocolError(f"not a frame: {line[:60]!r}") from None
    return head


def _beat(body: bytes) -> Beat:
    try:
        raw = json.loads(body)
        slots = {s: v for s, v in raw["slots"].items() if SLOT_RE.match(s) and isinstance(v, dict)}
        held = frozenset(str(a) for a in raw["held"]) if isinstance(raw.get("held"), list) else None
        return Beat(float(raw["t"]), int(raw["epoch"]), slots, str(raw.get("error") or ""), held)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ProtocolError(f"bad beat: {e}") from e
