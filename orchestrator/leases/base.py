"""A lease, the four ways in which one ends, and what a scheduler of leases must offer."""

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
    """Cause of a lease's end. Only FAILED counts as a lost node; after every other end what was in flight goes back
    uncharged."""

    RELEASED = "released"
    """We gave it back, or its holder ended by itself: the work is done."""
    PREEMPTED = "preempted"
    """The scheduler or a person took it back: preempted, cancelled, evicted, drained."""
    TIME_LIMIT = "time_limit"
    FAILED = "failed"
    """Its machine broke, its memory was used up, or its holder failed."""


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
    way: tuple[str, ...] = ()
    """Options by which its source reaches it."""


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
        """All that the scheduler knows, ended ones included, oldest first; one cheap call."""
        ...

    def release(self, leases: Collection[Lease]) -> None:
        """Give back; unknown and ended ones do no harm."""
        ...

    def transport(self, lease: Lease, node: str) -> Transport:
        """Files and commands in a lease that is READY. `node`: its name in messages."""
        ...

    def check(self) -> Sequence[Finding]:
        """Findings on the pool that the scheduler gives without granting a lease."""
        ...

    def leftovers(self, lease: Lease) -> bytes | None:
        """The tar with events/ and logs/ of its node folders that an ended lease left, or None."""
        ...

    def close(self) -> None: ...
