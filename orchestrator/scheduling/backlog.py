"""Groups that wait for a node, by how choosy they are; within a kind the longest comes first.

Kinds, in the order in which they are served: `suspect` (rather not on certain nodes), `careful` (a shape of it was
lost with its worker: one such group a node at a time), `risky` (lost with its node), `plain`, `exclusive` (must be
alone on its node; after everything else).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.scheduling.heap import KeyedHeap

Kind = Literal["suspect", "careful", "risky", "plain", "exclusive"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A group's place in the queue. `avoid`: nodes it would rather not run on."""

    kind: Kind
    avoid: tuple[str, ...]
    cost_s: float
    order: int


Bucket = tuple[Kind, tuple[str, ...]]


class Backlog:
    """Waiting groups. A bucket holds those of one kind that avoid the same nodes, so that all of it moves or none."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._buckets: dict[Bucket, KeyedHeap] = {}
        self._orders = 0
        self.cost_s = 0.0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, group: str) -> bool:
        return group in self._tickets

    def add(self, group: str, kind: Kind, avoid: tuple[str, ...], cost_s: float) -> None:
        self._orders += 1
        ticket = Ticket(kind, avoid, cost_s, self._orders)
        self._tickets[group] = ticket
        heap = self._buckets.setdefault((kind, avoid), KeyedHeap())
        heap.set(group, (-cost_s, ticket.order))
        self.cost_s += cost_s

    def remove(self, group: str) -> None:
        ticket = self._tickets.pop(group, None)
        if ticket is None:
            return
        bucket = (ticket.kind, ticket.avoid)
        self._buckets[bucket].discard(group)
        if not len(self._buckets[bucket]):
            del self._buckets[bucket]
        self.cost_s = self.cost_s - ticket.cost_s if self._tickets else 0.0

    def buckets(self, kind: Kind) -> list[tuple[str, ...]]:
        """The `avoid` of each bucket of the kind that is not empty."""
        return [avoid for k, avoid in self._buckets if k == kind]

    def first(self, kind: Kind, avoid: tuple[str, ...] = ()) -> str | None:
        """The group that is next in a bucket."""
        heap = self._buckets.get((kind, avoid))
        return heap.first() if heap is not None else None

    def ticket(self, group: str) -> Ticket | None:
        return self._tickets.get(group)

    def only_exclusive(self) -> bool:
        """Whether nothing but exclusive groups waits."""
        return all(kind == "exclusive" for kind, _ in self._buckets)

    def state(self) -> list[object]:
        """Everything that decides, for comparison."""
        return [sorted(self._tickets.items()), [(b, h.items()) for b, h in self._buckets.items()], self._orders]
