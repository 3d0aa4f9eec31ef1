"""The live view of a run that a controller drives: its status, and notes on what happened since the last look.

The controller calls `feed`, `progress` and `trouble` as things happen (`controller/loop.py`, `node_reports.py`), and
between them `take_notes` and `status`, which it hands to the view of the command line.
"""

from __future__ import annotations

from orchestrator.events import Record
from orchestrator.policy.model import Node, Slot, State
from orchestrator.reasons import Reason
from orchestrator.view.header import RunHeader
from orchestrator.view.sentences import (
    describe_end,
    describe_node_change,
    describe_queue,
    describe_settled,
    describe_slot_change,
)
from orchestrator.view.status import RunStatus, run_status

_WELL = (None, Reason.DONE, Reason.CANCELLED, Reason.LEASE_ENDED)
_NODE_NOTES = ("trouble", "busy", "shared", "lost", "gone")
_SLOT_NOTES = ("quarantined", "lost")
"""A canary that failed needs no note, because the quarantine that follows gives it as the reason."""


class LiveStatus:
    """Live status of a run. Call `feed` with each record before it is applied to the `state`."""

    def __init__(self, state: State, header: RunHeader) -> None:
        self._state = state
        self._header = header
        self._last: Record | None = None
        self._notes: list[tuple[str, bool]] = []
        self._entries_seen: dict[int, int] = {}
        """Entries of the history of each node and slot that were looked at, by the object's id."""
        for node in state.nodes.values():
            parts: list[Node | Slot] = [node, *node.slots.values()]
            for part in parts:
                self._entries_seen[id(part)] = len(part.history)
        self._queued = dict(state.queued_leases)
        self._noted_quarantines: set[tuple[str, str]] = set()
        """(node, reason) of the quarantines that were noted."""
        self._details: dict[str, str] = {}
        """Node -> its latest detail beside the records: progress of its preparation, or its trouble."""

    def feed(self, t: float, record: Record) -> None:
        """Take a record; by the next call it is applied."""
        self._catch_up()
        self._last = record

    def progress(self, node: str, detail: str) -> None:
        """Record progress of the node's preparation."""
        self._catch_up()
        self._details[node] = detail

    def trouble(self, node: str, detail: str, *, on_record: bool = False) -> None:
        """Record that the node does not answer, or could not be prepared. `on_record`: whether it is in the journal,
        too."""
        self._catch_up()
        if not on_record and self._details.get(node) != detail:
            self._notes.append((f"{node}: {detail}", True))
        self._details[node] = detail

    def take_notes(self) -> list[tuple[str, bool]]:
        """(text, True if it is bad) of what happened since the last call."""
        self._catch_up()
        notes, self._notes = self._notes, []
        return list(dict.fromkeys(notes))

    def status(self, now: float) -> RunStatus:
        """Status at this moment."""
        self._catch_up()
        status = run_status(self._state, self._header, "running", now)
        for node in status.nodes:
            node.detail = self._details.get(node.name) or node.detail
        return status

    def _catch_up(self) -> None:
        """Note what the last record changed, where the user should see it. A failed shape is not noted: the report at
        the end of the run lists it."""
        record, self._last = self._last, None
        if record is None:
            return
        node = self._state.nodes.get(getattr(record, "node", ""))
        slot = node.slots.get(getattr(record, "slot", "")) if node else None
        if slot is not None:
            self._note_slot(slot)
        elif node is not None:
            self._note_node(node)
        shape = self._state.shapes.get(getattr(record, "shape", -1))
        attempt = self._state.attempts.get(getattr(record, "attempt", None) or "")
        if shape is None and attempt is not None and attempt.state == "over" and attempt.outcome not in _WELL:
            self._notes.append((describe_end(attempt, self._header.named), True))
        if shape is not None and shape.state == "tuned" and shape.confirmed is False:
            self._notes.append((f"{self._header.named(shape.id)} {describe_settled(shape)}", True))
        self._note_queue(getattr(record, "pool", ""))

    def _note_queue(self, pool: str) -> None:
        leases = self._state.queued_leases.get(pool, ())
        if leases == self._queued.get(pool, ()):
            return
        self._queued[pool] = leases
        if leases:
            self._notes.append((f"{pool}: {describe_queue(leases)}", False))

    def _new_entries(self, part: Node | Slot) -> list[tuple[float, str, str]]:
        seen = self._entries_seen.get(id(part), 0)
        self._entries_seen[id(part)] = len(part.history)
        return part.history[seen:]

    def _note_node(self, node: Node) -> None:
        for _, to, why in self._new_entries(node):
            if to != "trouble":
                self._details.pop(node.name, None)
            if to in _NODE_NOTES:
                self._notes.append((describe_node_change(node, to, why), not why.startswith("released")))

    def _note_slot(self, slot: Slot) -> None:
        for _, to, why in self._new_entries(slot):
            until = 0.0
            if to == "quarantined":
                until = slot.gpu.quarantined_until
                quarantine = (slot.node, why)
                if quarantine in self._noted_quarantines:  # each slot of a node has the same reason
                    continue
                self._noted_quarantines.add(quarantine)
            if to in _SLOT_NOTES:
                self._notes.append((describe_slot_change(self._state, slot, to, why, until), True))
