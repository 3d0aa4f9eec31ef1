"""Scheduling policy: events in, decisions out, and sentences on what waits. No clock, no socket, no file; see
docs/explanation/scheduling.md.

    handle(event, now) == apply(event, now), decide, apply every decision

so that a journal of events and decisions, applied in order, gives the same state as having lived through it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.events import (
    AttemptEnded,
    AttemptStarted,
    AttemptTaken,
    CanaryFailed,
    CanaryPassed,
    Decision,
    Event,
    FailShape,
    Record,
    ShapeRefused,
    ShapeStarted,
    ShapeTuned,
    Split,
)
from orchestrator.reasons import Reason
from orchestrator.scheduling import blame, confirm, supply
from orchestrator.scheduling.blame import judge, other_slot
from orchestrator.scheduling.model import LEASE_ENDS, Attempt, Group, Node, PolicySettings, SlotId
from orchestrator.scheduling.state import State
from orchestrator.scheduling.transitions import DECISIONS, EVENTS
from worker.text import plural

_PROGRESS = (AttemptStarted, ShapeStarted, ShapeTuned, ShapeRefused, AttemptTaken)
_FEW = 16
"""Verdicts that were put off, up to which each end of an attempt and each canary looks at them again."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the run in shapes. `stuck`: why no slot is left to work on, where that is so."""

    total: int
    tuned: int
    failed: int
    running: int
    pending: int
    stopped: bool
    done: bool
    stuck: str | None


class Policy:
    """Policy of one run. Not thread-safe: one loop owns it."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self._state = State(settings or PolicySettings())

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Apply an event; return the decisions that follow, in order. `now` in epoch seconds."""
        self.apply(event, now)
        out = []
        for decision in self._decide(event, now):
            self.apply(decision, now)
            out.append(decision)
        return out

    def apply(self, record: Record, t: float) -> None:
        """Apply a record to the state without deciding anything: for the replay of a journal."""
        if isinstance(record, Event):
            on_event = EVENTS.get(type(record))
            if on_event is not None:
                on_event(self._state, record, t)
        else:
            DECISIONS[type(record)](self._state, record, t)

    def _decide(self, event: Event, now: float) -> Iterator[Decision]:
        """Yield one decision after the other; the state changes between them."""
        state = self._state
        while state.refused:
            shape, (attempt, reason, detail) = next(iter(state.refused.items()))
            yield FailShape(shape, reason, detail, attempt, confirmed=True)
        while state.retried:
            root, shapes = next(iter(state.retried.items()))
            child = next(state.book.child_names(state.book.groups[root]))
            yield Split(root, ((child, shapes),), "tried again on request")
        yield from confirm.decide(state)
        for group in self._due(event, now):
            if group.id in state.awaiting_verdict:
                yield from judge(state, group, now)
        yield from blame.quarantines(state, now)
        yield from confirm.unconfirmable(state)
        if not state.stopped:
            yield from blame.canaries(state, now)
        yield from supply.recalls(state)
        yield from supply.sends(state)
        yield from supply.balance(state)
        yield from supply.exclusives(state)

    def _due(self, event: Event, now: float) -> list[Group]:
        """Groups to be judged now. Of verdicts that were put off only those that the event may bear on, the others
        with the next tick: looking at many with each event would take time."""
        waiting = [self._state.book.groups[g] for g in self._state.awaiting_verdict]
        place: SlotId | None = None
        if not isinstance(event, _PROGRESS):
            if len(waiting) <= _FEW or not isinstance(event, (AttemptEnded, CanaryPassed, CanaryFailed)):
                return waiting
            place = (event.node, event.slot) if not isinstance(event, AttemptEnded) else None
        return [g for g in waiting if g.ended is None or g.ended.t >= now or g.ended.place == place]

    # --- queries ------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Counts of shapes. `running`: slots at work, a shape each."""
        book, running = self._state.book, self._state.fleet.running
        done = not book.pending
        return Progress(
            total=len(book.shapes),
            tuned=book.tuned,
            failed=book.failed,
            running=min(running, book.pending),
            pending=book.pending - min(running, book.pending),
            stopped=self._state.stopped,
            done=done,
            stuck=None if done or self._state.stopped else stuck(self._state),
        )

    def settled(self, shape: int) -> bool:
        """Return whether the shape was tuned or failed."""
        known = self._state.book.shapes.get(shape)
        return known is not None and known.state != "pending"

    def outstanding(self) -> list[Attempt]:
        """Attempts sent and not ended, in the order they were sent; to be read only."""
        state = self._state
        found = [state.attempts[a] for n in state.fleet.nodes.values() for a in n.outstanding]
        return sorted(found, key=lambda a: a.seq)

    def is_outstanding(self, attempt: str) -> bool:
        a = self._state.attempts.get(attempt)
        return a is not None and a.state != "over"

    def shapes_of(self, group: str) -> tuple[int, ...]:
        """The shapes of the group's latest attempt; before the first, those that are not settled."""
        known = self._state.book.groups[group]
        return known.sent or self._state.book.left(known)

    # --- demand for leases ------------------------------------------------------------------------------------------

    def backlog_s(self) -> float:
        """Estimated seconds on one slot of all unsettled shapes; 0 where no new work is started."""
        return 0.0 if self._state.stopped else self._state.book.left_s

    @property
    def has_waiting(self) -> bool:
        """Return whether a group waits: in the queue, or unclaimed on a node."""
        return len(self._state.backlog) > 0 or any(n.unclaimed for n in self._state.fleet.nodes.values())

    def places_awaited(self) -> int:
        """Number of hosts that there must be, as a shape awaits confirmation and no slot in use may give it: those in
        use and one more; 0 where none is awaited."""
        state, fleet = self._state, self._state.fleet
        picky = (state.book.groups[g] for g in state.backlog.picky())
        if not any(_awaits_place(state, g) for g in picky):
            return 0
        return len({fleet.nodes[n].host for n in fleet.usable}) + 1

    def idle_nodes(self) -> list[str]:
        """Joined nodes with nothing to do: nothing was sent there that is not over, and no slot runs anything."""
        nodes = self._state.fleet.nodes.values()
        return [n.name for n in nodes if n.state == "joined" and not n.outstanding and not n.running]

    def quarantined_hosts(self, now: float = 0.0) -> list[str]:
        """Hosts on which every known slot is in quarantine, as far as its cool-down lasts beyond `now`."""
        nodes: dict[str, list[Node]] = {}
        for n in self._state.fleet.nodes.values():
            nodes.setdefault(n.host, []).append(n)
        return [host for host, of in nodes.items() if _all_closed(of, now)]

    def why(self, what: str | int) -> str:
        """One sentence: where a group (or a shape) is and what it waits for."""
        return why(self._state, what)

    def digest(self) -> str:
        """Hash of everything that decisions depend on."""
        return digest(self._state)


