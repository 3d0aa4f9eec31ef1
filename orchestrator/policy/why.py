"""Sentences on what waits, and on why a run has no slot left."""

from __future__ import annotations

from orchestrator.policy.model import Attempt, Node, State, spot
from orchestrator.policy.supply import suits
from worker.text import and_more, plural


def stuck(state: State) -> str | None:
    """Sentence on why no slot is left; None while something runs or a slot may come, or come back."""
    if state.usable or state.may_grow or state.open or state.held:
        return None
    if not state.nodes:
        return "no node came, and none is expected any more" if state.may_grow is False else None
    reasons = dict[str, list[str]]()
    gone = [n for n in state.nodes.values() if n.state == "gone"]
    over = [f"{plural(len(gone), 'lease')} ended, the last one {last.name}" for last in gone[-1:]]
    for n in (n for n in state.nodes.values() if n.state != "gone"):
        if n.state in ("away", "busy"):
            return None
        if n.state == "lost":
            reasons.setdefault("lost", []).append(n.name)
        elif n.draining:
            reasons.setdefault("draining", []).append(n.name)
        else:
            for s in n.slots.values():
                if s.state == "quarantined" and s.gpu.strikes < state.settings.max_strikes:
                    return None
                what = s.state + (f" ({s.why})" if s.why else "")
                reasons.setdefault(what, []).append(f"{n.name} slot {s.name}")
    said = (f"{and_more(of, 4)} {'is' if len(of) == 1 else 'are'} {what}" for what, of in reasons.items())
    return "; ".join((*over, *said))


def why(state: State, what: int) -> str:
    """Sentence on where a shape is, and what it waits for."""
    shape = state.shapes[what]
    if shape.state != "pending":
        return f"shape {what} is {shape.state}" + (f": {shape.reason.message}" if shape.reason else "")
    for id_ in reversed(shape.attempts):
        if id_ in state.open:
            return whereabouts(state, state.attempts[id_])
    head = f"shape {what} waits"
    if state.stopped:
        return f"{head}: the run is stopped"
    if what in state.held:
        where = " and ".join(dict.fromkeys(spot(f.place, state.nodes) for f in shape.faults))
        return f"{head} for its verdict, until {where} tuned something else: only then are its faults evidence"
    able = [s for n in state.nodes.values() if n.state == "joined" and not n.draining for s in n.slots.values()]
    able = [s for s in able if s.state == "ready"]
    if not able:
        return f"{head}: {stuck(state) or _not_ready(state)}"
    if shape.apart is None or any(suits(state, shape, s) for s in able):
        return f"{head} for its turn: every slot has enough ahead"
    if shape.losses and not shape.faults:
        return f"{head}: a worker or node was lost with it, and one such shape runs on a node at a time"
    if not shape.faults:
        return f"{head} for a lease on which nothing ran yet: {plural(len(shape.ends), 'lease')} ended under it"
    where = ", ".join(dict.fromkeys(spot(f.place, state.nodes) for f in shape.faults))
    return f"{head} for a slot other than {where}, where it went wrong"


def whereabouts(state: State, a: Attempt) -> str:
    """Sentence on where an attempt is that is not over."""
    if a.state == "started":
        return f"attempt {a.id} runs on {a.node} slot {a.slot}"
    if a.taking:
        return f"attempt {a.id} is being taken back from {a.node}"
    before = state.slot_of(a).queued.index(a.id)
    return f"attempt {a.id} is in the inbox of {a.node} slot {a.slot} with {plural(before, 'other')} before it"


def _not_ready(state: State) -> str:
    if not state.nodes:
        return "no node has joined yet"
    reasons = [f"{n.name} {_state_of(n)}" for n in state.nodes.values() if n.state != "gone"]
    if not reasons:
        return "every lease has ended, and another is awaited"
    return "no slot takes work now (" + ", ".join(reasons) + ")"


def _state_of(n: Node) -> str:
    if n.state != "joined":
        return {"lost": "is lost", "busy": "waits for others"}.get(n.state, "is being prepared")
    if n.draining:
        return "is draining"
    return "slots: " + ", ".join(f"{s.name} {s.state}" for s in n.slots.values())
