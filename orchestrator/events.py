"""The vocabulary of a run: every event and decision, one frozen dataclass each.

The ledger's journal holds nothing else.

*Events* are facts from outside (a node joined, an attempt ended). *Decisions* are what the policy makes of
them (send, take back, quarantine). Both are journaled with a time before anything acts on them, and the policy's
state is a function of that journal alone: replaying it is how `resume` starts.

A change of what a record says gets the ledger's next VERSION (`ledger/database.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from orchestrator.reasons import Reason


@dataclass(frozen=True, slots=True)
class Event:
    """A fact from outside."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the policy, carried out by dispatch."""


Record = Event | Decision


@dataclass(frozen=True, slots=True)
class WorkAdded(Event):
    """Shapes that are to be tuned, in units that may share a process; a unit is never cut.

    `costs_s`: the estimated seconds of each shape, as `units` has them. The lowest `tier` goes first. `alone`: each
    unit gets a process of its own. Of the whole run: `setup_s`, the estimated seconds before the first shape of a
    process;
    `shares_end`: a process may be ended between two shapes, so that idle slots may measure what is left of it.
    """

    kind: str
    units: tuple[tuple[int, ...], ...]
    costs_s: tuple[tuple[float, ...], ...]
    tier: int = 0
    alone: bool = False
    setup_s: float = 0.0
    shares_end: bool = False


@dataclass(frozen=True, slots=True)
class RetryAsked(Event):
    """The user wants these failed shapes tried again, with fresh tries."""

    shapes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopAsked(Event):
    """No new work is to be started: the user's wish (Ctrl-C or cancel), or a limit of the run (`why`)."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A controller took over the run (again); undoes StopAsked. What was sent may still be running."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed. Not journaled."""


@dataclass(frozen=True, slots=True)
class NodeExpected(Event):
    """A node is being prepared: its share of the work waits for it until it joins or is given up (NodeLost).

    `host`: the machine that it is on, where several nodes may share one; `gpus`: for each slot, the id of its GPU
    there. Evidence counts for these, and they never change. `lease`, `pool`: the lease that the node is, if it is one;
    `ends_at`: epoch seconds of its time limit, 0 for none.
    """

    node: str
    slots: tuple[str, ...]
    host: str = ""
    gpus: tuple[str, ...] = ()
    lease: str = ""
    pool: str = ""
    ends_at: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeJoined(Event):
    """A node is deployed and its workers are starting; also after it was lost. Slots become ready by CanaryPassed."""

    node: str
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeTroubled(Event):
    """The node broke off, does not answer or cannot be prepared, and is tried again."""

    node: str
    detail: str


@dataclass(frozen=True, slots=True)
class NodeLost(Event):
    """The node is given up for now: what it had is taken as lost. Its rows still count if it comes back."""

    node: str
    detail: str


@dataclass(frozen=True, slots=True)
class LeaseEnded(Event):
    """The node was a lease and is gone for good; its name is never used again.

    `cause`: one of orchestrator.leases.base.EndCause; `detail`: the scheduler's words. `charged`: what was in flight is
    taken as lost with its node; else (preempted, time limit, released, ...) it goes back uncharged.
    """

    node: str
    cause: str
    detail: str
    charged: bool = False


@dataclass(frozen=True, slots=True)
class LeasesQueued(Event):
    """The leases of a pool that wait now, each with the scheduler's words."""

    pool: str
    leases: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class FleetMayGrow(Event):
    """More nodes on other hosts may join, or (not `more`) none will.

    While they may, no shape is settled as unconfirmed for want of a second slot.
    """

    more: bool


@dataclass(frozen=True, slots=True)
class NodeDraining(Event):
    """The user wants the node to finish what runs and take no more."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeBusy(Event):
    """The node is occupied where our workers were about to start. `doing`: wait, skip, share; then free."""

    node: str
    doing: str
    detail: str


@dataclass(frozen=True, slots=True)
class SlotLost(Event):
    """The slot's worker is gone for good (restarts used up)."""

    node: str
    slot: str
    detail: str


@dataclass(frozen=True, slots=True)
class CanaryPassed(Event):
    """The slot computed its known answer; it may take work."""

    node: str
    slot: str
    us: float


@dataclass(frozen=True, slots=True)
class CanaryFailed(Event):
    """The slot did not compute its known answer (or not in time). `final`: and never will, as things are there."""

    node: str
    slot: str
    detail: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class CanaryTimed(Event):
    """The slot timed two known kernels between attempts: microseconds of a compute-bound and a memory-bound one (-1: no
    time).

    Only slots of one `device` (name, gfx, CUs) are compared. `temperature_c`: its hottest sensor, `power_cap_w`: its
    limit; 0 where unknown.
    """

    node: str
    slot: str
    compute_us: float
    memory_us: float
    device: str = ""
    temperature_c: float = 0.0
    power_cap_w: float = 0.0


