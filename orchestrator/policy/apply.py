"""Applies events and decisions to the state, with one function for each type. Nothing else interprets a record.

`EVENTS` are facts from outside; `DECISIONS` are the answers of `decide`. A record that does not fit the state changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator import events as ev
from orchestrator.policy import blame
from orchestrator.policy.model import Attempt, Gpu, Kind, Node, Shape, Slot, State
from orchestrator.policy.pool import (
    add_single,
    close,
    hold,
    holder,
    is_deciding,
    look,
    put_back,
    queue,
    set_apart,
    set_noisy_apart,
    shorter,
    wait,
    withdraw,
    withdraw_unit,
)
from orchestrator.reasons import Reason

RELEASED = "released"
"""We gave the lease back ourselves: none of its processes was killed."""
NO_HOPE = 30
"""Strikes for a slot whose tuner can never start, so that nobody waits for it."""
TIMED = 200
"""Timed canaries that we keep for a slot."""


def apply(state: State, record: ev.Record, t: float) -> None:
    """Apply a record of the journal to the state, at time `t` (epoch seconds)."""
    kind = type(record)
    if kind is ev.Tick:
        return  # it is not journaled
    if state.last_t is None or t > state.last_t:
        state.last_t = t
    if kind is not ev.WorkAdded:
        state.first_t = t if state.first_t is None else state.first_t
        if kind is ev.Resumed:
            state.sessions.append([t, t])
        elif state.sessions:
            state.sessions[-1][1] = state.last_t
    change = _CHANGES.get(kind)
    if change is not None:
        change(state, record, t)


def _work_added(state: State, e: ev.WorkAdded, t: float) -> None:
    state.kinds.setdefault(e.kind, Kind(e.tier, e.alone))
    state.setup_s, state.shares_end = e.setup_s, e.shares_end
    for unit, costs in zip(e.units, e.costs_s, strict=True):
        for s, cost in zip(unit, costs, strict=True):
            state.shapes[s] = Shape(s, unit[0], e.kind, cost)
        seconds = sum(costs)
        state.left_s += seconds
        state.total_s += seconds
        queue(state, unit[0], unit, seconds)


def _retry_asked(state: State, e: ev.RetryAsked, t: float) -> None:
    for shape in (state.shapes[s] for s in e.shapes if s in state.shapes):
        if shape.state == "failed":
            _reopen(state, shape)
            wait(state, [shape.id])
        elif shape.state == "tuned" and shape.confirmed is not False:
            set_noisy_apart(state, _measure_again(state, shape, state.attempts[shape.attempt], t))


def _reopen(state: State, shape: Shape) -> Shape:
    """Make a settled shape pending again, with fresh tries. It is not queued yet."""
    a = state.attempts.get(shape.attempt)
    for books in (state, state.nodes[a.node]) if a is not None else (state,):
        if shape.state == "failed":
            books.failed -= 1
        else:
            books.tuned -= 1
    fresh = Shape(shape.id, shape.unit, shape.kind, shape.cost_s)
    fresh.attempts, fresh.copies = shape.attempts, shape.copies
    state.shapes[shape.id] = fresh
    if fresh.copies == 1:
        add_single(state, holder(state, fresh), 1)
    state.left_s += fresh.cost_s
    return fresh


def _measure_again(state: State, noisy: Shape, a: Attempt, t: float) -> list[int]:
    """Take back what the attempt found for the noisy shape and for the others of its unit: they are decided together.
    Return these shapes. As if candidates had been left out, they go to another slot if there is one."""
    members = _members(state, noisy, a)
    for shape in members:
        is_new = shape.id in a.landed and all(f.attempt != a.id for f in shape.faults)
        if shape.state == "tuned":
            shape = _reopen(state, shape)
        shape.noisy = shape.result = a.id
        if is_new:
            blame.fault(state, shape, a, Reason.FAULT, "", t, frozenset({ev.NOISE}), here=False)
    return [shape.id for shape in members]


def _members(state: State, shape: Shape, a: Attempt) -> list[Shape]:
    """The shapes of a unit that an attempt has tuned or may tune."""
    unit = [state.shapes[s] for s in a.shapes if state.shapes[s].unit == shape.unit]
    return [s for s in unit if s.state == "pending" or (s.state == "tuned" and s.attempt == a.id)]


def _may_measure_again(state: State, shape: Shape, a: Attempt) -> bool:
    """Return whether a noisy result is measured again. If so, its time is taken from the tenth for such work."""
    if shape.noisy or state.stop_why:
        return False
    cost = state.setup_s + sum(s.cost_s for s in _members(state, shape, a))
    if state.again_s + cost > state.settings.again * state.total_s:
        return False
    state.again_s += cost
    return True


def _stop_asked(state: State, e: ev.StopAsked, t: float) -> None:
    state.stopped, state.stop_why = True, e.why
    for shape in state.shapes.values():
        if e.why and shape.noisy and shape.state == "pending":
            state.ripe[shape.id] = blame.keep_result(shape, e.why)
    state.to_recall.update((a, None) for a in state.open if _is_unclaimed(state.attempts[a]))


def _is_unclaimed(a: Attempt) -> bool:
    return a.state == "sent" and not a.taking


def _resumed(state: State, e: ev.Resumed, t: float) -> None:
    """Nodes get no work until they join again: only then do we know how much of the work sent there is left."""
    state.stopped, state.stop_why, state.epoch = False, "", e.epoch
    state.timers.clear()
    for n in state.nodes.values():
        if n.state != "gone":
            n.draining = False
            _set_node(state, n, "away", "", t)
        for slot in n.slots.values():
            slot.gpu.strikes = 0  # the user expects it to work again


def _send(state: State, d: ev.Send, t: float) -> None:
    slot, shapes = state.nodes[d.node].slots[d.slot], [state.shapes[s] for s in d.shapes]
    cost = sum(s.cost_s for s in shapes)
    a = state.attempts[d.attempt] = Attempt(d.attempt, d.node, d.slot, d.seq, d.shapes, cost, cost, t)
    state.open[a.id] = None
    state.next_seq = max(state.next_seq, d.seq + 1)
    state.nodes[d.node].used = True
    for unit in dict.fromkeys(s.unit for s in shapes):
        members = tuple(s.id for s in shapes if s.unit == unit)
        is_second = unit in state.twice or any(state.shapes[s].copies or state.shapes[s].losses for s in members)
        withdraw_unit(state, unit, members)
        for s in members:
            withdraw(state, state.shapes[s])
        if not is_second and is_deciding(state, sum(state.shapes[s].cost_s for s in members)):
            state.twice[unit] = (state.nodes[d.node].host, members)
    for shape in shapes:
        hold(state, shape, a, 1)
        shape.attempts.append(a.id)
    slot.queued.append(a.id)
    look(state, slot)


def _take_back(state: State, d: ev.TakeBack, t: float) -> None:
    state.to_recall.pop(d.attempt, None)
    a = state.attempts[d.attempt]
    if _is_unclaimed(a):
        a.taking = True
        state.taking += 1


def _attempt_taken(state: State, e: ev.AttemptTaken, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is None or a.state == "over":
        return
    state.taking -= a.taking
    a.taking = False
    if e.won:
        in_flight = state.flight(a) if a.state == "started" else None
        if in_flight is not None:  # the node no longer knows of it
            blame.lose(state, in_flight, a, with_node=True, detail="the node no longer knows of the attempt")
        close(state, a, t, lost=a.state == "started")
        put_back(state, a)


def _attempt_started(state: State, e: ev.AttemptStarted, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is None or _is_over(state, a, t) or a.state == "started":
        return
    slot = state.slot_of(a)
    state.taking -= a.taking
    state.running += 1
    a.state, a.taking, a.started_at, a.moved_at = "started", False, t, t
    state.to_recall.pop(a.id, None)
    slot.queued.remove(a.id)
    slot.running, slot.adrift, slot.checking = a.id, None, False
    look(state, slot)


def _is_over(state: State, a: Attempt, t: float) -> bool:
    """Return whether the attempt is over. If it was only given up, this sign of life takes that back: a node that
    returns late loses nothing."""
    if a.state != "over":
        return False
    slot, node = state.slot_of(a), state.nodes[a.node]
    if not a.lost or node.state != "joined" or slot.state == "lost" or slot.running is not None:
        return True
    state.running += 1
    state.open[a.id] = None
    a.state, a.lost, a.revived, a.ended_at, a.outcome = "started", False, True, None, None
    a.started_at = t if a.started_at is None else a.started_at
    for shape in (state.shapes[s] for s in a.shapes):
        hold(state, shape, a, 1)
        if shape.state == "pending":
            withdraw(state, shape)
    slot.running, slot.adrift = a.id, None
    look(state, slot)
    return False


def _shape_started(state: State, e: ev.ShapeStarted, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is not None and not _is_over(state, a, t):
        a.current, a.current_at, a.moved_at = e.shape, t, t


def _shape_tuned(state: State, e: ev.ShapeTuned, t: float) -> None:
    a, shape = _landed(state, e, t)
    if a is None or shape is None:
        return
    slot = state.slot_of(a)
    in_doubt = bool(slot.gpu.row or slot.gpu.strikes)
    if a.state == "started" and e.complete:
        slot.gpu.tuned += 1
        blame.proved(state, slot.gpu)
    if a.state == "started":
        (look if in_doubt else shorter)(state, slot)
    if shape.state != "pending":
        return
    if not e.complete:
        shape.result = a.id
        more = ((f"more of {a.id}",),) if e.cut else ()
        left_out = frozenset((*e.withheld, *more)) - {ev.NOISE}
        blame.fault(state, shape, a, Reason.FAULT, "", t, left_out, here=_is_news(e))
    elif shape.noisy == a.id or (e.noisy and _may_measure_again(state, shape, a)):
        _measure_again(state, shape, a, t)
    elif e.noisy:
        why = "its time is noise, measured twice" if shape.noisy else "its time is noise"
        state.ripe[shape.id] = ev.SettleShape(shape.id, a.id, True, why)
    else:
        _settle_tuned(state, shape, a, t, None, "")


def _shape_refused(state: State, e: ev.ShapeRefused, t: float) -> None:
    a, shape = _landed(state, e, t)
    if a is not None and a.state == "started":
        look(state, state.slot_of(a))
    if a is None or shape is None or shape.state != "pending":
        return
    if e.complete:
        state.ripe[e.shape] = ev.FailShape(e.shape, e.reason, e.detail, e.attempt, True)
    else:
        blame.fault(state, shape, a, e.reason, e.detail, t, here=_is_news(e))


def _is_news(e: ev.ShapeTuned | ev.ShapeRefused) -> bool:
    """Return whether a candidate faulted in this run. Older faults say nothing about the slot now."""
    return e.cut or not set(e.withheld) <= set(e.earlier)


def _landed(
    state: State, e: ev.ShapeTuned | ev.ShapeRefused, t: float
) -> tuple[Attempt | None, Shape | None]:  # fmt: skip
    """The attempt and shape of a result."""
    a, shape = state.attempts.get(e.attempt), state.shapes.get(e.shape)
    if a is None or shape is None:
        return None, None
    if not _is_over(state, a, t) and a.revived:
        _forgive(state, a)
    if e.shape not in a.landed:
        a.landed[e.shape] = None
        a.left_s = max(0.0, a.left_s - shape.cost_s)
    a.current, a.moved_at = None, t
    return a, shape


def _settle_tuned(state: State, shape: Shape, a: Attempt, t: float, confirmed: bool | None, detail: str) -> None:
    _settle(state, shape, t)
    shape.state, shape.confirmed, shape.detail, shape.attempt = "tuned", confirmed, detail, a.id
    state.tuned += 1
    state.tuned_at.append(t)
    state.nodes[a.node].tuned += 1
    blame.passed(state, shape, state.slot_of(a).gpu.place)


def _settle(state: State, shape: Shape, t: float) -> None:
    """Take the shape out of the queues, and attempts that have no other shape out of their inboxes."""
    withdraw(state, shape)
    if shape.copies == 1:
        add_single(state, holder(state, shape), -1)
    state.held.pop(shape.id, None)
    state.ripe.pop(shape.id, None)
    shape.settled_at = t
    state.left_s -= shape.cost_s
    for a in (state.attempts[i] for i in shape.attempts if shape.copies):
        others = (s for s in a.shapes if s != shape.id)
        if _is_unclaimed(a) and all(state.shapes[s].state != "pending" for s in others):
            state.to_recall[a.id] = None


def _settle_shape(state: State, d: ev.SettleShape, t: float) -> None:
    shape = state.shapes[d.shape]
    if shape.state == "pending":
        _settle_tuned(state, shape, state.attempts[d.attempt], t, d.confirmed, d.detail)


def _fail_shape(state: State, d: ev.FailShape, t: float) -> None:
    shape = state.shapes[d.shape]
    if shape.state == "pending":
        _settle(state, shape, t)
        shape.state, shape.reason, shape.detail = "failed", d.reason, d.detail
        shape.confirmed, shape.attempt = d.confirmed, d.attempt or ""
        state.failed += 1
        if shape.attempt in state.attempts:
            state.nodes[state.attempts[shape.attempt].node].failed += 1


def _attempt_ended(state: State, e: ev.AttemptEnded, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is None:
        return
    slot, was_over = state.slot_of(a), a.state == "over"
    if not was_over or a.lost:
        a.outcome, a.detail, a.seconds, a.in_flight = e.outcome, e.detail, e.seconds, e.in_flight
    if was_over:
        _ended_late(state, e, a, slot, t)
        return
    if e.in_flight is not None:
        a.current = e.in_flight
    if a.revived:
        _forgive(state, a, e.in_flight if e.outcome.is_loss else None)
    left, bad = state.unsettled(a.shapes), e.outcome.may_blame_slot
    shape = state.shapes[left[0]] if len(left) == 1 and a.current is None else state.flight(a)
    if bad or e.outcome.is_loss:
        slot.checking, slot.last = True, None
    if bad and (a.current is not None or len(left) == 1):
        if shape is not None:
            slot.last = (shape.id, a.id)
            blame.fault(state, shape, a, e.outcome, e.detail, t)
    elif e.outcome.is_loss and shape is not None:
        blame.lose(state, shape, a, with_node=e.outcome is Reason.NODE_LOST, detail=e.detail)
    elif e.outcome in (Reason.DONE, Reason.NOT_DELIVERED, Reason.REJECTED):
        for s in left:
            if all(f.attempt != a.id for f in state.shapes[s].faults):
                reason = Reason.REJECTED if e.outcome is Reason.REJECTED else Reason.NOT_DELIVERED
                blame.tried(state, state.shapes[s], reason, a.id)
    elif e.outcome is Reason.DISK_FULL:
        for other in state.nodes[a.node].slots.values():
            blame.shut(state, other.gpu.place, f"the node's disk is full: {e.detail}")
    halves = bad and a.current is None
    close(state, a, t)
    put_back(state, a, halves=halves)
    if slot.canary:
        state.timers[slot.id] = t + state.settings.canary_s  # only now can its worker answer


def _ended_late(state: State, e: ev.AttemptEnded, a: Attempt, slot: Slot, t: float) -> None:
    """An attempt that was given up has ended. Only the shape that was in flight is charged with the loss."""
    if slot.adrift == a.id:
        slot.adrift = None
        if slot.canary:
            state.timers[slot.id] = t + state.settings.canary_s
    if not a.lost:
        return
    _forgive(state, a, e.in_flight if e.outcome.is_loss else None)
    culprit = state.shapes[e.in_flight] if e.outcome.is_loss and e.in_flight is not None else None
    if culprit is not None and culprit.state == "pending":
        blame.lose(state, culprit, a, with_node=True, detail=e.detail)
        if culprit.unit in state.waiting and culprit.id in state.waiting[culprit.unit][2]:
            set_apart(state, (culprit.id,))


def _forgive(state: State, a: Attempt, culprit: int | None = None) -> None:
    """Strike out the attempt's evidence against its shapes, except the `culprit`: it was given up too early."""
    a.revived = False
    for shape in (state.shapes[s] for s in a.shapes):
        if shape.state == "pending" and shape.id != culprit:
            blame.strike_out(state, shape, a.id)


