"""Books of the policy: shapes and groups, which are settled and which group holds which shape; and the waiting groups
by kind, the most valuable and then the longest first, in heaps with changing keys."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.reasons import Reason
from orchestrator.scheduling.model import Group, Shape, SlotId

LEAST_COST_S = 0.01
"""Lower bound of a shape's estimated cost: even a free one has to be fetched."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters(n: int) -> str:
    """Name of a number in letters: 0 -> a, 25 -> z, 26 -> aa, 27 -> ab, ..."""
    out = ""
    n += 1
    while n:
        n, digit = divmod(n - 1, 26)
        out = LETTERS[digit] + out
    return out


class Book:
    """Every shape is in exactly one group; a child group takes its shapes from its parent."""

    def __init__(self) -> None:
        self.shapes: dict[int, Shape] = {}
        self.groups: dict[str, Group] = {}
        self.tuned = 0
        self.failed = 0
        self.left_s = 0.0
        """Estimated seconds of the unsettled shapes."""
        self._children: dict[str, int] = {}
        self._values: dict[str, float] = {}

    @property
    def pending(self) -> int:
        return len(self.shapes) - self.tuned - self.failed

    def add(self, group: str, shapes: Sequence[int], cost_s: float, value: float = 0.0) -> Group:
        """Add a planned group. Raise ValueError where a shape is in a group already."""
        doubled = [s for s in shapes if s in self.shapes]
        if doubled or len(set(shapes)) != len(shapes):
            raise ValueError(f"group {group}: shapes {doubled or list(shapes)} are planned twice")
        each = max(cost_s / max(1, len(shapes)), LEAST_COST_S)
        for s in shapes:
            self.shapes[s] = Shape(s, group, group, each)
        self.left_s += each * len(shapes)
        self._values[group] = value
        return self._put(group, group, shapes, ())

    def adopt(self, parent: Group, child: str, shapes: Sequence[int], avoid: tuple[SlotId, ...]) -> Group:
        """Move some of a group's shapes into a new child group."""
        for s in shapes:
            self.shapes[s].group = child
        self._children[parent.root] = self._children.get(parent.root, 0) + 1
        return self._put(child, parent.root, shapes, avoid)

    def _put(self, group: str, root: str, shapes: Sequence[int], avoid: tuple[SlotId, ...]) -> Group:
        open_ = [self.shapes[s] for s in shapes if self.shapes[s].state == "pending"]
        made = Group(group, root, tuple(shapes), len(open_), avoid=avoid)
        made.suspects = sum(1 for s in open_ if s.losses)
        self.groups[group] = made
        return made

    def child_names(self, group: Group) -> Iterator[str]:
        """Fresh names for children: the name of the planned group and letters, so that they stay short."""
        n = self._children.get(group.root, 0)
        while True:
            name = f"{group.root}{letters(n)}"
            n += 1
            if name not in self.groups:
                yield name

    def left(self, group: Group) -> tuple[int, ...]:
        """Unsettled shapes of the group, in order."""
        return tuple(s for s in group.shapes if self.shapes[s].state == "pending" and self.shapes[s].group == group.id)

    def cost_s(self, group: Group) -> float:
        """Estimated seconds of its unsettled shapes; every shape of a group is taken to cost the same."""
        return self.shapes[group.shapes[0]].cost_s * group.left if group.shapes else 0.0

    def value(self, group: Group) -> float:
        """Value of the group that it was planned with."""
        return self._values.get(group.root, 0.0)

    def settle(self, shape: Shape, state: Literal["tuned", "failed"], reason: Reason | None) -> Group:
        """Settle a shape; return the group that held it."""
        shape.state, shape.reason = state, reason
        if state == "tuned":
            self.tuned += 1
        else:
            self.failed += 1
        self.left_s = self.left_s - shape.cost_s if self.pending else 0.0
        group = self.groups[shape.group]
        group.left -= 1
        if shape.losses:
            group.suspects -= 1
        return group

    def revive(self, shapes: Iterable[int]) -> dict[str, tuple[int, ...]]:
        """Make failed shapes pending again with a clean record; return them by the group they were planned in."""
        by_root: dict[str, list[int]] = {}
        for s in shapes:
            shape = self.shapes.get(s)
            if shape is None or shape.state != "failed":
                continue
            shape.state, shape.reason = "pending", None
            shape.tries, shape.faults, shape.losses, shape.ends, shape.unattributed_faults = 0, (), (), (), ()
            shape.evidence = None
            self.failed -= 1
            self.left_s += shape.cost_s
            by_root.setdefault(shape.root, []).append(s)
        return {root: tuple(found) for root, found in by_root.items()}

    def unsettle(self, shape: Shape) -> None:
        """Make a shape that was settled as unconfirmed pending again; it is in no group until one adopts it."""
        if shape.state == "tuned":
            self.tuned -= 1
        else:
            self.failed -= 1
        self.left_s += shape.cost_s
        shape.state, shape.reason = "pending", None
        shape.tries, shape.faults, shape.losses, shape.ends, shape.unattributed_faults = 0, (), (), (), ()

    def avoided(self, group: Group) -> tuple[tuple[SlotId, ...], tuple[SlotId, ...]]:
        """(places where the group's unsettled shapes faulted, other places they should avoid), each place once."""
        faults: dict[SlotId, None] = {}
        avoid: dict[SlotId, None] = dict.fromkeys(group.avoid)
        for s in self.left(group):
            shape = self.shapes[s]
            for fault in shape.faults:
                faults[fault.place] = None
            for loss in shape.losses:
                avoid[loss.place] = None
        return tuple(faults), tuple(p for p in avoid if p not in faults)


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

    def last(self) -> str:
        """Item with the largest key; there must be one. Costs O(items)."""
        return max(self._keys, key=self._keys.__getitem__)

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
    """Place of a group in the queue. `avoid`: hosts it should not run on where there is a choice."""

    kind: QueueKind
    avoid: tuple[str, ...]
    cost_s: float
    order: int
    value: float = 0.0


