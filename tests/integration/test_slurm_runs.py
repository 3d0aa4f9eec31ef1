"""Whole runs on leases of a real Slurm: faults done for real, and the books checked after each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from orchestrator.events import AttemptStarted, FailShape, LeaseEnded, NodeTroubled, Send, Split
from tests.integration.kit import Bench
from tests.integration.leases import TROUBLE, LeaseBench
from tests.integration.slurm import PARTITION, URGENT, SlurmCluster
from tests.integration.sshd import NO_BASHRC, Sshd, light_fleet
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


def test_a_lease_that_is_cancelled_costs_nobody_anything(pool: SlurmBench) -> None:
    pool.inventory(count="2")
    run = pool.at_work(12, 4)
    wait_until(lambda: len(pool.running()) == 2 and len(pool.expected()) == 2, "both leases work")
    gone = pool.running()[0]
    pool.fault(gone, "cancelled")
    pool.cluster.run("scancel", gone)
    wait_until(lambda: pool.records(LeaseEnded), "its end is noticed")
    pool.finish(run)
    assert not pool.ends()[0].charged


def test_a_lease_that_is_preempted_comes_back_as_another(pool: SlurmBench) -> None:
    run = pool.at_work()
    pool.fault(pool.expected()[0].lease, "preempted")
    urgent = pool.fill()
    wait_until(lambda: pool.records(LeaseEnded), "the lease makes way")
    pool.cluster.run("scancel", urgent)
    pool.finish(run)
    assert not pool.ends()[0].charged


def test_a_killed_controller_is_followed_by_one_that_takes_the_leases_over(pool: SlurmBench) -> None:
    run = pool.at_work()
    run.kill()
    run.wait()
    before = pool.running()
    assert before
    again = pool.bench.start("resume")
    pool.finish(again)
    leases = {e.lease for e in pool.expected()}
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
    wait_until(lambda: "queued" in pool.bench.run("status").out, "status shows it")
    (queued,) = pool.bench.run("status", "--json").json()["nodes"]
    assert queued["state"] == "queued"
    assert "pool pool: 1 lease is queued: " in pool.bench.run("explain").out
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


def test_check_takes_a_lease_only_on_request(pool: SlurmBench) -> None:
    done = pool.bench.run_plain("nodes", "check", "-i", str(pool.bench.inventory), "--lease", "--json")
    of_pool, machine = done.json()["nodes"]
    assert (done.code, of_pool["name"], machine["name"]) == (0, "pool", "pool"), done.err
    assert machine["facts"] != of_pool["facts"], "the machine itself was looked at"
    assert pool.jobs() == []


def test_two_leases_on_one_machine(pool: SlurmBench) -> None:
    pool.inventory(count="2", gpus="1", extra='["--nodelist=g1"]')
    n = pool.bench.shapes(groups=8)
    done = pool.bench.tune(seconds=0.5)
    assert done.code == 0, done.out + done.err
    pool.bench.check_books(tuned=n, failed={})
    places = [(e.host, e.gpus) for e in pool.expected()]
    assert sorted(places) == [("g1", ("0",)), ("g1", ("1",))]


def test_rows_that_were_measured_without_a_controller_outlive_the_lease(pool: SlurmBench) -> None:
    """The controller is killed, the workers do what they have, the lease is cancelled: `resume` loses no row."""
    n = pool.bench.shapes(groups=4)
    run = pool.bench.start("tune", *pool.bench.tune_args([pool.bench.held(0, 4)]))
    wait_until(lambda: len(pool.records(AttemptStarted)) == 2, "both slots work")
    wait_until(lambda: pool.delivered() == 4, "everything was sent")
    run.kill()
    run.wait()
    (lease,) = pool.running()
    wait_until(lambda: pool.over(run) and pool.rows() == n, "the workers did all of it")
    assert pool.bench.tuned() == 0
    pool.cluster.run("scancel", lease)
    wait_until(lambda: pool.jobs() == [], "the lease is over")
    done = pool.bench.run("resume")
    assert done.code == 0, done.out + done.err
    pool.bench.check_books(tuned=n, failed={})
    assert len(pool.records(Send)) == 4, "nothing was measured twice"
    assert pool.jobs() == []


def test_cancel_without_a_controller_reads_what_was_measured(pool: SlurmBench) -> None:
    n = pool.bench.shapes(groups=4)
    run = pool.bench.start("tune", *pool.bench.tune_args([pool.bench.held(0, 4)]))
    wait_until(lambda: len(pool.records(AttemptStarted)) == 2, "both slots work")
    wait_until(lambda: pool.delivered() == 4, "everything was sent")
    run.kill()
    run.wait()
    wait_until(lambda: pool.over(run) and pool.rows() == n, "the workers did all of it")
    done = pool.bench.run("cancel")
    assert done.code == 0, done.out + done.err
    assert pool.bench.tuned() == n
    assert pool.jobs() == []


def test_the_time_limit_in_the_middle_of_a_shape(pool: SlurmBench) -> None:
    pool.inventory(time="1m", count="1")
    pool.bench.shapes(groups=4)
    run = pool.bench.start("tune", *pool.bench.tune_args([pool.bench.held(2, 4)]))
    wait_until(lambda: pool.records(LeaseEnded), "its time is up")
    wait_until(lambda: pool.over(run), "the run is over")
    assert run.returncode == 0
    pool.bench.check_books(tuned=pool.listed, failed={})
    assert pool.ends()[0].cause == "time_limit"
    assert not pool.records(FailShape, Split), "nobody is suspected"


def test_a_machine_that_dies_is_a_lost_node(pool: SlurmBench) -> None:
    run = pool.at_work()
    (first,) = pool.expected()
    pool.fault(first.lease, "node_failure")
    pool.cluster.kill_node(pool.cluster.node(first.host))
    wait_until(lambda: pool.records(LeaseEnded), "its death is noticed")
    pool.finish(run)
    assert pool.ends()[0].charged


def test_a_slurmd_that_dies_is_a_lost_node_though_its_workers_live(pool: SlurmBench) -> None:
    """They go on until slurmd is back, and nobody listens to them."""
    run = pool.at_work()
    (first,) = pool.expected()
    pool.fault(first.lease, "node_failure")
    pool.cluster.kill_slurmd(pool.cluster.node(first.host))
    wait_until(lambda: pool.records(LeaseEnded), "the lease is over for Slurm")
    wait_until(lambda: len(pool.expected()) == 2, "another works")
    pool.cluster.start_node(pool.cluster.node(first.host))
    pool.finish(run)
    assert pool.ends()[0].charged


def test_a_drained_node_finishes_what_it_has_and_gets_no_other_lease(pool: SlurmBench) -> None:
    run = pool.at_work()
    (first,) = pool.expected()
    pool.cluster.run("scontrol", "update", f"NodeName={first.host}", "State=DRAIN", "Reason=test")
    assert pool.running() == [first.lease]
    pool.fault(first.lease, "cancelled")
    pool.cluster.run("scancel", first.lease)
    wait_until(lambda: len(pool.expected()) == 2, "another lease works")
    assert pool.expected()[1].host != first.host
    pool.finish(run)


def test_a_scheduler_that_is_away_for_a_minute_stops_nothing(pool: SlurmBench) -> None:
    """A minute by the controller's own word; the nodes work on meanwhile."""
    run = pool.at_work(6, 2, pool.bench.held(2, 4, until="now"))
    pool.cluster.stop_controller()
    pool.bench.release("now")
    wait_until(lambda: pool.bench.tuned() == 4, "the work goes on")
    wait_until(lambda: "the scheduler does not answer" in pool.printed(run), "it has been away for a minute")
    assert run.poll() is None
    pool.cluster.start_controller()
    wait_until(lambda: "the scheduler answers again" in pool.printed(run), "it is back")
    assert len(pool.running()) == 1
    pool.finish(run)
    assert len(pool.expected()) == 1, "the same lease worked on"


