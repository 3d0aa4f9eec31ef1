"""The live view of a run that a controller drives: its status, and notes on what happened since the last look."""

from __future__ import annotations

from orchestrator.events import Record
from orchestrator.policy.model import Node, Slot, State
from orchestrator.reasons import Reason
from orchestrator.view.status import RunHeader, RunStatus, run_status
from orchestrator.view.words import end_of, leases_words, node_words, settled_words, slot_change

_WELL = (None, Reason.DONE, Reason.CANCELLED, Reason.LEASE_ENDED)
_NODE_NOTES = ("trouble", "busy", "shared", "lost", "gone")
_SLOT_NOTES = ("quarantined", "lost")
"""A canary that failed needs no note, because the quarantine that follows gives it as the reason."""


class LiveStatus:
    """Live status of a run. Call `feed` with each record before it is applied to the `state`."""

    def __init__(self, state: State, about: RunHeader) -> None:
        self._state, self._about = state, about
        self._last: Record | None = None
        self._notes: list[tuple[str, bool]] = []
        self._seen = {id(n): len(n.history) for n in state.nodes.values()}
        """Entries of the history of each node and slot that were looked at."""
        self._seen |= {id(s): len(s.history) for n in state.nodes.values() for s in n.slots.values()}
        self._queued = dict(state.queued_leases)
        self._shut: set[tuple[str, str]] = set()
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
        """(text, bad) of what happened since the last call."""
        self._catch_up()
        notes, self._notes = self._notes, []
        return list(dict.fromkeys(notes))

    def status(self, now: float) -> RunStatus:
        """Status at this moment."""
        self._catch_up()
        s = run_status(self._state, self._about, "running", now)
        for node in s.nodes:
            node.detail = self._details.get(node.name) or node.detail
        return s

    def _catch_up(self) -> None:
        """Note what the last record changed, where the user should see it. A failed shape is not noted: the report at
        the end of the run lists it."""
        record, self._last = self._last, None
        if record is None:
            return
        node = self._state.nodes.get(getattr(record, "node", ""))
        slot = node.slots.get(getattr(record, "slot", "")) if node else None
        if slot is not None:
            self._of_slot(slot)
        elif node is not None:
            self._of_node(node)
        named, a = self._about.named, self._state.attempts.get(getattr(record, "attempt", None) or "")
        shape = self._state.shapes.get(getattr(record, "shape", -1))
        if shape is None and a is not None and a.state == "over" and a.outcome not in _WELL:
            self._notes.append((end_of(self._state, a, named), True))
        if shape is not None and shape.state == "tuned" and shape.confirmed is False:
            self._notes.append((f"{named(shape.id)} {settled_words(shape)}", True))
        pool = getattr(record, "pool", "")
        leases = self._state.queued_leases.get(pool, ())
        if leases != self._queued.get(pool, ()):
            self._queued[pool] = leases
            if leases:
                self._notes.append((f"{pool}: {leases_words(leases)}", False))

    def _new(self, x: Node | Slot) -> list[tuple[float, str, str]]:
        since, self._seen[id(x)] = self._seen.get(id(x), 0), len(x.history)
        return x.history[since:]

    def _of_node(self, node: Node) -> None:
        for _, to, why in self._new(node):
            if to != "trouble":
                self._details.pop(node.name, None)
            if to in _NODE_NOTES:
                self._notes.append((node_words(node, to, why), not why.startswith("released")))

    def _of_slot(self, slot: Slot) -> None:
        for _, to, why in self._new(slot):
            if to == "quarantined":
                known = (slot.node, why) in self._shut  # each slot of a node has the same reason
                self._shut.add((slot.node, why))
                if known:
                    continue
            if to in _SLOT_NOTES:
                text = slot_change(
                    self._state, slot, to, why, slot.gpu.quarantined_until if to == "quarantined" else 0.0
                )
                self._notes.append((text, True))
