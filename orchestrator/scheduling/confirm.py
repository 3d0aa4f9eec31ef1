"""Confirmation of candidate faults on a second slot before the shape is settled.

A candidate's fault is evidence at the slot where it happened. An attempt that left candidates out for that reason is
incomplete: its result is kept, and a small attempt elsewhere measures those candidates and the shape's best so far.
That attempt alone decides between them, as times of two slots are never compared. A candidate that runs there is
charged to the slot where it faulted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from orchestrator.events import ChargeSlot, Confirm, ConvictCandidates, Decision, FailShape, SettleShape
from orchestrator.scheduling.model import CandidateEvidence, CandidateId, IncompleteResult, Shape, SlotId
from orchestrator.scheduling.state import State
from worker.text import plural

ONE_SLOT = "unconfirmed: no second slot could try what faulted"


def decide(state: State) -> Iterator[Decision]:
    """Yield charges against slots first, then the next step for each incomplete result."""
    while state.charges:
        (place, id_), (fresh, earlier, by) = next(iter(state.charges.items()))
        for name in state.fleet.names(place):
            yield ChargeSlot(*name, id_, fresh, earlier, by)
    while state.convicted:
        id_, (candidates, places) = next(iter(state.convicted.items()))
        named = tuple(name for place in places for name in state.fleet.names(place))
        yield ConvictCandidates(id_, candidates, named)
    while state.incomplete:
        yield _next_step(state, state.book.shapes[next(iter(state.incomplete))])
    while state.reopened:
        yield _again(state, state.book.shapes[next(iter(state.reopened))])


def unconfirmable(state: State) -> Iterator[Decision]:
    """Settle, as unconfirmed, what waits for a second slot where there is none any more."""
    if state.stopped:
        return
    for barred in list(state.unsure_waiting):
        for group in [] if state.has_slot_beside(barred) else list(state.unsure_waiting.get(barred, ())):
            for shape in state.book.left(state.book.groups[group]):
                yield give_up(state, state.book.shapes[shape], ONE_SLOT)


def give_up(state: State, shape: Shape, why: str) -> SettleShape | FailShape:
    """Settle the shape without confirmation: with the best of its latest result, or as failed."""
    evidence = shape.evidence
    assert evidence is not None
    base = evidence.base
    if base is not None:
        return SettleShape(shape.id, base.attempt, False, f"{_left_out(state, evidence, base)}; {why}")
    last = evidence.results[-1]
    assert last.reason is not None
    return FailShape(shape.id, last.reason, f"{last.detail}; {why}", last.attempt, confirmed=False)


def _next_step(state: State, shape: Shape) -> Decision:
    """Decision that follows from the latest incomplete result."""
    evidence = shape.evidence
    assert evidence is not None
    base = evidence.base
    if base is None:
        last = evidence.results[-1]
        places = tuple(dict.fromkeys(r.place for r in evidence.results))
        if len(places) > 1:
            assert last.reason is not None
            seen = " and ".join(map(state.fleet.spot, places))
            return FailShape(shape.id, last.reason, f"{last.detail}; seen on {seen}", last.attempt, confirmed=True)
        return _elsewhere(state, shape, (), tuple(places), "every candidate was left out or did not run")
    open_ = evidence.unconfirmed_candidates(base)
    if not open_ and not base.cut:
        return SettleShape(shape.id, base.attempt, True, _left_out(state, evidence, base))
    if base.cut:
        return _elsewhere(state, shape, (), (base.place,), "more candidates faulted than can be named")
    only = tuple(dict.fromkeys((*open_, base.best)))
    where = [*evidence.lost_at(only), *(r.place for r in evidence.results if not {*only}.isdisjoint(r.withheld))]
    if evidence.results[-1] is not base:
        where.append(evidence.results[-1].place)
    barred = tuple(dict.fromkeys(where))
    return _elsewhere(state, shape, only, barred, f"{counted(open_)} faulted on one slot alone")


def _elsewhere(
    state: State, shape: Shape, only: tuple[CandidateId, ...], barred: tuple[SlotId, ...], why: str
) -> Decision:
    evidence = shape.evidence
    assert evidence is not None
    if len(evidence.results) > state.settings.confirm_rounds:
        return give_up(state, shape, f"unconfirmed after {plural(len(evidence.results), 'attempt')}")
    if not state.stopped and not state.has_slot_beside(barred):
        return give_up(state, shape, ONE_SLOT)
    group = state.book.groups[shape.group]
    return Confirm(shape.id, group.id, next(state.book.child_names(group)), only, barred, why)


def _again(state: State, shape: Shape) -> Decision:
    """Measure a shape again whose slot lost candidates that ran elsewhere, after it was settled as unconfirmed."""
    evidence = shape.evidence
    assert evidence is not None
    group = state.book.groups[shape.group]
    base = evidence.base
    only: tuple[CandidateId, ...] = ()
    if base is not None and not base.cut:
        only = tuple(dict.fromkeys((*evidence.unconfirmed_candidates(base), base.best)))
    barred = evidence.lost_at(only) if only else tuple(dict.fromkeys(r.place for r in evidence.results))
    why = "settled as unconfirmed on a slot that lost candidates which ran elsewhere"
    return Confirm(shape.id, group.id, next(state.book.child_names(group)), only, barred, why)


def _left_out(state: State, evidence: CandidateEvidence, base: IncompleteResult) -> str:
    named = base.withheld
    if not named:
        return "no candidate was left out"
    places = evidence.lost_at(named)
    return f"{counted(named)} faulted on " + " and ".join(map(state.fleet.spot, places))


def counted(candidates: Sequence[CandidateId]) -> str:
    """`1 candidate`, `2 candidates`."""
    return plural(len(candidates), "candidate")


# --- evidence ---------------------------------------------------------------------------------------------------------


def weigh(
    state: State,
    shape: Shape,
    place: SlotId,
    lost: tuple[CandidateId, ...],
    ran: Iterable[CandidateId],
    earlier: Iterable[CandidateId],
) -> None:
    """Record which candidates faulted at a place, and which ran there.

    `earlier`: of those lost, the ones that faulted before this run, which is no evidence against the slot now.
    """
    evidence = shape.evidence
    if evidence is None:
        if not lost:
            return
        evidence = shape.evidence = CandidateEvidence()
    evidence.earlier += tuple((c, place) for c in earlier if place not in evidence.lost.get(c, ()))
    for c in lost:
        evidence.note(evidence.lost, c, place)
    for c in ran:
        evidence.note(evidence.ran, c, place)
    for c, places in evidence.lost.items():
        by = next((q for q in evidence.ran.get(c, ()) if q not in places), None)
        if by is None:
            if len(places) > 1 and c not in evidence.judged:
                evidence.judged[c] = None
                known, _ = state.convicted.get(shape.id, ((), ()))
                state.convicted[shape.id] = ((*known, c), places)
            continue
        for slot in places:
            if (c, slot) not in evidence.charged:
                evidence.charged += ((c, slot),)
                fresh, old, _ = state.charges.get((slot, shape.id), ((), (), by))
                if (c, slot) in evidence.earlier:
                    old = (*old, c)
                else:
                    fresh = (*fresh, c)
                state.charges[slot, shape.id] = (fresh, old, by)
