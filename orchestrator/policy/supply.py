"""Chooses the next work: which slot gets which shapes. Pure: it reads the state and changes nothing.

A group is the longest waiting unit and every k-th of the rest, so that each group is a mix and errors of the estimates
even out. Its size is a share of the work left for each slot (guided self-scheduling, Polychronopoulos and Kuck 1987),
but it is long enough that its set-up costs little. At the end an idle slot takes the later half of the rest of a
running group.
"""

from __future__ import annotations

import math

from orchestrator.events import Send, TakeBack
from orchestrator.policy.model import Attempt, Kind, Shape, Slot, State, Waiting


def next_work(state: State) -> Send | TakeBack | None:
    """The next group to send, or to take back for an idle slot. None: no slot can get more."""
    if not state.idle and not state.low:
        return None
    able = [*state.idle.values(), *state.low.values()] if state.apart else []
    clean = [slot for slot in able if not slot.gpu.row]
    for shapes in sorted(state.apart.values(), key=lambda shapes: len(state.shapes[shapes[0]].losses)):
        shape = state.shapes[shapes[0]]
        for slot in clean if _has_clean(state, shape) else able:
            if suits(state, shape, slot):
                return _send(state, slot, shapes)
    for host, shapes in state.twice.values():
        for slot in state.idle.values():
            fits = slot.gpu.place[0] != host and not slot.gpu.row and not slot.doubtful
            if fits and suits(state, state.shapes[shapes[0]], slot):
                return _send(state, slot, shapes)
    if state.waiting:
        for slot in state.idle.values():
            return _send(state, slot, deal(state, slot))
        per_slot, alone = state.waiting_s / max(1, len(state.usable)), len(state.usable) == 1
        if alone or per_slot > state.settings.ahead_s / 6:  # near the end, work sent ahead is only taken back
            for slot in state.low.values():
                if (alone or slot.ahead_s < per_slot) and not slot.doubtful:
                    return _send(state, slot, deal(state, slot))
        return None
    if not state.idle:
        return None
    return _spare(state) or (_end_of_another(state, next(iter(state.idle.values()))) if state.shares_end else None)


def _send(state: State, slot: Slot, shapes: tuple[int, ...]) -> Send:
    return Send(f"g{state.next_seq:04d}", slot.node, slot.name, state.next_seq, shapes)


def suits(state: State, shape: Shape, slot: Slot) -> bool:
    """Return whether a suspect shape may run on the slot: on another node than before if there is one, else on another
    slot, else again here; slots whose last attempt ended well come first. A node runs only one lost shape at a time, so
    that the next loss names its culprit. If few hosts are left, lost shapes run after all other work."""
    node = state.nodes[slot.node]
    few = len(state.hosts) < state.settings.few_hosts
    if shape.losses and (slot.running is not None or (few and state.waiting)):
        return False
    if shape.losses and any(_is_suspect(state, a) for s in node.slots.values() for a in (s.running, *s.queued)):
        return False
    if len(shape.ends) >= state.settings.fresh_after and state.may_grow and node.lease and node.used:
        return False
    bad = {f.place for f in shape.faults}
    if not bad:
        return True
    hosts, place = {host for host, _ in bad}, slot.gpu.place
    if len(state.hosts) > sum(host in state.hosts for host in hosts):
        return place[0] not in hosts and not (slot.gpu.row and _has_clean(state, shape))
    if len(state.usable) > sum(p in state.usable for p in bad):
        return place not in bad
    return place not in bad or not state.may_grow


def _has_clean(state: State, shape: Shape) -> bool:
    """Return whether a node where the shape did not fault has a slot whose last attempt ended well. If so, the shape
    must go to such a slot."""
    hosts = {f.place[0] for f in shape.faults}
    return bool(hosts) and len(state.clean) > sum(state.hosts[host][1] for host in hosts if host in state.hosts)


def _is_suspect(state: State, attempt: str | None) -> bool:
    return attempt is not None and bool(state.shapes[state.attempts[attempt].shapes[0]].losses)


def deal(state: State, slot: Slot) -> tuple[int, ...]:
    """The next group for the slot. A doubtful slot gets the shortest unit, because a fault costs least there."""
    if slot.doubtful:
        first = state.by_left[0][0]
        return max(kind.waiting[-1] for tier, _, _, kind in state.by_left if tier == first)[2]
    s, free = state.settings, max(1, len(state.free))
    share, setups = (s.share, s.floor_setups) if state.shares_end else (s.share_apart, s.floor_apart)
    room = state.waiting_s / (share * max(1, len(state.usable)))
    room = max(room, min(setups * state.setup_s, state.waiting_s / free))
    if len(state.usable) == 1 and not state.may_grow:
        room = state.waiting_s  # nobody waits for the end of a group
    # first the kind that gives the longest group; if several do, the one with the most work left
    kinds = (state.by_left[0][-1], state.by_unit[0][-1])
    kind = max(kinds, key=lambda kind: max(-kind.waiting[0][0], min(kind.seconds, room)))
    if kind.alone:
        return kind.waiting[0][2]
    if not state.shares_end:  # as few groups as possible, all about equal
        room = kind.seconds / math.ceil(kind.seconds / max(room, 1e-9) - 1e-6)
    return tuple(i for unit in _sample(kind, room) for i in unit[2])


def _sample(kind: Kind, room: float) -> list[Waiting]:
    """The longest unit of the kind, and every k-th of the rest up to `room` seconds."""
    waiting = kind.waiting
    out = [waiting[0]]
    room += waiting[0][0]
    if room <= 0 or len(waiting) == 1:
        return out
    step = max(1.0, (kind.seconds + waiting[0][0]) / room)
    at = step
    while at < len(waiting) + step - 1 and room > 0:
        unit = waiting[min(int(at), len(waiting) - 1)]
        if unit is not out[-1]:
            out.append(unit)
            room += unit[0]
        at += step
    return out


def _spare(state: State) -> TakeBack | None:
    """Take back the last group in the inbox of the slot with the most work, for an idle slot."""
    if state.taking >= len(state.idle):
        return None
    full = (slot for slot in state.usable.values() if slot.queued and slot.running is not None)
    for slot in sorted(full, key=lambda slot: -slot.ahead_s):
        a = state.attempts[slot.queued[-1]]
        if not a.taking and not _is_picky(state.shapes[a.shapes[0]]):  # else it might move back and forth
            return TakeBack(a.id, a.node)
    return None


def _end_of_another(state: State, slot: Slot) -> Send | None:
    """Send an idle slot the later half of the rest of the running group that has the most work, the last unit first."""
    if not state.single:
        return None
    best: Attempt | None = None
    for other in state.usable.values():
        if other.running is not None:
            a = state.attempts[other.running]
            more = a.single and (best is None or a.left_s > best.left_s)
            if more and any(_may_copy(state, s) for s in reversed(a.shapes)):
                best = a
    if best is None:
        return None
    units: dict[int, list[int]] = {}
    for s in best.shapes:
        if _may_copy(state, s):
            units.setdefault(state.shapes[s].unit, []).append(s)
    half = list(units.values())[len(units) // 2 :]
    return _send(state, slot, tuple(s for unit in reversed(half) for s in unit))


def _may_copy(state: State, s: int) -> bool:
    shape = state.shapes[s]
    return not _is_picky(shape) and shape.state == "pending" and shape.copies < 2 and shape.apart is None


def _is_picky(shape: Shape) -> bool:
    return bool(shape.faults or shape.losses or shape.ends)
