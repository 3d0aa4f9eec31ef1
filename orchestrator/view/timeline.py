"""The timeline of a run: when each slot worked, and when nodes and slots did not. The page of a run draws it.

A `Span` is a time in which a node or slot did not work. It is made of the history of the node or slot, a list of
(time, state, why). A `Segment` is an attempt on the lane of its slot. An incident is a span for which there is advice
(`advice.py`); `explain` and the page list incidents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.pages import Document
from orchestrator.policy.model import Attempt, SlotId, State
from orchestrator.reasons import Reason
from orchestrator.view.header import NameOfShape
from orchestrator.view.sentences import describe_node_change, describe_slot_change

MOST_SEGMENTS = 20_000
"""More would be too small to see and too many to send: neighbours of one kind become one."""
COARSEST = 500.0
"""If there are too many segments, those that are shorter than this part of the run become one."""
LONG_PAUSE = 0.15
"""A share of the whole: where nothing happened for longer (a controller that was away over night), time is cut."""
MOST_CHARACTERS = 300
"""Longest text of a span or a segment."""
ATTEMPT_KINDS = {
    Reason.DONE: "done",
    Reason.CANCELLED: "cancelled",
    Reason.LEASE_ENDED: "cancelled",
    Reason.WORKER_DIED: "lost",
    Reason.NODE_LOST: "lost",
}
"""Kind of an attempt by the reason of its end; the other reasons are faults."""
NODE_KINDS = {
    "away": "preparing",
    "trouble": "trouble",
    "busy": "busy",
    "shared": "shared",
    "lost": "away",
    "gone": "ended",
}
"""Kind of a span by the entry of a node's history with which it begins."""
SLOT_KINDS = {"quarantined": "quarantine", "lost": "gone", "canary failed": "canary"}
"""The same for the history of a slot."""
NO_INCIDENTS = ("preparing", "released")
"""Kinds of spans for which there is no advice."""
MOMENTS = ("canary", "shared")
"""Kinds of spans that are marks on the page."""
MOMENTARY_ENTRIES = ("canary failed", "shared", "draining")
"""Entries of a history after which the state before them goes on."""
History = list[tuple[float, str, str]]
"""(t, state, why), as a node or slot has it."""


def kind_of(attempt: Attempt) -> str:
    """Kind of an attempt that a worker began: running, done, cancelled, lost or fault."""
    if attempt.outcome is not None:
        return ATTEMPT_KINDS.get(attempt.outcome, "fault")
    return "running" if attempt.state == "started" else "lost"


@dataclass(slots=True)
class Span:
    """Interval in which a node or slot did not work. kind: preparing, trouble, away, busy, ended or released (a lease),
    quarantine, gone; or a moment: canary (it failed), shared (others use the node too)."""

    node: str
    slot: str | None
    start: float
    kind: str
    text: str
    end: float | None = None


class Segment(NamedTuple):
    """An attempt as the page has it. Times are seconds from the start of the timeline.

    An attempt is the only one of its group, so both have the same id.
    """

    start: float
    end: float | None
    """None while it runs."""
    kind: str
    """See `kind_of`."""
    attempt: str
    group: str
    tuned: int
    """Shapes that it tuned."""
    outcome: str
    shape: str
    """The shape at which it ended, "" if it ended well."""
    detail: str


def find_spans(state: State, name: str) -> list[Span]:
    """Intervals in which the node or a slot of it did not work, in order of time."""
    node = state.nodes[name]
    spans = []
    for i, (t, to, why) in enumerate(node.history):
        was_released = to == "gone" and why.startswith("released")
        kind = "released" if was_released else NODE_KINDS.get(to)
        if kind is not None:
            text = describe_node_change(node, to, why)
            spans.append(Span(name, None, t, kind, text, _end_of_entry(node.history, i)))
    for slot in node.slots.values():
        for i, (t, to, why) in enumerate(slot.history):
            kind = SLOT_KINDS.get(to)
            ended_with_lease = kind == "gone" and node.state == "gone"
            if kind is not None and not ended_with_lease:
                text = describe_slot_change(state, slot, to, why)
                spans.append(Span(name, slot.name, t, kind, text, _end_of_entry(slot.history, i)))
    return sorted(spans, key=lambda span: span.start)


def _end_of_entry(history: History, i: int) -> float | None:
    """Time at which the state of an entry ended, None if it goes on."""
    start, state, _ = history[i]
    if state in MOMENTARY_ENTRIES:
        return start
    for t, later, _ in history[i + 1 :]:
        if later not in MOMENTARY_ENTRIES:
            return t
    return None


def find_incidents(state: State, node: str) -> list[Span]:
    """Spans of a node for which there is advice. A quarantine tells of the failed canary with which it began."""
    incidents = [span for span in find_spans(state, node) if span.kind not in NO_INCIDENTS]
    quarantines = {(span.slot, span.start) for span in incidents if span.kind == "quarantine"}
    return [span for span in incidents if span.kind != "canary" or (span.slot, span.start) not in quarantines]


