"""When a controller worked on the run: only that counts as the run's time, not the hours between two sessions."""

from __future__ import annotations

import time

from orchestrator import events as ev
from orchestrator.run.view.model import Session
from orchestrator.status import duration


class Sessions:
    """A session begins where a controller takes the run up, and ends with its last record."""

    def __init__(self) -> None:
        self.all: list[Session] = []

    def feed(self, t: float, record: ev.Record) -> None:
        if isinstance(record, ev.Resumed):
            self.all.append(Session(t, t))
        elif self.all:
            self.all[-1].end = max(self.all[-1].end, t)
        elif not isinstance(record, ev.GroupAdded):
            self.all.append(Session(t, t))

    @property
    def start(self) -> float | None:
        """When the latest began."""
        return self.all[-1].start if self.all else None

    def closed(self, end: float | None) -> list[Session]:
        """All of them, the latest up to `end` (now, or when its controller ended; None: its last record)."""
        if not self.all:
            return []
        last = self.all[-1]
        return [*self.all[:-1], Session(last.start, max(last.end, end if end is not None else last.end))]

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
