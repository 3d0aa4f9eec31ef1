"""Status of a run at one moment, computed from its view, and the status and notes of a live one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator import events as ev
from orchestrator.planning.estimate import MOST_SCHEDULED, Bulk, Measured, Range, UnderWay, seconds_left
from orchestrator.reasons import Reason
from orchestrator.run.view.places import Node, Slot
from orchestrator.run.view.run_view import RunView
from orchestrator.run.view.sentences import sentence
from orchestrator.run.view.slot_speeds import usual_pace
from orchestrator.run.view.work import Attempt, Group
from orchestrator.status import NodeStatus, RunStatus, SlotStatus, duration

GOING = ("planned", "preparing", "running")


def state_now(kept: str, *, driven: bool) -> str:
    """State of a run; one without a living controller is interrupted, whatever the ledger (`kept`) holds. `driven`: a
    controller holds the run's lock."""
    if kept in ("preparing", "running") and not driven:
        return "interrupted"  # its controller died
    return kept


WIDE = 1.6
"""A range whose ends are further apart than that is given as one."""


def left_words(low_s: float, mid_s: float, high_s: float) -> str:
    """`about 2 min 05 s`, or `1 min 10 s to 4 min 00 s` where nobody knows better."""
    if high_s > WIDE * low_s:
        low, high = duration(_round(low_s)), duration(_round(high_s))
        return f"{low} to {high}" if low != high else f"about {low}"
    return f"about {duration(_round(mid_s))}"


def _round(seconds: float) -> float:
    """Seconds, rounded to what is significant."""
    s = max(1.0, seconds)
    return s if s < 120 else round(s / 5) * 5 if s < 600 else round(s / 60) * 60


SPREAD = 5.0
"""Spread of estimates without a model."""


def time_left(view: RunView, now: float, *, driven: bool) -> Range | None:
    """Seconds until the last shape is settled, None where all are; of a run that nobody drives, once it is resumed."""
    work = view.work
    speeds = view.places.timed.speeds()
    pace, usual = {slot: s.pace for slot, s in speeds.items()}, usual_pace(speeds)
    at_work: dict[str, Attempt] = {}
    for a in (s.attempt for n in view.places.nodes.values() for s in n.slots.values()) if driven else ():
        if a is not None and a.group in work.open and work.open[a.group].running == a.id:
            at_work[a.group] = a
    running = [_under_way(view, work.open[g], a, now, pace.get((a.node, a.slot), 1.0)) for g, a in at_work.items()]
    waiting: list[float] | Bulk
    if len(work.open) > MOST_SCHEDULED:
        left_s = work.left_s - sum(work.open[g].left_s for g in at_work)
        n = len(work.open) - len(at_work)
        waiting = Bulk(n, usual * (n * work.setup_s + left_s))
    else:
        waiting = [usual * (work.setup_s + g.left_s) for g in work.open.values() if g.id not in at_work]
    costs, slots = work.costs, _slots(view)
    return seconds_left(
        waiting,
        slots,
        spread=costs.spread if costs else SPREAD,
        over=sum((m.paced(pace.get(slot, 1.0)) for slot, m in work.over.items()), Measured()),
        running=running,
        start=_start(view, now, driven),
    )


class Estimate:
    """`time_left`, recomputed at most once a second: with many groups it takes some milliseconds."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._left: Range | None = None

    def __call__(self, view: RunView, now: float, *, driven: bool) -> Range | None:
        if self._at is None or not 0.0 <= now - self._at < 1.0:
            self._at, self._left = now, time_left(view, now, driven=driven)
        return self._left


def _under_way(view: RunView, group: Group, a: Attempt, now: float, pace: float) -> UnderWay:
    """`pace`: time that work takes on its slot, over the usual one."""
    work, first = view.work, 0.0 if a.done else view.work.setup_s
    current = work.shapes.get(a.current) if a.current is not None else None
    done_s = work.setup_s + a.done_s if a.done else 0.0
    # an attempt across an interval without a controller is no evidence: the times of its shapes are unknown
    broken = a.start < (view.sessions.start or 0.0)
    since = max(a.since, view.sessions.start or 0.0)
    return UnderWay(
        estimate_s=pace * (done_s + first + group.left_s),
        done_s=pace * done_s,
        took_s=0.0 if broken else a.took_s,
        since_s=max(0.0, now - since),
        next_s=pace * (first + current.cost_s) if current is not None and current.state == "pending" else 0.0,
    )


def _slots(view: RunView) -> int:
    """Those that take work, or soon will; all, where there is none."""
    nodes = [n for n in view.places.nodes.values() if n.state in ("ready", "preparing")]
    good = sum(s.state not in ("quarantined", "lost", "canary failed") for n in nodes for s in n.slots.values())
    return good or sum(len(n.slots) for n in view.places.nodes.values()) or 1


def _start(view: RunView, now: float, driven: bool) -> Range | None:
    """Seconds until the first slot can begin, while none has."""
    slots = [s for n in view.places.nodes.values() for s in n.slots.values()]
    if driven and any(s.attempt is not None or s.state == "idle" for s in slots):
        return None
    usual = view.work.costs.start_s if view.work.costs else 0.0
    gone = max(0.0, now - view.sessions.start) if driven and view.sessions.start is not None else 0.0
    # an overdue start may take as long again
    mid = max(usual - gone, 0.2 * gone)
    return Range(0.5 * mid, mid, 2.0 * mid)


RATE_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class RunHeader:
    """Facts on a run beside its journal. `nodes`: slots of each node of the inventory; `named`: a shape's name."""

    run: str
    family: str
    tuner: str
    created: float
    total: int
    skipped: int
    nodes: Mapping[str, tuple[str, ...]]
    named: Callable[[int], str]


