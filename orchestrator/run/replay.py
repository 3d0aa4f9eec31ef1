"""Jobs to simulate: a run, with what its shapes took and what went wrong when, by its ledger; or a list of shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, median_low

from orchestrator import events as ev
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.inventory import load_inventory
from orchestrator.ledger import LedgerReader
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.planning import CostModel
from orchestrator.reasons import Reason
from orchestrator.run.earlier import gather
from orchestrator.run.view import RunView
from orchestrator.scheduling.model import SlotId
from orchestrator.shapes import Shape, read_shapes
from orchestrator.simulation.job import Job
from orchestrator.simulation.plan import Faults, Outage, Poison, Sickness, SimGroup, SimLease, SimPlan, Span
from orchestrator.templating import data_folder
from orchestrator.tuners import get_tuner

LATE_S = 30.0
"""A node that joins so long after the usual time was late."""
BACK_S = 120.0
"""Time until a node is back that a shape took down, where none of the run's came back."""
PAUSE_S = 900.0
"""Time without a controller after which workers have ended: it is left out."""


def read_job(paths: RunPaths) -> Job:
    """The run with its own nodes, groups, times and faults. Raises InputError where nothing of it was planned."""
    config, view, times = RunConfig.read(paths.config), RunView(), _Times()
    with LedgerReader.open_readonly(paths.ledger) as ledger, ledger.snapshot():
        family, kept = ledger.family, ledger.meta("cost")
        shapes = [Shape(s.id, s.key) for s in ledger.shapes() if s.state != "skipped"]
        failed = {f.id: Reason(f.reason) for f in ledger.failed()}
        for t, record in ledger.journal_records():
            view.feed(t, record)
            times.feed(t, record)
    if not times.groups:
        raise InputError(f"run {paths.run}: none of its shapes was to be tuned, so there is nothing to simulate")
    cost = CostModel(**kept) if kept else CostModel.default(config.tuner, family)
    each = cost.shape_costs(shapes, family)
    off = median([times.seconds[i] / each[i] for i in each if i in times.seconds and each[i] > 0] or [1.0])
    seconds = {i: times.seconds.get(i, off * each[i]) + times.gaps.get(i, 0.0) for i in each}
    groups = [SimGroup(g.group, g.shapes, tuple(seconds[i] for i in g.shapes), g.cost_s) for g in times.groups.values()]
    replay = _Replay(view, times, failed)
    plan = replay.plan(tuple(groups), config.lost_after_s)
    return Job(
        f"run {paths.run}", family, config.tuner, shapes, cost, plan, seconds, times.gaps, replay.at(times.settled)
    )


@dataclass(slots=True)
class _Times:
    """Fold of the journal: what the view does not keep. Epoch seconds."""

    groups: dict[str, ev.GroupAdded] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    """Of a shape's last measurement."""
    gaps: dict[int, float] = field(default_factory=dict)
    """From its end to the next shape of its attempt."""
    setups: dict[str, float] = field(default_factory=dict)
    """From an attempt's start to its first shape."""
    tuned: dict[SlotId, list[float]] = field(default_factory=dict)
    leases: dict[str, tuple[float, ev.NodeExpected]] = field(default_factory=dict)
    ends: dict[str, tuple[float, ev.LeaseEnded]] = field(default_factory=dict)
    drains: dict[str, float] = field(default_factory=dict)
    charged: set[SlotId] = field(default_factory=set)
    settled: float = 0.0
    _partial: set[str] = field(default_factory=set)
    """Attempts on some candidates alone: their seconds are none of a tuning."""
    _began: dict[str, tuple[float, SlotId]] = field(default_factory=dict)
    _flights: dict[str, tuple[int, float]] = field(default_factory=dict)
    _last: dict[str, tuple[int, float]] = field(default_factory=dict)

    def feed(self, t: float, record: ev.Record) -> None:
        match record:
            case ev.GroupAdded(group):
                self.groups.setdefault(group, record)
            case ev.NodeExpected(node, lease=lease) if lease:
                self.leases.setdefault(node, (t, record))
            case ev.LeaseEnded(node):
                self.ends[node] = (t, record)
            case ev.NodeDraining(node):
                self.drains.setdefault(node, t)
            case ev.ChargeSlot(node, slot):
                self.charged.add((node, slot))
            case ev.Send(attempt, only=only) if only:
                self._partial.add(attempt)
            case ev.AttemptStarted(attempt, node, slot):
                self._began[attempt] = (t, (node, slot))
            case ev.ShapeStarted(attempt, shape) if attempt not in self._partial:
                if attempt in self._flights:  # measured; its verdict comes with those of its batch
                    self._ended(attempt, self._flights[attempt][0], t)
                if attempt in self._last:
                    before, ended = self._last[attempt]
                    self.gaps[before] = t - ended
                elif attempt in self._began:
                    self.setups.setdefault(attempt, t - self._began[attempt][0])
                self._flights[attempt] = (shape, t)
            case ev.ShapeTuned(attempt, shape) | ev.ShapeRefused(attempt, shape):
                self.settled = t
                if attempt in self._began:
                    self.tuned.setdefault(self._began[attempt][1], []).append(t)
                self._ended(attempt, shape, t)
            case ev.FailShape():
                self.settled = t
            case ev.AttemptEnded(attempt):
                self._flights.pop(attempt, None)
            case _:
                pass

    def _ended(self, attempt: str, shape: int, t: float) -> None:
        if self._flights.get(attempt, (None,))[0] == shape:
            self.seconds[shape] = t - self._flights.pop(attempt)[1]
            self._last[attempt] = (shape, t)