Bucket = tuple[QueueKind, tuple[str, ...]]


class Backlog:
    """Waiting groups. A bucket holds those of one kind that avoid the same hosts, so that all of it moves or none."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._buckets: dict[Bucket, KeyedHeap] = {}
        self._orders = 0
        self.cost_s = 0.0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, group: str) -> bool:
        return group in self._tickets

    def add(self, group: str, kind: QueueKind, avoid: tuple[str, ...], cost_s: float, value: float = 0.0) -> None:
        self._orders += 1
        ticket = Ticket(kind, avoid, cost_s, self._orders, value)
        self._tickets[group] = ticket
        heap = self._buckets.setdefault((kind, avoid), KeyedHeap())
        heap.set(group, (-value, -cost_s, ticket.order))
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

    def picky(self) -> list[str]:
        """Groups that should not run on some host."""
        return [group for group, ticket in self._tickets.items() if ticket.avoid]

    def buckets(self, kind: QueueKind) -> list[tuple[str, ...]]:
        """`avoid` of each bucket of the kind that is not empty."""
        return [avoid for k, avoid in self._buckets if k == kind]

    def first(self, kind: QueueKind, avoid: tuple[str, ...] = ()) -> str | None:
        """Next group of a bucket."""
        heap = self._buckets.get((kind, avoid))
        return heap.first() if heap is not None else None

    def last(self, kind: QueueKind) -> str:
        """The last group of the bucket without conditions, which must not be empty. Costs O(groups)."""
        return self._buckets[kind, ()].last()

    def ticket(self, group: str) -> Ticket | None:
        return self._tickets.get(group)

    def only_exclusive(self) -> bool:
        """Return whether nothing but exclusive groups waits."""
        return all(kind == "exclusive" for kind, _ in self._buckets)

    def state(self) -> list[object]:
        """Everything that decisions depend on, for comparison."""
        return [sorted(self._tickets.items()), [(b, h.items()) for b, h in self._buckets.items()], self._orders]
