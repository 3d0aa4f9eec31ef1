"""Whole runs on leases of a real Slurm: faults done for real, and the books checked after each."""

from __future__ import annotations

import contextlib
import json
import subprocess

import pytest

from orchestrator.events import FailShape, LeaseEnded, NodeExpected, Record, Split
from tests.integration.kit import Bench
from tests.integration.slurm import PARTITION, URGENT, SlurmCluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm")]


class SlurmBench:
    """A bench whose inventory is one pool of leases of two GPUs each."""

    def __init__(self, bench: Bench, cluster: SlurmCluster) -> None:
        self.bench, self.cluster = bench, cluster

    def inventory(self, **options: str) -> None:
        """Write the inventory; `options` of the pool over its own."""
        values = {"lease": "slurm", "partition": PARTITION, "count": "1-2", "gpus": "2", "time": "10m", **options}
        lines = "".join(f"    {name}: {value}\n" for name, value in values.items())
        self.bench.inventory.write_text(
            f"defaults: {{family: a16w16, tuner: replay}}\nnodes:\n  pool:\n    workdir: {self.bench.workdir}\n{lines}"
        )

    def jobs(self) -> list[str]:
        return self.cluster.jobs().splitlines()

    def running(self) -> list[str]:
        """Ids of the leases that run."""
        return [line.split()[0] for line in self.jobs() if " RUNNING " in line]

    def over(self, run: subprocess.Popen[str]) -> bool:
        """Let every held group go on, on leases that come later, too; return whether the run is over."""
        with contextlib.suppress(OSError):  # folders come and go
            self.bench.release()
        return run.poll() is not None

    def records(self, *kinds: type[Record]) -> list[Record]:
        with self.bench.ledger() as ledger:
            return [r for _, r in ledger.journal_records() if isinstance(r, kinds)]


@pytest.fixture
def pool(slurm: SlurmCluster, bench: Bench) -> SlurmBench:
    made = SlurmBench(bench, slurm)
    made.inventory()
    return made


def test_a_run_takes_a_lease_and_gives_it_back(pool: SlurmBench) -> None:
    n = pool.bench.shapes(groups=6)
    done = pool.bench.tune()
    assert done.code == 0, done.out + done.err
    pool.bench.check_books(tuned=n, failed={})
    assert pool.jobs() == []
    assert pool.bench.processes() == []


def test_a_lease_that_is_cancelled_costs_nobody_anything(pool: SlurmBench) -> None:
    pool.inventory(count="2")
    n = pool.bench.shapes(groups=12)
    run = pool.bench.start("tune", *pool.bench.tune_args([pool.bench.held(4, 12)]))
    wait_until(lambda: pool.bench.tuned() >= 4 and len(pool.running()) == 2, "both leases work")
    gone = pool.running()[0]
    pool.cluster.run("scancel", gone)
    wait_until(lambda: pool.records(LeaseEnded), "its end is noticed")
    pool.bench.release()
    wait_until(lambda: pool.over(run), "the run is over")
    assert run.returncode == 0
    pool.bench.check_books(tuned=n, failed={})
    (first, *_) = [e for e in pool.records(LeaseEnded) if isinstance(e, LeaseEnded)]
    assert (first.cause, first.charged) == ("cancelled", False)
    assert not pool.records(FailShape, Split), "nobody is suspected"
    assert pool.jobs() == []


def test_a_lease_that_is_preempted_comes_back_as_another(pool: SlurmBench) -> None:
    n = pool.bench.shapes(groups=6)
    run = pool.bench.start("tune", *pool.bench.tune_args([pool.bench.held(2, 6)]))
    wait_until(lambda: pool.bench.tuned() >= 2, "a lease works")
    urgent = pool.cluster.run(
        "sbatch", "--parsable", "-p", URGENT, "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"
    ).stdout.strip()
    wait_until(lambda: pool.records(LeaseEnded), "the lease makes way")
    pool.cluster.run("scancel", urgent)
    wait_until(lambda: pool.over(run), "the run is over")
    assert run.returncode == 0
    pool.bench.check_books(tuned=n, failed={})
    ends = [e for e in pool.records(LeaseEnded) if isinstance(e, LeaseEnded)]
    assert (ends[0].cause, ends[0].charged) == ("preempted", False)
    assert pool.jobs() == []


def test_a_killed_controller_is_followed_by_one_that_takes_the_leases_over(pool: SlurmBench) -> None:
    n = pool.bench.shapes(groups=6)
    run = pool.bench.start("tune", *pool.bench.tune_args([pool.bench.held(2, 6)]))
    wait_until(lambda: pool.bench.tuned() >= 2, "a lease works")
    run.kill()
    run.wait()
    before = pool.running()
    assert before
    again = pool.bench.start("resume")
    wait_until(lambda: pool.over(again), "the run is over")
    assert again.returncode == 0
    pool.bench.check_books(tuned=n, failed={})
    leases = {e.lease for e in pool.records(NodeExpected) if isinstance(e, NodeExpected)}
    assert len(leases) == 1, "the same lease worked on"
    assert pool.jobs() == []


def test_cancel_leaves_nothing_in_the_queue(pool: SlurmBench) -> None:
    """Of a living run, of one whose controller was killed, and of one that still waits in the queue."""
    pool.bench.shapes(groups=6)
    blocker = pool.cluster.run(
        "sbatch", "--parsable", "-p", URGENT, "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"
    ).stdout.strip()
    wait_until(lambda: pool.running() == [blocker], "the cluster is full")
    run = pool.bench.start("tune", *pool.bench.tune_args())
    wait_until(lambda: any("PENDING" in line for line in pool.jobs()), "a lease is queued")
    run.kill()
    run.wait()
    done = pool.bench.run("cancel")
    assert done.code == 0, done.out + done.err
    assert [line.split()[0] for line in pool.jobs()] == [blocker]
    pool.cluster.run("scancel", blocker)


def test_plan_and_check_quote_the_scheduler(pool: SlurmBench) -> None:
    pool.bench.shapes(groups=2)
    pool.inventory(partition="nosuch")
    done = pool.bench.tune()
    assert done.code == 3
    assert "nosuch" in done.err
    checked = pool.bench.run_plain("nodes", "check", "-i", str(pool.bench.inventory), "--json")
    (node,) = json.loads(checked.out)["nodes"]
    assert checked.code == 3
    assert any("nosuch" in f["what"] for f in node["findings"])
