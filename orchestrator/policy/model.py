"""The state of a run: shapes, attempts, slots, GPUs and nodes. It is plain data, and only `apply` changes it.

Nothing is dropped. Finished attempts, settled shapes and lost nodes stay with their outcome, so that `status`,
`explain` and the page need nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from orchestrator.events import CanaryTimed, FailShape, SettleShape
from orchestrator.policy.settings import PolicySettings
from orchestrator.reasons import Reason

SlotId = tuple[str, str]
"""(node, slot)"""
Place = tuple[str, str]
"""(host, GPU) if a lease names them, else (node, slot). Evidence is kept for places, because leases come and go."""
Candidate = tuple[str, ...]
"""Identity of a candidate, opaque to the policy."""


class WaitingUnit(NamedTuple):
    """A unit that waits in the queue. A sorted list of them has the longest first."""

    minus_s: float
    """Minus its estimated seconds."""
    unit: int
    """Its number."""
    shapes: tuple[int, ...]
    """Its unsettled shapes."""


@dataclass(slots=True)
class Fault:
    """An attempt's bad end at a shape, or its result without some candidates. evidence.py draws its life."""

    shape: int
    place: Place
    attempt: str
    reason: Reason
    detail: str
    t: float
    was_alone: bool
    """The shape had the process for itself; a tuner isolates the candidates of such a shape."""
    blocked: frozenset[Candidate] = frozenset()
    """If not empty: the attempt found a winner, but without these candidates, because they faulted."""
    is_proven: bool = False
    """Its GPU has tuned something since, so the shape is to blame."""


@dataclass(slots=True)
class Loss:
    """The worker or node went down with the shape in flight."""

    place: Place
    attempt: str
    with_node: bool


@dataclass(slots=True)
class Shape:
    """A requested shape. `cost_s`: estimated seconds on one slot, without set-up.

        pending --SettleShape, or a complete result--> tuned
        pending --FailShape--------------------------> failed
        tuned, failed --RetryAsked-------------------> pending (all but its attempts is forgotten)

    A pending shape waits in the queue, is isolated, is held by open attempts, or awaits its verdict (work_queue.py).
    """

    id: int
    unit: int
    kind: str
    cost_s: float
    state: Literal["pending", "tuned", "failed"] = "pending"
    reason: Reason | None = None
    detail: str = ""
    confirmed: bool | None = None
    """None: nothing was left out. False: the evidence is from one slot only."""
    attempt: str = ""
    """The attempt that settled it."""
    settled_at: float = 0.0
    attempts: list[str] = field(default_factory=list)
    """All attempts that included it, in order."""
    copies: int = 0
    """Open attempts that hold it."""
    tries: int = 0
    faults: list[Fault] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    lease_ends: list[str] = field(default_factory=list)
    """Leases that ended with it in flight, without being its fault."""
    canary_failed_after: list[str] = field(default_factory=list)
    """Hosts where the canary failed after it."""
    result: str = ""
    """The last attempt that found a winner which is not final: some candidates were left out, or it is noisy."""
    noisy: str = ""
    """The attempt that found a complete but noisy winner. It counts unless a second measurement gives a newer one."""
    isolated_with: int | None = None
    """The first of the shapes with which it runs apart from others next."""


