"""Records of the policy on shapes, groups, attempts, slots and nodes, with its settings. Plain data.

Shapes have one record of evidence each: faults and losses, both with the place where they happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.reasons import Reason

SlotId = tuple[str, str]
"""(node, slot)"""
CandidateId = tuple[str, ...]
"""Identity of a candidate, opaque to the policy."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An attempt ended badly at this shape. `tunes`: shapes that its slot had tuned before."""

    place: SlotId
    reason: Reason
    attempt: str
    tunes: int = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of the worker, or of its whole node, with this shape in flight.

    `known`: progress named the shape. `alone`: nothing else ran on that node.
    """

    place: SlotId
    whole_node: bool
    attempt: str
    known: bool
    alone: bool


LEASE_ENDS = 3
"""Leases that ended, uncharged, with a shape in flight, after which it runs alone on a fresh one."""


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """A lease ended, uncharged, with this shape in flight. `alone`: nothing else ever ran there."""

    node: str
    cause: str
    alone: bool


@dataclass(frozen=True, slots=True)
class IncompleteResult:
    """An incomplete result of a shape: `withheld` candidates were left out because they faulted at `place`.

    `best` is () where there is no winner, and `reason` says why. `cut`: more were withheld than are named.
    """

    attempt: str
    place: SlotId
    best: CandidateId
    withheld: tuple[CandidateId, ...]
    cut: bool = False
    reason: Reason | None = None
    detail: str = ""


@dataclass(slots=True)
class CandidateEvidence:
    """Candidates left out of a shape's attempts, and where the same candidates ran. The latest result comes last."""

    results: tuple[IncompleteResult, ...] = ()
    lost: dict[CandidateId, tuple[SlotId, ...]] = field(default_factory=dict)
    ran: dict[CandidateId, tuple[SlotId, ...]] = field(default_factory=dict)
    earlier: tuple[tuple[CandidateId, SlotId], ...] = ()
    """Those of `lost` that faulted before this run."""
    charged: tuple[tuple[CandidateId, SlotId], ...] = ()
    judged: dict[CandidateId, None] = field(default_factory=dict)
    """Candidates that were seen to fault on two slots."""
    misses: int = 0
    """Failed attempts to confirm."""
    again: bool = False
    """Settled as unconfirmed, and measured again."""

    @property
    def base(self) -> IncompleteResult | None:
        """The latest result with a winner."""
        return next((r for r in reversed(self.results) if r.reason is None), None)

    def unconfirmed_candidates(self, result: IncompleteResult) -> tuple[CandidateId, ...]:
        """Candidates left out of the result on the evidence of one slot alone, or though they ran somewhere."""
        return tuple(c for c in result.withheld if c in self.ran or len(self.lost.get(c, ())) < 2)

    def lost_at(self, candidates: Iterable[CandidateId]) -> tuple[SlotId, ...]:
        """Places where any of these faulted."""
        return tuple(dict.fromkeys(p for c in candidates for p in self.lost.get(c, ())))

    @staticmethod
    def note(book: dict[CandidateId, tuple[SlotId, ...]], candidate: CandidateId, place: SlotId) -> None:
        if place not in book.get(candidate, ()):
            book[candidate] = (*book.get(candidate, ()), place)


@dataclass(slots=True)
class Shape:
    """A requested shape. `cost_s` is its share of its group's estimate."""

    id: int
    group: str
    root: str
    cost_s: float
    state: Literal["pending", "tuned", "failed"] = "pending"
    reason: Reason | None = None
    tries: int = 0
    faults: tuple[Fault, ...] = ()
    losses: tuple[Loss, ...] = ()
    ends: tuple[LeaseEnd, ...] = ()
    unattributed_faults: tuple[str, ...] = ()
    """Attempts that faulted with this and other shapes unsettled, and none known to be in flight."""
    wedges: tuple[SlotId, ...] = ()
    """Slots that had tuned shapes, and whose canary failed after this one had faulted there."""
    evidence: CandidateEvidence | None = None
    """Candidates of it that faulted somewhere; kept while it is pending or settled as unconfirmed."""

    @property
    def must_be_exclusive(self) -> bool:
        """Return whether its next run must be the only one on its node, so that another end is attributable."""
        return len(self.ends) >= LEASE_ENDS or (len(self.losses) >= 2 and any(x.whole_node for x in self.losses))


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """End (at `t`) of a group's last attempt, until its verdict. `outcome` None: taken back unclaimed.

    `accused`: shapes that the end was charged to.
    """

    attempt: str
    outcome: Reason | None
    place: SlotId
    accused: tuple[int, ...]
    detail: str
    t: float

    @property
    def is_unattributed(self) -> bool:
        """Return whether it faulted with several shapes unsettled and none known to be in flight."""
        return self.outcome is not None and self.outcome.may_blame_slot and not self.accused


