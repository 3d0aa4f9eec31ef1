"""What each decision does to the state: the policy applies its own at once, a replay reads them from the journal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator import events as ev
from orchestrator.scheduling.model import Attempt, Place, Shape
from orchestrator.scheduling.on_events import settle_tuned
from orchestrator.scheduling.on_fleet import recall_slot
from orchestrator.scheduling.state import State


def send(state: State, d: ev.Send, t: float) -> None:
    group = state.book.groups[d.group]
    ticket = state.backlog.ticket(d.group)
    state.unqueue(group)
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
        confirms=group.confirms,
        only=d.only,
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
        if ended is not None and ended.is_unattributed:
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
    state.incomplete.pop(d.shape, None)
    if shape.state != "pending":
        return
    state.resolve_unattributed(shape, None)
    if not d.confirmed:
        _remember(state, shape)
    state.after_settling(state.book.settle(shape, "failed", d.reason))


def settle_shape(state: State, d: ev.SettleShape, t: float) -> None:
    state.incomplete.pop(d.shape, None)
    shape, a = state.book.shapes[d.shape], state.attempts.get(d.attempt)
    if shape.state != "pending":
        return
    if not d.confirmed:
        _remember(state, shape)
    settle_tuned(state, shape, a.place if a is not None else ("", ""))
    if d.confirmed:
        shape.evidence = None


def _remember(state: State, shape: Shape) -> None:
    """Settled on the evidence of slots that may turn out to be sick."""
    if shape.evidence is not None and not shape.evidence.again:
        for place in dict.fromkeys(p for places in shape.evidence.lost.values() for p in places):
            state.unsure.setdefault(place, {})[shape.id] = None


def confirm(state: State, d: ev.Confirm, t: float) -> None:
    state.incomplete.pop(d.shape, None)
    state.reopened.pop(d.shape, None)
    shape, parent = state.book.shapes[d.shape], state.book.groups[d.group]
    if shape.state == "pending":
        parent.left -= 1
        parent.suspects -= bool(shape.losses)
        child = state.book.adopt(parent, d.child, (d.shape,), ())
        state.after_settling(parent)
    else:
        state.book.unsettle(shape)
        for shapes in state.unsure.values():
            shapes.pop(d.shape, None)
        if shape.evidence is not None:
            shape.evidence.again = True
        child = state.book.adopt(parent, d.child, (d.shape,), ())
    child.confirms, child.barred, child.only = True, d.barred, d.only
    state.enqueue(child)


def charge_slot(state: State, d: ev.ChargeSlot, t: float) -> None:
    place = (d.node, d.slot)
    state.charges.pop((place, d.shape), None)
    state.charge(place, d.shape, d.candidates)
    if d.candidates:
        for s in state.unsure.get(place, ()):
            shape = state.book.shapes[s]
            if shape.evidence is not None and shape.state != "pending" and state.has_slot_beside((place,)):
                state.reopened[s] = None


def convict_candidates(state: State, d: ev.ConvictCandidates, t: float) -> None:
    state.convicted.pop(d.shape, None)


def quarantine(state: State, d: ev.Quarantine, t: float) -> None:
    state.to_quarantine.pop((d.node, d.slot), None)
    state.asks.pop((d.node, d.slot), None)
    n, slot = state.fleet.nodes[d.node], state.fleet.slot(d.node, d.slot)
    if slot is None:
        return
    slot.state, slot.why, slot.until = "quarantined", d.why, d.until
    slot.asked, slot.checking = None, False
    slot.strikes += 1
    slot.marks.clear()
    state.trials, state.charged = state.trials - slot.trials, state.charged - len(slot.charges)
    slot.charges.clear()
    slot.trials = 0
    state.set_wake(d.node, slot, d.until)
    recall_slot(state, n, slot)
    state.fleet.refresh(n)


def ask_canary(state: State, d: ev.AskCanary, t: float) -> None:
    state.asks.pop((d.node, d.slot), None)
    state.next_canary += 1
    slot = state.fleet.slot(d.node, d.slot)
    if slot is not None:
        slot.asked = d.attempt
        state.set_wake(d.node, slot, t + state.settings.canary_timeout_s)


DECISIONS: dict[type[ev.Decision], Callable[[State, Any, float], None]] = {
    ev.Send: send,
    ev.TakeBack: take_back,
    ev.Split: split,
    ev.Requeue: requeue,
    ev.FailShape: fail_shape,
    ev.Confirm: confirm,
    ev.SettleShape: settle_shape,
    ev.ChargeSlot: charge_slot,
    ev.ConvictCandidates: convict_candidates,
    ev.Quarantine: quarantine,
    ev.AskCanary: ask_canary,
}
