"""Whole runs on leases of a real Slurm: faults done for real, and the books checked after each."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.integration.kit import Bench
from tests.integration.leases import LeaseBench
from tests.integration.slurm import PARTITION, URGENT, SlurmCluster
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm")]


class SlurmBench(LeaseBench):
    """A bench on Slurm, with leases of two GPUs each."""

    def __init__(self, bench: Bench, cluster: SlurmCluster) -> None:
        super().__init__(bench, lease="slurm", partition=PARTITION, count="1-2")
        self.cluster = cluster

    def jobs(self) -> list[str]:
        """Jobs that wait or run, once none is completing."""
        wait_until(lambda: "COMPLETING" not in self.cluster.jobs(), "what was cancelled is gone")
        return self.cluster.jobs().splitlines()

    def left(self) -> list[str]:
        return self.jobs()

    def running(self) -> list[str]:
        """Ids of the leases that run."""
        return [line.split()[0] for line in self.jobs() if " RUNNING " in line]

    def fill(self) -> str:
        """A job of higher priority that takes every node, and whatever runs there."""
        words = ("sbatch", "--parsable", "-p", URGENT, "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600")
        return self.cluster.run(*words).stdout.strip()


@pytest.fixture
def pool(slurm: SlurmCluster, bench: Bench) -> SlurmBench:
    return SlurmBench(bench, slurm)


def test_a_run_takes_a_lease_and_gives_it_back(pool: SlurmBench) -> None:
    n = pool.bench.shapes(groups=6)
    done = pool.bench.tune()
    assert done.code == 0, done.out + done.err
    pool.bench.check_books(tuned=n, failed={})
    assert pool.jobs() == []
    assert pool.bench.processes() == []
    checked = pool.bench.run_plain("nodes", "check", "-i", str(pool.bench.inventory), "--lease", "--json")
    of_pool, machine = checked.json()["nodes"]
    assert (checked.code, of_pool["name"], machine["name"]) == (0, "pool", "pool"), checked.err
    assert machine["facts"] != of_pool["facts"], "the machine itself was looked at"
    assert pool.jobs() == []
    pool.inventory(partition="nosuch")
    refused = pool.bench.tune()
    assert refused.code == 3
    assert "nosuch" in refused.err


def test_a_lease_that_is_preempted_comes_back_as_another(pool: SlurmBench) -> None:
    run = pool.at_work()
    pool.fault(pool.expected()[0].lease, "preempted")
    urgent = pool.fill()
    wait_until(lambda: pool.ends(), "the lease makes way")
    pool.cluster.run("scancel", urgent)
    pool.finish(run)
    assert not pool.ends()[0].charged


def test_a_machine_that_dies_is_a_lost_node(pool: SlurmBench) -> None:
    run = pool.at_work()
    (first,) = pool.expected()
    pool.fault(first.lease, "failed")
    pool.cluster.kill_node(pool.cluster.node(first.host))
    wait_until(lambda: pool.ends(), "its death is noticed")
    pool.finish(run)
    assert pool.ends()[0].charged


def test_a_killed_controller_is_followed_by_one_that_takes_the_lease_over(pool: SlurmBench) -> None:
    """Killed between asking for a lease and hearing the answer, and once more at work: the third one finishes."""
    pool.bench.shapes(groups=6)
    real = shutil.which("sbatch")
    fake = pool.bench.root / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\n{real} "$@"\ncase "$*" in *--test-only*) ;; *) kill -9 $PPID ;; esac\n')
    fake.chmod(0o755)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{fake.parent}:{path}"
    try:
        run = pool.bench.start("tune", *pool.bench.tune_args([pool.bench.held(2)]))
        run.wait(PATIENCE_S)
    finally:
        os.environ["PATH"] = path
    assert len(pool.jobs()) == 1
    second = pool.bench.start("resume")
    wait_until(lambda: pool.bench.tuned() >= 2, "it works on the lease that the first one asked for")
    second.kill()
    second.wait()
    again = pool.bench.start("resume")
    pool.finish(again)
    assert len({e.lease for e in pool.expected()}) == 1, "the same lease worked on"
    assert pool.jobs() == []
