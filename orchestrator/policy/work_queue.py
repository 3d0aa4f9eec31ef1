"""Bookkeeping of waiting work and of the slots that want it: updates the state's sums after each change.

Called only while a record is applied: by the modules `*_changes.py` and by evidence.py. Whoever changes a slot, its GPU
or its node calls `refresh_slot` afterwards; decide.py then finds in `State.idle` and `running_low` whom to send work.

A pending shape is in exactly one place: in the queue with its unit, isolated (it runs apart from others next), in an
open attempt, or awaiting its verdict. The functions of this module move it, and keep the derived fields of `State`
right, so that no event has to count the whole fleet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TypeVar

from orchestrator.policy.model import Attempt, Kind, KindPlace, Shape, Slot, State, WaitingUnit

K = TypeVar("K")
V = TypeVar("V")


def queue_shapes(state: State, shapes: Iterable[int]) -> None:
    """Queue the shapes, each unit together. Shapes that are settled, in an open attempt, isolated or await a verdict
    are not queued."""
    units: dict[int, list[int]] = {}
    for s in shapes:
        shape = state.shapes[s]
        is_free = not shape.copies and s not in state.awaiting_verdict and shape.isolated_with is None
        if shape.state == "pending" and is_free:
            units.setdefault(shape.unit, []).append(s)
    for unit, ids in units.items():
        known = state.waiting.get(unit)
        if known is not None:
            ids = [*known.shapes, *(s for s in ids if s not in known.shapes)]
            _unqueue_unit(state, unit)
        kind = state.kinds[state.shapes[unit].kind]
        queue_units(state, kind, [WaitingUnit(-sum(state.shapes[s].cost_s for s in ids), unit, tuple(ids))])


def queue_units(state: State, kind: Kind, units: Iterable[WaitingUnit]) -> None:
    """Queue units of one kind, none of which is queued yet."""
    for unit in units:
        state.waiting[unit.unit] = unit
        insort(kind.waiting, unit)
        kind.seconds -= unit.minus_s
        state.waiting_s -= unit.minus_s
    _place_kind(state, kind)


def _unqueue_unit(state: State, unit: int) -> tuple[int, ...]:
    """Take a unit out of the queue, and return its shapes. An empty queue has exactly 0 seconds, without the rounding
    of many sums."""
    entry = state.waiting.pop(unit)
    kind = state.kinds[state.shapes[entry.shapes[0]].kind]
    del kind.waiting[bisect_left(kind.waiting, entry)]
    kind.seconds = kind.seconds + entry.minus_s if kind.waiting else 0.0
    _place_kind(state, kind)
    state.waiting_s = state.waiting_s + entry.minus_s if state.waiting else 0.0
    return entry.shapes


def _place_kind(state: State, kind: Kind) -> None:
    """Put a kind into the heaps of kinds after its waiting units changed. Its earlier places stay in there until they
    come to the top."""
    if kind.waiting:
        heappush(state.kinds_by_longest, kind.by_longest)
        heappush(state.kinds_by_seconds, kind.by_seconds)
    _drop_earlier_places(state.kinds_by_longest, lambda top: top.by_longest)
    _drop_earlier_places(state.kinds_by_seconds, lambda top: top.by_seconds)


def _drop_earlier_places(heap: list[KindPlace], place_of: Callable[[Kind], KindPlace]) -> None:
    """Drop places from the top of a heap until the top is the present place of its kind."""
    while heap and not (heap[0].kind.waiting and heap[0].key == place_of(heap[0].kind).key):
        heappop(heap)


def isolate(state: State, shapes: tuple[int, ...]) -> None:
    """Make the shapes run apart from others next."""
    for s in shapes:
        withdraw(state, state.shapes[s])
        state.shapes[s].isolated_with = shapes[0]
    state.isolated[shapes[0]] = shapes


def isolate_noisy(state: State, shapes: Iterable[int]) -> None:
    """Queue noisy shapes for their second measurement. Those of a unit run together, as they are decided together."""
    units: dict[int, list[int]] = {}
    for shape in (state.shapes[s] for s in shapes):
        if shape.noisy and shape.state == "pending" and not shape.copies and shape.isolated_with is None:
            units.setdefault(shape.unit, []).append(shape.id)
    for ids in units.values():
        isolate(state, tuple(ids))


def withdraw_unit(state: State, unit: int, members: tuple[int, ...]) -> None:
    """Take these shapes of a unit out of the queue."""
    entry = state.waiting.get(unit)
    if entry is not None and not set(members).isdisjoint(entry.shapes):
        queue_shapes(state, [s for s in _unqueue_unit(state, unit) if s not in members])


def withdraw(state: State, shape: Shape) -> None:
    """Take the shape out of the queue and out of all lists."""
    if shape.unit in state.waiting:
        withdraw_unit(state, shape.unit, (shape.id,))
    if shape.isolated_with is not None:
        rest = tuple(s for s in state.isolated.pop(shape.isolated_with) if s != shape.id)
        shape.isolated_with = None
        for s in rest:
            state.shapes[s].isolated_with = rest[0]
        if rest:
            state.isolated[rest[0]] = rest
    state.hedged.pop(shape.unit, None)


def count_copy(state: State, shape: Shape, attempt: Attempt, change: int) -> None:
    """Count the open attempts that hold the shape. `change`: 1 if `attempt` begins to hold it, -1 if it no longer
    does."""
    before = shape.copies
    shape.copies += change
    if shape.state != "pending":
        return
    others = min(before, shape.copies)
    if others == 0:
        add_held_once(state, attempt, change)
    elif others == 1:
        add_held_once(state, sole_attempt(state, shape, attempt), -change)


def sole_attempt(state: State, shape: Shape, besides: Attempt | None = None) -> Attempt:
    """The one open attempt that holds the shape, not counting `besides`."""
    attempts = (state.attempts[i] for i in shape.attempts)
    return next(a for a in attempts if a.id in state.open_attempts and a is not besides)


def add_held_once(state: State, attempt: Attempt, change: int) -> None:
    """Count the unsettled shapes that the attempt alone holds."""
    attempt.held_once += change
    state.held_once += change


def close_attempt(state: State, attempt: Attempt, t: float, *, lost: bool = False) -> None:
    """Close an attempt that is over or given up. Its shapes are not queued yet: see `requeue_rest`."""
    if attempt.state == "started":
        state.running -= 1
    if attempt.is_being_taken:
        state.taking -= 1
    attempt.state = "over"
    attempt.is_being_taken = False
    attempt.is_lost = lost
    attempt.ended_at = t
    attempt.current = None
    state.to_recall.pop(attempt.id, None)
    for s in attempt.shapes:
        count_copy(state, state.shapes[s], attempt, -1)
    state.open_attempts.pop(attempt.id, None)
    slot = state.slot_of(attempt)
    if slot.running == attempt.id:
        slot.running = None
    if attempt.id in slot.queued:
        slot.queued.remove(attempt.id)
    refresh_slot(state, slot)


def is_deciding(state: State, seconds: float) -> bool:
    """Return whether a unit with this estimate decides the length of the run."""
    settings = state.settings
    return seconds > max(settings.hedge * state.total_s / max(1, len(state.usable)), settings.hedge_least_s)


def requeue_rest(state: State, attempt: Attempt, *, halves: bool = False) -> None:
    """Queue the shapes that a finished attempt left. Each suspect runs alone. With `halves` (nobody knows at which
    shape it ended) the two halves run apart. The rest is queued as before."""
    rest = tuple(s for s in state.unsettled(attempt.shapes) if s not in state.awaiting_verdict)
    isolate_noisy(state, rest)
    rest = tuple(s for s in rest if state.shapes[s].isolated_with is None)
    if halves:
        rest = tuple(s for s in rest if not state.shapes[s].copies)
        if len(rest) > 1:
            middle = (len(rest) + 1) // 2
            isolate(state, rest[:middle])
            isolate(state, rest[middle:])
            return
    for s in rest:
        if _runs_alone_next(state, state.shapes[s]):
            isolate(state, (s,))
    queue_shapes(state, rest)


def _runs_alone_next(state: State, shape: Shape) -> bool:
    """Return whether a shape that an attempt left is a suspect that runs alone next.

    A suspect need not wait until another group reaches it, unless it may take a node down: one that was lost waits
    until no other attempt holds it. But a unit that decides the length of the run goes to two nodes again, unless
    that could cost more nodes than it takes to fail.
    """
    is_suspect = bool(shape.faults or shape.losses or shape.lease_ends)
    if not is_suspect or shape.isolated_with is not None:
        return False
    may_cost_node = bool(shape.losses or shape.lease_ends)
    may_be_hedged = len(shape.losses) < state.settings.losses - 1 and is_deciding(state, shape.cost_s)
    return shape.copies == 0 or (shape.copies == 1 and (may_be_hedged or not may_cost_node))


def refresh_queue_length(state: State, slot: Slot) -> None:
    """A faster `refresh_slot`, for when the only change is that a running shape got its result."""
    slot.ahead_s = _ahead_s(state, slot)
    if slot.ahead_s < state.settings.ahead_s and slot.id not in state.running_low:
        refresh_slot(state, slot)


def _ahead_s(state: State, slot: Slot) -> float:
    """Estimated seconds of the slot's running and queued work."""
    return sum(state.attempts[a].left_s for a in (slot.running, *slot.queued) if a is not None)


