"""Whole runs on leases of a real Slurm, and of a real Kubernetes API server with stand-in kubelets.

Faults are done for real, and the books are checked after each.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import ClassVar

import pytest

from tests.integration.leases import LeaseBench
from tests.integration.slurm import PARTITION, SlurmCluster, missing
from tests.kits.fleet import Bench
from tests.support.files import write_program
from tests.support.kube import Cluster, why_not
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.system


class RunBench(LeaseBench):
    """Causes faults of a scheduler. `patch`: changes that are undone before the test goes on."""

    cluster: SlurmCluster | Cluster
    wrong: ClassVar[dict[str, str]]
    """Options that the scheduler refuses."""

    def __init__(self, bench: Bench, patch: pytest.MonkeyPatch, **options: str) -> None:
        super().__init__(bench, count="1-2", **options)
        self.patch = patch

    def preempt(self, lease: str) -> None: ...

    def kill_host(self, host: str) -> None: ...

    def impatient(self) -> None:
        """Let the runs give up a dead host soon."""

    def host_is_back(self, host: str) -> None: ...

    def killed_when_asking(self) -> None:
        """Let a controller be killed when it has asked for a lease and not heard the answer."""


class SlurmBench(RunBench):
    """A bench on Slurm, with leases of two GPUs each."""

    cluster: SlurmCluster
    wrong: ClassVar[dict[str, str]] = {"partition": "nosuch"}

    def __init__(self, bench: Bench, patch: pytest.MonkeyPatch, cluster: SlurmCluster) -> None:
        super().__init__(bench, patch, lease="slurm", partition=PARTITION)
        self.cluster = cluster

    def left(self) -> list[str]:
        wait_until(lambda: "COMPLETING" not in self.cluster.jobs(), "the cancelled jobs are gone")
        return [line.split()[0] for line in self.cluster.jobs().splitlines()]

    def preempt(self, lease: str) -> None:
        urgent = self.cluster.fill()
        wait_until(self.ends, "the lease makes way")
        self.cluster.run("scancel", urgent)

    def kill_host(self, host: str) -> None:
        self.cluster.kill_node(self.cluster.node(host))

    def killed_when_asking(self) -> None:
        real = shutil.which("sbatch")
        text = f'#!/bin/sh\n{real} "$@"\ncase "$*" in *--test-only*) ;; *) kill -9 $PPID ;; esac\n'
        fake = write_program(self.bench.root / "bin" / "sbatch", text)
        self.patch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")


class PodBench(RunBench):
    """A bench on Kubernetes, with pods of two GPUs each."""

    cluster: Cluster
    wrong: ClassVar[dict[str, str]] = {"namespace": "nowhere"}

    def __init__(self, bench: Bench, patch: pytest.MonkeyPatch, cluster: Cluster) -> None:
        super().__init__(bench, patch, lease="kubernetes", image="rocm/pytorch")
        self.cluster = cluster

    def _patched(self, text: str) -> None:
        """Let commands of the bench run Python text when they start."""
        site = self.bench.root / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(text)
        self.patch.setattr(self.bench, "site", [site])

    def left(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.cluster.pods()]

    def preempt(self, lease: str) -> None:
        self.cluster.fault("evict", lease)

    def kill_host(self, host: str) -> None:
        self.cluster.fault("kill", host)

    def impatient(self) -> None:
        self._patched("from orchestrator.leases import kubernetes\nkubernetes.NOT_READY_S = 1.0\n")

    def host_is_back(self, host: str) -> None:
        """The pod of a dead node stays until it is back."""
        self.cluster.fault("revive", host)

    def killed_when_asking(self) -> None:
        self._patched("""\
import os, signal
from kubernetes import client
create = client.CoreV1Api.create_namespaced_pod
def killed(*args, **options):
    made = create(*args, **options)
    if not options.get("dry_run"):
        os.kill(os.getpid(), signal.SIGKILL)
    return made
client.CoreV1Api.create_namespaced_pod = killed
""")


def _param(name: str, group: str, why: str) -> object:
    return pytest.param(name, marks=[pytest.mark.xdist_group(group), pytest.mark.skipif(bool(why), reason=why)])


@pytest.fixture(params=[_param("slurm", "slurm", missing()), _param("cluster", "kubernetes", why_not())])
def pool(request: pytest.FixtureRequest, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunBench]:
    cluster = request.getfixturevalue(request.param)
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(cluster, Cluster):
            monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig()))
            yield PodBench(bench, patch, cluster)
        else:
            yield SlurmBench(bench, patch, cluster)
        bench.close()  # a run that goes on asks for more leases
        cluster.mend()


def test_a_run_takes_a_lease_and_gives_it_back(pool: RunBench) -> None:
    n = pool.bench.shapes(groups=6)
    pool.bench.tune().ok()
    pool.bench.check_books(tuned=n, failed={})
    wait_until(lambda: not pool.left(), "nothing is left in the queue")
    assert pool.bench.processes() == []
    home = pool.bench.root / "home"
    home.mkdir()
    pool.patch.setenv("HOME", str(home))
    asked = pool.bench.run_plain("nodes", "check", "-i", pool.bench.inventory)
    assert "\npool: " in asked.out, "what the scheduler would do"
    checked = pool.bench.run_plain("nodes", "check", "-i", pool.bench.inventory, "--lease", "--json")
    of_pool, machine = checked.json()["nodes"]
    assert (checked.code, of_pool["name"], machine["name"]) == (0, "pool", "pool"), checked.err
    assert machine["facts"] != of_pool["facts"], "the machine itself was looked at"
    wait_until(lambda: not pool.left(), "nothing is left in the queue")
    assert not (home / ".gemmfleet").exists(), "a check changes nothing where sbatch runs"
    pool.inventory(**pool.wrong)
    refused = pool.bench.tune()
    assert refused.code == 3
    assert all(word in refused.err for word in pool.wrong.values()), refused.err


def test_a_lease_that_is_preempted_comes_back_as_another(pool: RunBench) -> None:
    run = pool.at_work()
    (first,) = pool.expected()
    pool.fault(first.lease, "preempted")
    pool.preempt(first.lease)
    wait_until(pool.ends, "its end is noticed")
    pool.finish(run)
    assert not pool.ends()[0].charged


def test_a_machine_that_dies_is_a_lost_node(pool: RunBench) -> None:
    pool.impatient()
    run = pool.at_work()
    (first,) = pool.expected()
    pool.fault(first.lease, "failed")
    pool.kill_host(first.host)
    wait_until(pool.ends, "its death is noticed")
    wait_until(lambda: pool.over(run), "the run is over")
    pool.host_is_back(first.host)
    pool.finish(run)
    assert pool.ends()[0].charged


def test_a_killed_controller_is_followed_by_one_that_takes_the_lease_over(pool: RunBench) -> None:
    """Killed between asking for a lease and hearing the answer, and once more at work: the third one finishes."""
    pool.bench.shapes(groups=6)
    pool.killed_when_asking()
    run = pool.bench.start("tune", *pool.bench.tune_args([pool.bench.held(2)]))
    assert run.wait(PATIENCE_S) == -9
    pool.patch.undo()
    assert len(pool.left()) == 1
    second = pool.bench.start("resume")
    wait_until(lambda: pool.bench.tuned() >= 2, "it works on the lease that the first one asked for")
    second.kill()
    second.wait()
    again = pool.bench.start("resume")
    pool.finish(again)
    assert len({e.lease for e in pool.expected()}) == 1, "the same lease worked on"
