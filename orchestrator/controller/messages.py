"""Types that the threads of a run share: frames of a node's stream (see worker/protocol/records.py), messages to the
loop, the display that it feeds, and all timeouts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator import clean
from orchestrator.events import NodeBusy, NodeTroubled, SlotLost
from orchestrator.ledger.ingest import Chunk
from orchestrator.transport.base import as_file
from orchestrator.view.status import RunStatus
from worker.protocol import BEAT_S, LOST_BEATS, SLOT_RE, ProtocolError

MAX_CHUNK = 256 * 1024
"""Most bytes of a frame. `worker follow` sends less. The controller queues hundreds of frames, so a larger limit would
let a node fill its memory."""
MAX_HEADER = 128
_HEADER = re.compile(r"(?:B|(?P<stream>[EL]) (?P<slot>\d{1,4}) (?P<offset>\d{1,18})) (?P<length>\d{1,9})\n", re.ASCII)


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

    @property
    def closed_lock(self) -> str:
        """A device's lock that a worker cannot open, with its owner and the error; "" if there is none."""
        waits = (clean.text(str(s.get("waits") or ""), 200) for s in self.slots.values())
        return next((lock for lock in waits if lock.startswith("/")), "")


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
