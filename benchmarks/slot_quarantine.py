"""Rate of quarantined slots for candidates that ran elsewhere: python -m benchmarks.slot_quarantine [--runs N]

Four nodes with two slots in virtual time tune 120 single shapes of 30 candidates. False: candidates fault by chance
everywhere alike, and a slot is shut for it. Found: on one slot a part of them faults each time, and it is shut.
Cursed: one candidate of every fourth shape faults everywhere, and a slot is shut for it.
benchmarks/results/scheduling.md has the numbers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from typing import Any

from orchestrator import events as ev
from tests.simulator.plan import Faults, Losing, SimPlan
from tests.simulator.simulator import simulate
from tests.support.drawn_plans import draw_groups

NODES, SLOTS, SHAPES, CANDIDATES = 4, 2, 120, 30
FLAKY = (0.0003, 0.001, 0.003)
LOSING = (1, 3, 10)
"""Candidates of the 30 that fault on the sick slot."""
SICK = ("n2", "1")


def plan(seed: int, faults: Faults) -> SimPlan:
    rng = random.Random(seed)
    nodes = {f"n{i + 1}": SLOTS for i in range(NODES)}
    return SimPlan(nodes, draw_groups(rng, SHAPES, shapes=(1, 1)), faults, seed, candidates=CANDIDATES)


def shut(seed: int, faults: Faults) -> dict[tuple[str, str], float]:
    """The slots that were quarantined in one run, and when first, as a share of the run."""
    result = simulate(plan(seed, faults))
    out: dict[tuple[str, str], float] = {}
    for t, r in result.journal:
        if isinstance(r, ev.Quarantine):
            out.setdefault((r.node, r.slot), t / result.makespan_s)
    return out


def measure(runs: int) -> dict[str, Any]:
    """Shares of runs."""
    few = max(1, runs // 5)
    false = {
        str(chance): sum(bool(shut(seed, Faults(flaky=chance))) for seed in range(runs)) / runs for chance in FLAKY
    }
    found = {}
    for lost in LOSING:
        faults = Faults(losing={SICK: Losing(tuple(range(lost)))}, flaky=0.001)
        seen = [shut(seed, faults) for seed in range(few)]
        when = sorted(s[SICK] for s in seen if SICK in s)
        found[str(lost)] = {
            "found": len(when) / few, "when": round(when[len(when) // 2], 3) if when else None,
            "others": sum(bool(s.keys() - {SICK}) for s in seen) / few,
        }  # fmt: skip
    cursed = Faults(cursed=dict.fromkeys(range(1, SHAPES + 1, 4), (0,)))
    return {"false": false, "found": found, "cursed": sum(bool(shut(seed, cursed)) for seed in range(few)) / few}


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slot_quarantine", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    args = parser.parse_args(argv)
    print(json.dumps({"runs": args.runs, **measure(args.runs)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
