"""Judges the evidence: whether a shape fails, with which result it is settled, and whether a GPU goes into quarantine.

Everything here only reads the state. evidence.py writes the evidence while records are applied, and asks
`has_enough_evidence` after each change; then the shape awaits its verdict. decide.py asks `first_known_verdict`
for a verdict that needs no wait, `next_verdict` for one that is due, and `quarantine_for` for the decision on a slot.

A shape waits for its verdict because a sick GPU must not condemn it: a fault is proven once its GPU has tuned
something else since. A GPU that goes into quarantine before that takes its faults back (evidence.py::void_faults).
"""

from __future__ import annotations

from orchestrator.events import FailShape, Quarantine, SettleShape
from orchestrator.policy.model import Fault, Gpu, Place, Shape, Slot, State, describe_place


def has_enough_evidence(state: State, shape: Shape) -> bool:
    """Return whether the evidence against the shape is enough for a verdict.

    The first of these rules that applies decides:

    1. A noisy result is measured once more, however that ends.
    2. A result without some candidates is enough if each of them faulted on another GPU as well.
    3. Otherwise the shape must have faulted at least once while it had a process for itself, because a tuner isolates
       candidates only then. And its attempts must have ended alike on
       - two nodes, while a usable node is left on which it was not tried;
       - two GPUs, if there is no such node;
       - one GPU, if no other is usable and none may come: twice, or once if the shape has a result.
    """
    if shape.noisy:
        return bool(shape.faults) and shape.faults[-1].attempt != shape.noisy
    if _confirmed_result(shape) is not None:
        return True
    if not any(fault.was_alone for fault in shape.faults):
        return False
    places = _agreeing_places(shape)
    if len({host for host, _ in places}) > 1:
        return True
    places_tried = {fault.place for fault in shape.faults}
    hosts_tried = {host for host, _ in places_tried}
    if not state.hosts.keys() <= hosts_tried:
        return False
    if len(places) > 1:
        return True
    if state.may_grow or not state.usable.keys() <= places_tried:
        return False
    return len(shape.faults) > 1 or bool(shape.result)


def _agreeing_places(shape: Shape) -> set[Place]:
    """The places whose attempts ended alike at the shape: by a fault, or by the tuner's verdict. The larger set."""
    ends = [fault for fault in shape.faults if not fault.blocked]
    by_fault = {fault.place for fault in ends if not fault.reason.is_verdict}
    by_verdict = {fault.place for fault in ends if fault.reason.is_verdict}
    return by_fault if len(by_fault) >= len(by_verdict) else by_verdict


def _confirmed_result(shape: Shape) -> Fault | None:
    """A result whose missing candidates all faulted on another GPU as well, None if there is none.

    ledger/blocked.py judges each candidate by the same rule, for the nodes' lists and for provenance.json.
    """
    for fault in shape.faults:
        elsewhere = [other.blocked for other in shape.faults if other.place != fault.place]
        if fault.blocked and fault.blocked <= frozenset().union(*elsewhere):
            return fault
    return None


def first_known_verdict(state: State) -> FailShape | SettleShape:
    """The first verdict of those in `State.decided`. A shape that has a noisy result does not fail: that settles it."""
    verdict = next(iter(state.decided.values()))
    shape = state.shapes[verdict.shape]
    if isinstance(verdict, FailShape) and shape.noisy:
        return settle_with_result(shape, verdict.detail)
    return verdict


def next_verdict(state: State, now: float) -> FailShape | SettleShape | None:
    """The next verdict that is due at `now`, None if there is none.

    A verdict is due when every fault of the shape is proven (then its time in `awaiting_verdict` is 0), when `proof_s`
    seconds have passed since the last fault, or when no work is left that could prove one.
    """
    has_work = bool(state.waiting or state.isolated)
    for shape_id, due in state.awaiting_verdict.items():
        shape = state.shapes[shape_id]
        if due <= now or (not has_work and not _may_still_be_proven(state, shape)):
            return _verdict(state, shape)
    return None


def _may_still_be_proven(state: State, shape: Shape) -> bool:
    """Return whether a GPU whose fault is not proven yet has work, and so may tune something."""
    slots = [state.usable.get(fault.place) for fault in shape.faults if not fault.is_proven]
    return any(slot is not None and (slot.running or slot.queued or slot.is_checking) for slot in slots)


def _verdict(state: State, shape: Shape) -> FailShape | SettleShape:
    """The end of a shape with enough evidence: a result without the candidates that faulted, or a failure."""
    last = shape.faults[-1]
    if shape.noisy:
        return settle_with_result(shape, last.detail or last.reason.message)
    places = ", ".join(f"{describe_place(fault.place, state.nodes)} ({fault.reason.value})" for fault in shape.faults)
    is_confirmed = len({fault.place for fault in shape.faults}) > 1
    seen = f"seen on {places}" if is_confirmed else f"seen on {places}; unconfirmed: only one slot"
    result = _confirmed_result(shape)
    if result is not None:
        return SettleShape(shape.id, result.attempt, True, f"candidates faulted; {seen}")
    if shape.result:
        return SettleShape(shape.id, shape.result, False, f"candidates faulted; {seen}")
    # of several faults for the same reason report the first: a later one may only say that candidates were left out
    fault = next(fault for fault in shape.faults if fault.reason is last.reason)
    detail = f"{fault.detail}; {seen}" if fault.detail else seen
    return FailShape(shape.id, fault.reason, detail, fault.attempt, is_confirmed)


def settle_with_result(shape: Shape, why: str) -> SettleShape:
    """The decision to settle the shape with the result that it has, although that is not final. A noisy result is
    complete, and so confirmed; any other lacks candidates that faulted on one GPU only."""
    if shape.noisy:
        return SettleShape(shape.id, shape.noisy, True, f"its time is noise, measured again without a result: {why}")
    return SettleShape(shape.id, shape.result, False, why)


def is_suspicious(state: State, gpu: Gpu) -> bool:
    """Return whether a GPU where a shape faulted for the first time should go into quarantine.

    It should if it was in quarantine before and has tuned nothing since. Otherwise chance must be unlikely to explain
    its streak of bad ends: at the fault rate of the rest of the run such a streak must be less likely than `streak_p`.
    Both counts behind that rate begin at one, so that it is never 0 or 1.
    """
    if gpu.quarantines > 0:
        return True
    faults_elsewhere = state.first_faults - gpu.fault_streak + 1
    rate = faults_elsewhere / (faults_elsewhere + state.tuned + 1)
    return gpu.fault_streak >= state.settings.least_streak and rate**gpu.fault_streak <= state.settings.streak_p


def quarantine_for(state: State, slot: Slot, why: str, now: float) -> Quarantine:
    """The decision to put a slot in quarantine. Its time doubles each time until the slot tunes something."""
    settings = state.settings
    first_s = settings.cool_down_s if slot.gpu.passed else settings.first_cool_down_s
    seconds = min(settings.max_cool_down_s, first_s * 2.0 ** min(slot.gpu.quarantines, 30))
    return Quarantine(*slot.id, why, now + seconds)