class _Replay:
    """Plan that goes as the run went. `failed`: shapes with their reasons."""

    def __init__(self, view: RunView, times: _Times, failed: Mapping[int, Reason]) -> None:
        self._view, self._times, self._failed = view, times, failed
        sessions = view.sessions.closed(None)
        self._start = sessions[0].start if sessions else 0.0
        self._gaps = [(a.end, b.start) for a, b in itertools.pairwise(sessions) if b.start > a.end + 1.0]
        self._slots = {n: {s: str(i) for i, s in enumerate(x.slots)} for n, x in view.places.nodes.items()}
        self._kills = {s for s, reason in failed.items() if reason is Reason.KILLS_NODES}

    def at(self, t: float) -> float:
        """Virtual seconds: from the run's start, without pauses."""
        return max(0.0, t - self._start - sum(min(t, b) - a for a, b in self._gaps if b - a > PAUSE_S and t > a))

    def plan(self, groups: tuple[SimGroup, ...], lost_s: float) -> SimPlan:
        places, leases = self._view.places, self._leases()
        joins = {s.node: self.at(s.end) for s in reversed(places.spans) if s.kind == "preparing" and s.end is not None}
        joins = {n: t for n, t in joins.items() if n not in leases}
        usual = median_low(joins.values()) + LATE_S if joins else 0.0
        first = {lane[0].id for lane in places.lanes.values() if lane}
        cold, warm = ([s for a, s in self._times.setups.items() if (a in first) is is_] for is_ in (True, False))
        setup = median(warm or cold or [0.0])
        spans = (Span(self.at(a), self.at(b)) for a, b in self._gaps if b - a <= PAUSE_S)
        faults = replace(
            self._of_shapes(),
            sick=dict(self._sick()),
            outages=(*self._outages(), *(Outage(n, 0.0, t) for n, t in joins.items() if t > usual)),
            dead_slots={self._place(s.node, s.slot): self.at(s.start) for s in places.spans if s.kind == "gone"},
            drains={n: self.at(t) for n, t in self._times.drains.items()},
            controller=tuple(spans),
        )
        punctual = [t for t in joins.values() if t <= usual] or [1.0]
        return SimPlan(
            {n: len(slots) for n, slots in self._slots.items() if slots}, groups, faults, leases=leases, lost_s=lost_s,
            start_s=(min(punctual), max(punctual)), setup_s=setup, cold_s=max(setup, median(cold or [0.0])),
        )  # fmt: skip

    def _place(self, node: str, slot: str | None) -> SlotId:
        return node, self._slots[node].get(slot or "", "0")

    def _leases(self) -> dict[str, SimLease]:
        out = {}
        for name, (t, e) in self._times.leases.items():
            out[name] = SimLease(e.host or name, e.gpus or e.slots, self.at(t))
            if name in self._times.ends:
                end, why = self._times.ends[name]
                out[name] = replace(out[name], until=self.at(end), cause=why.cause, charged=why.charged)
        return out

    def _sick(self) -> Iterator[tuple[SlotId, Sickness]]:
        """Slots that were quarantined: from the first fault since a shape was tuned there until one is again."""
        places = self._view.places
        failed = {(m.node, m.slot) for m in places.marks if m.kind == "canary"}
        for span in reversed(places.spans):  # the first one counts
            if span.kind == "quarantine" and span.slot is not None:
                place = (span.node, span.slot)
                tuned = self._times.tuned.get(place, [])
                good = max((t for t in tuned if t <= span.start), default=0.0)
                faults = [a.since for a in places.lanes[place] if a.kind == "fault" and good <= a.since <= span.start]
                until = min((self.at(t) for t in tuned if t > span.start), default=float("inf"))
                since = self.at(min(faults, default=span.start))
                sickness = Sickness(place not in failed, since, until, salvage=place in self._times.charged)
                yield self._place(*place), sickness

    def _of_shapes(self) -> Faults:
        """Faults of shapes: those on no sick slot. One that was tuned in the end faults as often as it did."""
        sick, seen, killed = dict(self._sick()), dict[int, list[Reason]](), set[int]()
        for place, lane in self._view.places.lanes.items():
            here = sick.get(self._place(*place))
            for a, shape in ((a, a.flight) for a in lane if a.flight is not None):
                if a.kind == "fault" and not (here and here.hits(shape, self.at(a.since))):
                    seen.setdefault(shape, []).append(Reason(a.outcome))
                elif a.outcome == Reason.WORKER_DIED.value:
                    killed.add(shape)
        poison = {s: Poison(r) for s, r in self._failed.items() if r.may_blame_slot}
        for s, reasons in seen.items():
            if reasons[-1].may_blame_slot and s not in self._failed:
                poison[s] = Poison(reasons[-1], len(reasons) / (len(reasons) + 1))
        return Faults(
            poison=poison,
            refused={s: r for s, r in self._failed.items() if r.is_verdict},
            silent={s: 99 for s, r in self._failed.items() if r is Reason.NOT_DELIVERED},
            worker_killers=frozenset(self._kills & killed),
            node_killers=dict.fromkeys(self._kills - killed, BACK_S),
        )

    def _outages(self) -> Iterator[Outage]:
        """Nodes that broke off or were given up; not what a shape that takes nodes down does again by itself."""
        places, since = self._view.places, dict[str, float]()
        for s in places.spans:
            if s.kind == "trouble":
                since[s.node] = s.start
            if s.kind not in ("trouble", "away") or not self._slots[s.node]:
                continue
            lanes = [a for (node, _), lane in places.lanes.items() if node == s.node for a in lane if a.start < s.start]
            away = s.kind == "away"
            if not away and any(x.kind == "away" and x.node == s.node and x.start == s.end for x in places.spans):
                continue  # it was given up: the other span has both
            if away and not self._kills.isdisjoint(a.current or a.flight or 0 for a in lanes if a.end == s.start):
                continue
            start = self.at(since.pop(s.node, s.start))
            worked = not away or any(a.kind in ("done", "fault") and (a.end or 0.0) > s.start for a in lanes)
            seconds = None if s.end is None else self.at(s.end) - start
            yield Outage(s.node, start, seconds, "link" if worked else "power")


def listed_job(path: Path, runs: Path, family: str | None, tuner: str | None, gfx: str | None) -> Job:
    """A shape list, at the cost that earlier runs in `runs` show, else at a first guess. Raises InputError."""
    defaults = load_inventory(data_folder("inventories") / "local.yaml").defaults
    of, tuner = get_family(family or defaults.family), tuner or defaults.tuner
    get_tuner(tuner, for_tune=True)
    earlier = gather(runs, of, tuner, gfx)
    cost = CostModel.default(tuner, of, gfx or "any").fit(earlier.samples, earlier.starts)
    plan = SimPlan({}, (), setup_s=cost.setup_s, start_s=(0.5 * cost.start_s, cost.start_s))
    name = f"{path.name} ({of.name}, tuner {tuner}; cost: {cost.source})"
    return Job(name, of, tuner, read_shapes(path, of).shapes, cost, plan)
