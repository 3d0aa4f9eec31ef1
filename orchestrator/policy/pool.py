"""Bookkeeping of waiting work and of the slots that want it: updates the state's sums after each change."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from orchestrator.policy.model import Attempt, Shape, Slot, State


def wait(state: State, shapes: Iterable[int]) -> None:
    """Queue the shapes, each unit together. Shapes that are settled, in an open attempt or await a verdict are not
    queued."""
    units: dict[int, list[int]] = {}
    for s in shapes:
        shape = state.shapes[s]
        if shape.state == "pending" and not shape.copies and s not in state.held and shape.apart is None:
            units.setdefault(shape.unit, []).append(s)
    for unit, ids in units.items():
        known = state.waiting.get(unit)
        if known is not None:
            ids = [*known[2], *(s for s in ids if s not in known[2])]
            _take_out(state, unit)
        queue(state, unit, tuple(ids), sum(state.shapes[s].cost_s for s in ids))


def queue(state: State, unit: int, shapes: tuple[int, ...], seconds: float) -> None:
    """Queue shapes of one unit. No shape of the unit may be queued yet."""
    state.waiting[unit] = entry = (-seconds, unit, shapes)
    kind = state.kinds[state.shapes[shapes[0]].kind]
    insort(kind.waiting, entry)
    kind.seconds += seconds
    state.waiting_s += seconds


def _take_out(state: State, unit: int) -> tuple[int, ...]:
    entry = state.waiting.pop(unit)
    kind = state.kinds[state.shapes[entry[2][0]].kind]
    del kind.waiting[bisect_left(kind.waiting, entry)]
    kind.seconds = kind.seconds + entry[0] if kind.waiting else 0.0
    state.waiting_s = state.waiting_s + entry[0] if state.waiting else 0.0
    return entry[2]


def set_apart(state: State, shapes: tuple[int, ...]) -> None:
    """Make the shapes run apart from others next."""
    for s in shapes:
        withdraw(state, state.shapes[s])
        state.shapes[s].apart = shapes[0]
    state.apart[shapes[0]] = shapes


def set_noisy_apart(state: State, shapes: Iterable[int]) -> None:
    """Queue noisy shapes for their second measurement. Those of a unit run together, as they are decided together."""
    units: dict[int, list[int]] = {}
    for shape in (state.shapes[s] for s in shapes):
        if shape.noisy and shape.state == "pending" and not shape.copies and shape.apart is None:
            units.setdefault(shape.unit, []).append(shape.id)
    for ids in units.values():
        set_apart(state, tuple(ids))


def withdraw_unit(state: State, unit: int, members: tuple[int, ...]) -> None:
    """Take these shapes of a unit out of the queue."""
    entry = state.waiting.get(unit)
    if entry is not None and not set(members).isdisjoint(entry[2]):
        wait(state, [s for s in _take_out(state, unit) if s not in members])


def withdraw(state: State, shape: Shape) -> None:
    """Take the shape out of the queue and out of all lists."""
    if shape.unit in state.waiting:
        withdraw_unit(state, shape.unit, (shape.id,))
    if shape.apart is not None:
        rest = tuple(s for s in state.apart.pop(shape.apart) if s != shape.id)
        shape.apart = None
        for s in rest:
            state.shapes[s].apart = rest[0]
        if rest:
            state.apart[rest[0]] = rest
    state.twice.pop(shape.unit, None)


def hold(state: State, shape: Shape, a: Attempt, by: int) -> None:
    """Count the open attempts that hold the shape: `a` begins to hold it, or no longer does."""
    before, shape.copies = shape.copies, shape.copies + by
    if shape.state == "pending":
        if before + shape.copies == 1:
            add_single(state, a, by)
        elif before + shape.copies == 3:
            add_single(state, holder(state, shape, a), -by)


def holder(state: State, shape: Shape, besides: Attempt | None = None) -> Attempt:
    """The one open attempt that holds the shape, not counting `besides`."""
    return next(a for i in shape.attempts if (a := state.attempts[i]).id in state.open and a is not besides)


def add_single(state: State, a: Attempt, by: int) -> None:
    """Count the unsettled shapes that the attempt alone holds."""
    a.single += by
    state.single += by


def close(state: State, a: Attempt, t: float, *, lost: bool = False) -> None:
    """Close an attempt that is over or given up. Its shapes are not queued yet."""
    slot = state.slot_of(a)
    state.running -= a.state == "started"
    state.taking -= a.taking
    a.state, a.taking, a.lost, a.ended_at, a.current = "over", False, lost, t, None
    state.to_recall.pop(a.id, None)
    for s in a.shapes:
        hold(state, state.shapes[s], a, -1)
    state.open.pop(a.id, None)
    if slot.running == a.id:
        slot.running = None
    if a.id in slot.queued:
        slot.queued.remove(a.id)
    look(state, slot)


def is_deciding(state: State, seconds: float) -> bool:
    """Return whether a unit with this estimate decides the length of the run."""
    s = state.settings
    return seconds > max(s.hedge * state.total_s / max(1, len(state.usable)), s.hedge_least_s)


def put_back(state: State, a: Attempt, *, halves: bool = False) -> None:
    """Queue the shapes that a finished attempt left. Each suspect runs alone. With `halves` (nobody knows at which
    shape it ended) the two halves run apart. The rest is queued as before."""
    left = tuple(s for s in state.unsettled(a.shapes) if s not in state.held)
    set_noisy_apart(state, left)
    left = tuple(s for s in left if state.shapes[s].apart is None)
    if halves:
        left = tuple(s for s in left if not state.shapes[s].copies)
    if halves and len(left) > 1:
        set_apart(state, left[: (len(left) + 1) // 2])
        set_apart(state, left[(len(left) + 1) // 2 :])
        return
    for s in left:
        shape = state.shapes[s]
        # A suspect need not wait until another group reaches it, unless it may take a node down. A unit that decides
        # the length of the run goes to two nodes again, unless that could cost more nodes than it takes to fail.
        once = len(shape.losses) < state.settings.losses - 1 and is_deciding(state, shape.cost_s)
        most = 1 if once or not (shape.losses or shape.ends) else 0
        if (shape.faults or shape.losses or shape.ends) and shape.copies <= most and shape.apart is None:
            set_apart(state, (s,))
    wait(state, left)


def shorter(state: State, slot: Slot) -> None:
    """A faster `look`, for when the only change is that a running shape got its result."""
    slot.ahead_s = _ahead_s(state, slot)
    if slot.ahead_s < state.settings.ahead_s and slot.id not in state.low:
        look(state, slot)


def _ahead_s(state: State, slot: Slot) -> float:
    return sum(state.attempts[a].left_s for a in (slot.running, *slot.queued) if a is not None)


def look(state: State, slot: Slot) -> None:
    """Update the sums after a change of the slot, its GPU or its node."""
    node, place = state.nodes[slot.node], slot.gpu.place
    ours = node.state in ("joined", "away") and not node.draining and slot.state in ("starting", "ready")
    known = state.usable.get(place)
    if ours or known is slot:
        counts = state.hosts.setdefault(place[0], [0, 0])
        clean = ours and not slot.gpu.row
        counts[0] += ours - (known is not None)
        counts[1] += clean - (place in state.clean)
        if ours:
            state.usable[place] = slot
        else:
            del state.usable[place]
        for places, there in ((state.clean, clean), (state.free, ours and slot.running is None and not slot.queued)):
            if there:
                places[place] = None
            else:
                places.pop(place, None)
        if not counts[0]:
            del state.hosts[place[0]]
    slot.ahead_s = _ahead_s(state, slot)
    able = ours and node.state == "joined" and slot.state == "ready" and not slot.checking
    idle = able and slot.running is None and not slot.queued
    low = able and not idle and slot.ahead_s < state.settings.ahead_s and len(slot.queued) < state.settings.most_queued
    for slots, there in ((state.idle, idle), (state.low, low)):
        if there:
            slots[slot.id] = slot
        else:
            slots.pop(slot.id, None)
    if not ours and node.state == "joined":
        state.to_recall.update((q, None) for q in slot.queued if not state.attempts[q].taking)