def attempts_by_slot(state: State) -> dict[SlotId, list[Attempt]]:
    """The attempts of each slot, in the order in which they began; slots without one, too."""
    by_slot: dict[SlotId, list[Attempt]] = {slot.id: [] for slot in state.slots}
    for attempt in state.attempts.values():
        if attempt.started_at is not None:
            by_slot[attempt.node, attempt.slot].append(attempt)
    for attempts in by_slot.values():
        attempts.sort(key=lambda attempt: attempt.started_at or 0.0)
    return {slot: by_slot[slot] for slot in sorted(by_slot, key=slot_order)}


def slot_order(slot: SlotId) -> tuple[str, int, str]:
    """Key that sorts slots by node, and by number: slot 10 comes after slot 9."""
    node, name = slot
    return node, len(name), name


def make_timeline(state: State, named: NameOfShape, start: float, end: float) -> Document:
    """The timeline as the page has it, in lists because there are many. Times are seconds from `start`, None: not yet.

    - `lanes`: [node, slot, its segments, each a `Segment` as a list]
    - `spans`: [node, slot or None, start, end, kind, text]
    - `marks`: [time, kind, text, node, slot]; a change of the controller has neither node nor slot
    - `pauses`: [start, end] of long whiles in which nothing happened, which the page cuts out
    - `coarse`: True if short segments were merged
    """

    def seconds(t: float) -> float:
        return round(max(0.0, t - start), 1)

    by_slot = attempts_by_slot(state)
    is_coarse = sum(map(len, by_slot.values())) > MOST_SEGMENTS
    gap = (end - start) / COARSEST if is_coarse else 0.0
    tuned = Counter(shape.attempt for shape in state.shapes.values() if shape.state == "tuned")
    lanes = []
    for slot, attempts in by_slot.items():
        segments = [_segment(attempt, tuned[attempt.id], named, seconds) for attempt in attempts]
        if is_coarse:
            segments = _merge_short_segments(segments, gap)
        lanes.append([*slot, list(map(list, segments))])
    marks: list[list[Any]] = []
    for epoch, (begin, _) in enumerate(state.sessions, 1):
        marks.append([seconds(begin), "controller", f"a controller took over the run (epoch {epoch})", "", ""])
    marks.sort()
    intervals = []
    spans = [span for node in state.nodes for span in find_spans(state, node)]
    for span in sorted(spans, key=lambda span: span.start):
        text = span.text[:MOST_CHARACTERS]
        if span.kind in MOMENTS:
            marks.append([seconds(span.start), span.kind, text, span.node, span.slot])
        else:
            span_end = None if span.end is None else seconds(span.end)
            intervals.append([span.node, span.slot, seconds(span.start), span_end, span.kind, text])
    return {
        "start": round(start, 1),
        "length": seconds(end),
        "lanes": lanes,
        "spans": intervals,
        "marks": marks,
        "pauses": [[seconds(begin), seconds(until)] for begin, until in _pauses(state, by_slot, start, end)],
        "coarse": is_coarse,
    }


def _segment(attempt: Attempt, tuned: int, named: NameOfShape, seconds: Callable[[float], float]) -> Segment:
    """The segment of an attempt that began."""
    kind = kind_of(attempt)
    outcome = attempt.outcome.value if attempt.outcome else ""
    if not outcome and attempt.is_lost:
        outcome = "node_lost"
    in_flight = named(attempt.in_flight) if attempt.in_flight is not None and kind != "done" else ""
    return Segment(
        seconds(attempt.started_at or 0.0),
        None if attempt.ended_at is None else seconds(attempt.ended_at),
        kind,
        attempt.id,
        attempt.id,
        tuned,
        outcome,
        in_flight,
        attempt.detail[:MOST_CHARACTERS],
    )


def _merge_short_segments(segments: list[Segment], gap: float) -> list[Segment]:
    """Neighbours that ended well and are too short to be seen become one, named after the first."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and _is_seen_as_one(merged[-1], segment, gap):
            before = merged.pop()
            segment = before._replace(end=segment.end, tuned=before.tuned + segment.tuned)
        merged.append(segment)
    return merged


def _is_seen_as_one(before: Segment, segment: Segment, gap: float) -> bool:
    """True for neighbours that ended well, follow each other closely, and are short together."""
    if not before.kind == segment.kind == "done" or before.end is None or segment.end is None:
        return False
    return segment.end - before.start < 4 * gap and segment.start - before.end < gap


def _pauses(
    state: State, by_slot: dict[SlotId, list[Attempt]], start: float, end: float
) -> Iterator[tuple[float, float]]:
    """Long whiles without a segment or a mark of the controller."""
    busy = [(attempt.started_at or 0.0, attempt.ended_at or end) for lane in by_slot.values() for attempt in lane]
    busy += [(begin, begin) for begin, _ in state.sessions]
    reached = start
    for begin, until in sorted(busy):
        if begin - reached > LONG_PAUSE * (end - start):
            yield reached, begin
        reached = max(reached, until)
