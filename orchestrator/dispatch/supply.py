"""Interface of nodes that come later and go earlier, as the controller sees them (orchestrator/leases/nodes.py)."""

from __future__ import annotations

from typing import Protocol

from orchestrator.dispatch.node import NodeDriver
from orchestrator.dispatch.node_registry import NodeRegistry
from orchestrator.dispatch.stream import Chunk
from orchestrator.events import Event
from orchestrator.scheduling import Policy


class LeaseChanges(Protocol):
    """Changes of one turn: events for the journal, drivers to start, notes for people (text, bad), and whole files of
    (node, records or log) that came home without a stream."""

    events: list[Event]
    start: list[NodeDriver]
    notes: list[tuple[str, bool]]
    rows: list[tuple[str, Chunk]]


class NodeSupply(Protocol):
    """Nodes that come later and go earlier. No call waits, but for `close`."""

    def start(self) -> None: ...
    def turn(self, policy: Policy, registry: NodeRegistry, now: float) -> LeaseChanges: ...
    def look(self, node: str) -> None: ...
    def why(self) -> list[str]: ...
    def close(self, *, release: bool) -> list[str]: ...

    @property
    def coming(self) -> bool: ...