@dataclass(slots=True)
class Attempt:
    """A group on its slot: the shapes of one process.

    Send --> sent --AttemptStarted--> started --AttemptEnded--> over
    sent --AttemptTaken--> over                      (taken back before a worker claimed it; no outcome)
    sent, started --NodeLost, SlotLost--> over       (`is_lost`; no outcome)
    over and `is_lost` --a sign of life--> started   (`is_revived`, if its node joined again and its slot is free)
    sent, started --LeaseEnded--> over               (outcome `lease_ended`)
    """

    id: str
    node: str
    slot: str
    seq: int
    shapes: tuple[int, ...]
    cost_s: float
    left_s: float
    """Estimated seconds of the shapes without a result."""
    sent_at: float
    state: Literal["sent", "started", "over"] = "sent"
    is_being_taken: bool = False
    is_lost: bool = False
    """It was given up with its node or slot. A sign of life takes that back."""
    is_revived: bool = False
    """There was a sign of life, but no progress yet. Its charges stand until there is some."""
    started_at: float | None = None
    ended_at: float | None = None
    outcome: Reason | None = None
    detail: str = ""
    seconds: float = 0.0
    in_flight: int | None = None
    """The shape at which it ended."""
    current: int | None = None
    """The shape in flight now, and since when."""
    current_at: float = 0.0
    landed: dict[int, None] = field(default_factory=dict)
    """Shapes with a result from this attempt."""
    held_once: int = 0
    """Its unsettled shapes that no other open attempt holds."""
    moved_at: float = 0.0
    """Time at which it last began a shape or gave a result."""

    @property
    def ahead(self) -> tuple[int, ...]:
        """Its shapes from the current one on: the shape that it named, else the first without a result."""
        if self.current in self.shapes:
            return self.shapes[self.shapes.index(self.current) :]
        for index, shape in enumerate(self.shapes):
            if shape not in self.landed:
                return self.shapes[index:]
        return ()


@dataclass(slots=True)
class Gpu:
    """Evidence on a GPU. It does not matter which node has the GPU, or as which slot."""

    place: Place
    tuned: int = 0
    fault_streak: int = 0
    """First faults of shapes since something was last tuned here."""
    quarantines: int = 0
    """Quarantines since something was last tuned here."""
    faults_passed_elsewhere: list[int] = field(default_factory=list)
    """Shapes that faulted here and passed elsewhere, since the last quarantine."""
    unproven_faults: list[Fault] = field(default_factory=list)
    """The faults since something was last tuned here. They are void if the slot is quarantined."""
    passed: bool = False
    """It has passed a canary at least once."""
    quarantine_why: str = ""
    """The reason for its quarantine; "" if it is not in quarantine."""
    quarantined_until: float = 0.0


@dataclass(slots=True)
class Slot:
    """A slot of a node. `why`: the reason for its state. `history`: all states as (t, state, why).

    NodeExpected, NodeJoined --> starting (or quarantined, if its GPU is) --CanaryPassed--> ready
    starting, ready --Quarantine--> quarantined --its requested canary passed--> ready
    any --NodeLost--> starting                       (but a lost slot stays lost)
    any --SlotLost, LeaseEnded, NodeJoined without it--> lost --NodeJoined with it--> starting
    """

    node: str
    name: str
    gpu: Gpu
    state: Literal["starting", "ready", "quarantined", "lost"] = "starting"
    why: str = ""
    history: list[tuple[float, str, str]] = field(default_factory=list)
    running: str | None = None
    queued: list[str] = field(default_factory=list)
    ahead_s: float = 0.0
    """Estimated seconds of its running and queued work."""
    is_checking: bool = False
    """It ended badly, and its worker runs a canary before it claims again."""
    canary_failed: bool = False
    """Its last canary failed, so the worker claims nothing by itself."""
    requested_canary: str = ""
    """The canary that we requested and that has not ended."""
    suspect_end: tuple[int, str] | None = None
    """(shape, attempt) of the bad end after which we wait for a canary."""
    orphaned: str | None = None
    """The attempt that ran here when the node was lost: its worker may still be at it."""
    timed_canaries: list[tuple[float, CanaryTimed]] = field(default_factory=list)
    """The latest timed canaries."""
    canary_us: list[float] = field(default_factory=list)
    """Microseconds of the canaries that passed."""

    @property
    def id(self) -> SlotId:
        return (self.node, self.name)

    @property
    def is_doubtful(self) -> bool:
        """Return whether it was in quarantine, or several shapes in a row faulted here, and nothing was tuned since."""
        return self.gpu.quarantines > 0 or self.gpu.fault_streak > 1


