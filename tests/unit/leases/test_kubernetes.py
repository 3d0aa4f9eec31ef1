"""Pods that are requested, listed, and the meaning of their states, which are of a real API server, shortened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError, LoginError, TransportError, UnreachableError
from orchestrator.inventory.model import Node
from orchestrator.leases.kubernetes import (
    CONTAINER,
    NOT_READY_S,
    PULL_S,
    lease_of,
    manifest,
    new_name,
    template_faults,
    trouble,
)  # fmt: skip
from orchestrator.leases.lease import EndCause, LeaseState
from orchestrator.transport.pod import connect, refusal

pytest.importorskip("kubernetes")

POOL = Node(name="pool", lease="kubernetes", image="rocm/pytorch:latest", gpus=8, time="4h")
QUEUED, READY, ENDED = LeaseState
Json = dict[str, Any]


def made(**template: Any) -> Json:
    return manifest(POOL.model_copy(update={"pod": template}), "20260131-154500-3f9a", "gemmfleet-a", "echo holder", ())


def pod(status: Json, host: str = "k1", **metadata: Any) -> Json:
    spec: Json = {"nodeName": host} if host else {}
    return {"metadata": {"name": "a", **metadata}, "spec": spec, "status": status}


def conditions(ready: str) -> list[Json]:
    return [{"type": "Ready", "status": ready}, {"type": "ContainersReady", "status": "True"}]


def container(**state: Any) -> list[Json]:
    return [{"name": "sidecar", "state": {"running": {}}}, {"name": CONTAINER, "state": state}]


def running(**status: Any) -> Json:
    given = {"phase": "Running", "containerStatuses": container(running={}), "conditions": conditions("True")}
    return given | status


def ended(of_container: str = "Error", code: int = 1, **status: Any) -> Json:
    states = container(terminated={"reason": of_container, "exitCode": code})
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": states, **status}


@pytest.mark.parametrize("pool", ["pool", "MI355x.eu_west", "p" * 63, "-"])
def test_the_name_is_a_dns_label(pool: str) -> None:
    name = new_name("20260131-154500-3f9a", pool)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)
    assert name != new_name("20260131-154500-3f9a", pool)


def test_a_pod_has_no_privilege_and_the_template_is_merged_into_it() -> None:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    sidecar = {"name": "sidecar", "image": "busybox"}
    tolerations = [{"key": "amd.com/gpu", "operator": "Exists"}]
    found = made(
        metadata={"labels": {"kueue.x-k8s.io/queue-name": "gpus"}},
        spec={
            "tolerations": tolerations,
            "securityContext": {"fsGroup": 44},
            "containers": [{"volumeMounts": mounts, "env": [{"name": "A", "value": "1"}]}, sidecar],
        },
    )
    assert found["metadata"]["labels"] == {
        "gemmfleet/run": "20260131-154500-3f9a", "gemmfleet/pool": "pool", "kueue.x-k8s.io/queue-name": "gpus",
    }  # fmt: skip
    ours = {
        "name": CONTAINER,
        "image": POOL.image,
        "command": ["sh", "-c", "echo holder"],
        "env": [{"name": "GEMMFLEET_LEASE", "value": "gemmfleet-a"}, {"name": "A", "value": "1"}],
        "securityContext": {"allowPrivilegeEscalation": False},
        "resources": {"limits": {"amd.com/gpu": "8"}},
        "volumeMounts": mounts,
    }
    assert found["spec"] == {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 60,
        "activeDeadlineSeconds": 14400,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": 44},
        "tolerations": tolerations,
        "containers": [ours, sidecar],
    }


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ({"labels": {}}, "labels is not a part of a pod template (legal: metadata, spec)"),
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy cannot be set here"),
        ({"spec": {"activeDeadlineSeconds": 60}}, "give `time:`"),
        ({"metadata": {"labels": {"gemmfleet/run": "x"}}}, "metadata.labels.gemmfleet/run cannot be set here"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers.0.image cannot be set here: give `image:`"),
        ({"spec": {"containers": [{"resources": {"limits": {"amd.com/gpu": 1}}}]}}, "give `gpus:`"),
    ],
)
def test_what_a_template_must_not_set_is_named_with_its_way_out(template: Json, fault: str) -> None:
    assert any(fault in f for f in template_faults(template))


def waits(reason: str, words: str = "", kind: str = "PodScheduled") -> Json:
    return {"phase": "Pending", "conditions": [{"type": kind, "status": "False", "reason": reason, "message": words}]}


def target(reason: str) -> Json:
    return {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "words"}]}


NO_IMAGE = {"phase": "Pending", "containerStatuses": container(waiting={"reason": "ErrImagePull", "message": "none"})}
DELETED = {"deletionTimestamp": "2026-01-31T15:46:00Z"}
FEW = "0/2 nodes are available: 2 Insufficient amd.com/gpu."
NODE_HAD_NOT = "Node didn't have enough"


@pytest.mark.parametrize(
    ("given", "state", "cause", "why"),
    [
        (pod(waits("Unschedulable", FEW), host=""), QUEUED, None, FEW),
        (pod({"phase": "Pending"}), QUEUED, None, "starts on k1"),
        (pod(NO_IMAGE), QUEUED, None, "ErrImagePull: none"),
        (pod(running()), READY, None, ""),
        (pod(running(), **DELETED), READY, None, "the pod was deleted"),
        (pod(ended("Completed", 0)), ENDED, EndCause.RELEASED, "Completed"),
        (pod(ended("OOMKilled", 137)), ENDED, EndCause.FAILED, "OOMKilled, exit code 137"),
        (pod(ended("Error", 0), **DELETED), ENDED, EndCause.PREEMPTED, "the pod was deleted"),
        (pod(ended(reason="Evicted", message="low on it")), ENDED, EndCause.PREEMPTED, "Evicted: low on it"),
        (pod(ended(reason="DeadlineExceeded")), ENDED, EndCause.TIME_LIMIT, "DeadlineExceeded"),
        (pod(ended(reason="Terminated", message="shutdown")), ENDED, EndCause.PREEMPTED, "Terminated: shutdown"),
        (pod(ended(**target("PreemptionByScheduler")), **DELETED), ENDED, EndCause.PREEMPTED,
         "PreemptionByScheduler: words"),
        (pod({"phase": "Failed", "reason": "OutOfgpu", "message": NODE_HAD_NOT}), ENDED, EndCause.FAILED,
         f"OutOfgpu: {NODE_HAD_NOT}"),
        (pod({**running(), "reason": "NodeLost"}), ENDED, EndCause.FAILED, "NodeLost"),
    ],
)  # fmt: skip
def test_what_the_state_of_a_pod_means(given: Json, state: LeaseState, cause: EndCause | None, why: str) -> None:
    lease = lease_of(given)
    assert (lease.state, lease.cause, lease.why) == (state, cause, why)


def test_trouble_of_a_pod_that_may_pass() -> None:
    lost = pod(running(conditions=conditions("False")))
    assert trouble(pod(NO_IMAGE)) == ("ErrImagePull: none", PULL_S)
    assert trouble(lost) == ("node k1 is NotReady", NOT_READY_S)
    assert lease_of(lost).state is READY, "it may pass"
    lost["spec"]["readinessGates"] = [{"conditionType": "somebody/elses"}]
    assert trouble(lost) == ("", 0.0)


def test_a_controller_in_a_pod_uses_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes.config import incluster_config

    for name, text in (("token", "t"), ("ca.crt", "any"), ("namespace", "tuning\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "198.18.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    api, namespace = connect(None)
    assert (api.configuration.host, namespace) == ("https://198.18.0.1:443", "tuning")


@pytest.mark.parametrize("text", [None, "contexts: [", "apiVersion: v1\n"])
def test_a_kubeconfig_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    path = tmp_path / "kubeconfig"
    if text:
        path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(InputError, match=r"(?s)kubeconfig cannot be used.*set KUBECONFIG, or `context:`"):
        connect(None)


@pytest.mark.parametrize(
    ("status", "body", "kind", "transient", "words"),
    [
        (403, '{"message": "exceeded quota"}', TransportError, None, "n1: exceeded quota"),
        (401, "Unauthorized", LoginError, None, "does not know this user (Unauthorized)"),
        (404, "not found", UnreachableError, False, "not found"),
        (503, "", UnreachableError, True, "503: it gave no reason"),
    ],
)
def test_answers_of_the_api_server(
    status: int, body: str, kind: type[TransportError], transient: bool | None, words: str
) -> None:
    error = refusal("n1", status, body)
    assert (type(error), getattr(error, "transient", None)) == (kind, transient)
    assert words in str(error)
