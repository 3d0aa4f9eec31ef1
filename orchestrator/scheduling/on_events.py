"""What each event does to the state. Facts only: evidence is written down here and judged in `blame` and `health`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator import events as ev
from orchestrator.reasons import Reason
from orchestrator.scheduling.model import Attempt, Ending, Fault, Group, Node, Slot
from orchestrator.scheduling.state import Mystery, State


def group_added(state: State, e: ev.GroupAdded, t: float) -> None:
    if e.group not in state.book.groups:
        state.enqueue(state.book.add(e.group, e.shapes, e.cost_s))


def retry_asked(state: State, e: ev.RetryAsked, t: float) -> None:
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
        n.draining, n.state = False, "away"
        for slot in n.slots.values():
            slot.strikes = 0  # a person hopes again
            state.set_wake(n.name, slot, None)
        state.fleet.refresh(n)


# --- nodes and slots --------------------------------------------------------------------------------------------------


def node_joined(state: State, e: ev.NodeJoined, t: float) -> None:
    n = state.fleet.nodes.get(e.node)
    if n is None:
        n = state.fleet.nodes[e.node] = Node(e.node, len(state.fleet.nodes))
    n.state = "joined"
    for name in e.slots:
        slot = n.slots.setdefault(name, Slot(name))
        if slot.state == "lost":
            slot.state = "starting"
        # its worker may have lived on and so owe no canary; and one asked for before went with the inbox
        if n.owes_canaries or slot.asked:
            state.asks[(n.name, name)] = None
        elif slot.state == "quarantined" and slot.wake is None:
            state.set_wake(n.name, slot, slot.until)
    for name, slot in n.slots.items():
        if name not in e.slots:
            slot.state = "lost"
            state.set_wake(n.name, slot, None)
    n.owes_canaries = False
    state.fleet.refresh(n)


def node_lost(state: State, e: ev.NodeLost, t: float) -> None:
    n = state.fleet.nodes.get(e.node)
    if n is None or n.state == "lost":
        return
    heads = _claimed_unseen(state, n)
    n.state = "lost"
    for id_ in list(n.outstanding):
        a = state.attempts[id_]
        group = state.book.groups[a.group]
        left = state.book.left(group)
        accused: tuple[int, ...] = ()
        if a.state != "sent":
            accused = state.in_flight(a)
            if len(accused) == 1:
                # it may have ended unheard of, and the one after it have done the harm
                at = left.index(accused[0])
                accused = left[at : at + 2]
        elif group.stranded >= state.settings.stranded:
            accused = left
        elif heads:
            accused, heads = left[:1], heads - 1
        else:
            group.stranded += 1
        state.lose(a, True, e.detail, accused)
    n.owes_canaries = True
    for slot in n.slots.values():
        slot.state, slot.running, slot.checking, slot.asked = "starting", None, False, None
        slot.last_fault, slot.sick = None, False
        state.set_wake(n.name, slot, None)
        state.condemned.pop((n.name, slot.name), None)
    state.fleet.refresh(n)


def _claimed_unseen(state: State, n: Node) -> int:
    """How many of the node's unclaimed attempts a worker may have started unheard of, as news from a node are some
    milliseconds old: one for each slot that was idle, or had one shape to go."""
    heads = 0
    for slot in n.slots.values():
        if slot.sick or slot.state in ("starting", "lost"):
            continue
        a = state.attempts.get(slot.running or "")
        heads += a is None or state.book.groups[a.group].left <= 1
    return heads


def node_draining(state: State, e: ev.NodeDraining, t: float) -> None:
    n = state.fleet.nodes.get(e.node)
    if n is not None:
        n.draining = True
        state.recall_node(n)
        state.fleet.refresh(n)


def slot_lost(state: State, e: ev.SlotLost, t: float) -> None:
    n = state.fleet.nodes.get(e.node)
    slot = n.slots.get(e.slot) if n is not None else None
    if n is None or slot is None or slot.state == "lost":
        return
    slot.state, slot.checking, slot.asked, slot.why = "lost", False, None, e.detail
    state.set_wake(n.name, slot, None)
    state.condemned.pop((e.node, e.slot), None)
    a = state.attempts.get(slot.running or "")
    slot.running = None
    if a is not None and a.state == "started":
        state.lose(a, False, e.detail, state.in_flight(a))
    recall_slot(state, n, slot)
    state.fleet.refresh(n)


def recall_slot(state: State, n: Node, slot: Slot) -> None:
    """Take back what only this slot may claim, and what it must not claim; all, where no slot is left to claim it."""
    none_left = not any(s.hopeful for s in n.slots.values())
    blocked = slot.state == "quarantined" and not slot.sick
    for id_ in n.unclaimed:
        a = state.attempts[id_]
        if none_left or a.slot == slot.name or (blocked and a.slot is None):
            state.recall[id_] = None


def canary_passed(state: State, e: ev.CanaryPassed, t: float) -> None:
    n, slot = state.fleet.nodes.get(e.node), state.fleet.slot(e.node, e.slot)
    if n is None or slot is None or n.state == "lost":
        return
    slot.checking, slot.last_fault = False, None
    # of a quarantine for other reasons than a canary, only the canary that was asked for at its end frees it
    if slot.state != "quarantined" or slot.sick or slot.asked:
        slot.state, slot.asked = "ready", None
        state.set_wake(n.name, slot, None)
    slot.sick = False
    state.asks.pop((e.node, e.slot), None)
    state.fleet.refresh(n)


def canary_failed(state: State, e: ev.CanaryFailed, t: float) -> None:
    n, slot = state.fleet.nodes.get(e.node), state.fleet.slot(e.node, e.slot)
    if n is None or slot is None or n.state == "lost" or slot.state == "lost":
        return
    slot.sick, slot.checking, slot.asked = True, False, None
    if slot.last_fault is not None:
        # the slot was sick when the shape faulted on it: that fault says nothing of the shape
        shape = state.book.shapes[slot.last_fault[0]]
        shape.faults = tuple(f for f in shape.faults if f.attempt != slot.last_fault[1])
        slot.last_fault = None
    state.condemned[(e.node, e.slot)] = f"the canary failed: {e.detail}"
    state.fleet.refresh(n)


# --- attempts ---------------------------------------------------------------------------------------------------------


def attempt_started(state: State, e: ev.AttemptStarted, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is None:
        return
    if a.state == "over":
        n, slot = state.fleet.nodes.get(e.node), state.fleet.slot(e.node, e.slot)
        if a.lost and n is not None and n.state != "lost" and slot is not None and slot.state != "lost":
            a.at, slot.running = e.slot, a.id  # given up, yet it runs: the slot is busy with it
            state.fleet.refresh(n)
        return
    state.recall.pop(a.id, None)
    state.fleet.claim(a, e.slot)


def shape_started(state: State, e: ev.ShapeStarted, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is not None and a.state != "over":
        a.in_flight = e.shape


def shape_tuned(state: State, e: ev.ShapeTuned, t: float) -> None:
    a, shape = state.attempts.get(e.attempt), state.book.shapes.get(e.shape)
    if a is not None and a.state == "started":
        slot = state.fleet.slot(*a.place)
        if slot is not None:
            slot.strikes = 0
            if slot.streak:
                slot.streak = 0
                state.fleet.refresh(state.fleet.nodes[a.node])
    if shape is None or shape.state != "pending":
        return
    place = a.place if a is not None else ("", "")
    for fault in shape.faults:
        if fault.reason.may_blame_slot and fault.place != place:
            state.mark(fault.place, fault.attempt, shape.id)
    for loss in shape.losses:
        if loss.known and not loss.whole_node and loss.place != place:
            state.mark(loss.place, loss.attempt, shape.id)
    state.solve_mystery(shape, place)
    state.after_settling(state.book.settle(shape, "tuned", None))


def shape_refused(state: State, e: ev.ShapeRefused, t: float) -> None:
    shape = state.book.shapes.get(e.shape)
    if shape is not None and shape.state == "pending":
        state.refused.setdefault(e.shape, (e.attempt, e.reason, e.detail))


def attempt_taken(state: State, e: ev.AttemptTaken, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is None or a.state == "over":
        return
    if not e.won:
        if a.state == "sent":
            state.fleet.claim(a, None)
        return
    if a.state != "sent":
        state.lose(a, True, "the node no longer knows of it", state.in_flight(a))
        return
    state.recall.pop(a.id, None)
    state.fleet.close(a)
    state.end(state.book.groups[a.group], Ending(a.id, None, a.place, (), ""))


def attempt_ended(state: State, e: ev.AttemptEnded, t: float) -> None:
    a = state.attempts.get(e.attempt)
    if a is None:
        return
    if a.state == "over":
        state.fleet.release(a)
        if a.lost:
            state.correct(a, e.in_flight if e.outcome.is_loss else None, e.detail)
        return
    if e.in_flight is not None:
        a.in_flight = e.in_flight
    group = state.book.groups[a.group]
    slot = state.fleet.slot(*a.place)
    if slot is not None and (e.outcome.may_blame_slot or e.outcome.is_loss):
        slot.checking, slot.last_fault = True, None
        slot.streak += 1
    if e.outcome is Reason.DISK_FULL:
        for s in state.fleet.nodes[a.node].slots.values():
            if s.hopeful:
                state.condemned[(a.node, s.name)] = f"the node's disk is full: {e.detail}"
    if e.outcome.is_loss:
        state.lose(a, e.outcome is Reason.NODE_LOST, e.detail, state.in_flight(a) if group.left else ())
        return
    place = a.place
    state.recall.pop(a.id, None)
    state.fleet.close(a)
    outcome = Reason.NOT_DELIVERED if e.outcome is Reason.DONE else e.outcome
    accused = _charge(state, a, group, outcome) if group.left else ()
    state.end(group, Ending(a.id, outcome, place, accused, e.detail))


def _charge(state: State, a: Attempt, group: Group, outcome: Reason) -> tuple[int, ...]:
    """Write the end down as a try, and as a fault of the shapes it is charged to; returns these."""
    if outcome in (Reason.CANCELLED, Reason.DISK_FULL):
        return ()
    left = state.book.left(group)
    accused = left if outcome in (Reason.NOT_DELIVERED, Reason.REJECTED) else state.in_flight(a)
    if outcome not in (Reason.NOT_DELIVERED, Reason.REJECTED):
        if len(accused) > 1:
            state.mysteries[a.id] = Mystery(a.place, len(accused))
            for s in accused:
                state.book.shapes[s].mysteries += (a.id,)
            return ()
        slot = state.fleet.slot(*a.place)
        if slot is not None:
            slot.last_fault = (accused[0], a.id)
        state.solve_mystery(state.book.shapes[accused[0]], None)
    for s in accused:
        shape = state.book.shapes[s]
        shape.tries += 1
        if outcome is not Reason.REJECTED:
            shape.faults += (Fault(a.place, outcome, a.id),)
    return accused


EVENTS: dict[type[ev.Event], Callable[[State, Any, float], None]] = {
    ev.GroupAdded: group_added,
    ev.RetryAsked: retry_asked,
    ev.StopAsked: stop_asked,
    ev.Resumed: resumed,
    ev.NodeJoined: node_joined,
    ev.NodeLost: node_lost,
    ev.NodeDraining: node_draining,
    ev.SlotLost: slot_lost,
    ev.CanaryPassed: canary_passed,
    ev.CanaryFailed: canary_failed,
    ev.AttemptStarted: attempt_started,
    ev.ShapeStarted: shape_started,
    ev.ShapeTuned: shape_tuned,
    ev.ShapeRefused: shape_refused,
    ev.AttemptEnded: attempt_ended,
    ev.AttemptTaken: attempt_taken,
}
