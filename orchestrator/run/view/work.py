"""Work of a run: its shapes, groups and attempts, folded from the journal."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator import events as ev
from orchestrator.planning.estimate import Measured
from orchestrator.reasons import Reason

KINDS = {
    Reason.DONE: "done",
    Reason.CANCELLED: "cancelled",
    Reason.LEASE_ENDED: "cancelled",
    Reason.WORKER_DIED: "lost",
    Reason.NODE_LOST: "lost",
}
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
    """A shape. state: pending, tuned or failed; `attempt` is the one that settled it."""

    id: int
    group: str
    cost_s: float
    state: str = "pending"
    attempt: str = ""


@dataclass(slots=True)
class Group:
    """Shapes that travel together. `left`: those that are not settled and in no younger group, with their cost."""

    id: str
    left: int = 0
    left_s: float = 0.0
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
    took_s: float = 0.0
    """Seconds until it last settled a shape."""


class Work:
    """`costs` None: every shape costs its share of what its group was planned with."""

    def __init__(self, costs: Costs | None) -> None:
        self.costs = costs
        self.groups: dict[str, Group] = {}
        self.open: dict[str, Group] = {}
        """Groups with something left."""
        self.left_s = 0.0
        """Estimated seconds of what is left, without set-ups."""
        self.shapes: dict[int, Shape] = {}
        self.attempts: dict[str, Attempt] = {}
        self.over: defaultdict[tuple[str, str], Measured] = defaultdict(Measured)
        """Attempts that are over, by node and slot, each with the time of what it settled."""
        self.tuned = self.failed = 0
        self.tuned_at: deque[float] = deque(maxlen=4096)
        """Times at which the latest shapes were tuned."""

    @property
    def setup_s(self) -> float:
        return self.costs.setup_s if self.costs else 0.0

    # --- groups -------------------------------------------------------------------------------------------------------

    def work_added(self, t: float, r: ev.WorkAdded) -> None:
        """What waits for its first group, under the name of its first shape."""
        group = self.groups[f"{r.kind} {r.units[0][0]}"] = Group(f"{r.kind} {r.units[0][0]}")
        for unit, costs in zip(r.units, r.costs_s, strict=True):
            for i, cost in zip(unit, costs, strict=True):
                self.shapes[i] = Shape(i, group.id, self.costs.shape_s(i) if self.costs else cost)
                self._hold(group, self.shapes[i])

    def retry_asked(self, t: float, r: ev.RetryAsked) -> None:
        for shape in (self.shapes[i] for i in r.shapes if i in self.shapes):
            if shape.state == "failed":
                self.failed -= 1
                shape.state, shape.attempt = "pending", ""
                self._hold(self.groups[shape.group], shape)

    def _hold(self, group: Group, shape: Shape) -> None:
        group.left += 1
        group.left_s += shape.cost_s
        self.left_s += shape.cost_s
        self.open[group.id] = group

    def _drop(self, shape: Shape) -> None:
        group = self.groups[shape.group]
        group.left -= 1
        group.left_s = group.left_s - shape.cost_s if group.left else 0.0
        self.left_s -= shape.cost_s
        if not group.left:
            self.open.pop(group.id, None)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def sent(self, t: float, r: ev.Send) -> None:
        self.attempts[r.attempt] = Attempt(r.attempt, r.attempt, r.node, r.slot)
        group = self.groups[r.attempt] = Group(r.attempt)
        for shape in (self.shapes[i] for i in r.shapes if i in self.shapes):
            if shape.state == "pending":
                self._drop(shape)
                self._hold(group, shape)
            shape.group = r.attempt

    def started(self, t: float, r: ev.AttemptStarted) -> Attempt:
        """Attempt that a worker has begun now, or that is back after it counted as lost."""
        a = self.attempts.get(r.attempt)
        if a is None:
            a = self.attempts[r.attempt] = Attempt(r.attempt, "", r.node, r.slot)
        a.slot = r.slot
        if not a.begun:
            a.begun, a.start, a.since = True, t, t
        if a.kind in ("sent", "lost"):
            a.kind, a.end = "running", None
            if group := self.groups.get(a.group):
                group.running = a.id
        return a

    def shape_started(self, t: float, r: ev.ShapeStarted) -> None:
        a = self.attempts.get(r.attempt)
        if a is not None:
            a.current, a.current_at = r.shape, t

    def shape_tuned(self, t: float, r: ev.ShapeTuned) -> Attempt | None:
        """The attempt that settled the shape; None where it was settled before, or is not of this run."""
        a, shape = self.attempts.get(r.attempt), self.shapes.get(r.shape)
        if a is not None:
            a.tuned += 1
            self._moved(a, t, shape)
        if shape is None or shape.state != "pending" or not r.complete:
            return None
        return self._tune(shape, r.attempt, t)

    def shape_settled(self, t: float, r: ev.SettleShape) -> Attempt | None:
        """The attempt whose winner it is; None where it was settled before."""
        shape = self.shapes.get(r.shape)
        if shape is None or shape.state != "pending":
            return None
        return self._tune(shape, r.attempt, t)

    def _tune(self, shape: Shape, attempt: str, t: float) -> Attempt | None:
        self._settle(shape, "tuned", attempt)
        self.tuned += 1
        self.tuned_at.append(t)
        return self.attempts.get(attempt)

    def shape_failed(self, t: float, r: ev.FailShape) -> Attempt | None:
        """The attempt that is blamed for it, if any."""
        a, shape = self.attempts.get(r.attempt or ""), self.shapes.get(r.shape)
        if shape is None or shape.state != "pending":
            return None
        if a is not None and a.kind == "running":  # a verdict on the way: the attempt goes on
            self._moved(a, t, shape)
        self._settle(shape, "failed", r.attempt or "")
        self.failed += 1
        return a

    def _settle(self, shape: Shape, state: str, attempt: str) -> None:
        self._drop(shape)
        shape.state, shape.attempt = state, attempt

    def _moved(self, a: Attempt, t: float, shape: Shape | None) -> None:
        """Record that the attempt finished a shape."""
        a.since, a.current = t, None
        a.done += 1
        a.done_s += shape.cost_s if shape else 0.0
        a.took_s = t - a.start if a.begun else 0.0

    def ended(self, t: float, r: ev.AttemptEnded) -> Attempt | None:
        a = self.attempts.get(r.attempt)
        if a is None:
            return None
        kind = KINDS.get(r.outcome, "fault")
        if kind != "lost" or a.kind != "lost":  # an attempt that was given up ended then, whenever its end is read
            a.end = t
        a.kind, a.outcome, a.detail, a.flight, a.current = kind, r.outcome.value, r.detail, r.in_flight, None
        if a.done:
            # its own clock measured its time, with or without a controller
            took = min(a.took_s, r.seconds) if r.seconds > 0 else a.took_s
            self.over[a.node, a.slot].add(self.setup_s + a.done_s, took)
        self._stops(a)
        return a

    def taken(self, t: float, r: ev.AttemptTaken) -> None:
        a = self.attempts.get(r.attempt)
        if a is not None and r.won:
            a.kind, a.end = "taken", t
            self._stops(a)

    def lost(self, t: float, a: Attempt, why: Reason = Reason.NODE_LOST) -> None:
        """Record that the attempt's node or slot was given up, or its lease ended."""
        a.kind, a.end, a.outcome = KINDS[why], t, why.value
        self._stops(a)

    def _stops(self, a: Attempt) -> None:
        group = self.groups.get(a.group)
        if group is not None and group.running == a.id:
            group.running = ""
