"""Evidence and verdicts: which shape fails, and which slot is shut.

A fault counts against a shape once its slot has tuned something after it. If the slot is shut before that, the fault is
void. If the shape passes elsewhere, the fault counts against the slot.
"""

from __future__ import annotations

from orchestrator.events import FailShape, Quarantine, SettleShape
from orchestrator.policy.model import Attempt, Candidate, Fault, Gpu, Loss, Place, Shape, Slot, State, spot
from orchestrator.policy.pool import look, set_apart, withdraw
from orchestrator.reasons import Reason
from worker.text import plural


def fault(
    state: State,
    shape: Shape,
    a: Attempt,
    reason: Reason,
    detail: str,
    t: float,
    left_out: frozenset[Candidate] = frozenset(),
    *,
    here: bool = True,
) -> None:
    """Record that the attempt ended badly at the shape, or gave a result without the candidates `left_out`. Not `here`:
    they faulted before this run, so they say nothing about the slot now."""
    slot = state.slot_of(a)
    gpu, first = slot.gpu, not shape.faults
    if gpu.shut:
        return  # it was claimed before the slot was shut, and says nothing
    shape.faults.append(Fault(gpu.place, a.id, reason, detail, t, len(a.shapes) == 1, left_out))
    gpu.open.append((shape.id, a.id))
    tried(state, shape, reason, a.id)
    if first and here:
        gpu.row += 1
        state.first_faults += 1
    if here and (gpu.strikes or _is_no_chance(state, gpu)) and len(state.usable) > 1:
        shut(state, gpu.place, f"{plural(gpu.row, 'bad end')} in a row")
    look(state, slot)
    if is_enough(state, shape):
        withdraw(state, shape)
        state.held[shape.id] = t + state.settings.proof_s


def _is_no_chance(state: State, gpu: Gpu) -> bool:
    """Return whether there were more bad ends in a row than the fault rate elsewhere explains."""
    elsewhere = state.first_faults - gpu.row + 1
    rate = elsewhere / (elsewhere + state.tuned + 1)
    return gpu.row >= state.settings.least_row and rate**gpu.row <= state.settings.row_p


def shut(state: State, place: Place, why: str) -> None:
    """Put the slot on the list for quarantine."""
    slot = state.usable.get(place)
    if slot is not None:
        state.to_shut.setdefault(slot.id, why)


def tried(state: State, shape: Shape, reason: Reason, attempt: str) -> None:
    """Count a try. After the last one, give the shape up."""
    shape.tries += 1
    if shape.tries >= state.settings.tries:
        why = f"given up after {plural(shape.tries, 'try', 'tries')}"
        state.ripe[shape.id] = (
            keep_result(shape, why) if shape.result else FailShape(shape.id, reason, why, attempt, False)
        )


def keep_result(shape: Shape, why: str) -> SettleShape:
    """Settle the shape with the result that it has. A noisy result is complete; any other lacks candidates."""
    if shape.noisy:
        return SettleShape(shape.id, shape.noisy, True, f"its time is noise, measured again without a result: {why}")
    return SettleShape(shape.id, shape.result, False, why)


def is_enough(state: State, shape: Shape) -> bool:
    """Return whether the evidence against the shape is enough. It must have faulted at least once alone in a process,
    where a tuner isolates candidates, and on two nodes; on two slots if there is only one node; twice if there is only
    one slot (or once, if it has a result). For candidates that a result leaves out, two slots are enough. A noisy
    result is measured once more, however that ends."""
    if shape.noisy:
        return bool(shape.faults) and shape.faults[-1].attempt != shape.noisy
    if _sure_result(shape) is not None:
        return True
    if not any(f.alone for f in shape.faults):
        return False
    ends = [f for f in shape.faults if not f.left_out]
    places = max(({f.place for f in ends if f.reason.is_verdict is said} for said in (False, True)), key=len)
    if len({host for host, _ in places}) > 1:
        return True
    tried_at = {f.place for f in shape.faults}
    hosts = {host for host, _ in tried_at}
    if len(state.hosts) > sum(host in state.hosts for host in hosts):
        return False
    if len(places) > 1:
        return True
    beside = len(state.usable) > sum(place in state.usable for place in tried_at)
    return not beside and not state.may_grow and (len(shape.faults) > 1 or bool(shape.result))


def proved(state: State, gpu: Gpu) -> None:
    """The GPU tuned something, so it did not cause the faults before."""
    for s, attempt in gpu.open:
        shape = state.shapes[s]
        for f in shape.faults:
            f.proven = f.proven or f.attempt == attempt
        if s in state.held and all(f.proven for f in shape.faults):
            state.held[s] = 0.0
    gpu.open.clear()
    gpu.row = gpu.strikes = 0


def void(state: State, gpu: Gpu) -> None:
    """The slot is shut. Faults since it last tuned something are not evidence against shapes."""
    for s, attempt in gpu.open:
        strike_out(state, state.shapes[s], attempt)
    gpu.open.clear()


def strike_out(state: State, shape: Shape, attempt: str) -> bool:
    """Remove the attempt's evidence against the shape; return whether there was any."""
    kept = [f for f in shape.faults if f.attempt != attempt]
    lost = [x for x in shape.losses if x.attempt != attempt]
    if len(kept) == len(shape.faults) and len(lost) == len(shape.losses):
        return False
    shape.tries -= len(shape.faults) - len(kept)
    shape.faults, shape.losses = kept, lost
    if shape.state == "pending":
        state.ripe.pop(shape.id, None)
        if shape.id in state.held and not is_enough(state, shape):
            del state.held[shape.id]
            if not shape.copies:
                set_apart(state, (shape.id,))
    return True


