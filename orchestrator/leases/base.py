"""Interface of lease sources, which ask a scheduler for nodes, list them, reach them and give them back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from orchestrator.engines import Finding
from orchestrator.transport.base import Transport


class LeaseState(StrEnum):
    """QUEUED: granted not yet, or its holder is not up. READY: commands can be run in it. ENDED: gone for good."""

    QUEUED = "queued"
    READY = "ready"
    ENDED = "ended"


class EndCause(StrEnum):
    """Cause of a lease's end."""

    RELEASED = "released"
    """Its holder ended by itself or on request: the work is done."""
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    EVICTED = "evicted"
    DRAINED = "drained"
    NODE_FAILURE = "node_failure"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @property
    def is_loss(self) -> bool:
        """Treated as a lost node; after every other end, what was in flight goes back uncharged."""
        return self in (EndCause.NODE_FAILURE, EndCause.OUT_OF_MEMORY, EndCause.FAILED, EndCause.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Lease:
    """One grant. One that the scheduler starts again elsewhere is a new lease; the one before has ended."""

    id: str
    """Name in commands of the scheduler: a job's or array task's id, a pod's name."""
    state: LeaseState
    host: str = ""
    """Physical host; "" while it is queued."""
    why: str = ""
    """The scheduler's own words on its state, such as "Priority, expected start 14:20" or "PREEMPTED"."""
    ends_at: float | None = None
    """Epoch seconds of its time limit."""
    cause: EndCause | None = None
    """Cause of the end of one that ended."""


class LeaseSource(Protocol):
    """Leases of one pool of one run, which are found by the names of both alone.

    So a controller that died between asking and hearing the answer finds them again. Every method may raise a
    NodeError: UnreachableError where the scheduler does not answer, TransportError with its words where it refuses.
    All are safe to call from several threads.
    """

    def ask(self, n: int, avoid: Collection[str] = ()) -> None:
        """Ask for `n` more, none of them on a host of `avoid`; return as soon as they are queued."""
        ...

    def list(self) -> Sequence[Lease]:
        """All that were ever requested, ended ones as long as the scheduler knows them; one cheap call."""
        ...

    def release(self, ids: Collection[str]) -> None:
        """Give back; unknown and ended ones do no harm."""
        ...

    def transport(self, lease: Lease, node: str) -> Transport:
        """Files and commands in a lease that is READY. `node`: its name in messages."""
        ...

    def check(self) -> Sequence[Finding]:
        """Findings on the pool that the scheduler gives without granting a lease."""
        ...

    def leftovers(self, lease_id: str) -> bytes | None:
        """The tar with events/ and logs/ of its node folders that an ended lease left, or None."""
        ...

    def close(self) -> None: ...
