"""Texts for people: times, nodes, slots, attempts, shapes, and advice on a failure or an incident."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from orchestrator.command_hints import command
from orchestrator.policy.model import Attempt, Node, Shape, Slot, State, spot
from orchestrator.reasons import Reason
from worker.text import and_more, plural


def clock(t: float) -> str:
    """Time of day on the controller's clock."""
    return time.strftime("%H:%M:%S", time.localtime(t))


def duration(seconds: float | None) -> str:
    """Duration as text: 8 s, 2 min 05 s, 3 h 10 min."""
    if seconds is None:
        return "unknown"
    s = max(0, round(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60:02d} s"
    return f"{s // 3600} h {s % 3600 // 60:02d} min"


WIDE = 1.6
"""If the ends of an estimate are further apart than this factor, we show a range."""


def left_words(low_s: float, mid_s: float, high_s: float) -> str:
    """`about 2 min 05 s`, or `1 min 10 s to 4 min 00 s` if the estimate is uncertain."""
    if high_s > WIDE * low_s:
        low, high = duration(_round(low_s)), duration(_round(high_s))
        return f"{low} to {high}" if low != high else f"about {low}"
    return f"about {duration(_round(mid_s))}"


def _round(seconds: float) -> float:
    """Seconds, rounded to what is significant."""
    s = max(1.0, seconds)
    return s if s < 120 else round(s / 5) * 5 if s < 600 else round(s / 60) * 60


def worked_words(sessions: Sequence[Sequence[float]]) -> str:
    """`1 min 30 s`, or `1 min 30 s (over 3 sessions from Nov 21 18:02 to Nov 22 09:14)`; "" before the first."""
    took = duration(sum(end - start for start, end in sessions))
    if len(sessions) < 2:
        return took if sessions else ""
    first, last = (time.strftime("%b %d %H:%M", time.localtime(t)) for t in (sessions[0][0], sessions[-1][1]))
    return f"{took} (over {len(sessions)} sessions from {first} to {last})"


def slot_words(state: State, node: str, slot: str) -> str:
    """Name of a slot, with its host and GPU if they are known and differ from node and slot."""
    known = state.slot(node, slot)
    return spot(known.gpu.place, state.nodes) if known is not None else f"{node} slot {slot}"


def node_words(node: Node, to: str, why: str) -> str:
    """Sentence on a change of a node (an entry of its history)."""
    name, because = node.name, f": {why}" if why else ""
    match to:
        case "away":
            of = f", lease {node.lease} on {node.host}" if node.lease else ""
            return f"{name} is being prepared ({plural(len(node.slots), 'slot')}{of}){because}"
        case "joined":
            return f"{name} joined with {plural(len(node.slots), 'slot')}"
        case "trouble":
            return f"{name} is in trouble; we try it again{because}"
        case "busy":
            return f"{name} is occupied; we wait for it{because}"
        case "shared":
            return f"{name} is occupied and shared, so its times may be too long{because}"
        case "lost":
            return f"{name} was given up{because}"
        case "gone":
            return f"the lease {name} ended ({why})"
        case _:
            return f"{name} is {to}{because}"


def slot_change(state: State, slot: Slot, to: str, why: str, until: float = 0.0) -> str:
    """Sentence on a change of a slot (an entry of its history). `until`: the end of a current quarantine."""
    name, place = f"{slot.node} slot {slot.name}", slot_words(state, slot.node, slot.name)
    also = f" ({place})" if place != name else ""
    match to:
        case "quarantined":
            return f"{name}{also} quarantined" + (f" until {clock(until)}" if until else "") + f": {why}"
        case "lost":
            return f"{name} was lost: {why}"
        case "canary failed":
            return f"{name}: the canary failed: {why}"
        case _:
            return f"{name} is {to}"


def leases_words(leases: Sequence[tuple[str, str]]) -> str:
    """`2 leases are queued: 17 (Priority), 18`."""
    words = and_more([f"{id_} ({why})" if why else id_ for id_, why in leases], 3)
    return f"{plural(len(leases), 'lease is', 'leases are')} queued: {words}"


def end_of(state: State, a: Attempt, named: Callable[[int], str]) -> str:
    """Sentence on the end of an attempt."""
    where = f" on {a.node} slot {a.slot}" if a.started_at is not None else ""
    if a.outcome is None:
        return f"attempt {a.id}{where} was {'lost' if a.lost else 'taken back unclaimed'}" + _because(a.detail)
    at = f" at {named(a.in_flight)}" if a.in_flight is not None else ""
    after = f" after {a.seconds:.1f} s" if a.seconds > 0 else ""
    return f"attempt {a.id}{where} ended{after}: {a.outcome.message}{at}" + _because(a.detail)


def _because(detail: str) -> str:
    return f": {detail}" if detail else ""


def settled_words(shape: Shape, done: str = "tuned") -> str:
    """State of a shape, and why; `done`: the word for a shape that has a result."""
    if shape.state == "tuned":
        sure = ", unconfirmed" if shape.confirmed is False else ""
        return f"{done}{sure}" + _because(shape.detail)
    if shape.state == "failed" and shape.reason is not None:
        sure = "" if shape.confirmed or shape.reason.is_verdict else ", unconfirmed"
        return f"failed ({shape.reason.value}{sure})" + _because(shape.detail)
    return shape.state


INCIDENTS = {
    "trouble": "Its measurements were kept. If this happens often, look at the link and at sshd.",
    "away": f"Its work went elsewhere. Check it with: {command('nodes check')}",
    "ended": "Its work went elsewhere. There is nothing to do.",
    "busy": "We wait until it is free. To share or skip it: --busy share, --busy skip.",
    "quarantine": f"Its work went elsewhere. Look at the GPU's health ({command('status')}) before you trust it again.",
    "gone": "Its worker could not be started again: look at its container's log on the node.",
    "canary": "The slot did not compute its known answer, so it gets no work. Look at the GPU, driver and image.",
}
"""Advice on an incident of a node or slot, by its kind in the timeline."""


def advice(reason: Reason, run: str, node: str) -> list[str]:
    """Sentences on what to do about a failure; `run` as it is named on a command line."""
    logs = command(f"logs {run}") + (f" --node {node}" if node else "")
    retry = command(f"retry {run} --reason {reason.value}")
    return [text.format(logs=logs, retry=retry) for text in reason.advice]
