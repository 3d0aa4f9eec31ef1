"""What the policy remembers of shapes, groups, attempts, slots and nodes: plain data, changed by `State.apply` only.

Shapes have one record of evidence each: faults (law 6) and losses (law 5), both with the place where they happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.reasons import Reason

Place = tuple[str, str]
"""(node, slot)"""
CandidateId = tuple[str, ...]
"""A candidate's identity, which only the tuner understands."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An attempt ended badly at this shape."""

    place: Place
    reason: Reason
    attempt: str


@dataclass(frozen=True, slots=True)
class Loss:
    """The worker, or its whole node, went away with this shape in flight.

    `known`: progress named the shape. `alone`: nothing else ran on that node.
    """

    place: Place
    whole_node: bool
    attempt: str
    known: bool
    alone: bool


@dataclass(frozen=True, slots=True)
class IncompleteResult:
    """An incomplete result of a shape: `withheld` candidates were left out because they faulted at `place`.

    `best` is () where there is no winner, and `reason` says why. `cut`: more were withheld than are named.
    """

    attempt: str
    place: Place
    best: CandidateId
    withheld: tuple[CandidateId, ...]
    cut: bool = False
    reason: Reason | None = None
    detail: str = ""


@dataclass(slots=True)
class CandidateEvidence:
    """What was left out of a shape's attempts, and where the same candidates ran. The latest result comes last."""

    results: tuple[IncompleteResult, ...] = ()
    lost: dict[CandidateId, tuple[Place, ...]] = field(default_factory=dict)
    ran: dict[CandidateId, tuple[Place, ...]] = field(default_factory=dict)
    earlier: tuple[tuple[CandidateId, Place], ...] = ()
    """Of `lost`, what faulted before this run."""
    charged: tuple[tuple[CandidateId, Place], ...] = ()
    judged: dict[CandidateId, None] = field(default_factory=dict)
    """Candidates that were seen to fault on two slots."""
    misses: int = 0
    """Attempts to confirm that ended badly."""
    again: bool = False
    """It was settled as unconfirmed, and is looked at again."""

    @property
    def base(self) -> IncompleteResult | None:
        """The latest result with a winner."""
        return next((r for r in reversed(self.results) if r.reason is None), None)

    def unconfirmed_candidates(self, result: IncompleteResult) -> tuple[CandidateId, ...]:
        """Those left out of the result on the evidence of one slot alone, or though they ran somewhere."""
        return tuple(c for c in result.withheld if c in self.ran or len(self.lost.get(c, ())) < 2)

    def lost_at(self, candidates: Iterable[CandidateId]) -> tuple[Place, ...]:
        """Where any of these faulted."""
        return tuple(dict.fromkeys(p for c in candidates for p in self.lost.get(c, ())))

    @staticmethod
    def note(book: dict[CandidateId, tuple[Place, ...]], candidate: CandidateId, place: Place) -> None:
        if place not in book.get(candidate, ()):
            book[candidate] = (*book.get(candidate, ()), place)


