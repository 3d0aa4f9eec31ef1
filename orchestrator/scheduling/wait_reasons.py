"""Sentences on where a group is, what it waits for, and why no slot is left to work on."""

from __future__ import annotations

from orchestrator.scheduling.model import Group, Node
from orchestrator.scheduling.state import State
from worker.text import plural


def why(state: State, what: str | int) -> str:
    """Sentence on a group (by id) or a shape (by number)."""
    if isinstance(what, int):
        shape = state.book.shapes.get(what)
        if shape is None:
            return f"shape {what} is not part of this run"
        if shape.state != "pending":
            return f"shape {what} is {shape.state}" + (f": {shape.reason.message()}" if shape.reason else "")
        return why(state, shape.group)
    group = state.book.groups.get(what)
    if group is None:
        return f"there is no group {what}"
    if group.state == "over":
        return _over(state, group)
    if group.state == "sent":
        return _sent(state, group)
    return _waiting(state, group)


def stuck(state: State) -> str | None:
    """Sentence on why no slot is left; None while something runs or a slot may come back."""
    fleet = state.fleet
    if fleet.hopeful or not fleet.nodes or any(n.outstanding for n in fleet.nodes.values()):
        return None
    reasons = []
    for n in fleet.nodes.values():
        if n.state in ("away", "busy"):
            return None
        if n.state == "lost":
            reasons.append(f"{n.name} is lost")
        elif n.draining:
            reasons.append(f"{n.name} is draining")
        else:
            for s in n.slots.values():
                if s.state == "quarantined" and s.strikes < state.settings.max_strikes:
                    return None
                reasons.append(f"{n.name} slot {s.name} is {s.state}" + (f" ({s.why})" if s.why else ""))
    return "; ".join(reasons)


def _over(state: State, group: Group) -> str:
    pending = [s for s in group.shapes if state.book.shapes[s].state == "pending"]
    if pending:
        homes = ", ".join(dict.fromkeys(state.book.shapes[s].group for s in pending))
        return f"group {group.id} was split; what is left of it is in {homes}"
    return f"every shape of group {group.id} is settled"


def _sent(state: State, group: Group) -> str:
    a = state.attempts.get(group.attempt or "")
    if a is None:
        return f"group {group.id} was sent"
    if a.state == "started":
        return f"attempt {a.id} runs on {a.node} slot {a.at}"
    if a.state == "claimed":
        return f"attempt {a.id} was claimed on {a.node} and has not been heard of since"
    if a.taking:
        return f"attempt {a.id} is being taken back from {a.node}"
    before = sum(1 for x in state.fleet.nodes[a.node].unclaimed if state.attempts[x].seq < a.seq)
    where = f"{a.node} slot {a.slot}" if a.slot else a.node
    return f"attempt {a.id} is in the inbox of {where} with {plural(before, 'other')} before it"


def _waiting(state: State, group: Group) -> str:
    head = f"group {group.id} waits"
    ticket = state.backlog.ticket(group.id)
    if state.stopped:
        return f"{head}: the run is stopped"
    able = [n for n in state.fleet.nodes.values() if n.state == "joined" and not n.draining and n.ready]
    if not able:
        return f"{head}: {stuck(state) or _not_ready(state)}"
    if ticket is None:
        ended = group.ended
        where = f" on {ended.place[0]} slot {ended.place[1]}" if ended is not None else ""
        return f"{head} for the canary{where}, before its last attempt is judged"
    if ticket.kind == "exclusive":
        return f"{head} for a node of its own: it went down with its node twice, so it runs last and alone"
    if ticket.kind in ("careful", "risky") and all(n.careful for n in able):
        return f"{head}: it was lost with a worker or node once, and one such group runs on a node at a time"
    if ticket.kind == "risky" and len(state.fleet.usable) < state.settings.small_fleet:
        return f"{head} until all else is started: a node was lost with it, and few nodes are left"
    if group.confirms:
        where = ", ".join(f"{node} slot {slot}" for node, slot in group.barred)
        return f"{head} for a slot other than {where}, to try the candidates that faulted there"
    if ticket.avoid and all(n.name in ticket.avoid for n in able):
        return f"{head} for a node other than {', '.join(ticket.avoid)}, where it went wrong"
    return f"{head} for its turn: every node has enough ahead"


def _not_ready(state: State) -> str:
    if not state.fleet.nodes:
        return "no node has joined yet"
    reasons = []
    for n in state.fleet.nodes.values():
        reasons.append(f"{n.name} {_state_of(n)}")
    return "no slot takes work now (" + ", ".join(reasons) + ")"


def _state_of(n: Node) -> str:
    if n.state != "joined":
        return {"lost": "is lost", "busy": "waits for others"}.get(n.state, "is being prepared")
    if n.draining:
        return "is draining"
    return "slots: " + ", ".join(f"{s.name} {s.state}" for s in n.slots.values())
