"""Jobs to simulate, and the settings that a user varies: nodes, slots, batch, faults; together they make a plan."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.errors import InputError
from orchestrator.planning import CostModel, make_groups
from orchestrator.planning.plan import OFF
from orchestrator.shapes import Shape
from orchestrator.simulation.faults_file import Entry, with_faults
from orchestrator.simulation.plan import Faults, SimGroup, SimPlan
from orchestrator.tables.faults import did_you_mean
from worker.families import Family

SLOTS = 8
"""Slots of a node, where neither the user nor a run names their number."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Changes of a job; 0 and () leave it as it is. `faults`: beside those of the run."""

    nodes: int = 0
    slots: int = 0
    without: tuple[str, ...] = ()
    batch: int = 0
    faults: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Shapes with a cost model, and the plan of the run that they come from; of a list, a plan without nodes.

    `seconds`: of each shape on a slot; without, they are drawn: the estimate of each kind (all key columns but M) is
    off by up to OFF either way. `gaps`: of these, seconds between the shape and the next, which a batch of another size
    would not have. `took_s`: from the run's start to its last verdict.
    """

    name: str
    family: Family
    tuner: str
    shapes: Sequence[Shape]
    cost: CostModel
    plan: SimPlan
    seconds: Mapping[int, float] = field(default_factory=dict)
    gaps: Mapping[int, float] = field(default_factory=dict)
    took_s: float | None = None


def plan_of(job: Job, setting: Setting, seed: int) -> SimPlan:
    """The job under a setting. Its groups are cut anew where the number of slots changes. Raises InputError."""
    nodes = _nodes(job.plan.nodes, setting)
    seconds = job.seconds or _drawn(job, seed)
    if setting.batch:
        seconds = {i: s - job.gaps.get(i, 0.0) for i, s in seconds.items()}
    own = job.plan.groups if job.plan.slots == sum(nodes.values()) else ()
    planned = [(g.id, g.shapes, g.estimate_s) for g in own] or [
        (g.id, g.shapes, g.cost_s)
        for g in make_groups(job.shapes, job.family, job.cost, sum(nodes.values()), tuner=job.tuner)
    ]
    groups = tuple(SimGroup(id_, ids, tuple(seconds[i] for i in ids), estimate) for id_, ids, estimate in planned)
    leases = {name: lease for name, lease in job.plan.leases.items() if name in nodes}
    faults = _within(job.plan.faults, nodes)
    plan = replace(job.plan, nodes=nodes, groups=groups, faults=faults, leases=leases, seed=seed, batch=setting.batch)
    return with_faults(plan, setting.faults, setting.without)


def _nodes(own: Mapping[str, int], setting: Setting) -> dict[str, int]:
    """Node -> slots: the job's own, without those that are to be gone, cut or filled up to the number wanted."""
    for name in setting.without:
        if name not in own:
            there = f" (nodes: {', '.join(own)})" if own else ": a list of shapes has no nodes of its own"
            raise InputError(f"--without {name}: there is no such node{did_you_mean(name, own)}{there}")
    usual = setting.slots or (Counter(own.values()).most_common(1)[0][0] if own else SLOTS)
    out = {name: setting.slots or slots for name, slots in own.items() if name not in setting.without}
    fresh = (f"n{i}" for i in itertools.count(1) if f"n{i}" not in own)
    while len(out) < setting.nodes:
        out[next(fresh)] = usual
    if not out:
        raise InputError("no node is left to simulate: name their number with --nodes")
    return dict(list(out.items())[: setting.nodes or None])


def _within(faults: Faults, nodes: Mapping[str, int]) -> Faults:
    """The faults of these nodes and their slots."""
    return replace(
        faults,
        outages=tuple(o for o in faults.outages if o.node in nodes),
        drains={n: t for n, t in faults.drains.items() if n in nodes},
        disk_full={n: s for n, s in faults.disk_full.items() if n in nodes},
        dead_slots={(n, s): t for (n, s), t in faults.dead_slots.items() if int(s) < nodes.get(n, 0)},
        sick={(n, s): x for (n, s), x in faults.sick.items() if int(s) < nodes.get(n, 0)},
    )


def _drawn(job: Job, seed: int) -> dict[int, float]:
    """Seconds of every shape, the cost model being off by a factor for each kind."""
    rng = random.Random(f"{seed} costs")
    at = job.family.key_names.index(job.family.m_column)
    off: dict[tuple[int | str, ...], float] = {}
    out = job.cost.shape_costs(job.shapes, job.family)
    for s in job.shapes:
        kind = (*s.key[:at], *s.key[at + 1 :])
        if kind not in off:
            off[kind] = OFF ** rng.uniform(-1.0, 1.0)
        out[s.id] *= off[kind]
    return out
