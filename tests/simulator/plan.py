"""Plans of simulations: nodes, groups with their true durations, and every fault."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.policy.model import SlotId
from orchestrator.reasons import Reason


@dataclass(frozen=True, slots=True)
class SimGroup:
    """Shapes that may share a process. `seconds`: true duration of each, in order; `estimate_s`: what the planner
    thinks of all. `whole`: they are one unit, which is never cut."""

    id: str
    shapes: tuple[int, ...]
    seconds: tuple[float, ...]
    estimate_s: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Poison:
    """A shape that ends its attempt with this reason, with this probability each time it runs."""

    reason: Reason = Reason.FAULT
    chance: float = 1.0


@dataclass(frozen=True, slots=True)
class Sickness:
    """A slot on which every shape faults from `since` to `until`. `canary`: whether its canary passes all the same.

    `only`: the shapes that do, where it is not all. `salvage`: candidates fault there one by one, so that a shape that
    runs alone has no candidate (every other time), or is tuned without the best.
    """

    canary: bool = True
    since: float = 0.0
    until: float = float("inf")
    only: frozenset[int] | None = None
    salvage: bool = False

    def hits(self, shape: int, t: float) -> bool:
        return self.since <= t < self.until and (self.only is None or shape in self.only)


@dataclass(frozen=True, slots=True)
class Losing:
    """A slot on which these candidates (by number) fault from `since` to `until`, while its canary passes."""

    candidates: tuple[int, ...]
    since: float = 0.0
    until: float = float("inf")


@dataclass(frozen=True, slots=True)
class Outage:
    """`link`: the node is cut off, but its workers go on. `power`: everything on it stops. `seconds` None: for ever."""

    node: str
    at: float
    seconds: float | None
    kind: Literal["link", "power"] = "power"


@dataclass(frozen=True, slots=True)
class Span:
    """Interval from `since` to `until`."""

    since: float
    until: float

    def holds(self, t: float) -> bool:
        return self.since <= t < self.until


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of a simulation. Seconds are virtual."""

    poison: Mapping[int, Poison] = field(default_factory=dict)
    refused: Mapping[int, Reason] = field(default_factory=dict)
    """Shapes that the tuner refuses."""
    silent: Mapping[int, int] = field(default_factory=dict)
    """Shape -> how often the tuner skips it silently."""
    wedges: Mapping[int, float] = field(default_factory=dict)
    """Shape -> seconds for which the GPU that it ran on passes no canary afterwards."""
    worker_killers: frozenset[int] = frozenset()
    node_killers: Mapping[int, float | None] = field(default_factory=dict)
    """Shape -> seconds until the node is back, None: never."""
    kill_s: float = 1.0
    """Time from the start of a killer to the death. Less than `SimPlan.lag_s`: the start is never reported."""
    sick: Mapping[SlotId, Sickness] = field(default_factory=dict)
    losing: Mapping[SlotId, Losing] = field(default_factory=dict)
    cursed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Shape -> candidates that fault everywhere."""
    flaky: float = 0.0
    """Chance that a candidate faults, wherever it runs."""
    listed: Mapping[SlotId, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    """Slot -> what earlier runs blocked on it: shape -> candidates."""
    noisy: float = 0.0
    """Chance that a winner's time is noise."""
    unknown: float = 0.0
    """Chance that a fault does not say what was in flight."""
    rejects: float = 0.0
    """Chance that a worker rejects a spec."""
    cancels: float = 0.0
    """Chance that an attempt ends as cancelled at a shape."""
    outages: tuple[Outage, ...] = ()
    disk_full: Mapping[str, Span] = field(default_factory=dict)
    dead_slots: Mapping[SlotId, float] = field(default_factory=dict)
    """Slots whose worker dies at that time and cannot be started again."""
    drains: Mapping[str, float] = field(default_factory=dict)
    controller: tuple[Span, ...] = ()
    """Intervals without a controller; the run is resumed afterwards."""
    resumes: int = 0
    """Times that the user resumes a run that ended because no slot was left, five minutes later."""


@dataclass(frozen=True, slots=True)
class SimLease:
    """Host and GPUs (one for each slot) of a node that is a lease, when it is granted, and why it ends.

    `charged`: the end counts as a lost node, like every end while the node is down. `drain_s`: it gets no more work
    this long before its end.
    """

    host: str
    gpus: tuple[str, ...]
    since: float = 0.0
    until: float = float("inf")
    cause: str = "preempted"
    charged: bool = False
    drain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SimPlan:
    """A whole simulation; equal plans run equally."""

    nodes: Mapping[str, int]
    """Node -> slots."""
    groups: tuple[SimGroup, ...]
    faults: Faults = Faults()
    seed: int = 0
    leases: Mapping[str, SimLease] = field(default_factory=dict)
    """The nodes that are leases."""
    look_s: float = 1.0
    """Time from the end of a lease to the scheduler's report of it."""
    candidates: int = 0
    """Candidates of each shape; 0: the simulation has no candidates."""
    speed: Mapping[SlotId, float] = field(default_factory=dict)
    """Factor on every candidate's time, of slots that are slower or faster."""
    start_s: tuple[float, float] = (1.0, 5.0)
    """Nodes come up between these."""
    lag_s: float = 0.05
    """Latency from a node to the controller and back, each way."""
    canary_s: float = 1.0
    restart_s: float = 2.0
    """Time from a worker's death to its next start."""
    mixes: bool = False
    """Shapes of several groups may share a process, and idle slots may measure the end of a running one."""
    setup_s: float = 0.0
    """Set-up of an attempt before its first shape."""
    cold_s: float = 0.0
    """The same for the first attempt of a slot, and after a power cut, where it is more."""
    slow: Mapping[SlotId, float] = field(default_factory=dict)
    """Factor on the duration of all work, by slot."""
    lost_s: float = 90.0
    """An unreachable node is given up after this many seconds."""
    tick_s: float = 5.0
    limit_s: float = 30 * 86400.0
    """Limit of the simulation."""

    @property
    def slots(self) -> int:
        return sum(self.nodes.values())

    def us(self, place: SlotId, shape: int, candidate: int) -> float:
        """Time of the candidate there, in microseconds."""
        true = random.Random(f"{self.seed} {shape} {candidate}").uniform(5.0, 50.0)
        return true * self.speed.get(place, 1.0)

    def best(self, shape: int, without: Collection[int] = ()) -> str:
        """Name of the shape's fastest candidate."""
        left = [c for c in range(self.candidates) if c not in without]
        return f"c{min(left, key=lambda c: self.us(('', ''), shape, c))}" if left else ""

    def lower_bound_s(self) -> float:
        """All work over all slots, or the longest group, if that is more. Counts no set-ups, speeds or absences."""
        total = sum(sum(g.seconds) for g in self.groups)
        return max(total / max(1, self.slots), max((sum(g.seconds) for g in self.groups), default=0.0))