def run_status(
    view: RunView,
    about: RunHeader,
    state: str,
    now: float,
    *,
    end: float | None = None,
    estimate: Callable[..., Range | None] = time_left,
) -> RunStatus:
    """Status of a run now. `state`: of `state_now`. `end`: when its controller ended, None where one drives it."""
    going, work = state in ("preparing", "running"), view.work
    s = RunStatus(
        about.run, state, total=about.total, skipped=about.skipped, tuned=work.tuned, failed=work.failed,
        started=about.created, family=about.family, tuner=about.tuner,
    )  # fmt: skip
    s.nodes = [_node(view, about, name, slots) for name, slots in about.nodes.items()]
    s.nodes += [_node(view, about, name, ()) for name in view.places.nodes if name not in about.nodes]
    s.standing_out = view.places.flags()
    for pool, leases in view.places.queued.items() if going else ():
        s.nodes += [NodeStatus(f"{pool}, lease {id_}", "queued", detail=why, lease=id_) for id_, why in leases]
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
    """Shapes tuned per minute over the last minutes in which a controller drove the run."""
    begun = [a.start for lane in view.places.lanes.values() for a in lane[:1]]
    start = view.sessions.start
    if start is None or not begun:
        return None
    since, times = max(now - RATE_WINDOW_S, start, min(begun)), view.work.tuned_at
    if len(times) == times.maxlen:  # older ones are forgotten
        since = max(since, times[0])
    if now <= since:
        return None
    n = 0
    for t in reversed(times):
        if t <= since:
            break
        n += 1
    return n * 60.0 / (now - since) if n else None


def _node(view: RunView, about: RunHeader, name: str, slots: tuple[str, ...]) -> NodeStatus:
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
    if node.lease:
        out.lease, out.host, out.ends_at = node.lease, node.host, node.ends_at
    return out


def _slot(about: RunHeader, name: str, slot: Slot) -> SlotStatus:
    a = slot.attempt
    if a is None:
        return SlotStatus(name, slot.state)
    if a.current is None:
        return SlotStatus(name, "busy", a.id, a.id, a.since)
    return SlotStatus(name, "busy", a.id, f"{about.named(a.current)}  ({a.id})", a.current_at)


BAD = (ev.NodeTroubled, ev.NodeLost, ev.SlotLost, ev.CanaryFailed, ev.Quarantine)
"""Records that are noted as they are. A failed shape is not one of them: the report at the end of the run lists it."""


class Notes:
    """Notes for the live view, kept until they are taken."""

    def __init__(self, view: RunView, named: Callable[[int], str]) -> None:
        self._view, self._named = view, named
        self._quarantined: set[tuple[str, str]] = set()
        """(node, reason) of the quarantines that were noted."""
        self._kept: list[tuple[ev.Record | str, bool]] = []

    def feed(self, record: ev.Record) -> None:
        """Note a record where the user should see it; call after the view has it."""
        match record:
            case ev.AttemptEnded(outcome=outcome):
                if outcome not in (Reason.DONE, Reason.CANCELLED):
                    self._kept.append((record, True))
            case ev.LeaseEnded(cause=cause):
                self._kept.append((record, cause != "released"))
            case ev.LeasesQueued(leases=leases):
                if leases:
                    self._kept.append((record, False))
            case ev.NodeBusy(doing=doing):
                self._kept.append((record, doing != "free"))
            case ev.SettleShape(confirmed=False):
                self._kept.append((record, True))
            case ev.Quarantine(node, slot, why):
                # a quarantine gives its reason: the note on the canary that led to it would repeat it
                self._kept = [k for k in self._kept if not _canary_of(k[0], node, slot)]
                if (node, why) not in self._quarantined:  # each slot of a node has the same reason
                    self._kept.append((record, True))
                self._quarantined.add((node, why))
            case _ if isinstance(record, BAD):
                self._kept.append((record, True))

    def take(self) -> list[tuple[str, bool]]:
        """(sentence, bad) of each since the last call."""
        kept, self._kept = self._kept, []
        return list(dict.fromkeys((self._words(record), bad) for record, bad in kept))

    def say(self, text: str) -> None:
        """Note a problem that is no record."""
        self._kept.append((text, True))

    def _words(self, record: ev.Record | str) -> str:
        if isinstance(record, str):
            return record
        attempt = record.attempt if isinstance(record, ev.AttemptEnded) else None
        return sentence(record, self._named, self._view.place(attempt), self._view.places.spot)


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
        if isinstance(record, ev.NodeJoined | ev.NodeExpected | ev.NodeLost | ev.LeaseEnded | ev.NodeBusy):
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

    def take_notes(self) -> list[tuple[str, bool]]:
        """(text, bad) of what happened since the last call."""
        return self._notes.take()

    def status(self, now: float) -> RunStatus:
        """Status at this moment."""
        s = run_status(self._view, self._about, self._state, now, estimate=self._estimate)
        for node in s.nodes:
            node.detail = self._details.get(node.name) or node.detail
        return s
