"""The time that a run still takes, from the plan's estimates and from how long its attempts took.

This module reads the run's state and says what waits, what is under way and what is over; `planning/estimate.py`
computes the seconds from that. The usual time of work is that of a slot of ordinary speed; a slot's pace
(`slot_speed.py`) is the time that it takes over the usual time.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import harmonic_mean

from orchestrator.planning.estimate import MOST_SCHEDULED, FinishedGroups, Range, UnderWay, seconds_left
from orchestrator.planning.plan import GROUPS
from orchestrator.policy.model import Attempt, Slot, SlotId, State
from orchestrator.view.header import RunHeader
from orchestrator.view.slot_speed import compare_slots

LEAST_PACE = 0.1
"""A slot that seems faster than this is counted as this fast."""
OVERDUE = 0.2
"""A start that is overdue may take this part of the time that has passed once more."""


def time_left(state: State, header: RunHeader, now: float, *, driven: bool) -> Range | None:
    """Seconds until the last shape is settled. If nobody drives the run, seconds from its resume.

    None if all are settled, or if nobody measured this tuner on this chip and the run has no result yet.
    """
    if not header.known and not state.tuned_at:
        return None
    paces = {slot: speed.pace for slot, speed in compare_slots(state).items()}
    # each slot takes as much of the work as it can
    fleet_pace = float(harmonic_mean([max(LEAST_PACE, pace) for pace in paces.values()])) if paces else 1.0
    slots = state.slots
    at_work = [state.attempts[slot.running] for slot in slots if slot.running and driven]
    slot_count = len(state.usable) or len(slots) or 1  # those that take work now or soon; if none does, all
    under_way = []
    for attempt in at_work:
        if state.unsettled(attempt.shapes):
            under_way.append(_progress_of(state, attempt, now, _pace_of(attempt, paces)))
    return seconds_left(
        [fleet_pace * seconds for seconds in _estimate_waiting(state, at_work, slot_count)],
        slot_count,
        spread=header.spread,
        running=under_way,
        finished=_finished_groups(state, paces),
        start=_estimate_start(state, header, slots, now, driven=driven),
    )


def _pace_of(attempt: Attempt, paces: Mapping[SlotId, float]) -> float:
    return paces.get((attempt.node, attempt.slot), 1.0)


def _finished_groups(state: State, paces: Mapping[SlotId, float]) -> FinishedGroups:
    """The times that finished attempts took, beside their estimates. An attempt that only refused shapes does not show
    how long measuring takes."""
    groups = FinishedGroups()
    for attempt in state.attempts.values():
        has_result = any(state.shapes[shape].state == "tuned" for shape in attempt.landed)
        if attempt.state != "over" or not has_result or attempt.started_at is None:
            continue
        took_s = attempt.moved_at - attempt.started_at
        if attempt.seconds > 0:
            took_s = min(took_s, attempt.seconds)
        groups.add(_pace_of(attempt, paces) * _estimate_done(state, attempt), took_s)
    return groups


def _estimate_done(state: State, attempt: Attempt) -> float:
    """Estimated seconds of what an attempt has behind it: its set-up and the shapes with a result."""
    return state.setup_s + attempt.cost_s - attempt.left_s


def _estimate_waiting(state: State, at_work: list[Attempt], slots: int) -> list[float]:
    """Estimated seconds of the shapes that nobody works on, each with its part of a set-up.

    We assume that shapes which may share a process form a few groups for each slot. In a large run all shapes but the
    longest count as equally long.
    """
    kinds = state.kinds.values()
    waiting = sum(len(kind.waiting) for kind in kinds)
    sharing = waiting - sum(len(kind.waiting) for kind in kinds if kind.alone)
    groups = GROUPS * slots if slots > 1 else 1
    setup_share = min(sharing, groups) / max(1, sharing)
    if state.pending > MOST_SCHEDULED:
        setups = waiting - sharing + setup_share * sharing
        seconds = state.left_s - sum(attempt.left_s for attempt in at_work) + state.setup_s * setups
        longest = max((-kind.waiting[0].minus_s for kind in kinds if kind.waiting), default=0.0)
        each = max(0.0, seconds - longest) / max(1, waiting - 1)
        return [longest, *[each] * (waiting - 1)][:waiting]
    at_work_shapes = {shape for attempt in at_work for shape in attempt.shapes}
    estimates = []
    for shape in state.shapes.values():
        if shape.state == "pending" and shape.id not in at_work_shapes:
            share = 1.0 if state.kinds[shape.kind].alone else setup_share
            estimates.append(shape.cost_s + state.setup_s * share)
    return estimates


def _progress_of(state: State, attempt: Attempt, now: float, pace: float) -> UnderWay:
    """Progress of an open attempt. `pace`: that of its slot."""
    begun = attempt.started_at or 0.0
    session_begin = state.sessions[-1][0] if state.sessions else 0.0
    setup_left_s = state.setup_s
    done_s = 0.0
    if attempt.landed:
        setup_left_s = 0.0
        done_s = _estimate_done(state, attempt)
    current = None if attempt.current is None else state.shapes.get(attempt.current)
    next_s = 0.0
    if current is not None and current.state == "pending":
        next_s = pace * (setup_left_s + current.cost_s)
    # an attempt that ran while there was no controller does not count: the times of its shapes are unknown
    is_timed = bool(attempt.landed) and begun >= session_begin
    return UnderWay(
        estimate_s=pace * (done_s + setup_left_s + attempt.left_s),
        done_s=pace * done_s,
        took_s=attempt.moved_at - begun if is_timed else 0.0,
        since_s=max(0.0, now - max(attempt.moved_at, session_begin)),
        next_s=next_s,
    )


def _estimate_start(state: State, header: RunHeader, slots: list[Slot], now: float, *, driven: bool) -> Range | None:
    """Seconds until the first slot can begin, None if one has begun."""
    if driven and any(slot.running or slot.state == "ready" for slot in slots):
        return None
    passed_s = max(0.0, now - state.sessions[-1][0]) if driven and state.sessions else 0.0
    expected_s = max(header.start_s - passed_s, OVERDUE * passed_s)
    return Range(0.5 * expected_s, expected_s, 2.0 * expected_s)
