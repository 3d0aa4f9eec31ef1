"""The real policy on a fixed workload: python -m benchmarks.fleet_sim --seed S [--seeds N] [--faults] --json

16 nodes with 8 slots in virtual time (tests/simulator/simulator.py); benchmarks/results/scheduling.md
explains the numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from benchmarks.fleet_workload import COLD_S, JOBS, Workload, workload
from orchestrator import events as ev
from orchestrator.policy.model import SlotId
from tests.simulator.plan import Outage, SimPlan
from tests.simulator.simulator import Result, simulate

ENOUGH_FAULTS = 3
"""Faults that a shape or slot must have caused before it counts as one that has to be found."""


def measure(job: str, seed: int, *, faults: bool, mixes: bool = True) -> dict[str, Any]:
    """One run: the numbers, and who was accused falsely or not at all."""
    work = workload(job, seed, faults=faults, mixes=mixes)
    result = simulate(work.plan)
    bound = lower_bound_s(work.plan, work.guilty, whole=work.whole)
    reachable = max(bound, lower_bound_s(work.plan, work.guilty, more_s=unavoidable_s(work)))
    seen = Blame(work, result)
    return {
        "seed": seed,
        "end": result.end,
        "groups": len(work.plan.groups),
        "makespan_s": round(result.makespan_s, 1),
        "bound_s": round(bound, 1),
        "makespan_over_bound": round(result.makespan_s / bound, 4),
        "reachable_over_bound": round(reachable / bound, 4),
        "speedup_over_even_split": round(even_split_s(work) / result.makespan_s, 4),
        "healthy_untuned": sum(e.end != "tuned" for s, e in result.shapes.items() if s not in work.guilty),
        "false_shape_blame": seen.false_shapes,
        "false_slot_blame": seen.false_slots,
        "missed_blame": seen.missed,
        "guilty": seen.guilty,
        "spoiled_winners": seen.spoiled,
    }


def unavoidable_s(work: Workload) -> float:
    """Seconds of slots that no policy of this kind saves, beyond the shapes and a set-up a slot: one process for each
    (N, K) where processes hold one; two ends of every guilty shape; and, lost or measured by sick slots, half a shape
    each time."""
    plan, faults = work.plan, work.plan.faults
    typical = sum(s * s for s in work.seconds.values()) / sum(work.seconds.values())  # of a shape that is in flight
    out = 0.0 if plan.mixes else max(0, len(plan.groups) - plan.slots) * plan.setup_s
    out += sum(work.seconds[s] + 2 * plan.setup_s for s in work.guilty)
    cuts = [o.node for o in faults.outages if o.kind == "power" and o.at > 0.0]
    ends = [name for name, lease in plan.leases.items() if lease.until < plan.limit_s]
    out += sum(plan.nodes[name] for name in (*cuts, *ends)) * typical / 2
    return out + len(faults.sick) * 3 * (plan.setup_s + typical / 2)


def lower_bound_s(plan: SimPlan, left_out: Collection[int] = (), *, whole: bool = False, more_s: float = 0.0) -> float:
    """Seconds below which no schedule ends: one set-up a slot, its real speed, the time in which it is there and
    healthy, and the longest shape (`whole`: group). `left_out`: shapes whose work counts nothing. A slot on which only
    some shapes fault counts as healthy. `more_s`: further seconds of work."""
    without = frozenset(left_out)
    groups = [[t for s, t in zip(g.shapes, g.seconds, strict=True) if s not in without] for g in plan.groups]
    todo = sum(map(sum, groups)) + more_s
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


class Blame:
    """Verdicts against the truth. A verdict on an innocent is false; a guilty one that faulted often and was not found
    is missed. `guilty`: those that were to be found."""

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
                case ev.Send(attempt, shapes=shapes):
                    sizes[attempt] = len(shapes)
                case ev.AttemptStarted(attempt, node, slot):
                    places[attempt] = (node, slot)
                case ev.ShapeTuned(attempt, shape, (), (), False) | ev.SettleShape(shape, attempt, confirmed=True) if (
                    sizes[attempt] == 1
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
        due = {s for s in sure if s in failed or by_shape[s] >= ENOUGH_FAULTS}
        due_slots = {p for p in sick if p in quarantined or by_slot[p] >= ENOUGH_FAULTS}
        self.guilty = len(due) + len(due_slots)
        self.missed: list[Any] = [*sorted(due - failed), *sorted(due_slots - quarantined)]


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
    out["reachable_over_bound"] = round(statistics.median(r["reachable_over_bound"] for r in runs), 4)
    for name, worst in (("makespan_over_bound", max), ("speedup_over_even_split", min)):
        values = [r[name] for r in runs]
        out[name] = round(statistics.median(values), 4)
        out[f"{name}_worst"] = worst(values)
    for name in ("healthy_untuned", "spoiled_winners"):
        out[name] = sum(r[name] for r in runs)
    for name in ("false_shape_blame", "false_slot_blame", "missed_blame"):
        out[name] = sum(bool(r[name]) for r in runs)
    missed, guilty = sum(len(r["missed_blame"]) for r in runs), sum(r["guilty"] for r in runs)
    out["guilty_found"] = round(1.0 - missed / max(1, guilty), 5)
    out["groups"] = statistics.median(r["groups"] for r in runs)
    return out


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="simulate this many seeds, starting with --seed")
    parser.add_argument("--faults", action="store_true", help="with everything that goes wrong in a night")
    parser.add_argument(
        "--job", choices=JOBS, default=JOBS[0], help="2,000 groups as they are; tables or few: as the planner cuts"
    )
    parser.add_argument(
        "--apart", action="store_true", help="the shapes of a process share one (N, K), as with the tuner aiter"
    )
    parser.add_argument("--processes", type=int, default=1, help="simulate this many seeds at a time")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    one = partial(measure, args.job, faults=args.faults, mixes=not args.apart)
    seeds = range(args.seed, args.seed + args.seeds)
    if args.processes == 1:
        runs = [one(seed) for seed in seeds]
    else:
        with ProcessPoolExecutor(args.processes) as pool:
            runs = list(pool.map(one, seeds, chunksize=4))
    out = summary(runs, args.job, faults=args.faults)
    if args.json:
        print(json.dumps({**out, "runs": runs}, indent=1))
    else:
        for name, value in out.items():
            print(f"{name:32} {dict(value) if isinstance(value, Counter) else value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
