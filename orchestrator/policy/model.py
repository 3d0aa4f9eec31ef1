"""The state of a run: shapes, attempts, slots, GPUs and nodes. Plain data, which only `apply` changes.

Nothing is dropped at its end: an attempt that is over, a shape that is settled and a node that is gone stay, with what
became of them, so that `status`, `explain` and the page need nothing else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.events import CanaryTimed, FailShape, SettleShape
from orchestrator.policy.settings import PolicySettings
from orchestrator.reasons import Reason

SlotId = tuple[str, str]
"""(node, slot)"""
Place = tuple[str, str]
"""(host, GPU) where a lease names them, else (node, slot). Evidence counts for places: leases come and go."""
Candidate = tuple[str, ...]
"""Identity of a candidate, opaque to the policy."""
Waiting = tuple[float, int, tuple[int, ...]]
"""A unit that waits: minus its estimated seconds, its number, its shapes that are not settled."""


@dataclass(slots=True)
class Fault:
    """An attempt ended badly at a shape. `proven`: its slot tuned something since, so the slot is not to blame."""

    place: Place
    attempt: str
    reason: Reason
    detail: str
    t: float
    alone: bool
    """Nothing else was in its process: a tuner isolates the candidates of such a shape."""
    left_out: frozenset[Candidate] = frozenset()
    """It is no end, but a winner that was found without these candidates, because they faulted."""
    proven: bool = False


@dataclass(slots=True)
class Loss:
    """Worker or node went down with the shape in flight."""

    place: Place
    attempt: str
    with_node: bool


@dataclass(slots=True)
class Shape:
    """A shape that was asked for. `cost_s`: estimated seconds on one slot, without a set-up."""

    id: int
    unit: int
    kind: str
    cost_s: float
    state: Literal["pending", "tuned", "failed"] = "pending"
    reason: Reason | None = None
    detail: str = ""
    confirmed: bool | None = None
    """None: nothing was left out. False: the evidence is of one slot only."""
    attempt: str = ""
    """The attempt that settled it."""
    settled_at: float = 0.0
    attempts: list[str] = field(default_factory=list)
    """Every attempt that it was sent with, in order."""
    copies: int = 0
    """Attempts under way that hold it."""
    tries: int = 0
    faults: list[Fault] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """Leases that ended with it in flight, through no fault of its own."""
    wedged: list[str] = field(default_factory=list)
    """Hosts where the canary failed after it."""
    result: str = ""
    """The attempt of its last winner from which candidates were left out."""
    apart: int | None = None
    """The first of the shapes with which it runs by itself next."""


@dataclass(slots=True)
class Attempt:
    """A group on its slot: the shapes of one process. It is `sent` until the worker claims it.

    `outcome` None of one that is over: taken back before a worker claimed it, or its node was lost (`lost`).
    """

    id: str
    node: str
    slot: str
    seq: int
    shapes: tuple[int, ...]
    cost_s: float
    left_s: float
    """Estimated seconds of the shapes that have not landed."""
    sent_at: float
    state: Literal["sent", "started", "over"] = "sent"
    taking: bool = False
    lost: bool = False
    """Its node or slot was given up with it; a sign of life takes that back."""
    revived: bool = False
    """There was such a sign, but nothing that it did since: what it was charged with stands until then."""
    started_at: float | None = None
    ended_at: float | None = None
    outcome: Reason | None = None
    detail: str = ""
    seconds: float = 0.0
    in_flight: int | None = None
    """The shape that it ended at."""
    current: int | None = None
    """The shape in flight now, and since when."""
    current_at: float = 0.0
    landed: dict[int, None] = field(default_factory=dict)
    """Shapes with a result of this attempt."""
    single: int = 0
    """Its unsettled shapes that no other attempt under way holds."""
    moved_at: float = 0.0
    """Time at which it last began or landed a shape."""

    @property
    def ahead(self) -> tuple[int, ...]:
        """Its shapes from the one at which it is: the one that it named, else its first that has not landed."""
        at = next((i for i, s in enumerate(self.shapes) if s not in self.landed), len(self.shapes))
        return self.shapes[self.shapes.index(self.current) if self.current in self.shapes else at :]


@dataclass(slots=True)
class Gpu:
    """Evidence on a GPU, whichever node has it, and as which slot."""

    place: Place
    tuned: int = 0
    row: int = 0
    """First faults of shapes since something was last tuned here."""
    strikes: int = 0
    """Quarantines since something was last tuned here."""
    marks: list[int] = field(default_factory=list)
    """Shapes that faulted here and passed elsewhere, since the last quarantine."""
    open: list[tuple[int, str]] = field(default_factory=list)
    """(shape, attempt) of the faults since something was last tuned here: void once the slot is shut."""
    passed: bool = False
    """It passed a canary at least once."""
    shut: str = ""
    """Cause of its quarantine; "" if it is in none."""
    until: float = 0.0


@dataclass(slots=True)
class Slot:
    """A slot of a node. `why` belongs to its state; `history` has all of them as (t, state, why)."""

    node: str
    name: str
    gpu: Gpu
    state: Literal["starting", "ready", "quarantined", "lost"] = "starting"
    why: str = ""
    history: list[tuple[float, str, str]] = field(default_factory=list)
    running: str | None = None
    queued: list[str] = field(default_factory=list)
    ahead_s: float = 0.0
    """Estimated seconds of what runs and is queued."""
    checking: bool = False
    """It ended badly, and its worker runs a canary before it claims again."""
    sick: bool = False
    """Its last canary failed: the worker claims nothing by itself."""
    canary: str = ""
    """The canary that was asked for and has not ended."""
    last: tuple[int, str] | None = None
    """(shape, attempt) of the bad end whose canary is awaited."""
    adrift: str | None = None
    """The attempt that ran here when the node was lost: its worker may still be at it."""
    timed: list[tuple[float, CanaryTimed]] = field(default_factory=list)
    """The latest timed canaries."""
    canary_us: list[float] = field(default_factory=list)
    """Microseconds of the canaries that passed."""

    @property
    def id(self) -> SlotId:
        return (self.node, self.name)

    @property
    def doubtful(self) -> bool:
        """Return whether it was shut, or shapes faulted here in a row, and nothing was tuned since."""
        return self.gpu.strikes > 0 or self.gpu.row > 1


@dataclass(slots=True)
class Node:
    """A node. `away`: it is being prepared and has not joined (again) yet; `busy`: occupied by others, for an unknown
    time; `lost`: given up for now; `gone`: its lease ended, for good."""

    name: str
    host: str
    state: Literal["away", "joined", "busy", "lost", "gone"] = "away"
    why: str = ""
    history: list[tuple[float, str, str]] = field(default_factory=list)
    """(t, state, why); also `trouble`, which is no state of its own."""
    draining: bool = False
    lease: str = ""
    pool: str = ""
    ends_at: float = 0.0
    slots: dict[str, Slot] = field(default_factory=dict)
    tuned: int = 0
    failed: int = 0
    """Shapes that attempts on it settled."""
    owes_canaries: bool = False
    """It was lost: when it is back its slots are asked for a canary, as their workers may have lived on."""
    used: bool = False
    """Something was sent there."""


@dataclass(slots=True)
class Kind:
    """Units that may share a process. The lowest `tier` goes first."""

    number: int
    tier: int
    alone: bool
    """Each unit has a process of its own."""
    waiting: list[Waiting] = field(default_factory=list)
    """The longest first."""
    seconds: float = 0.0


@dataclass(slots=True)
class State:
    """State of one run: a function of its journal. The parts below `derived` follow from the others, and are kept so
    that an event costs the same in a fleet of any size."""

    settings: PolicySettings
    shapes: dict[int, Shape] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    gpus: dict[Place, Gpu] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    total_s: float = 0.0
    """Estimated seconds of all shapes."""
    setup_s: float = 0.0
    """Estimated seconds before the first shape of a group."""
    shares_end: bool = False
    """Idle slots may measure what a running group has left: the tuner's process may be ended between two shapes."""
    stopped: bool = False
    stop_why: str = ""
    may_grow: bool | None = None
    """Nodes on other hosts may still join; None: that was never possible."""
    epoch: int = 0
    sessions: list[list[float]] = field(default_factory=list)
    """[begin, last record] of each controller."""
    queued_leases: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """Pool -> its leases that wait, each with the scheduler's words."""
    canaries: dict[str, SlotId] = field(default_factory=dict)
    """Canaries that were asked for, by their attempt's name."""
    first_t: float | None = None
    """The first record but for those of the planning, and the last one."""
    last_t: float | None = None
    tuned: int = 0
    failed: int = 0
    tuned_at: deque[float] = field(default_factory=lambda: deque(maxlen=4096))
    """Times at which the latest shapes were tuned."""
    first_faults: int = 0
    """First faults of shapes, on all slots."""
    next_seq: int = 1

    apart: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Shapes that run by themselves next, because of what happened to them, by the first of each."""
    twice: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Unit to be started a second time -> the host that has it, its shapes."""
    held: dict[int, float] = field(default_factory=dict)
    """Shapes with enough faults -> when they are judged at the latest."""
    ripe: dict[int, FailShape | SettleShape] = field(default_factory=dict)
    """Shapes whose end is known."""
    to_shut: dict[SlotId, str] = field(default_factory=dict)
    to_ask: dict[SlotId, None] = field(default_factory=dict)
    to_recall: dict[str, None] = field(default_factory=dict)
    timers: dict[SlotId, float] = field(default_factory=dict)
    """Slot -> when its canary is due, or taken for failed."""

    open: dict[str, None] = field(default_factory=dict)
    """Attempts that are not over."""
    running: int = 0
    taking: int = 0
    single: int = 0
    """Unsettled shapes that exactly one attempt under way holds: the sum of the attempts'."""
    usable: dict[Place, Slot] = field(default_factory=dict)
    """Slots that take work, or soon will."""
    clean: dict[Place, None] = field(default_factory=dict)
    """Those of them whose last end was good."""
    free: dict[Place, None] = field(default_factory=dict)
    """Those of them with nothing to do and nothing coming."""
    hosts: dict[str, list[int]] = field(default_factory=dict)
    """Host -> how many usable and clean ones it has."""
    idle: dict[SlotId, Slot] = field(default_factory=dict)
    """Ready ones of the free slots."""
    low: dict[SlotId, Slot] = field(default_factory=dict)
    """Ready slots that have little left."""
    waiting: dict[int, Waiting] = field(default_factory=dict)
    """Every unit that waits, by number."""
    by_left: list[tuple[int, float, int, Kind]] = field(default_factory=list)
    """Kinds of which units wait, as (tier, minus the seconds that wait, number, kind), sorted."""
    by_unit: list[tuple[int, float, float, int, Kind]] = field(default_factory=list)
    """The same as (tier, minus those of the longest unit, minus those of all, number, kind)."""
    waiting_s: float = 0.0
    left_s: float = 0.0
    """Estimated seconds of all shapes that are not settled."""

    @property
    def pending(self) -> int:
        return len(self.shapes) - self.tuned - self.failed

    def order(self, attempt: str) -> tuple[float, int]:
        """Place of an attempt among all, in the order in which they were sent."""
        a = self.attempts.get(attempt)
        return (a.sent_at, a.seq) if a is not None else (0.0, 0)

    def slot(self, node: str, name: str) -> Slot | None:
        n = self.nodes.get(node)
        return n.slots.get(name) if n is not None else None

    def slot_of(self, a: Attempt) -> Slot:
        return self.nodes[a.node].slots[a.slot]

    def host(self, node: str) -> str:
        n = self.nodes.get(node)
        return n.host if n is not None else node

    def unsettled(self, shapes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(s for s in shapes if self.shapes[s].state == "pending")

    def flight(self, a: Attempt) -> Shape | None:
        """The shape at which the attempt is, if it is not settled."""
        at = a.ahead[:1]
        return self.shapes[at[0]] if at and self.shapes[at[0]].state == "pending" else None


def spot(place: Place, nodes: dict[str, Node]) -> str:
    """The place in words: `n1 slot 0`, or the host and GPU of leases."""
    return f"{place[0]} slot {place[1]}" if place[0] in nodes else f"{place[0]} GPU {place[1]}"