def _set_node(state: State, n: Node, to: Any, why: str, t: float) -> None:
    n.state, n.why = to, why
    n.history.append((t, to, why))
    for slot in n.slots.values():
        look(state, slot)


def _set_slot(state: State, slot: Slot, to: Any, why: str, t: float) -> None:
    if (to, why) != (slot.state, slot.why):
        slot.state, slot.why = to, why
        slot.history.append((t, to, why))
    look(state, slot)


def _known(state: State, e: ev.NodeExpected | ev.NodeJoined, host: str, gpus: tuple[str, ...], t: float) -> Node:
    """The node with at least these slots, none of them lost. If another lease had a GPU before, its evidence stays."""
    n = state.nodes.get(e.node)
    if n is None:
        n = state.nodes[e.node] = Node(e.node, host or e.node)
    for name, gpu in zip(e.slots, gpus or ("",) * len(e.slots), strict=False):
        slot = n.slots.get(name)
        if slot is None:
            place = (n.host, gpu or (name if n.host == n.name else f"{n.name}/{name}"))
            known = state.gpus.setdefault(place, Gpu(place))
            slot = n.slots[name] = Slot(n.name, name, known)
            if known.shut:
                _set_slot(state, slot, "quarantined", known.shut, t)
        elif slot.state == "lost":
            _set_slot(state, slot, "starting", "", t)
    return n


