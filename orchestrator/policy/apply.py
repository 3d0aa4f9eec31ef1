"""Applies events and decisions to the state. Nothing else interprets a record.

Each type of record has one function, in the module of its subject: shapes, attempts, slots, or nodes with their leases.
For a new record write a function there and add it to the module's CHANGES. An event that does not fit the state (an
unknown node, a settled shape) changes nothing, because nodes may report late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator import events as ev
from orchestrator.policy import attempt_changes, node_changes, shape_changes, slot_changes
from orchestrator.policy.model import State

_CHANGES: dict[type[ev.Record], Callable[[State, Any, float], None]] = {
    **shape_changes.CHANGES,
    **attempt_changes.CHANGES,
    **slot_changes.CHANGES,
    **node_changes.CHANGES,
}


def apply(state: State, record: ev.Record, t: float) -> None:
    """Apply a record of the journal to the state, at time `t` (epoch seconds)."""
    kind = type(record)
    if kind is ev.Tick:
        return  # it is not journaled
    if state.last_t is None or t > state.last_t:
        state.last_t = t
    if kind is not ev.WorkAdded:
        if state.first_t is None:
            state.first_t = t
        if kind is ev.Resumed:
            state.sessions.append([t, t])
        elif state.sessions:
            state.sessions[-1][1] = state.last_t
    change = _CHANGES.get(kind)
    if change is not None:
        change(state, record, t)
