"""Evidence and verdicts: which shape fails, and which slot is put in quarantine.

A fault counts against a shape once its slot has tuned something after it. If the slot is put in quarantine before that,
the fault is void. If the shape passes elsewhere, the fault counts against the slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.events import FailShape, Quarantine, SettleShape
from orchestrator.policy.model import Attempt, Candidate, Fault, Gpu, Loss, Place, Shape, Slot, State, describe_place
from orchestrator.policy.work_queue import isolate, refresh_slot, withdraw
from orchestrator.reasons import Reason
from worker.text import plural


def make_fault(
    state: State, attempt: Attempt, reason: Reason, detail: str, t: float, blocked: frozenset[Candidate] = frozenset()
) -> Fault:
    """The fault of an attempt at one of its shapes."""
    place = state.slot_of(attempt).gpu.place
    return Fault(place, attempt.id, reason, detail, t, len(attempt.shapes) == 1, blocked)


def record_fault(state: State, shape: Shape, fault: Fault, *, is_new: bool = True) -> None:
    """Record that an attempt ended badly at the shape, or gave a result without the candidates `fault.blocked`. Not
    `is_new`: they faulted before this run, so they say nothing about the slot now."""
    gpu = state.gpus[fault.place]
    if gpu.quarantine_why:
        return  # it was claimed before the quarantine, and says nothing
    if is_new and not shape.faults:
        gpu.fault_streak += 1
        state.first_faults += 1
    shape.faults.append(fault)
    gpu.unproven_faults.append((shape.id, fault.attempt))
    count_try(state, shape, fault.reason, fault.attempt)
    is_suspicious = gpu.quarantines > 0 or _is_beyond_chance(state, gpu)
    if is_new and is_suspicious and len(state.usable) > 1:
        request_quarantine(state, gpu.place, f"{plural(gpu.fault_streak, 'bad end')} in a row")
    refresh_slot(state, state.slot_of(state.attempts[fault.attempt]))
    if has_enough_evidence(state, shape):
        withdraw(state, shape)
        state.awaiting_verdict[shape.id] = fault.t + state.settings.proof_s


def _is_beyond_chance(state: State, gpu: Gpu) -> bool:
    """Return whether the GPU's streak of bad ends is less likely than `streak_p` at the run's fault rate without this
    streak. Both counts begin at one, so that the rate is never 0 or 1."""
    faults_elsewhere = state.first_faults - gpu.fault_streak + 1
    rate = faults_elsewhere / (faults_elsewhere + state.tuned + 1)
    return gpu.fault_streak >= state.settings.least_streak and rate**gpu.fault_streak <= state.settings.streak_p


def request_quarantine(state: State, place: Place, why: str) -> None:
    """Put the slot of a place on the list for quarantine, if it is usable; the first reason stays."""
    slot = state.usable.get(place)
    if slot is not None:
        state.to_quarantine.setdefault(slot.id, why)


def count_try(state: State, shape: Shape, reason: Reason, attempt: str) -> None:
    """Count a try. After the last one, give the shape up."""
    shape.tries += 1
    if shape.tries < state.settings.tries:
        return
    why = f"given up after {plural(shape.tries, 'try', 'tries')}"
    if shape.result:
        state.decided[shape.id] = keep_result(shape, why)
    else:
        state.decided[shape.id] = FailShape(shape.id, reason, why, attempt, False)


def keep_result(shape: Shape, why: str) -> SettleShape:
    """Settle the shape with the result that it has. A noisy result is complete; any other lacks candidates."""
    if shape.noisy:
        return SettleShape(shape.id, shape.noisy, True, f"its time is noise, measured again without a result: {why}")
    return SettleShape(shape.id, shape.result, False, why)


def has_enough_evidence(state: State, shape: Shape) -> bool:
    """Return whether the evidence against the shape is enough.

    The first of these that applies decides:

    1. a noisy result: it is measured once more, however that ends;
    2. a result that leaves candidates out: their faults on two slots are enough;
    3. otherwise at least one fault must be of the shape alone in a process (`was_alone`), where a tuner isolates
       candidates, and its ends must agree on
       - two nodes, while a usable node is left on which it was not tried;
       - two slots, if there is no such node;
       - one slot, if no other slot is usable and none may come: two faults, or one if the shape has a result.
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
    if len(state.hosts) > sum(host in state.hosts for host in hosts_tried):
        return False
    if len(places) > 1:
        return True
    has_other_slot = len(state.usable) > sum(place in state.usable for place in places_tried)
    if has_other_slot or state.may_grow:
        return False
    return len(shape.faults) > 1 or bool(shape.result)


def _agreeing_places(shape: Shape) -> set[Place]:
    """The places whose attempts agree on how the shape ends: by the tuner's verdict, or by a fault. The larger set."""
    ends = [fault for fault in shape.faults if not fault.blocked]
    by_fault = {fault.place for fault in ends if not fault.reason.is_verdict}
    by_verdict = {fault.place for fault in ends if fault.reason.is_verdict}
    return by_fault if len(by_fault) >= len(by_verdict) else by_verdict


def record_tuned(state: State, gpu: Gpu) -> None:
    """The GPU tuned something, so it did not cause the faults before."""
    for s, attempt in gpu.unproven_faults:
        shape = state.shapes[s]
        for fault in shape.faults:
            if fault.attempt == attempt:
                fault.is_proven = True
        if s in state.awaiting_verdict and all(fault.is_proven for fault in shape.faults):
            state.awaiting_verdict[s] = 0.0
    gpu.unproven_faults.clear()
    gpu.fault_streak = 0
    gpu.quarantines = 0


