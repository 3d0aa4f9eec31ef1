"""Blame: verdicts on ended attempts and on suspect slots, each from evidence.

Which shapes fail, run alone or wait again; which slots are quarantined, and when their canary is run again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from orchestrator.events import AskCanary, Decision, FailShape, Quarantine, Requeue, Split
from orchestrator.reasons import Reason
from orchestrator.scheduling.confirm import give_up
from orchestrator.scheduling.model import LEASE_ENDS, AttemptEnd, Fault, Group, Shape, Slot, SlotId
from orchestrator.scheduling.state import State
from worker.text import plural


def judge(state: State, group: Group, now: float) -> Iterator[Decision]:
    """Yield the decisions on one group that awaits its verdict; none yet, where the canary of its slot comes first.

    Apply each before the next is taken.
    """
    e = group.ended
    if e is None:
        yield Requeue(group.id, "its last attempt left no trace")
        return
    for s in e.accused:
        shape = state.book.shapes[s]
        failure = verdict(state, shape, e) if shape.state == "pending" else None
        if failure is None and group.confirms and shape.evidence is not None:
            failure = _unconfirmed(state, shape, e)
        if failure is not None:
            if _awaits_canary(state, e, now) or _awaits_word(state, shape, failure, e, now):
                return
            if failure.reason.may_blame_slot and _awaits_proof(state, shape, e, now):
                return
            yield give_up(state, shape, f"unconfirmed: {failure.detail}") if _has_winner(shape) else failure
    left = state.book.left(group)
    if not left:
        return
    if e.is_unattributed and len(left) > 1:
        half = (len(left) + 1) // 2
        why = f"{_attempt_text(e)} and what was in flight is not known: halves"
        yield _split(state, group, [left[:half], left[half:]], why)
        return
    alone = [s for s in e.accused if s in left and _runs_alone(state, state.book.shapes[s], e)]
    if not alone or len(left) == 1:
        yield Requeue(group.id, _why_again(state, group, e, bool(alone)))
        return
    rest = tuple(s for s in left if s not in alone)
    why = f"{_attempt_text(e)}; what was in flight runs alone" + (", the rest goes back unblamed" if rest else "")
    yield _split(state, group, [(s,) for s in alone] + ([rest] if rest else []), why)


def verdict(state: State, shape: Shape, e: AttemptEnd) -> FailShape | None:
    """Failure of the shape where the evidence is sufficient; None: it is tried again."""
    if e.outcome is not None and e.outcome.is_loss:
        return _kills(state, shape, e)
    if e.outcome is Reason.LEASE_ENDED:
        return _outlives(shape, e)
    places = tuple(dict.fromkeys(f.place for f in shape.faults))
    outcome: Reason = e.outcome or Reason.ERROR
    if shape.faults:
        outcome = shape.faults[-1].reason
        hosts = {state.fleet.host(node) for node, _ in places}
        elsewhere = any(state.fleet.host(n) not in hosts for n in state.fleet.usable)
        seen = _seen(state, [(f.place, f.reason.value) for f in shape.faults])
        detail = f"{e.detail}; {seen}" if e.detail else seen
        sound = {state.fleet.host(f.place[0]) for f in shape.faults if not _doubtful(state, f)}
        if len(sound) > 1 or (len(places) > 1 and not elsewhere):
            return FailShape(shape.id, outcome, detail, e.attempt, confirmed=True)
        if len(shape.faults) > 1 and not elsewhere and not other_slot(state, places) and not state.may_grow:
            return FailShape(shape.id, outcome, f"{detail}; unconfirmed: only one slot", e.attempt, confirmed=False)
    if shape.tries >= state.settings.max_tries:
        detail = f"{e.detail}; " if e.detail else ""
        return FailShape(
            shape.id,
            outcome,
            f"{detail}given up after {plural(shape.tries, 'try', 'tries')}",
            e.attempt,
            confirmed=False,
        )
    return None


def _has_winner(shape: Shape) -> bool:
    return shape.evidence is not None and shape.evidence.base is not None


def _unconfirmed(state: State, shape: Shape, e: AttemptEnd) -> FailShape | None:
    """Failure after too many attempts to confirm; None while another may be tried."""
    assert shape.evidence is not None
    if e.outcome is None or not e.outcome.counts_as_try or shape.evidence.misses < state.settings.confirm_misses:
        return None
    detail = f"{_attempt_text(e)}; {plural(shape.evidence.misses, 'attempt')} to confirm ended so"
    return FailShape(shape.id, e.outcome, detail, e.attempt, confirmed=False)


def _awaits_canary(state: State, e: AttemptEnd, now: float) -> bool:
    """Return whether the canary of the last fault's slot is still awaited: if it fails, that fault does not count."""
    slot = state.fleet.slot(*e.place)
    if slot is None or slot.last_fault is None or slot.last_fault[1] != e.attempt:
        return False
    return slot.checking and now - e.t < state.settings.verdict_timeout_s


