"""Leases in the simulator: nodes that come later and go earlier, with the laws on drawn plans."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from orchestrator import events as ev
from orchestrator.policy import PolicySettings
from orchestrator.reasons import Reason
from tests.simulator.plan import SimPlan
from tests.simulator.simulator import Death, Result, Simulator, simulate
from tests.support.drawn_plans import draw_plan, guilty, with_candidates, with_leases
from tests.support.marks import PLANS
from tests.unit.policy.test_laws import faults_in_the_books, groups_in_the_books, winners_in_the_books

COINCIDENCES = (1008, 1419, 1577, 1727, 2071, 2111)
"""Plans in which a lease ends just after a worker's death or a fault, or long before the scheduler's word on that."""
CAME_WITH_S = PolicySettings().came_with_s
"""A bad end so shortly before an uncharged end of its lease counts as that."""


def ends_under(result: Result) -> dict[int, int]:
    """Shape -> uncharged ends of leases with an attempt on it under way, or just ended badly."""
    out: Counter[int] = Counter()
    bad: dict[str, dict[int, float]] = defaultdict(dict)
    flight: dict[str, dict[str, int]] = defaultdict(dict)
    where: dict[str, str] = {}
    pending: set[int] = set()
    sent: dict[str, tuple[int, ...]] = {}
    for t, r in result.journal:
        match r:
            case ev.WorkAdded(_, units):
                pending |= {s for unit in units for s in unit}
            case ev.Send(attempt=attempt, shapes=shapes):
                sent[attempt] = shapes
            case ev.AttemptStarted(attempt, node, _):
                where[attempt] = node
                left = [s for s in sent[attempt] if s in pending]
                if left:
                    flight[node][attempt] = left[0]
            case ev.ShapeStarted(attempt, shape) if attempt in where:
                flight[where[attempt]][attempt] = shape
            case ev.ShapeTuned(_, shape, (), (), False) | ev.SettleShape(shape=shape) | ev.FailShape(shape=shape):
                pending.discard(shape)
            case ev.AttemptEnded(attempt=attempt, outcome=outcome, in_flight=named):
                hit = named or flight[where.get(attempt, "")].get(attempt, 0)
                flight[where.get(attempt, "")].pop(attempt, None)
                if outcome is not Reason.DONE and hit in pending:
                    bad[where[attempt]][hit] = t
            case ev.LeaseEnded(node, _, _, False):
                came_with = {s for s, at in bad.pop(node, {}).items() if t - at <= CAME_WITH_S}
                out.update(came_with | set(flight.pop(node, {}).values()))
            case _:
                pass
    return dict(out)


def forgiven_deaths(result: Result) -> list[Death]:
    """Deaths that were first heard of shortly before an uncharged end of their lease: they count as that."""
    sent = {r.attempt: r.node for _, r in result.journal if isinstance(r, ev.Send)}
    ends = {r.node: t for t, r in reversed(result.journal) if isinstance(r, ev.LeaseEnded) and not r.charged}
    excused = {
        (sent[r.attempt], f"shape {r.in_flight}")
        for t, r in result.journal
        if isinstance(r, ev.AttemptEnded) and r.outcome is Reason.WORKER_DIED
        if t <= ends.get(sent[r.attempt], 0.0) <= t + CAME_WITH_S
    }
    return [d for d in result.deaths if (d.node, d.why) in excused]


def unlucky(result: Result) -> set[int]:
    """Shapes that failed as killers of nodes after their own run alone ended with a failure of the plan's own."""
    sent = {r.attempt: r.node for _, r in result.journal if isinstance(r, ev.Send)}
    own = {d.node for d in result.deaths if not d.why.startswith("shape ")}
    fails = (r for _, r in result.journal if isinstance(r, ev.FailShape) and r.reason is Reason.KILLS_NODES)
    return {r.shape for r in fails if sent[r.attempt or ""] in own}


def leases_in_the_books(plan: SimPlan, result: Result) -> list[str]:
    """Breaches of the laws of leases, in words."""
    out = []
    ends = ends_under(result)
    gone: set[str] = set()
    for _, r in result.journal:
        if isinstance(r, ev.LeaseEnded):
            gone.add(r.node)
        elif isinstance(r, (ev.Send, ev.AskCanary, ev.Quarantine, ev.TakeBack)) and r.node in gone:
            out.append(f"{r} after its lease ended")
    for shape, end in result.shapes.items():
        if end.reason is Reason.OUTLIVES_LEASE and ends.get(shape, 0) <= PolicySettings().lease_ends - 1:
            out.append(f"shape {shape} outlives its lease after {ends.get(shape, 0)} ends")
    innocent = {s for s, e in result.shapes.items() if e.reason is Reason.OUTLIVES_LEASE}
    for shape in innocent | (unlucky(result) - guilty(plan.faults)):  # failed by right, yet not of its faults
        result.shapes[shape].end = "tuned"
    return out + faults_in_the_books(plan, result, forgiven_deaths(result)) + groups_in_the_books(result)


@pytest.mark.plans
def test_the_laws_hold_on_drawn_plans_with_leases() -> None:
    broken = {}
    seen: Counter[object] = Counter()
    for seed in (*range(PLANS), *COINCIDENCES):
        plan = replace(with_leases(draw_plan(seed)), mixes=bool(seed % 2))
        simulator = Simulator(plan)
        result = simulator.run()
        found = leases_in_the_books(plan, result)
        if found or result.end != "finished" or not simulator.reload():
            broken[seed] = (result.end, result.stuck, found)
        seen.update(r.charged for _, r in result.journal if isinstance(r, ev.LeaseEnded))
        seen.update(n > 0 for n in ends_under(result).values())
    assert broken == {}
    assert min(seen[False], seen[True]) > 20


@pytest.mark.full
@pytest.mark.plans
def test_the_laws_hold_where_candidates_fault_on_leases() -> None:
    broken = {}
    for seed in range(PLANS):
        plan = with_leases(with_candidates(draw_plan(seed)))
        plan = replace(
            plan, faults=replace(plan.faults, sick={p: s for p, s in plan.faults.sick.items() if not s.canary})
        )
        result = simulate(plan)
        found = winners_in_the_books(plan, result) + leases_in_the_books(plan, result)
        if found or result.end != "finished":
            broken[seed] = (result.end, result.stuck, found)
    assert broken == {}
