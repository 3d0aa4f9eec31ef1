"""Whole runs on pods of a real API server and stand-in kubelets: faults done for real, the books checked after each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.events import NodeTroubled
from tests.integration.kit import Bench
from tests.integration.leases import TROUBLE, LeaseBench
from tests.support.kube import Cluster, why_not
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.system,
    pytest.mark.xdist_group("kubernetes"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


class PodBench(LeaseBench):
    """A bench on Kubernetes, with pods of two GPUs each."""

    def __init__(self, bench: Bench, cluster: Cluster) -> None:
        super().__init__(bench, lease="kubernetes", image="rocm/pytorch", count="1-2")
        self.cluster = cluster

    def pods(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.cluster.pods()]

    def left(self) -> list[str]:
        return self.pods()


@pytest.fixture
def pool(cluster: Cluster, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodBench]:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig()))
    yield PodBench(bench, cluster)
    bench.close()  # a run that goes on asks for more pods
    cluster.quota()
    for node in cluster.nodes:
        cluster.fault("revive", node)
    for pod in cluster.pods():
        cluster.delete_pod(pod["metadata"]["name"])
    wait_until(lambda: not cluster.pods(), "no pod is left")
    wait_until(lambda: all(map(cluster.is_ready, cluster.nodes)), "the nodes are ready")


def patched(pool: PodBench, text: str) -> None:
    """Let commands of the bench run Python text when they start."""
    site = pool.bench.root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(text)
    pool.bench.site.append(site)


def test_a_run_takes_a_pod_and_deletes_it(pool: PodBench) -> None:
    n = pool.bench.shapes(groups=6)
    done = pool.bench.tune()
    assert done.code == 0, done.out + done.err
    pool.bench.check_books(tuned=n, failed={})
    wait_until(lambda: pool.pods() == [], "no pod is left")


@pytest.mark.parametrize(("how", "cause"), [("delete", "cancelled"), ("evict", "evicted")])
def test_a_pod_that_goes_costs_nobody_anything(pool: PodBench, how: str, cause: str) -> None:
    run = pool.at_work()
    (pod,) = pool.pods()
    pool.fault(pod, cause)
    if how == "delete":
        pool.cluster.delete_pod(pod)
    else:
        pool.cluster.fault("evict", pod)
    wait_until(pool.ends, "its end is noticed")
    pool.finish(run)
    assert not pool.ends()[0].charged


def test_a_node_that_dies_is_a_lost_node(pool: PodBench) -> None:
    patched(pool, "from orchestrator.leases import kubernetes\nkubernetes.NOT_READY_S = 1.0\n")
    run = pool.at_work()
    (first,) = pool.expected()
    pool.fault(first.lease, "node_failure")
    pool.cluster.fault("kill", first.host)
    wait_until(pool.ends, "its death is noticed")
    wait_until(lambda: pool.over(run), "the run is over")
    pool.cluster.fault("revive", first.host)  # the pod of a dead node stays until it is back
    pool.finish(run)
    assert pool.ends()[0].charged


def test_a_shape_that_kills_its_leases_fails_after_the_third(pool: PodBench) -> None:
    """Whenever it is under way its pod is out of memory: that is charged, as a lost node is."""
    pool.inventory(count="1")
    run = pool.at_work(3, 3, pool.bench.held(0, 1, until="never"), tuned=2)
    for n in range(3):
        wait_until(lambda n=n: pool.starts_of(1) > n, "it is under way")  # type: ignore[misc]
        pod = pool.expected()[-1].lease
        pool.fault(pod, "out_of_memory")
        pool.cluster.fault("oom", pod)
        wait_until(lambda: len(pool.ends()) == len(pool.faults), "its end is noticed")
    pool.finish(run, {"1x16x64": "kills_nodes"})
    assert all(e.charged for e in pool.ends())


def test_an_api_server_that_is_away_for_a_minute_stops_nothing(pool: PodBench) -> None:
    """A minute by the controller's own word; the workers go on without it, and what they did comes home."""
    # this cluster takes a node for gone after 8 s without a beat (usual: 40 to 50), an overloaded machine may be slower
    patched(pool, "from orchestrator.leases import kubernetes\nkubernetes.NOT_READY_S = 60.0\n")
    run = pool.at_work(6, 2, pool.bench.held(2, 4, until="now"))
    wait_until(lambda: pool.starts_of(3) and pool.starts_of(4), "both slots have work")
    pool.fault(pool.expected()[0].lease, TROUBLE)
    pool.cluster.stop_api()
    try:
        pool.bench.release("now")
        wait_until(lambda: pool.rows() == 4, "the workers go on without it")
        wait_until(lambda: "pool: the API server" in pool.printed(run), "it has been away for a minute")
        assert run.poll() is None
        assert pool.bench.tuned() == 2
    finally:
        pool.cluster.start_api()
    wait_until(lambda: "the scheduler answers again" in pool.printed(run), "it is back")
    pool.finish(run)
    assert len(pool.expected()) == 1, "the same pod worked on"


