"""Parts of a run as the user sees them: shapes, groups, attempts, nodes, slots, and their incidents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.reasons import Reason

KINDS = {Reason.DONE: "done", Reason.CANCELLED: "cancelled", Reason.WORKER_DIED: "lost", Reason.NODE_LOST: "lost"}
"""Kind of an attempt by the reason of its end; the other reasons are faults."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Estimated seconds, as the planner has them. `shape_s`: of one shape without the set-up of its group.

    `start_s`: from the command to a slot's first group. `spread`: the factor by which a whole run may be off.
    """

    shape_s: Callable[[int], float]
    setup_s: float = 0.0
    start_s: float = 0.0
    spread: float = 5.0


@dataclass(slots=True)
class Shape:
    """A shape. state: pending, tuned or failed; `attempt` is the one that settled it, at `at`."""

    id: int
    group: str
    cost_s: float
    state: str = "pending"
    attempt: str = ""
    at: float = 0.0


@dataclass(slots=True)
class Group:
    """Shapes that travel together. `left`: those that are not settled and in no younger group, with their cost."""

    id: str
    shapes: tuple[int, ...]
    parent: str = ""
    split: bool = False
    left: int = 0
    left_s: float = 0.0
    begun: int = 0
    """Attempts that a worker began."""
    running: str = ""
    """The attempt that is under way."""


@dataclass(slots=True)
class Attempt:
    """One try of a group. kind: sent, running, done, fault, lost, cancelled or taken (back unclaimed).

    `flight`: the shape that it ended at; `current`: the one in flight now. `since`: when it last moved on (began, or
    settled a shape). `done`, `done_s`: shapes that it settled, with their estimated cost.
    """

    id: str
    group: str
    node: str
    slot: str
    begun: bool = False
    start: float = 0.0
    end: float | None = None
    kind: str = "sent"
    outcome: str = ""
    detail: str = ""
    flight: int | None = None
    current: int | None = None
    current_at: float = 0.0
    since: float = 0.0
    tuned: int = 0
    done: int = 0
    done_s: float = 0.0
    planned_s: float = 0.0
    """Estimated cost of what was not settled when it began."""
    took_s: float = 0.0
    """Seconds until it last settled a shape."""


@dataclass(slots=True)
class Slot:
    """A slot. state: starting, idle, canary failed, quarantined (`why`) or lost; busy while it has an attempt."""

    name: str
    state: str = "starting"
    why: str = ""
    attempt: Attempt | None = None


@dataclass(slots=True)
class Node:
    """A node. state: preparing, ready, unreachable or draining. `detail`: why, where something is wrong."""

    name: str
    state: str = "preparing"
    detail: str = ""
    slots: dict[str, Slot] = field(default_factory=dict)
    draining: bool = False
    tuned: int = 0
    failed: int = 0

    @property
    def running(self) -> int:
        """Slots that work on an attempt."""
        return sum(s.attempt is not None for s in self.slots.values())


@dataclass(slots=True)
class Span:
    """Interval in which a node or slot did not work. kind: preparing, trouble, away, busy, quarantine or gone."""

    node: str
    slot: str | None
    start: float
    kind: str
    text: str
    end: float | None = None


@dataclass(slots=True)
class Mark:
    """A moment: a failed canary, a controller that took over the run, a stop."""

    t: float
    kind: str
    text: str
    node: str = ""
    slot: str = ""


@dataclass(slots=True)
class ControllerSession:
    """Interval in which a controller drove the run; `end` is its last record so far."""

    start: float
    end: float
