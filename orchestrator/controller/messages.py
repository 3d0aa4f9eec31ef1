"""Messages of a node's threads to the controller's loop, interrupts by the user, and the observers that it feeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from orchestrator.controller.stream import Beat
from orchestrator.events import NodeBusy, NodeTroubled, Record, SlotLost
from orchestrator.ledger.ingest import Chunk
from orchestrator.view.status import RunStatus


@dataclass(frozen=True, slots=True)
class NodeUp:
    """The node is deployed, its workers launched. `present`: attempts that are claimed or ended there.

    Whatever else was sent there before never arrived or was taken back. Sends carry `session` from now on.
    """

    node: str
    session: int
    present: frozenset[str]


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """Its preparation takes long and makes progress (an image is pulled)."""

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
class Vanished:
    """Attempts that were on the node and are neither waiting nor claimed there any more, and all that the node
    recorded was read."""

    node: str
    attempts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Taken:
    """Result of a take-back."""

    node: str
    attempt: str
    won: bool


Message = NodeUp | NodeProgress | NodeTakenOver | FromStream | Vanished | Taken | NodeTroubled | NodeBusy | SlotLost
"""Those that are events are facts as the driver sees them; the loop decides which are journaled."""


class Interrupts:
    """Number of Ctrl-C so far, read by the loop."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


class Watcher(Protocol):
    """Display of a run, updated a few times a second."""

    def update(self, status: RunStatus) -> None: ...
    def note(self, text: str, *, bad: bool = False) -> None: ...


class JournalObserver(Protocol):
    """Live status of a run: fed the journal and what nodes report beside it (orchestrator/view/live.py)."""

    def feed(self, t: float, record: Record) -> None: ...
    def progress(self, node: str, detail: str) -> None: ...
    def trouble(self, node: str, detail: str, *, on_record: bool = False) -> None: ...
    def take_notes(self) -> list[tuple[str, bool]]: ...
    def status(self, now: float) -> RunStatus: ...
