"""The vocabulary of a run: every event and decision, one frozen dataclass each.

The ledger's journal holds nothing else.

*Events* are facts from outside (a node joined, an attempt ended). *Decisions* are the policy's answers to them (send,
take back, quarantine). Both are journaled with a time before anything acts on them. The policy's state follows from
the journal alone, so `resume` starts by replaying it.

If the meaning of a record changes, the ledger's VERSION (`ledger/database.py`) goes up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

from orchestrator.reasons import Reason


@dataclass(frozen=True, slots=True)
class Event:
    """A fact from outside."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the policy, carried out by dispatch."""


Record = Event | Decision

RECORD_TYPES: dict[str, type[Any]] = {}
"""Every record type by the name that the journal has for it."""

_DEFAULTS: dict[type[Any], dict[str, Any]] = {}
"""Names and defaults of each record type's fields, kept because `fields` is slow and a run has many records."""

R = TypeVar("R", bound=Record)


@dataclass_transform(frozen_default=True)
def journaled(cls: type[R]) -> type[R]:
    """Make the class a frozen dataclass, and a type of record that the journal can hold."""
    made = dataclass(frozen=True, slots=True)(cls)
    RECORD_TYPES[made.__name__] = made
    _DEFAULTS[made] = {field.name: field.default for field in fields(made)}
    return made


@journaled
class WorkAdded(Event):
    """Shapes to tune. A unit is never split. Units of the same `kind` may share a process.

    `costs_s`: the estimated seconds of each shape, laid out like `units`. The lowest `tier` goes first. `alone`: no two
    units share a process. For the whole run: `setup_s`: estimated seconds before a process reaches its first shape.
    `shares_end`: a process may be stopped between two shapes, so that idle slots can take the rest of its group.
    """

    kind: str
    units: tuple[tuple[int, ...], ...]
    costs_s: tuple[tuple[float, ...], ...]
    tier: int = 0
    alone: bool = False
    setup_s: float = 0.0
    shares_end: bool = False


@journaled
class RetryAsked(Event):
    """The user wants these shapes tried again: failed ones, whose tries start at zero, and noisy winners."""

    shapes: tuple[int, ...]


@journaled
class StopAsked(Event):
    """Start no new work: the user asked for it (Ctrl-C or cancel), or the run reached a limit (`why`)."""

    why: str = ""


@journaled
class Resumed(Event):
    """A controller took over the run (again); undoes StopAsked. Groups sent earlier may still be running.

    `epoch` counts the run's controllers. Nodes obey only the youngest, which has the highest number.
    """

    epoch: int


@journaled
class Tick(Event):
    """Time passed. Not journaled."""


@journaled
class NodeExpected(Event):
    """A node is being prepared. Its share of the work waits until it joins or is given up (NodeLost).

    `host`: the machine that it is on; several nodes may share one. `gpus`: for each slot, the id of its GPU there.
    Faults count against machines and GPUs; those of a node never change. `lease`, `pool`: its lease, if it has one;
    `ends_at`: epoch seconds of its time limit, 0 if it has no limit.
    """

    node: str
    slots: tuple[str, ...]
    host: str = ""
    gpus: tuple[str, ...] = ()
    lease: str = ""
    pool: str = ""
    ends_at: float = 0.0


@journaled
class NodeJoined(Event):
    """A node is deployed and its workers are starting, perhaps again after a loss. CanaryPassed makes a slot ready."""

    node: str
    slots: tuple[str, ...]


@journaled
class NodeTroubled(Event):
    """The node's connection broke, it does not answer, or it cannot be prepared. We try again."""

    node: str
    detail: str


@journaled
class NodeLost(Event):
    """The node is given up for now, and the groups that it had are taken as lost. Rows still count if it comes back."""

    node: str
    detail: str


@journaled
class LeaseEnded(Event):
    """The node was a lease and will not return; its name is never used again.

    `cause`: one of orchestrator.leases.lease.EndCause; `detail`: the scheduler's message. `charged`: shapes in flight
    count as lost with their node. Otherwise (preempted, time limit, released, ...) they are queued again uncharged.
    """

    node: str
    cause: str
    detail: str
    charged: bool = False


@journaled
class LeasesQueued(Event):
    """The leases of a pool that are waiting now, each with the scheduler's message."""

    pool: str
    leases: tuple[tuple[str, str], ...]


@journaled
class FleetMayGrow(Event):
    """Says whether more nodes on other hosts may join.

    While they may, a shape that needs a second slot waits for one; it is not settled as unconfirmed.
    """

    more: bool


@journaled
class NodeDraining(Event):
    """The user wants the node to finish its running groups and take no more."""

    node: str


@journaled
class NodeBusy(Event):
    """Someone else uses the node where our workers are to start. `doing`: wait, skip or share; later free."""

    node: str
    doing: str
    detail: str


@journaled
class SlotLost(Event):
    """The slot's worker died and has no restarts left."""

    node: str
    slot: str
    detail: str


@journaled
class CanaryPassed(Event):
    """The slot's canary gave the known answer; the slot may take work."""

    node: str
    slot: str
    us: float


