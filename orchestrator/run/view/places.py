"""Nodes and slots of a run, and the intervals in which they did not work, folded from the journal."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from orchestrator import events as ev
from orchestrator.nodes.occupancy import busy_sentence
from orchestrator.run.view.sentences import node_slot, sentence
from orchestrator.run.view.slot_speeds import CanaryTimes
from orchestrator.run.view.work import Attempt


@dataclass(slots=True)
class Slot:
    """A slot. state: starting, idle, canary failed, quarantined (`why`) or lost; busy while it has an attempt."""

    name: str
    state: str = "starting"
    why: str = ""
    attempt: Attempt | None = None


@dataclass(slots=True)
class Node:
    """A node. state: preparing, ready, unreachable, draining or ended. `detail`: why, where something is wrong.

    `host`, `gpus` (by slot), `lease`, `pool`, `ends_at` (epoch seconds, 0 for never): of a node that is a lease.
    """

    name: str
    state: str = "preparing"
    detail: str = ""
    slots: dict[str, Slot] = field(default_factory=dict)
    draining: bool = False
    host: str = ""
    gpus: dict[str, str] = field(default_factory=dict)
    lease: str = ""
    pool: str = ""
    ends_at: float = 0.0
    tuned: int = 0
    failed: int = 0

    @property
    def running(self) -> int:
        """Slots that work on an attempt."""
        return sum(s.attempt is not None for s in self.slots.values())


@dataclass(slots=True)
class Span:
    """Interval in which a node or slot did not work. kind: preparing, trouble, away, busy, ended or
    released (a lease), quarantine or gone."""

    node: str
    slot: str | None
    start: float
    kind: str
    text: str
    end: float | None = None


@dataclass(slots=True)
class Mark:
    """A moment: a failed canary, a controller that took over the run, a stop."""

    t: float
    kind: str
    text: str
    node: str = ""
    slot: str = ""


class Places:
    """Nodes and slots of a run, in the order of their first mention."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.queued: dict[str, tuple[tuple[str, str], ...]] = {}
        """Pool -> (lease, the scheduler's words) of those that wait."""
        self.lanes: dict[tuple[str, str], list[Attempt]] = {}
        """The attempts of each slot, in the order in which they began."""
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self.canaries: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        """Microseconds of the canaries that passed."""
        self.timed = CanaryTimes()
        self._open: dict[tuple[str, str | None, str], Span] = {}

    def node(self, name: str) -> Node:
        """Node of that name; also one that is in no inventory any more."""
        found = self.nodes.get(name)
        if found is None:
            found = self.nodes[name] = Node(name)
        return found

    def slot(self, node: str, slot: str) -> Slot:
        slots = self.node(node).slots
        if slot not in slots:
            slots[slot] = Slot(slot)
            self.lanes.setdefault((node, slot), [])
        return slots[slot]

    def spot(self, node: str, slot: str) -> str:
        """Name of a slot: its host and GPU, where these are known and not node and slot."""
        n = self.nodes.get(node)
        gpu = n.gpus.get(slot) if n else None
        if n is None or gpu is None or (n.host or node, gpu) == (node, slot):
            return node_slot(node, slot)
        return f"{n.host or node} GPU {gpu}"

    # --- nodes --------------------------------------------------------------------------------------------------------

    def expected(self, t: float, r: ev.NodeExpected) -> None:
        node = self.node(r.node)
        node.state, node.detail, node.draining = "preparing", "", False
        node.lease, node.pool, node.ends_at = r.lease, r.pool, r.ends_at
        self._located(node, r)
        for slot in r.slots:
            self.slot(r.node, slot).state = "starting"
        self._begin(r.node, None, "preparing", t, sentence(r))

    def leases_queued(self, t: float, r: ev.LeasesQueued) -> None:
        self.queued[r.pool] = r.leases

    def joined(self, t: float, r: ev.NodeJoined) -> None:
        node = self.node(r.node)
        node.state, node.detail = "draining" if node.draining else "ready", ""
        for slot in r.slots:
            self.slot(r.node, slot)
        for kind in ("preparing", "trouble", "away", "busy"):
            self._finish(r.node, None, kind, t)

    def troubled(self, t: float, r: ev.NodeTroubled) -> None:
        node = self.node(r.node)
        node.detail = r.detail
        if node.state not in ("preparing", "draining"):
            node.state = "unreachable"
        self._begin(r.node, None, "trouble", min(t, r.since), sentence(r))

    def lost(self, t: float, r: ev.NodeLost) -> list[Attempt]:
        """The node is given up: what ran there, which is taken as lost."""
        node = self.node(r.node)
        node.state, node.detail = "unreachable", r.detail
        self._finish(r.node, None, "preparing", t)
        self._finish(r.node, None, "trouble", t)
        self._begin(r.node, None, "away", t, sentence(r))
        return [a for s in node.slots.values() if (a := self._freed(s)) is not None]

    def ended(self, t: float, r: ev.LeaseEnded) -> list[Attempt]:
        """The node is gone for good: what ran there."""
        node = self.node(r.node)
        node.state, node.detail = "ended", sentence(r)
        for kind in ("preparing", "trouble", "away", "busy"):
            self._finish(r.node, None, kind, t)
        for slot in node.slots.values():
            slot.state, slot.why = "ended", ""
            self._finish(r.node, slot.name, "quarantine", t)
        self._begin(r.node, None, "released" if r.cause == "released" else "ended", t, node.detail)
        return [a for s in node.slots.values() if (a := self._freed(s)) is not None]

    def _located(self, node: Node, r: ev.NodeExpected) -> None:
        node.host = r.host or node.host
        node.gpus.update(zip(r.slots, r.gpus, strict=False))

    def busy(self, t: float, r: ev.NodeBusy) -> None:
        node = self.node(r.node)
        node.detail = "" if r.doing == "free" else busy_sentence(r.node, r.doing, r.detail)
        if r.doing in ("wait", "free"):
            node.state = "preparing"
        if r.doing == "wait":
            self._begin(r.node, None, "busy", t, node.detail)
        else:
            self._finish(r.node, None, "busy", t)

    def draining(self, t: float, r: ev.NodeDraining) -> None:
        node = self.node(r.node)
        node.state, node.draining = "draining", True

    # --- slots --------------------------------------------------------------------------------------------------------

    def slot_lost(self, t: float, r: ev.SlotLost) -> list[Attempt]:
        slot = self.slot(r.node, r.slot)
        slot.state, slot.why = "lost", r.detail
        self._begin(r.node, r.slot, "gone", t, sentence(r))
        freed = self._freed(slot)
        return [freed] if freed is not None else []

    def canary_passed(self, t: float, r: ev.CanaryPassed) -> None:
        slot = self.slot(r.node, r.slot)
        slot.state, slot.why = "idle", ""
        self.canaries[r.node, r.slot].append(r.us)
        self._finish(r.node, r.slot, "quarantine", t)
        self._finish(r.node, r.slot, "gone", t)

    def canary_failed(self, t: float, r: ev.CanaryFailed) -> None:
        slot = self.slot(r.node, r.slot)
        slot.state, slot.why = "canary failed", r.detail
        self.marks.append(Mark(t, "canary", sentence(r), r.node, r.slot))

    def canary_timed(self, t: float, r: ev.CanaryTimed) -> None:
        self.timed.feed(t, r)

    def flags(self) -> list[str]:
        """Sentences on the slots that are slow, hot or power-capped."""
        return [f"{self.spot(*slot)} is {why}" for slot, why in self.timed.flags().items()]

    def quarantined(self, t: float, r: ev.Quarantine) -> None:
        slot = self.slot(r.node, r.slot)
        slot.state, slot.why = "quarantined", r.why
        self._begin(r.node, r.slot, "quarantine", t, sentence(r, spot=self.spot))

    def begins(self, t: float, a: Attempt, fresh: bool) -> None:
        """An attempt is under way on its slot."""
        slot = self.slot(a.node, a.slot)
        slot.attempt = a
        if fresh:
            self.lanes[a.node, a.slot].append(a)

    def ends(self, a: Attempt) -> None:
        node = self.nodes.get(a.node)
        slot = node.slots.get(a.slot) if node else None
        if slot is not None and slot.attempt is a:
            self._freed(slot)
            if slot.state == "starting":
                slot.state = "idle"

    def _freed(self, slot: Slot) -> Attempt | None:
        attempt, slot.attempt = slot.attempt, None
        return attempt

    # --- spans --------------------------------------------------------------------------------------------------------

    def _begin(self, node: str, slot: str | None, kind: str, t: float, text: str) -> None:
        if (node, slot, kind) not in self._open:
            span = self._open[node, slot, kind] = Span(node, slot, t, kind, text)
            self.spans.append(span)

    def _finish(self, node: str, slot: str | None, kind: str, t: float) -> None:
        span = self._open.pop((node, slot, kind), None)
        if span is not None:
            span.end = max(span.start, t)
