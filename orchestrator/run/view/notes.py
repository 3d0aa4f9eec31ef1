"""What a person at the live view is told as it happens: few records, each once."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator import events as ev
from orchestrator.reasons import Reason
from orchestrator.run.view.run_view import RunView
from orchestrator.run.view.sentences import sentence

BAD = (ev.NodeTroubled, ev.NodeLost, ev.SlotLost, ev.CanaryFailed, ev.Quarantine, ev.FailShape)


class Notes:
    """Kept until they are taken."""

    def __init__(self, view: RunView, named: Callable[[int], str]) -> None:
        self._view, self._named = view, named
        self._told: set[tuple[str, str]] = set()
        """(node, why) of the quarantines that were told."""
        self._kept: list[tuple[ev.Record | str, bool]] = []

    def feed(self, record: ev.Record) -> None:
        """Call after the view has it."""
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
                # a quarantine gives its reason: the canary that led to it has nothing to add
                self._kept = [k for k in self._kept if not _canary_of(k[0], node, slot)]
                if (node, why) not in self._told:  # each slot of a node says the same of what it lacks
                    self._kept.append((record, True))
                self._told.add((node, why))
            case _ if isinstance(record, BAD):
                self._kept.append((record, True))

    def take(self) -> list[tuple[str, bool]]:
        """(sentence, bad) of each since the last call."""
        kept, self._kept = self._kept, []
        return [(self._words(record), bad) for record, bad in kept]

    def say(self, text: str) -> None:
        """Something bad that is no record."""
        self._kept.append((text, True))

    def _words(self, record: ev.Record | str) -> str:
        if isinstance(record, str):
            return record
        attempt = record.attempt if isinstance(record, ev.AttemptEnded) else None
        return sentence(record, self._named, self._view.place(attempt))


def _canary_of(record: ev.Record | str, node: str, slot: str) -> bool:
    return isinstance(record, ev.CanaryFailed) and (record.node, record.slot) == (node, slot)