def _node_expected(state: State, e: ev.NodeExpected, t: float) -> None:
    """From now on its slots count in every share and verdict, because they will be ready soon."""
    known = state.nodes.get(e.node)
    if known is not None and known.state in ("joined", "gone"):
        return
    n = _known(state, e, e.host, e.gpus, t)
    n.lease, n.pool, n.ends_at = e.lease or n.lease, e.pool or n.pool, e.ends_at or n.ends_at
    _set_node(state, n, "away", "", t)


def _node_joined(state: State, e: ev.NodeJoined, t: float) -> None:
    known = state.nodes.get(e.node)
    if known is not None and known.state == "gone":
        return
    n = _known(state, e, "", (), t)
    _set_node(state, n, "joined", "", t)
    for name, slot in n.slots.items():
        if name not in e.slots:
            state.timers.pop(slot.id, None)
            _set_slot(state, slot, "lost", "the node no longer has it", t)
        # its worker may have survived, and then runs no canary by itself; a requested canary was lost with the inbox
        elif n.owes_canaries or slot.canary:
            state.to_ask[slot.id] = None
        elif slot.state == "quarantined":
            state.timers[slot.id] = slot.gpu.until
    n.owes_canaries = False


def _node_troubled(state: State, e: ev.NodeTroubled, t: float) -> None:
    n = state.nodes.get(e.node)
    if n is not None:
        n.why = e.detail
        n.history.append((t, "trouble", e.detail))


