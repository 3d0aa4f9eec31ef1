"""Sentences about parts of a run's state: what happened to a node, a slot, an attempt or a shape."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.policy.model import Attempt, Node, Shape, Slot, State, describe_place
from orchestrator.view.formatting import clock
from orchestrator.view.header import NameOfShape
from worker.text import and_more, plural


def describe_slot(state: State, node: str, slot: str) -> str:
    """Name of a slot, with its host and GPU if they are known and differ from node and slot."""
    known = state.slot(node, slot)
    return describe_place(known.gpu.place, state.nodes) if known is not None else f"{node} slot {slot}"


def describe_node_change(node: Node, to: str, why: str) -> str:
    """Sentence on a change of a node (an entry of its history)."""
    name = node.name
    slots = plural(len(node.slots), "slot")
    match to:
        case "away":
            lease = f", lease {node.lease} on {node.host}" if node.lease else ""
            return f"{name} is being prepared ({slots}{lease}){_because(why)}"
        case "joined":
            return f"{name} joined with {slots}"
        case "trouble":
            return f"{name} is in trouble; we try it again{_because(why)}"
        case "busy":
            return f"{name} is occupied; we wait for it{_because(why)}"
        case "shared":
            return f"{name} is occupied and shared, so its times may be too long{_because(why)}"
        case "lost":
            return f"{name} was given up{_because(why)}"
        case "gone":
            return f"the lease {name} ended ({why})"
        case _:
            return f"{name} is {to}"  # draining


def describe_slot_change(state: State, slot: Slot, to: str, why: str, until: float = 0.0) -> str:
    """Sentence on a change of a slot (an entry of its history). `until`: the end of a current quarantine."""
    name = f"{slot.node} slot {slot.name}"
    match to:
        case "quarantined":
            place = describe_slot(state, slot.node, slot.name)
            also = f" ({place})" if place != name else ""
            ends = f" until {clock(until)}" if until else ""
            return f"{name}{also} quarantined{ends}: {why}"
        case "lost":
            return f"{name} was lost: {why}"
        case "canary failed":
            return f"{name}: the canary failed: {why}"
        case _:
            return f"{name} is {to}"


def describe_queue(leases: Sequence[tuple[str, str]]) -> str:
    """`2 leases are queued: 17 (Priority), 18`."""
    words = and_more([f"{id_} ({why})" if why else id_ for id_, why in leases], 3)
    return f"{plural(len(leases), 'lease is', 'leases are')} queued: {words}"


def describe_end(attempt: Attempt, named: NameOfShape) -> str:
    """Sentence on the end of an attempt. `named`: gives a shape's name."""
    name = f"attempt {attempt.id}"
    if attempt.started_at is not None:
        name += f" on {attempt.node} slot {attempt.slot}"
    if attempt.outcome is None:
        end = "lost" if attempt.is_lost else "taken back unclaimed"
        return f"{name} was {end}{_because(attempt.detail)}"
    after = f" after {attempt.seconds:.1f} s" if attempt.seconds > 0 else ""
    shape = f" at {named(attempt.in_flight)}" if attempt.in_flight is not None else ""
    return f"{name} ended{after}: {attempt.outcome.message}{shape}{_because(attempt.detail)}"


def describe_settled(shape: Shape, done: str = "tuned") -> str:
    """State of a shape, and why; `done`: the word for a shape that has a result."""
    if shape.state == "tuned":
        unconfirmed = ", unconfirmed" if shape.confirmed is False else ""
        return f"{done}{unconfirmed}{_because(shape.detail)}"
    if shape.state == "failed" and shape.reason is not None:
        unconfirmed = "" if shape.confirmed or shape.reason.is_verdict else ", unconfirmed"
        return f"failed ({shape.reason.value}{unconfirmed}){_because(shape.detail)}"
    return shape.state


def _because(detail: str) -> str:
    return f": {detail}" if detail else ""
