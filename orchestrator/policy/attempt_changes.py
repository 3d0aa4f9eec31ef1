"""Applies the records about attempts: sent, claimed, taken back, at work on a shape, ended, lost and back again.

model.py::Attempt draws the states. An attempt that ends is closed in this order: its end is charged (to a shape, its
GPU or nobody: `_charge_end`), `close_attempt` takes it out of the sums, and `requeue_rest` queues what it left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator import events as ev
from orchestrator.policy import evidence
from orchestrator.policy.model import Attempt, Shape, State
from orchestrator.policy.work_queue import (
    close_attempt,
    count_copy,
    is_deciding,
    isolate,
    refresh_slot,
    requeue_rest,
    withdraw,
    withdraw_unit,
)
from orchestrator.reasons import Reason


def is_unclaimed(attempt: Attempt) -> bool:
    """Return whether the attempt waits in an inbox, and nobody takes it back yet."""
    return attempt.state == "sent" and not attempt.is_being_taken


def _send(state: State, decision: ev.Send, t: float) -> None:
    node = state.nodes[decision.node]
    slot = node.slots[decision.slot]
    shapes = [state.shapes[s] for s in decision.shapes]
    cost = sum(s.cost_s for s in shapes)
    attempt = Attempt(
        decision.attempt, decision.node, decision.slot, decision.seq, decision.shapes, cost, left_s=cost, sent_at=t
    )
    state.attempts[attempt.id] = attempt
    state.open_attempts[attempt.id] = None
    state.next_seq = max(state.next_seq, decision.seq + 1)
    node.used = True
    for unit in dict.fromkeys(s.unit for s in shapes):
        _take_from_queue(state, unit, [s for s in shapes if s.unit == unit], node.host)
    for shape in shapes:
        count_copy(state, shape, attempt, 1)
        shape.attempts.append(attempt.id)
    slot.queued.append(attempt.id)
    refresh_slot(state, slot)


def _take_from_queue(state: State, unit: int, shapes: list[Shape], host: str) -> None:
    """Take shapes of a unit out of the queue, because they go to a host. If the unit decides the length of the run and
    this is its first attempt, it is hedged: it is to run on a second host too."""
    is_first = unit not in state.hedged and not any(shape.copies or shape.losses for shape in shapes)
    members = tuple(shape.id for shape in shapes)
    withdraw_unit(state, unit, members)
    for shape in shapes:
        withdraw(state, shape)
    if is_first and is_deciding(state, sum(shape.cost_s for shape in shapes)):
        state.hedged[unit] = (host, members)


def _take_back(state: State, decision: ev.TakeBack, t: float) -> None:
    state.to_recall.pop(decision.attempt, None)
    attempt = state.attempts[decision.attempt]
    if is_unclaimed(attempt):
        attempt.is_being_taken = True
        state.taking += 1


def _stop_taking(state: State, attempt: Attempt) -> None:
    if attempt.is_being_taken:
        attempt.is_being_taken = False
        state.taking -= 1


def _attempt_taken(state: State, event: ev.AttemptTaken, t: float) -> None:
    attempt = state.attempts.get(event.attempt)
    if attempt is None or attempt.state == "over":
        return
    _stop_taking(state, attempt)
    if not event.won:
        return
    was_started = attempt.state == "started"
    in_flight = state.shape_in_flight(attempt) if was_started else None
    if in_flight is not None:
        detail = "the node no longer knows of the attempt"
        evidence.record_loss(state, in_flight, attempt, with_node=True, detail=detail)
    close_attempt(state, attempt, t, lost=was_started)
    requeue_rest(state, attempt)


def _attempt_started(state: State, event: ev.AttemptStarted, t: float) -> None:
    attempt = state.attempts.get(event.attempt)
    if attempt is None or not reopen_if_lost(state, attempt, t) or attempt.state == "started":
        return
    _stop_taking(state, attempt)
    state.running += 1
    attempt.state = "started"
    attempt.started_at = t
    attempt.moved_at = t
    state.to_recall.pop(attempt.id, None)
    slot = state.slot_of(attempt)
    slot.queued.remove(attempt.id)
    slot.running = attempt.id
    slot.orphaned = None
    slot.is_checking = False
    refresh_slot(state, slot)


def reopen_if_lost(state: State, attempt: Attempt, t: float) -> bool:
    """Take a sign of life of an attempt, and return whether the attempt is open.

    If it was only given up with its node, it is open again, so a node that returns late loses nothing. It stays over if
    its slot works on something else by now.
    """
    if attempt.state != "over":
        return True
    slot = state.slot_of(attempt)
    has_joined = state.nodes[attempt.node].state == "joined"
    if not attempt.is_lost or not has_joined or slot.state == "lost" or slot.running is not None:
        return False
    state.running += 1
    state.open_attempts[attempt.id] = None
    attempt.state = "started"
    attempt.is_lost = False
    attempt.is_revived = True
    attempt.ended_at = None
    attempt.outcome = None
    if attempt.started_at is None:
        attempt.started_at = t
    for shape in (state.shapes[s] for s in attempt.shapes):
        count_copy(state, shape, attempt, 1)
        if shape.state == "pending":
            withdraw(state, shape)
    slot.running = attempt.id
    slot.orphaned = None
    refresh_slot(state, slot)
    return True


def _shape_started(state: State, event: ev.ShapeStarted, t: float) -> None:
    attempt = state.attempts.get(event.attempt)
    if attempt is not None and reopen_if_lost(state, attempt, t):
        attempt.current = event.shape
        attempt.current_at = t
        attempt.moved_at = t


def _attempt_ended(state: State, event: ev.AttemptEnded, t: float) -> None:
    attempt = state.attempts.get(event.attempt)
    if attempt is None:
        return
    was_over = attempt.state == "over"
    if not was_over or attempt.is_lost:
        attempt.outcome = event.outcome
        attempt.detail = event.detail
        attempt.seconds = event.seconds
        attempt.in_flight = event.in_flight
    if was_over:
        _ended_late(state, event, attempt, t)
        return
    if event.in_flight is not None:
        attempt.current = event.in_flight
    if attempt.is_revived:
        forgive(state, attempt, event.in_flight if event.outcome.is_loss else None)
    is_bad = event.outcome.may_blame_slot
    slot = state.slot_of(attempt)
    if is_bad or event.outcome.is_loss:
        slot.is_checking = True
        slot.suspect_end = None
    _charge_end(state, event, attempt, t)
    where_is_unknown = is_bad and attempt.current is None
    close_attempt(state, attempt, t)
    requeue_rest(state, attempt, halves=where_is_unknown)
    if slot.requested_canary:
        state.canary_due[slot.id] = t + state.settings.canary_s  # only now can its worker answer


def _charge_end(state: State, event: ev.AttemptEnded, attempt: Attempt, t: float) -> None:
    """Charge the end of an attempt to the shape at which it ended, to all that it left, or to its node. If nobody knows
    at which of several shapes it ended badly, none is charged (`requeue_rest` halves them then)."""
    outcome = event.outcome
    unsettled = state.unsettled(attempt.shapes)
    is_only_one = len(unsettled) == 1
    if is_only_one and attempt.current is None:
        shape: Shape | None = state.shapes[unsettled[0]]
    else:
        shape = state.shape_in_flight(attempt)
    if outcome.may_blame_slot and (attempt.current is not None or is_only_one):
        if shape is not None:
            state.slot_of(attempt).suspect_end = (shape.id, attempt.id)
            evidence.record_fault(state, shape, attempt, outcome, event.detail, t)
    elif outcome.is_loss and shape is not None:
        with_node = outcome is Reason.NODE_LOST
        evidence.record_loss(state, shape, attempt, with_node=with_node, detail=event.detail)
    elif outcome in (Reason.DONE, Reason.NOT_DELIVERED, Reason.REJECTED):
        reason = Reason.REJECTED if outcome is Reason.REJECTED else Reason.NOT_DELIVERED
        for s in unsettled:
            if all(fault.attempt != attempt.id for fault in state.shapes[s].faults):
                evidence.count_try(state, state.shapes[s], reason, attempt.id)
    elif outcome is Reason.DISK_FULL:
        for other in state.nodes[attempt.node].slots.values():
            evidence.request_quarantine(state, other.gpu.place, f"the node's disk is full: {event.detail}")


def _ended_late(state: State, event: ev.AttemptEnded, attempt: Attempt, t: float) -> None:
    """Apply the end of an attempt that was given up before. Its charges are taken back; only the shape that was in
    flight is charged, with a loss."""
    slot = state.slot_of(attempt)
    if slot.orphaned == attempt.id:
        slot.orphaned = None
        if slot.requested_canary:
            state.canary_due[slot.id] = t + state.settings.canary_s
    if not attempt.is_lost:
        return
    in_flight = event.in_flight if event.outcome.is_loss else None
    forgive(state, attempt, in_flight)
    culprit = state.shapes[in_flight] if in_flight is not None else None
    if culprit is not None and culprit.state == "pending":
        evidence.record_loss(state, culprit, attempt, with_node=True, detail=event.detail)
        if culprit.unit in state.waiting and culprit.id in state.waiting[culprit.unit].shapes:
            isolate(state, (culprit.id,))


def forgive(state: State, attempt: Attempt, culprit: int | None = None) -> None:
    """Strike out the attempt's evidence against its shapes, except against the `culprit`, because the attempt was given
    up too early."""
    attempt.is_revived = False
    for shape in (state.shapes[s] for s in attempt.shapes):
        if shape.state == "pending" and shape.id != culprit:
            evidence.strike_out(state, shape, attempt.id)


CHANGES: dict[type[ev.Record], Callable[[State, Any, float], None]] = {
    ev.Send: _send,
    ev.TakeBack: _take_back,
    ev.AttemptTaken: _attempt_taken,
    ev.AttemptStarted: _attempt_started,
    ev.ShapeStarted: _shape_started,
    ev.AttemptEnded: _attempt_ended,
}
