"""What the live view shows: the picture of the journal, and what nodes say that is no record."""

from __future__ import annotations

from orchestrator import events as ev
from orchestrator.dispatch.frames import Beat
from orchestrator.run.view import RunView
from orchestrator.run.view.eta import Estimate
from orchestrator.run.view.notes import Notes
from orchestrator.run.view.picture import About, picture
from orchestrator.status import RunStatus


class LiveStatus:
    """`view` holds the journal up to now already; `about` says the rest."""

    def __init__(self, view: RunView, about: About) -> None:
        self._view, self._about = view, about
        self._notes = Notes(view, about.named)
        self._estimate = Estimate()
        self._state = "preparing"
        self._details: dict[str, str] = {}
        """Node -> what it said last beside its records: how its preparation goes, what troubles it."""

    def feed(self, t: float, record: ev.Record) -> None:
        """Take a journaled record in."""
        if isinstance(record, ev.NodeJoined | ev.NodeExpected | ev.NodeLost | ev.NodeBusy):
            self._details.pop(record.node, None)
        if isinstance(record, ev.NodeJoined):
            self._state = "running"
        self._view.feed(t, record)
        self._notes.feed(record)

    def progress(self, node: str, detail: str) -> None:
        """Its preparation goes on."""
        self._details[node] = detail

    def trouble(self, node: str, detail: str, *, on_record: bool = False) -> None:
        """The node does not answer, or could not be prepared. `on_record`: the journal says so, too."""
        if not on_record and self._details.get(node) != detail:
            self._notes.say(f"{node}: {detail}")
        self._details[node] = detail

    def beat(self, node: str, beat: Beat) -> None:
        if beat.error:
            self.trouble(node, beat.error)

    def take_notes(self) -> list[tuple[str, bool]]:
        """(text, bad) of what happened since the last call."""
        return self._notes.take()

    def status(self, now: float) -> RunStatus:
        """The picture at this moment."""
        s = picture(self._view, self._about, self._state, now, estimate=self._estimate)
        for node in s.nodes:
            node.detail = self._details.get(node.name) or node.detail
        return s
