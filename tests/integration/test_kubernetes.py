"""Pods as leases of a real API server, scheduler and controller-manager; only the kubelets are stand-ins.

The user is one with exactly the rights of examples/kubernetes-role.yaml.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.engines import OK, UNUSABLE, WARNING
from orchestrator.errors import HostKeyError, InputError, TransportError, UnreachableError
from orchestrator.leases import holder
from orchestrator.leases import kubernetes as leases
from orchestrator.leases.base import EndCause, Lease, LeaseState
from orchestrator.leases.kubernetes import CONTAINER, PodRequest
from orchestrator.transport.pod import PodOpener, connect
from tests.support.kube import NAMESPACE, Cluster, why_not
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.system, pytest.mark.xdist_group("kubernetes"), pytest.mark.skipif(bool(why_not()), reason=why_not()),
]  # fmt: skip

RUNS = itertools.count(1)
Make = Callable[..., leases.KubernetesSource]


@pytest.fixture
def make(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Sources of a run of the test's own, as `tuner`; in the end there is no pod left, and the nodes are back."""
    run, sources = f"20260131-154500-{next(RUNS):04x}", []

    def make_source(config: Path | None = None, pool: str = "pool", **request: Any) -> leases.KubernetesSource:
        options = {key: request.pop(key) for key in ("context", "namespace") if key in request}
        monkeypatch.setenv("KUBECONFIG", str(config or cluster.kubeconfig()))
        settings = {"image": "rocm/pytorch", "gpus": 2, **request}
        sources.append(leases.KubernetesSource(run, pool, PodRequest(**settings), **options))
        return sources[-1]

    yield make_source
    for source in sources:
        source.close()
    cluster.quota()
    for node in cluster.nodes:
        cluster.fault("revive", node)
    for pod in cluster.pods():
        cluster.delete_pod(pod["metadata"]["name"])
    wait_until(lambda: not cluster.pods(), "no pod is left")
    wait_until(lambda: all(map(cluster.is_ready, cluster.nodes)), "the nodes are ready")


def ready(source: leases.KubernetesSource, n: int = 1) -> list[Lease]:
    """Wait for n leases that are ready."""

    def look() -> list[Lease]:
        found = [lease for lease in source.list() if lease.state is LeaseState.READY]
        return found if len(found) >= n else []

    return list(wait_until(look, f"{n} leases are ready"))


def end_of(source: leases.KubernetesSource, lease: Lease) -> Lease:
    """Wait for the end of a lease."""

    def look() -> Lease | None:
        return next((e for e in source.list() if e.id == lease.id and e.state is LeaseState.ENDED), None)

    found = wait_until(look, f"{lease.id} has ended")
    assert isinstance(found, Lease)
    return found


def echo(source: leases.KubernetesSource, lease: Lease) -> tuple[bytes, str]:
    """All that `echo in` in a lease prints, and how it ended."""
    channel = PodOpener("pool-1", source._api, NAMESPACE, lease.id, CONTAINER).start(
        "echo in", time.monotonic() + PATIENCE_S
    )
    out = bytearray()
    while more := channel.read(1 << 20):
        out += more
    channel.close()
    return bytes(out), channel.error()


ECHOED = (b"in\n", "ended with code 0")


# --- leases -----------------------------------------------------------------------------------------------------------


def test_two_leases_on_two_nodes_and_a_third_that_waits(make: Make, cluster: Cluster) -> None:
    source = make(time_s=600)
    source.ask(2)
    first = ready(source, 2)
    assert {lease.host for lease in first} == set(cluster.nodes)
    assert all(lease.ends_at is not None and lease.ends_at > time.time() for lease in first)
    source.ask(1)
    (third,) = (lease for lease in source.list() if lease.id not in {e.id for e in first})
    wait_until(lambda: [e for e in source.list() if e.id == third.id and "Insufficient amd.com/gpu" in e.why], "why")
    source.release([first[0], Lease("never-was", LeaseState.READY)])
    wait_until(lambda: first[0].id not in {e.id for e in source.list()}, "it is gone")
    assert {lease.host for lease in ready(source, 2)} == set(cluster.nodes)
    source.release(source.list())
    wait_until(lambda: not cluster.pods() and not source.list(), "nothing is left")


def test_a_host_to_avoid_gets_no_lease(make: Make) -> None:
    source = make()
    source.ask(1, avoid=["k1"])
    assert ready(source)[0].host == "k2"
    source.ask(1, avoid=["k1", "k2"])
    words = "didn't match node selector"
    wait_until(lambda: [e for e in source.list() if words in e.why or "affinity" in e.why], "no node is left")


def test_a_quota_is_quoted_before_and_after(make: Make, cluster: Cluster) -> None:
    cluster.quota(**{"requests.amd.com/gpu": "2"})
    source = make()
    assert [f.level for f in source.check()] == [OK]
    with pytest.raises(TransportError, match=r"exceeded quota: tests, requested: requests.amd.com/gpu=2"):
        source.ask(2)
    assert len(ready(source)) == 1
    finding = source.check()[-1]
    assert (finding.level, finding.about) == (UNUSABLE, "quota")
    assert "exceeded quota: tests" in str(finding)
    assert "fewer `gpus:`" in finding.way_out


