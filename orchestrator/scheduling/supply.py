"""Choice of the next work for each node: sends, take-backs for idle slots, and what runs last and alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice

from orchestrator.events import Decision, Send, TakeBack
from orchestrator.scheduling.blame import other_slot
from orchestrator.scheduling.book import QueueKind
from orchestrator.scheduling.model import Attempt, Node, Slot, SlotId
from orchestrator.scheduling.state import State

FIRST = 0
"""Sequence number that is claimed before all that waits in an inbox: of attempts to confirm, as the sooner a slot is
known to lose candidates, the less is tuned there in vain; and of long groups."""
ANY = ""
"""Any slot of the node may claim it."""


def sends(state: State) -> Iterator[Send]:
    """Yield work for nodes that have too little queued. Apply each decision before the next is taken."""
    if state.stopped:
        return
    while (send := _next(state)) is not None:
        yield send


def _next(state: State) -> Send | None:
    idlest = state.fleet.by_load.first()
    if idlest is None or not len(state.backlog) or not wants(state, state.fleet.nodes[idlest]):
        return None
    small = len(state.fleet.usable) < state.settings.small_fleet
    before: tuple[QueueKind, ...] = ("suspect", "careful") if small else ("suspect", "careful", "risky")
    send = _send_conditional(state, before)
    if send is not None:
        return send
    group = state.backlog.first("plain")
    node = state.fleet.nodes[idlest]
    turns = node.free or node.ahead_s < len(node.unclaimed) * state.settings.seconds_ahead
    if group is not None and node.free and is_long(state, group):
        idle = [s for s in node.slots.values() if s.idle and not s.named]
        if idle and all(s.doubtful for s in idle):  # a sick slot would cost the run most where the longest group faults
            return make_send(state, state.backlog.last("plain"), idlest, idle[0].name)
    if group is not None and (turns or not is_long(state, group)):
        return make_send(state, group, idlest, choose_slot(state, node, (), 0) or ANY)
    return _send_conditional(state, ("risky",)) if small else None


def wants(state: State, n: Node) -> bool:
    """Return whether the node has too little work queued: fewer groups than the setting, or fewer seconds (or its share
    of all that is not claimed yet, if less), for each ready slot.

    Where another node could have them, groups above those seconds are kept back: long ones on a node with enough to do
    would start late.
    """
    s, ahead = state.settings, len(n.unclaimed)
    if n.free:
        return True
    enough = n.ahead_s >= s.seconds_ahead * n.ready
    if ahead < s.groups_ahead * n.ready:
        return not enough or len(state.fleet.usable) < 2
    share = (state.backlog.cost_s + state.fleet.ahead_s) / max(1, state.fleet.hopeful)
    return not enough and ahead < s.most_ahead * n.ready and n.ahead_s < share * n.ready


def _send_conditional(state: State, kinds: tuple[QueueKind, ...]) -> Send | None:
    for kind in kinds:
        for avoid in state.backlog.buckets(kind):
            group = state.backlog.first(kind, avoid)
            if group is None:
                continue
            found = _find(state, group, careful=kind != "suspect")
            if found is not None:
                return make_send(state, group, *found)
    return None


def _find(state: State, group: str, careful: bool) -> SlotId | None:
    """(node, slot) for a group with conditions: the idlest node that wants work and suits it, but first one where it
    starts at once: an idle node may want it for a slot that is busy, as there is something against the others."""
    g = state.book.groups[group]
    faults, avoid = state.book.avoided(g)
    found: SlotId | None = None
    with closing(state.fleet.by_load.walk()) as nodes:
        for name in nodes:
            node = state.fleet.nodes[name]
            if not wants(state, node) or (found is not None and not node.free):
                return found
            if careful and node.careful:
                continue
            slot = suits(state, faults, avoid, node, g.barred)
            if slot is not None and starts_at_once(node, slot):
                return (name, slot)
            if slot is not None and found is None:
                found = (name, slot)
    return found


def starts_at_once(n: Node, slot: str) -> bool:
    """Return whether a slot with nothing to do claims what is sent there."""
    return n.free > 0 if slot == ANY else n.slots[slot].idle and not n.slots[slot].named


def suits(
    state: State, faults: tuple[SlotId, ...], avoid: tuple[SlotId, ...], n: Node, barred: tuple[SlotId, ...] = ()
) -> str | None:
    """The slot (or ANY) of the node on which a group may run now; None: it must not.

    It faulted at `faults`, and there is something against `avoid`. First come nodes with nothing against them; then
    those where it did not fault; without any it is other slots of the same nodes, and at last the same slots again, but
    never one of `barred`.
    """
    fleet = state.fleet
    faults += tuple(p for p in barred if p not in faults)
    for places in (faults + avoid, faults):
        hosts = {fleet.host(node) for node, _ in places}
        if any(fleet.nodes[name].host not in hosts for name in fleet.usable):
            if n.host in hosts:
                return None
            trust = _best_trust(state, hosts) if faults else 0
            if trust and not (n.proven if trust > 1 else n.clean):
                return None
            slot = choose_slot(state, n, avoid, trust)
            return slot if slot is not None or avoid == barred else choose_slot(state, n, barred, trust)
    spared = state.may_grow or other_slot(state, faults)
    return choose_slot(state, n, faults if spared else barred, 0)


def _best_trust(state: State, without: set[str]) -> int:
    """Highest trust of a slot outside these hosts."""
    fleet = state.fleet
    nodes = fleet.on_hosts(without)
    if fleet.proven > sum(n.proven for n in nodes):
        return 2
    return int(fleet.clean > sum(n.clean for n in nodes))


def choose_slot(state: State, n: Node, places: tuple[SlotId, ...], trust: int) -> str | None:
    """ANY where every slot that might claim it may run it, else the least busy slot that may; None: none may."""
    fleet, fit = state.fleet, list[Slot]()
    all_fit = True
    for s in n.slots.values():
        fits = fleet.place(n.name, s.name) not in places and s.trust >= trust
        if s.state == "ready" and fits:
            fit.append(s)
        elif s.state == "starting":
            all_fit = all_fit and fits
        elif s.state == "ready" or (s.state == "quarantined" and not s.sick):
            all_fit = False  # its worker would claim what any may claim
    if not fit:
        return None
    if all_fit:
        return ANY
    return min(fit, key=lambda s: ((s.running is not None) + s.checking + s.named, len(s.name), s.name)).name


def is_long(state: State, group: str) -> bool:
    """Return whether the group takes longer than a slot should have queued: where another node could have it, it is
    sent to a slot that is about to be free, and claimed next there."""
    cost = state.book.cost_s(state.book.groups[group])
    return cost > state.settings.seconds_ahead and len(state.fleet.usable) > 1


def make_send(state: State, group: str, node: str, slot: str) -> Send:
    g = state.book.groups[group]
    seq = FIRST if g.confirms or is_long(state, group) else state.next_seq
    return Send(f"{group}-{g.attempts + 1}", group, node, slot or None, seq, g.only)


LOOKED_AT = 64
"""Unclaimed attempts that are considered for one idle slot."""


def recalls(state: State) -> Iterator[Decision]:
    """Take back what must not, or need not, run where it waits."""
    while state.recall:
        attempt = next(iter(state.recall))
        yield TakeBack(attempt, state.attempts[attempt].node)


def balance(state: State) -> Iterator[Decision]:
    """Take back the last attempt of the node with the most work queued, where nothing else waits for an idle slot.

    Never more than there are idle slots, never what an idle slot of its own node is about to claim, and never what
    would wait for a busy slot again, so that no attempt goes to and fro.
    """
    while not state.stopped and state.fleet.free > state.fleet.taking:
        idle = state.fleet.by_load.first()
        if idle is None or not state.fleet.nodes[idle].free:
            return
        found = _spare_for(state, state.fleet.nodes[idle])
        if found is None:
            return
        yield TakeBack(found.id, found.node)


def _spare_for(state: State, idle: Node) -> Attempt | None:
    with closing(state.fleet.by_spare.walk()) as nodes:
        spares = (a for name in nodes for a in _spares(state, state.fleet.nodes[name]))
        return next((a for a in islice(spares, LOOKED_AT) if not a.exclusive and _starts_on(state, a, idle)), None)


def _spares(state: State, n: Node) -> Iterator[Attempt]:
    """Yield the unclaimed attempts of the node that no idle slot there is about to claim, the last first."""
    idle = {s.name: s.named for s in n.slots.values() if s.idle}
    bare = max(0, sum(not named for named in idle.values()) - n.claimed)
    for a in (state.attempts[id_] for id_ in reversed(n.unclaimed)):
        if a.slot is None:
            spare = n.anyone > bare
        else:
            spare = a.slot not in idle or (idle[a.slot] > 1 and a.seq != FIRST)
        if spare:
            yield a


def _starts_on(state: State, a: Attempt, n: Node) -> bool:
    """Return whether the attempt's group, sent to the node, would go to a slot with nothing to do: else it would wait
    there as it waits now, and be taken back again."""
    group = state.book.groups[a.group]
    if a.careful and n.careful - (a.node == n.name) > 0:
        return False
    faults, avoid = state.book.avoided(group)
    if faults or avoid or group.barred:
        slot = suits(state, faults, avoid, n, group.barred)
    else:
        slot = choose_slot(state, n, (), 0)
    return slot is not None and starts_at_once(n, slot)


def exclusives(state: State) -> Iterator[Decision]:
    """Send shapes that were lost with their node twice: when nothing else is left to start, one on each empty node."""
    while not state.stopped and not state.fleet.taking and len(state.backlog) and state.backlog.only_exclusive():
        send = _exclusive(state)
        if send is None:
            return
        yield send


def _exclusive(state: State) -> Send | None:
    empty = [n for n in state.fleet.nodes.values() if _is_empty(state, n)]
    if not empty:
        return None
    for avoid in state.backlog.buckets("exclusive"):
        group = state.backlog.first("exclusive", avoid)
        if group is None:
            continue
        g = state.book.groups[group]
        faults, _ = state.book.avoided(g)
        fresh = any(state.book.shapes[s].ends for s in state.book.left(g))
        if fresh and _fresh_comes(state):
            continue
        # first a node that it has not taken down yet: if it passes there, it was not to blame
        for node in sorted(empty, key=lambda n: (n.host in avoid, fresh and n.used and n.lease != "", n.index)):
            slot = suits(state, faults, (), node, g.barred)
            if slot is not None:
                return make_send(state, group, node.name, slot)
    return None


def _fresh_comes(state: State) -> bool:
    """Return whether a lease on which nothing ran yet is about to be ready."""
    nodes = (state.fleet.nodes[name] for name in state.fleet.usable)
    return any(not n.used and n.name not in state.fleet.by_load for n in nodes)


def _is_empty(state: State, n: Node) -> bool:
    if n.name not in state.fleet.by_load or n.outstanding:
        return False
    return all(s.running is None for s in n.slots.values())
