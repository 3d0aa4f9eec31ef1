"""Chooses the next decision of a run: verdicts, quarantines, canaries, and which group goes to which slot.

`Policy.handle` asks `decide` after each event, applies the decision, and asks again until there is none. Nothing here
changes the state. The neighbours: blame.py judges shapes and GPUs, work_queue.py keeps the lists that are read here
(`idle`, `running_low`, `waiting`, `kinds_by_longest`, `isolated`, `hedged`).

A group is the longest waiting unit and every k-th of the rest, so that each group is a mix and errors of the estimates
even out. Its size is a share of the work left for each slot (guided self-scheduling, Polychronopoulos and Kuck 1987),
but it is long enough that its set-up costs little. At the end an idle slot takes the later half of the rest of a
running group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from orchestrator.events import AskCanary, Decision, Quarantine, Send, TakeBack
from orchestrator.policy import blame
from orchestrator.policy.model import Attempt, Kind, Shape, Slot, State, WaitingUnit


def decide(state: State, now: float) -> Decision | None:
    """The next decision at `now` (epoch seconds), None if nothing is to be done. Apply it before you ask for the next.

    Verdicts come first, then quarantines, canaries, take-backs, and last new work. A run that is stopped only gets
    verdicts, quarantines and take-backs.
    """
    if state.decided:
        return blame.first_known_verdict(state)
    if state.to_quarantine:
        (node, slot), why = next(iter(state.to_quarantine.items()))
        return blame.quarantine_for(state, state.nodes[node].slots[slot], why, now)
    due_verdict = blame.next_verdict(state, now)
    if due_verdict is not None:
        return due_verdict
    canary = None if state.stopped else _next_canary(state, now)
    if canary is not None:
        return canary
    if state.to_recall:
        attempt = next(iter(state.to_recall))
        return TakeBack(attempt, state.attempts[attempt].node)
    return None if state.stopped else next_work(state)


def _next_canary(state: State, now: float) -> AskCanary | Quarantine | None:
    """The next canary to request: of a slot whose node is back, or whose quarantine is over. Instead a quarantine, if
    a requested canary was not answered in time. While its slot still runs an attempt, a request cannot be answered."""
    if state.to_ask_canary:
        return AskCanary(*next(iter(state.to_ask_canary)), f"canary-{len(state.canaries)}")
    for (node, name), due in state.canary_due.items():
        slot = state.nodes[node].slots[name]
        if due > now or (slot.requested_canary and slot.running is not None):
            continue
        if slot.requested_canary:
            why = f"no answer to its canary for {state.settings.canary_s:.0f} s"
            return blame.quarantine_for(state, slot, why, now)
        if state.nodes[node].state == "joined":
            return AskCanary(node, name, f"canary-{len(state.canaries)}")
    return None


def next_work(state: State) -> Send | TakeBack | None:
    """The next group to send, or to take back for an idle slot. None: no slot can get more.

    Isolated shapes come first, then second attempts of hedged units, then the queue. If nothing waits, idle slots get
    work that others have.
    """
    if not state.idle and not state.running_low:
        return None
    special = _send_isolated(state) or _send_hedged(state)
    if special is not None:
        return special
    if state.waiting:
        return _send_waiting(state)
    if not state.idle:
        return None
    work = _take_back_spare(state)
    if work is None and state.shares_end:
        return _send_end_of_another(state, next(iter(state.idle.values())))
    return work


def _send_isolated(state: State) -> Send | None:
    """Send shapes that run apart from others; those that were lost least often come first."""
    if not state.isolated:
        return None
    slots = [*state.idle.values(), *state.running_low.values()]
    clean_slots = [slot for slot in slots if not slot.gpu.fault_streak]
    for shapes in sorted(state.isolated.values(), key=lambda shapes: len(state.shapes[shapes[0]].losses)):
        shape = state.shapes[shapes[0]]
        for slot in clean_slots if _has_clean_slot(state, shape) else slots:
            if suits(state, shape, slot):
                return _send(state, slot, shapes)
    return None


def _send_hedged(state: State) -> Send | None:
    """Send a unit that decides the length of the run to a second host."""
    for host, shapes in state.hedged.values():
        for slot in state.idle.values():
            is_sound = not slot.gpu.fault_streak and not slot.is_doubtful
            if is_sound and slot.gpu.place[0] != host and suits(state, state.shapes[shapes[0]], slot):
                return _send(state, slot, shapes)
    return None


def _send_waiting(state: State) -> Send | None:
    """Send a group from the queue to an idle slot, or ahead to a slot that is running low."""
    if state.idle:
        idle_slot = next(iter(state.idle.values()))
        return _send(state, idle_slot, deal(state, idle_slot))
    per_slot_s = state.waiting_s / max(1, len(state.usable))
    is_only_slot = len(state.usable) == 1
    if not is_only_slot and per_slot_s <= state.settings.ahead_s / 6:
        return None  # near the end, work sent ahead is only taken back
    for slot in state.running_low.values():
        if not slot.is_doubtful and (is_only_slot or slot.ahead_s < per_slot_s):
            return _send(state, slot, deal(state, slot))
    return None


def _send(state: State, slot: Slot, shapes: tuple[int, ...]) -> Send:
    return Send(f"g{state.next_seq:04d}", slot.node, slot.name, state.next_seq, shapes)


def suits(state: State, shape: Shape, slot: Slot) -> bool:
    """Return whether a suspect shape may run on the slot.

    A node runs only one lost shape at a time, so that the next loss names its culprit; if few hosts are left, lost
    shapes run after all other work. A shape under which leases ended waits for one on which nothing ran yet. A shape
    that faulted runs on another node than before if there is one, else on another slot, else again here; slots whose
    last attempt ended well come first.
    """
    if shape.losses and not _may_run_lost_shape(state, slot):
        return False
    node = state.nodes[slot.node]
    needs_fresh_lease = len(shape.lease_ends) >= state.settings.fresh_after and state.may_grow
    if needs_fresh_lease and node.lease and node.used:
        return False
    bad_places = {fault.place for fault in shape.faults}
    if not bad_places:
        return True
    place = slot.gpu.place
    bad_hosts = {host for host, _ in bad_places}
    if len(state.hosts) > sum(host in state.hosts for host in bad_hosts):
        return place[0] not in bad_hosts and not (slot.gpu.fault_streak and _has_clean_slot(state, shape))
    has_other_place = len(state.usable) > sum(bad in state.usable for bad in bad_places)
    return place not in bad_places or not (has_other_place or state.may_grow)


def _may_run_lost_shape(state: State, slot: Slot) -> bool:
    has_few_hosts = len(state.hosts) < state.settings.few_hosts
    if slot.running is not None or (has_few_hosts and state.waiting):
        return False
    for other in state.nodes[slot.node].slots.values():
        for attempt in (other.running, *other.queued):
            if attempt is not None and state.shapes[state.attempts[attempt].shapes[0]].losses:
                return False
    return True


def _has_clean_slot(state: State, shape: Shape) -> bool:
    """Return whether a node where the shape did not fault has a slot whose last attempt ended well. If so, the shape
    must go to such a slot."""
    hosts = {fault.place[0] for fault in shape.faults}
    return bool(hosts) and len(state.clean) > sum(state.hosts[host][1] for host in hosts if host in state.hosts)


def deal(state: State, slot: Slot) -> tuple[int, ...]:
    """The next group for the slot. A doubtful slot gets the shortest unit, because a fault costs least there."""
    longest = state.kinds_by_longest[0].kind
    if slot.is_doubtful:
        kinds = [kind for kind in state.kinds.values() if kind.waiting and kind.tier == longest.tier]
        return max(kind.waiting[-1] for kind in kinds).shapes
    # a unit longer than a group decides when the run ends
    group_s = _group_seconds(state)
    has_long_unit = -longest.waiting[0].minus_s > group_s
    kind = longest if has_long_unit else state.kinds_by_seconds[0].kind
    if kind.alone:
        return kind.waiting[0].shapes
    if not state.shares_end:  # as few groups as possible, all about equal
        number = math.ceil(kind.seconds / max(group_s, 1e-9) - 1e-6)
        group_s = kind.seconds / max(1, number)  # 0 groups, if earlier runs say that a shape takes no time
    return _join(unit.shapes for unit in _sample(kind, group_s))


def _group_seconds(state: State) -> float:
    """Estimated seconds of the next group."""
    settings = state.settings
    if len(state.usable) == 1 and not state.may_grow:
        return state.waiting_s  # nobody waits for the end of a group
    share, setups = settings.share_apart, settings.floor_apart
    if state.shares_end:
        share, setups = settings.share, settings.floor_setups
    floor = min(setups * state.setup_s, state.waiting_s / max(1, len(state.free)))
    return max(state.waiting_s / (share * max(1, len(state.usable))), floor)


def _sample(kind: Kind, group_s: float) -> list[WaitingUnit]:
    """The longest unit of the kind, and every k-th of the rest up to `group_s` seconds."""
    waiting = kind.waiting
    group = [waiting[0]]
    room_s = group_s + waiting[0].minus_s
    if room_s <= 0 or len(waiting) == 1:
        return group
    step = max(1.0, (kind.seconds + waiting[0].minus_s) / room_s)
    position = step
    while position < len(waiting) + step - 1 and room_s > 0:
        unit = waiting[min(int(position), len(waiting) - 1)]
        if unit is not group[-1]:
            group.append(unit)
            room_s += unit.minus_s
        position += step
    return group


def _join(units: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(shape for unit in units for shape in unit)


def _take_back_spare(state: State) -> TakeBack | None:
    """Take back the last group in the inbox of the slot with the most work, for an idle slot. Groups that are being
    taken back already count for the idle slots that they are for."""
    if state.taking >= len(state.idle):
        return None
    with_inbox = (slot for slot in state.usable.values() if slot.queued and slot.running is not None)
    for slot in sorted(with_inbox, key=lambda slot: -slot.ahead_s):
        attempt = state.attempts[slot.queued[-1]]
        # a suspect would move back and forth, because `suits` may send it to the same slot again
        if not attempt.is_being_taken and not _is_suspect(state.shapes[attempt.shapes[0]]):
            return TakeBack(attempt.id, attempt.node)
    return None


def _send_end_of_another(state: State, slot: Slot) -> Send | None:
    """Send an idle slot the later half of the rest of the running group that has the most work, the last unit first."""
    longest = _longest_to_share(state)
    if longest is None:
        return None
    units: dict[int, list[int]] = {}
    for s in longest.shapes:
        if _may_copy(state, s):
            units.setdefault(state.shapes[s].unit, []).append(s)
    later_half = list(units.values())[len(units) // 2 :]
    return _send(state, slot, _join(reversed(later_half)))


def _longest_to_share(state: State) -> Attempt | None:
    """The running attempt with the most work left that has a shape to give away."""
    if not state.held_once:
        return None
    longest: Attempt | None = None
    for slot in state.usable.values():
        attempt = state.attempts[slot.running] if slot.running is not None else None
        if attempt is None or not attempt.held_once:
            continue
        is_longer = longest is None or attempt.left_s > longest.left_s
        if is_longer and any(_may_copy(state, s) for s in reversed(attempt.shapes)):
            longest = attempt
    return longest


def _may_copy(state: State, s: int) -> bool:
    """Return whether a second attempt may measure the shape too; the first result counts."""
    shape = state.shapes[s]
    return not _is_suspect(shape) and shape.state == "pending" and shape.copies < 2 and shape.isolated_with is None


def _is_suspect(shape: Shape) -> bool:
    return bool(shape.faults or shape.losses or shape.lease_ends)
