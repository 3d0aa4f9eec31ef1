"""Number of leases that a run should hold, and the idle ones to give back: pure policy, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil

from orchestrator.leases.base import Lease, LeaseState

LEASE_WORK_S = 600.0
"""Work that makes one more lease worth asking for: so many seconds on each of its slots."""
IDLE_S = 120.0
"""A lease that has had no work for so long is given back."""
MAX_FAILURES = 3
"""Leases in a row that ended before they were ready, after which no more are requested."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Size of a pool: leases to start with, leases at most, slots that one has."""

    name: str
    minimum: int
    maximum: int
    slots: int


def wanted(pools: Sequence[PoolSize], backlog_s: float, other_slots: int = 0, places: int = 0) -> dict[str, int]:
    """Leases that each pool should hold, earlier pools filled first.

    `backlog_s`: estimated seconds on one slot of all unsettled shapes. `other_slots`: those of machines of our own.
    `places`: leases or nodes that must be there whatever the backlog, as shapes await confirmation on another one.
    """
    left = backlog_s - other_slots * LEASE_WORK_S
    out = {}
    for pool in pools:
        lease_s = pool.slots * LEASE_WORK_S
        out[pool.name] = min(pool.maximum, max(ceil(left / lease_s) if left > 0 else 0, places))
        left -= out[pool.name] * lease_s
        places -= out[pool.name]
    return out


@dataclass(slots=True)
class IdleTimes:
    """Time since when each node has had no work, by the caller's clock in seconds."""

    _since: dict[str, float] = field(default_factory=dict)

    def over(self, idle: Iterable[str], now: float) -> list[str]:
        """Return those of the nodes idle now that have been idle for IDLE_S."""
        self._since = {node: self._since.get(node, now) for node in idle}
        return [node for node, t in self._since.items() if now - t >= IDLE_S]


@dataclass(slots=True)
class Failures:
    """Leases and requests in a row that came to nothing, with the scheduler's words."""

    _row: list[str] = field(default_factory=list)

    def add(self, why: str) -> None:
        self._row.append(why or "it ended before it was ready")

    def worked(self) -> None:
        """Break the row: a lease became a node."""
        self._row.clear()

    @property
    def hopeless(self) -> str:
        """Words of the last failure where there were MAX_FAILURES in a row, else ""."""
        return self._row[-1] if len(self._row) >= MAX_FAILURES else ""


def surplus(leases: Sequence[Lease], want: int) -> list[str]:
    """Queued leases beyond those wanted, the latest first."""
    held = [x for x in leases if x.state is not LeaseState.ENDED]
    queued = [x.id for x in held if x.state is LeaseState.QUEUED]
    return queued[::-1][: max(0, len(held) - want)]


def missing(leases: Sequence[Lease], want: int) -> int:
    """Leases still to be requested."""
    return max(0, want - sum(x.state is not LeaseState.ENDED for x in leases))
