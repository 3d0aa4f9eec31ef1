"""Scheduling policy: events in, decisions out. No clock, no socket, no file; see docs/explanation/scheduling.md.

    handle(event, now) == apply(event, now), decide, apply every decision

so that a journal of events and decisions, applied in order, gives the same state as having lived through it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.events import Decision, Event, FailShape, Record, Split
from orchestrator.scheduling import blame, confirm, supply
from orchestrator.scheduling.blame import judge
from orchestrator.scheduling.model import PolicySettings
from orchestrator.scheduling.state import State
from orchestrator.scheduling.transitions import DECISIONS, EVENTS
from orchestrator.scheduling.wait_reasons import stuck, why


@dataclass(frozen=True, slots=True)
class Outstanding:
    """An attempt that was sent and has not ended. `slot`: the one it was sent to, or that runs it; None: any."""

    attempt: str
    group: str
    node: str
    slot: str | None
    seq: int
    alone: bool
    started: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the run in shapes. `stuck`: why no slot is left to work on, where that is so."""

    total: int
    tuned: int
    failed: int
    running: int
    pending: int
    stopped: bool
    done: bool
    stuck: str | None


class Policy:
    """Policy of one run. Not thread-safe: one loop owns it."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self._state = State(settings or PolicySettings())

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Apply an event; return the decisions that follow, in order. `now` in epoch seconds."""
        self.apply(event, now)
        out = []
        for decision in self._decide(now):
            self.apply(decision, now)
            out.append(decision)
        return out

    def apply(self, record: Record, t: float) -> None:
        """Apply a record to the state without deciding anything: for the replay of a journal."""
        if isinstance(record, Event):
            on_event = EVENTS.get(type(record))
            if on_event is not None:
                on_event(self._state, record, t)
        else:
            DECISIONS[type(record)](self._state, record, t)

    def _decide(self, now: float) -> Iterator[Decision]:
        """Yield one decision after the other; the state changes between them."""
        state = self._state
        while state.refused:
            shape, (attempt, reason, detail) = next(iter(state.refused.items()))
            yield FailShape(shape, reason, detail, attempt, confirmed=True)
        while state.retried:
            root, shapes = next(iter(state.retried.items()))
            child = next(state.book.child_names(state.book.groups[root]))
            yield Split(root, ((child, shapes),), "tried again on request")
        yield from confirm.decide(state)
        for group in list(state.awaiting_verdict):
            if group in state.awaiting_verdict:
                yield from judge(state, state.book.groups[group], now)
        yield from blame.quarantines(state, now)
        yield from confirm.unconfirmable(state)
        if not state.stopped:
            yield from blame.canaries(state, now)
        yield from supply.recalls(state)
        yield from supply.sends(state)
        yield from supply.balance(state)
        yield from supply.exclusives(state)

    # --- queries ------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Counts of shapes. `running`: slots at work, a shape each."""
        book, running = self._state.book, self._state.fleet.running
        done = not book.pending
        return Progress(
            total=len(book.shapes),
            tuned=book.tuned,
            failed=book.failed,
            running=min(running, book.pending),
            pending=book.pending - min(running, book.pending),
            stopped=self._state.stopped,
            done=done,
            stuck=None if done or self._state.stopped else stuck(self._state),
        )

    def settled(self, shape: int) -> bool:
        """Whether the shape was tuned or failed."""
        known = self._state.book.shapes.get(shape)
        return known is not None and known.state != "pending"

    def outstanding(self) -> list[Outstanding]:
        """Attempts sent and not ended, in the order they were sent."""
        state = self._state
        found = [state.attempts[a] for n in state.fleet.nodes.values() for a in n.outstanding]
        return [
            Outstanding(a.id, a.group, a.node, a.at or a.slot, a.seq, a.alone, a.state == "started")
            for a in sorted(found, key=lambda a: a.seq)
        ]

    def is_outstanding(self, attempt: str) -> bool:
        a = self._state.attempts.get(attempt)
        return a is not None and a.state != "over"

    def shapes_of(self, group: str) -> tuple[int, ...]:
        """The shapes of the group's latest attempt; before the first, those that are not settled."""
        known = self._state.book.groups[group]
        return known.sent or self._state.book.left(known)

    def why(self, what: str | int) -> str:
        """One sentence: where a group (or a shape) is and what it waits for."""
        return why(self._state, what)

    def digest(self) -> str:
        """Hash of everything that decisions depend on."""
        return digest(self._state)


def digest(state: State) -> str:
    """Hash of everything that decisions depend on: equal digests decide equally. Costs O(shapes): for tests."""
    book, fleet = state.book, state.fleet
    parts: list[object] = [
        list(book.shapes.values()),
        list(book.groups.values()),
        (book.tuned, book.failed),
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
