"""Registry of shapes and groups: which are settled, and which group holds which shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
        self._children: dict[str, int] = {}

    @property
    def pending(self) -> int:
        return len(self.shapes) - self.tuned - self.failed

    def add(self, group: str, shapes: Sequence[int], cost_s: float) -> Group:
        """Add a planned group. Raise ValueError where a shape is in a group already."""
        doubled = [s for s in shapes if s in self.shapes]
        if doubled or len(set(shapes)) != len(shapes):
            raise ValueError(f"group {group}: shapes {doubled or list(shapes)} are planned twice")
        each = max(cost_s / max(1, len(shapes)), LEAST_COST_S)
        for s in shapes:
            self.shapes[s] = Shape(s, group, group, each)
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

    def settle(self, shape: Shape, state: Literal["tuned", "failed"], reason: Reason | None) -> Group:
        """Settle a shape; return the group that held it."""
        shape.state, shape.reason = state, reason
        if state == "tuned":
            self.tuned += 1
        else:
            self.failed += 1
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
            shape.tries, shape.faults, shape.losses, shape.unattributed_faults = 0, (), (), ()
            shape.evidence = None
            self.failed -= 1
            by_root.setdefault(shape.root, []).append(s)
        return {root: tuple(found) for root, found in by_root.items()}

    def unsettle(self, shape: Shape) -> None:
        """Make a shape that was settled as unconfirmed pending again; it is in no group until one adopts it."""
        if shape.state == "tuned":
            self.tuned -= 1
        else:
            self.failed -= 1
        shape.state, shape.reason = "pending", None
        shape.tries, shape.faults, shape.losses, shape.unattributed_faults = 0, (), (), ()

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
