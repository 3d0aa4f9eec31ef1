"""Writes down the evidence for and against shapes and GPUs, while the modules `*_changes.py` apply records.

A fault (`Fault`) is an attempt's bad end at a shape, or a result without candidates that faulted. Its life:

    record_fault --> unproven                       the shape may be to blame, or the GPU
    unproven --record_tuned--> proven               its GPU tuned something since: it counts against the shape
    unproven --void_faults--> removed               its GPU went into quarantine: it says nothing about the shape
    any --strike_out--> removed                     its attempt was given up too early, or its lease was ending
    any --charge_other_gpus--> any                  the shape was tuned elsewhere: it counts against its GPU

Losses and lease ends are counted apart from faults: they have limits of their own, and use up no try. Whoever reaches
a limit here gets its verdict at once (`State.decided`, `State.to_quarantine`); the others await it (blame.py), and
decide.py makes the decisions.
"""

from __future__ import annotations

from orchestrator.events import FailShape
from orchestrator.policy.blame import has_enough_evidence, is_suspicious, settle_with_result
from orchestrator.policy.model import (
    Attempt,
    Candidate,
    Fault,
    Gpu,
    Loss,
    Place,
    Shape,
    Slot,
    State,
    describe_end_cause,
    describe_place,
)
from orchestrator.policy.work_queue import isolate, refresh_slot, withdraw
from orchestrator.reasons import Reason
from worker.text import plural


def record_fault(
    state: State,
    shape: Shape,
    attempt: Attempt,
    reason: Reason,
    detail: str,
    t: float,
    *,
    blocked: frozenset[Candidate] = frozenset(),
    is_new: bool = True,
) -> None:
    """Record that the attempt ended badly at the shape at time `t`, or that its result lacks the candidates `blocked`.
    This uses up a try, may put the slot on the list for quarantine, and may make the shape await its verdict.

    Not `is_new`: these candidates faulted before this run, so they say nothing about the GPU now.
    """
    slot = state.slot_of(attempt)
    gpu = slot.gpu
    if gpu.quarantine_why:
        return  # the attempt was claimed before the quarantine, and says nothing
    if is_new and not shape.faults:
        gpu.fault_streak += 1
        state.first_faults += 1
    fault = Fault(shape.id, gpu.place, attempt.id, reason, detail, t, len(attempt.shapes) == 1, blocked)
    shape.faults.append(fault)
    gpu.unproven_faults.append(fault)
    count_try(state, shape, reason, attempt.id)
    if is_new and len(state.usable) > 1 and is_suspicious(state, gpu):
        request_quarantine(state, gpu.place, f"{plural(gpu.fault_streak, 'bad end')} in a row")
    refresh_slot(state, slot)
    if has_enough_evidence(state, shape):
        withdraw(state, shape)
        state.awaiting_verdict[shape.id] = t + state.settings.proof_s


def request_quarantine(state: State, place: Place, why: str) -> None:
    """Put the slot of a place on the list for quarantine, if it is usable; the first reason stays."""
    slot = state.usable.get(place)
    if slot is not None:
        state.to_quarantine.setdefault(slot.id, why)


def count_try(state: State, shape: Shape, reason: Reason, attempt: str) -> None:
    """Count a try that the attempt used up. After the last one the shape is settled with the result that it has, or
    fails for the reason."""
    shape.tries += 1
    if shape.tries < state.settings.tries:
        return
    why = f"given up after {plural(shape.tries, 'try', 'tries')}"
    if shape.result:
        state.decided[shape.id] = settle_with_result(shape, why)
    else:
        state.decided[shape.id] = FailShape(shape.id, reason, why, attempt, False)


def record_tuned(state: State, gpu: Gpu) -> None:
    """Record that the GPU tuned something: it works, so the faults before it are proven. A shape all of whose faults
    are proven gets its verdict now."""
    for fault in gpu.unproven_faults:
        fault.is_proven = True
    for fault in gpu.unproven_faults:
        shape = state.shapes[fault.shape]
        if shape.id in state.awaiting_verdict and all(other.is_proven for other in shape.faults):
            state.awaiting_verdict[shape.id] = 0.0
    gpu.unproven_faults.clear()
    gpu.fault_streak = 0
    gpu.quarantines = 0


