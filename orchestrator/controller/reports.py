"""Reports of nodes and pools in a turn, as events of the policy: messages, and rows that no stream brought."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from orchestrator.controller.messages import (
    FromStream,
    JournalObserver,
    Message,
    NodeProgress,
    NodeTakenOver,
    NodeUp,
    Taken,
    Vanished,
)
from orchestrator.controller.node import NodeDriver
from orchestrator.controller.node_registry import NodeRegistry
from orchestrator.controller.stream import Beat, NodeLog
from orchestrator.errors import TakenOverError
from orchestrator.events import (
    AttemptEnded,
    AttemptTaken,
    Event,
    NodeBusy,
    NodeJoined,
    NodeLost,
    NodeTroubled,
    SlotLost,
)
from orchestrator.ledger.ingest import Chunk, Ingest
from orchestrator.ledger.writer import Ledger
from orchestrator.policy import Policy
from orchestrator.reasons import Reason


class NodeReports:
    """Reports of a run's nodes, taken into ledger, registry and live status. `logs`: folder of the nodes' logs."""

    def __init__(
        self,
        run: str,
        epoch: int,
        ledger: Ledger,
        policy: Policy,
        registry: NodeRegistry,
        ingest: Ingest,
        live_status: JournalObserver,
        leases: NodeSupply | None,
        logs: Path,
    ) -> None:
        self._run, self._epoch = run, epoch
        self._ledger, self._policy, self._registry = ledger, policy, registry
        self._ingest, self._live_status, self._leases = ingest, live_status, leases
        self._logs = logs
        self._logbooks: dict[str, NodeLog] = {}
        self.read_out: set[str] = set()
        """Nodes whose stream was read up to the end of their records."""

    def open(self, node: str) -> None:
        """Begin a log of the node, or go on with the one that is there."""
        self._logbooks[node] = NodeLog(self._ledger, node, self._logs)

    def events_of(self, message: Message) -> list[Event]:
        """Events that the policy gets of a message. Within a transaction of the ledger. Raises TakenOverError."""
        match message:
            case FromStream(node, frame):
                return self._from_stream(node, frame)
            case NodeUp(node, session, present):
                if node not in self._registry.drivers:
                    return []
                return self._node_up(node, session, present)
            case Taken(node, attempt, won):
                return [AttemptTaken(attempt, won)] if self._policy.is_outstanding(attempt) else []
            case SlotLost(node):
                return [message] if node in self._registry.drivers else []
            case NodeTroubled(node, detail):
                if node not in self._registry.drivers:
                    return []  # its lease is over
                if self._leases is not None:
                    self._leases.look(node)
                first = self._registry.in_trouble(node, detail)
                self._live_status.trouble(node, detail, on_record=first)
                return [message] if first else []
            case NodeProgress(node, detail):
                self._registry.goes_on(node, detail)
                self._live_status.progress(node, detail)
                return []
            case Vanished(_, attempts):
                why = "its end is not on record, and the node has nothing of it any more"
                lost = sorted(a for a in attempts if self._policy.is_outstanding(a))
                return [AttemptEnded(a, Reason.DONE, None, why, 0.0) for a in lost]
            case NodeBusy(node, doing, detail):
                gone = self._registry.node_occupied(node, doing, detail)
                return [message, NodeLost(node, f"occupied: {detail}")] if gone else [message]
            case NodeTakenOver(node, epoch):
                raise TakenOverError(
                    f"a younger controller took run {self._run} over (node {node} obeys epoch {epoch}, this is "
                    f"epoch {self._epoch}); this one ends and changes nothing more"
                )

    def unread(self, rows: Iterable[tuple[str, Chunk]]) -> list[FromStream]:
        """The part of each file that no stream brought."""
        out = []
        for node, file in rows:
            if node not in self._logbooks:
                self.open(node)
            at = self._ledger.offsets(node).get((file.stream, file.slot), 0)
            if len(file.data) > at:
                out.append(FromStream(node, Chunk(file.stream, file.slot, at, file.data[at:])))
        return out

    def _from_stream(self, node: str, frame: Chunk | Beat) -> list[Event]:
        if isinstance(frame, Beat):
            if frame.epoch > self._epoch:
                return self.events_of(NodeTakenOver(node, frame.epoch))
            if frame.error:
                self._live_status.trouble(node, frame.error)
            if frame.held is not None:
                self.read_out.add(node)
            return []
        if frame.stream == "L":
            self._logbooks[node].add(frame)
            return []
        return self._ingest.feed(node, frame.slot, frame.data)[0]

    def _node_up(self, node: str, session: int, present: frozenset[str]) -> list[Event]:
        self._registry.arrived(node, session)
        events: list[Event] = [
            AttemptTaken(a.id, True) for a in self._policy.outstanding() if a.node == node and a.id not in present
        ]
        events.append(NodeJoined(node, self._registry.drivers[node].slots))
        return events


@dataclass(slots=True)
class LeaseTurn:
    """Changes of one turn: events for the journal, drivers to start, notes for people (text, bad)."""

    events: list[Event] = field(default_factory=list)
    start: list[NodeDriver] = field(default_factory=list)
    notes: list[tuple[str, bool]] = field(default_factory=list)
    rows: list[tuple[str, Chunk]] = field(default_factory=list)
    """(node, whole file from its beginning) of what ended leases left behind."""
    gone: list[str] = field(default_factory=list)
    """Nodes whose lease is over."""


class NodeSupply(Protocol):
    """Nodes that come later and go earlier. No call waits, but for `close`."""

    def start(self) -> None: ...
    def turn(self, policy: Policy, registry: NodeRegistry, now: float) -> LeaseTurn: ...
    def look(self, node: str) -> None: ...
    def why(self) -> list[str]: ...
    def close(self, *, release: bool) -> list[str]: ...

    @property
    def coming(self) -> bool: ...
