"""The course of a run by slot: attempts, quarantines, outages, canaries; folded from the journal as it grows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from orchestrator import events as ev
from orchestrator.busy import busy_sentence
from orchestrator.reasons import Reason

MOST_TOLD = 12
"""Sentences that are kept of one shape."""
KINDS = {Reason.DONE: "done", Reason.CANCELLED: "cancelled", Reason.WORKER_DIED: "lost", Reason.NODE_LOST: "lost"}
"""How an attempt's end is drawn; the other reasons are faults."""


@dataclass(slots=True)
class Segment:
    """An attempt on a slot. kind: running, done, fault, lost or cancelled; `flight`: the shape that it ended at."""

    attempt: str
    group: str
    start: float
    end: float | None = None
    kind: str = "running"
    outcome: str = ""
    detail: str = ""
    flight: int | None = None
    tuned: int = 0


@dataclass(slots=True)
class Span:
    """A while in which a node or slot was not at work. kind: preparing, trouble, away, busy, quarantine or gone."""

    node: str
    slot: str | None
    start: float
    kind: str
    text: str
    end: float | None = None


@dataclass(slots=True)
class Mark:
    """A moment: a failed canary, a controller that took the run up, a stop."""

    t: float
    kind: str
    text: str
    node: str = ""
    slot: str = ""


@dataclass(slots=True)
class Course:
    """All of it. Feed records in their order; nothing is read twice."""

    first: float | None = None
    last: float | None = None
    lanes: dict[tuple[str, str], list[Segment]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    canaries: defaultdict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    told: defaultdict[int, list[tuple[float, ev.Record]]] = field(default_factory=lambda: defaultdict(list))
    """Shape to what went wrong with it."""
    _of: dict[str, Segment] = field(default_factory=dict)
    _group: dict[str, str] = field(default_factory=dict)
    _open: dict[tuple[str, str | None, str], Span] = field(default_factory=dict)

    def feed(self, t: float, record: ev.Record) -> None:
        """Take one record in."""
        if self.first is None and not isinstance(record, ev.GroupAdded):
            self.first = t
        self.last = t if self.last is None else max(self.last, t)
        match record:
            case ev.Send(attempt=attempt, group=group):
                self._group[attempt] = group
            case ev.AttemptStarted():
                self._started(t, record)
            case ev.ShapeTuned(attempt=attempt):
                if attempt in self._of:
                    self._of[attempt].tuned += 1
            case ev.AttemptEnded():
                self._ended(t, record)
            case ev.ShapeRefused(shape=shape) | ev.FailShape(shape=shape):
                self._tell(shape, t, record)
            case ev.RetryAsked(shapes=shapes):
                for shape in shapes:
                    self._tell(shape, t, record)
            case ev.Resumed(epoch=epoch):
                self.marks.append(Mark(t, "controller", f"a controller took the run up (epoch {epoch})"))
            case ev.StopAsked():
                self.marks.append(Mark(t, "controller", "a person asked to stop"))
            case _:
                self._place(t, record)

    def _started(self, t: float, r: ev.AttemptStarted) -> None:
        lane = self.lanes.setdefault((r.node, r.slot), [])
        segment = self._of.get(r.attempt)
        if segment is None:
            segment = self._of[r.attempt] = Segment(r.attempt, self._group.get(r.attempt, ""), t)
            lane.append(segment)
        elif segment.kind == "lost":  # a sign of life
            segment.kind, segment.end = "running", None

    def _ended(self, t: float, r: ev.AttemptEnded) -> None:
        segment = self._of.get(r.attempt)
        if segment is not None:
            kind = KINDS.get(r.outcome, "fault")
            if kind != "lost" or segment.kind != "lost":  # what was given up ended then, whenever that is read
                segment.end = t
            segment.kind = kind
            segment.outcome, segment.detail, segment.flight = r.outcome.value, r.detail, r.in_flight
        if r.in_flight is not None and r.outcome is not Reason.DONE:
            self._tell(r.in_flight, t, r)

    def _tell(self, shape: int, t: float, record: ev.Record) -> None:
        told = self.told[shape]
        if len(told) >= MOST_TOLD:
            del told[MOST_TOLD // 2]
        told.append((t, record))

    # --- nodes and slots ----------------------------------------------------------------------------------------------

    def _place(self, t: float, record: ev.Record) -> None:
        match record:
            case ev.NodeExpected(node, slots):
                for slot in slots:
                    self.lanes.setdefault((node, slot), [])
                self._begin(node, None, "preparing", t, f"{node} is being prepared")
            case ev.NodeJoined(node, slots):
                for slot in slots:
                    self.lanes.setdefault((node, slot), [])
                for kind in ("preparing", "trouble", "away", "busy"):
                    self._finish(node, None, kind, t)
            case ev.NodeTroubled(node, detail, since):
                self._begin(node, None, "trouble", min(t, since), f"{node} did not answer: {detail}")
            case ev.NodeLost(node, detail):
                self._finish(node, None, "preparing", t)
                self._finish(node, None, "trouble", t)
                self._begin(node, None, "away", t, f"{node} was given up: {detail}")
                self._lose(t, node, None)
            case ev.NodeBusy(node, doing, detail):
                if doing == "wait":
                    self._begin(node, None, "busy", t, busy_sentence(node, doing, detail))
                else:
                    self._finish(node, None, "busy", t)
            case ev.SlotLost(node, slot, detail):
                self._begin(node, slot, "gone", t, f"{node} slot {slot} was lost: {detail}")
                self._lose(t, node, slot)
            case ev.CanaryPassed(node, slot, us):
                self.canaries[node, slot].append(us)
                self._finish(node, slot, "quarantine", t)
                self._finish(node, slot, "gone", t)
            case ev.CanaryFailed(node, slot, detail):
                text = f"{node} slot {slot}: the canary failed: {detail}"
                self.marks.append(Mark(t, "canary", text, node, slot))
            case ev.Quarantine(node, slot, why, _):
                self._begin(node, slot, "quarantine", t, f"{node} slot {slot} was quarantined: {why}")
            case _:
                pass

    def _begin(self, node: str, slot: str | None, kind: str, t: float, text: str) -> None:
        if (node, slot, kind) not in self._open:
            span = self._open[node, slot, kind] = Span(node, slot, t, kind, text)
            self.spans.append(span)

    def _finish(self, node: str, slot: str | None, kind: str, t: float) -> None:
        span = self._open.pop((node, slot, kind), None)
        if span is not None:
            span.end = max(span.start, t)

    def _lose(self, t: float, node: str, slot: str | None) -> None:
        """What ran there is taken as lost until its end is read after all."""
        for (n, s), lane in self.lanes.items():
            if n == node and slot in (None, s) and lane and lane[-1].end is None:
                lane[-1].end, lane[-1].kind, lane[-1].outcome = t, "lost", "node_lost"