def _node_busy(state: State, e: ev.NodeBusy, t: float) -> None:
    """A node that others occupy is not counted on: no share and no verdict waits for it."""
    n = state.nodes.get(e.node)
    if n is not None and e.doing == "share":
        n.history.append((t, "shared", e.detail))
    elif n is not None and n.state in ("away", "busy"):
        _set_node(state, n, "busy" if e.doing == "wait" else "away", "" if e.doing == "free" else e.detail, t)
    elif n is not None and n.state == "joined":  # its workers found the devices taken after it had joined
        n.why = e.detail if e.doing == "wait" else ""
        n.history.append((t, "busy" if e.doing == "wait" else "joined", n.why))


def _node_lost(state: State, e: ev.NodeLost, t: float) -> None:
    n = state.nodes.get(e.node)
    if n is not None and n.state not in ("lost", "gone"):
        _set_node(state, n, "lost", e.detail, t)
        n.owes_canaries = True
        for slot in n.slots.values():
            slot.adrift = slot.running or slot.adrift
            _give_up(state, slot, e.detail, t, with_node=True)
            if slot.state != "lost":
                _set_slot(state, slot, "starting", "", t)


def _give_up(state: State, slot: Slot, detail: str, t: float, *, with_node: bool) -> None:
    """Count everything that the slot had as lost. Our news is some milliseconds old: on a lost node the next shape may
    have started too, even if we were waiting for a canary or for the answer to a take-back."""
    had = [state.attempts[i] for i in (slot.running, *slot.queued) if i is not None]
    ahead = [(a, state.shapes[s]) for a in had for s in a.ahead]
    unheard = with_node and not slot.sick
    for a, shape in ahead[: (slot.running is not None) + unheard]:
        if shape.state == "pending":
            blame.lose(state, shape, a, with_node=with_node, detail=detail)
    for a in had:
        a.detail = a.detail or detail
        close(state, a, t, lost=True)
        put_back(state, a)
    _clear(state, slot)


