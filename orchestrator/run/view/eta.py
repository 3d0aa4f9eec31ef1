"""Seconds until the run ends, asked of the picture: which groups wait, run and are over is what the estimate needs."""

from __future__ import annotations

from orchestrator.planning.estimate import Range, UnderWay, seconds_left
from orchestrator.run.view.model import Attempt, Group
from orchestrator.run.view.run_view import RunView

SPREAD = 5.0
"""Of estimates of which nothing more is known."""


def time_left(view: RunView, now: float, *, driven: bool) -> Range | None:
    """Seconds until the last shape is settled, None where all are; of a run that nobody drives, once it is resumed."""
    work, waiting, running = view.work, list[float](), list[UnderWay]()
    for group in work.groups.values():
        if group.left <= 0:
            continue
        attempt = work.attempts.get(group.running) if driven else None
        if attempt is None:
            waiting.append(work.setup_s + group.left_s)
        else:
            running.append(_under_way(view, group, attempt, now))
    costs, slots = work.costs, _slots(view)
    return seconds_left(
        waiting,
        slots,
        spread=costs.spread if costs else SPREAD,
        over=work.over,
        running=running,
        start=_start(view, now, driven),
    )


class Estimate:
    """The same, computed anew once a second only: with many groups it takes some milliseconds."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._left: Range | None = None

    def __call__(self, view: RunView, now: float, *, driven: bool) -> Range | None:
        if self._at is None or not 0.0 <= now - self._at < 1.0:
            self._at, self._left = now, time_left(view, now, driven=driven)
        return self._left


def _under_way(view: RunView, group: Group, a: Attempt, now: float) -> UnderWay:
    work, first = view.work, 0.0 if a.done else view.work.setup_s
    current = work.shapes.get(a.current) if a.current is not None else None
    done_s = work.setup_s + a.done_s if a.done else 0.0
    # what lasted through a while without a controller is no evidence: nobody knows when it moved on
    broken = a.start < (view.sessions.start or 0.0)
    since = max(a.since, view.sessions.start or 0.0)
    return UnderWay(
        estimate_s=done_s + first + group.left_s,
        done_s=done_s,
        took_s=0.0 if broken else a.took_s,
        since_s=max(0.0, now - since),
        next_s=first + current.cost_s if current is not None and current.state == "pending" else 0.0,
    )


def _slots(view: RunView) -> int:
    """Those that take work, or soon will; all, where there is none."""
    nodes = [n for n in view.places.nodes.values() if n.state in ("ready", "preparing")]
    good = sum(s.state not in ("quarantined", "lost", "canary failed") for n in nodes for s in n.slots.values())
    return good or sum(len(n.slots) for n in view.places.nodes.values()) or 1


def _start(view: RunView, now: float, driven: bool) -> Range | None:
    """Until the first slot can begin, while none has."""
    slots = [s for n in view.places.nodes.values() for s in n.slots.values()]
    if driven and any(s.attempt is not None or s.state == "idle" for s in slots):
        return None
    usual = view.work.costs.start_s if view.work.costs else 0.0
    gone = max(0.0, now - view.sessions.start) if driven and view.sessions.start is not None else 0.0
    # what takes longer than it should may take as long again
    mid = max(usual - gone, 0.2 * gone)
    return Range(0.5 * mid, mid, 2.0 * mid)
