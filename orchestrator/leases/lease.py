"""A lease, the four ways in which it ends, and the interface to a scheduler that grants leases.

The neighbours: slurm.py and kubernetes.py are the schedulers, holder.py is the script that a lease runs, poller.py the
thread that talks to a pool's scheduler. pools.py makes the sources of an inventory's pools, and leased_nodes.py asks
for leases and makes nodes of them while a run goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from orchestrator.engines import Finding
from orchestrator.transport.base import Transport


class LeaseState(StrEnum):
    """QUEUED: not granted yet, or its holder is not up. READY: commands can be run in it. ENDED: it will not return."""

    QUEUED = "queued"
    READY = "ready"
    ENDED = "ended"


class EndCause(StrEnum):
    """The cause of a lease's end. Only FAILED counts as a lost node; else shapes in flight are queued again uncharged.

    RELEASED: we gave it back, or its holder ended by itself. PREEMPTED: the scheduler or a person took it back
    (preempted, cancelled, evicted, drained). FAILED: its machine broke, its memory was used up, or its holder failed.
    """

    RELEASED = "released"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lease:
    """One grant. If the scheduler starts a job again elsewhere, the old lease has ended and a new one begins."""

    id: str
    """Its name in the scheduler's commands: a job, an array task or a pod."""
    state: LeaseState
    host: str = ""
    """The physical machine, "" while it is queued."""
    why: str = ""
    """The scheduler's words on its state, such as "Priority, expected start 14:20"."""
    ends_at: float | None = None
    """Epoch seconds of its time limit."""
    cause: EndCause | None = None
    """The cause of its end, if it has ended."""
    way: tuple[str, ...] = ()
    """The options by which Slurm's srun starts a step within it; () for a pod."""


class LeaseSource(Protocol):
    """The leases of one pool of one run. The names of pool and run are enough to find them.

    So if a controller dies between a request and its answer, the next one finds the leases. Every method may raise a
    NodeError: UnreachableError if the scheduler does not answer, TransportError with its message if it refuses. All
    methods are thread-safe.
    """

    def ask(self, count: int, avoid: Collection[str] = ()) -> None:
        """Ask for `count` more, not on a host in `avoid`; return as soon as they are queued."""

    def list(self) -> Sequence[Lease]:
        """All leases that the scheduler knows, also ended ones, oldest first; one cheap call."""

    def release(self, leases: Collection[Lease]) -> None:
        """Give leases back. Unknown and ended ones are ignored."""

    def transport(self, lease: Lease, node: str) -> Transport:
        """The transport into a lease that is READY. `node`: its name in messages."""

    def check(self) -> Sequence[Finding]:
        """Check what the scheduler can tell about the pool without granting a lease."""

    def leftovers(self, lease: Lease) -> bytes | None:
        """The tar that an ended lease left, with events/ and logs/ of its node folders, or None."""

    def forget(self) -> None:
        """Remove what the ended leases of the run left behind on shared disks. Raises NodeError if a lease has not
        ended."""

    def close(self) -> None:
        """Close the connection to the scheduler; the leases stay."""
