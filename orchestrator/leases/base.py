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
    """Cause of a lease's end. Only FAILED counts as a lost node; else what was in flight goes back uncharged.

    RELEASED: we gave it back, or its holder ended by itself. PREEMPTED: the scheduler or a person took it back
    (preempted, cancelled, evicted, drained). FAILED: its machine broke, its memory was used up, or its holder failed.
    """

    RELEASED = "released"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lease:
    """One grant. One that the scheduler starts again elsewhere is a new lease; the one before has ended.

    `id`: its name in commands of the scheduler, that of a job, an array task or a pod. `host`: the physical one, ""
    while it is queued. `why`: the scheduler's own words on its state, such as "Priority, expected start 14:20".
    `ends_at`: epoch seconds of its time limit. `cause`: that of the end of one that ended. `way`: options by which its
    source reaches it.
    """

    id: str
    state: LeaseState
    host: str = ""
    why: str = ""
    ends_at: float | None = None
    cause: EndCause | None = None
    way: tuple[str, ...] = ()


class LeaseSource(Protocol):
    """Leases of one pool of one run, which are found by the names of both alone.

    So a controller that died between asking and hearing the answer finds them again. Every method may raise a
    NodeError: UnreachableError where the scheduler does not answer, TransportError with its words where it refuses.
    All are safe to call from several threads.
    """

    def ask(self, n: int, avoid: Collection[str] = ()) -> None:
        """Ask for `n` more, none of them on a host of `avoid`; return as soon as they are queued."""

    def list(self) -> Sequence[Lease]:
        """All that the scheduler knows, ended ones included, oldest first; one cheap call."""

    def release(self, leases: Collection[Lease]) -> None:
        """Give back; unknown and ended ones do no harm."""

    def transport(self, lease: Lease, node: str) -> Transport:
        """Files and commands in a lease that is READY. `node`: its name in messages."""

    def check(self) -> Sequence[Finding]:
        """Findings on the pool that the scheduler gives without granting a lease."""

    def leftovers(self, lease: Lease) -> bytes | None:
        """The tar with events/ and logs/ of its node folders that an ended lease left, or None."""

    def close(self) -> None:
        """Let go of the scheduler; the leases go on."""
