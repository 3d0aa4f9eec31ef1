"""Computes the status of a run from its state. The live view, `status` and `status --json` show it.

`run_status` knows only what is in the ledger. For `status`, `controller/run_snapshot.py` adds the answers of the nodes
to it; the live view adds what a controller hears (`live.py`). States here are those that people see: `node_state` and
`_idle_state` make them from those of the policy (`policy/model.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile

from orchestrator.ledger.reader import Counts
from orchestrator.pages import Document
from orchestrator.planning.plan import queue_of
from orchestrator.policy.model import Node, Slot, State
from orchestrator.view.formatting import describe_work_time
from orchestrator.view.header import RunHeader
from orchestrator.view.sentences import describe_node_change
from orchestrator.view.slot_speed import describe_flags
from orchestrator.view.time_left import time_left
from worker.tuners.catalog import recorded_tuner


@dataclass(slots=True)
class SlotStatus:
    """One slot. `doing`: the shape that it measures now, since `since` (epoch seconds)."""

    slot: str
    state: str = "starting"
    attempt: str | None = None
    doing: str = ""
    since: float = 0.0
    device: str = ""
    gpu: Document | None = None
    """Reading of its GPU from the live poll (docs/explanation/measurement.md), None if unknown."""


@dataclass(slots=True)
class NodeStatus:
    """One node. state: preparing, ready, busy, draining, slow (reachable, but it did not answer in time), unreachable
    or quarantined; for a lease also queued or ended."""

    name: str
    state: str = "preparing"
    slots: list[SlotStatus] = field(default_factory=list)
    tuned: int = 0
    failed: int = 0
    detail: str = ""
    """The reason for its state: of the node, else of one of its slots."""
    log: list[str] = field(default_factory=list)
    """Last lines of its log."""
    lease: str = ""
    """If the node is a lease: its id in the scheduler."""
    host: str = ""
    """The machine of a lease."""
    ends_at: float = 0.0
    """Epoch seconds at which the time limit of a lease ends it; 0: never."""
    live: Document | None = None
    """Answer of the live poll: `at` (epoch seconds), `error`, `slow`, `load`, `containers`, `gpus`; None: not polled.
    """

    @property
    def running(self) -> int:
        """Slots that work on an attempt."""
        return sum(1 for s in self.slots if s.attempt)


def done_word(tuner: str) -> str:
    """The word for a shape that has a result. A bench only measures and does not tune."""
    return "measured" if tuner and recorded_tuner(tuner).side_by_side else "tuned"


@dataclass(slots=True)
class RunStatus:
    """One run. state: planned, preparing, running, finished, interrupted or cancelled."""

    run: str
    state: str
    counts: Counts
    nodes: list[NodeStatus] = field(default_factory=list)
    rate_per_min: float | None = None
    """Shapes tuned per minute, over the last minutes."""
    eta_s: float | None = None
    """Estimated seconds until the end."""
    eta_range_s: tuple[float, float] | None = None
    """The end comes between these in nine of ten runs."""
    started: float | None = None
    """Time at which the run was requested."""
    worked_s: float | None = None
    """Seconds in which a controller drove the run. Time between two sessions does not count."""
    worked: str = ""
    """`worked_s` as text."""
    sessions: int = 0
    controller: str = ""
    family: str = ""
    tuner: str = ""
    standing_out: list[str] = field(default_factory=list)
    """Sentences about slots that are slow, hot or power-capped compared with the others."""
    files: list[Document] = field(default_factory=list)
    """Result files: path, bytes, when written (epoch seconds)."""
    waits_for: list[str] = field(default_factory=list)
    """Occupied nodes and queues of pools; `eta_s` does not count the wait for them."""

    @property
    def done(self) -> str:
        """The word for a shape that has a result. A bench does not tune."""
        return done_word(self.tuner)

    def to_json(self) -> Document:
        """The document of `status --json`."""
        nodes = []
        for node in self.nodes:
            document = asdict(node)
            document["slot_states"] = document["slots"]
            document["slots"] = len(node.slots)
            document["running"] = node.running
            nodes.append(document)
        low_high = None if self.eta_range_s is None else [round(seconds, 1) for seconds in self.eta_range_s]
        others = ("started", "sessions", "controller", "family", "tuner", "standing_out", "files")
        return {
            "run": self.run,
            "state": self.state,
            "shapes": self.counts.to_json(),
            "nodes": nodes,
            "eta_s": _rounded(self.eta_s, 1),
            "eta_range_s": low_high,
            "rate_per_min": _rounded(self.rate_per_min, 2),
            "worked_s": _rounded(self.worked_s, 1),
            **{name: getattr(self, name) for name in others},
        }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


UNFINISHED = ("planned", "preparing", "running")
"""States of a run that goes on or will begin."""


def state_now(kept: str, *, driven: bool) -> str:
    """State of a run. Without a living controller it is interrupted, whatever the ledger says (`kept`). `driven`: a
    controller holds the run's lock."""
    if kept in ("preparing", "running") and not driven:
        return "interrupted"  # its controller died
    return kept


def sessions_until(state: State, end: float | None) -> list[list[float]]:
    """[begin, end] of each controller. The latest ends at `end` (now, or when it ended), or else at its last record."""
    if not state.sessions:
        return []
    *before, (begin, last_record) = state.sessions
    return [*before, [begin, max(last_record, end or 0.0)]]