@dataclass(slots=True)
class Node:
    """A node.

        NodeExpected --> away --NodeJoined--> joined     (away: being prepared; it has not joined, or not again)
        away --NodeBusy wait--> busy --NodeBusy free--> away   (busy: occupied by others for an unknown time)
        away, joined, busy --NodeLost--> lost --NodeExpected--> away, or --NodeJoined--> joined
        any --Resumed--> away                            (but a node that is gone stays gone)
        any --LeaseEnded--> gone                         (it will not return)

    NodeTroubled changes no state: a node in trouble is prepared again until it joins or is given up.
    """

    name: str
    host: str
    state: Literal["away", "joined", "busy", "lost", "gone"] = "away"
    why: str = ""
    history: list[tuple[float, str, str]] = field(default_factory=list)
    """(t, state, why). Has `trouble` entries too; trouble does not change the state."""
    draining: bool = False
    lease: str = ""
    pool: str = ""
    ends_at: float = 0.0
    slots: dict[str, Slot] = field(default_factory=dict)
    tuned: int = 0
    failed: int = 0
    """Shapes that attempts on this node settled."""
    owes_canaries: bool = False
    """It was lost. When it is back we request canaries, because its workers may have survived."""
    used: bool = False
    """Work was sent to it."""


@dataclass(slots=True)
class Kind:
    """Units that may share a process. The lowest `tier` goes first."""

    number: int
    """Its place among all kinds, which decides between equal ones."""
    tier: int
    alone: bool
    """No two units share a process."""
    waiting: list[WaitingUnit] = field(default_factory=list)
    """The longest first."""
    seconds: float = 0.0

    @property
    def by_longest(self) -> KindPlace:
        """Place in `State.kinds_by_longest`."""
        return KindPlace((self.tier, self.waiting[0].minus_s, -self.seconds, self.number), self)

    @property
    def by_seconds(self) -> KindPlace:
        """Place in `State.kinds_by_seconds`."""
        return KindPlace((self.tier, -self.seconds, self.number), self)


class KindPlace(NamedTuple):
    """Place of a kind in a heap of kinds. Its number is in the key, which decides alone."""

    key: tuple[float, ...]
    kind: Kind


