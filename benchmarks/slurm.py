"""A run on Slurm: from `tune` to the first shape, many leases at once, lines through a lease, a cancelled lease.

Slurm is real (tests/integration/slurm.py): three nodes on this machine, which share its cores.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from pathlib import Path

from benchmarks.figure import Figure, LeftOutError
from benchmarks.stream import stream_figures
from orchestrator.events import AttemptEnded, LeaseEnded, ShapeStarted
from orchestrator.inventory.model import Node
from orchestrator.leases.lease import LeaseState
from orchestrator.leases.slurm import SlurmSource
from tests.integration.leases import LeaseBench
from tests.integration.slurm import PARTITION, SlurmCluster, missing, slurm_cluster
from tests.kits.fleet import Bench, records
from tests.waiting import wait_until

RATE = 30_000
FIRST_SHAPE_S, IDLE_S, LEASES = 3.0, 2.0, 64


def run(folder: Path) -> list[Figure]:
    if missing():
        raise LeftOutError(missing())
    with slurm_cluster() as cluster:
        os.environ |= cluster.environment
        return [*_first_shape(folder / "first", cluster), *_cancelled(folder / "cancelled", cluster), *_source(folder)]


class _SlurmBench(LeaseBench):
    """A bench on Slurm, on leases of two GPUs each."""

    def __init__(self, folder: Path, cluster: SlurmCluster, **options: str) -> None:
        folder.mkdir()
        super().__init__(Bench(folder, 2), lease="slurm", partition=PARTITION, **options)
        self._cluster = cluster

    def left(self) -> list[str]:
        return self._cluster.jobs().splitlines()


def _first_shape(folder: Path, cluster: SlurmCluster) -> list[Figure]:
    """Time from the start of `tune` to the first shape under way, beside an `srun true` on the same idle partition."""
    began = time.time()
    subprocess.run(["srun", "-p", PARTITION, "--gres=gpu:2", "true"], check=True, stdin=subprocess.DEVNULL)
    bare_s = time.time() - began
    cluster.wait_idle()
    pool = _SlurmBench(folder, cluster)
    pool.bench.shapes(groups=4)
    began = time.time()
    assert pool.bench.tune().code == 0
    with pool.bench.ledger() as ledger:
        first = next(t for t, r in records(ledger) if isinstance(r, ShapeStarted))
    how = f"beyond an `srun true` of {bare_s:.2f} s; Python's start and the check of the partition included"
    return [Figure("from tune to the first shape on Slurm", first - began - bare_s, FIRST_SHAPE_S, "s", how)]


def _cancelled(folder: Path, cluster: SlurmCluster) -> list[Figure]:
    """Idle time of the other lease's slots after one of two leases is cancelled, until its shapes are all taken up."""
    cluster.wait_idle()
    pool = _SlurmBench(folder, cluster, count="2")
    pool.bench.shapes(groups=40)
    run = pool.bench.start("tune", *pool.bench.tune_args(seconds=0.5))
    wait_until(lambda: len(pool.expected()) == 2 and pool.bench.tuned() >= 8, "both leases work")
    gone = pool.expected()[1]
    subprocess.run(["scancel", gone.lease], check=True)
    wait_until(lambda: run.poll() is not None, "the run is over")
    with pool.bench.ledger() as ledger:
        journal = records(ledger)
    at = next(t for t, r in journal if isinstance(r, LeaseEnded) and r.node == gone.node)
    busy = sorted(t for t, r in journal if isinstance(r, ShapeStarted | AttemptEnded) and t > at - 3.0)
    gap = max((b - a for a, b in itertools.pairwise(busy) if a < at + 5.0), default=0.0)
    return [Figure("a cancelled lease: longest pause of the others", gap, IDLE_S, "s", "between records of their work")]


def _source(folder: Path) -> list[Figure]:
    """The source alone: 64 leases requested at once, and 100,000 lines through a stream."""
    pool = Node(name="pool", lease="slurm", partition=PARTITION, gpus=2, time="10m", workdir=str(folder / "work"))
    source = SlurmSource("20260131-154500-3f9a", pool, str(folder / "out"))
    try:
        began = time.perf_counter()
        source.ask(LEASES)
        listed = len(source.list())
        ask_s = time.perf_counter() - began
        assert listed == LEASES, listed
        ready = wait_until(lambda: [x for x in source.list() if x.state is LeaseState.READY], "one is ready")
        transport = source.transport(ready[0], "pool-1")
        transport.connect()
        streamed = stream_figures(transport, "a lease", RATE, "srun")
        transport.close()
        return [
            Figure(f"{LEASES} leases requested and listed", ask_s, 4.0, "s", "one array, one squeue"),
            *streamed,
        ]
    finally:
        source.release(source.list())
        source.close()
