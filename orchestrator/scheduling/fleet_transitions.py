"""State transitions of nodes, slots and canaries: one function an event or decision.

Evidence is recorded here and judged in `blame`.
"""

from __future__ import annotations

from orchestrator import events as ev
from orchestrator.scheduling.model import Node, Slot
from orchestrator.scheduling.state import State

RELEASED = "released"
"""Cause of a lease's end that is ours: no process of it was killed."""
NO_HOPE = 30
"""Strikes of a slot whose tuner can never start: its cool-down is the longest there is, and nobody waits for it."""


def _known(state: State, e: ev.NodeExpected | ev.NodeJoined) -> Node:
    """The node with at least these slots, none of them lost."""
    n = state.fleet.nodes.get(e.node) or state.fleet.add(e.node, e.host)
    for name in e.slots:
        slot = n.slots.setdefault(name, Slot(name))
        if slot.state == "lost":
            slot.state = "starting"
    state.fleet.locate(n, e.host, e.slots, e.gpus)
    return n


def node_expected(state: State, e: ev.NodeExpected, t: float) -> None:
    """Its slots count in every share and verdict from now on, as they will be there in a moment."""
    known = state.fleet.nodes.get(e.node)
    if known is not None and known.state in ("joined", "gone"):
        return
    n = _known(state, e)
    n.state, n.lease = "away", e.lease
    state.fleet.refresh(n)


def node_busy(state: State, e: ev.NodeBusy, t: float) -> None:
    """A node that waits for others is not counted on: no share and no verdict waits for it."""
    n = state.fleet.nodes.get(e.node)
    if n is None or n.state not in ("away", "busy"):
        return
    n.state = "busy" if e.doing == "wait" else "away"
    state.fleet.refresh(n)


def node_joined(state: State, e: ev.NodeJoined, t: float) -> None:
    known = state.fleet.nodes.get(e.node)
    if known is not None and known.state == "gone":
        return
    n = _known(state, e)
    n.state = "joined"
    for name in e.slots:
        slot = n.slots[name]
        # its worker may have survived, which then runs no canary; a requested one was lost with the inbox
        if n.owes_canaries or slot.requested:
            state.asks[(n.name, name)] = None
        elif slot.state == "quarantined" and slot.wake is None:
            state.set_wake(n.name, slot, slot.health.until)
    for name, slot in n.slots.items():
        if name not in e.slots:
            slot.state = "lost"
            state.set_wake(n.name, slot, None)
    n.owes_canaries = False
    state.fleet.refresh(n)


def node_lost(state: State, e: ev.NodeLost, t: float) -> None:
    n = state.fleet.nodes.get(e.node)
    if n is None or n.state in ("lost", "gone"):
        return
    heads = _claimed_unheard(state, n)
    at_work = {name: slot.running or slot.adrift for name, slot in n.slots.items()}
    n.state, n.lost_at = "lost", t
    for id_ in list(n.outstanding):
        a = state.attempts[id_]
        group = state.book.groups[a.group]
        left = state.book.left(group)
        accused: tuple[int, ...] = ()
        if a.state != "sent":
            accused = state.in_flight(a)
            if len(accused) == 1:
                # it may have ended unrecorded, and the next shape have taken the node down
                at = left.index(accused[0])
                accused = left[at : at + 2]
        elif group.stranded >= state.settings.stranded:
            accused = left
        elif id_ in heads:
            accused = left[:1]
        else:
            group.stranded += 1
        state.lose(a, True, e.detail, accused, t)
    n.owes_canaries = True
    for slot in n.slots.values():
        slot.adrift = at_work[slot.name]
        slot.state, slot.running, slot.checking, slot.requested = "starting", None, False, None
        slot.last_fault, slot.sick = None, False
        state.set_wake(n.name, slot, None)
        state.to_quarantine.pop((n.name, slot.name), None)
    state.fleet.refresh(n)


def lease_ended(state: State, e: ev.LeaseEnded, t: float) -> None:
    """Gone for good: what it had goes back at once, nothing waits for it, and its GPUs keep their evidence."""
    n = state.fleet.nodes.get(e.node)
    if n is None or n.state == "gone":
        return
    ended: tuple[int, ...] = ()
    if e.charged:
        node_lost(state, ev.NodeLost(e.node, e.detail), t)
    elif e.cause != RELEASED:
        lately = t - state.settings.lease_end_s
        for a in state.attempts.values():
            # a loss with the node came with the lease's end only if the node has not been back since
            with_it = n.state == "lost" and a.ended_at == n.lost_at if a.with_node else a.ended_at >= lately
            if with_it and a.node == n.name and a.state == "over":
                ended += state.forgive(a, e.cause, e.detail, t)
    for id_ in list(n.outstanding):
        state.give_back(state.attempts[id_], e.cause, e.detail, t, ended)
    n.state = "gone"
    for slot in n.slots.values():
        slot.state, slot.running, slot.checking, slot.requested = "lost", None, False, None
        slot.adrift = None
        slot.last_fault, slot.sick, slot.why = None, False, f"its lease ended: {e.detail}"
        state.set_wake(n.name, slot, None)
        state.to_quarantine.pop((n.name, slot.name), None)
        state.asks.pop((n.name, slot.name), None)
    state.fleet.refresh(n)


