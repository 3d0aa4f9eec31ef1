"""State transitions of groups, shapes and attempts: one function an event or decision.

Evidence is recorded here and judged in `blame`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator import events as ev
from orchestrator.reasons import Reason
from orchestrator.scheduling import fleet_transitions
from orchestrator.scheduling.confirm import weigh
from orchestrator.scheduling.model import (
    Attempt,
    AttemptEnd,
    CandidateEvidence,
    CandidateId,
    Fault,
    Group,
    Health,
    IncompleteResult,
    Shape,
    SlotId,
)
from orchestrator.scheduling.state import State


def group_added(state: State, e: ev.GroupAdded, t: float) -> None:
    if e.group not in state.book.groups:
        state.enqueue(state.book.add(e.group, e.shapes, e.cost_s, e.value))


def retry_asked(state: State, e: ev.RetryAsked, t: float) -> None:
    for unsure in state.unsure.values():
        for s in e.shapes:
            unsure.pop(s, None)
    for root, shapes in state.book.revive(e.shapes).items():
        state.retried[root] = state.retried.get(root, ()) + shapes


def stop_asked(state: State, e: ev.StopAsked, t: float) -> None:
    state.stopped = True
    for n in state.fleet.nodes.values():
        state.recall_node(n)


def resumed(state: State, e: ev.Resumed, t: float) -> None:
    """Nodes get nothing until they join again: only then is known what of the work sent there is left."""
    state.stopped, state.epoch = False, e.epoch
    for n in state.fleet.nodes.values():
        if n.state != "gone":
            n.draining, n.state = False, "away"
        for slot in n.slots.values():
            slot.health.strikes = 0  # the user expects it to work again
            state.set_wake(n.name, slot, None)
        state.fleet.refresh(n)


# --- attempts ---------------------------------------------------------------------------------------------------------


def attempt_started(state: State, e: ev.AttemptStarted, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is None:
        return
    if a.state == "over":
        a.at = e.slot if a.lost else a.at
        _lives(state, a)
        return
    state.recall.pop(a.id, None)
    state.fleet.claim(a, e.slot)


def _lives(state: State, a: Attempt) -> None:
    """Sign of life of an attempt that was given up: its slot is busy with it, and can answer no request."""
    n, slot = state.fleet.nodes.get(a.node), state.fleet.slot(*a.place)
    if a.lost and n is not None and n.state not in ("lost", "gone") and slot is not None and slot.state != "lost":
        slot.running = slot.running or a.id
        state.fleet.refresh(n)


def shape_started(state: State, e: ev.ShapeStarted, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is not None and a.state == "over":
        _lives(state, a)
    elif a is not None:
        a.in_flight = e.shape


def shape_tuned(state: State, e: ev.ShapeTuned, t: float) -> None:
    a, shape = state.attempts.get(e.attempt), state.book.shapes.get(e.shape)
    place = state.place_of(a) if a is not None else ("", "")
    state.credit(place, e.trials)
    if a is not None and a.state == "over":
        _lives(state, a)
    if a is not None and a.state == "started" and not e.withheld:
        slot = state.fleet.slot(*place)
        if slot is not None:
            slot.health.strikes = 0
            slot.health.tunes += 1
            slot.health.fresh.clear()
            if not slot.health.proven:
                slot.health.proven, slot.health.streak = True, 0
                state.fleet.refresh(state.fleet.nodes[a.node])
    if shape is None:
        return
    result = IncompleteResult(e.attempt, place, e.best, _left_out(a, e), e.cut)
    weigh(state, shape, place, e.withheld, _ran(shape, a, e), e.earlier)
    if shape.state != "pending":
        return
    if not e.complete:
        _keep(state, shape, a, result)
        return
    settle_tuned(state, shape, place)


def settle_tuned(state: State, shape: Shape, place: SlotId) -> None:
    """The shape is tuned at the place: what faulted elsewhere with it is evidence against that slot."""
    for fault in shape.faults:
        if fault.reason.may_blame_slot and fault.place != place:
            state.mark(fault.place, fault.attempt, shape.id)
    for loss in shape.losses:
        if loss.known and not loss.whole_node and loss.place != place:
            state.mark(loss.place, loss.attempt, shape.id)
    state.resolve_unattributed(shape, place)
    state.incomplete.pop(shape.id, None)
    state.after_settling(state.book.settle(shape, "tuned", None))


def shape_refused(state: State, e: ev.ShapeRefused, t: float) -> None:
    a, shape = state.attempts.get(e.attempt), state.book.shapes.get(e.shape)
    place = state.place_of(a) if a is not None else ("", "")
    state.credit(place, e.trials)
    if shape is None:
        return
    result = IncompleteResult(e.attempt, place, (), _left_out(a, e), e.cut, e.reason, e.detail)
    weigh(state, shape, place, e.withheld, _ran(shape, a, e), e.earlier)
    if shape.state != "pending":
        return
    if not e.complete or (shape.evidence is not None and shape.evidence.base is not None):
        _keep(state, shape, a, result)
        return
    state.refused.setdefault(e.shape, (e.attempt, e.reason, e.detail))


def _left_out(a: Attempt | None, e: ev.ShapeTuned | ev.ShapeRefused) -> tuple[CandidateId, ...]:
    """Candidates left out of the result; those it was sent for count, where they neither ran nor faulted."""
    only = a.only if a is not None else ()
    return (*e.withheld, *(c for c in only if c not in e.ran and c not in e.withheld))


def _ran(shape: Shape, a: Attempt | None, e: ev.ShapeTuned | ev.ShapeRefused) -> tuple[CandidateId, ...]:
    """Candidates known to have come to an end: those it was sent for, or all that are not named as left out."""
    best = (e.best,) if isinstance(e, ev.ShapeTuned) and e.best else ()
    if (a is not None and a.only) or e.cut or shape.evidence is None:
        return (*e.ran, *best)
    return (*(c for c in shape.evidence.lost if c not in e.withheld), *best)


def _keep(state: State, shape: Shape, a: Attempt | None, result: IncompleteResult) -> None:
    """A result that does not settle its shape: judged at once, unless it is incomplete and the shape's own attempt is
    another one by now."""
    if shape.evidence is None:
        shape.evidence = CandidateEvidence()
    group = state.book.groups[shape.group]
    if a is None or a.group != group.id or group.attempt != a.id:
        shape.evidence.results = (result, *shape.evidence.results)
        return
    shape.evidence.results += (result,)
    state.incomplete[shape.id] = None


def attempt_taken(state: State, e: ev.AttemptTaken, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is None or a.state == "over":
        return
    if not e.won:
        if a.state == "sent":
            state.fleet.claim(a, None)
        return
    if a.state != "sent":
        state.lose(a, True, "the node no longer knows of it", state.in_flight(a), t)
        return
    state.recall.pop(a.id, None)
    state.fleet.close(a)
    state.end(state.book.groups[a.group], AttemptEnd(a.id, None, a.place, (), "", t))


def attempt_ended(state: State, e: ev.AttemptEnded, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is None:
        return
    if a.state == "over":
        slot = state.fleet.slot(*a.place)
        if slot is not None and slot.requested and a.id in (slot.running, slot.adrift):
            state.set_wake(a.node, slot, t + state.settings.canary_timeout_s)  # only now can its worker answer
        state.fleet.release(a)
        if a.lost:
            state.correct(a, e.in_flight if e.outcome.is_loss else None, e.detail, t)
        return
    if e.in_flight is not None:
        a.in_flight = e.in_flight
    group = state.book.groups[a.group]
    slot = state.fleet.slot(*a.place)
    if slot is not None and (e.outcome.may_blame_slot or e.outcome.is_loss):
        slot.checking, slot.last_fault = True, None
        slot.health.streak += 1
        slot.health.proven = False
        state.relapsed(state.place_of(a))
    if e.outcome is Reason.DISK_FULL:
        for s in state.fleet.nodes[a.node].slots.values():
            if s.hopeful:
                state.to_quarantine[(a.node, s.name)] = f"the node's disk is full: {e.detail}"
    if e.outcome.is_loss:
        state.lose(a, e.outcome is Reason.NODE_LOST, e.detail, state.in_flight(a) if group.left else (), t)
        return
    place = a.place
    state.recall.pop(a.id, None)
    state.fleet.close(a)
    a.ended_at, a.cancelled = t, e.outcome is Reason.CANCELLED
    outcome = Reason.NOT_DELIVERED if e.outcome is Reason.DONE else e.outcome
    accused = _charge(state, a, group, outcome) if group.left else ()
    state.end(group, AttemptEnd(a.id, outcome, place, accused, e.detail, t))


def _charge(state: State, a: Attempt, group: Group, outcome: Reason) -> tuple[int, ...]:
    """Write the end down as a try, and as a fault of the shapes it is charged to; returns these."""
    if outcome in (Reason.CANCELLED, Reason.DISK_FULL):
        return ()
    left = state.book.left(group)
    accused = left if outcome in (Reason.NOT_DELIVERED, Reason.REJECTED) else state.in_flight(a)
    evidence = state.book.shapes[accused[0]].evidence
    if a.confirms and evidence is not None:
        evidence.misses += 1
    if outcome not in (Reason.NOT_DELIVERED, Reason.REJECTED):
        if len(accused) > 1:
            state.add_unattributed_fault(a.id, state.place_of(a), accused)
            return ()
        slot = state.fleet.slot(*a.place)
        if slot is not None:
            slot.last_fault = (accused[0], a.id)
            if outcome.may_blame_slot:
                state.fault(state.place_of(a), state.book.shapes[accused[0]])
        state.resolve_unattributed(state.book.shapes[accused[0]], None)
    health = slot.health if (slot := state.fleet.slot(*a.place)) is not None else Health()
    for s in accused:
        shape = state.book.shapes[s]
        shape.tries += 1
        if outcome is not Reason.REJECTED:
            shape.faults += (Fault(state.place_of(a), outcome, a.id, health.tunes),)
    return accused


EVENTS: dict[type[ev.Event], Callable[[State, Any, float], None]] = {
    ev.GroupAdded: group_added,
    ev.RetryAsked: retry_asked,
    ev.StopAsked: stop_asked,
    ev.Resumed: resumed,
    ev.NodeExpected: fleet_transitions.node_expected,
    ev.NodeBusy: fleet_transitions.node_busy,
    ev.NodeJoined: fleet_transitions.node_joined,
    ev.NodeLost: fleet_transitions.node_lost,
    ev.LeaseEnded: fleet_transitions.lease_ended,
    ev.FleetMayGrow: fleet_transitions.fleet_may_grow,
    ev.NodeDraining: fleet_transitions.node_draining,
    ev.SlotLost: fleet_transitions.slot_lost,
    ev.CanaryPassed: fleet_transitions.canary_passed,
    ev.CanaryFailed: fleet_transitions.canary_failed,
    ev.AttemptStarted: attempt_started,
    ev.ShapeStarted: shape_started,
    ev.ShapeTuned: shape_tuned,
    ev.ShapeRefused: shape_refused,
    ev.AttemptEnded: attempt_ended,
    ev.AttemptTaken: attempt_taken,
}


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
        fresh=not state.fleet.nodes[d.node].used,
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
    """Split a group, or bring failed shapes back on request; the group planned with them may then still be at work."""
    parent = state.book.groups[d.group]
    ended = parent.ended
    avoid: tuple[SlotId, ...] = ()
    if state.retried.pop(d.group, None) is None:
        if ended is not None and ended.is_unattributed:
            # run the parts elsewhere: another fault there is stronger evidence
            avoid = (state.fleet.place(*ended.place),)
        state.finish(parent)
    for child, shapes in d.children:
        state.enqueue(state.book.adopt(parent, child, shapes, avoid))


def requeue(state: State, d: ev.Requeue, t: float) -> None:
    group = state.book.groups[d.group]
    ended = group.ended
    keeps = (None, Reason.WORKER_DIED, Reason.NODE_LOST, Reason.LEASE_ENDED)
    if ended is not None and ended.outcome not in keeps:
        group.avoid = (state.fleet.place(*ended.place),) if ended.outcome.counts_as_try else ()
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
    settle_tuned(state, shape, state.place_of(a) if a is not None else ("", ""))
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
    place = state.fleet.place(d.node, d.slot)
    state.charges.pop((place, d.shape), None)
    state.charge(place, d.shape, d.candidates)
    if d.candidates:
        for s in state.unsure.get(place, ()):
            shape = state.book.shapes[s]
            if shape.evidence is not None and shape.state != "pending" and state.has_slot_beside((place,)):
                state.reopened[s] = None


def convict_candidates(state: State, d: ev.ConvictCandidates, t: float) -> None:
    state.convicted.pop(d.shape, None)


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
    ev.Quarantine: fleet_transitions.quarantine,
    ev.AskCanary: fleet_transitions.ask_canary,
}