def refresh_slot(state: State, slot: Slot) -> None:
    """Update the sums after a change of the slot, its GPU or its node."""
    node = state.nodes[slot.node]
    is_usable = node.state in ("joined", "away") and not node.draining and slot.state in ("starting", "ready")
    has_work = slot.running is not None or bool(slot.queued)
    known = state.usable.get(slot.gpu.place)
    if is_usable or known is slot:  # else another slot has the GPU now, and is counted for it
        _count_place(state, slot, is_usable=is_usable, is_free=is_usable and not has_work)
    slot.ahead_s = _ahead_s(state, slot)
    takes_work = is_usable and node.state == "joined" and slot.state == "ready" and not slot.is_checking
    is_low = slot.ahead_s < state.settings.ahead_s and len(slot.queued) < state.settings.most_queued
    _keep_or_drop(state.idle, slot.id, slot, keep=takes_work and not has_work)
    _keep_or_drop(state.running_low, slot.id, slot, keep=takes_work and has_work and is_low)
    if not is_usable and node.state == "joined":
        state.to_recall.update((a, None) for a in slot.queued if not state.attempts[a].is_being_taken)


def _count_place(state: State, slot: Slot, *, is_usable: bool, is_free: bool) -> None:
    """Count the slot's place among the usable, clean and free ones, and for its host."""
    place = slot.gpu.place
    is_clean = is_usable and not slot.gpu.fault_streak
    counts = state.hosts.setdefault(place[0], [0, 0])
    if is_usable != (place in state.usable):
        counts[0] += 1 if is_usable else -1
    if is_clean != (place in state.clean):
        counts[1] += 1 if is_clean else -1
    if not counts[0]:
        del state.hosts[place[0]]
    _keep_or_drop(state.usable, place, slot, keep=is_usable)
    _keep_or_drop(state.clean, place, None, keep=is_clean)
    _keep_or_drop(state.free, place, None, keep=is_free)


def _keep_or_drop(entries: dict[K, V], key: K, value: V, *, keep: bool) -> None:
    if keep:
        entries[key] = value
    else:
        entries.pop(key, None)
