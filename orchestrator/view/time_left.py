"""The time that a run still takes, from the plan's estimates and from how long its attempts took."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import harmonic_mean

from orchestrator.planning.estimate import MOST_SCHEDULED, FinishedGroups, Range, UnderWay, seconds_left
from orchestrator.planning.plan import GROUPS
from orchestrator.policy.model import Attempt, SlotId, State
from orchestrator.view.header import RunHeader
from orchestrator.view.slot_speed import compare_slots

LEAST_PACE = 0.1
"""A slot that seems faster than this is counted as this fast."""
OVERDUE = 0.2
"""A start that is overdue may take this part of the time that has passed once more."""


def time_left(state: State, about: RunHeader, now: float, *, driven: bool) -> Range | None:
    """Seconds until the last shape is settled. If nobody drives the run, seconds from its resume.

    None if all are settled, or if nobody measured this tuner on this chip and the run has no result yet.
    """
    if not about.known and not state.tuned_at:
        return None
    paces = {slot: speed.pace for slot, speed in compare_slots(state).items()}
    # each slot takes as much of the work as it can
    usual_pace = float(harmonic_mean([max(LEAST_PACE, pace) for pace in paces.values()])) if paces else 1.0
    at_work: list[Attempt] = []
    if driven:
        slots = [slot for node in state.nodes.values() for slot in node.slots.values()]
        at_work = [state.attempts[slot.running] for slot in slots if slot.running]
    slot_count = _count_slots(state)
    return seconds_left(
        _waiting(state, at_work, usual_pace, slot_count),
        slot_count,
        spread=about.spread,
        running=[
            _under_way(state, attempt, now, _pace_of(attempt, paces))
            for attempt in at_work
            if state.unsettled(attempt.shapes)
        ],
        finished=_measured(state, paces),
        start=_start(state, about, now, driven),
    )


def _pace_of(attempt: Attempt, paces: Mapping[SlotId, float]) -> float:
    return paces.get((attempt.node, attempt.slot), 1.0)


def _measured(state: State, paces: Mapping[SlotId, float]) -> FinishedGroups:
    """The times that finished attempts took, beside their estimates. An attempt that only refused shapes does not show
    how long measuring takes."""
    measured = FinishedGroups()
    for attempt in state.attempts.values():
        has_result = any(state.shapes[shape].state == "tuned" for shape in attempt.landed)
        if attempt.state != "over" or not has_result or attempt.started_at is None:
            continue
        took_s = attempt.moved_at - attempt.started_at
        if attempt.seconds > 0:
            took_s = min(took_s, attempt.seconds)
        done_s = state.setup_s + attempt.cost_s - attempt.left_s
        measured.add(_pace_of(attempt, paces) * done_s, took_s)
    return measured


def _waiting(state: State, at_work: list[Attempt], usual: float, slots: int) -> list[float]:
    """Estimates of waiting units, each with its part of a set-up. We assume that units which may share a process form a
    few groups for each slot. In a large run all units but the longest count as equally long."""
    kinds = state.kinds.values()
    units = sum(len(kind.waiting) for kind in kinds)
    sharing = units - sum(len(kind.waiting) for kind in kinds if kind.alone)
    groups = GROUPS * slots if slots > 1 else 1
    setup_share = min(sharing, groups) / max(1, sharing)
    if state.pending > MOST_SCHEDULED:
        setups = units - sharing + setup_share * sharing
        seconds = state.left_s - sum(attempt.left_s for attempt in at_work) + state.setup_s * setups
        longest = max((-kind.waiting[0].minus_s for kind in kinds if kind.waiting), default=0.0)
        each = max(0.0, seconds - longest) / max(1, units - 1)
        return [usual * longest, *[usual * each] * (units - 1)][:units]
    at_work_shapes = {shape for attempt in at_work for shape in attempt.shapes}
    estimates = []
    for shape in state.shapes.values():
        if shape.state == "pending" and shape.id not in at_work_shapes:
            share = 1.0 if state.kinds[shape.kind].alone else setup_share
            estimates.append(usual * (shape.cost_s + state.setup_s * share))
    return estimates


def _under_way(state: State, a: Attempt, now: float, pace: float) -> UnderWay:
    """Progress of an open attempt. `pace`: how long work takes on its slot, relative to the usual time."""
    begun = a.started_at or 0.0
    session_begin = state.sessions[-1][0] if state.sessions else 0.0
    setup_left_s = 0.0 if a.landed else state.setup_s
    done_s = state.setup_s + a.cost_s - a.left_s if a.landed else 0.0
    next_s = 0.0
    if a.current is not None and a.current in state.shapes and state.shapes[a.current].state == "pending":
        next_s = pace * (setup_left_s + state.shapes[a.current].cost_s)
    # an attempt that ran while there was no controller does not count: the times of its shapes are unknown
    is_timed = bool(a.landed) and begun >= session_begin
    return UnderWay(
        estimate_s=pace * (done_s + setup_left_s + a.left_s),
        done_s=pace * done_s,
        took_s=a.moved_at - begun if is_timed else 0.0,
        since_s=max(0.0, now - max(a.moved_at, session_begin)),
        next_s=next_s,
    )


def _count_slots(state: State) -> int:
    """Number of slots that take work now or soon; if no slot does, the number of all slots."""
    return len(state.usable) or sum(len(node.slots) for node in state.nodes.values()) or 1


def _start(state: State, about: RunHeader, now: float, driven: bool) -> Range | None:
    """Seconds until the first slot can begin, None if one has begun."""
    slots = [slot for node in state.nodes.values() for slot in node.slots.values()]
    if driven and any(slot.running or slot.state == "ready" for slot in slots):
        return None
    passed_s = max(0.0, now - state.sessions[-1][0]) if driven and state.sessions else 0.0
    expected_s = max(about.start_s - passed_s, OVERDUE * passed_s)
    return Range(0.5 * expected_s, expected_s, 2.0 * expected_s)
