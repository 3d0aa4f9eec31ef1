"""Simulation of the real policy against simulated nodes on a virtual clock, and its result.

It behaves like dispatch with real nodes: events from a node come late, and stop with its link; a node that is up again
reports its attempts, and those that never arrived there count as taken back; a node that stays away is given up. The
journal is kept as in the ledger, and the result is made from the journal alone.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from orchestrator import events as ev
from orchestrator.policy import Policy
from orchestrator.policy.apply import apply
from orchestrator.policy.model import SlotId
from orchestrator.reasons import Reason
from tests.simulator.node import SimNode, SimSpec, SimWorker
from tests.simulator.plan import SimGroup, SimPlan
from tests.support.policy_rig import digest


@dataclass(slots=True)
class ShapeEnd:
    """End of a shape: `end` is its last settlement, `attempts` those that started it."""

    end: Literal["pending", "tuned", "failed"] = "pending"
    reason: Reason | None = None
    confirmed: bool = False
    detail: str = ""
    settled: int = 0
    attempts: list[str] = field(default_factory=list)
    winner: tuple[str, ...] = ()
    unconfirmed: bool = False
    """Tuned, with candidates blocked that faulted on one slot alone."""


@dataclass(frozen=True, slots=True)
class Death:
    """A power cut. `followed`: a controller was there, reading the node's stream, and had read of every bad end."""

    t: float
    node: str
    why: str
    followed: bool


@dataclass(slots=True)
class Result:
    """`end`: finished, stuck or late (the plan's limit was reached). Times in virtual seconds."""

    end: Literal["finished", "stuck", "late"]
    stuck: str | None
    shapes: dict[int, ShapeEnd]
    makespan_s: float
    deaths: list[Death]
    journal: list[tuple[float, ev.Record]]

    def of(self, end: str) -> list[int]:
        return [s for s, e in self.shapes.items() if e.end == end]

    def records(self, kind: type[ev.Record]) -> list[tuple[float, ev.Record]]:
        return [(t, r) for t, r in self.journal if isinstance(r, kind)]


def books(
    journal: list[tuple[float, ev.Record]], winners: Mapping[tuple[str, int], tuple[str, ...]] | None = None
) -> dict[int, ShapeEnd]:
    """Each shape's end by the journal alone, as the ledger keeps it: the first settlement counts. `winners`: the best
    candidate of an attempt and shape."""
    out: dict[int, ShapeEnd] = {}
    best = winners or {}
    for _, r in journal:
        match r:
            case ev.WorkAdded(_, units):
                out.update((s, ShapeEnd()) for unit in units for s in unit)
            case ev.ShapeStarted(attempt, shape):
                out[shape].attempts.append(attempt)
            case ev.ShapeTuned(attempt, shape) if r.complete and not r.noisy and out[shape].end == "pending":
                out[shape].end, out[shape].reason = "tuned", None
                out[shape].winner = best.get((attempt, shape), ())
                out[shape].settled += 1
            case ev.SettleShape(shape, attempt, confirmed, detail):
                e = out[shape]
                e.end, e.reason, e.detail, e.confirmed = "tuned", None, detail, confirmed
                e.winner, e.unconfirmed = best.get((attempt, shape), ()), not confirmed
                e.settled += 1
            case ev.FailShape(shape, reason, detail, _, confirmed):
                e = out[shape]
                e.end, e.reason, e.detail, e.confirmed = "failed", reason, detail, confirmed
                e.settled += 1
            case _:
                pass
    return out


SLOT_LOST_S = 30.0
"""Time from the last death of a slot's worker until dispatch gives the slot up."""
RESUME_S = 300.0
"""Time after which the user resumes a run that is stuck."""
RETRY_S = 3.0
"""Time between two tries to reach a node."""


def simulate(plan: SimPlan) -> Result:
    """Run a plan to its end."""
    return Simulator(plan).run()


