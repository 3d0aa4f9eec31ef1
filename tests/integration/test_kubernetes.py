"""Pods as leases of a real API server, scheduler and controller-manager; only the kubelets are stand-ins.

The user is one with exactly the rights of examples/kubernetes-role.yaml.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.engines import OK, UNUSABLE, WARNING
from orchestrator.errors import HostKeyError, TransportError, UnreachableError
from orchestrator.inventory.model import Node
from orchestrator.leases.holder import BEGIN, END
from orchestrator.leases.kubernetes import CONTAINER, KubernetesSource
from orchestrator.leases.lease import EndCause, Lease, LeaseState
from orchestrator.transport import pod
from orchestrator.transport.pod import PodOpener
from tests.support.kube import NAMESPACE, Cluster, why_not
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.system, pytest.mark.xdist_group("kubernetes"), pytest.mark.skipif(bool(why_not()), reason=why_not()),
]  # fmt: skip

Make = Callable[..., KubernetesSource]


@pytest.fixture
def make(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Sources of a run of the test's own, as `tuner`; in the end there is no pod left, and the nodes are back."""
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.mend)

        def make_source(config: Path | None = None, namespace: str | None = None, **request: Any) -> KubernetesSource:
            monkeypatch.setenv("KUBECONFIG", str(config or cluster.kubeconfig()))
            asked = {"name": "pool", "lease": "kubernetes", "image": "rocm/pytorch", "gpus": 2, **request}
            source = KubernetesSource(tmp_path.name, Node.model_validate({**asked, "namespace": namespace}))
            return stack.enter_context(contextlib.closing(source))

        yield make_source


def ready(source: KubernetesSource, n: int = 1) -> list[Lease]:
    """Wait for n leases that are ready."""

    def look() -> list[Lease]:
        return [lease for lease in source.list() if lease.state is LeaseState.READY]

    wait_until(lambda: len(look()) >= n, f"{n} leases are ready")
    return look()


def says(source: KubernetesSource, *words: str) -> Lease:
    """Wait for a lease of which one of the words is said."""
    found = wait_until(lambda: [x for x in source.list() if any(w in x.why for w in words)], words[0])
    assert isinstance(found[0], Lease)
    return found[0]


def opener(source: KubernetesSource, lease: Lease) -> PodOpener:
    return PodOpener("pool-1", source._api, NAMESPACE, lease.id, CONTAINER)


def echo(source: KubernetesSource, lease: Lease) -> tuple[bytes, str]:
    """All that `echo in` in a lease prints, and how it ended."""
    channel = opener(source, lease).start("echo in", time.monotonic() + PATIENCE_S)
    out = bytearray()
    while more := channel.read(1 << 20):
        out += more
    channel.close()
    return bytes(out), channel.error()


def test_leases_are_given_by_the_scheduler_and_given_back(make: Make, cluster: Cluster) -> None:
    source = make(time="10m")
    source.ask(1, avoid=["k1"])
    assert ready(source)[0].host == "k2"
    source.ask(1)
    first = ready(source, 2)
    assert {lease.host for lease in first} == set(cluster.nodes)
    assert all(lease.ends_at is not None and lease.ends_at > time.time() for lease in first)
    source.ask(1)
    third = says(source, "Insufficient amd.com/gpu")
    source.ask(1, avoid=["k1", "k2"])
    says(source, "didn't match node selector", "affinity")
    source.release([first[0], Lease("never-was", LeaseState.READY)])
    wait_until(lambda: third.id in {e.id for e in ready(source)}, "the third has the place of the first")
    source.release(source.list())
    wait_until(lambda: not cluster.pods() and not source.list(), "nothing is left")


def test_what_a_lease_left_is_in_its_log(make: Make) -> None:
    source = make()
    begin, end = BEGIN, END
    source._script = f"echo words; echo {begin}; head -c 3000000 /dev/zero | base64; echo {end}"
    source.ask(1)
    over = says(source, "Completed")
    assert (over.state, over.cause) == (LeaseState.ENDED, EndCause.RELEASED)
    assert source.leftovers(over) == bytes(3_000_000)
    assert source.leftovers(Lease("never-was", LeaseState.ENDED)) is None
    with pytest.raises(UnreachableError, match='pods "never-was" not found'):
        echo(source, Lease("never-was", LeaseState.READY))


def test_a_stream_on_which_nothing_comes_for_a_minute_ends(
    make: Make, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make()
    source.ask(1)
    (lease,) = ready(source)
    channel = opener(source, lease).start("echo up; cat", time.monotonic() + PATIENCE_S)
    assert channel.read(10) == b"up\n"
    cluster.fault("freeze", lease.id)
    monkeypatch.setattr(pod, "SILENCE_S", 0.0)
    assert channel.read(10) == b""
    assert "broke (nothing was heard for" in channel.error()


def test_an_api_server_that_is_restarted_is_asked_again(make: Make, cluster: Cluster) -> None:
    source = make()
    source.ask(2)
    first, second = ready(source, 2)
    cluster.stop_api()
    with pytest.raises(UnreachableError, match=r"cannot be reached \(Connection refused"):
        source.list()
    with pytest.raises(UnreachableError):
        source.ask(1)
    assert [f.level for f in source.check()] == [UNUSABLE]
    cluster.start_api()
    cluster.delete_pod(first.id)
    wait_until(lambda: [x.id for x in source.list()] == [second.id], "what happened since is seen")
    assert ready(source) == [second]


def test_a_certificate_of_another_authority_is_refused(make: Make, cluster: Cluster) -> None:
    source = make(cluster.kubeconfig(ca=cluster.wrong_ca))
    for call in (source.list, lambda: source.ask(1), lambda: echo(source, Lease("any", LeaseState.READY))):
        with pytest.raises(HostKeyError, match=r"not trusted.*certificate-authority"):
            call()
    (finding,) = source.check()
    assert finding.level == UNUSABLE
    assert "not trusted" in finding.what
    assert not cluster.pods()


def test_a_verification_that_is_turned_off_is_warned_of(make: Make, cluster: Cluster) -> None:
    source = make(cluster.kubeconfig(insecure=True))
    assert [(f.level, f.about) for f in source.check()] == [(OK, "kubernetes"), (WARNING, "tls")]
    source.ask(1)
    assert echo(source, ready(source)[0]) == (b"in\n", "ended with code 0")


def test_what_the_user_may_not_do_and_what_cannot_be_is_named(make: Make, cluster: Cluster) -> None:
    cluster.quota(**{"requests.amd.com/gpu": "2"})
    source = make()
    assert [f.level for f in source.check()] == [OK]
    with pytest.raises(TransportError, match=r"exceeded quota: tests, requested: requests.amd.com/gpu=2"):
        source.ask(2)
    elsewhere = make(namespace="default")
    with pytest.raises(TransportError, match="forbidden"):
        elsewhere.list()
    admin, odd = cluster.kubeconfig("admin"), {"spec": {"priorityClassName": "no-such"}}
    for bad, about, words in (
        (source, "quota", "fewer `gpus:`"),
        (elsewhere, "permissions", "you may not get pods, list pods"),
        (elsewhere, "permissions", "kubernetes-role.yaml"),
        (make(admin, namespace="nowhere"), "namespace", "kubectl create namespace"),
        (make(pod=odd), "pod", "no-such"),
    ):
        finding = bad.check()[-1]
        assert (finding.level, finding.about) == (UNUSABLE, about)
        assert words in str(finding)
