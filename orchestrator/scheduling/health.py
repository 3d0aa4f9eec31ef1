"""Quarantine and canaries: which slots get no work for a while, and when they are looked at again (law 6)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from orchestrator.events import AskCanary, Decision, Quarantine
from orchestrator.scheduling.model import Slot
from orchestrator.scheduling.state import State


def quarantines(state: State, now: float) -> Iterator[Decision]:
    """Slots that evidence speaks against."""
    while state.to_quarantine:
        (node, name), why = next(iter(state.to_quarantine.items()))
        yield _quarantine(state, node, name, why, now)


def canaries(state: State, now: float) -> Iterator[Decision]:
    """Slots whose cool-down is over are asked for a canary; silence counts as a failure."""
    while state.asks:
        node, name = next(iter(state.asks))
        yield _ask(state, node, name)
    while state.timers and state.timers[0][0] <= now:
        at, node, name = state.timers[0]
        slot = state.fleet.slot(node, name)
        if slot is None or slot.wake != at:
            heapq.heappop(state.timers)
        elif slot.asked is not None and slot.running is None:
            why = f"no answer to its canary for {state.settings.canary_timeout_s:.0f} s"
            yield _quarantine(state, node, name, why, now)
        else:
            yield _ask(state, node, name)


def cool_down_s(state: State, slot: Slot) -> float:
    """Doubled with each quarantine since a shape was last tuned on the slot."""
    s = state.settings
    first = s.cool_down_s if slot.passed else s.first_cool_down_s
    return float(min(s.max_cool_down_s, first * 2.0 ** min(slot.strikes, 30)))


def _quarantine(state: State, node: str, name: str, why: str, now: float) -> Quarantine:
    slot = state.fleet.slot(node, name)
    return Quarantine(node, name, why, now + (cool_down_s(state, slot) if slot is not None else 0.0))


def _ask(state: State, node: str, name: str) -> AskCanary:
    return AskCanary(node, name, f"canary-{state.next_canary}")
