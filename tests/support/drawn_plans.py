"""Plans of simulations drawn from a seed, with every kind of fault."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.policy.model import SlotId
from orchestrator.reasons import Reason
from tests.simulator.plan import Faults, Losing, Outage, Poison, Sickness, SimGroup, SimLease, SimPlan, Span

FAULT_REASONS = (Reason.FAULT, Reason.OOM, Reason.HANG, Reason.ERROR)


def draw_groups(
    rng: random.Random, count: int, shapes: tuple[int, int] = (1, 6), error: float = 0.3
) -> tuple[SimGroup, ...]:  # fmt: skip
    """`shapes`: of a group, from and to; `error`: how far off an estimate is at most."""
    out, first = [], 1
    for i in range(count):
        n = rng.randint(*shapes)
        took = tuple(rng.uniform(1.0, 20.0) for _ in range(n))
        estimate = sum(took) * rng.uniform(1 - error, 1 + error)
        out.append(SimGroup(f"g{i + 1:04d}", tuple(range(first, first + n)), took, estimate))
        first += n
    return tuple(out)


def draw_plan(seed: int) -> SimPlan:
    """Two to six nodes, a few dozen groups, and each kind of fault with some chance.

    Every plan leaves a way to tune each innocent shape: one slot of one node (`haven`) is healthy and always comes
    back, and at most one slot is sick in a way that its canary does not show.
    """
    rng = random.Random(seed)
    nodes = {f"n{i + 1}": rng.randint(1, 4) for i in range(rng.randint(2, 6))}
    groups = draw_groups(rng, rng.randint(4, 30))
    shapes = [s for g in groups for s in g.shapes]
    rng.shuffle(shapes)
    span = sum(sum(g.seconds) for g in groups) / sum(nodes.values())
    haven = rng.choice(list(nodes))
    killers = _some(rng, shapes, 0.35, 2)
    back: float | None = rng.choice((100.0, 200.0, 400.0))
    if len(nodes) > 3 * len(killers) and rng.random() < 0.5:
        back = None
    spoiled: list[SlotId] = [(n, str(s)) for n, k in nodes.items() for s in range(k) if n != haven or s]
    rng.shuffle(spoiled)
    # if killers end nodes for ever, no other fault does
    mayhem = back is not None or not killers
    faults = Faults(
        poison={s: Poison(rng.choice(FAULT_REASONS), rng.choice((1.0, 1.0, 0.5))) for s in _some(rng, shapes, 0.6, 4)},
        refused={s: rng.choice((Reason.NO_CANDIDATE, Reason.WRONG_RESULT)) for s in _some(rng, shapes, 0.3, 3)},
        silent={s: rng.choice((1, 1, 99)) for s in _some(rng, shapes, 0.3, 3)},
        worker_killers=frozenset(_some(rng, shapes, 0.3, 2)),
        node_killers=dict.fromkeys(killers, back),
        kill_s=rng.choice((0.01, 1.0)),
        sick=_sick(rng, spoiled, span) if mayhem else {},
        unknown=rng.choice((0.0, 0.0, 0.5, 1.0)),
        rejects=rng.choice((0.0, 0.0, 0.05)),
        cancels=rng.choice((0.0, 0.0, 0.02)),
        outages=_outages(rng, list(nodes), haven, span) if mayhem else (),
        disk_full={rng.choice(list(nodes)): _span(rng, span)} if mayhem and rng.random() < 0.2 else {},
        dead_slots={p: rng.uniform(0, span) for p in spoiled[-1:] if mayhem and rng.random() < 0.2},
        drains={n: rng.uniform(0, span) for n in nodes if mayhem and n != haven and rng.random() < 0.1},
        controller=(_span(rng, span),) if mayhem and rng.random() < 0.3 else (),
        resumes=8,
    )
    return SimPlan(nodes, groups, faults, seed)


def guilty(faults: Faults, candidates: int = 0) -> set[int]:
    """Shapes that may fail by right. `candidates`: how many a shape has."""
    without = {s for s, lost in faults.cursed.items() if len(lost) == candidates}
    return {*faults.poison, *faults.refused, *faults.silent, *faults.worker_killers, *faults.node_killers, *without}


def _some(rng: random.Random, shapes: list[int], chance: float, most: int) -> list[int]:
    """Take up to `most` shapes away from the list, or none."""
    if rng.random() > chance:
        return []
    return [shapes.pop() for _ in range(min(rng.randint(1, most), len(shapes)))]


def _span(rng: random.Random, span: float) -> Span:
    since = rng.uniform(0, span)
    return Span(since, since + rng.uniform(1.0, 200.0))


def _sick(rng: random.Random, places: Sequence[SlotId], span: float) -> dict[SlotId, Sickness]:
    out: dict[SlotId, Sickness] = {}
    for i, place in enumerate(places[:3]):
        if rng.random() < 0.3:
            since = rng.choice((0.0, rng.uniform(0, span)))
            until = rng.choice((float("inf"), since + rng.uniform(10, 500)))
            out[place] = Sickness(canary=i == 0, since=since, until=until)
    return out


def _outages(rng: random.Random, nodes: Sequence[str], haven: str, span: float) -> tuple[Outage, ...]:
    out = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        node = rng.choice(nodes)
        seconds: float | None = rng.choice((5.0, 30.0, 120.0, 600.0))
        if node != haven and rng.random() < 0.3:
            seconds = None
        is_link = rng.random() < 0.5
        out.append(Outage(node, rng.uniform(0, span), seconds, "link" if is_link else "power"))
    return tuple(out)


CAUSES = ("preempted", "time_limit", "cancelled", "evicted")


def with_leases(plan: SimPlan) -> SimPlan:
    """The plan with leases beside its nodes, which come later and go earlier. Some share a host or follow each other on
    a GPU, one of which may be sick in a way that its canary does not show; at most two ends are charged."""
    rng = random.Random(f"{plan.seed} leases")
    span = 2 * plan.lower_bound_s()
    leases: dict[str, SimLease] = {}
    for host in ("h1", "h2", "h3")[: rng.randint(1, 3)]:
        for gpus in rng.choice(((("0", "1"),), (("0",), ("1",)))):
            t = rng.uniform(0.0, span / 3)
            for _ in range(rng.randint(1, 6)):
                until = t + rng.choice((rng.uniform(1.0, 30.0), rng.uniform(1.0, span)))
                charged = rng.random() < 0.1 and sum(x.charged for x in leases.values()) < 2
                cause = "node_failure" if charged else rng.choice(CAUSES)
                drain_s = rng.choice((0.0, 0.0, 15.0))
                leases[f"l{len(leases) + 1}"] = SimLease(host, tuple(gpus), t, until, cause, charged, drain_s)
                t = until + rng.uniform(0.1, 20.0)
    sick = dict(plan.faults.sick)
    if not any(x.canary for x in sick.values()) and rng.random() < 0.5:
        for name, lease in leases.items():
            if lease.host == "h1" and "0" in lease.gpus:
                sick[name, str(lease.gpus.index("0"))] = Sickness()
    nodes = {**plan.nodes, **{name: len(x.gpus) for name, x in leases.items()}}
    # later than a node is given up only where few are: else an innocent shape has three losses before the word comes
    look_s = rng.choice((0.5, 5.0) if plan.faults.node_killers else (0.5, 5.0, 1.5 * plan.lost_s))
    return replace(plan, nodes=nodes, leases=leases, look_s=look_s, faults=replace(plan.faults, sick=sick))


def with_candidates(plan: SimPlan) -> SimPlan:
    """The plan with candidates that fault one by one, on one slot alone or everywhere; with candidates blocked in
    earlier runs, and slots of different speed. That slot is the only one whose canary passes although it is sick."""
    rng = random.Random(f"{plan.seed} candidates")
    count = rng.randint(3, 8)
    places = [(n, str(s)) for n, k in plan.nodes.items() for s in range(k)]
    shapes = [s for g in plan.groups for s in g.shapes]
    rng.shuffle(places)
    span = plan.lower_bound_s()
    since = rng.choice((0.0, rng.uniform(0, span)))
    until = rng.choice((float("inf"), since + rng.uniform(10, 500)))
    numbers = tuple(rng.sample(range(count), rng.randint(1, count)))
    faults = replace(
        plan.faults,
        sick={p: s for p, s in plan.faults.sick.items() if not s.canary},
        losing={places[0]: Losing(numbers, since, until)} if rng.random() < 0.8 else {},
        cursed={
            s: tuple(rng.sample(range(count), rng.randint(1, count))) for s in shapes if rng.random() < 0.1
        },
        listed={places[0]: {s: (rng.randrange(count),) for s in shapes if rng.random() < 0.3}}
        if rng.random() < 0.3
        else {},
    )  # fmt: skip
    speed = {p: rng.uniform(0.8, 1.2) for p in places}
    return replace(plan, candidates=count, faults=faults, speed=speed)