def _clear(state: State, slot: Slot) -> None:
    """Stop waiting for anything from the slot."""
    slot.checking, slot.sick, slot.canary, slot.last = False, False, "", None
    state.to_ask.pop(slot.id, None)
    state.to_shut.pop(slot.id, None)
    state.timers.pop(slot.id, None)


def _lease_ended(state: State, e: ev.LeaseEnded, t: float) -> None:
    """The lease's node will not return. Without a charge nobody is blamed, not even for an attempt that ended badly
    just before: a scheduler kills the processes first."""
    n = state.nodes.get(e.node)
    if n is None or n.state == "gone":
        return
    if e.charged:
        _node_lost(state, ev.NodeLost(e.node, e.detail), t)
    elif e.cause != RELEASED:
        for a in [a for a in state.attempts.values() if a.node == n.name and a.ended_at is not None]:
            came_with = n.state == "lost" if a.lost else (a.ended_at or 0.0) >= t - state.settings.came_with_s
            for shape in (state.shapes[s] for s in a.shapes if came_with):
                if blame.strike_out(state, shape, a.id) and shape.state == "pending":
                    blame.ended_under(state, shape, a, e.cause)
    for slot in n.slots.values():
        for a in (state.attempts[i] for i in [*([slot.running] if slot.running else []), *slot.queued]):
            under = state.flight(a) if a.state == "started" and e.cause != RELEASED else None
            if under is not None:
                blame.ended_under(state, under, a, e.cause)
            a.outcome, a.detail = Reason.LEASE_ENDED, e.detail
            close(state, a, t)
            put_back(state, a)
        slot.adrift = None
        _clear(state, slot)
        _set_slot(state, slot, "lost", f"its lease ended: {e.detail}", t)
    cause = blame.cause_words(e.cause)
    _set_node(state, n, "gone", f"{cause}: {e.detail}" if e.detail else cause, t)