@dataclass(slots=True)
class Shape:
    """A shape asked for. `cost_s` is its share of its group's estimate."""

    id: int
    group: str
    root: str
    cost_s: float
    state: Literal["pending", "tuned", "failed"] = "pending"
    reason: Reason | None = None
    tries: int = 0
    faults: tuple[Fault, ...] = ()
    losses: tuple[Loss, ...] = ()
    unattributed_faults: tuple[str, ...] = ()
    """Attempts that faulted with this shape and others unsettled, and nobody knows which was in flight."""
    evidence: CandidateEvidence | None = None
    """Candidates of it that faulted somewhere; kept while it is pending or settled as unconfirmed."""

    @property
    def must_be_exclusive(self) -> bool:
        """Its next run must be the only one on its node, so that another loss is no riddle."""
        return len(self.losses) >= 2 and any(x.whole_node for x in self.losses)


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How a group's last attempt came to its end (at `t`), until it is judged. `outcome` None: taken back unclaimed.

    `accused`: shapes that the end was charged to.
    """

    attempt: str
    outcome: Reason | None
    place: Place
    accused: tuple[int, ...]
    detail: str
    t: float

    @property
    def is_unattributed(self) -> bool:
        """It faulted, and nobody knows at which of several shapes."""
        return self.outcome is not None and self.outcome.may_blame_slot and not self.accused


@dataclass(slots=True)
class Group:
    """Shapes that travel together. `awaiting_verdict`: its attempt is over and not judged yet."""

    id: str
    root: str
    shapes: tuple[int, ...]
    left: int
    """Shapes not settled."""
    state: Literal["waiting", "sent", "awaiting_verdict", "over"] = "awaiting_verdict"
    attempts: int = 0
    attempt: str | None = None
    sent: tuple[int, ...] = ()
    """Shapes of the latest attempt."""
    ended: AttemptEnd | None = None
    suspects: int = 0
    """Unsettled shapes with a loss."""
    stranded: int = 0
    avoid: tuple[Place, ...] = ()
    """Where it should rather not run next, beside what the evidence on its shapes says."""
    confirms: bool = False
    """It is one shape with candidates that faulted elsewhere, and must not run where they did."""
    barred: tuple[Place, ...] = ()
    """Where that was."""
    only: tuple[CandidateId, ...] = ()
    """The candidates to be measured; (): every one."""


@dataclass(slots=True)
class Attempt:
    """A try of a group. `sent` until a worker claims it; `claimed`: it has been, by whom is not known yet."""

    id: str
    group: str
    node: str
    slot: str | None
    seq: int
    cost_s: float
    alone: bool
    exclusive: bool
    careful: bool
    """It holds a shape with a loss."""
    state: Literal["sent", "claimed", "started", "over"] = "sent"
    at: str | None = None
    in_flight: int | None = None
    taking: bool = False
    lost: bool = False
    with_node: bool = False
    charged: tuple[int, ...] = ()
    """Shapes that its loss was charged to."""
    confirms: bool = False
    only: tuple[CandidateId, ...] = ()

    @property
    def place(self) -> Place:
        return (self.node, self.at or self.slot or "?")


@dataclass(slots=True)
class Slot:
    """A slot. `checking`: after a bad end its worker runs a canary before it claims again."""

    name: str
    state: Literal["starting", "ready", "quarantined", "lost"] = "starting"
    running: str | None = None
    checking: bool = False
    named: int = 0
    """Unclaimed attempts that only this slot may claim."""
    streak: int = 0
    """Bad ends in a row since a shape was last tuned here."""
    proven: bool = False
    """A shape was tuned here since the last bad end."""
    marks: dict[str, int] = field(default_factory=dict)
    """Attempt -> shape that faulted here and passed elsewhere since."""
    charges: dict[tuple[int, CandidateId], None] = field(default_factory=dict)
    """(shape, candidate) that faulted here and ran elsewhere."""
    trials: int = 0
    """Candidates that ran here; as `charges` since the last quarantine."""
    last_fault: tuple[int, str] | None = None
    """(shape, attempt) of the bad end whose canary is awaited."""
    strikes: int = 0
    why: str = ""
    until: float = 0.0
    wake: float | None = None
    """When to look at it again: ask for a canary, or count the asked one as failed."""
    asked: str | None = None
    passed: bool = False
    """It passed a canary at least once."""
    sick: bool = False
    """Its last canary failed: its worker claims nothing by itself."""

    @property
    def hopeful(self) -> bool:
        return self.state in ("starting", "ready")

    @property
    def trust(self) -> int:
        """What a verdict from here is worth: 2 proven, 1 nothing against it, 0 its last attempt ended badly."""
        return 2 if self.proven else int(not self.streak)


@dataclass(slots=True)
class Node:
    """A node. `away`: being prepared, not joined (again) yet; `busy`: others compute there, nobody knows how long.
    The last seven are what `Fleet` sums up."""

    name: str
    index: int
    slots: dict[str, Slot] = field(default_factory=dict)
    state: Literal["joined", "away", "busy", "lost"] = "joined"
    draining: bool = False
    owes_canaries: bool = False
    """It was lost: when it is back its slots are asked for canaries, for their workers may have lived on."""
    outstanding: dict[str, None] = field(default_factory=dict)
    unclaimed: dict[str, None] = field(default_factory=dict)
    """Those of `outstanding` that no worker has claimed and nobody takes back, in inbox order."""
    anyone: int = 0
    """Of these, the ones that any slot may claim."""
    ahead_s: float = 0.0
    claimed: int = 0
    careful: int = 0
    exclusive: str | None = None
    running: int = 0
    ready: int = 0
    hopeful: int = 0
    clean: int = 0
    proven: int = 0
    free: int = 0
    counted_s: float = 0.0