def _doubtful(state: State, fault: Fault) -> bool:
    """Return whether the slot may have caused the fault: it has tuned nothing since, and other shapes that faulted
    there passed elsewhere, or all that it was given ended badly."""
    slot = state.fleet.slot(*fault.place)
    if slot is None or slot.health.tunes > fault.tunes:
        return False
    return bool(slot.health.closed or slot.health.marks) or slot.health.streak >= state.settings.bad_row


def _awaits_proof(state: State, shape: Shape, e: AttemptEnd, now: float) -> bool:
    """Return whether a slot of the faults is about to tune another shape, which proves that it is healthy: slots may
    fall sick at any time, and their canaries pass all the same."""
    if now - e.t >= state.settings.proof_s:
        return False
    for fault in shape.faults:
        n, slot = state.fleet.nodes.get(fault.place[0]), state.fleet.slot(*fault.place)
        if n is None or slot is None or slot.health.tunes > fault.tunes or slot.state != "ready":
            continue
        if slot.running is not None or slot.named or n.anyone or len(state.backlog):
            return True
    return False


def _awaits_word(state: State, shape: Shape, failure: FailShape, e: AttemptEnd, now: float) -> bool:
    """Return whether the scheduler's word on a lost lease is still awaited: an uncharged end is no loss."""
    if failure.reason is not Reason.KILLS_NODES or now - e.t >= state.settings.lease_word_s:
        return False
    nodes = (state.fleet.nodes.get(state.attempts[x.attempt].node) for x in shape.losses if x.whole_node)
    return any(n is not None and n.lease != "" and n.state not in ("joined", "gone") for n in nodes)


def _kills(state: State, shape: Shape, e: AttemptEnd) -> FailShape | None:
    if len(shape.losses) < state.settings.losses_fatal:
        return None
    if any(x.whole_node for x in shape.losses) and not any(x.alone for x in shape.losses):
        return None  # other attempts ran on the node each time: once more, alone on it
    places = {x.place for x in shape.losses}
    seen = _seen(state, [(x.place, "node lost" if x.whole_node else "worker died") for x in shape.losses])
    detail = f"{e.detail}; {seen}" if e.detail else seen
    return FailShape(shape.id, Reason.KILLS_NODES, detail, e.attempt, confirmed=len(places) > 1)


def _outlives(shape: Shape, e: AttemptEnd) -> FailShape | None:
    """Failure where the lease that it had for itself ended, too; at the latest after twice as many as it may end."""
    if len(shape.ends) <= LEASE_ENDS or not (shape.ends[-1].alone or len(shape.ends) >= 2 * LEASE_ENDS):
        return None
    ends = ", ".join(f"{x.node}: {x.cause.replace('_', ' ')}" for x in shape.ends)
    alone = ", the last time with the shape alone on it from its start" if shape.ends[-1].alone else ""
    detail = f"{plural(len(shape.ends), 'lease')} ended under it ({ends}){alone}; ask for a longer time limit (time:)"
    return FailShape(shape.id, Reason.OUTLIVES_LEASE, detail, e.attempt, confirmed=True)


def other_slot(state: State, places: tuple[SlotId, ...]) -> bool:
    """Return whether a usable slot is left that is none of these."""
    for name in state.fleet.usable:
        for slot in state.fleet.nodes[name].slots.values():
            if slot.hopeful and state.fleet.place(name, slot.name) not in places:
                return True
    return False


