"""Which group goes where: keeps every node supplied, longest first, and brings choosy groups to the right slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from orchestrator.events import Send
from orchestrator.scheduling.backlog import Kind
from orchestrator.scheduling.model import Node, Place, Slot
from orchestrator.scheduling.state import State

ANY = ""
"""Any slot of the node may claim it."""


def sends(state: State) -> Iterator[Send]:
    """Work for nodes that have too little ahead. Each decision must be applied before the next is asked for."""
    if state.stopped:
        return
    while (send := _next(state)) is not None:
        yield send


def _next(state: State) -> Send | None:
    idlest = state.fleet.by_load.first()
    if idlest is None or not len(state.backlog) or not wants(state, state.fleet.nodes[idlest]):
        return None
    small = len(state.fleet.usable) < state.settings.small_fleet
    before: tuple[Kind, ...] = ("suspect", "careful") if small else ("suspect", "careful", "risky")
    send = _choosy(state, before)
    if send is not None:
        return send
    group = state.backlog.first("plain")
    if group is not None:
        node = state.fleet.nodes[idlest]
        return _send(state, group, idlest, choose_slot(state, node, (), False) or ANY)
    return _choosy(state, ("risky",)) if small else None


def wants(state: State, n: Node) -> bool:
    """Whether the node has too little ahead: fewer groups, or less than the seconds (or its share of all that is not
    claimed yet, where that is less) for each ready slot."""
    s, ahead = state.settings, len(n.unclaimed)
    if n.free or ahead < s.groups_ahead * n.ready:
        return True
    share = (state.backlog.cost_s + state.fleet.ahead_s) / max(1, state.fleet.hopeful)
    return ahead < s.most_ahead * n.ready and n.ahead_s < min(s.seconds_ahead, share) * n.ready


def _choosy(state: State, kinds: tuple[Kind, ...]) -> Send | None:
    for kind in kinds:
        for avoid in state.backlog.buckets(kind):
            group = state.backlog.first(kind, avoid)
            if group is None:
                continue
            found = _find(state, group, careful=kind != "suspect")
            if found is not None:
                return _send(state, group, *found)
    return None


def _find(state: State, group: str, careful: bool) -> Place | None:
    """(node, slot) for a choosy group: the idlest node that wants work and suits it."""
    places = state.book.avoided(state.book.groups[group])
    with closing(state.fleet.by_load.walk()) as nodes:
        for name in nodes:
            node = state.fleet.nodes[name]
            if not wants(state, node):
                return None
            if careful and node.careful:
                continue
            slot = suits(state, places, node)
            if slot is not None:
                return (name, slot)
    return None


def suits(state: State, places: tuple[Place, ...], n: Node) -> str | None:
    """The slot (or ANY) of the node on which a group may run now that did badly at `places`; None: it must not.

    First nodes where it did no harm, on slots that did none of late; without such a node other slots of the same;
    without such a slot the same again.
    """
    fleet = state.fleet
    avoid = tuple(dict.fromkeys(node for node, _ in places))
    outside = len(fleet.usable) - sum(1 for name in avoid if name in fleet.usable)
    if outside:
        if n.name in avoid:
            return None
        trusted = fleet.trusted - sum(fleet.nodes[name].trusted for name in avoid if name in fleet.nodes)
        return choose_slot(state, n, (), trusted > 0)
    spared = any(
        s.hopeful and (name, s.name) not in places
        for name in avoid
        if name in fleet.usable
        for s in fleet.nodes[name].slots.values()
    )
    return choose_slot(state, n, places if spared else (), False)


def choose_slot(state: State, n: Node, places: tuple[Place, ...], only_trusted: bool) -> str | None:
    """ANY where every slot that would claim it may have it, else the least busy one that may; None: none may."""
    fit: list[Slot] = []
    all_fit = True
    for s in n.slots.values():
        if s.state == "ready" and (n.name, s.name) not in places and not (only_trusted and s.streak):
            fit.append(s)
        elif s.state == "ready" or (s.state == "quarantined" and not s.sick):
            all_fit = False  # its worker would claim what any may claim
        elif s.state == "starting" and (places or only_trusted):
            all_fit = False
    if not fit:
        return None
    if all_fit:
        return ANY
    return min(fit, key=lambda s: ((s.running is not None) + s.checking + s.named, len(s.name), s.name)).name


def _send(state: State, group: str, node: str, slot: str) -> Send:
    number = state.book.groups[group].attempts + 1
    return Send(f"{group}-{number}", group, node, slot or None, state.next_seq)