def void_faults(state: State, gpu: Gpu) -> None:
    """The slot is in quarantine. Faults since it last tuned something are not evidence against shapes."""
    for s, attempt in gpu.unproven_faults:
        strike_out(state, state.shapes[s], attempt)
    gpu.unproven_faults.clear()


def strike_out(state: State, shape: Shape, attempt: str) -> bool:
    """Remove the attempt's evidence against the shape; return whether there was any."""
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


def _confirmed_result(shape: Shape) -> Fault | None:
    """A result that lacks only candidates that faulted on another slot as well."""
    for fault in shape.faults:
        elsewhere = [other.blocked for other in shape.faults if other.place != fault.place]
        if fault.blocked and fault.blocked <= frozenset().union(*elsewhere):
            return fault
    return None


def _verdict(state: State, shape: Shape) -> FailShape | SettleShape:
    """The end of a shape with enough faults: its best result without the candidates that faulted, or its failure."""
    last = shape.faults[-1]
    if shape.noisy:
        return keep_result(shape, last.detail or last.reason.message)
    is_confirmed = len({fault.place for fault in shape.faults}) > 1
    seen = f"seen on {_list_places(state, shape.faults)}"
    if not is_confirmed:
        seen += "; unconfirmed: only one slot"
    result = _confirmed_result(shape)
    if result is not None:
        return SettleShape(shape.id, result.attempt, True, f"candidates faulted; {seen}")
    if shape.result:
        return SettleShape(shape.id, shape.result, False, f"candidates faulted; {seen}")
    # if several are alike, report the first: a later one may only say that candidates were left out
    fault = next(fault for fault in shape.faults if fault.reason is last.reason)
    detail = f"{fault.detail}; {seen}" if fault.detail else seen
    return FailShape(shape.id, fault.reason, detail, fault.attempt, is_confirmed)


def _list_places(state: State, faults: Sequence[Fault]) -> str:
    return ", ".join(f"{describe_place(fault.place, state.nodes)} ({fault.reason.value})" for fault in faults)


def next_verdict(state: State, now: float) -> FailShape | SettleShape | None:
    """The next verdict that is due. It waits until every slot that blamed the shape has tuned something since, until
    none of them may any more, or for `proof_s`."""
    has_work = bool(state.waiting or state.isolated)
    for s, due in state.awaiting_verdict.items():
        shape = state.shapes[s]
        if due <= now or (not has_work and not _may_still_be_proven(state, shape)):
            return _verdict(state, shape)
    return None


def _may_still_be_proven(state: State, shape: Shape) -> bool:
    """Return whether a slot whose fault is not proven yet has work, and so may tune something."""
    slots = [state.usable.get(fault.place) for fault in shape.faults if not fault.is_proven]
    return any(slot is not None and (slot.running or slot.queued or slot.is_checking) for slot in slots)


def record_loss(state: State, shape: Shape, attempt: Attempt, *, with_node: bool, detail: str) -> None:
    """Record that the worker or node went down with the shape in flight; once for each attempt."""
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


def cause_words(cause: str) -> str:
    """A lease's EndCause in words. `preempted` is what the scheduler or a person took back; it does not say who."""
    return "cancelled or preempted" if cause == "preempted" else cause.replace("_", " ")


def record_lease_end(state: State, shape: Shape, attempt: Attempt, cause: str) -> None:
    """A lease ended with the shape in flight. The shape did not cause it."""
    if attempt.node in shape.lease_ends:
        return
    shape.lease_ends.append(attempt.node)
    if len(shape.lease_ends) >= state.settings.lease_ends:
        why = (
            f"{plural(len(shape.lease_ends), 'lease')} ended under it, the last one by {cause_words(cause)}"
            f" ({', '.join(shape.lease_ends)}); ask for a longer time limit (time:)"
        )
        state.decided[shape.id] = FailShape(shape.id, Reason.OUTLIVES_LEASE, why, attempt.id, True)


def blame_other_slots(state: State, shape: Shape, place: Place) -> None:
    """The shape was tuned at the place, so its bad ends elsewhere count against those slots."""
    for fault in shape.faults:
        gpu = state.gpus[fault.place]
        if fault.place == place or fault.blocked or gpu.quarantine_why:
            continue
        passed_elsewhere = gpu.faults_passed_elsewhere
        passed_elsewhere.append(shape.id)
        if len(passed_elsewhere) >= state.settings.faults_passed_elsewhere and len(set(passed_elsewhere)) > 1:
            request_quarantine(state, fault.place, f"{plural(len(passed_elsewhere), 'fault')} here passed elsewhere")


def record_failed_canary(state: State, slot: Slot) -> None:
    """The slot's canary failed. If it fails after the same shape on two healthy nodes, the shape is to blame."""
    if slot.suspect_end is None or not slot.gpu.tuned:
        return
    shape = state.shapes[slot.suspect_end[0]]
    attempt = slot.suspect_end[1]
    fault = next((fault for fault in shape.faults if fault.attempt == attempt), None)
    if fault is None or shape.state != "pending":
        return
    hosts = shape.canary_failed_after
    hosts.append(slot.gpu.place[0])
    if len(set(hosts)) >= state.settings.failed_canaries:
        why = f"{fault.detail}; the canary failed after it on {' and '.join(dict.fromkeys(hosts))}"
        state.decided[shape.id] = FailShape(shape.id, fault.reason, why, attempt, True)


def decide_quarantine(state: State, slot: Slot, why: str, now: float) -> Quarantine:
    """The decision to put a slot in quarantine. The time doubles each time until the slot tunes something."""
    settings = state.settings
    first_s = settings.cool_down_s if slot.gpu.passed else settings.first_cool_down_s
    seconds = min(settings.max_cool_down_s, first_s * 2.0 ** min(slot.gpu.quarantines, 30))
    return Quarantine(*slot.id, why, now + seconds)
