"""Queues of the policy: waiting groups by kind, the longest first, and the heap with changing keys behind them."""

from __future__ import annotations

import heapq
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

Key = tuple[float, ...]


class KeyedHeap:
    """Items (text) with a key each; the smallest key comes first. Make keys unique, so that order is certain."""

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, str]] = []
        self._keys: dict[str, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item: str) -> bool:
        return item in self._keys

    def set(self, item: str, key: Key) -> None:
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > 64 + 4 * len(self._keys):
            self._heap = [(k, i) for i, k in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, item: str) -> None:
        self._keys.pop(item, None)

    def first(self) -> str | None:
        """Item with the smallest key."""
        while self._heap:
            key, item = self._heap[0]
            if self._keys.get(item) == key:
                return item
            heapq.heappop(self._heap)
        return None

    def walk(self) -> Generator[str, None, None]:
        """Items by rising key; close it (or exhaust it) before changing a key. Costs as far as one goes."""
        seen: list[tuple[Key, str]] = []
        last: str | None = None
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._keys.get(entry[1]) == entry[0] and entry[1] != last:
                    seen.append(entry)
                    last = entry[1]
                    yield entry[1]
        finally:
            for entry in seen:
                heapq.heappush(self._heap, entry)

    def items(self) -> list[tuple[Key, str]]:
        """All (key, item), in order."""
        return sorted((k, i) for i, k in self._keys.items())


QueueKind = Literal["suspect", "careful", "risky", "plain", "exclusive"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """SlotId of a group in the queue. `avoid`: nodes it should not run on where there is a choice."""

    kind: QueueKind
    avoid: tuple[str, ...]
    cost_s: float
    order: int


Bucket = tuple[QueueKind, tuple[str, ...]]


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

    def add(self, group: str, kind: QueueKind, avoid: tuple[str, ...], cost_s: float) -> None:
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

    def buckets(self, kind: QueueKind) -> list[tuple[str, ...]]:
        """`avoid` of each bucket of the kind that is not empty."""
        return [avoid for k, avoid in self._buckets if k == kind]

    def first(self, kind: QueueKind, avoid: tuple[str, ...] = ()) -> str | None:
        """Next group of a bucket."""
        heap = self._buckets.get((kind, avoid))
        return heap.first() if heap is not None else None

    def ticket(self, group: str) -> Ticket | None:
        return self._tickets.get(group)

    def only_exclusive(self) -> bool:
        """Whether nothing but exclusive groups waits."""
        return all(kind == "exclusive" for kind, _ in self._buckets)

    def state(self) -> list[object]:
        """Everything that decisions depend on, for comparison."""
        return [sorted(self._tickets.items()), [(b, h.items()) for b, h in self._buckets.items()], self._orders]
