"""Histories of shapes, step by step, and the lists of what failed in a run: shapes by reason, incidents of nodes."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from orchestrator.events import NOISE
from orchestrator.ledger.reader import LedgerReader, ShapeState
from orchestrator.pages import Document
from orchestrator.paths import RunPaths
from orchestrator.policy.model import Attempt, Shape, State
from orchestrator.reasons import Reason
from orchestrator.view.advice import advise_on_failure, advise_on_incident
from orchestrator.view.header import NameOfShape
from orchestrator.view.timeline import find_incidents, kind_of
from worker.text import plural

MOST_SHAPES = 200
"""The most of a reason that are listed one by one; all are in the table."""
MOST_INCIDENTS = 200


class Step(NamedTuple):
    """A step of a story: (1764403200.0, "g0001-1 on n1 slot 0: a result", "done"). kind: of a span or an attempt,
    `sent`, `begun`, `taken`, `settled` or `reading`."""

    t: float
    text: str
    kind: str


def went_wrong(state: State, shape: Shape) -> bool:
    """Return whether the shape failed, is unconfirmed, or an attempt ended badly at it."""
    if shape.state == "failed" or shape.confirmed is False:
        return True
    attempts = (state.attempts[id_] for id_ in shape.attempts)
    return any(attempt.in_flight == shape.id and _ended_badly(attempt) for attempt in attempts)


def _ended_badly(attempt: Attempt) -> bool:
    return attempt.outcome is not None and (attempt.outcome.may_blame_slot or attempt.outcome.is_loss)


def shape_steps(state: State, shape: Shape) -> list[Step]:
    """One step for each attempt that a worker began with the shape in it and that concerned it, and for its end."""
    steps = []
    unclaimed = 0
    lost_with_node = {loss.attempt for loss in shape.losses}
    for attempt in (state.attempts[id_] for id_ in shape.attempts):
        if attempt.started_at is not None:
            steps.append(_step_of(shape, attempt))
        elif attempt.id in lost_with_node:
            text = f"{attempt.id} on {attempt.node} slot {attempt.slot} was lost with its node"
            steps.append(Step(attempt.ended_at or attempt.sent_at, text, kind_of(attempt)))
        elif attempt.state == "over":
            unclaimed += 1
    if unclaimed:
        first = state.attempts[shape.attempts[0]].sent_at
        steps.append(Step(first, f"{plural(unclaimed, 'attempt')} went back unclaimed", "taken"))
    if shape.state != "pending":
        steps.append(Step(shape.settled_at, shape.state, "settled"))
    return sorted(steps, key=lambda step: step.t)


def _step_of(shape: Shape, attempt: Attempt) -> Step:
    """The step of a shape in an attempt that a worker began."""
    t = attempt.ended_at or attempt.current_at or attempt.started_at or 0.0
    where = f"{attempt.id} on {attempt.node} slot {attempt.slot}"
    kind = kind_of(attempt)
    if shape.id in attempt.landed:
        return Step(t, f"{where}: {_describe_result(shape, attempt)}", kind)
    if attempt.in_flight == shape.id and attempt.outcome is not None:
        after = f" after {attempt.seconds:.1f} s" if attempt.seconds > 0 else ""
        why = f": {attempt.detail}" if attempt.detail else ""
        return Step(t, f"{where} ended at it{after}: {attempt.outcome.message}{why}", kind)
    if attempt.state == "started" and attempt.current == shape.id:
        return Step(attempt.current_at, f"{where}: in flight", kind)
    if attempt.state == "started":
        return Step(attempt.started_at or 0.0, f"{where}: not its turn yet", kind)
    end = attempt.outcome.message if attempt.outcome else "it was taken back"
    if attempt.is_lost:
        end = "its node was lost"
    return Step(t, f"{where} ended before it was measured: {end}", kind)


def _describe_result(shape: Shape, attempt: Attempt) -> str:
    """`a result, without 2 candidates that faulted, whose time is noise`, or `the tuner's verdict`."""
    is_verdict = shape.reason is not None and shape.reason.is_verdict
    text = "the tuner's verdict" if is_verdict else "a result"
    blocked = [len(fault.blocked - {NOISE}) for fault in shape.faults if fault.attempt == attempt.id]
    most = max(blocked, default=0)
    if most:
        text += f", without {plural(most, 'candidate')} that faulted"
    if shape.noisy == attempt.id:
        text += ", whose time is noise"
    return text


def failures(ledger: LedgerReader, named: NameOfShape, run: str) -> list[Document]:
    """Failures by reason, the most frequent first. `run`: its name on a command line."""
    by_reason: dict[str, list[ShapeState]] = defaultdict(list)
    for shape in ledger.failed():
        by_reason[shape.reason or ""].append(shape)
    state = ledger.replayed
    documents = []
    for value, count in ledger.failures().items():
        reason = Reason(value)
        shapes = by_reason[value]
        documents.append(
            {
                "reason": value,
                "count": count,
                "message": reason.message,
                "advice": advise_on_failure(reason, run, shapes[0].node),
                "shapes": [_failed_shape(state, shape, reason, named) for shape in shapes[:MOST_SHAPES]],
            }
        )
    return documents


def _failed_shape(state: State, shape: ShapeState, reason: Reason, named: NameOfShape) -> Document:
    return {
        "id": shape.id,
        "shape": named(shape.id),
        "detail": shape.detail,
        "confirmed": bool(shape.confirmed),
        "where": f"{shape.node} slot {shape.slot}" if shape.node else "",
        "attempts": shape.attempts,
        "verdict": reason.is_verdict,
        "story": [[round(step.t, 1), step.text] for step in shape_steps(state, state.shapes[shape.id])],
    }


def incidents(state: State, paths: RunPaths) -> list[Document]:
    """Incidents of nodes and slots, oldest first: outages, quarantines, failed canaries."""
    spans = sorted((span for node in state.nodes for span in find_incidents(state, node)), key=lambda span: span.start)
    return [
        {
            "t": round(span.start, 1),
            "end": None if span.end is None else round(span.end, 1),
            "kind": span.kind,
            "text": span.text,
            "advice": advise_on_incident(span, state.nodes[span.node], paths),
        }
        for span in spans[-MOST_INCIDENTS:]
    ]
