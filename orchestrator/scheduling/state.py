"""All that the policy knows, as a function of the journal: `on_events` and `on_decisions` change it, nothing else."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from orchestrator.reasons import Reason
from orchestrator.scheduling.backlog import Backlog, Kind
from orchestrator.scheduling.book import Book
from orchestrator.scheduling.fisher import fisher
from orchestrator.scheduling.fleet import Fleet
from orchestrator.scheduling.model import Attempt, AttemptEnd, CandidateId, Group, Loss, Node, Place, Shape, Slot
from orchestrator.scheduling.settings import PolicySettings


@dataclass(slots=True)
class UnattributedFault:
    """An attempt that faulted, nobody knows at which of its shapes. `open`: those that have not passed elsewhere."""

    place: Place
    open: int


class State:
    """The queues below hold what still has to be decided; each is emptied by the decision it leads to."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.book = Book()
        self.backlog = Backlog()
        self.fleet = Fleet(settings.groups_ahead)
        self.attempts: dict[str, Attempt] = {}
        self.unattributed_faults: dict[str, UnattributedFault] = {}
        self.stopped = False
        self.epoch = 0
        self.next_seq = 1
        self.next_canary = 1
        self.awaiting_verdict: dict[str, None] = {}
        """Groups whose attempt is over, to be judged."""
        self.retried: dict[str, tuple[int, ...]] = {}
        """Planned group -> failed shapes of it that a person wants tried again."""
        self.refused: dict[int, tuple[str, Reason, str]] = {}
        """Shape -> (attempt, reason, detail) of the tuner's verdict."""
        self.incomplete: dict[int, None] = {}
        """Shapes with an incomplete result to be judged."""
        self.charges: dict[tuple[Place, int], tuple[tuple[CandidateId, ...], tuple[CandidateId, ...], Place]] = {}
        """(slot, shape) -> candidates that faulted there and ran elsewhere; those before this run; where they ran."""
        self.convicted: dict[int, tuple[tuple[CandidateId, ...], tuple[Place, ...]]] = {}
        """Shape -> candidates that faulted on two slots, and on which."""
        self.unsure: dict[Place, dict[int, None]] = {}
        """Slot -> shapes settled as unconfirmed on its evidence."""
        self.reopened: dict[int, None] = {}
        """Of these, the ones to be looked at again."""
        self.unsure_waiting: dict[tuple[Place, ...], dict[str, None]] = {}
        """Groups that wait for a slot to confirm on, by where they must not run."""
        self.trials, self.charged = 0, 0
        """Sums over all slots of `Slot.trials` and `Slot.charges`."""
        self.recall: dict[str, None] = {}
        """Unclaimed attempts to take back."""
        self.to_quarantine: dict[Place, str] = {}
        """Slots to put into quarantine, and why."""
        self.asks: dict[Place, None] = {}
        """Slots whose canary is to be asked for now."""
        self.timers: list[tuple[float, str, str]] = []
        """(wake, node, slot); those whose slot has another `wake` by now mean nothing."""

    # --- groups -------------------------------------------------------------------------------------------------------

    def enqueue(self, group: Group) -> None:
        """The group waits for a node from now on."""
        self.awaiting_verdict.pop(group.id, None)
        group.ended, group.attempt = None, None
        if not group.left:
            group.state = "over"
            return
        group.state = "waiting"
        kind, avoid = self._kind(group)
        self.backlog.add(group.id, kind, avoid, self.book.cost_s(group))
        if group.confirms:
            self.unsure_waiting.setdefault(group.barred, {})[group.id] = None

    def unqueue(self, group: Group) -> None:
        """The group no longer waits."""
        self.backlog.remove(group.id)
        if group.confirms and group.id in (waiting := self.unsure_waiting.get(group.barred, {})):
            del waiting[group.id]
            if not waiting:
                del self.unsure_waiting[group.barred]

    def has_slot_beside(self, barred: tuple[Place, ...]) -> bool:
        """Whether there is a slot that takes work, or soon will, and is none of these."""
        fleet = self.fleet
        ours = 0
        for node, name in barred:
            n, slot = fleet.nodes.get(node), fleet.slot(node, name)
            ours += n is not None and slot is not None and n.hopeful > 0 and slot.hopeful
        return fleet.hopeful > ours

    def _kind(self, group: Group) -> tuple[Kind, tuple[str, ...]]:
        faults, others = self.book.avoided(group)
        avoid = tuple(dict.fromkeys(node for node, _ in faults + others + group.barred))
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
        """Whether the group is one shape that runs alone because of what it, or a candidate of it, did."""
        if group.confirms:
            return True
        left = self.book.left(group)
        if len(left) != 1:
            return False
        shape = self.book.shapes[left[0]]
        return bool(shape.faults) or len(shape.losses) >= self.settings.losses_alone

    def finish(self, group: Group) -> None:
        """Nothing of the group is left to do."""
        self.awaiting_verdict.pop(group.id, None)
        self.unqueue(group)
        group.state, group.ended, group.attempt = "over", None, None

    def end(self, group: Group, ending: AttemptEnd) -> None:
        """The group's attempt is over; it is judged next."""
        if not group.left:
            self.finish(group)
            return
        group.state, group.ended, group.attempt = "awaiting_verdict", ending, None
        self.awaiting_verdict[group.id] = None

    def after_settling(self, group: Group) -> None:
        """A shape of the group was settled, maybe by a row that came late."""
        a = self.attempts.get(group.attempt or "")
        if a is not None and a.careful and not group.suspects:
            self.fleet.settled_suspects(a)
        if group.left:
            return
        if group.state in ("waiting", "awaiting_verdict"):
            self.finish(group)
        elif a is not None and a.id in self.fleet.nodes[a.node].unclaimed:
            self.recall[a.id] = None

    # --- losses -------------------------------------------------------------------------------------------------------

    def lose(self, a: Attempt, whole_node: bool, detail: str, accused: tuple[int, ...], t: float) -> None:
        """The attempt went down with its worker or node. `accused` shapes get a loss each."""
        place = a.place
        self.recall.pop(a.id, None)
        self.fleet.close(a, lost=True)
        group = self.book.groups[a.group]
        a.with_node, a.charged = whole_node, accused
        if not whole_node and len(accused) > 1:
            self.add_unattributed_fault(a.id, place, accused)
        for s in accused:
            shape = self.book.shapes[s]
            group.suspects += not shape.losses
            shape.losses += (Loss(place, whole_node, a.id, len(accused) == 1, a.exclusive),)
        reason = Reason.NODE_LOST if whole_node else Reason.WORKER_DIED
        self.end(group, AttemptEnd(a.id, reason, place, accused, detail, t))

    def correct(self, a: Attempt, culprit: int | None, detail: str, t: float) -> None:
        """The node is back and tells how a lost attempt really ended: its loss is charged to the shape that was in
        flight, if one was, and to no other."""
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
            loss = Loss(a.place, a.with_node, a.id, True, a.exclusive)
            guilty.losses = (*(x for x in guilty.losses if x.attempt != a.id), loss)
            groups[guilty.group] = None
        for g in groups:
            self._reweigh(self.book.groups[g], a, detail, t)

    def _reweigh(self, group: Group, told_by: Attempt, detail: str, t: float) -> None:
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
            self.end(group, AttemptEnd(told_by.id, Reason.NODE_LOST, told_by.place, accused, detail, t))
        else:
            self.enqueue(group)

    def in_flight(self, a: Attempt) -> tuple[int, ...]:
        """The shape in flight if known, else all that are left of the attempt's group."""
        left = self.book.left(self.book.groups[a.group])
        return (a.in_flight,) if a.in_flight in left and a.in_flight is not None else left

    # --- slots --------------------------------------------------------------------------------------------------------

    def mark(self, place: Place, attempt: str, shape: int) -> None:
        """What faulted at the slot passed elsewhere: evidence against the slot."""
        slot = self.fleet.slot(*place)
        if slot is None or slot.state != "ready":
            return
        slot.marks[attempt] = shape
        enough = len(slot.marks) >= self.settings.marks
        if enough and len(set(slot.marks.values())) >= self.settings.mark_shapes:
            shapes = len(set(slot.marks.values()))
            self.to_quarantine[place] = f"{len(slot.marks)} faults of {shapes} shapes that passed elsewhere"

    def credit(self, place: Place, trials: int) -> None:
        """So many candidates ran at the slot."""
        slot = self.fleet.slot(*place)
        if slot is not None:
            slot.trials += trials
            self.trials += trials

    def charge(self, place: Place, shape: int, candidates: tuple[CandidateId, ...]) -> None:
        """Candidates that faulted at the slot ran elsewhere: evidence against it, and against what it settled alone."""
        slot = self.fleet.slot(*place)
        if slot is None or slot.state != "ready" or not candidates:
            return
        before = len(slot.charges)
        slot.charges.update(((shape, c), None) for c in candidates)
        self.charged += len(slot.charges) - before
        shapes = {s for s, _ in slot.charges}
        if len(slot.charges) < self.settings.marks or len(shapes) < self.settings.mark_shapes:
            return
        here, there = slot.trials + len(slot.charges), self.trials - slot.trials + self.charged - len(slot.charges)
        few = min(here, there) < self.settings.few_trials
        if few or fisher(len(slot.charges), here, self.charged - len(slot.charges), there) <= self.settings.fisher_p:
            words = f"{len(slot.charges)} candidates of {len(shapes)} shapes faulted here and ran elsewhere"
            self.to_quarantine[place] = words

    def set_wake(self, node: str, slot: Slot, at: float | None) -> None:
        slot.wake = at
        if at is not None:
            heapq.heappush(self.timers, (at, node, slot.name))

    def recall_node(self, n: Node) -> None:
        for a in n.unclaimed:
            self.recall[a] = None

    def add_unattributed_fault(self, attempt: str, place: Place, shapes: tuple[int, ...]) -> None:
        """If all of these pass elsewhere, it was the slot."""
        self.unattributed_faults[attempt] = UnattributedFault(place, len(shapes))
        for s in shapes:
            self.book.shapes[s].unattributed_faults += (attempt,)

    def resolve_unattributed(self, shape: Shape, passed_at: Place | None) -> None:
        """The shape is settled or faulted by itself: what that says about the attempts that faulted around it."""
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