class Simulator:
    """`step` is called after each event that the policy handled; tests use it to look in, or to replay."""

    def __init__(self, plan: SimPlan, step: Callable[[Simulator], None] | None = None) -> None:
        self.plan, self._step = plan, step
        self.policy = Policy()
        self.winners: dict[tuple[str, int], tuple[str, ...]] = {}
        self._blocked: dict[int, dict[SlotId, set[int]]] = {}
        self.journal: list[tuple[float, ev.Record]] = []
        self.now = 0.0
        self._rng = random.Random(plan.seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._epoch = 0
        self._here = False
        self._resumes = 0
        self._following: dict[str, int] = {}
        self._given_up: set[str] = set()
        seconds = {s: t for g in plan.groups for s, t in zip(g.shapes, g.seconds, strict=True)}
        silent = dict(plan.faults.silent)
        self.nodes = {
            name: SimNode(name, plan, self, random.Random(f"{plan.seed} {name}"), seconds, silent)
            for name in plan.nodes
        }
        for name, slots in plan.nodes.items():
            self.nodes[name].workers = {str(i): SimWorker(str(i)) for i in range(slots)}
        self._queued = set(plan.leases)
        self._ends: dict[str, tuple[str, bool]] = {}
        """Cause of each lease's end, and whether it is charged."""
        for name in plan.leases:
            self.nodes[name].powered = False
        for (name, slot), known in plan.faults.listed.items():
            self.nodes[name].blocked.update({(slot, s, c): False for s, lost in known.items() for c in lost})

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + seconds, self._order, do))

    def run(self) -> Result:
        for g in self.plan.groups:
            self.handle(work_of(g, self.plan))
        schedule(self)
        self.controller_starts()
        end: Literal["finished", "stuck", "late"] = "late"
        while self._heap and not self.policy.done:
            self.now, _, do = heapq.heappop(self._heap)
            if self.now > self.plan.limit_s:
                break
            known = len(self.journal)
            do()
            if len(self.journal) == known:
                continue  # of nodes alone: the policy was told nothing
            if self.policy.stuck and self._here:
                if self._resumes == self.plan.faults.resumes:
                    end = "stuck"
                    break
                self._resumes += 1
                self.controller_dies()
                self.later(RESUME_S, self.controller_starts)
        if self.policy.done:
            end = "finished"
        for node in self.nodes.values():
            for w in node.workers.values():
                node.stop(w)
        deaths = [Death(t, n.name, why, seen) for n in self.nodes.values() for t, why, seen in n.deaths]
        shapes = books(self.journal, self.winners)
        return Result(end, self.policy.stuck, shapes, self.now, deaths, self.journal)

    def handle(self, event: ev.Event) -> None:
        """Journal, decide, journal, act: as dispatch does it."""
        if not isinstance(event, ev.Tick):
            self.journal.append((self.now, event))
        if isinstance(event, ev.ShapeTuned | ev.ShapeRefused):
            self._compare(event)
        decisions = self.policy.handle(event, self.now)
        self.journal += [(self.now, d) for d in decisions]
        for d in decisions:
            self._act(d)
        if self._step is not None:
            self._step(self)

    def reload(self) -> bool:
        """Go on with a policy that only knows the journal; whether it is in the same state."""
        fresh = Policy()
        for t, record in self.journal:
            apply(fresh.state, record, t)
        same = digest(fresh) == digest(self.policy)
        self.policy = fresh
        return same

    def request(self, event: ev.Event) -> None:
        """Request of the user; without a controller it is lost."""
        if self._here:
            self.handle(event)

    def controller_dies(self) -> None:
        self._here = False
        for node in self.nodes.values():
            node.session += 1

    def controller_starts(self) -> None:
        if self._here:
            return
        self._epoch += 1
        self._here = True
        if self._epoch > 1:
            self.reload()
        self._given_up.clear()
        self.handle(ev.Resumed(self._epoch))
        if self.plan.leases:
            self.handle(ev.FleetMayGrow(bool(self._queued)))
        there = [n for n in self.nodes.values() if not n.gone and n.name not in self._queued]
        for node in self.nodes.values():
            self._look(node)
        for node in there:
            self._expect(node)
        for node in there:
            self._prepare(node)
        self.later(self.plan.tick_s, partial(self._tick, self._epoch))

    def _tick(self, epoch: int) -> None:
        if self._here and epoch == self._epoch:
            self.handle(ev.Tick())
            self.later(self.plan.tick_s, partial(self._tick, epoch))

    def lease_starts(self, node: SimNode) -> None:
        self._queued.discard(node.name)
        node.powered = True
        if not self._here:
            return
        self._expect(node)
        self._prepare(node)
        if not self._queued:
            self.handle(ev.FleetMayGrow(False))

    def lease_ends(self, node: SimNode) -> None:
        lease = self.plan.leases[node.name]
        self._ends[node.name] = (lease.cause, lease.charged) if node.powered else ("node_failure", True)
        node.power_cut(None, lease.cause)
        node.gone = True
        self.later(self.plan.look_s, partial(self._look, node))

    def _look(self, node: SimNode) -> None:
        """Report the lease's end, if it has ended."""
        if not self._here or not node.gone:
            return
        node.session += 1
        cause, charged = self._ends[node.name]
        self.handle(ev.LeaseEnded(node.name, cause, "simulated", charged))

    def _expect(self, node: SimNode) -> None:
        slots, lease = tuple(node.workers), self.plan.leases.get(node.name)
        if lease is None:
            self.handle(ev.NodeExpected(node.name, slots))
        else:
            self.handle(ev.NodeExpected(node.name, slots, lease.host, lease.gpus, f"job-{node.name}", "pool"))

    def _prepare(self, node: SimNode) -> None:
        node.session += 1
        self._trouble(node)
        delay = self._rng.uniform(*self.plan.start_s)
        self.later(delay, partial(self._reach, node, node.session))

    def _trouble(self, node: SimNode) -> None:
        """The node does not answer from now on; it is given up if that lasts."""
        self.later(self.plan.lost_s, partial(self._give_up, node, node.session))

    def _give_up(self, node: SimNode, session: int) -> None:
        if self._here and node.session == session and node.name not in self._given_up:
            self._given_up.add(node.name)
            self.handle(ev.NodeLost(node.name, "does not answer"))

    def _reach(self, node: SimNode, session: int) -> None:
        """Try to prepare the node, again and again."""
        if not self._here or node.session != session:
            return
        if not node.reachable:
            self.later(RETRY_S, partial(self._reach, node, session))
            return
        node.session += 1
        node.inbox.clear()
        for a in self.policy.outstanding():
            if a.node == node.name and a.id not in node.seen:
                self.handle(ev.AttemptTaken(a.id, True))
        self._given_up.discard(node.name)
        self.handle(ev.NodeJoined(node.name, tuple(node.workers)))
        for w in node.workers.values():
            node.start(w)
        self._following[node.name] = node.session
        self._read(node, node.session)
        self._watch(node, node.session)
        for slot in node.dead_slots():
            self.later(SLOT_LOST_S, partial(self.slot_gone, node, slot))

    def follows(self, node: SimNode) -> bool:
        return self._here and self._following.get(node.name) == node.session

    def _watch(self, node: SimNode, session: int) -> None:
        """The beat: notices within seconds that a node is gone."""
        if not self._here or node.session != session:
            return
        if node.reachable:
            self.later(RETRY_S, partial(self._watch, node, session))
            return
        node.session += 1
        self._trouble(node)
        self._reach(node, node.session)

    def written(self, node: SimNode) -> None:
        self.later(self.plan.lag_s, partial(self._read, node, node.session))

    def _read(self, node: SimNode, session: int) -> None:
        while self._here and node.session == session and node.reachable and node.read < len(node.file):
            event = node.file[node.read]
            node.read += 1
            self.handle(event)

    def slot_dies(self, node: SimNode, slot: str) -> None:
        node.stop(node.workers[slot])
        self.later(SLOT_LOST_S, partial(self.slot_gone, node, slot))

    def slot_gone(self, node: SimNode, slot: str) -> None:
        if self.follows(node) and node.reachable:
            self._read(node, node.session)
            self.handle(ev.SlotLost(node.name, slot, "its worker cannot be started"))
        else:
            self.later(SLOT_LOST_S, partial(self.slot_gone, node, slot))

    def _act(self, d: ev.Decision) -> None:
        if isinstance(d, ev.Send):
            self._put(d.node, SimSpec(d.seq, d.attempt, d.slot, d.shapes))
        elif isinstance(d, ev.AskCanary):
            self._put(d.node, SimSpec(0, d.attempt, d.slot, ()))
        elif isinstance(d, ev.TakeBack):
            node = self.nodes[d.node]
            self.later(self.plan.lag_s, partial(self._take_back, node, node.session, d.attempt))

    def _compare(self, e: ev.ShapeTuned | ev.ShapeRefused) -> None:
        """Tell the nodes what became of their blocked candidates on another slot, as the ledger does."""
        a = self.policy.state.attempts[e.attempt]
        here, lost = (a.node, a.slot), {int(c[1:]) for (c,) in set(e.withheld) - {ev.NOISE}}
        for (name, slot), others in self._blocked.get(e.shape, {}).items():
            for c in others if (name, slot) != here else ():
                for node, key in ((name, slot), *([here] if c in lost else [])):
                    blocked, entry = self.nodes[node].blocked, (key, e.shape, c)
                    tell = partial(blocked.__setitem__, entry, True) if c in lost else partial(blocked.pop, entry, None)
                    self.nodes[node].news.append(tell)
        if lost:
            self._blocked.setdefault(e.shape, {}).setdefault(here, set()).update(lost)

    def _put(self, name: str, spec: SimSpec) -> None:
        node = self.nodes[name]
        session = node.session

        def arrive() -> None:
            if node.session == session and node.reachable:
                node.put(spec)

        self.later(self.plan.lag_s, arrive)

    def _take_back(self, node: SimNode, session: int, attempt: str) -> None:
        if node.session != session or not node.reachable:
            return
        won = node.take_back(attempt)

        def answer() -> None:
            if self._here and node.session == session and attempt in self.policy.state.open_attempts:
                self.handle(ev.AttemptTaken(attempt, won))

        self.later(self.plan.lag_s, answer)