def digest(state: State) -> str:
    """Hash of everything that decisions depend on: equal digests decide equally. Costs O(shapes): for tests."""
    book, fleet = state.book, state.fleet
    parts: list[object] = [
        list(book.shapes.values()),
        list(book.groups.values()),
        (book.tuned, book.failed),
        state.backlog.state(),
        [a for a in state.attempts.values() if a.state != "over" or a.lost],
        list(fleet.nodes.values()),
        list(fleet.gpus.items()),
        (fleet.by_load.items(), fleet.by_spare.items(), sorted(fleet.usable)),
        (fleet.ahead_s, fleet.free, fleet.hopeful, fleet.clean, fleet.proven, fleet.taking),
        list(state.unattributed_faults.items()),
        [
            list(q)
            for q in (
                state.awaiting_verdict,
                state.retried,
                state.refused,
                state.recall,
                state.to_quarantine,
                state.asks,
            )
        ],
        sorted(t for t in set(state.timers) if _is_live(state, *t)),
        [list(q.items()) for q in (state.charges, state.convicted, state.unsure, state.unsure_waiting)],
        [list(state.incomplete), list(state.reopened), state.faulted, state.trials, state.charged],
        (state.stopped, state.may_grow, state.epoch, state.next_seq, state.next_canary),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _is_live(state: State, at: float, node: str, name: str) -> bool:
    slot = state.fleet.slot(node, name)
    return slot is not None and slot.wake == at


def why(state: State, what: str | int) -> str:
    """Sentence on a group (by id) or a shape (by number)."""
    if isinstance(what, int):
        shape = state.book.shapes.get(what)
        if shape is None:
            return f"shape {what} is not part of this run"
        if shape.state != "pending":
            return f"shape {what} is {shape.state}" + (f": {shape.reason.message()}" if shape.reason else "")
        return why(state, shape.group)
    group = state.book.groups.get(what)
    if group is None:
        return f"there is no group {what}"
    if group.state == "over":
        return _over(state, group)
    if group.state == "sent":
        return _sent(state, group)
    return _waiting(state, group)


def _awaits_place(state: State, group: Group) -> bool:
    faults, _ = state.book.avoided(group)
    if group.confirms and not state.has_slot_now(group.barred):
        return True
    return bool(faults) and not other_slot(state, faults + group.barred)


def _all_closed(nodes: list[Node], now: float) -> bool:
    """Return whether all slots of a host's nodes are in quarantine; of nodes that are gone, where there is no other."""
    known = [n for n in nodes if n.state != "gone"] or nodes[-1:]
    slots = [s for n in known for s in n.slots.values()]
    return bool(slots) and all(s.health.closed and s.health.until > now for s in slots)


def stuck(state: State) -> str | None:
    """Sentence on why no slot is left; None while something runs or a slot may come, or come back."""
    fleet = state.fleet
    if fleet.hopeful or state.may_grow or any(n.outstanding for n in fleet.nodes.values()) or state.awaiting_verdict:
        return None
    if not fleet.nodes:
        return "no node came, and none is expected any more" if state.may_grow is False else None
    reasons = []
    gone = [n for n in fleet.nodes.values() if n.state == "gone"]
    if gone:
        reasons.append(f"{plural(len(gone), 'lease')} ended, the last one {gone[-1].name}")
    for n in (n for n in fleet.nodes.values() if n.state != "gone"):
        if n.state in ("away", "busy"):
            return None
        if n.state == "lost":
            reasons.append(f"{n.name} is lost")
        elif n.draining:
            reasons.append(f"{n.name} is draining")
        else:
            for s in n.slots.values():
                if s.state == "quarantined" and s.health.strikes < state.settings.max_strikes:
                    return None
                reasons.append(f"{n.name} slot {s.name} is {s.state}" + (f" ({s.why})" if s.why else ""))
    return "; ".join(reasons)


def _over(state: State, group: Group) -> str:
    pending = [s for s in group.shapes if state.book.shapes[s].state == "pending"]
    if pending:
        homes = ", ".join(dict.fromkeys(state.book.shapes[s].group for s in pending))
        return f"group {group.id} was split; what is left of it is in {homes}"
    return f"every shape of group {group.id} is settled"


def _sent(state: State, group: Group) -> str:
    a = state.attempts.get(group.attempt or "")
    if a is None:
        return f"group {group.id} was sent"
    if a.state == "started":
        return f"attempt {a.id} runs on {a.node} slot {a.at}"
    if a.state == "claimed":
        return f"attempt {a.id} was claimed on {a.node} and has not been heard of since"
    if a.taking:
        return f"attempt {a.id} is being taken back from {a.node}"
    before = sum(1 for x in state.fleet.nodes[a.node].unclaimed if state.attempts[x].seq < a.seq)
    where = f"{a.node} slot {a.slot}" if a.slot else a.node
    return f"attempt {a.id} is in the inbox of {where} with {plural(before, 'other')} before it"


def _waiting(state: State, group: Group) -> str:
    head = f"group {group.id} waits"
    ticket = state.backlog.ticket(group.id)
    if state.stopped:
        return f"{head}: the run is stopped"
    if ticket is None and group.ended is not None and group.ended.outcome is Reason.NODE_LOST:
        return f"{head} for the scheduler's word on leases that were lost, before its last attempt is judged"
    able = [n for n in state.fleet.nodes.values() if n.state == "joined" and not n.draining and n.ready]
    if not able:
        return f"{head}: {stuck(state) or _not_ready(state)}"
    if ticket is None:
        ended = group.ended
        where = f" on {ended.place[0]} slot {ended.place[1]}" if ended is not None else ""
        return f"{head} for the canary{where}, before its last attempt is judged"
    if ticket.kind == "exclusive":
        if any(state.book.shapes[s].ends for s in state.book.left(group)):
            return f"{head} for a lease of its own: {LEASE_ENDS} ended under it, so it runs last and alone"
        return f"{head} for a node of its own: it went down with its node twice, so it runs last and alone"
    if ticket.kind in ("careful", "risky") and all(n.careful for n in able):
        return f"{head}: it was lost with a worker or node once, and one such group runs on a node at a time"
    if ticket.kind == "risky" and len(state.fleet.usable) < state.settings.small_fleet:
        return f"{head} until all else is started: a node was lost with it, and few nodes are left"
    if group.confirms:
        where = ", ".join(map(state.fleet.spot, group.barred))
        return f"{head} for a slot other than {where}, to try the candidates that faulted there"
    if state.may_grow and _awaits_place(state, group):
        where = ", ".join(map(state.fleet.spot, state.book.avoided(group)[0]))
        return f"{head} for a slot other than {where}, where it went wrong"
    if ticket.avoid and all(n.host in ticket.avoid for n in able):
        return f"{head} for a node other than {', '.join(ticket.avoid)}, where it went wrong"
    return f"{head} for its turn: every node has enough ahead"


def _not_ready(state: State) -> str:
    if not state.fleet.nodes:
        return "no node has joined yet"
    reasons = []
    for n in state.fleet.nodes.values():
        if n.state != "gone":
            reasons.append(f"{n.name} {_state_of(n)}")
    if not reasons:
        return "every lease has ended, and another is awaited"
    return "no slot takes work now (" + ", ".join(reasons) + ")"


def _state_of(n: Node) -> str:
    if n.state != "joined":
        return {"lost": "is lost", "busy": "waits for others"}.get(n.state, "is being prepared")
    if n.draining:
        return "is draining"
    return "slots: " + ", ".join(f"{s.name} {s.state}" for s in n.slots.values())