@dataclass(slots=True)
class Group:
    """Shapes that travel together. `awaiting_verdict`: its attempt has ended and has no verdict yet."""

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
    avoid: tuple[SlotId, ...] = ()
    """Places to avoid next, beside those that the evidence on its shapes gives."""
    confirms: bool = False
    """The group is one shape whose candidates faulted elsewhere; it must not run where they did."""
    barred: tuple[SlotId, ...] = ()
    """Places where they did."""
    only: tuple[CandidateId, ...] = ()
    """The candidates to be measured; (): every one."""


@dataclass(slots=True)
class Attempt:
    """One try of a group. `sent` until a worker claims it; `claimed`: by a worker that is not known yet.

    `slot`: the one it was sent to; None: any. `at`: the one that runs it."""

    id: str
    group: str
    node: str
    slot: str | None
    seq: int
    cost_s: float
    alone: bool
    exclusive: bool
    careful: bool
    """The group holds a shape with a loss."""
    fresh: bool = False
    """Nothing was sent to its node before."""
    state: Literal["sent", "claimed", "started", "over"] = "sent"
    at: str | None = None
    in_flight: int | None = None
    taking: bool = False
    ended_at: float = 0.0
    lost: bool = False
    with_node: bool = False
    charged: tuple[int, ...] = ()
    """Shapes that its loss was charged to."""
    cancelled: bool = False
    """It was ended from outside."""
    confirms: bool = False
    only: tuple[CandidateId, ...] = ()

    @property
    def place(self) -> SlotId:
        return (self.node, self.at or self.slot or "?")


@dataclass(slots=True)
class Health:
    """Evidence on a GPU, whichever node has it, and as which slot."""

    streak: int = 0
    """Consecutive bad ends since a shape was last tuned here."""
    proven: bool = False
    """A shape was tuned here since the last bad end."""
    tunes: int = 0
    """Shapes tuned here."""
    marks: dict[str, int] = field(default_factory=dict)
    """Attempt -> shape that faulted here and passed elsewhere since."""
    fresh: dict[str, None] = field(default_factory=dict)
    """Planned groups of which a shape faulted here, and nowhere before, since a shape was last tuned here."""
    charges: dict[tuple[int, CandidateId], None] = field(default_factory=dict)
    """(shape, candidate) that faulted here and ran elsewhere."""
    trials: int = 0
    """Candidates that ran here; as `charges` since the last quarantine."""
    strikes: int = 0
    """Consecutive quarantines since a shape was last tuned here."""
    closed: str = ""
    """Cause of its quarantine; "" where it is in none."""
    until: float = 0.0
    passed: bool = False
    """It passed a canary at least once."""


@dataclass(slots=True)
class Slot:
    """A slot. `checking`: after a bad end its worker runs a canary before it claims again."""

    name: str
    state: Literal["starting", "ready", "quarantined", "lost"] = "starting"
    running: str | None = None
    checking: bool = False
    named: int = 0
    """Unclaimed attempts that only this slot may claim."""
    health: Health = field(default_factory=Health)
    last_fault: tuple[int, str] | None = None
    """(shape, attempt) of the bad end whose canary is awaited."""
    why: str = ""
    wake: float | None = None
    """Time at which to request a canary, or to count the requested one as failed."""
    requested: str | None = None
    """The canary that was requested and has not ended."""
    adrift: str | None = None
    """The attempt that ran here when the node was lost: until its end is heard of, its worker may still be at it."""
    sick: bool = False
    """Its last canary failed: the worker claims nothing by itself."""

    @property
    def hopeful(self) -> bool:
        return self.state in ("starting", "ready")

    @property
    def idle(self) -> bool:
        """Return whether its worker claims the next attempt that it finds."""
        return self.state == "ready" and self.running is None and not self.checking

    @property
    def doubtful(self) -> bool:
        """Return whether it was quarantined, or shapes of several groups faulted here, and nothing was tuned since."""
        return self.health.strikes > 0 or len(self.health.fresh) > 1

    @property
    def trust(self) -> int:
        """Weight of a verdict from here: 2 proven, 1 nothing against it, 0 its last attempt ended badly."""
        return 2 if self.health.proven else int(not self.health.streak)


