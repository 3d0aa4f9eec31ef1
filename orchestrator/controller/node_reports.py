"""Makes events for the policy out of what the nodes of a run report.

The loop calls `NodeReports.events_of` with each message of the nodes' threads, within the transaction of its turn. A
message changes the registry (node_registry.py) and the live status on the way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from orchestrator.controller.context import RunContext
from orchestrator.controller.messages import (
    Beat,
    DriverFailed,
    FromStream,
    Message,
    NodeProgress,
    NodeTakenOver,
    NodeUp,
    Taken,
)
from orchestrator.controller.node_registry import NodeRegistry
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
from orchestrator.ledger.node_log import NodeLog
from orchestrator.reasons import Reason
from orchestrator.view.live import LiveStatus

VANISHED = "its end was not recorded, and the node no longer knows it"
"""The detail of an attempt that is missing on its node."""


class NodeReports:
    """Puts reports of a run's nodes into the ledger, registry and live status."""

    def __init__(
        self,
        context: RunContext,
        registry: NodeRegistry,
        ingest: Ingest,
        live_status: LiveStatus,
        check_lease_of: Callable[[str], object],
    ) -> None:
        """`check_lease_of`: looks at once what became of a node's lease."""
        self._context = context
        self._registry = registry
        self._ingest = ingest
        self._live_status = live_status
        self._check_lease_of = check_lease_of
        self._logs: dict[str, NodeLog] = {}
        self._missed: dict[str, set[str]] = {}
        """Node -> attempts that it should hold, but that its last beat lacks."""
        self.read_out: set[str] = set()
        """Nodes whose records were read to the end."""

    def events_of(self, message: Message) -> list[Event]:
        """The events that a message means for the policy. Call it within a transaction of the ledger. Raises
        TakenOverError."""
        if self._registry.has_failed(message.node) and not isinstance(message, FromStream | Taken | NodeTakenOver):
            return []  # its other thread posted it before it ended too
        match message:
            case FromStream(node, frame):
                return self._from_stream(node, frame)
            case NodeUp():
                return self._node_up(message)
            case Taken(_, attempt, won):
                is_open = attempt in self._context.policy.state.open_attempts
                return [AttemptTaken(attempt, won)] if is_open else []
            case SlotLost(node):
                return [message] if self._registry.has(node) else []
            case NodeTroubled():
                return self._node_troubled(message)
            case DriverFailed():
                return self._driver_failed(message)
            case NodeProgress(node, detail):
                self._registry.record_progress(node, detail)
                self._live_status.progress(node, detail)
                return []
            case NodeBusy(node, doing, detail):
                is_lost = self._registry.record_occupied(node, doing, detail)
                return [message, NodeLost(node, f"occupied: {detail}")] if is_lost else [message]
            case NodeTakenOver(node, epoch):
                raise TakenOverError(
                    f"a younger controller took run {self._context.config.run} over (node {node} obeys epoch {epoch},"
                    f" this is epoch {self._context.epoch}); this one ends and changes nothing more"
                )

    def _node_up(self, message: NodeUp) -> list[Event]:
        """The node joins. An attempt that was sent to it and is not there never arrived, or was taken back."""
        node = message.node
        if not self._registry.has(node):
            return []
        self._registry.record_up(node, message.session)
        sent = [attempt for attempt in self._context.policy.outstanding() if attempt.node == node]
        missing = [attempt.id for attempt in sent if attempt.id not in message.present]
        return [*(AttemptTaken(a, True) for a in missing), NodeJoined(node, self._registry.drivers[node].slots)]

    def _node_troubled(self, message: NodeTroubled) -> list[Event]:
        if not self._registry.has(message.node):
            return []  # its lease is over
        self._check_lease_of(message.node)
        is_first = self._registry.record_trouble(message.node, message.detail)
        self._live_status.trouble(message.node, message.detail, on_record=is_first)
        return [message] if is_first else []

    def _driver_failed(self, message: DriverFailed) -> list[Event]:
        """Give a node up whose driver ended by an error of our own, and keep the traceback for the report of the
        bug."""
        node = message.node
        if not self._registry.has(node):
            return []  # its lease is over
        path = self._context.paths.traceback(node)
        with contextlib.suppress(OSError):  # the disk may be full, and the run goes on without the file
            path.write_text(message.traceback, encoding="utf-8", errors="replace")
        why = f"gemmfleet failed with {message.detail}, which is a bug in it; please report it with {path}"
        is_lost = self._registry.record_failed(node, why)
        if not is_lost:
            self._live_status.trouble(node, why)
        return [NodeLost(node, why)] if is_lost else []

    def _from_stream(self, node: str, frame: Chunk | Beat) -> list[Event]:
        if isinstance(frame, Beat):
            return self._from_beat(node, frame)
        if frame.stream == "L":
            if node not in self._logs:
                self._logs[node] = NodeLog(self._context.ledger, node, self._context.paths.logs)
            self._logs[node].add(frame)
            return []
        return self._ingest.feed_chunk(node, frame)

    def _from_beat(self, node: str, beat: Beat) -> list[Event]:
        if beat.epoch > self._context.epoch:
            return self.events_of(NodeTakenOver(node, beat.epoch))
        if beat.error:
            self._live_status.trouble(node, beat.error)
        if beat.held is None:
            return []
        self.read_out.add(node)
        return [AttemptEnded(a, Reason.DONE, None, VANISHED, 0.0) for a in self._vanished(node, beat.held)]

    def _vanished(self, node: str, held: frozenset[str]) -> list[str]:
        """Attempts sent a while ago that are missing in two beats in a row: the record of their end is lost."""
        state = self._context.policy.state
        slots = state.nodes[node].slots.values() if node in state.nodes else ()
        before = time.time() - self._context.timeouts.vanished
        missing = set()
        for slot in slots:
            for name in (slot.running, *slot.queued):
                attempt = state.attempts[name] if name and name not in held else None
                if attempt is not None and attempt.sent_at < before and not attempt.is_being_taken:
                    missing.add(attempt.id)
        vanished = missing & self._missed.get(node, set())
        self._missed[node] = missing
        return sorted(vanished)
