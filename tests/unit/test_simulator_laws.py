"""Hundreds of drawn plans with every kind of trouble at once; the books must balance each time."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import events as ev
from orchestrator.reasons import Reason
from orchestrator.scheduling.chaos import draw_plan, guilty
from orchestrator.scheduling.plan import Plan
from orchestrator.scheduling.simresult import Result
from orchestrator.scheduling.simulator import Simulator, simulate


def faults_in_the_books(plan: Plan, result: Result) -> list[str]:
    """Where the laws were broken, in words."""
    out = []
    by_right = guilty(plan.faults)
    hidden = any(s.canary for s in plan.faults.sick.values())
    for shape, end in result.shapes.items():
        if end.settled > 1:
            out.append(f"shape {shape} was settled {end.settled} times")
        if end.end == "pending":
            out.append(f"shape {shape} is pending")
        if end.end == "failed" and shape not in by_right and (end.confirmed or not hidden):
            # where nothing but a slot is left that hides its sickness, "unconfirmed" is the truth
            out.append(f"shape {shape} is innocent and failed: {end.reason}, {end.detail}")
        if end.reason is Reason.KILLS_NODES and not (end.confirmed or len(plan.nodes) == 1):
            places = {p.split(" (")[0] for p in end.detail.split("seen on ")[-1].split(", ")}
            if len(places) > 1:
                out.append(f"shape {shape} was seen on {places}, yet unconfirmed")
    for killer in plan.faults.node_killers:
        heard = [d for d in result.deaths if d.why == f"shape {killer}" and d.followed]
        if len(heard) > 3:
            out.append(f"shape {killer} took {len(heard)} nodes down")
        if result.shapes[killer].end == "tuned":
            out.append(f"shape {killer} cannot have been tuned")
    started: Counter[str] = Counter(r.attempt for _, r in result.journal if isinstance(r, ev.AttemptStarted))
    out += [f"attempt {a} started {n} times" for a, n in started.items() if n > 1]
    sent: Counter[str] = Counter(r.attempt for _, r in result.journal if isinstance(r, ev.Send))
    out += [f"attempt {a} was sent {n} times" for a, n in sent.items() if n > 1]
    return out


def groups_in_the_books(result: Result) -> list[str]:
    """Every shape is in exactly one group at every time: splits lose and double nothing."""
    out = []
    home: dict[int, str] = {}
    for _, r in result.journal:
        if isinstance(r, ev.GroupAdded):
            home.update((s, r.group) for s in r.shapes)
        elif isinstance(r, ev.Split):
            moved = [s for _, shapes in r.children for s in shapes]
            if len(moved) != len(set(moved)):
                out.append(f"{r} doubles a shape")
            for child, shapes in r.children:
                out += [f"{r}: shape {s} was in {home[s]}" for s in shapes if not child.startswith(home[s][:5])]
                home.update((s, child) for s in shapes)
    if set(home) != set(result.shapes):
        out.append("shapes were lost")
    return out


def test_the_laws_hold_on_500_drawn_plans() -> None:
    broken = {}
    ends: Counter[str] = Counter()
    for seed in range(500):
        plan = draw_plan(seed)
        result = simulate(plan)
        ends[result.end] += 1
        found = faults_in_the_books(plan, result) + groups_in_the_books(result)
        if found or result.end != "finished":
            broken[seed] = (result.end, result.stuck, found)
    assert broken == {}
    assert ends == {"finished": 500}


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(1000, 10**9))
def test_a_policy_that_only_read_the_journal_goes_on_alike(seed: int) -> None:
    plan = draw_plan(seed)
    straight = simulate(plan)
    rng = random.Random(seed)
    reloads = []

    def sometimes(sim: Simulator) -> None:
        if rng.random() < 0.01:
            reloads.append(sim.reload())

    resumed = Simulator(plan, step=sometimes).run()
    assert all(reloads)
    assert resumed.journal == straight.journal
    assert resumed.shapes == straight.shapes


def test_the_plans_hold_every_kind_of_trouble() -> None:
    """So that the test above means something."""
    seen: Counter[str] = Counter()
    for seed in range(500):
        f = draw_plan(seed).faults
        for name in ("poison", "refused", "silent", "worker_killers", "node_killers", "sick", "unknown", "rejects"):
            seen[name] += bool(getattr(f, name))
        for name in ("cancels", "outages", "disk_full", "dead_slots", "drains", "controller"):
            seen[name] += bool(getattr(f, name))
    assert min(seen.values()) >= 25
    assert len(seen) == 14