def void_faults(state: State, gpu: Gpu) -> None:
    """Remove the faults of a GPU that goes into quarantine, as far as they are not proven."""
    for fault in gpu.unproven_faults:
        strike_out(state, state.shapes[fault.shape], fault.attempt)
    gpu.unproven_faults.clear()


def strike_out(state: State, shape: Shape, attempt: str) -> bool:
    """Remove the attempt's evidence against the shape, and the verdict if that rested on it. Return whether there was
    any evidence."""
    faults = [fault for fault in shape.faults if fault.attempt != attempt]
    losses = [loss for loss in shape.losses if loss.attempt != attempt]
    if len(faults) == len(shape.faults) and len(losses) == len(shape.losses):
        return False
    shape.tries -= len(shape.faults) - len(faults)
    shape.faults = faults
    shape.losses = losses
    if shape.state == "pending":
        state.decided.pop(shape.id, None)
        if shape.id in state.awaiting_verdict and not has_enough_evidence(state, shape):
            del state.awaiting_verdict[shape.id]
            if not shape.copies:
                isolate(state, (shape.id,))
    return True


def charge_other_gpus(state: State, shape: Shape, place: Place) -> None:
    """Count the shape's faults against their GPUs, because it was tuned at `place`. After a few of them, of at least
    two shapes, such a GPU goes into quarantine."""
    for fault in shape.faults:
        gpu = state.gpus[fault.place]
        if fault.place == place or fault.blocked or gpu.quarantine_why:
            continue
        passed_elsewhere = gpu.faults_passed_elsewhere
        passed_elsewhere.append(shape.id)
        if len(passed_elsewhere) >= state.settings.faults_passed_elsewhere and len(set(passed_elsewhere)) > 1:
            request_quarantine(state, fault.place, f"{plural(len(passed_elsewhere), 'fault')} here passed elsewhere")


def record_failed_canary(state: State, slot: Slot) -> None:
    """Record that the slot's canary failed, which may be due to the shape at which its last attempt ended. If it
    failed after the same shape on two hosts whose GPUs had tuned something before, the shape fails."""
    if slot.suspect_end is None or not slot.gpu.tuned:
        return
    shape_id, attempt = slot.suspect_end
    shape = state.shapes[shape_id]
    fault = next((fault for fault in shape.faults if fault.attempt == attempt), None)
    if fault is None or shape.state != "pending":
        return
    hosts = shape.canary_failed_after
    hosts.append(slot.gpu.place[0])
    if len(set(hosts)) >= state.settings.failed_canaries:
        why = f"{fault.detail}; the canary failed after it on {' and '.join(dict.fromkeys(hosts))}"
        state.decided[shape.id] = FailShape(shape.id, fault.reason, why, attempt, True)


def record_loss(state: State, shape: Shape, attempt: Attempt, *, with_node: bool, detail: str) -> None:
    """Record that the worker, or its whole node, went down with the shape in flight; once for each attempt. After a few
    losses the shape fails."""
    if any(loss.attempt == attempt.id for loss in shape.losses):
        return
    shape.losses.append(Loss(state.slot_of(attempt).gpu.place, attempt.id, with_node))
    if len(shape.losses) >= state.settings.losses:
        ends = []
        for loss in shape.losses:
            what = "node lost" if loss.with_node else "worker died"
            ends.append(f"{describe_place(loss.place, state.nodes)} ({what})")
        is_confirmed = len({loss.place for loss in shape.losses}) > 1
        detail = f"{detail}; seen on {', '.join(ends)}"
        state.decided[shape.id] = FailShape(shape.id, Reason.KILLS_NODES, detail, attempt.id, is_confirmed)


def record_lease_end(state: State, shape: Shape, attempt: Attempt, cause: str) -> None:
    """Record that a lease ended with the shape in flight, for a cause that the shape cannot have. After a few of them
    the shape fails, because it seems to need more time than a lease has."""
    if attempt.node in shape.lease_ends:
        return
    shape.lease_ends.append(attempt.node)
    if len(shape.lease_ends) >= state.settings.lease_ends:
        why = (
            f"{plural(len(shape.lease_ends), 'lease')} ended under it, the last one by {describe_end_cause(cause)}"
            f" ({', '.join(shape.lease_ends)}); ask for a longer time limit (time:)"
        )
        state.decided[shape.id] = FailShape(shape.id, Reason.OUTLIVES_LEASE, why, attempt.id, True)