def _runs_alone(state: State, shape: Shape, e: AttemptEnd) -> bool:
    if e.outcome is None:
        return False
    if e.outcome.is_loss:
        few = e.outcome is Reason.NODE_LOST and len(state.fleet.usable) < state.settings.small_fleet
        return len(shape.losses) >= (1 if few else state.settings.losses_alone)
    if e.outcome is Reason.LEASE_ENDED:
        return len(shape.ends) >= LEASE_ENDS
    return e.outcome not in (Reason.NOT_DELIVERED, Reason.REJECTED)


def _split(state: State, group: Group, parts: list[tuple[int, ...]], why: str) -> Split:
    names = state.book.child_names(group)
    return Split(group.id, tuple((next(names), part) for part in parts), why)


def _why_again(state: State, group: Group, e: AttemptEnd, alone: bool) -> str:
    if e.outcome is None:
        return f"attempt {e.attempt} was taken back from {e.place[0]} before a worker claimed it"
    if e.outcome.is_loss and not e.accused:
        return f"node {e.place[0]} was lost before attempt {e.attempt} started there"
    if e.outcome is Reason.LEASE_ENDED and not e.accused:
        return f"the lease {e.place[0]} ended before attempt {e.attempt} started there"
    if alone and e.outcome is Reason.LEASE_ENDED:
        return f"{_attempt_text(e)}; the shape runs alone on a fresh lease"
    if alone:
        return f"{_attempt_text(e)}; the shape runs alone again"
    if e.outcome is Reason.NOT_DELIVERED:
        return f"{_attempt_text(e)}; {plural(group.left, 'shape is', 'shapes are')} tried again"
    return _attempt_text(e)


def _attempt_text(e: AttemptEnd) -> str:
    outcome = e.outcome.message() if e.outcome is not None else "taken back"
    where = e.place[0] if e.place[1] == "?" else f"{e.place[0]} slot {e.place[1]}"
    return f"attempt {e.attempt} on {where}: {outcome}"


def _seen(state: State, places: list[tuple[SlotId, str]]) -> str:
    return "seen on " + ", ".join(f"{state.fleet.spot(place)} ({what})" for place, what in places)


def quarantines(state: State, now: float) -> Iterator[Decision]:
    """Quarantine the slots that there is enough evidence against."""
    while state.to_quarantine:
        (node, name), why = next(iter(state.to_quarantine.items()))
        yield _quarantine(state, node, name, why, now)


def canaries(state: State, now: float) -> Iterator[Decision]:
    """Ask slots whose cool-down is over for a canary; an unanswered one counts as failed."""
    while state.asks:
        node, name = next(iter(state.asks))
        yield _ask(state, node, name)
    while state.timers and state.timers[0][0] <= now:
        at, node, name = state.timers[0]
        slot = state.fleet.slot(node, name)
        if slot is None or slot.wake != at:
            heapq.heappop(state.timers)
        elif slot.requested is not None and slot.running is None and not _is_adrift(state, node, slot, now):
            why = f"no answer to its canary for {state.settings.canary_timeout_s:.0f} s"
            yield _quarantine(state, node, name, why, now)
        else:
            yield _ask(state, node, name)


def _is_adrift(state: State, node: str, slot: Slot, now: float) -> bool:
    """Return whether its worker may still be at what it had when the node was lost: one shape can take long."""
    return slot.adrift is not None and now - state.fleet.nodes[node].lost_at < state.settings.adrift_s


def cool_down_s(state: State, slot: Slot) -> float:
    """Seconds of quarantine, doubled with each one since a shape was last tuned on the slot."""
    s = state.settings
    first = s.cool_down_s if slot.health.passed else s.first_cool_down_s
    return float(min(s.max_cool_down_s, first * 2.0 ** min(slot.health.strikes, 30)))


def _quarantine(state: State, node: str, name: str, why: str, now: float) -> Quarantine:
    slot = state.fleet.slot(node, name)
    return Quarantine(node, name, why, now + (cool_down_s(state, slot) if slot is not None else 0.0))


def _ask(state: State, node: str, name: str) -> AskCanary:
    return AskCanary(node, name, f"canary-{state.next_canary}")
