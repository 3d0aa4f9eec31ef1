"""What a task costs that costs nothing, and the makespan of a night: against HyperQueue, and an even split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import fleet_sim, zero_cost
from benchmarks.peers.environment import Environment
from benchmarks.peers.reach import CLIENTS, PeerError, timed
from benchmarks.peers.table import OURS, Row

SLOTS = 2
QUEUE, FLOOR, EVEN = "HyperQueue", "xargs -P", "even split"
NOTES = {
    OURS: "durability **on**: the ledger's transaction is on disk before anything is sent, the worker syncs every settled "
    "shape; a task is a shape that the replay tuner answers, by a child that is kept; first send to last row on disk",
    QUEUE: "server, and one worker with as many cores as ours has slots, in one process (LocalCluster; the wheel has no "
    "`hq`, and this way no journal, so **nothing is durable**); a task starts `true`, whose output is not kept. More: "
    "dependencies, resources, any program",
    FLOOR: f"`xargs -n 1 -P {SLOTS} true`: the cost of starting the program here, without a queue",
    EVEN: "the runbook: the list in as many equal parts as slots, each one process, **never a fault**; ours with faults "
    "has all of examples/faults.yaml, splits, confirms and blames",
}


def zero_cost_row(environment: Environment, folder: Path, turns: int, log: Callable[[str], None]) -> Row:
    """Milliseconds a task, by turns."""
    row = Row(f"a task of zero cost, {zero_cost.GROUPS} on {SLOTS} slots", "ms")
    queue = "hyperqueue"
    if queue in environment.missing:
        row.missing[QUEUE] = environment.missing[queue]
    for turn in range(turns):
        log(f"tasks of zero cost, turn {turn + 1} of {turns}")
        here = folder / f"tasks-{turn}"
        here.mkdir(parents=True)
        row.values.setdefault(OURS, []).append(zero_cost.run(here)[0].value)
        many = f"yes t | head -n {zero_cost.GROUPS} | xargs -n 1 -P {SLOTS} true"
        row.values.setdefault(FLOOR, []).append(1e3 * timed(["sh", "-c", many], {})[0] / zero_cost.GROUPS)
        if QUEUE in row.missing:
            continue
        script = str(CLIENTS / "with_hyperqueue.py")
        try:
            out = timed([environment.python, script, str(zero_cost.GROUPS), str(SLOTS), str(here)], {})[1]
        except PeerError as e:
            row.missing[QUEUE] = str(e)
            row.values.pop(QUEUE, None)
        else:
            row.values.setdefault(QUEUE, []).append(1e3 * float(out) / zero_cost.GROUPS)
    return row


def makespan_rows(seeds: Sequence[int], log: Callable[[str], None], job: str = "groups") -> list[Row]:
    """Hours of a night in virtual time, without and with faults; the spread is that of the seeds."""
    rows = []
    for faults in (False, True):
        log(f"simulator, {len(seeds)} seeds{', with faults' if faults else ''}")
        runs = [fleet_sim.measure(job, seed, faults=faults) for seed in seeds]
        row = Row(f"makespan, virtual time, {'all faults' if faults else 'no fault'}", "h")
        row.values[OURS] = [r["makespan_s"] / 3600 for r in runs]
        row.values[EVEN] = [r["makespan_s"] * r["speedup_over_even_split"] / 3600 for r in runs]
        rows.append(row)
    return rows