def test_what_a_lease_left_is_in_its_log(make: Make) -> None:
    source = make()
    begin, end = holder.BEGIN, holder.END
    source._script = f"echo words; echo {begin}; head -c 3000000 /dev/zero | base64; echo {end}"
    source.ask(1)
    over = end_of(source, source.list()[0])
    assert over.cause is EndCause.RELEASED
    assert source.leftovers(over) == bytes(3_000_000)
    assert source.leftovers(Lease("never-was", LeaseState.ENDED)) is None
    source._script = "echo words"
    source.ask(1)
    nothing = end_of(source, next(e for e in source.list() if e.id != over.id))
    assert source.leftovers(nothing) is None
    with pytest.raises(UnreachableError, match='pods "never-was" not found'):
        echo(source, Lease("never-was", LeaseState.READY))


# --- the API server ---------------------------------------------------------------------------------------------------


def test_an_api_server_that_is_restarted_is_asked_again(make: Make, cluster: Cluster) -> None:
    source = make()
    source.ask(2)
    first, second = ready(source, 2)
    cluster.stop_api()

    def unreachable() -> bool:
        try:
            source.list()
        except UnreachableError as e:
            return "cannot be reached" in str(e)
        return False

    wait_until(unreachable, "the API server is missed")
    with pytest.raises(UnreachableError):
        source.ask(1)
    assert [f.level for f in source.check()] == [UNUSABLE]
    cluster.start_api()
    cluster.delete_pod(first.id)

    def deleted() -> bool:
        try:
            return first.id not in {e.id for e in source.list()}
        except UnreachableError:
            return False

    wait_until(deleted, "what happened since is seen")
    assert next(e for e in source.list() if e.id == second.id).state is LeaseState.READY


def test_a_certificate_of_another_authority_is_refused(make: Make, cluster: Cluster) -> None:
    source = make(cluster.kubeconfig(ca=cluster.wrong_ca))
    with pytest.raises(HostKeyError, match=r"not trusted.*certificate-authority"):
        source.list()
    with pytest.raises(HostKeyError):
        source.ask(1)
    (finding,) = source.check()
    assert finding.level == UNUSABLE
    assert "not trusted" in finding.what
    lease = Lease("any", LeaseState.READY)
    with pytest.raises(HostKeyError):
        echo(source, lease)
    assert not cluster.pods()


def test_a_verification_that_is_turned_off_is_warned_of(make: Make, cluster: Cluster) -> None:
    source = make(cluster.kubeconfig(insecure=True))
    assert [(f.level, f.about) for f in source.check()] == [(OK, "kubernetes"), (WARNING, "tls")]
    source.ask(1)
    assert echo(source, ready(source)[0]) == ECHOED


def test_a_user_with_a_certificate(make: Make, cluster: Cluster) -> None:
    source = make(cluster.kubeconfig(certificate=True))
    assert [f.level for f in source.check()] == [OK]
    source.ask(1)
    assert echo(source, ready(source)[0]) == ECHOED


def test_rights_that_are_missing_are_named(make: Make, cluster: Cluster) -> None:
    source = make(cluster.kubeconfig("watcher"))
    finding = source.check()[-1]
    assert (finding.level, finding.about) == (UNUSABLE, "permissions")
    assert "you may not get pods/exec, create pods/exec in namespace tuning" in finding.what
    assert "kubernetes-role.yaml" in finding.way_out
    source.ask(1)
    (lease,) = ready(source)
    with pytest.raises(TransportError, match='"watcher" cannot get resource "pods/exec"'):
        echo(source, lease)
    elsewhere = make(namespace="default")
    assert "create pods" in elsewhere.check()[-1].what
    with pytest.raises(TransportError, match="forbidden"):
        elsewhere.list()


def test_a_namespace_that_does_not_exist_and_a_pod_that_cannot_be(make: Make, cluster: Cluster) -> None:
    finding = make(cluster.kubeconfig("admin"), namespace="nowhere").check()[-1]
    assert (finding.level, finding.about) == (UNUSABLE, "namespace")
    assert "kubectl create namespace" in finding.way_out
    finding = make(template={"spec": {"priorityClassName": "no-such"}}).check()[-1]
    assert (finding.level, finding.about) == (UNUSABLE, "pod")
    assert "no-such" in finding.what


def test_a_controller_in_a_pod_uses_its_service_account(
    make: Make, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes import client
    from kubernetes.config import incluster_config

    source = make()  # for the order of the clean-up
    for name, value in cluster.service_account(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    api, namespace = connect(None)
    assert (api.configuration.host, namespace) == (cluster.server, NAMESPACE)
    monkeypatch.setattr(source, "_api", api)
    monkeypatch.setattr(source, "_core", client.CoreV1Api(api))
    assert [f.level for f in source.check()] == [OK]


def test_a_kubeconfig_that_cannot_be_used_is_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig()))
    with pytest.raises(InputError, match=r"cannot be used \(.*lad.*`context:`"):
        connect("lad")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"none cannot be used.*set KUBECONFIG"):
        connect(None)
    for text in ("contexts: [", "contexts: 5\n", "apiVersion: v1\n"):
        (tmp_path / "broken").write_text(text)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))
        with pytest.raises(InputError, match=r"broken cannot be used"):
            connect(None)
