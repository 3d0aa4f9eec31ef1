"""Messages of a node's driver (node_driver.py) to the loop, and the frames of the node's stream that some of them
carry.

`worker follow` (worker/agent/follow.py) sends a node's stream as frames. A frame is a line, and as many bytes as that
says:

    E 0 1200 57      57 bytes of the records of slot 0 (events/0.jsonl), which begin at byte 1200 of that file
    L 0 340 21       the same for its log (logs/0.log)
    B 180            a heartbeat: a JSON object with the fields of `Beat`

node_reports.py makes events for the policy out of messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator import clean
from orchestrator.events import NodeBusy, NodeTroubled, SlotLost
from orchestrator.ledger.ingest import Chunk
from orchestrator.transport.base import as_file
from worker.protocol import SLOT_RE, ProtocolError

MAX_CHUNK = 256 * 1024
"""Most bytes of a frame. `worker follow` sends less. The controller queues hundreds of frames, so a larger limit would
let a node fill its memory."""
MAX_HEADER = 128
_HEADER = re.compile(r"(?:B|(?P<stream>[EL]) (?P<slot>\d{1,4}) (?P<offset>\d{1,18})) (?P<length>\d{1,9})\n", re.ASCII)


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat of a node; worker/protocol/records.py has the meaning of the fields."""

    t: float
    epoch: int
    slots: dict[str, dict[str, Any]]
    error: str
    held: frozenset[str] | None = None
    """None while some records of these attempts are still on the way."""

    @property
    def occupying_runs(self) -> tuple[str, ...]:
        """The other runs whose workers hold devices that our workers wait for."""
        runs = {wait.partition("/")[0] for wait in self._waits() if not wait.startswith("/")}
        return tuple(sorted(runs))

    @property
    def closed_lock(self) -> str:
        """A device's lock that a worker cannot open, with its owner and the error; "" if there is none."""
        return next((wait for wait in self._waits() if wait.startswith("/")), "")

    def _waits(self) -> list[str]:
        """Texts of what our workers wait for, without control characters: they go to the user's terminal."""
        texts = (clean.text(str(slot.get("waits") or ""), 200) for slot in self.slots.values())
        return [text for text in texts if text]


def read_frames(read: Callable[[int], bytes]) -> Iterator[Chunk | Beat]:
    """Yield frames until the stream ends. Drop an unfinished last frame. Raise ProtocolError on garbage."""
    stream = as_file(read)
    while header := stream.readline(MAX_HEADER):
        if not header.endswith(b"\n") and len(header) < MAX_HEADER:
            return
        frame = _HEADER.fullmatch(header.decode("ascii", "replace"))
        if frame is None or int(frame["length"]) > MAX_CHUNK:
            raise ProtocolError(f"not a frame: {header[:60]!r}")
        body = stream.read(int(frame["length"]))
        if len(body) < int(frame["length"]):
            return
        is_beat = frame["slot"] is None
        yield _beat(body) if is_beat else Chunk(frame["stream"], frame["slot"], int(frame["offset"]), body)


def _beat(body: bytes) -> Beat:
    try:
        raw = json.loads(body)
        slots = {s: v for s, v in raw["slots"].items() if SLOT_RE.match(s) and isinstance(v, dict)}
        held = frozenset(str(a) for a in raw["held"]) if isinstance(raw.get("held"), list) else None
        return Beat(float(raw["t"]), int(raw["epoch"]), slots, str(raw.get("error") or ""), held)
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ProtocolError(f"bad beat: {e}") from e


@dataclass(frozen=True, slots=True)
class NodeUp:
    """The node is deployed and its workers are launched. `present`: attempts that are claimed or ended there.

    Everything else that was sent there never arrived or was taken back. From now on, sends carry `session`.
    """

    node: str
    session: int
    present: frozenset[str]


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """The preparation of a node is slow but makes progress, such as pulling an image."""

    node: str
    detail: str


@dataclass(frozen=True, slots=True)
class NodeTakenOver:
    """The node obeys a younger controller."""

    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class FromStream:
    """A frame of the node's stream."""

    node: str
    frame: Chunk | Beat


@dataclass(frozen=True, slots=True)
class Taken:
    """A spec was taken out of a node's inbox. `won` False: a worker had claimed it before."""

    node: str
    attempt: str
    won: bool


@dataclass(frozen=True, slots=True)
class DriverFailed:
    """An error of our own ended a thread of the node's driver, and with it the driver. It does not start again."""

    node: str
    detail: str
    """The error, such as `KeyError: '3'`."""
    traceback: str


Message = NodeUp | NodeProgress | NodeTakenOver | FromStream | Taken | DriverFailed | NodeTroubled | NodeBusy | SlotLost
"""Messages from a node's driver to the controller loop. The loop decides which of them go into the journal."""
