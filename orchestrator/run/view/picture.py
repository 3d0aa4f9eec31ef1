"""The picture of a run in numbers and words (orchestrator.status), drawn from its view at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from orchestrator.planning.estimate import Range
from orchestrator.run.view.eta import time_left
from orchestrator.run.view.model import Node, Slot
from orchestrator.run.view.run_view import RunView
from orchestrator.run.view.state import GOING
from orchestrator.status import NodeStatus, RunStatus, SlotStatus

RATE_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class About:
    """What the journal does not say. `nodes`: the slots of each node of the inventory; `named`: a shape for people."""

    run: str
    family: str
    tuner: str
    created: float
    total: int
    skipped: int
    nodes: Mapping[str, tuple[str, ...]]
    named: Callable[[int], str]


class Left(Protocol):
    """How `time_left` is asked."""

    def __call__(self, view: RunView, now: float, *, driven: bool) -> Range | None: ...


def picture(
    view: RunView, about: About, state: str, now: float, *, end: float | None = None, estimate: Left = time_left
) -> RunStatus:
    """`state`: the run's as it is now (`state_now`). `end`: when its controller ended, None where one is at it."""
    going, work = state in ("preparing", "running"), view.work
    s = RunStatus(
        about.run, state, total=about.total, skipped=about.skipped, tuned=work.tuned, failed=work.failed,
        started=about.created, family=about.family, tuner=about.tuner,
    )  # fmt: skip
    s.nodes = [_node(view, about, name, slots) for name, slots in about.nodes.items()]
    s.nodes += [_node(view, about, name, ()) for name in view.places.nodes if name not in about.nodes]
    s.running = min(sum(n.running for n in s.nodes), max(0, s.total - s.settled))
    until = now if going else end
    s.worked_s, s.sessions = view.sessions.worked_s(until), len(view.sessions.all)
    s.worked = view.sessions.words(until)
    if going:
        s.rate_per_min = rate_per_min(view, now)
    if state in (*GOING, "interrupted"):
        left = estimate(view, now, driven=going)
        s.eta_s = left.mid_s if left else 0.0
        s.eta_range_s = (left.low_s, left.high_s) if left else None
    else:
        s.eta_s = 0.0
    return s


def rate_per_min(view: RunView, now: float) -> float | None:
    """Shapes tuned a minute over the last minutes in which a controller was at it."""
    begun = [a.start for lane in view.places.lanes.values() for a in lane[:1]]
    start = view.sessions.start
    if start is None or not begun:
        return None
    since = max(now - RATE_WINDOW_S, start, min(begun))
    if now <= since:
        return None
    n = 0
    for t in reversed(view.work.tuned_at):
        if t <= since:
            break
        n += 1
    return n * 60.0 / (now - since) if n else None


def _node(view: RunView, about: About, name: str, slots: tuple[str, ...]) -> NodeStatus:
    node = view.places.nodes.get(name) or Node(name)
    names = dict.fromkeys((*slots, *node.slots))
    found = [_slot(about, x, node.slots.get(x) or Slot(x)) for x in names]
    state = node.state
    if state == "ready" and node.running:
        state = "busy"
    if found and all(x.state == "quarantined" for x in found):
        state = "quarantined"
    out = NodeStatus(name, state, slots=found, tuned=node.tuned, failed=node.failed, detail=node.detail)
    if not out.detail:
        out.detail = next((s.why for s in node.slots.values() if s.why), "")
    return out


def _slot(about: About, name: str, slot: Slot) -> SlotStatus:
    a = slot.attempt
    if a is None:
        return SlotStatus(name, slot.state)
    if a.current is None:
        return SlotStatus(name, "busy", a.id, a.id, a.since)
    return SlotStatus(name, "busy", a.id, f"{about.named(a.current)}  ({a.id})", a.current_at)