def test_an_exec_that_is_cut_begins_anew(pool: PodBench) -> None:
    run = pool.at_work()
    (pod,) = pool.pods()
    pool.fault(pod, TROUBLE)
    pool.cluster.fault("cut", pod)
    wait_until(lambda: pool.records(NodeTroubled), "it is noticed")
    pool.finish(run)
    assert len(pool.expected()) == 1, "the same pod worked on"


def test_an_exec_that_is_forbidden_for_a_while_is_tried_again(pool: PodBench) -> None:
    run = pool.at_work()
    (pod,) = pool.pods()
    pool.fault(pod, TROUBLE)
    pool.cluster.allow_exec(False)
    try:
        pool.cluster.fault("cut", pod)
        words = 'cannot get resource "pods/exec"'
        wait_until(lambda: words in pool.printed(run), "the API server is quoted")
    finally:
        pool.cluster.allow_exec(True)
    pool.finish(run)
    assert len(pool.expected()) == 1, "the same pod worked on"


def test_a_user_who_may_not_exec_is_told_before_anything_starts(
    pool: PodBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.bench.shapes(2)
    monkeypatch.setenv("KUBECONFIG", str(pool.cluster.kubeconfig("watcher")))
    done = pool.bench.tune()
    assert done.code == 3
    assert "you may not get pods/exec, create pods/exec in namespace tuning" in done.err
    assert pool.pods() == []


def test_a_quarantined_host_is_left_out_of_the_next_request(pool: PodBench) -> None:
    pool.inventory(count="1")
    pool.bench.shapes(4)
    run = pool.bench.start("tune", *pool.bench.tune_args([
        {"kind": "sick_canary", "match": {"node": "pool-1"}}, pool.bench.held(2, 4),
    ]))  # fmt: skip
    wait_until(lambda: pool.bench.tuned() >= 2 or run.poll() is not None, "another pod works")
    assert len(pool.expected()) == 2, pool.dump()
    first, second = pool.expected()
    assert first.host != second.host
    (spec,) = (p["spec"] for p in pool.cluster.pods() if p["metadata"]["name"] == second.lease)
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": [first.host]}]
    pool.finish(run)


def test_a_quota_that_is_reached_later_is_quoted_and_the_run_goes_on(pool: PodBench) -> None:
    pool.inventory(count="2")
    pool.cluster.quota(**{"requests.amd.com/gpu": "2"})
    run = pool.at_work()
    wait_until(lambda: "exceeded quota" in pool.printed(run), "the refusal is quoted")
    pool.finish(run)
    assert len(pool.expected()) == 1


def test_a_pod_that_stays_pending_is_quoted_and_waited_for(pool: PodBench) -> None:
    for node in pool.cluster.nodes:
        pool.cluster.hold(node)
    pool.inventory(count="1")
    pool.bench.shapes(2)
    run = pool.bench.start("tune", *pool.bench.tune_args())
    words = "2 Insufficient amd.com/gpu"
    wait_until(lambda: words in pool.bench.run("status").out or run.poll() is not None, "status quotes the scheduler")
    assert words in pool.bench.run("explain").out
    (queued,) = pool.bench.run("status", "--json").json()["nodes"]
    assert queued["state"] == "queued"
    for node in pool.cluster.nodes:
        pool.cluster.delete_pod(f"other-{node}")
    pool.finish(run)


def test_an_image_that_cannot_be_pulled_ends_with_the_kubelets_words(pool: PodBench) -> None:
    """After three pods; without the minute that each is given, and without that between requests."""
    patched(pool, "from orchestrator.leases import kubernetes\nkubernetes.PULL_S = 0.0\n")
    pool.bench.shapes(2)
    pool.inventory(count="1", image="rocm/pytorch:absent")
    done = pool.bench.tune()
    assert done.code == 3
    assert "pool: no more leases are requested: " in done.err
    assert "failed to pull image" in done.err or "Back-off pulling image" in done.err
    wait_until(lambda: pool.pods() == [], "no pod is left")


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
    patched(pool, KILLED)
    run = pool.bench.start("tune", *pool.bench.tune_args())
    assert run.wait(PATIENCE_S) == -9
    pool.bench.site.clear()
    (pod,) = pool.pods()
    done = pool.bench.run("resume")
    assert done.code == 0, done.out + done.err
    assert [e.lease for e in pool.expected()] == [pod]
    pool.check()


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
