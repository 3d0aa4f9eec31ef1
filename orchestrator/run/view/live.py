"""Status and notes for the live view: the journal, and what nodes report beside it."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator import events as ev
from orchestrator.dispatch.stream import Beat
from orchestrator.reasons import Reason
from orchestrator.run.view.run_view import RunView
from orchestrator.run.view.sentences import sentence
from orchestrator.run.view.status import Estimate, RunHeader, run_status
from orchestrator.status import RunStatus

BAD = (ev.NodeTroubled, ev.NodeLost, ev.SlotLost, ev.CanaryFailed, ev.Quarantine, ev.FailShape)


class Notes:
    """Notes for the live view, kept until they are taken."""

    def __init__(self, view: RunView, named: Callable[[int], str]) -> None:
        self._view, self._named = view, named
        self._told: set[tuple[str, str]] = set()
        """(node, why) of the quarantines that were noted."""
        self._kept: list[tuple[ev.Record | str, bool]] = []

    def feed(self, record: ev.Record) -> None:
        """Note a record where the user should see it; call after the view has it."""
        match record:
            case ev.AttemptEnded(outcome=outcome):
                if outcome not in (Reason.DONE, Reason.CANCELLED):
                    self._kept.append((record, True))
            case ev.NodeBusy(doing=doing):
                self._kept.append((record, doing != "free"))
            case ev.SettleShape(confirmed=False):
                self._kept.append((record, True))
            case ev.Split() | ev.Confirm() | ev.ChargeSlot():
                self._kept.append((record, False))
            case ev.Quarantine(node, slot, why):
                # a quarantine gives its reason: the note on the canary that led to it would repeat it
                self._kept = [k for k in self._kept if not _canary_of(k[0], node, slot)]
                if (node, why) not in self._told:  # each slot of a node has the same reason
                    self._kept.append((record, True))
                self._told.add((node, why))
            case _ if isinstance(record, BAD):
                self._kept.append((record, True))

    def take(self) -> list[tuple[str, bool]]:
        """(sentence, bad) of each since the last call."""
        kept, self._kept = self._kept, []
        return [(self._words(record), bad) for record, bad in kept]

    def say(self, text: str) -> None:
        """Note a problem that is no record."""
        self._kept.append((text, True))

    def _words(self, record: ev.Record | str) -> str:
        if isinstance(record, str):
            return record
        attempt = record.attempt if isinstance(record, ev.AttemptEnded) else None
        return sentence(record, self._named, self._view.place(attempt))


def _canary_of(record: ev.Record | str, node: str, slot: str) -> bool:
    return isinstance(record, ev.CanaryFailed) and (record.node, record.slot) == (node, slot)


class LiveStatus:
    """Live status of a run. `view` holds the journal so far; `about`: what is not in it."""

    def __init__(self, view: RunView, about: RunHeader) -> None:
        self._view, self._about = view, about
        self._notes = Notes(view, about.named)
        self._estimate = Estimate()
        self._state = "preparing"
        self._details: dict[str, str] = {}
        """Node -> its latest detail beside the records: progress of its preparation, or its trouble."""

    def feed(self, t: float, record: ev.Record) -> None:
        """Take a journaled record."""
        if isinstance(record, ev.NodeJoined | ev.NodeExpected | ev.NodeLost | ev.NodeBusy):
            self._details.pop(record.node, None)
        if isinstance(record, ev.NodeJoined):
            self._state = "running"
        self._view.feed(t, record)
        self._notes.feed(record)

    def progress(self, node: str, detail: str) -> None:
        """Record progress of the node's preparation."""
        self._details[node] = detail

    def trouble(self, node: str, detail: str, *, on_record: bool = False) -> None:
        """Record that the node does not answer, or could not be prepared. `on_record`: whether it is in the journal,
        too."""
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
        """Status at this moment."""
        s = run_status(self._view, self._about, self._state, now, estimate=self._estimate)
        for node in s.nodes:
            node.detail = self._details.get(node.name) or node.detail
        return s
