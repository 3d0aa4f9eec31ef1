"""Stream of a node: its frames, and the log file made of them.

Format of the frames: worker/protocol/records.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import clean
from orchestrator.ledger.ingest import Chunk
from orchestrator.ledger.writer import Ledger
from worker.protocol import SLOT_RE, ProtocolError

MAX_CHUNK = 256 * 1024
"""`worker follow` sends less; the controller queues some hundred frames a time, and a node must not fill its memory."""
MAX_HEADER = 128


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat of a node: its epoch, slots and error. `held`: attempts that wait or are claimed there; None while
    records of theirs are still under way.
    """

    t: float
    epoch: int
    slots: dict[str, dict[str, Any]]
    error: str
    held: frozenset[str] | None = None

    @property
    def waits(self) -> str:
        """Runs whose workers hold devices that workers there wait for, in words; "" for none."""
        owners = {clean.text(str(s.get("waits") or ""), 100).partition("/")[0] for s in self.slots.values()} - {""}
        return f"workers of run {', '.join(sorted(owners))}" if owners else ""


def read_frames(read: Callable[[int], bytes]) -> Iterator[Chunk | Beat]:
    """Yield frames until the end of the stream; an unfinished last frame is dropped. Raise ProtocolError on garbage."""
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
        kind, slot, offset, length = _header(bytes(buffer[:end]))
        del buffer[: end + 1]
        if not fill(length):
            return
        body = bytes(buffer[:length])
        del buffer[:length]
        yield _beat(body) if kind == "B" else Chunk(kind, slot, offset, body)


def _header(line: bytes) -> tuple[str, str, int, int]:
    """(kind, slot, offset, length of the body) of a frame; slot and offset of a beat are empty."""
    words = line.decode("ascii", "replace").split(" ")
    try:
        if words[0] == "B" and len(words) == 2:
            kind, slot, offset, length = "B", "", 0, int(words[1])
        elif words[0] in ("E", "L") and len(words) == 4 and SLOT_RE.match(words[1]):
            kind, slot, offset, length = words[0], words[1], int(words[2]), int(words[3])
        else:
            raise ValueError
        if offset < 0 or not 0 <= length <= MAX_CHUNK:
            raise ValueError
    except ValueError:
        raise ProtocolError(f"not a frame: {line[:60]!r}") from None
    return kind, slot, offset, length


def _beat(body: bytes) -> Beat:
    try:
        raw = json.loads(body)
        slots = {s: v for s, v in raw["slots"].items() if SLOT_RE.match(s) and isinstance(v, dict)}
        held = frozenset(str(a) for a in raw["held"]) if isinstance(raw.get("held"), list) else None
        return Beat(float(raw["t"]), int(raw["epoch"]), slots, str(raw.get("error") or ""), held)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ProtocolError(f"bad beat: {e}") from e


MAX_LINE = 64 * 1024


class NodeLog:
    """Log file of a node, lines as `[slot] line`. The file's length is committed with the offsets it was read up to.

    What stands beyond the committed length was written by a controller that died before it committed; it is cut
    off, because the stream brings it again.
    """

    def __init__(self, ledger: Ledger, node: str, folder: Path) -> None:
        self._ledger, self._node = ledger, node
        self._path = folder / f"{node}.log"
        self._rest: dict[str, bytes] = {}
        self._length = ledger.offsets(node).get(("log", ""), 0)
        with self._path.open("ab") as f:
            f.truncate(self._length)

    def add(self, chunk: Chunk) -> None:
        """Append the whole lines of a chunk; call within the ledger's transaction."""
        rest = self._rest.get(chunk.slot, b"")
        data = rest + chunk.data
        end = data.rfind(b"\n") + 1
        if not end and len(data) > MAX_LINE:
            end = len(data)
        self._rest[chunk.slot] = data[end:]
        if not end:
            return
        tag = f"[{chunk.slot}] ".encode()
        text = b"".join(tag + line + b"\n" for line in data[:end].removesuffix(b"\n").split(b"\n"))
        with self._path.open("r+b") as f:
            f.seek(self._length)
            f.write(text)
        self._length += len(text)
        self._ledger.set_offset(self._node, "", "log", self._length)
        self._ledger.set_offset(self._node, chunk.slot, "L", chunk.offset - len(rest) + end)
