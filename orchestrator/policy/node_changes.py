"""Applies the records about nodes and their leases: expected, joined, occupied, in trouble, lost, gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator import events as ev
from orchestrator.policy import evidence
from orchestrator.policy.model import Attempt, Gpu, Node, Slot, State, describe_end_cause
from orchestrator.policy.slot_changes import forget_awaited, give_up_slot, set_slot
from orchestrator.policy.work_queue import close_attempt, refresh_slot, requeue_rest
from orchestrator.reasons import Reason

RELEASED = "released"
"""We gave the lease back ourselves: none of its processes was killed."""


def _set_node(state: State, node: Node, to: Any, why: str, t: float) -> None:
    node.state = to
    node.why = why
    node.history.append((t, to, why))
    for slot in node.slots.values():
        refresh_slot(state, slot)


def _resumed(state: State, event: ev.Resumed, t: float) -> None:
    """Nodes get no work until they join again: only then do we know how much of the work sent there is left."""
    state.stopped = False
    state.stop_why = ""
    state.epoch = event.epoch
    state.canary_due.clear()
    for node in state.nodes.values():
        if node.state != "gone":
            node.draining = False
            _set_node(state, node, "away", "", t)
        for slot in node.slots.values():
            slot.gpu.quarantines = 0  # the user expects it to work again


def _add_slots(state: State, node: Node, names: tuple[str, ...], gpus: tuple[str, ...], t: float) -> None:
    """Give the node at least these slots, none of them lost. `gpus`: the id of each slot's GPU, () if unknown. If
    another lease had a GPU before, its evidence stays."""
    for name, gpu_id in zip(names, gpus or ("",) * len(names), strict=False):
        slot = node.slots.get(name)
        if slot is None:
            own_name = name if node.host == node.name else f"{node.name}/{name}"
            place = (node.host, gpu_id or own_name)
            gpu = state.gpus.setdefault(place, Gpu(place))
            slot = Slot(node.name, name, gpu)
            node.slots[name] = slot
            if gpu.quarantine_why:
                set_slot(state, slot, "quarantined", gpu.quarantine_why, t)
        elif slot.state == "lost":
            set_slot(state, slot, "starting", "", t)


def _node_expected(state: State, event: ev.NodeExpected, t: float) -> None:
    """From now on its slots count in every share and verdict, because they will be ready soon."""
    node = state.nodes.get(event.node)
    if node is None:
        node = state.nodes[event.node] = Node(event.node, event.host or event.node)
    elif node.state in ("joined", "gone"):
        return
    _add_slots(state, node, event.slots, event.gpus, t)
    node.lease = event.lease or node.lease
    node.pool = event.pool or node.pool
    node.ends_at = event.ends_at or node.ends_at
    _set_node(state, node, "away", "", t)


def _node_joined(state: State, event: ev.NodeJoined, t: float) -> None:
    node = state.nodes.get(event.node)
    if node is None:
        node = state.nodes[event.node] = Node(event.node, event.node)
    elif node.state == "gone":
        return
    _add_slots(state, node, event.slots, (), t)
    _set_node(state, node, "joined", "", t)
    for name, slot in node.slots.items():
        if name not in event.slots:
            state.canary_due.pop(slot.id, None)
            set_slot(state, slot, "lost", "the node no longer has it", t)
        elif node.owes_canaries or slot.requested_canary:
            # its worker may have survived, and then runs no canary by itself; a requested one was lost with the inbox
            state.to_ask_canary[slot.id] = None
        elif slot.state == "quarantined":
            state.canary_due[slot.id] = slot.gpu.quarantined_until
    node.owes_canaries = False


def _node_troubled(state: State, event: ev.NodeTroubled, t: float) -> None:
    node = state.nodes.get(event.node)
    if node is not None:
        node.why = event.detail
        node.history.append((t, "trouble", event.detail))


def _node_busy(state: State, event: ev.NodeBusy, t: float) -> None:
    """A node that others occupy is not counted on: no share and no verdict waits for it."""
    node = state.nodes.get(event.node)
    if node is None:
        return
    if event.doing == "share":
        node.history.append((t, "shared", event.detail))
    elif node.state in ("away", "busy"):
        to = "busy" if event.doing == "wait" else "away"
        _set_node(state, node, to, "" if event.doing == "free" else event.detail, t)
    elif node.state == "joined":  # its workers found the devices taken after it had joined
        waits = event.doing == "wait"
        node.why = event.detail if waits else ""
        node.history.append((t, "busy" if waits else "joined", node.why))


def _node_lost(state: State, event: ev.NodeLost, t: float) -> None:
    node = state.nodes.get(event.node)
    if node is not None:
        _lose_node(state, node, event.detail, t)


def _lose_node(state: State, node: Node, detail: str, t: float) -> None:
    if node.state in ("lost", "gone"):
        return
    _set_node(state, node, "lost", detail, t)
    node.owes_canaries = True
    for slot in node.slots.values():
        slot.orphaned = slot.running or slot.orphaned
        give_up_slot(state, slot, detail, t, with_node=True)
        if slot.state != "lost":
            set_slot(state, slot, "starting", "", t)


def _node_draining(state: State, event: ev.NodeDraining, t: float) -> None:
    node = state.nodes.get(event.node)
    if node is not None:
        node.draining = True
        node.history.append((t, "draining", ""))
        for slot in node.slots.values():
            refresh_slot(state, slot)


def _lease_ended(state: State, event: ev.LeaseEnded, t: float) -> None:
    """The lease's node will not return. Without a charge nobody is blamed, not even for an attempt that ended badly
    just before: a scheduler kills the processes first."""
    node = state.nodes.get(event.node)
    if node is None or node.state == "gone":
        return
    if event.charged:
        _lose_node(state, node, event.detail, t)
    elif event.cause != RELEASED:
        _excuse_ended(state, node, event.cause, t)
    for slot in node.slots.values():
        for attempt in [state.attempts[i] for i in (slot.running, *slot.queued) if i is not None]:
            in_flight = state.shape_in_flight(attempt) if attempt.state == "started" else None
            if in_flight is not None and event.cause != RELEASED:
                evidence.record_lease_end(state, in_flight, attempt, event.cause)
            attempt.outcome = Reason.LEASE_ENDED
            attempt.detail = event.detail
            close_attempt(state, attempt, t)
            requeue_rest(state, attempt)
        slot.orphaned = None
        forget_awaited(state, slot)
        set_slot(state, slot, "lost", f"its lease ended: {event.detail}", t)
    cause = describe_end_cause(event.cause)
    _set_node(state, node, "gone", f"{cause}: {event.detail}" if event.detail else cause, t)


def _excuse_ended(state: State, node: Node, cause: str, t: float) -> None:
    """Take back what attempts on the node are blamed for, if they ended with its lease."""
    for attempt in [a for a in state.attempts.values() if a.node == node.name and a.ended_at is not None]:
        if not _ended_with_lease(state, node, attempt, t):
            continue
        for shape in (state.shapes[s] for s in attempt.shapes):
            if evidence.strike_out(state, shape, attempt.id) and shape.state == "pending":
                evidence.record_lease_end(state, shape, attempt, cause)


def _ended_with_lease(state: State, node: Node, attempt: Attempt, t: float) -> bool:
    if attempt.is_lost:
        return node.state == "lost"
    return (attempt.ended_at or 0.0) >= t - state.settings.came_with_s


def _leases_queued(state: State, event: ev.LeasesQueued, t: float) -> None:
    state.queued_leases[event.pool] = event.leases


def _fleet_may_grow(state: State, event: ev.FleetMayGrow, t: float) -> None:
    state.may_grow = event.more


CHANGES: dict[type[ev.Record], Callable[[State, Any, float], None]] = {
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
}
