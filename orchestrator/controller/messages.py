"""Types that the threads of a run share: frames of a node's stream (see worker/protocol/records.py), messages to the
loop, the display that it feeds, and all timeouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator import clean
from orchestrator.events import NodeBusy, NodeTroubled, SlotLost
from orchestrator.ledger.ingest import Chunk
from orchestrator.view.status import RunStatus
from worker.protocol import BEAT_S, LOST_BEATS, SLOT_RE, ProtocolError

MAX_CHUNK = 256 * 1024
"""Most bytes of a frame. `worker follow` sends less. The controller queues hundreds of frames, so a larger limit would
let a node fill its memory."""
MAX_HEADER = 128


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat of a node: its epoch, slots and error. `held`: attempts that wait or are claimed there; None while some
    of their records are still on the way.
    """

    t: float
    epoch: int
    slots: dict[str, dict[str, Any]]
    error: str
    held: frozenset[str] | None = None

    @property
    def waits(self) -> str:
        """Names the other runs whose workers hold devices that our workers wait for; "" if our workers do not wait."""
        owners = {clean.text(str(s.get("waits") or ""), 100).partition("/")[0] for s in self.slots.values()} - {""}
        return f"workers of run {', '.join(sorted(owners))}" if owners else ""


def read_frames(read: Callable[[int], bytes]) -> Iterator[Chunk | Beat]:
    """Yield frames until the stream ends. Drop an unfinished last frame. Raise ProtocolError on garbage."""
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
    """Result of a take-back."""

    node: str
    attempt: str
    won: bool


Message = NodeUp | NodeProgress | NodeTakenOver | FromStream | Taken | NodeTroubled | NodeBusy | SlotLost
"""Messages from a node's driver to the controller loop. The loop decides which of them go into the journal."""


class Watcher(Protocol):
    """The display of a run. It is updated a few times per second."""

    def update(self, status: RunStatus) -> None: ...
    def note(self, text: str, *, bad: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class StopLimits:
    """Limits in seconds: for workers to stop, for killed workers to end, and for everything together on a slow node."""

    stop_s: float
    kill_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts and pauses of a run, in seconds. Users set `lost` and `grace`; tests shorten the others."""

    tick: float = 0.2
    """A turn of the loop waits this long for a message."""
    view: float = 0.2
    lost: float = 90.0
    """A node that stopped answering is given up after this."""
    never_up: float = 20.0
    """A node that was never prepared successfully is given up after this long (but still tried again)."""
    starting: float = 60.0
    """The same limit for a node that has not reported anything yet."""
    grace: float = 30.0
    """Running attempts have this long to finish after the first Ctrl-C."""
    shutdown: float = 10.0
    """Workers have this long to stop at the end."""
    first_word: float = 30.0
    """A stream may take this long to begin, because a container must start for it."""
    silence: float = LOST_BEATS * BEAT_S + 1.0
    """We close a stream that is silent for this long."""
    backoff: float = 0.2
    """Pause before a node is prepared again. It doubles each time, up to `longest_backoff`."""
    longest_backoff: float = 15.0
    jitter: float = 0.3
    """Random part of this pause, so that the nodes do not all begin at once."""
    steady: float = 5.0
    """A stream that lasted this long has worked, and the pauses start again with the shortest."""
    vanished: float = 60.0
    """If an attempt is missing on its node this long after it was sent, it has vanished: the write is done by then."""
    busy: float = 2.0
    """Pause before an occupied node is checked again. Each pause is 1.5 times the one before."""
    close: float = 1.0
    """All nodes together have this long to finish their current calls when the run ends."""
    stop: StopLimits = field(default=StopLimits(5.0, 2.0, 20.0))
    """Limits for stopping workers at the end of a run."""
    cancel: StopLimits = field(default=StopLimits(3.0, 1.5, 7.0))
    """The same limits for a cancelled run. It is over within 10 s, whatever its nodes do."""
