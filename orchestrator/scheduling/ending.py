"""The end of a run: work is taken back for idle nodes, and what may kill a node runs last, alone on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from orchestrator.events import Decision, Send, TakeBack
from orchestrator.scheduling.model import Attempt, Node
from orchestrator.scheduling.state import State
from orchestrator.scheduling.supply import choose_slot, make_send, suits

LOOKED_AT = 64
"""Unclaimed attempts that are looked at for one idle slot."""


def recalls(state: State) -> Iterator[Decision]:
    """Take back what must not or need not run where it waits."""
    while state.recall:
        attempt = next(iter(state.recall))
        yield TakeBack(attempt, state.attempts[attempt].node)


def balance(state: State) -> Iterator[Decision]:
    """Nothing waits that an idle slot could have: take back the last of the node with the most ahead.

    Never more than there are idle slots, and never what an idle slot of its own node is about to claim: so nothing
    goes to and fro.
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
    looked = 0
    with closing(state.fleet.by_spare.walk()) as nodes:
        for name in nodes:
            for id_ in reversed(state.fleet.nodes[name].unclaimed):
                looked += 1
                if looked > LOOKED_AT:
                    return None
                a = state.attempts[id_]
                if not a.exclusive and _may_run(state, a, idle):
                    return a
    return None


def _may_run(state: State, a: Attempt, n: Node) -> bool:
    group = state.book.groups[a.group]
    if a.careful and n.careful - (a.node == n.name) > 0:
        return False
    faults, others = state.book.avoided(group)
    if faults or others or group.barred:
        return suits(state, faults, others, n, group.barred) is not None
    return choose_slot(state, n, (), 0) is not None


def exclusives(state: State) -> Iterator[Decision]:
    """Shapes that went down with their node twice: when nothing else is left to start, one on each empty node."""
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
        # first a node that it has not taken down yet: if it passes there, it was the others
        for node in sorted(empty, key=lambda n: (n.name in avoid, n.index)):
            slot = suits(state, faults, (), node, g.barred)
            if slot is not None:
                return make_send(state, group, node.name, slot)
    return None


def _is_empty(state: State, n: Node) -> bool:
    if n.name not in state.fleet.by_load or n.outstanding:
        return False
    return all(s.running is None for s in n.slots.values())
