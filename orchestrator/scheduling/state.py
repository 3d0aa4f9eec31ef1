"""State of the policy, a function of the journal: only the transitions change it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import exp, lgamma

from orchestrator.reasons import Reason
from orchestrator.scheduling.book import Backlog, Book, QueueKind
from orchestrator.scheduling.fleet import Fleet
from orchestrator.scheduling.model import (
    LEASE_ENDS,
    Attempt,
    AttemptEnd,
    CandidateId,
    Fault,
    Group,
    Health,
    LeaseEnd,
    Loss,
    Node,
    PolicySettings,
    Shape,
    Slot,
    SlotId,
)
from worker.text import plural


def fisher(bad: int, of: int, bad_elsewhere: int, of_elsewhere: int) -> float:
    """p-value of Fisher's exact test, one-sided: the probability of at least `bad` of `of` here, if here and elsewhere
    had the same rate."""
    total, all_bad = of + of_elsewhere, bad + bad_elsewhere
    whole = _log_choose(total, of)
    most = min(of, all_bad)
    tail = (
        exp(_log_choose(all_bad, k) + _log_choose(total - all_bad, of - k) - whole)
        for k in range(max(bad, of - (total - all_bad)), most + 1)
    )
    return min(1.0, sum(tail))


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


@dataclass(slots=True)
class UnattributedFault:
    """A fault during an attempt with several unsettled shapes and none known to be in flight.

    `open`: how many of these shapes have not passed elsewhere yet.
    """

    place: SlotId
    open: int


class State:
    """State of one run. Each queue holds what is still to be decided, and is emptied by the decision it leads to."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.book = Book()
        self.backlog = Backlog()
        self.fleet = Fleet(settings.groups_ahead)
        self.attempts: dict[str, Attempt] = {}
        self.unattributed_faults: dict[str, UnattributedFault] = {}
        self.stopped = False
        self.may_grow: bool | None = None
        """Nodes on other hosts may still join; None: that was never possible."""
        self.epoch = 0
        self.next_seq = 1
        self.next_canary = 1
        self.awaiting_verdict: dict[str, None] = {}
        """Groups whose attempt has ended, without a verdict so far."""
        self.retried: dict[str, tuple[int, ...]] = {}
        """Planned group -> its failed shapes that the user wants retried."""
        self.refused: dict[int, tuple[str, Reason, str]] = {}
        """Shape -> (attempt, reason, detail) of the tuner's verdict."""
        self.incomplete: dict[int, None] = {}
        """Shapes with an incomplete result, without a verdict so far."""
        self.charges: dict[tuple[SlotId, int], tuple[tuple[CandidateId, ...], tuple[CandidateId, ...], SlotId]] = {}
        """(slot, shape) -> candidates that faulted there and ran elsewhere; those before this run; where they ran."""
        self.convicted: dict[int, tuple[tuple[CandidateId, ...], tuple[SlotId, ...]]] = {}
        """Shape -> candidates that faulted on two slots, and on which."""
        self.unsure: dict[SlotId, dict[int, None]] = {}
        """Slot -> shapes settled as unconfirmed on its evidence."""
        self.reopened: dict[int, None] = {}
        """Those of them that are to be measured again."""
        self.unsure_waiting: dict[tuple[SlotId, ...], dict[str, None]] = {}
        """Groups that wait for a slot to confirm on, by where they must not run."""
        self.faulted = 0
        """Shapes that ever faulted."""
        self.trials, self.charged = 0, 0
        """Sums over all slots of `Slot.trials` and `Slot.charges`."""
        self.recall: dict[str, None] = {}
        """Unclaimed attempts to take back."""
        self.to_quarantine: dict[SlotId, str] = {}
        """Slots to put into quarantine, and why."""
        self.asks: dict[SlotId, None] = {}
        """Slots whose canary is to be requested now."""
        self.timers: list[tuple[float, str, str]] = []
        """(wake, node, slot); an entry whose slot has another `wake` by now is stale."""

    # --- groups -------------------------------------------------------------------------------------------------------

    def enqueue(self, group: Group) -> None:
        """Queue the group for a node."""
        self.awaiting_verdict.pop(group.id, None)
        group.ended, group.attempt = None, None
        if not group.left:
            group.state = "over"
            return
        group.state = "waiting"
        kind, avoid = self._kind(group)
        self.backlog.add(group.id, kind, avoid, self.book.cost_s(group), self.book.value(group))
        if group.confirms:
            self.unsure_waiting.setdefault(group.barred, {})[group.id] = None

    def unqueue(self, group: Group) -> None:
        """Take the group out of the queue."""
        self.backlog.remove(group.id)
        if group.confirms and group.id in (waiting := self.unsure_waiting.get(group.barred, {})):
            del waiting[group.id]
            if not waiting:
                del self.unsure_waiting[group.barred]

    def has_slot_beside(self, barred: tuple[SlotId, ...]) -> bool:
        """Return whether a slot other than these takes work, or soon will, or may still come."""
        return bool(self.may_grow) or self.has_slot_now(barred)

    def has_slot_now(self, barred: tuple[SlotId, ...]) -> bool:
        """Return whether a slot other than these takes work, or soon will."""
        fleet = self.fleet
        ours = 0
        for node, name in (p for place in barred for p in fleet.names(place)):
            n, slot = fleet.nodes.get(node), fleet.slot(node, name)
            ours += n is not None and slot is not None and n.hopeful > 0 and slot.hopeful
        return fleet.hopeful > ours

    def _kind(self, group: Group) -> tuple[QueueKind, tuple[str, ...]]:
        faults, avoid_too = self.book.avoided(group)
        avoid = tuple(dict.fromkeys(self.fleet.host(node) for node, _ in faults + avoid_too + group.barred))
        shapes = [self.book.shapes[s] for s in self.book.left(group)]
        risky = any(x.whole_node for s in shapes for x in s.losses)
        if any(s.must_be_exclusive for s in shapes):
            return "exclusive", avoid
        if risky:
            return "risky", avoid
        if group.suspects:
            return "careful", avoid
        return ("suspect" if avoid else "plain"), avoid

    def is_alone(self, group: Group) -> bool:
        """Return whether the group is one shape that runs alone because of what it, or a candidate of it, did."""
        if group.confirms:
            return True
        left = self.book.left(group)
        if len(left) != 1:
            return False
        shape = self.book.shapes[left[0]]
        return bool(shape.faults) or shape.must_be_exclusive or len(shape.losses) >= self.settings.losses_alone

    def finish(self, group: Group) -> None:
        """Close the group: no shape of it is left."""
        self.awaiting_verdict.pop(group.id, None)
        self.unqueue(group)
        group.state, group.ended, group.attempt = "over", None, None

    def end(self, group: Group, ending: AttemptEnd) -> None:
        """Record the end of the group's attempt; its verdict comes next."""
        if not group.left:
            self.finish(group)
            return
        group.state, group.ended, group.attempt = "awaiting_verdict", ending, None
        self.awaiting_verdict[group.id] = None

    def after_settling(self, group: Group) -> None:
        """Update the group after one of its shapes was settled, perhaps by a late row."""
        a = self.attempts.get(group.attempt or "")
        if a is not None and a.careful and not group.suspects:
            self.fleet.settled_suspects(a)
        if group.left:
            return
        if group.state in ("waiting", "awaiting_verdict"):
            self.finish(group)
        elif a is not None and a.id in self.fleet.nodes[a.node].unclaimed:
            self.recall[a.id] = None

    def place_of(self, a: Attempt) -> SlotId:
        """Slot of the attempt, in the form that evidence uses."""
        return self.fleet.place(*a.place)

    # --- losses -------------------------------------------------------------------------------------------------------

    def lose(self, a: Attempt, whole_node: bool, detail: str, accused: tuple[int, ...], t: float) -> None:
        """Record that the attempt was lost with its worker or node. Each of the `accused` shapes gets a loss."""
        place = self.place_of(a)
        self.recall.pop(a.id, None)
        self.fleet.close(a, lost=True)
        group = self.book.groups[a.group]
        a.with_node, a.charged, a.ended_at = whole_node, accused, t
        if not whole_node and len(accused) > 1:
            self.add_unattributed_fault(a.id, place, accused)
        for s in accused:
            shape = self.book.shapes[s]
            group.suspects += not shape.losses
            shape.losses += (Loss(place, whole_node, a.id, len(accused) == 1, a.exclusive),)
        reason = Reason.NODE_LOST if whole_node else Reason.WORKER_DIED
        self.end(group, AttemptEnd(a.id, reason, a.place, accused, detail, t))

    def give_back(self, a: Attempt, cause: str, detail: str, t: float, ended: tuple[int, ...]) -> None:
        """Record that the attempt's lease ended through no fault of its work: nothing is charged. `ended`: shapes that
        an earlier attempt had in flight there when the lease was ending."""
        self.recall.pop(a.id, None)
        accused = tuple(s for s in self.book.left(self.book.groups[a.group]) if s in ended)
        if a.state != "sent":
            accused = self._ended_under(self.in_flight(a)[:1], a, cause)
        self.fleet.close(a)
        self.end(self.book.groups[a.group], AttemptEnd(a.id, Reason.LEASE_ENDED, a.place, accused, detail, t))

    def forgive(self, a: Attempt, cause: str, detail: str, t: float) -> tuple[int, ...]:
        """Take back what an attempt's bad end was charged to: its lease ended through no fault of its work. Return the
        shape that was in flight, if any."""
        charged = self.in_flight(a)[:1] if a.cancelled else a.charged[:1]
        self.correct(a, None, "", t)
        self.unattributed_faults.pop(a.id, None)
        for shape in (self.book.shapes[s] for s in self.book.groups[a.group].shapes):
            kept = tuple(f for f in shape.faults if f.attempt != a.id)
            if shape.state == "pending" and kept != shape.faults:
                charged = charged or (shape.id,)
                shape.tries -= 1
                shape.faults = kept
                if a.confirms and shape.evidence is not None:
                    shape.evidence.misses -= 1
        a.lost = False
        for shape in (self.book.shapes[s] for s in self._ended_under(charged, a, cause)):
            group = self.book.groups[shape.group]
            if group.state == "waiting" and len(shape.ends) >= LEASE_ENDS:
                self.unqueue(group)
                self.end(group, AttemptEnd(a.id, Reason.LEASE_ENDED, a.place, (shape.id,), detail, t))
        return charged

    def _ended_under(self, shapes: tuple[int, ...], a: Attempt, cause: str) -> tuple[int, ...]:
        """Count the lease's end for these, once for each lease."""
        for shape in (self.book.shapes[s] for s in shapes):
            if all(x.node != a.node for x in shape.ends):
                shape.ends += (LeaseEnd(a.node, cause, a.exclusive and a.fresh),)
        return shapes

    def correct(self, a: Attempt, culprit: int | None, detail: str, t: float) -> None:
        """Correct a loss when the node reports how the attempt really ended: it is charged to the shape that was in
        flight, if any, and to no other."""
        charged, a.charged = a.charged, ()
        groups: dict[str, None] = {}
        for s in charged:
            shape = self.book.shapes[s]
            if shape.state == "pending" and s != culprit:
                shape.losses = tuple(x for x in shape.losses if x.attempt != a.id)
                groups[shape.group] = None
        guilty = self.book.shapes.get(culprit) if culprit is not None else None
        if guilty is not None and guilty.state == "pending":
            a.charged = (guilty.id,)
            loss = Loss(self.place_of(a), a.with_node, a.id, True, a.exclusive)
            guilty.losses = (*(x for x in guilty.losses if x.attempt != a.id), loss)
            groups[guilty.group] = None
        for g in groups:
            self._reweigh(self.book.groups[g], a, detail, t)

    def _reweigh(self, group: Group, source: Attempt, detail: str, t: float) -> None:
        left = [self.book.shapes[s] for s in self.book.left(group)]
        group.suspects = sum(1 for s in left if s.losses)
        a = self.attempts.get(group.attempt or "")
        if a is not None and a.careful and not group.suspects:
            self.fleet.settled_suspects(a)
        if group.state != "waiting":
            return
        self.unqueue(group)
        accused = tuple(s.id for s in left if len(s.losses) >= self.settings.losses_alone)
        if accused and len(left) > 1:
            self.end(group, AttemptEnd(source.id, Reason.NODE_LOST, source.place, accused, detail, t))
        else:
            self.enqueue(group)

    def in_flight(self, a: Attempt) -> tuple[int, ...]:
        """The shape in flight if known, else all that are left of the attempt's group."""
        left = self.book.left(self.book.groups[a.group])
        return (a.in_flight,) if a.in_flight in left and a.in_flight is not None else left

    # --- slots --------------------------------------------------------------------------------------------------------

    def mark(self, place: SlotId, attempt: str, shape: int) -> None:
        """Record that a shape which faulted at the slot passed elsewhere: evidence against the slot."""
        health = self._trusted(place)
        if health is None:
            return
        health.marks[attempt] = shape
        shapes = len(set(health.marks.values()))
        if len(health.marks) >= self.settings.marks and shapes >= self.settings.mark_shapes:
            self._condemn(
                place, f"{plural(len(health.marks), 'fault')} of {plural(shapes, 'shape')} that passed elsewhere"
            )

    def fault(self, place: SlotId, shape: Shape) -> None:
        """Record a shape's fault at the slot. Its first one anywhere is as likely on any slot, so that a row of these
        without a tuned shape is evidence against the slot, before any of the shapes passes elsewhere."""
        if shape.faults:
            return
        self.faulted += 1
        health = self._trusted(place)
        if health is None:
            return
        health.fresh[shape.root] = None
        here = len(health.fresh)
        elsewhere = self.faulted - here + 1
        rate = elsewhere / (elsewhere + self.book.tuned + 1)
        if here >= self.settings.marks and rate**here <= self.settings.streak_p and self.has_slot_now((place,)):
            self._condemn(place, f"shapes of {plural(here, 'group')} faulted here, one after the other")

    def relapsed(self, place: SlotId) -> None:
        """Record a bad end at the slot: after a quarantine, before it has tuned anything, one is enough for another,
        as long as there are other slots."""
        health = self._trusted(place)
        if health is not None and health.strikes and self.has_slot_now((place,)):
            self._condemn(place, "a bad end after its quarantine, and nothing tuned since")

    def wedged(self, shape: Shape, fault: Fault) -> None:
        """Record that the canary of a slot which had tuned shapes failed after this fault. On a second machine that is
        the shape's doing."""
        shape.wedges += (fault.place,)
        if shape.state == "pending" and len({self.fleet.host(node) for node, _ in shape.wedges}) > 1:
            seen = " and ".join(map(self.fleet.spot, dict.fromkeys(shape.wedges)))
            detail = f"the canary failed after it on {seen}, which had tuned shapes before"
            self.refused.setdefault(shape.id, (fault.attempt, fault.reason, detail))

    def _trusted(self, place: SlotId) -> Health | None:
        """Evidence on the slot, where more of it counts: not in quarantine, and ready, unless its node is gone."""
        slot = self.fleet.slot(*place)
        live = [s for p in self.fleet.live(place) if (s := self.fleet.slot(*p)) is not None]
        if slot is None or slot.health.closed or (live and all(s.state != "ready" for s in live)):
            return None
        return slot.health

    def _condemn(self, place: SlotId, why: str) -> None:
        for p in self.fleet.live(place):
            self.to_quarantine[p] = why

    def credit(self, place: SlotId, trials: int) -> None:
        """Count candidates that ran at the slot."""
        slot = self.fleet.slot(*place)
        if slot is not None:
            slot.health.trials += trials
            self.trials += trials

    def charge(self, place: SlotId, shape: int, candidates: tuple[CandidateId, ...]) -> None:
        """Record candidates that faulted at the slot and ran elsewhere: evidence against it and what it settled."""
        health = self._trusted(place)
        if health is None or not candidates:
            return
        before = len(health.charges)
        health.charges.update(((shape, c), None) for c in candidates)
        self.charged += len(health.charges) - before
        shapes = {s for s, _ in health.charges}
        if len(health.charges) < self.settings.marks or len(shapes) < self.settings.mark_shapes:
            return
        charges = len(health.charges)
        here, there = health.trials + charges, self.trials - health.trials + self.charged - charges
        few = min(here, there) < self.settings.few_trials
        if few or fisher(charges, here, self.charged - charges, there) <= self.settings.fisher_p:
            counts = f"{plural(charges, 'candidate')} of {plural(len(shapes), 'shape')}"
            self._condemn(place, f"{counts} faulted here and ran elsewhere")

    def set_wake(self, node: str, slot: Slot, at: float | None) -> None:
        slot.wake = at
        if at is not None:
            heapq.heappush(self.timers, (at, node, slot.name))

    def recall_node(self, n: Node) -> None:
        for a in n.unclaimed:
            self.recall[a] = None

    def add_unattributed_fault(self, attempt: str, place: SlotId, shapes: tuple[int, ...]) -> None:
        """Record a fault that one of these shapes, or the slot, caused: the slot, if all of them pass elsewhere."""
        self.unattributed_faults[attempt] = UnattributedFault(place, len(shapes))
        for s in shapes:
            self.book.shapes[s].unattributed_faults += (attempt,)

    def resolve_unattributed(self, shape: Shape, passed_at: SlotId | None) -> None:
        """Update the unattributed faults that involve the shape, which was settled or faulted by itself."""
        for attempt in shape.unattributed_faults:
            fault = self.unattributed_faults.get(attempt)
            if fault is None:
                continue
            if passed_at is None or passed_at == fault.place:
                del self.unattributed_faults[attempt]
                continue
            fault.open -= 1
            if not fault.open:
                del self.unattributed_faults[attempt]
                self.mark(fault.place, attempt, shape.id)
        shape.unattributed_faults = ()