@dataclass(slots=True)
class State:
    """The state of one run. It follows from the journal alone. The fields below `derived` follow from the other fields;
    we keep them so that an event costs the same in a fleet of any size."""

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
    """Idle slots may take over the rest of a running group: the tuner's process may be stopped between two shapes."""
    stopped: bool = False
    stop_why: str = ""
    may_grow: bool | None = None
    """Nodes on other hosts may still join. None: that was never possible."""
    epoch: int = 0
    sessions: list[list[float]] = field(default_factory=list)
    """[begin, last record] of each controller."""
    queued_leases: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """Pool -> its waiting leases, each with the scheduler's message."""
    canaries: dict[str, SlotId] = field(default_factory=dict)
    """Requested canaries, by the name of their attempt."""
    first_t: float | None = None
    """Time of the first record after planning; `last_t`: of the last record."""
    last_t: float | None = None
    tuned: int = 0
    failed: int = 0
    tuned_at: list[float] = field(default_factory=list)
    """Times at which shapes were tuned."""
    first_faults: int = 0
    """First faults of shapes, on all slots."""
    next_seq: int = 1
    remeasure_s: float = 0.0
    """Estimated seconds of the second measurements of noisy winners, except those that the user asked for."""

    # derived: what is to be decided; each is emptied by its decision
    isolated: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Shapes that run apart from others next because something happened to them, by the first of each set."""
    hedged: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Unit that is to run a second time -> the host that has it, its shapes."""
    awaiting_verdict: dict[int, float] = field(default_factory=dict)
    """Shapes with enough faults -> the latest time at which they are judged."""
    decided: dict[int, FailShape | SettleShape] = field(default_factory=dict)
    """Shapes whose verdict is known."""
    to_quarantine: dict[SlotId, str] = field(default_factory=dict)
    to_ask_canary: dict[SlotId, None] = field(default_factory=dict)
    to_recall: dict[str, None] = field(default_factory=dict)
    canary_due: dict[SlotId, float] = field(default_factory=dict)
    """Slot -> when its canary is to be requested, or counts as failed."""

    # derived: sums
    open_attempts: dict[str, None] = field(default_factory=dict)
    """Attempts that are not over."""
    running: int = 0
    taking: int = 0
    held_once: int = 0
    """Unsettled shapes that exactly one open attempt holds, over all attempts."""
    usable: dict[Place, Slot] = field(default_factory=dict)
    """Slots that take work now or soon."""
    clean: dict[Place, None] = field(default_factory=dict)
    """The usable slots whose last attempt ended well."""
    free: dict[Place, None] = field(default_factory=dict)
    """The usable slots that have no work, and get none without a new decision."""
    hosts: dict[str, list[int]] = field(default_factory=dict)
    """Host -> how many usable and how many clean slots it has."""
    idle: dict[SlotId, Slot] = field(default_factory=dict)
    """The free slots that are ready."""
    running_low: dict[SlotId, Slot] = field(default_factory=dict)
    """Ready slots with little work left."""
    waiting: dict[int, WaitingUnit] = field(default_factory=dict)
    """Every waiting unit, by number."""
    kinds_by_longest: list[KindPlace] = field(default_factory=list)
    """Heap of the kinds with waiting units: its top is of the lowest tier the kind with the longest unit. Below the top
    are earlier places of kinds too; work_queue.py drops them as they come up."""
    kinds_by_seconds: list[KindPlace] = field(default_factory=list)
    """The same, with the kind that has the most work at the top."""
    waiting_s: float = 0.0
    left_s: float = 0.0
    """Estimated seconds of all unsettled shapes."""

    @property
    def pending(self) -> int:
        return len(self.shapes) - self.tuned - self.failed

    def order(self, attempt: str) -> tuple[float, int]:
        """Sort key of an attempt: the order in which attempts were sent."""
        known = self.attempts.get(attempt)
        return (known.sent_at, known.seq) if known is not None else (0.0, 0)

    @property
    def slots(self) -> list[Slot]:
        """All slots, by node."""
        return [slot for node in self.nodes.values() for slot in node.slots.values()]

    @property
    def shapes_in_flight(self) -> set[int]:
        """The shapes that slots measure now, settled ones among them."""
        currents = [self.attempts[slot.running].current for slot in self.slots if slot.running]
        return {shape for shape in currents if shape is not None}

    def slot(self, node: str, name: str) -> Slot | None:
        known = self.nodes.get(node)
        return known.slots.get(name) if known is not None else None

    def slot_of(self, attempt: Attempt) -> Slot:
        return self.nodes[attempt.node].slots[attempt.slot]

    def unsettled(self, shapes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(s for s in shapes if self.shapes[s].state == "pending")

    def shape_in_flight(self, attempt: Attempt) -> Shape | None:
        """The attempt's current shape, if it is not settled."""
        ahead = attempt.ahead
        if not ahead or self.shapes[ahead[0]].state != "pending":
            return None
        return self.shapes[ahead[0]]


def describe_place(place: Place, nodes: dict[str, Node]) -> str:
    """The place in words: `n1 slot 0`, or the host and GPU of leases."""
    return f"{place[0]} slot {place[1]}" if place[0] in nodes else f"{place[0]} GPU {place[1]}"


def describe_end_cause(cause: str) -> str:
    """A lease's EndCause in words. `preempted` is what the scheduler or a person took back; it does not say who."""
    return "cancelled or preempted" if cause == "preempted" else cause.replace("_", " ")
