"""A hash of the policy's state: two policies with the same digest decide the same from here on."""

from __future__ import annotations

import hashlib

from orchestrator.scheduling.state import State


def digest(state: State) -> str:
    """Covers everything that decisions hang on; costs O(shapes), so it is for tests and for doubts."""
    book, fleet = state.book, state.fleet
    parts: list[object] = [
        list(book.shapes.values()),
        list(book.groups.values()),
        (book.tuned, book.failed, book.cost_left_s),
        state.backlog.state(),
        [a for a in state.attempts.values() if a.state != "over" or a.lost],
        list(fleet.nodes.values()),
        (fleet.by_load.items(), fleet.by_spare.items(), sorted(fleet.usable)),
        (fleet.ahead_s, fleet.free, fleet.hopeful, fleet.clean, fleet.proven, fleet.taking),
        list(state.unattributed_faults.items()),
        [
            list(q)
            for q in (
                state.awaiting_verdict,
                state.retried,
                state.refused,
                state.recall,
                state.to_quarantine,
                state.asks,
            )
        ],
        sorted(t for t in set(state.timers) if _is_live(state, *t)),
        [list(q.items()) for q in (state.charges, state.convicted, state.unsure, state.unsure_waiting)],
        [list(state.incomplete), list(state.reopened), state.trials, state.charged],
        (state.stopped, state.epoch, state.next_seq, state.next_canary),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _is_live(state: State, at: float, node: str, name: str) -> bool:
    slot = state.fleet.slot(node, name)
    return slot is not None and slot.wake == at
