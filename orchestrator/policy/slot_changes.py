"""Applies the records about slots: canaries, quarantine, and a worker that is given up.

A canary is a tiny shape with a known answer. A worker runs one by itself at its start and after a bad end; the policy
requests one (AskCanary) after a quarantine and after a loss of the node. model.py::Slot draws the states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator import events as ev
from orchestrator.policy import evidence
from orchestrator.policy.model import Slot, State
from orchestrator.policy.work_queue import close_attempt, refresh_slot, requeue_rest

HOPELESS_QUARANTINES = 30
"""We count this many quarantines for a slot whose tuner can never start, so that nobody waits for it."""
MOST_TIMED = 200
"""Timed canaries that we keep for a slot."""


def set_slot(state: State, slot: Slot, to: Any, why: str, t: float) -> None:
    """Move the slot to a state, with the reason, and count it anew (work_queue.py)."""
    if (to, why) != (slot.state, slot.why):
        slot.state = to
        slot.why = why
        slot.history.append((t, to, why))
    refresh_slot(state, slot)


def give_up_slot(state: State, slot: Slot, detail: str, t: float, *, with_node: bool) -> None:
    """Close everything that the slot had as lost, and charge the shapes that may have been in flight.

    That is the shape that we know of. On a lost node it may be the next one too: our news is some milliseconds old, and
    a worker goes on by itself, even while we wait for a canary or for the answer to a take-back.
    """
    attempts = [state.attempts[i] for i in (slot.running, *slot.queued) if i is not None]
    ahead = [(attempt, state.shapes[s]) for attempt in attempts for s in attempt.ahead]
    in_flight = 0 if slot.running is None else 1
    if with_node and not slot.canary_failed:
        in_flight += 1
    for attempt, shape in ahead[:in_flight]:
        if shape.state == "pending":
            evidence.record_loss(state, shape, attempt, with_node=with_node, detail=detail)
    for attempt in attempts:
        attempt.detail = attempt.detail or detail
        close_attempt(state, attempt, t, lost=True)
        requeue_rest(state, attempt)
    forget_awaited(state, slot)


def forget_awaited(state: State, slot: Slot) -> None:
    """Forget what we waited for from the slot: its canary, its quarantine, its answer."""
    slot.is_checking = False
    slot.canary_failed = False
    slot.requested_canary = ""
    slot.suspect_end = None
    state.to_ask_canary.pop(slot.id, None)
    state.to_quarantine.pop(slot.id, None)
    state.canary_due.pop(slot.id, None)


def _slot_lost(state: State, event: ev.SlotLost, t: float) -> None:
    slot = state.slot(event.node, event.slot)
    if slot is not None and slot.state != "lost":
        slot.orphaned = None
        set_slot(state, slot, "lost", event.detail, t)
        give_up_slot(state, slot, event.detail, t, with_node=False)


def _slot_with_canary(state: State, event: ev.CanaryPassed | ev.CanaryFailed) -> Slot | None:
    """The slot whose canary ended, None if it or its node was given up."""
    slot = state.slot(event.node, event.slot)
    if slot is None or slot.state == "lost" or state.nodes[event.node].state in ("lost", "gone"):
        return None
    return slot


def _canary_passed(state: State, event: ev.CanaryPassed, t: float) -> None:
    slot = _slot_with_canary(state, event)
    if slot is None:
        return
    slot.is_checking = False
    slot.orphaned = None
    slot.suspect_end = None
    slot.gpu.passed = True
    slot.canary_us.append(event.us)
    state.to_ask_canary.pop(slot.id, None)
    # if something other than a canary caused the quarantine, only the canary that we request at its end can end it
    if slot.state != "quarantined" or slot.canary_failed or slot.requested_canary:
        slot.requested_canary = ""
        slot.gpu.quarantine_why = ""
        state.canary_due.pop(slot.id, None)
        set_slot(state, slot, "ready", "", t)
    slot.canary_failed = False
    refresh_slot(state, slot)


def _canary_failed(state: State, event: ev.CanaryFailed, t: float) -> None:
    slot = _slot_with_canary(state, event)
    if slot is None:
        return
    evidence.record_failed_canary(state, slot)
    slot.canary_failed = True
    slot.is_checking = False
    slot.requested_canary = ""
    slot.orphaned = None
    slot.suspect_end = None
    slot.history.append((t, "canary failed", event.detail))
    if event.final:
        slot.gpu.quarantines = max(slot.gpu.quarantines, HOPELESS_QUARANTINES)
    state.to_quarantine[slot.id] = f"the canary failed: {event.detail}"


def _canary_timed(state: State, event: ev.CanaryTimed, t: float) -> None:
    slot = state.slot(event.node, event.slot)
    if slot is not None:
        slot.timed_canaries.append((t, event))
        del slot.timed_canaries[:-MOST_TIMED]


def _quarantine(state: State, decision: ev.Quarantine, t: float) -> None:
    slot = state.nodes[decision.node].slots[decision.slot]
    state.to_quarantine.pop(slot.id, None)
    state.to_ask_canary.pop(slot.id, None)
    state.canary_due[slot.id] = decision.until
    slot.is_checking = False
    slot.requested_canary = ""
    slot.gpu.quarantine_why = decision.why
    slot.gpu.quarantined_until = decision.until
    slot.gpu.quarantines += 1
    slot.gpu.faults_passed_elsewhere.clear()
    set_slot(state, slot, "quarantined", decision.why, t)
    evidence.void_faults(state, slot.gpu)
    refresh_slot(state, slot)


def _ask_canary(state: State, decision: ev.AskCanary, t: float) -> None:
    slot = state.nodes[decision.node].slots[decision.slot]
    state.to_ask_canary.pop(slot.id, None)
    state.canaries[decision.attempt] = slot.id
    slot.requested_canary = decision.attempt
    seconds = state.settings.orphan_canary_s if slot.orphaned else state.settings.canary_s
    state.canary_due[slot.id] = t + seconds


CHANGES: dict[type[ev.Record], Callable[[State, Any, float], None]] = {
    ev.SlotLost: _slot_lost,
    ev.CanaryPassed: _canary_passed,
    ev.CanaryFailed: _canary_failed,
    ev.CanaryTimed: _canary_timed,
    ev.Quarantine: _quarantine,
    ev.AskCanary: _ask_canary,
}
