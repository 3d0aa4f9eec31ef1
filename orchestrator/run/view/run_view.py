"""View of a run: a fold of its journal, read by everything that shows a run. Pure.

    view = RunView(costs)
    for t, record in ledger.journal_records():
        view.feed(t, record)

It decides nothing and reads no clock: queries that depend on the time take `now`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator import events as ev
from orchestrator.reasons import Reason
from orchestrator.run.view.places import Mark, Places
from orchestrator.run.view.sentences import sentence
from orchestrator.run.view.work import Costs, Work
from orchestrator.status import duration


@dataclass(slots=True)
class ControllerSession:
    """Interval in which a controller drove the run; `end` is its last record so far."""

    start: float
    end: float


class ControllerSessions:
    """A session begins where a controller takes the run up, and ends with its last record."""

    def __init__(self) -> None:
        self.all: list[ControllerSession] = []

    def feed(self, t: float, record: ev.Record) -> None:
        if isinstance(record, ev.Resumed):
            self.all.append(ControllerSession(t, t))
        elif self.all:
            self.all[-1].end = max(self.all[-1].end, t)
        elif not isinstance(record, ev.WorkAdded):
            self.all.append(ControllerSession(t, t))

    @property
    def start(self) -> float | None:
        """Start of the latest session."""
        return self.all[-1].start if self.all else None

    def closed(self, end: float | None) -> list[ControllerSession]:
        """All of them, the latest up to `end` (now, or when its controller ended; None: its last record)."""
        if not self.all:
            return []
        last = self.all[-1]
        return [*self.all[:-1], ControllerSession(last.start, max(last.end, end if end is not None else last.end))]

    def worked_s(self, end: float | None = None) -> float | None:
        """Seconds over all sessions; None before the first."""
        return sum(s.end - s.start for s in self.closed(end)) if self.all else None

    def words(self, end: float | None = None) -> str:
        """`1 min 30 s`, or `1 min 30 s (over 3 sessions from Nov 21 18:02 to Nov 22 09:14)`; "" before the first."""
        closed = self.closed(end)
        if not closed:
            return ""
        took = duration(self.worked_s(end))
        if len(closed) == 1:
            return took
        return f"{took} (over {len(closed)} sessions from {_moment(closed[0].start)} to {_moment(closed[-1].end)})"


def _moment(t: float) -> str:
    return time.strftime("%b %d %H:%M", time.localtime(t))


MOST_NOTABLE = 12
"""Records that are kept of one shape."""


class RunView:
    """`work`: groups, attempts, shapes. `places`: nodes and slots. `sessions`: when a controller was at it."""

    def __init__(self, costs: Costs | None = None) -> None:
        self.work = Work(costs)
        self.places = Places()
        self.sessions = ControllerSessions()
        self.first: float | None = None
        """The first record of the run itself, its planning apart."""
        self.last: float | None = None
        self.notable: defaultdict[int, list[tuple[float, ev.Record]]] = defaultdict(list)
        """Shape to what went wrong with it."""

    def feed(self, t: float, record: ev.Record) -> None:
        """Take one record in, in their order."""
        if self.first is None and not isinstance(record, ev.WorkAdded):
            self.first = t
        if self.last is None or t > self.last:
            self.last = t
        self.sessions.feed(t, record)
        take = _TAKE.get(type(record))
        if take is not None:
            take(self, t, record)

    def place(self, attempt: str | None) -> str:
        """`n1 slot 0` of an attempt that began, "" else."""
        a = self.work.attempts.get(attempt or "")
        return f"{a.node} slot {a.slot}" if a is not None and a.begun else ""

    # --- records that concern work and places -------------------------------------------------------------------------

    def _started(self, t: float, r: ev.AttemptStarted) -> None:
        known = self.work.attempts.get(r.attempt)
        fresh = known is None or not known.begun
        a = self.work.started(t, r)
        if a.kind == "running":
            self.places.begins(t, a, fresh)

    def _shape_started(self, t: float, r: ev.ShapeStarted) -> None:
        a = self.work.attempts.get(r.attempt)
        if a is not None and a.kind == "lost" and a.outcome == "node_lost" and a.begun:
            self._started(t, ev.AttemptStarted(a.id, a.node, a.slot))  # a sign of life
        self.work.shape_started(t, r)

    def _tuned(self, t: float, r: ev.ShapeTuned) -> None:
        a = self.work.shape_tuned(t, r)
        if a is not None:
            self.places.node(a.node).tuned += 1

    def _settled(self, t: float, r: ev.SettleShape) -> None:
        self._note(r.shape, t, r)
        a = self.work.shape_settled(t, r)
        if a is not None:
            self.places.node(a.node).tuned += 1

    def _failed(self, t: float, r: ev.FailShape) -> None:
        self._note(r.shape, t, r)
        a = self.work.shape_failed(t, r)
        if a is not None:
            self.places.node(a.node).failed += 1

    def _retry(self, t: float, r: ev.RetryAsked) -> None:
        for i in r.shapes:
            self._note(i, t, r)
            shape = self.work.shapes.get(i)
            if shape is not None and shape.state == "failed" and shape.attempt in self.work.attempts:
                self.places.node(self.work.attempts[shape.attempt].node).failed -= 1
        self.work.retry_asked(t, r)

    def _refused(self, t: float, r: ev.ShapeRefused) -> None:
        self._note(r.shape, t, r)

    def _ended(self, t: float, r: ev.AttemptEnded) -> None:
        a = self.work.ended(t, r)
        if a is not None:
            self.places.ends(a)
        if r.in_flight is not None and r.outcome is not Reason.DONE:
            self._note(r.in_flight, t, r)

    def _gone(self, t: float, r: ev.NodeLost | ev.SlotLost) -> None:
        freed = self.places.lost(t, r) if isinstance(r, ev.NodeLost) else self.places.slot_lost(t, r)
        for a in freed:
            self.work.lost(t, a)

    def _lease_ended(self, t: float, r: ev.LeaseEnded) -> None:
        for a in self.places.ended(t, r):
            self.work.lost(t, a, Reason.NODE_LOST if r.charged else Reason.LEASE_ENDED)

    def _controller_mark(self, t: float, r: ev.Resumed | ev.StopAsked) -> None:
        self.places.marks.append(Mark(t, "controller", sentence(r)))

    def _note(self, shape: int, t: float, record: ev.Record) -> None:
        notable = self.notable[shape]
        if len(notable) >= MOST_NOTABLE:
            del notable[MOST_NOTABLE // 2]
        notable.append((t, record))


def _of(part: str, method: str) -> Callable[[RunView, float, Any], None]:
    """A record that concerns one part alone."""

    def take(view: RunView, t: float, record: Any) -> None:
        getattr(getattr(view, part), method)(t, record)

    return take


_TAKE: dict[type[ev.Record], Callable[[RunView, float, Any], None]] = {
    ev.WorkAdded: _of("work", "work_added"),
    ev.Send: _of("work", "sent"),
    ev.AttemptTaken: _of("work", "taken"),
    ev.AttemptStarted: RunView._started,
    ev.ShapeStarted: RunView._shape_started,
    ev.ShapeTuned: RunView._tuned,
    ev.ShapeRefused: RunView._refused,
    ev.FailShape: RunView._failed,
    ev.SettleShape: RunView._settled,
    ev.RetryAsked: RunView._retry,
    ev.AttemptEnded: RunView._ended,
    ev.NodeExpected: _of("places", "expected"),
    ev.NodeJoined: _of("places", "joined"),
    ev.NodeTroubled: _of("places", "troubled"),
    ev.NodeLost: RunView._gone,
    ev.LeaseEnded: RunView._lease_ended,
    ev.LeasesQueued: _of("places", "leases_queued"),
    ev.NodeBusy: _of("places", "busy"),
    ev.NodeDraining: _of("places", "draining"),
    ev.SlotLost: RunView._gone,
    ev.CanaryPassed: _of("places", "canary_passed"),
    ev.CanaryFailed: _of("places", "canary_failed"),
    ev.CanaryTimed: _of("places", "canary_timed"),
    ev.Quarantine: _of("places", "quarantined"),
    ev.Resumed: RunView._controller_mark,
    ev.StopAsked: RunView._controller_mark,
}