def fleet_may_grow(state: State, e: ev.FleetMayGrow, t: float) -> None:
    state.may_grow = e.more


def _claimed_unheard(state: State, n: Node) -> set[str]:
    """The unclaimed attempts of the node that a worker may have started unheard of, as news from a node are some
    milliseconds old: the next one for each slot that was idle, or had one shape to go."""
    heads: set[str] = set()
    for slot in n.slots.values():
        if slot.sick or slot.state in ("starting", "lost"):
            continue
        running = state.attempts.get(slot.running or "")
        if running is not None and state.book.groups[running.group].left > 1:
            continue
        unclaimed = [state.attempts[id_] for id_ in n.outstanding if id_ not in heads]
        fit = [a for a in unclaimed if a.state == "sent" and a.slot in (None, slot.name)]
        if fit:
            # the latest may be claimed first (`supply.FIRST`), or have arrived too late for that
            heads |= {fit[0].id, min(fit, key=lambda a: a.seq).id}
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
    slot.state, slot.checking, slot.requested, slot.adrift, slot.why = "lost", False, None, None, e.detail
    state.set_wake(n.name, slot, None)
    state.to_quarantine.pop((e.node, e.slot), None)
    a = state.attempts.get(slot.running or "")
    slot.running = None
    if a is not None and a.state == "started":
        state.lose(a, False, e.detail, state.in_flight(a), t)
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
    if n is None or slot is None or n.state in ("lost", "gone"):
        return
    slot.checking, slot.adrift, slot.last_fault, slot.health.passed = False, None, None, True
    # a quarantine for another reason than a canary ends with the canary requested at its end only
    if slot.state != "quarantined" or slot.sick or slot.requested:
        slot.state, slot.requested, slot.health.closed = "ready", None, ""
        state.set_wake(n.name, slot, None)
    slot.sick = False
    state.asks.pop((e.node, e.slot), None)
    state.fleet.refresh(n)


def canary_failed(state: State, e: ev.CanaryFailed, t: float) -> None:
    n, slot = state.fleet.nodes.get(e.node), state.fleet.slot(e.node, e.slot)
    if n is None or slot is None or n.state in ("lost", "gone") or slot.state == "lost":
        return
    slot.sick, slot.checking, slot.requested, slot.adrift = True, False, None, None
    if e.final:
        slot.health.strikes = max(slot.health.strikes, NO_HOPE)
    if slot.last_fault is not None:
        # the slot was sick when the shape faulted on it: that fault is no evidence against the shape
        shape = state.book.shapes[slot.last_fault[0]]
        fault = next((f for f in shape.faults if f.attempt == slot.last_fault[1]), None)
        shape.faults = tuple(f for f in shape.faults if f is not fault)
        slot.last_fault = None
        if fault is not None and slot.health.tunes:
            state.wedged(shape, fault)
    state.to_quarantine[(e.node, e.slot)] = f"the canary failed: {e.detail}"
    state.fleet.refresh(n)


def quarantine(state: State, d: ev.Quarantine, t: float) -> None:
    state.to_quarantine.pop((d.node, d.slot), None)
    state.asks.pop((d.node, d.slot), None)
    n, slot = state.fleet.nodes[d.node], state.fleet.slot(d.node, d.slot)
    if slot is None:
        return
    slot.state, slot.why = "quarantined", d.why
    slot.health.closed, slot.health.until = d.why, d.until
    slot.requested, slot.checking = None, False
    slot.health.strikes += 1
    slot.health.marks.clear()
    slot.health.fresh.clear()
    state.trials, state.charged = state.trials - slot.health.trials, state.charged - len(slot.health.charges)
    slot.health.charges.clear()
    slot.health.trials = 0
    state.set_wake(d.node, slot, d.until)
    recall_slot(state, n, slot)
    state.fleet.refresh(n)


def ask_canary(state: State, d: ev.AskCanary, t: float) -> None:
    state.asks.pop((d.node, d.slot), None)
    state.next_canary += 1
    slot = state.fleet.slot(d.node, d.slot)
    if slot is not None:
        slot.requested = d.attempt
        state.set_wake(d.node, slot, t + state.settings.canary_timeout_s)
