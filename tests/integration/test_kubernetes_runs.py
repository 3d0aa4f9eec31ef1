"""Whole runs on pods of a real API server and stand-in kubelets: faults done for real, the books checked after each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.kit import Bench
from tests.integration.leases import LeaseBench
from tests.support.kube import Cluster, why_not
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.system, pytest.mark.xdist_group("kubernetes"), pytest.mark.skipif(bool(why_not()), reason=why_not()),
]  # fmt: skip


class PodBench(LeaseBench):
    """A bench on Kubernetes, with pods of two GPUs each."""

    def __init__(self, bench: Bench, cluster: Cluster) -> None:
        super().__init__(bench, lease="kubernetes", image="rocm/pytorch", count="1-2")
        self.cluster = cluster

    def left(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.cluster.pods()]

    def patched(self, text: str) -> None:
        """Let commands of the bench run Python text when they start."""
        self.bench.site.append(self.bench.root / "site")
        self.bench.site[-1].mkdir()
        (self.bench.site[-1] / "sitecustomize.py").write_text(text)


@pytest.fixture
def pool(cluster: Cluster, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodBench]:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig()))
    yield PodBench(bench, cluster)
    bench.close()  # a run that goes on asks for more pods
    cluster.mend()


def test_a_run_takes_a_pod_and_deletes_it(pool: PodBench) -> None:
    n = pool.bench.shapes(groups=6)
    done = pool.bench.tune()
    assert done.code == 0, done.out + done.err
    pool.bench.check_books(tuned=n, failed={})
    wait_until(lambda: pool.left() == [], "no pod is left")


def test_a_pod_that_is_evicted_costs_nobody_anything(pool: PodBench) -> None:
    run = pool.at_work()
    (pod,) = pool.left()
    pool.fault(pod, "preempted")
    pool.cluster.fault("evict", pod)
    wait_until(pool.ends, "its end is noticed")
    pool.finish(run)
    assert not pool.ends()[0].charged


def test_a_node_that_dies_is_a_lost_node(pool: PodBench) -> None:
    pool.patched("from orchestrator.leases import kubernetes\nkubernetes.NOT_READY_S = 1.0\n")
    run = pool.at_work()
    (first,) = pool.expected()
    pool.fault(first.lease, "failed")
    pool.cluster.fault("kill", first.host)
    wait_until(pool.ends, "its death is noticed")
    wait_until(lambda: pool.over(run), "the run is over")
    pool.cluster.fault("revive", first.host)  # the pod of a dead node stays until it is back
    pool.finish(run)
    assert pool.ends()[0].charged


KILLED = """\
import os, signal
from kubernetes import client
create = client.CoreV1Api.create_namespaced_pod
def killed(*args, **options):
    made = create(*args, **options)
    if not options.get("dry_run"):
        os.kill(os.getpid(), signal.SIGKILL)
    return made
client.CoreV1Api.create_namespaced_pod = killed
"""


def test_a_controller_that_dies_between_asking_and_hearing_the_answer(pool: PodBench) -> None:
    """The pod is found by its labels: `resume` works on it, and no second one is requested."""
    pool.bench.shapes(4)
    pool.patched(KILLED)
    run = pool.bench.start("tune", *pool.bench.tune_args())
    assert run.wait(PATIENCE_S) == -9
    pool.bench.site.clear()
    (pod,) = pool.left()
    done = pool.bench.run("resume")
    assert done.code == 0, done.out + done.err
    assert [e.lease for e in pool.expected()] == [pod]
    pool.check()
