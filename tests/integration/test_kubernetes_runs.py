"""Whole runs on pods of a real API server and stand-in kubelets: faults done for real, the books checked after each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.events import FailShape, Split
from tests.integration.kit import Bench
from tests.integration.leases import LeaseBench
from tests.support.kube import Cluster, why_not
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.system,
    pytest.mark.xdist_group("kubernetes"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("kube"), nodes=2, gpus=2) as cluster:
        yield cluster


class PodBench(LeaseBench):
    """A bench on Kubernetes, with pods of two GPUs each."""

    def __init__(self, bench: Bench, cluster: Cluster) -> None:
        super().__init__(bench, lease="kubernetes", image="rocm/pytorch", count="1-2")
        self.cluster = cluster

    def pods(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.cluster.pods()]


@pytest.fixture
def pool(cluster: Cluster, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodBench]:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig()))
    yield PodBench(bench, cluster)
    cluster.quota()
    for node in cluster.nodes:
        cluster.fault("revive", node)
    for pod in cluster.pods():
        cluster.delete_pod(pod["metadata"]["name"])
    wait_until(lambda: not cluster.pods(), "no pod is left")
    wait_until(lambda: all(map(cluster.is_ready, cluster.nodes)), "the nodes are ready")


def test_a_run_takes_a_pod_and_deletes_it(pool: PodBench) -> None:
    n = pool.bench.shapes(groups=6)
    done = pool.bench.tune()
    assert done.code == 0, done.out + done.err
    pool.bench.check_books(tuned=n, failed={})
    wait_until(lambda: pool.pods() == [], "no pod is left")


@pytest.mark.parametrize("how", ["delete", "evict"])
def test_a_pod_that_goes_costs_nobody_anything(pool: PodBench, how: str) -> None:
    run = pool.at_work()
    (pod,) = pool.pods()
    if how == "delete":
        pool.cluster.delete_pod(pod)
    else:
        pool.cluster.fault("evict", pod)
    wait_until(pool.ends, "its end is noticed")
    pool.finish(run)
    assert not pool.ends()[0].charged
    assert not pool.records(FailShape, Split), "nobody is suspected"
    wait_until(lambda: pool.pods() == [], "no pod is left")


def test_a_node_that_dies_is_a_lost_node(pool: PodBench) -> None:
    run = pool.at_work()
    pool.cluster.fault("kill", pool.expected()[0].host)
    wait_until(pool.ends, "its death is noticed")
    pool.finish(run)
    assert (pool.ends()[0].cause, pool.ends()[0].charged) == ("node_failure", True)


def test_an_api_server_that_is_away_for_a_while_stops_nothing(pool: PodBench) -> None:
    run = pool.at_work()
    pool.cluster.stop_api()
    pool.bench.release()
    try:
        wait_until(lambda: pool.rows() > 2, "the workers go on without it")
    finally:
        pool.cluster.start_api()
    pool.finish(run)
    wait_until(lambda: pool.pods() == [], "no pod is left")


def test_a_killed_controller_is_followed_by_one_that_takes_the_pods_over(pool: PodBench) -> None:
    run = pool.at_work()
    run.kill()
    run.wait()
    again = pool.bench.start("resume")
    pool.finish(again)
    assert len({e.lease for e in pool.expected()}) == 1, "the same pod worked on"
    wait_until(lambda: pool.pods() == [], "no pod is left")


def test_cancel_leaves_no_pod_of_a_dead_controller(pool: PodBench) -> None:
    run = pool.at_work()
    run.kill()
    run.wait()
    done = pool.bench.run("cancel")
    assert done.code == 0, done.out + done.err
    wait_until(lambda: pool.pods() == [], "no pod is left")


def test_what_can_never_start_ends_with_the_schedulers_words(pool: PodBench) -> None:
    pool.bench.shapes(groups=2)
    pool.inventory(namespace="nosuch")
    done = pool.bench.tune()
    assert done.code == 3
    assert "nosuch" in done.err
    pool.inventory()
    pool.cluster.quota(**{"requests.amd.com/gpu": "1"})
    done = pool.bench.tune()
    assert done.code == 3
    assert "exceeded quota" in done.err
