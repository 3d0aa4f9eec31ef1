"""Cost of a task that does nothing, beside HyperQueue; the makespan of a night, beside an even split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import fleet_sim, zero_cost
from benchmarks.peers.callers import CLIENT, PeerError, timed
from benchmarks.peers.environment import Environment
from benchmarks.peers.table import OURS, Row

SLOTS = 2
QUEUE, FLOOR, EVEN = "HyperQueue", "xargs -P", "even split"
NOTES = {
    OURS: "durability **on**: the ledger's transaction is on disk before anything is sent, the worker syncs each "
    "settled shape; a task is a shape that the replay tuner answers, in a child that is kept; first send to last row",
    QUEUE: "submit to end of the last; one process is server and worker, with as many cores as ours has slots. Less: "
    "the wheel has no `hq` but LocalCluster, which keeps no journal, so **nothing is durable**. More: each task starts "
    "a program (`true`, output not kept); dependencies, resources",
    FLOOR: f"`xargs -n 1 -P {SLOTS} true`: the cost of starting that program here, without a queue",
    EVEN: "the runbook: the list in as many equal parts as slots, each one process, **never a fault**; ours with "
    "faults has all that goes wrong in a bad night",
}


def zero_cost_row(environment: Environment, folder: Path, turns: int, log: Callable[[str], None]) -> Row:
    """Milliseconds a task, by turns."""
    count = zero_cost.GROUPS
    row = Row(f"a task of zero cost, {count} on {SLOTS} slots", "ms")
    if why := environment.missing.get("hyperqueue"):
        row.missing[QUEUE] = why
    for turn in range(turns):
        log(f"tasks of zero cost, turn {turn + 1} of {turns}")
        here = folder / f"tasks-{turn}"
        here.mkdir(parents=True)
        row.add(OURS, zero_cost.run(here)[0].value)
        starts, _ = timed(["sh", "-c", f"yes t | head -n {count} | xargs -n 1 -P {SLOTS} true"])
        row.add(FLOOR, 1e3 * starts / count)
        if QUEUE not in row.missing:
            argv = [environment.program("python"), CLIENT, "hyperqueue", str(count), str(SLOTS), str(here)]
            try:
                row.add(QUEUE, 1e3 * float(timed(argv)[1].split()[-1]) / count)
            except PeerError as e:
                row.missing[QUEUE] = str(e)
    return row


def makespan_rows(seeds: Sequence[int], log: Callable[[str], None], job: str = "groups") -> list[Row]:
    """Hours of a night in virtual time, without and with faults; the spread is that of the seeds."""
    rows = []
    for faults in (False, True):
        log(f"simulator, {len(seeds)} seeds{', with faults' if faults else ''}")
        row = Row(f"makespan, virtual time, {'all faults' if faults else 'no fault'}", "h")
        for seed in seeds:
            night = fleet_sim.measure(job, seed, faults=faults)
            row.add(OURS, night["makespan_s"] / 3600)
            row.add(EVEN, night["makespan_s"] * night["speedup_over_even_split"] / 3600)
        rows.append(row)
    return rows
