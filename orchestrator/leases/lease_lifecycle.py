"""The data of leased_nodes.py: the life of a lease, and what a run knows of a pool of leases.

Only leased_nodes.py changes them (pool_size.py sets `Pool.want`). Slurm's and Kubernetes' leases live alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from orchestrator.events import Event
from orchestrator.leases.lease import EndCause, Lease, LeaseSource
from orchestrator.leases.poller import PoolPoller, PoolSnapshot
from orchestrator.ledger.ingest import Chunk
from orchestrator.machines.node_plan import NodePlan
from orchestrator.transport.base import Transport


class LeasePhase(Enum):
    """The phase of a lease.

    QUEUED --the scheduler grants it--> GRANTED --its machine is checked--> NODE --we need it no more--> LEAVING
    GRANTED --its machine cannot be used--> ENDED
    LEAVING --its workers are stopped; we give it back--> ENDED
    GRANTED, NODE, LEAVING --its scheduler ends it--> ENDING --the rows that it left are fetched--> ENDED
    QUEUED --its scheduler ends it--> ENDED
    """

    QUEUED = auto()
    GRANTED = auto()
    NODE = auto()
    LEAVING = auto()
    ENDING = auto()
    ENDED = auto()


HELD = (LeasePhase.GRANTED, LeasePhase.NODE)
"""Phases in which a lease works, or is about to."""


@dataclass(frozen=True, slots=True)
class ReadyNode:
    """A lease whose machine was checked: a node that is ready for work."""

    plan: NodePlan
    transport: Transport
    """It is connected."""
    host: str
    """The physical machine."""
    gpus: tuple[str, ...]
    """The id of each slot's GPU there."""


class NodeShutdown(Protocol):
    """The end of a node's workers, which is in progress (controller/shutdown.py)."""

    def is_done(self) -> bool: ...
    def close(self) -> object: ...


class RunNodes(Protocol):
    """The part of the registry of a run's nodes (controller/node_registry.py) that leases need."""

    def has(self, name: str) -> bool: ...
    def trouble_of(self, name: str) -> str: ...
    def record_progress(self, name: str, detail: str) -> None: ...
    def begin_shutdown(self, name: str) -> NodeShutdown: ...
    def has_failed(self, name: str) -> bool: ...


@dataclass(slots=True)
class LeaseTurn:
    """The result of one turn of `LeasedNodes`, for the loop."""

    events: list[Event] = field(default_factory=list)
    """For the journal and the policy."""
    start: list[ReadyNode] = field(default_factory=list)
    """Nodes to drive from now on."""
    notes: list[tuple[str, bool]] = field(default_factory=list)
    """(text, is it bad) for people."""
    rows: list[tuple[str, Chunk]] = field(default_factory=list)
    """(node, whole file from its beginning): the records and logs that ended leases left behind."""

    def note(self, text: str, *, bad: bool = False) -> None:
        self.notes.append((text, bad))


@dataclass(slots=True, eq=False)
class Pool:
    """A pool of leases: its size, where they come from, and what is known of it."""

    name: str
    minimum: int
    maximum: int
    slots: int
    """Slots of one lease."""
    source: LeaseSource
    time_s: float = float("inf")
    """Time limit of a lease."""
    poller: PoolPoller = field(init=False)
    floor: int = field(init=False)
    """Leases that are held at least while there is work: those to start with, until one was idle."""
    want: int = 0
    """Leases that the work needs now."""
    ordered: int = 0
    """Number of the last order to the poller."""
    snapshot: PoolSnapshot | None = None
    queued: tuple[Lease, ...] = ()
    """Leases that wait, as they were reported last."""
    failures: list[str] = field(default_factory=list)
    """The reasons of the leases and requests in a row that came to nothing."""
    hopeless: str = ""
    """The last failure, if no more leases are requested."""
    refused: str = ""
    """The scheduler's message if it refused the last request."""
    ask_at: float = 0.0
    """After a refusal there is no request before this time (time.monotonic())."""
    silence_reported: bool = False
    """It was reported that its scheduler does not answer."""


@dataclass(slots=True, eq=False)
class LeaseLifecycle:
    """The life of one lease."""

    pool: Pool
    lease: Lease
    """Its state as the scheduler told it last."""
    node: str = ""
    """The name of its node, from the grant on."""
    phase: LeasePhase = LeasePhase.QUEUED
    is_unwanted: bool = False
    """It is to be given back, for the reason `cause`."""
    is_returned: bool = False
    """Its scheduler was told to take it back."""
    is_draining: bool = False
    idle_since: float | None = None
    cause: EndCause = EndCause.RELEASED
    shutdown: NodeShutdown | None = None
    shutdown_seen_at: float = 0.0
    """The time at which its shutdown was seen to be done."""


MakeReady = Callable[[Pool, Lease, str], ReadyNode]
"""Checks the machine of a pool's lease and plans its node under a name; called in a thread. Raises OrchestratorError if
the machine cannot be used."""