@dataclass(slots=True)
class Node:
    """A node. `away`: being prepared, not joined (again) yet; `busy`: occupied, for an unknown time; `gone`: its lease
    ended. The last seven are what `Fleet` sums up."""

    name: str
    index: int
    host: str
    """The machine that it is on: blame takes all nodes of one for one."""
    slots: dict[str, Slot] = field(default_factory=dict)
    lease: str = ""
    used: bool = False
    """Something was sent to it."""
    lost_at: float = 0.0
    state: Literal["joined", "away", "busy", "lost", "gone"] = "joined"
    draining: bool = False
    owes_canaries: bool = False
    """The node was lost: when it is back its slots get requests for canaries, for their workers may have lived on."""
    outstanding: dict[str, None] = field(default_factory=dict)
    unclaimed: dict[str, None] = field(default_factory=dict)
    """Those of `outstanding` that no worker has claimed and nobody takes back, in inbox order."""
    anyone: int = 0
    """Number of these that any slot may claim."""
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


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of the policy, times in seconds; the defaults suit groups of seconds to minutes."""

    groups_ahead: int = 2
    """Unclaimed groups a ready slot that a node always has, while there are any."""
    seconds_ahead: float = 120.0
    """Estimated work ahead of a slot, where that is more than `groups_ahead` groups (and no more than its share)."""
    most_ahead: int = 50
    """Unclaimed groups a ready slot at most, however cheap they are."""
    max_tries: int = 6
    """Tries of a shape in all; a limit beneath the rules of blame, so that every run ends."""
    losses_alone: int = 2
    """Losses of a shape after which it runs alone."""
    losses_fatal: int = 3
    """Losses of a shape after which it is failed as `kills_nodes`."""
    stranded: int = 3
    """Lost nodes on which a group lay unclaimed, after which it counts as one that may have been started there."""
    marks: int = 3
    """Least faults of shapes or candidates that ran elsewhere, to put a slot into quarantine."""
    mark_shapes: int = 2
    """Least number of distinct shapes among these faults."""
    streak_p: float = 1e-6
    """Largest probability, by the rate of faults elsewhere, at which faults of one planned group after the other, with
    no tuned shape between them, put a slot into quarantine."""
    fisher_p: float = 0.001
    """Largest p-value of Fisher's exact test (one-sided) at which faults of candidates put a slot into quarantine: the
    rate of faults on the slot against that elsewhere."""
    few_trials: int = 60
    """Candidates on the slot, or elsewhere, below which `marks` faults are enough without the test."""
    confirm_rounds: int = 4
    """Incomplete results of a shape after which it is settled as unconfirmed."""
    confirm_misses: int = 2
    """Attempts to confirm a shape that ended badly, after which it is settled as unconfirmed."""
    first_cool_down_s: float = 5.0
    """First quarantine of a slot that never passed a canary: a wrong interpreter or image should be known in
    seconds."""
    cool_down_s: float = 60.0
    """First quarantine of any other slot; doubled each time until a shape is tuned there."""
    max_cool_down_s: float = 1800.0
    max_strikes: int = 3
    """Quarantines in a row after which a fleet does not wait for the slot."""
    canary_timeout_s: float = 300.0
    """Time after which a requested canary without an answer counts as failed."""
    adrift_s: float = 3600.0
    """The same for a slot that was at work when its node was lost: since then."""
    lease_end_s: float = 60.0
    """Time before an uncharged end of a lease within which a bad end came with it: processes were being ended."""
    lease_word_s: float = 600.0
    """A shape under which leases were lost is not failed for that before the scheduler's word on them, or so long."""
    verdict_timeout_s: float = 60.0
    """Longest time for which the verdict on a shape waits for the slot's canary after the last fault."""
    proof_s: float = 120.0
    """Longest time for which it waits until the slots of the faults tune another shape: a sick one never does."""
    bad_row: int = 4
    """Bad ends in a row, with no tuned shape between them, from which on a fault at the slot is in doubt."""
    small_fleet: int = 3
    """Usable nodes below which what was in flight on a lost node runs by itself at once, after all other work."""