def test_a_scheduler_that_is_away_for_a_while_stops_nothing(pool: SlurmBench) -> None:
    run = pool.at_work()
    pool.cluster.stop_controller()
    wait_until(lambda: pool.over(run) or pool.bench.tuned() == pool.listed, "the work goes on")
    pool.cluster.start_controller()
    pool.finish(run)
    wait_until(lambda: pool.jobs() == [], "nothing is left in the queue")


def test_a_job_that_is_requeued_is_another_lease(pool: SlurmBench) -> None:
    pool.inventory(count="1", extra='["--requeue"]')
    run = pool.at_work()
    (job,) = pool.running()
    pool.fault(job, "preempted")
    pool.cluster.run("scontrol", "requeue", job)
    wait_until(lambda: pool.records(LeaseEnded), "the lease is over")

    pool.cluster.begin_soon(job)
    pool.finish(run)


def test_a_stream_whose_srun_is_killed_begins_anew(pool: SlurmBench) -> None:
    run = pool.at_work()
    pool.fault(pool.expected()[0].lease, TROUBLE)
    steps = subprocess.run(["pkill", "-KILL", "-P", str(run.pid), "srun"], check=False)
    assert steps.returncode == 0, "there were steps to kill"
    wait_until(lambda: pool.records(NodeTroubled), "it is noticed")
    pool.finish(run)
    assert len(pool.expected()) == 1, "the lease worked on"


