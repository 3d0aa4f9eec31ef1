"""Interface of nodes that come later and go earlier, as the controller sees them (orchestrator/leases/nodes.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.dispatch.node import NodeDriver
from orchestrator.dispatch.node_registry import NodeRegistry
from orchestrator.dispatch.stream import Chunk
from orchestrator.events import Event
from orchestrator.scheduling import Policy


@dataclass(slots=True)
class LeaseTurn:
    """Changes of one turn: events for the journal, drivers to start, notes for people (text, bad)."""

    events: list[Event] = field(default_factory=list)
    start: list[NodeDriver] = field(default_factory=list)
    notes: list[tuple[str, bool]] = field(default_factory=list)
    rows: list[tuple[str, Chunk]] = field(default_factory=list)
    """(node, whole file from its beginning) of what ended leases left behind."""


class NodeSupply(Protocol):
    """Nodes that come later and go earlier. No call waits, but for `close`."""

    def start(self) -> None: ...
    def turn(self, policy: Policy, registry: NodeRegistry, now: float) -> LeaseTurn: ...
    def look(self, node: str) -> None: ...
    def why(self) -> list[str]: ...
    def close(self, *, release: bool) -> list[str]: ...

    @property
    def coming(self) -> bool: ...
