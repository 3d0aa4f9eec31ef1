"""Numbers of a simulated run: makespan, a bound that no schedule beats, and how the slots spent their time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from orchestrator import events as ev
from orchestrator.scheduling.model import SlotId
from orchestrator.simulation.plan import Outage, SimPlan
from orchestrator.simulation.simulator import Result


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds are virtual. `idle`, `setup`, `repeated`: shares of the time in which slots were there; `repeated` is
    work that settled nothing: cut short by a fault or loss, or done before. `again`: shapes that were begun twice or
    more."""

    seed: int
    end: str
    makespan_s: float
    bound_s: float
    over_bound: float
    idle: float
    setup: float
    repeated: float
    again: int
    tuned: int
    failed: int
    pending: int
    groups: int
    quarantined: tuple[SlotId, ...]
    stuck: str | None


def summarise(plan: SimPlan, result: Result) -> Summary:
    """The numbers of a run of the plan; shapes that failed count nothing in its bound."""
    failed = result.of("failed")
    bound = lower_bound_s(plan, failed)
    there = sum(_present_s(plan, place, result.makespan_s) for place in _places(plan)) or 1.0
    wasted = result.worked_s - result.setup_s - result.measured_s
    shut = dict.fromkeys((r.node, r.slot) for _, r in result.journal if isinstance(r, ev.Quarantine))
    return Summary(
        seed=plan.seed, end=result.end, makespan_s=result.makespan_s, bound_s=bound,
        over_bound=result.makespan_s / bound if bound else 1.0,
        idle=max(0.0, 1.0 - result.worked_s / there), setup=result.setup_s / there, repeated=max(0.0, wasted) / there,
        again=sum(len(e.attempts) > 1 for e in result.shapes.values()),
        tuned=len(result.of("tuned")), failed=len(failed), pending=len(result.of("pending")), groups=len(plan.groups),
        quarantined=tuple(shut), stuck=result.stuck if result.end == "stuck" else None,
    )  # fmt: skip


def lower_bound_s(plan: SimPlan, left_out: Collection[int] = (), *, whole: bool = False) -> float:
    """Seconds below which no schedule ends: one set-up a slot, its real speed, the time in which it is there and
    healthy, and the longest shape (`whole`: group). `left_out`: shapes whose work counts nothing. A slot on which only
    some shapes fault counts as healthy."""
    without = frozenset(left_out)
    groups = [[t for s, t in zip(g.shapes, g.seconds, strict=True) if s not in without] for g in plan.groups]
    todo = sum(map(sum, groups))
    longest = max((sum(g) if whole else max(g, default=0.0) for g in groups), default=0.0)
    places = _places(plan)
    setup = max(plan.setup_s, plan.cold_s)
    low, high = (
        plan.start_s[0] + plan.canary_s + setup + longest * min((plan.slow.get(p, 1.0) for p in places), default=1.0),
        plan.limit_s,
    )
    while high - low > 0.01:
        end = (low + high) / 2
        could = sum(max(0.0, _present_s(plan, p, end) - setup) / plan.slow.get(p, 1.0) for p in places)
        low, high = (low, end) if could >= todo else (end, high)
    return high


def _places(plan: SimPlan) -> list[SlotId]:
    return [(n, str(s)) for n, count in plan.nodes.items() for s in range(count)]


def _present_s(plan: SimPlan, place: SlotId, end: float) -> float:
    """Seconds until `end` in which the slot is there and healthy."""
    faults, name = plan.faults, place[0]
    since, until = (
        plan.start_s[0] + plan.canary_s,
        min(end, faults.drains.get(name, end), faults.dead_slots.get(place, end)),
    )
    if name in plan.leases:
        since, until = since + plan.leases[name].since, min(until, plan.leases[name].until)
    gone = [(o.at, end if o.seconds is None else o.at + o.seconds) for o in faults.outages if _is_down(o, name)]
    sick = faults.sick.get(place)
    if sick is not None and sick.only is None:
        gone.append((sick.since, sick.until))
    at, total = since, 0.0
    for a, b in sorted(gone):
        total += max(0.0, min(a, until) - at)
        at = max(at, b)
    return total + max(0.0, until - at)


def _is_down(outage: Outage, name: str) -> bool:
    return outage.node == name and outage.kind == "power"