RATE_WINDOW_S = 300.0
"""Seconds: the rate of a run is that of its last minutes."""


def rate_per_min(state: State, now: float) -> float | None:
    """Shapes tuned per minute over the last minutes in which a controller drove the run."""
    starts = (attempt.started_at for attempt in state.attempts.values() if attempt.started_at is not None)
    first = next(starts, None)
    if not state.sessions or first is None:
        return None
    since = max(now - RATE_WINDOW_S, state.sessions[-1][0], first)
    tuned = sum(1 for _ in takewhile(lambda t: t > since, reversed(state.tuned_at)))
    if not tuned or now <= since:
        return None
    return tuned * 60.0 / (now - since)


def run_status(state: State, header: RunHeader, run_state: str, now: float, *, end: float | None = None) -> RunStatus:
    """The status of a run now. `run_state`: from `state_now`. `end`: when its controller ended, None if one drives
    it."""
    has_controller = run_state in ("preparing", "running")
    has_joined = any(node.state == "joined" for node in state.nodes.values())
    if run_state == "running" and not has_joined and not state.running:
        run_state = "preparing"
    sessions = sessions_until(state, now if has_controller else end)
    status = RunStatus(
        header.run,
        run_state,
        Counts.of(state, header.total, header.skipped),
        started=header.created,
        family=header.family,
        tuner=header.tuner,
        sessions=len(sessions),
        worked_s=sum(until - begin for begin, until in sessions) if sessions else None,
        worked=describe_work_time(sessions),
        standing_out=describe_flags(state),
    )
    names = dict.fromkeys((*header.nodes, *state.nodes))
    status.nodes = [_node_status(state, header, name) for name in names]
    if run_state == "finished":
        for node in status.nodes:
            if node.state == "preparing":  # the work ended before it was needed
                node.state = "ended"
                node.slots = [replace(slot, state="ended") for slot in node.slots]
    if has_controller:
        status.nodes += _queued_leases(state)
        status.rate_per_min = rate_per_min(state, now)
        status.waits_for = awaited(state)
    left = None
    if run_state in (*UNFINISHED, "interrupted"):
        left = time_left(state, header, now, driven=has_controller)
    if left is not None:
        status.eta_s = left.mid_s
        status.eta_range_s = left.low_s, left.high_s
    elif not has_controller or header.known:
        status.eta_s = 0.0
    return status


def _queued_leases(state: State) -> list[NodeStatus]:
    return [
        NodeStatus(f"{pool}, lease {id_}", "queued", detail=why, lease=id_)
        for pool, leases in state.queued_leases.items()
        for id_, why in leases
    ]


def awaited(state: State) -> list[str]:
    """Nodes that are occupied by others, and pools with leases in their scheduler's queue."""
    nodes = [node.name for node in state.nodes.values() if node.state == "busy"]
    return nodes + [queue_of(pool) for pool, leases in state.queued_leases.items() if leases]


_STATES = {"away": "preparing", "joined": "ready", "busy": "preparing", "lost": "unreachable", "gone": "ended"}


def node_state(node: Node) -> str:
    """The state of a node as people see it: preparing, ready, unreachable, draining or ended."""
    if node.draining and node.state != "gone":
        return "draining"
    if node.state == "joined" and node.history[-1][1] == "trouble":
        return "unreachable"
    return _STATES[node.state]


def node_detail(node: Node) -> str:
    """The trouble of a node in words, "" if all is well."""
    if node.state in ("gone", "busy"):
        return describe_node_change(node, node.state, node.why)
    return node.why


def _node_status(state: State, header: RunHeader, name: str) -> NodeStatus:
    planned_slots = header.nodes.get(name, ())
    node = state.nodes.get(name)
    if node is None:
        return NodeStatus(name, slots=[SlotStatus(slot) for slot in planned_slots])
    names = dict.fromkeys((*planned_slots, *node.slots))
    slots = [_slot_status(state, header, slot, node.slots.get(slot)) for slot in names]
    status = NodeStatus(name, node_state(node), slots, node.tuned, node.failed, node_detail(node))
    if status.state == "ready" and status.running:
        status.state = "busy"
    if slots and all(slot.state == "quarantined" for slot in slots):
        status.state = "quarantined"
    if not status.detail:
        status.detail = next((slot.why for slot in node.slots.values() if slot.why), "")
    if node.lease:
        status.lease = node.lease
        status.host = node.host
        status.ends_at = node.ends_at
    return status


def _slot_status(state: State, header: RunHeader, name: str, slot: Slot | None) -> SlotStatus:
    if slot is None:
        return SlotStatus(name)
    attempt = state.attempts.get(slot.running or "")
    if attempt is None:
        return SlotStatus(name, _idle_state(state, slot))
    if attempt.current is None:
        return SlotStatus(name, "busy", attempt.id, attempt.id, attempt.moved_at)
    doing = f"{header.named(attempt.current)}  ({attempt.id})"
    return SlotStatus(name, "busy", attempt.id, doing, attempt.current_at)


def _idle_state(state: State, slot: Slot) -> str:
    """The state of a slot without an attempt, as people see it."""
    if state.nodes[slot.node].state == "gone":
        return "ended"
    if slot.state == "starting" and slot.canary_failed:
        return "canary failed"
    return "idle" if slot.state == "ready" else slot.state