def work_of(g: SimGroup, plan: SimPlan) -> ev.WorkAdded:
    """The group's shapes as planning hands them to the policy."""
    units = (g.shapes,) if g.whole else tuple((s,) for s in g.shapes)
    each = g.estimate_s / sum(g.seconds) if sum(g.seconds) else 0.0
    costs = {s: each * t for s, t in zip(g.shapes, g.seconds, strict=True)}
    return ev.WorkAdded(
        "" if plan.mixes else g.id,
        units,
        tuple(tuple(costs[s] for s in unit) for unit in units),
        setup_s=plan.setup_s,
        shares_end=plan.mixes,
    )


def schedule(sim: Simulator) -> None:
    """Put the plan's timed faults on the simulator's clock; those of a shape or slot are decided by the node."""
    faults = sim.plan.faults
    for o in faults.outages:
        node = sim.nodes[o.node]
        if o.kind == "power":
            sim.later(o.at, partial(node.power_cut, o.seconds, "outage"))
        else:
            sim.later(o.at, partial(node.cut_off, o.seconds))
    for (name, slot), t in faults.dead_slots.items():
        sim.later(t, partial(sim.slot_dies, sim.nodes[name], slot))
    for name, lease in sim.plan.leases.items():
        sim.later(lease.since, partial(sim.lease_starts, sim.nodes[name]))
        if lease.until < float("inf"):
            sim.later(lease.until, partial(sim.lease_ends, sim.nodes[name]))
            if lease.drain_s:
                sim.later(max(lease.since, lease.until - lease.drain_s), partial(sim.request, ev.NodeDraining(name)))
    for name, t in faults.drains.items():
        sim.later(t, partial(sim.request, ev.NodeDraining(name)))
    for span in faults.controller:
        sim.later(span.since, sim.controller_dies)
        sim.later(span.until, sim.controller_starts)
