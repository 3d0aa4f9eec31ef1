"""What each decision does to the state: the policy applies its own at once, a replay reads them from the journal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator import events as ev
from orchestrator.scheduling.model import Attempt, Place
from orchestrator.scheduling.on_fleet import recall_slot
from orchestrator.scheduling.state import State


def send(state: State, d: ev.Send, t: float) -> None:
    group = state.book.groups[d.group]
    ticket = state.backlog.ticket(d.group)
    state.backlog.remove(d.group)
    left = state.book.left(group)
    a = Attempt(
        d.attempt,
        d.group,
        d.node,
        d.slot,
        d.seq,
        state.book.cost_s(group),
        alone=state.is_alone(group),
        exclusive=ticket is not None and ticket.kind == "exclusive",
        careful=group.suspects > 0,
    )
    state.attempts[a.id] = a
    group.state, group.attempt, group.sent = "sent", a.id, left
    group.attempts += 1
    state.next_seq = max(state.next_seq, d.seq + 1)
    state.fleet.sent(a)


def take_back(state: State, d: ev.TakeBack, t: float) -> None:
    state.recall.pop(d.attempt, None)
    a = state.attempts[d.attempt]
    if a.state == "sent" and not a.taking:
        state.fleet.take(a)


def split(state: State, d: ev.Split, t: float) -> None:
    """Also how failed shapes come back on request; the group that was planned with them may still be at work."""
    parent = state.book.groups[d.group]
    ended = parent.ended
    avoid: tuple[Place, ...] = ()
    if state.retried.pop(d.group, None) is None:
        if ended is not None and ended.is_riddle:
            avoid = (ended.place,)  # if a part faults too, let it be somewhere else
        state.finish(parent)
    for child, shapes in d.children:
        state.enqueue(state.book.adopt(parent, child, shapes, avoid))


def requeue(state: State, d: ev.Requeue, t: float) -> None:
    group = state.book.groups[d.group]
    ended = group.ended
    if ended is not None and ended.outcome is not None and not ended.outcome.is_loss:
        group.avoid = (ended.place,) if ended.outcome.counts_as_try else ()
    state.enqueue(group)


def fail_shape(state: State, d: ev.FailShape, t: float) -> None:
    state.refused.pop(d.shape, None)
    shape = state.book.shapes[d.shape]
    if shape.state != "pending":
        return
    state.solve_mystery(shape, None)
    state.after_settling(state.book.settle(shape, "failed", d.reason))


def quarantine(state: State, d: ev.Quarantine, t: float) -> None:
    state.condemned.pop((d.node, d.slot), None)
    state.asks.pop((d.node, d.slot), None)
    n, slot = state.fleet.nodes[d.node], state.fleet.slot(d.node, d.slot)
    if slot is None:
        return
    slot.state, slot.why, slot.until = "quarantined", d.why, d.until
    slot.asked, slot.checking = None, False
    slot.strikes += 1
    slot.marks.clear()
    state.set_wake(d.node, slot, d.until)
    recall_slot(state, n, slot)
    state.fleet.refresh(n)


def ask_canary(state: State, d: ev.AskCanary, t: float) -> None:
    state.asks.pop((d.node, d.slot), None)
    state.next_canary += 1
    slot = state.fleet.slot(d.node, d.slot)
    if slot is not None:
        slot.asked = d.attempt
        state.set_wake(d.node, slot, t + state.settings.canary_patience_s)


DECISIONS: dict[type[ev.Decision], Callable[[State, Any, float], None]] = {
    ev.Send: send,
    ev.TakeBack: take_back,
    ev.Split: split,
    ev.Requeue: requeue,
    ev.FailShape: fail_shape,
    ev.Quarantine: quarantine,
    ev.AskCanary: ask_canary,
}