def test_a_controller_that_dies_between_asking_and_hearing_the_answer(pool: SlurmBench) -> None:
    """The lease is found by its name: `resume` works on it, and no second one is requested."""
    n = pool.bench.shapes(groups=4)
    real = shutil.which("sbatch")
    fake = pool.bench.root / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\n{real} "$@"\ncase "$*" in *--test-only*) ;; *) kill -9 $PPID ;; esac\n')
    fake.chmod(0o755)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{fake.parent}:{path}"
    try:
        run = pool.bench.start("tune", *pool.bench.tune_args())
        run.wait(PATIENCE_S)
    finally:
        os.environ["PATH"] = path
    assert len(pool.jobs()) == 1
    done = pool.bench.run("resume")
    assert done.code == 0, done.out + done.err
    pool.bench.check_books(tuned=n, failed={})
    assert len({e.lease for e in pool.expected()}) == 1
    assert pool.jobs() == []


@pytest.fixture
def login(pool: SlurmBench) -> Iterator[Sshd]:
    """A login node through which the pool's commands go."""
    environment = " ".join(f"{k}={v}" for k, v in pool.cluster.environment.items())
    with light_fleet("root") as fleet:
        login = fleet.add(f"SetEnv {environment} {NO_BASHRC}")
        pool.hosts = f"hosts:\n  login1: {{host: {login.address}, port: {login.port}, ssh_config: {fleet.config}}}\n"
        pool.inventory(via="login1")
        yield login


@pytest.mark.parametrize("seconds", [0, 30])
def test_a_login_node_that_is_cut_off(pool: SlurmBench, login: Sshd, seconds: float) -> None:
    """Its connections break, or all of it is silent for half a minute."""
    run = pool.at_work()
    lease, began = pool.expected()[0].lease, time.monotonic()
    pool.fault(lease, TROUBLE)
    if seconds:
        login.pause()
        wait_until(lambda: time.monotonic() - began > seconds, "it was cut off for so long")
        login.resume()
    else:
        login.drop()
    wait_until(lambda: pool.records(NodeTroubled), "it is noticed")
    pool.finish(run)
    assert len(pool.expected()) == 1, "the lease worked on"


def test_a_shape_longer_than_its_leases_fails_alone(pool: SlurmBench) -> None:
    """Whenever it is under way its lease is cancelled: three times, then alone on a fresh lease."""
    pool.inventory(count="1")
    run = pool.at_work(3, 3, pool.bench.held(0, 1, until="never"), tuned=2)
    for n in range(4):
        wait_until(lambda n=n: pool.starts_of(1) > n, "it is under way")  # type: ignore[misc]
        (lease,) = pool.running()
        pool.fault(lease, "cancelled")
        pool.cluster.run("scancel", lease)
        wait_until(lambda: len(pool.ends()) == len(pool.faults), "its end is noticed")
    pool.finish(run, {"1x16x64": "outlives_lease"})
    assert not any(e.charged for e in pool.ends())


def test_a_quarantined_host_is_left_out_of_the_next_request(pool: SlurmBench) -> None:
    pool.inventory(count="1")
    pool.bench.shapes(4)
    done = pool.bench.tune(faults=[{"kind": "sick_canary", "match": {"node": "pool-1"}}])
    assert done.code == 0, done.out + done.err
    first, second = pool.expected()
    assert first.host != second.host
    assert f"ExcNodeList={first.host}" in pool.cluster.run("scontrol", "show", "job", second.lease).stdout.split()
    assert [(e.node, e.cause) for e in pool.ends()] == [("pool-1", "released")]
    pool.check()