@journaled
class CanaryFailed(Event):
    """The slot's canary was wrong or late. `final`: it will never pass, as things are on that node."""

    node: str
    slot: str
    detail: str
    final: bool = False


@journaled
class CanaryTimed(Event):
    """The slot timed two known kernels between attempts: microseconds of a compute-bound and of a memory-bound one
    (-1: no time).

    Only slots with the same `device` (name, gfx, CUs) are compared. `temperature_c`: the hottest sensor; `power_cap_w`:
    the power limit; 0 if unknown.
    """

    node: str
    slot: str
    compute_us: float
    memory_us: float
    device: str = ""
    temperature_c: float = 0.0
    power_cap_w: float = 0.0


@journaled
class AttemptStarted(Event):
    """A worker claimed the attempt."""

    attempt: str
    node: str
    slot: str


@journaled
class ShapeStarted(Event):
    """The shape is in flight in the attempt."""

    attempt: str
    shape: int


NOISE = ("the winner's time is noise",)
"""Stands among the candidates that a result leaves out if its winner is noisy. So no reader needs another field."""


@journaled
class ShapeTuned(Event):
    """A valid winner of the shape reached the ledger. A complete one that is not noisy settles a pending shape.

    `withheld`: identities of the blocked candidates, which faulted on this slot alone, and NOISE.
    `earlier`: those of them that faulted before this run. `cut`: the list was cut, there are more.
    """

    attempt: str
    shape: int
    withheld: tuple[tuple[str, ...], ...] = ()
    earlier: tuple[tuple[str, ...], ...] = ()
    cut: bool = False

    @property
    def complete(self) -> bool:
        """Return whether no candidate was left out."""
        return not self.cut and set(self.withheld) <= {NOISE}

    @property
    def noisy(self) -> bool:
        """Return whether the winner's time differs from its first time by more than noise explains."""
        return NOISE in self.withheld


@journaled
class ShapeRefused(Event):
    """The tuner's verdict: this shape has no winner (Reason.is_verdict). Other fields as in ShapeTuned."""

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


@journaled
class AttemptEnded(Event):
    """An attempt is over. We judge it by the rows that arrived, not by `outcome`."""

    attempt: str
    outcome: Reason
    in_flight: int | None
    detail: str
    seconds: float


@journaled
class AttemptTaken(Event):
    """Answer to TakeBack. `won`: no worker had claimed the attempt, and none will."""

    attempt: str
    won: bool


@journaled
class Send(Decision):
    """Put a group, these shapes, into a slot's inbox. The group is named after its attempt. A worker takes the lowest
    `seq` first."""

    attempt: str
    node: str
    slot: str
    seq: int
    shapes: tuple[int, ...]


@journaled
class TakeBack(Decision):
    """Try to take an unclaimed attempt back; AttemptTaken answers."""

    attempt: str
    node: str


@journaled
class FailShape(Decision):
    """The shape is settled as failed. `confirmed`: it failed on two slots (on two nodes if there are two)."""

    shape: int
    reason: Reason
    detail: str
    attempt: str | None
    confirmed: bool


@journaled
class SettleShape(Decision):
    """The shape is tuned: the winner of `attempt` is its row. Not `confirmed`: candidates that faulted on only one slot
    were left out. It also settles a noisy winner that is not measured again."""

    shape: int
    attempt: str
    confirmed: bool
    detail: str


@journaled
class Quarantine(Decision):
    """The slot gets no work until a canary passes; one is requested at `until` (epoch seconds)."""

    node: str
    slot: str
    why: str
    until: float


@journaled
class AskCanary(Decision):
    """Make the slot run its canary. CanaryPassed or CanaryFailed answers."""

    node: str
    slot: str
    attempt: str


def to_json(record: Record) -> str:
    """The fields of a record that differ from their defaults, as a JSON object. Its type is stored beside it."""
    values = {name: getattr(record, name) for name in _DEFAULTS[type(record)]}
    changed = {name: value for name, value in values.items() if value != _DEFAULTS[type(record)][name]}
    return json.dumps(changed, default=lambda v: v.value, separators=(",", ":"))


def from_json(type_: str, data: str) -> Record:
    """The inverse of `to_json`."""
    reasons = _reason_fields(type_)
    raw: dict[str, Any] = _decode(data)[0]
    for name, v in raw.items():  # most values of most records are plain
        if type(v) is list:
            raw[name] = _tuples(v)
        elif name in reasons:
            raw[name] = Reason(v)
    record: Record = RECORD_TYPES[type_](**raw)
    return record


_decode = json.JSONDecoder().raw_decode  # faster than json.loads


@cache
def _reason_fields(type_: str) -> frozenset[str]:
    """Names of the fields whose type is Reason, alone or as one of several. The journal has them as texts."""
    hints = get_type_hints(RECORD_TYPES[type_])
    return frozenset(name for name, hint in hints.items() if hint is Reason or Reason in get_args(hint))


def _tuples(v: list[Any]) -> tuple[Any, ...]:
    return tuple(map(_tuples, v)) if v and type(v[0]) is list else tuple(v)
