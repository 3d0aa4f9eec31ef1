"""Sentences on what waits in a run, and on why it has no slot left."""

from __future__ import annotations

from orchestrator.policy.decide import suits
from orchestrator.policy.model import Attempt, Node, Shape, Slot, State, describe_place
from worker.text import and_more, plural


def describe_lack_of_slots(state: State) -> str | None:
    """Sentence on why no slot is left; None while something runs or a slot may come, or come back."""
    if state.usable or state.may_grow or state.open_attempts or state.awaiting_verdict:
        return None
    if not state.nodes:
        return "no node came, and none is expected any more" if state.may_grow is False else None
    ended_leases = [node for node in state.nodes.values() if node.state == "gone"]
    by_reason: dict[str, list[str]] = {}
    for node in state.nodes.values():
        if node.state in ("away", "busy"):
            return None
        if node.state == "lost":
            by_reason.setdefault("lost", []).append(node.name)
        elif node.state == "joined" and node.draining:
            by_reason.setdefault("draining", []).append(node.name)
        elif node.state == "joined":
            for slot in node.slots.values():
                if slot.state == "quarantined" and slot.gpu.quarantines < state.settings.max_quarantines:
                    return None
                reason = f"{slot.state} ({slot.why})" if slot.why else slot.state
                by_reason.setdefault(reason, []).append(f"{node.name} slot {slot.name}")
    parts = []
    if ended_leases:
        parts.append(f"{plural(len(ended_leases), 'lease')} ended, the last one {ended_leases[-1].name}")
    for reason, names in by_reason.items():
        parts.append(f"{and_more(names, 4)} {'is' if len(names) == 1 else 'are'} {reason}")
    return "; ".join(parts)


def describe_wait(state: State, shape_id: int) -> str:
    """Sentence on where a pending shape is, and what it waits for; it does not name the shape."""
    shape = state.shapes[shape_id]
    for attempt in reversed(shape.attempts):
        if attempt in state.open_attempts:
            return describe_attempt(state, state.attempts[attempt])
    if state.stopped:
        return "it waits: the run is stopped"
    if shape_id in state.awaiting_verdict:
        places = " and ".join(_fault_places(state, shape))
        return f"it waits for its verdict, until {places} tuned something else: only then are its faults evidence"
    slots = _slots_at_work(state)
    if not slots:
        return f"it waits: {describe_lack_of_slots(state) or _describe_unready(state)}"
    if shape.isolated_with is None or any(suits(state, shape, slot) for slot in slots):
        return "it waits for its turn: every slot has enough ahead"
    if shape.losses and not shape.faults:
        return "it waits: a worker or node was lost with it, and one such shape runs on a node at a time"
    if not shape.faults:
        ends = plural(len(shape.lease_ends), "lease")
        return f"it waits for a lease on which nothing ran yet: {ends} ended under it"
    what = "its time was noise" if shape.noisy else "it went wrong"
    return f"it waits for a slot other than {', '.join(_fault_places(state, shape))}, where {what}"


def _fault_places(state: State, shape: Shape) -> list[str]:
    return list(dict.fromkeys(describe_place(fault.place, state.nodes) for fault in shape.faults))


def _slots_at_work(state: State) -> list[Slot]:
    nodes = [node for node in state.nodes.values() if node.state == "joined" and not node.draining]
    return [slot for node in nodes for slot in node.slots.values() if slot.state == "ready"]


def describe_attempt(state: State, attempt: Attempt) -> str:
    """Sentence on where an attempt is that is not over."""
    if attempt.state == "started":
        return f"attempt {attempt.id} runs on {attempt.node} slot {attempt.slot}"
    if attempt.is_being_taken:
        return f"attempt {attempt.id} is being taken back from {attempt.node}"
    before = state.slot_of(attempt).queued.index(attempt.id)
    return (
        f"attempt {attempt.id} is in the inbox of {attempt.node} slot {attempt.slot}"
        f" with {plural(before, 'other')} before it"
    )


def _describe_unready(state: State) -> str:
    if not state.nodes:
        return "no node has joined yet"
    reasons = [f"{node.name} {_describe_node(node)}" for node in state.nodes.values() if node.state != "gone"]
    if not reasons:
        return "every lease has ended, and another is awaited"
    return f"no slot takes work now ({', '.join(reasons)})"


def _describe_node(node: Node) -> str:
    if node.state == "lost":
        return "is lost"
    if node.state == "busy":
        return "waits for others"
    if node.state != "joined":
        return "is being prepared"
    if node.draining:
        return "is draining"
    return "slots: " + ", ".join(f"{slot.name} {slot.state}" for slot in node.slots.values())