def _leases_queued(state: State, e: ev.LeasesQueued, t: float) -> None:
    state.queued_leases[e.pool] = e.leases


def _fleet_may_grow(state: State, e: ev.FleetMayGrow, t: float) -> None:
    state.may_grow = e.more


def _node_draining(state: State, e: ev.NodeDraining, t: float) -> None:
    n = state.nodes.get(e.node)
    if n is not None:
        n.draining = True
        n.history.append((t, "draining", ""))
        for slot in n.slots.values():
            look(state, slot)


def _slot_lost(state: State, e: ev.SlotLost, t: float) -> None:
    slot = state.slot(e.node, e.slot)
    if slot is not None and slot.state != "lost":
        slot.adrift = None
        _set_slot(state, slot, "lost", e.detail, t)
        _give_up(state, slot, e.detail, t, with_node=False)


def _awaited(state: State, e: ev.CanaryPassed | ev.CanaryFailed) -> Slot | None:
    slot = state.slot(e.node, e.slot)
    there = slot is not None and slot.state != "lost" and state.nodes[e.node].state not in ("lost", "gone")
    return slot if there else None


def _canary_passed(state: State, e: ev.CanaryPassed, t: float) -> None:
    slot = _awaited(state, e)
    if slot is None:
        return
    slot.checking, slot.adrift, slot.last, slot.gpu.passed = False, None, None, True
    slot.canary_us.append(e.us)
    state.to_ask.pop(slot.id, None)
    # if something other than a canary caused the quarantine, only the canary that we request at its end can end it
    if slot.state != "quarantined" or slot.sick or slot.canary:
        slot.canary, slot.gpu.shut = "", ""
        state.timers.pop(slot.id, None)
        _set_slot(state, slot, "ready", "", t)
    slot.sick = False
    look(state, slot)