@dataclass(frozen=True, slots=True)
class AttemptStarted(Event):
    """A worker claimed the attempt."""

    attempt: str
    node: str
    slot: str


@dataclass(frozen=True, slots=True)
class ShapeStarted(Event):
    """The shape is in flight in the attempt."""

    attempt: str
    shape: int


@dataclass(frozen=True, slots=True)
class ShapeTuned(Event):
    """A valid winner of the shape reached the ledger. It settles the shape if it is complete and nothing did before.

    `withheld`: candidates that were left out because they faulted on this slot alone, of these `earlier` before this
    run; `cut`: and more.
    """

    attempt: str
    shape: int
    withheld: tuple[tuple[str, ...], ...] = ()
    earlier: tuple[tuple[str, ...], ...] = ()
    cut: bool = False

    @property
    def complete(self) -> bool:
        return not self.withheld and not self.cut


@dataclass(frozen=True, slots=True)
class ShapeRefused(Event):
    """The tuner's verdict: this shape has no winner (Reason.is_verdict). The rest as in ShapeTuned."""

    attempt: str
    shape: int
    reason: Reason
    detail: str
    withheld: tuple[tuple[str, ...], ...] = ()
    earlier: tuple[tuple[str, ...], ...] = ()
    cut: bool = False

    @property
    def complete(self) -> bool:
        return not self.withheld and not self.cut


@dataclass(frozen=True, slots=True)
class AttemptEnded(Event):
    """An attempt is over. Judged by the rows that came before it, not by `outcome`."""

    attempt: str
    outcome: Reason
    in_flight: int | None
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class AttemptTaken(Event):
    """Answer to TakeBack: `won` means no worker had claimed it, and none will."""

    attempt: str
    won: bool


@dataclass(frozen=True, slots=True)
class Send(Decision):
    """Put these shapes, a group, into a slot's inbox. The group is named by its attempt."""

    attempt: str
    node: str
    slot: str
    seq: int
    shapes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeBack(Decision):
    """Try to take an unclaimed attempt back; AttemptTaken answers."""

    attempt: str
    node: str


@dataclass(frozen=True, slots=True)
class FailShape(Decision):
    """The shape is settled as failed. `confirmed`: it was seen on two slots (of two nodes where there are two)."""

    shape: int
    reason: Reason
    detail: str
    attempt: str | None
    confirmed: bool


@dataclass(frozen=True, slots=True)
class SettleShape(Decision):
    """The shape is tuned: the winner of `attempt` is its row. Not `confirmed`: candidates were left out that faulted on
    one slot alone."""

    shape: int
    attempt: str
    confirmed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Quarantine(Decision):
    """The slot gets no work until a canary passes; one is requested at `until` (epoch seconds)."""

    node: str
    slot: str
    why: str
    until: float


@dataclass(frozen=True, slots=True)
class AskCanary(Decision):
    """Have the slot run its canary (answered by CanaryPassed or CanaryFailed)."""

    node: str
    slot: str
    attempt: str


RECORD_TYPES: dict[str, type[Record]] = {
    c.__name__: c
    for c in (
        WorkAdded, RetryAsked, StopAsked, Resumed, NodeExpected, NodeBusy, NodeJoined, NodeTroubled, NodeLost,
        NodeDraining, LeaseEnded, LeasesQueued, FleetMayGrow, SlotLost,
        CanaryPassed, CanaryFailed, CanaryTimed, AttemptStarted, ShapeStarted, ShapeTuned, ShapeRefused, AttemptEnded,
        AttemptTaken,
        Send, TakeBack, FailShape, SettleShape, Quarantine, AskCanary,
    )
}  # fmt: skip


_FIELDS = {c: {f.name: f.default for f in fields(c)} for c in RECORD_TYPES.values()}
"""Names and defaults: `fields` takes longer than all the rest, and a run has many records."""


def to_json(record: Record) -> str:
    """The fields of a record as one JSON object (its type is kept beside it), without those that are as by default."""
    raw = {name: v for name, default in _FIELDS[type(record)].items() if (v := getattr(record, name)) != default}
    return json.dumps(raw, default=lambda v: v.value, separators=(",", ":"))


def from_json(type_: str, data: str) -> Record:
    """The inverse of `to_json`."""
    raw: dict[str, Any] = _decode(data)[0]
    for name, v in raw.items():  # most values of most records are plain
        if type(v) is list:
            raw[name] = _tuples(v)
        elif name in _REASONS:
            raw[name] = Reason(v)
    return RECORD_TYPES[type_](**raw)


_decode = json.JSONDecoder().raw_decode
_REASONS = ("reason", "outcome")


def _tuples(v: list[Any]) -> tuple[Any, ...]:
    return tuple(map(_tuples, v)) if v and type(v[0]) is list else tuple(v)
