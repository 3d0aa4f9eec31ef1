"""The real policy on a fixed workload: python -m benchmarks.fleet_sim --seed S [--seeds N] [--faults] --json

16 nodes with 8 slots in virtual time (orchestrator/simulation/simulator.py); benchmarks/results/scheduling.md
explains the numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from typing import Any

from benchmarks.fleet_workload import COLD_S, JOBS, Workload, workload
from orchestrator import events as ev
from orchestrator.scheduling.model import SlotId
from orchestrator.simulation.plan import SimPlan
from orchestrator.simulation.simulator import Result, simulate

ENOUGH_FAULTS = 3
"""Faults that a shape or slot must have caused before it counts as one that has to be found."""


def measure(job: str, seed: int, *, faults: bool) -> dict[str, Any]:
    """One run: the numbers, and who was accused falsely or not at all."""
    work = workload(job, seed, faults=faults)
    result = simulate(work.plan)
    bound = lower_bound_s(work)
    seen = Blame(work, result)
    return {
        "seed": seed,
        "end": result.end,
        "groups": len(work.plan.groups),
        "makespan_s": round(result.makespan_s, 1),
        "bound_s": round(bound, 1),
        "makespan_over_bound": round(result.makespan_s / bound, 4),
        "speedup_over_even_split": round(even_split_s(work) / result.makespan_s, 4),
        "healthy_untuned": sum(e.end != "tuned" for s, e in result.shapes.items() if s not in work.guilty),
        "false_shape_blame": seen.false_shapes,
        "false_slot_blame": seen.false_slots,
        "missed_blame": seen.missed,
        "spoiled_winners": seen.spoiled,
    }


class Blame:
    """Verdicts against what is true. A verdict on an innocent is false; a guilty one that faulted often is missed."""

    def __init__(self, work: Workload, result: Result) -> None:
        faults, sick = work.plan.faults, work.plan.faults.sick
        places: dict[str, SlotId] = {}
        sizes: dict[str, int] = {}
        by_shape, by_slot = Counter[int](), Counter[SlotId]()
        quarantined: set[SlotId] = set()
        wedged: set[SlotId] = set()
        self.spoiled = 0
        for t, r in result.journal:
            match r:
                case ev.GroupAdded(group, shapes, _):
                    sizes[group] = len(shapes)
                case ev.Confirm(child=child):
                    sizes[child] = 1
                case ev.Split(_, children, _):
                    sizes.update((child, len(shapes)) for child, shapes in children)
                case ev.AttemptStarted(attempt, node, slot):
                    places[attempt] = (node, slot)
                case ev.Confirm(child=child):
                    sizes[child] = 1
                case ev.ShapeTuned(attempt, shape, complete=True) | ev.SettleShape(shape, attempt, confirmed=True) if (
                    sizes[attempt.rpartition("-")[0]] == 1
                ):
                    at = sick.get(places[attempt])
                    self.spoiled += bool(at and at.salvage and at.hits(shape, t))
                case ev.AttemptEnded(attempt, reason, shape, _, _) if reason.may_blame_slot and shape is not None:
                    by_shape[shape] += 1
                    wedged |= {places[attempt]} if shape in faults.wedges else set()
                    if shape not in work.guilty:
                        by_slot[places[attempt]] += 1
                case ev.Quarantine(node, slot, _, _):
                    quarantined.add((node, slot))
                case _:
                    pass
        failed = set(result.of("failed"))
        sure = {s for s, p in faults.poison.items() if p.chance == 1.0} | set(faults.wedges)
        self.false_shapes = sorted(failed - work.guilty)
        self.false_slots = sorted(quarantined - set(sick) - wedged)
        self.missed: list[Any] = sorted(s for s in sure - failed if by_shape[s] >= ENOUGH_FAULTS)
        self.missed += sorted(p for p in set(sick) - quarantined if by_slot[p] >= ENOUGH_FAULTS)


def lower_bound_s(work: Workload) -> float:
    """No schedule is shorter: one set-up a slot, its real speed, the longest piece, and the slots that are there."""
    plan, longest = work.plan, 0.0
    fastest = min(plan.slow.get((n, str(s)), 1.0) for n, count in plan.nodes.items() for s in range(count))
    healthy = {i: s for i, s in work.seconds.items() if i not in work.guilty}
    for piece in work.whole:
        longest = max(longest, sum(healthy.get(i, 0.0) for i in piece))
    todo = sum(healthy.values())
    low, high = COLD_S + longest * fastest, 30 * 86400.0
    while high - low > 0.01:
        mid = (low + high) / 2
        low, high = (low, mid) if _capacity(plan, mid) >= todo else (mid, high)
    return high


def _capacity(plan: SimPlan, end: float) -> float:
    """Seconds of work that the slots can do until then."""
    total, faults = 0.0, plan.faults
    for name, count in plan.nodes.items():
        since, until, gone = 0.0, min(end, faults.drains.get(name, end)), 0.0
        for o in faults.outages:
            if o.node == name and o.kind == "power":
                back = end if o.seconds is None else o.at + o.seconds
                gone += max(0.0, min(back, until) - min(o.at, until))
        for slot in range(count):
            place, stop = (name, str(slot)), until
            sick = faults.sick.get(place)
            if sick is not None and sick.only is None:
                stop = min(stop, sick.since)
            lost = gone if stop == until else 0.0
            total += max(0.0, stop - since - lost - COLD_S) / plan.slow.get(place, 1.0)
    return total


def even_split_s(work: Workload) -> float:
    """The runbook: the list cut into as many equal parts as there are slots, each one process, without any fault."""
    plan = work.plan
    order = [i for kind in work.kinds for _, i in kind]
    order.sort()
    places = [(n, str(s)) for n, count in plan.nodes.items() for s in range(count)]
    ends = []
    for k, place in enumerate(places):
        part = order[k * len(order) // len(places) : (k + 1) * len(order) // len(places)]
        ends.append(COLD_S + plan.slow.get(place, 1.0) * sum(work.seconds[i] for i in part))
    return max(ends)


def summary(runs: list[dict[str, Any]], job: str, *, faults: bool) -> dict[str, Any]:
    """Medians and worst of the ratios; of verdicts, the runs that have a false or a missed one."""
    out: dict[str, Any] = {"job": job, "faults": faults, "seeds": len(runs), "ends": Counter(r["end"] for r in runs)}
    for name, worst in (("makespan_over_bound", max), ("speedup_over_even_split", min)):
        values = [r[name] for r in runs]
        out[name] = round(statistics.median(values), 4)
        out[f"{name}_worst"] = worst(values)
    for name in ("healthy_untuned", "spoiled_winners"):
        out[name] = sum(r[name] for r in runs)
    for name in ("false_shape_blame", "false_slot_blame", "missed_blame"):
        out[name] = sum(bool(r[name]) for r in runs)
    out["groups"] = statistics.median(r["groups"] for r in runs)
    return out


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds from that one on")
    parser.add_argument("--faults", action="store_true", help="with everything that goes wrong in a night")
    parser.add_argument(
        "--job", choices=JOBS, default=JOBS[0], help="2,000 groups as they are; tables or few: as the planner cuts"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    runs = [measure(args.job, args.seed + i, faults=args.faults) for i in range(args.seeds)]
    out = summary(runs, args.job, faults=args.faults)
    if args.json:
        print(json.dumps({**out, "runs": runs}, indent=1))
    else:
        for name, value in out.items():
            print(f"{name:32} {dict(value) if isinstance(value, Counter) else value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