def _sure_result(shape: Shape) -> Fault | None:
    """A result that lacks only candidates that faulted on another slot as well."""
    for f in shape.faults:
        elsewhere = (other.left_out for other in shape.faults if other.place != f.place)
        if f.left_out and f.left_out <= frozenset().union(*elsewhere):
            return f
    return None


def verdict(state: State, shape: Shape) -> FailShape | SettleShape:
    """The end of a shape with enough faults: its best result without the candidates that faulted, or its failure."""
    if shape.noisy:
        return keep_result(shape, shape.faults[-1].detail or shape.faults[-1].reason.message)
    # if several are alike, report the first: a later one may only say that candidates were left out
    last = next(f for f in shape.faults if f.reason is shape.faults[-1].reason)
    sure = len({f.place for f in shape.faults}) > 1
    seen = ", ".join(f"{spot(f.place, state.nodes)} ({f.reason.value})" for f in shape.faults)
    seen = f"seen on {seen}" if sure else f"seen on {seen}; unconfirmed: only one slot"
    result = _sure_result(shape)
    if result is not None or shape.result:
        return SettleShape(
            shape.id, result.attempt if result else shape.result, result is not None, f"candidates faulted; {seen}"
        )
    return FailShape(
        shape.id, last.reason, f"{last.detail}; {seen}" if last.detail else seen, last.attempt, sure
    )  # fmt: skip


def judge(state: State, now: float) -> FailShape | SettleShape | None:
    """The next verdict that is due: both slots have tuned something since, or neither will, or it is late."""
    for s, due in state.held.items():
        if due <= now or (not state.waiting and not state.apart and _none_works(state, state.shapes[s])):
            return verdict(state, state.shapes[s])
    return None


def _none_works(state: State, shape: Shape) -> bool:
    slots = [state.usable.get(f.place) for f in shape.faults if not f.proven]
    return not any(slot is not None and (slot.running or slot.queued or slot.checking) for slot in slots)


def lose(state: State, shape: Shape, a: Attempt, *, with_node: bool, detail: str) -> None:
    """Record that the worker or node went down with the shape in flight; once for each attempt."""
    if any(x.attempt == a.id for x in shape.losses):
        return
    shape.losses.append(Loss(state.slot_of(a).gpu.place, a.id, with_node))
    if len(shape.losses) >= state.settings.losses:
        seen = ", ".join(
            f"{spot(x.place, state.nodes)} ({'node lost' if x.with_node else 'worker died'})" for x in shape.losses
        )
        sure = len({x.place for x in shape.losses}) > 1
        state.ripe[shape.id] = FailShape(shape.id, Reason.KILLS_NODES, f"{detail}; seen on {seen}", a.id, sure)


def cause_words(cause: str) -> str:
    """A lease's EndCause in words. `preempted` is what the scheduler or a person took back; it does not say who."""
    return "cancelled or preempted" if cause == "preempted" else cause.replace("_", " ")


def ended_under(state: State, shape: Shape, a: Attempt, cause: str) -> None:
    """A lease ended with the shape in flight. The shape did not cause it."""
    if a.node in shape.ends:
        return
    shape.ends.append(a.node)
    if len(shape.ends) >= state.settings.lease_ends:
        why = (
            f"{plural(len(shape.ends), 'lease')} ended under it, the last one by {cause_words(cause)}"
            f" ({', '.join(shape.ends)}); ask for a longer time limit (time:)"
        )
        state.ripe[shape.id] = FailShape(shape.id, Reason.OUTLIVES_LEASE, why, a.id, True)


def passed(state: State, shape: Shape, place: Place) -> None:
    """The shape was tuned at the place, so its bad ends elsewhere count against those slots."""
    for f in shape.faults:
        gpu = state.gpus[f.place]
        if f.place != place and not f.left_out and not gpu.shut:
            gpu.marks.append(shape.id)
            if len(gpu.marks) >= state.settings.marks and len(set(gpu.marks)) > 1:
                shut(state, f.place, f"{plural(len(gpu.marks), 'fault')} here passed elsewhere")


def wedged(state: State, slot: Slot) -> None:
    """The slot's canary failed. If it fails after the same shape on two healthy nodes, the shape is to blame."""
    if slot.last is None or not slot.gpu.tuned:
        return
    shape, attempt = state.shapes[slot.last[0]], slot.last[1]
    ended = next((f for f in shape.faults if f.attempt == attempt), None)
    if ended is None or shape.state != "pending":
        return
    shape.wedged.append(slot.gpu.place[0])
    if len(set(shape.wedged)) >= state.settings.wedges:
        why = f"{ended.detail}; the canary failed after it on {' and '.join(dict.fromkeys(shape.wedged))}"
        state.ripe[shape.id] = FailShape(shape.id, ended.reason, why, attempt, True)


def quarantine(state: State, slot: Slot, why: str, now: float) -> Quarantine:
    """The decision to shut a slot. The time doubles with each quarantine until the slot tunes something."""
    s = state.settings
    first = s.cool_down_s if slot.gpu.passed else s.first_cool_down_s
    return Quarantine(*slot.id, why, now + min(s.max_cool_down_s, first * 2.0 ** min(slot.gpu.strikes, 30)))