def _canary_failed(state: State, e: ev.CanaryFailed, t: float) -> None:
    slot = _awaited(state, e)
    if slot is None:
        return
    blame.wedged(state, slot)
    slot.sick, slot.checking, slot.canary, slot.adrift, slot.last = True, False, "", None, None
    slot.history.append((t, "canary failed", e.detail))
    if e.final:
        slot.gpu.strikes = max(slot.gpu.strikes, NO_HOPE)
    state.to_shut[slot.id] = f"the canary failed: {e.detail}"


def _canary_timed(state: State, e: ev.CanaryTimed, t: float) -> None:
    slot = state.slot(e.node, e.slot)
    if slot is not None:
        slot.timed.append((t, e))
        del slot.timed[:-TIMED]


def _quarantine(state: State, d: ev.Quarantine, t: float) -> None:
    slot = state.nodes[d.node].slots[d.slot]
    state.to_shut.pop(slot.id, None)
    state.to_ask.pop(slot.id, None)
    slot.checking, slot.canary = False, ""
    slot.gpu.shut, slot.gpu.until = d.why, d.until
    slot.gpu.strikes += 1
    slot.gpu.marks.clear()
    state.timers[slot.id] = d.until
    _set_slot(state, slot, "quarantined", d.why, t)
    blame.void(state, slot.gpu)
    look(state, slot)


def _ask_canary(state: State, d: ev.AskCanary, t: float) -> None:
    slot = state.nodes[d.node].slots[d.slot]
    state.to_ask.pop(slot.id, None)
    state.canaries[d.attempt] = slot.id
    slot.canary = d.attempt
    state.timers[slot.id] = t + (state.settings.adrift_s if slot.adrift else state.settings.canary_s)


_CHANGES: dict[type[ev.Record], Callable[[State, Any, float], None]] = {
    ev.WorkAdded: _work_added,
    ev.RetryAsked: _retry_asked,
    ev.StopAsked: _stop_asked,
    ev.Resumed: _resumed,
    ev.NodeExpected: _node_expected,
    ev.NodeJoined: _node_joined,
    ev.NodeTroubled: _node_troubled,
    ev.NodeBusy: _node_busy,
    ev.NodeLost: _node_lost,
    ev.NodeDraining: _node_draining,
    ev.LeaseEnded: _lease_ended,
    ev.LeasesQueued: _leases_queued,
    ev.FleetMayGrow: _fleet_may_grow,
    ev.SlotLost: _slot_lost,
    ev.CanaryPassed: _canary_passed,
    ev.CanaryFailed: _canary_failed,
    ev.CanaryTimed: _canary_timed,
    ev.AttemptStarted: _attempt_started,
    ev.ShapeStarted: _shape_started,
    ev.ShapeTuned: _shape_tuned,
    ev.ShapeRefused: _shape_refused,
    ev.AttemptEnded: _attempt_ended,
    ev.AttemptTaken: _attempt_taken,
    ev.Send: _send,
    ev.TakeBack: _take_back,
    ev.FailShape: _fail_shape,
    ev.SettleShape: _settle_shape,
    ev.Quarantine: _quarantine,
    ev.AskCanary: _ask_canary,
}
