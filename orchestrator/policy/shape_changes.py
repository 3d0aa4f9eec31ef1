"""Applies the records about shapes: work that is added or tried again, results, and the end of a shape.

A result settles its shape at once if it is complete and not noisy. Any other becomes evidence (evidence.py), and a
decision (SettleShape, FailShape) settles the shape later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator import events as ev
from orchestrator.policy import evidence
from orchestrator.policy.attempt_changes import forgive, is_unclaimed, reopen_if_lost
from orchestrator.policy.blame import settle_with_result
from orchestrator.policy.model import Attempt, Kind, Node, Shape, State, WaitingUnit
from orchestrator.policy.work_queue import (
    add_held_once,
    isolate_noisy,
    queue_shapes,
    queue_units,
    refresh_queue_length,
    refresh_slot,
    sole_attempt,
    withdraw,
)
from orchestrator.reasons import Reason


def _work_added(state: State, event: ev.WorkAdded, t: float) -> None:
    kind = state.kinds.setdefault(event.kind, Kind(len(state.kinds), event.tier, event.alone))
    state.setup_s = event.setup_s
    state.shares_end = event.shares_end
    units = []
    for unit, costs in zip(event.units, event.costs_s, strict=True):
        for s, cost in zip(unit, costs, strict=True):
            state.shapes[s] = Shape(s, unit[0], event.kind, cost)
        seconds = sum(costs)
        state.left_s += seconds
        state.total_s += seconds
        units.append(WaitingUnit(-seconds, unit[0], unit))
    queue_units(state, kind, units)


def _retry_asked(state: State, event: ev.RetryAsked, t: float) -> None:
    for shape in (state.shapes[s] for s in event.shapes if s in state.shapes):
        if shape.state == "failed":
            _reopen(state, shape)
            queue_shapes(state, [shape.id])
        elif shape.state == "tuned" and shape.confirmed is not False:
            isolate_noisy(state, _measure_again(state, shape, state.attempts[shape.attempt], t))


def _reopen(state: State, shape: Shape) -> Shape:
    """Make a settled shape pending again, with fresh tries. It is not queued yet."""
    attempt = state.attempts.get(shape.attempt)
    counts: list[State | Node] = [state] if attempt is None else [state, state.nodes[attempt.node]]
    for count in counts:
        if shape.state == "failed":
            count.failed -= 1
        else:
            count.tuned -= 1
    fresh = Shape(shape.id, shape.unit, shape.kind, shape.cost_s)
    fresh.attempts = shape.attempts
    fresh.copies = shape.copies
    state.shapes[shape.id] = fresh
    if fresh.copies == 1:
        add_held_once(state, sole_attempt(state, fresh), 1)
    state.left_s += fresh.cost_s
    return fresh


def _measure_again(state: State, noisy: Shape, attempt: Attempt, t: float) -> list[int]:
    """Take back what the attempt found for the noisy shape and for the others of its unit, because they are decided
    together. Return these shapes.

    The result counts as a fault that blames nobody, so `decide.suits` sends the shapes to another slot if there is one.
    """
    members = _unit_members(state, noisy, attempt)
    for shape in members:
        is_new = shape.id in attempt.landed and all(fault.attempt != attempt.id for fault in shape.faults)
        if shape.state == "tuned":
            shape = _reopen(state, shape)
        shape.noisy = attempt.id
        shape.result = attempt.id
        if is_new:
            noise = frozenset({ev.NOISE})
            evidence.record_fault(state, shape, attempt, Reason.FAULT, "", t, blocked=noise, is_new=False)
    return [shape.id for shape in members]


def _unit_members(state: State, shape: Shape, attempt: Attempt) -> list[Shape]:
    """The shapes of a unit that an attempt has tuned or may tune."""
    unit = [state.shapes[s] for s in attempt.shapes if state.shapes[s].unit == shape.unit]
    return [s for s in unit if s.state == "pending" or (s.state == "tuned" and s.attempt == attempt.id)]


def _may_measure_again(state: State, shape: Shape, attempt: Attempt) -> bool:
    """Return whether a noisy result is measured again. If so, its time is taken from the tenth for such work."""
    if shape.noisy or state.stop_why:
        return False
    cost = state.setup_s + sum(s.cost_s for s in _unit_members(state, shape, attempt))
    if state.remeasure_s + cost > state.settings.remeasure * state.total_s:
        return False
    state.remeasure_s += cost
    return True


def _stop_asked(state: State, event: ev.StopAsked, t: float) -> None:
    state.stopped = True
    state.stop_why = event.why
    for shape in state.shapes.values():
        if event.why and shape.noisy and shape.state == "pending":
            state.decided[shape.id] = settle_with_result(shape, event.why)
    state.to_recall.update((a, None) for a in state.open_attempts if is_unclaimed(state.attempts[a]))


def _shape_tuned(state: State, event: ev.ShapeTuned, t: float) -> None:
    attempt, shape = _record_result(state, event, t)
    if attempt is None or shape is None:
        return
    slot = state.slot_of(attempt)
    if attempt.state == "started":
        was_in_doubt = slot.gpu.fault_streak or slot.gpu.quarantines
        if event.complete:
            slot.gpu.tuned += 1
            evidence.record_tuned(state, slot.gpu)
        if was_in_doubt:
            refresh_slot(state, slot)
        else:
            refresh_queue_length(state, slot)
    if shape.state != "pending":
        return
    if not event.complete:
        shape.result = attempt.id
        blocked = _blocked_candidates(event)
        is_new = _has_new_fault(event)
        evidence.record_fault(state, shape, attempt, Reason.FAULT, "", t, blocked=blocked, is_new=is_new)
    elif shape.noisy == attempt.id or (event.noisy and _may_measure_again(state, shape, attempt)):
        _measure_again(state, shape, attempt, t)
    elif event.noisy:
        why = "its time is noise, measured twice" if shape.noisy else "its time is noise"
        state.decided[shape.id] = ev.SettleShape(shape.id, attempt.id, True, why)
    else:
        _settle_tuned(state, shape, attempt, t, None, "")


def _blocked_candidates(event: ev.ShapeTuned) -> frozenset[tuple[str, ...]]:
    """The candidates without which a result was found. If the list was cut, an entry of this attempt alone stands for
    the rest, so that no other attempt can confirm it."""
    blocked = set(event.withheld) - {ev.NOISE}
    if event.cut:
        blocked.add((f"more of {event.attempt}",))
    return frozenset(blocked)


def _shape_refused(state: State, event: ev.ShapeRefused, t: float) -> None:
    attempt, shape = _record_result(state, event, t)
    if attempt is None or shape is None:
        return
    if attempt.state == "started":
        refresh_slot(state, state.slot_of(attempt))
    if shape.state != "pending":
        return
    if event.complete:
        state.decided[event.shape] = ev.FailShape(event.shape, event.reason, event.detail, event.attempt, True)
    else:
        is_new = _has_new_fault(event)
        evidence.record_fault(state, shape, attempt, event.reason, event.detail, t, is_new=is_new)


def _has_new_fault(event: ev.ShapeTuned | ev.ShapeRefused) -> bool:
    """Return whether a candidate faulted in this run. Older faults say nothing about the slot now."""
    return event.cut or not set(event.withheld) <= set(event.earlier)


def _record_result(
    state: State, event: ev.ShapeTuned | ev.ShapeRefused, t: float
) -> tuple[Attempt | None, Shape | None]:
    """Record in its attempt that a shape has a result; return both, (None, None) if the state does not know them."""
    attempt = state.attempts.get(event.attempt)
    shape = state.shapes.get(event.shape)
    if attempt is None or shape is None:
        return None, None
    if reopen_if_lost(state, attempt, t) and attempt.is_revived:
        forgive(state, attempt)
    if event.shape not in attempt.landed:
        attempt.landed[event.shape] = None
        attempt.left_s = max(0.0, attempt.left_s - shape.cost_s)
    attempt.current = None
    attempt.moved_at = t
    return attempt, shape


def _settle_tuned(state: State, shape: Shape, attempt: Attempt, t: float, confirmed: bool | None, detail: str) -> None:
    _settle(state, shape, t)
    shape.state = "tuned"
    shape.confirmed = confirmed
    shape.detail = detail
    shape.attempt = attempt.id
    state.tuned += 1
    state.tuned_at.append(t)
    state.nodes[attempt.node].tuned += 1
    evidence.charge_other_gpus(state, shape, state.slot_of(attempt).gpu.place)


def _settle(state: State, shape: Shape, t: float) -> None:
    """Take the shape out of the queues, and attempts that have no other shape out of their inboxes."""
    withdraw(state, shape)
    if shape.copies == 1:
        add_held_once(state, sole_attempt(state, shape), -1)
    state.awaiting_verdict.pop(shape.id, None)
    state.decided.pop(shape.id, None)
    shape.settled_at = t
    state.left_s -= shape.cost_s
    if not shape.copies:
        return
    for attempt in (state.attempts[i] for i in shape.attempts):
        others = (s for s in attempt.shapes if s != shape.id)
        if is_unclaimed(attempt) and all(state.shapes[s].state != "pending" for s in others):
            state.to_recall[attempt.id] = None


def _settle_shape(state: State, decision: ev.SettleShape, t: float) -> None:
    shape = state.shapes[decision.shape]
    if shape.state == "pending":
        attempt = state.attempts[decision.attempt]
        _settle_tuned(state, shape, attempt, t, decision.confirmed, decision.detail)


def _fail_shape(state: State, decision: ev.FailShape, t: float) -> None:
    shape = state.shapes[decision.shape]
    if shape.state != "pending":
        return
    _settle(state, shape, t)
    shape.state = "failed"
    shape.reason = decision.reason
    shape.detail = decision.detail
    shape.confirmed = decision.confirmed
    shape.attempt = decision.attempt or ""
    state.failed += 1
    if shape.attempt in state.attempts:
        state.nodes[state.attempts[shape.attempt].node].failed += 1


CHANGES: dict[type[ev.Record], Callable[[State, Any, float], None]] = {
    ev.WorkAdded: _work_added,
    ev.RetryAsked: _retry_asked,
    ev.StopAsked: _stop_asked,
    ev.ShapeTuned: _shape_tuned,
    ev.ShapeRefused: _shape_refused,
    ev.SettleShape: _settle_shape,
    ev.FailShape: _fail_shape,
}
