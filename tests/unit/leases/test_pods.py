"""Pods that are requested, and the meaning of their states; these are of a real API server, shortened."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from orchestrator.leases.base import EndCause, LeaseState
from orchestrator.leases.kubernetes import (
    CONTAINER,
    NOT_READY_S,
    PULL_S,
    PodRequest,
    lease_of,
    manifest,
    new_name,
    template_faults,
    trouble,
)

REQUEST = PodRequest("rocm/pytorch:latest", gpus=8, time_s=14400)


def made(avoid: tuple[str, ...] = (), **template: Any) -> dict[str, Any]:
    return manifest(
        replace(REQUEST, template=template), "20260131-154500-3f9a", "pool", "gemmfleet-a", "echo holder", avoid
    )


def pod(status: dict[str, Any], host: str = "k1", **metadata: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"nodeName": host} if host else {}
    return {"metadata": {"name": "a", **metadata}, "spec": spec, "status": status}


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "sidecar", "state": {"running": {}}}, {"name": CONTAINER, "state": state}]


def running(**status: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}]
    return {"phase": "Running", "containerStatuses": container(running={}), "conditions": conditions, **status}


def ended(of_container: str = "Error", code: int = 1, **status: Any) -> dict[str, Any]:
    states = container(terminated={"reason": of_container, "exitCode": code})
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": states, **status}


# --- the pod that is asked for --------------------------------------------------------------------------------------


def test_a_pod_has_no_privilege_no_token_and_is_never_started_again() -> None:
    spec = made()["spec"]
    (only,) = spec["containers"]
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert only["securityContext"] == {"allowPrivilegeEscalation": False}
    assert spec["activeDeadlineSeconds"] == 14400
    assert only["command"] == ["sh", "-c", "echo holder"]
    assert only["resources"]["limits"] == {"amd.com/gpu": "8"}


@pytest.mark.parametrize("pool", ["pool", "MI355x.eu_west", "p" * 63, "-"])
def test_the_name_is_a_dns_label(pool: str) -> None:
    name = new_name("20260131-154500-3f9a", pool)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)
    assert name != new_name("20260131-154500-3f9a", pool)


def test_the_template_is_merged_into_the_pod() -> None:
    spec = made(
        metadata={"labels": {"kueue.x-k8s.io/queue-name": "gpus"}, "annotations": {"a": "b"}},
        spec={
            "tolerations": [{"key": "amd.com/gpu", "operator": "Exists"}],
            "nodeSelector": {"pool": "mi355x"},
            "securityContext": {"fsGroup": 44},
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
            "containers": [
                {"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}], "env": [{"name": "A", "value": "1"}]},
                {"name": "sidecar", "image": "busybox"},
            ],
        },
    )
    assert spec["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert spec["metadata"]["labels"]["gemmfleet/pool"] == "pool"
    pod = spec["spec"]
    assert pod["tolerations"] == [{"key": "amd.com/gpu", "operator": "Exists"}]
    assert pod["nodeSelector"] == {"pool": "mi355x"}
    assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": 44}
    ours, sidecar = pod["containers"]
    assert ours["name"] == CONTAINER
    assert ours["image"] == REQUEST.image
    assert ours["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert [e["name"] for e in ours["env"]] == ["GEMMFLEET_LEASE", "A"]
    assert sidecar == {"name": "sidecar", "image": "busybox"}


def test_hosts_to_avoid_are_in_every_alternative_of_the_affinity() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    other = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}
    required = {"nodeSelectorTerms": [zone, other]}
    given = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}, "podAntiAffinity": {"x": 1}}
    affinity = made(avoid=("k2", "k1"), spec={"affinity": given})["spec"]["affinity"]
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [h]} for h in ("k1", "k2")]
    assert terms == [{**zone, "matchFields": away}, {**other, "matchFields": away}]
    assert affinity["podAntiAffinity"] == {"x": 1}
    alone = made(avoid=("k1",))["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert alone == {"nodeSelectorTerms": [{"matchFields": away[:1]}]}


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ({"labels": {}}, "labels is not a part of a pod template (legal: metadata, spec)"),
        ({"spec": [1]}, "spec must be a mapping"),
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy cannot be set here"),
        ({"spec": {"activeDeadlineSeconds": 60}}, "give `time:`"),
        ({"metadata": {"namespace": "other"}}, "give `namespace:`"),
        ({"metadata": {"labels": {"gemmfleet/run": "x"}}}, "metadata.labels.gemmfleet/run cannot be set here"),
        ({"spec": {"containers": {"image": "x"}}}, "spec.containers must be a list"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers.0.image cannot be set here: give `image:`"),
        ({"spec": {"containers": [{"command": ["x"]}]}}, "spec.containers.0.command cannot be set here"),
        ({"spec": {"containers": [{"resources": {"limits": {"amd.com/gpu": 1}}}]}}, "give `gpus:`"),
    ],
)
def test_what_a_template_must_not_set_is_named_with_its_way_out(template: dict[str, Any], fault: str) -> None:
    assert any(fault in f for f in template_faults(template))


# --- what the state of one means ------------------------------------------------------------------------------------


def test_a_pod_that_waits_for_the_scheduler_quotes_it() -> None:
    words = "0/2 nodes are available: 2 Insufficient amd.com/gpu."
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    lease = lease_of(pod({"phase": "Pending", "conditions": [scheduled]}, host=""))
    assert (lease.state, lease.host, lease.why) == (LeaseState.QUEUED, "", words)
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    assert lease_of(pod({"phase": "Pending", "conditions": [gated]}, host="")).why == "SchedulingGated"
    assert lease_of(pod({"phase": "Pending"}, host="")).why == "waits for the scheduler"
    assert lease_of(pod({"phase": "Pending"})).why == "starts on k1"


def test_a_running_pod_is_ready_until_its_time_is_over() -> None:
    given = pod(running(startTime="2026-01-31T15:45:00Z"))
    given["spec"]["activeDeadlineSeconds"] = 3600
    lease = lease_of(given)
    assert (lease.state, lease.host, lease.cause) == (LeaseState.READY, "k1", None)
    assert lease.ends_at == datetime(2026, 1, 31, 16, 45, tzinfo=timezone.utc).timestamp()


def test_a_pod_that_is_being_deleted_is_ready_until_its_container_ends() -> None:
    lease = lease_of(pod(running(), deletionTimestamp="2026-01-31T15:46:00Z"))
    assert (lease.state, lease.ends_at) == (
        LeaseState.READY,
        datetime(2026, 1, 31, 15, 46, tzinfo=timezone.utc).timestamp(),
    )
    assert lease.why == "the pod was deleted"


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff"])
def test_an_image_that_cannot_be_pulled_is_given_up_after_some_patience(reason: str) -> None:
    given = pod(
        {"phase": "Pending", "containerStatuses": container(waiting={"reason": reason, "message": "not found"})}
    )
    lease = lease_of(given)
    assert trouble(given) == (lease.why, PULL_S)
    assert (lease.state, lease.why) == (LeaseState.QUEUED, f"{reason}: not found")


def target(reason: str) -> dict[str, Any]:
    return {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "words"}]}


DELETED = {"deletionTimestamp": "2026-01-31T15:46:00Z"}


@pytest.mark.parametrize(
    ("status", "metadata", "cause", "why"),
    [
        (ended("Completed", 0), {}, EndCause.RELEASED, "Completed"),
        (ended("OOMKilled", 137), {}, EndCause.FAILED, "OOMKilled, exit code 137"),
        (ended("Error", 3), {}, EndCause.FAILED, "Error, exit code 3"),
        (ended("Error", 0), DELETED, EndCause.PREEMPTED, "the pod was deleted"),
        (ended("Error", 137, reason="Evicted", message="low on it"), {}, EndCause.PREEMPTED, "Evicted: low on it"),
        (ended("Error", 137, reason="DeadlineExceeded"), {}, EndCause.TIME_LIMIT, "DeadlineExceeded"),
        (ended("Error", 143, reason="Terminated", message="shutdown"), {}, EndCause.PREEMPTED, "Terminated: shutdown"),
        (ended("Error", 143, **target("PreemptionByScheduler")), DELETED, EndCause.PREEMPTED,
         "PreemptionByScheduler: words"),
        (ended("Error", 143, **target("EvictionByEvictionAPI")), DELETED, EndCause.PREEMPTED,
         "EvictionByEvictionAPI: words"),
        ({"phase": "Failed", "reason": "OutOfamd.com/gpu", "message": "Node didn't have enough"}, {}, EndCause.FAILED,
         "OutOfamd.com/gpu: Node didn't have enough"),
        ({**running(), "reason": "NodeLost"}, {}, EndCause.FAILED, "NodeLost"),
    ],
)  # fmt: skip
def test_why_a_pod_ended(status: dict[str, Any], metadata: dict[str, Any], cause: EndCause, why: str) -> None:
    lease = lease_of(pod(status, **metadata))
    assert (lease.state, lease.cause, lease.why) == (LeaseState.ENDED, cause, why)


def test_a_pod_on_a_node_that_is_not_ready_is_in_trouble() -> None:
    conditions = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    given = pod(running(conditions=conditions))
    assert trouble(given) == ("node k1 is NotReady", NOT_READY_S)
    assert lease_of(given).state is LeaseState.READY, "it may pass"
    given["spec"]["readinessGates"] = [{"conditionType": "somebody/elses"}]
    assert trouble(given) == ("", 0.0)
