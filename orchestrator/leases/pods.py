"""Pods as leases, apart from any I/O: the pod that is requested, and what the state of one means."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from orchestrator.leases.base import EndCause, Lease, LeaseState

CONTAINER = "gemmfleet"
"""The container of a pod that is the lease; others are the user's own."""
RUN_LABEL, POOL_LABEL = "gemmfleet/run", "gemmfleet/pool"
LEASE_VARIABLE = "GEMMFLEET_LEASE"
"""Variable in which the container finds the name of its pod."""
GRACE_S = 60
"""Time that workers have to close their books after the SIGTERM of a deletion, an eviction or the time limit."""
MAX_NAME = 63
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodRequest:
    """The pods of a pool."""

    image: str
    gpus: int = 0
    resource: str = "amd.com/gpu"
    time_s: int | None = None
    workdir: str = ""
    """Folder in the container for runs; "": one in its TMPDIR."""
    template: Json = field(default_factory=dict)
    """The user's partial pod (`pod:`), merged into ours."""


# --- the pod that is requested --------------------------------------------------------------------------------------

TAKEN = {
    ("metadata", "name"): "pods are named after the run and the pool",
    ("metadata", "generateName"): "pods are named after the run and the pool",
    ("metadata", "namespace"): "give `namespace:` of the node",
    ("spec", "restartPolicy"): "a lease that ended is never started again",
    ("spec", "activeDeadlineSeconds"): "give `time:` of the node",
    ("spec", "nodeName"): "give `spec.nodeSelector`: the scheduler must know of the pod",
}
"""Fields of a pod that a template must not set -> way out."""
TAKEN_OF_CONTAINER = {
    "image": "give `image:` of the node",
    "command": "it runs what holds the lease",
    "args": "it runs what holds the lease",
}
LIST_KEYS = ("name", "mountPath", "containerPort", "devicePath")
"""Fields by one of which entries of a list are the same."""


def template_faults(template: Json, resource: str = "amd.com/gpu") -> list[str]:
    """Faults of a `pod:` section, each with its path and the way out."""
    found = [f"{k} is no part of a pod template (legal: metadata, spec)" for k in template if k not in _PARTS]
    for part in ("metadata", "spec"):
        if not isinstance(template.get(part, {}), Mapping):
            return [*found, f"{part} must be a mapping"]
    for (part, key), way in TAKEN.items():
        if key in template.get(part, {}):
            found.append(f"{part}.{key} cannot be set here: {way}")
    labels = template.get("metadata", {}).get("labels") or {}
    found += [f"metadata.labels.{k} is taken" for k in labels if str(k).startswith("gemmfleet/")]
    containers = template.get("spec", {}).get("containers", ())
    if not isinstance(containers, Sequence) or not all(isinstance(c, Mapping) for c in containers):
        return [*found, "spec.containers must be a list of mappings"]
    for i, container in enumerate(containers):
        if container.get("name", CONTAINER) != CONTAINER:
            continue
        at = f"spec.containers.{i}"
        found += [f"{at}.{k} cannot be set here: {way}" for k, way in TAKEN_OF_CONTAINER.items() if k in container]
        limits = (container.get("resources") or {}).get("limits") or {}
        if resource in limits:
            found.append(f"{at}.resources.limits.{resource} cannot be set here: give `gpus:` of the node")
    return found


_PARTS = ("apiVersion", "kind", "metadata", "spec")


def new_name(run: str, pool: str) -> str:
    """A new pod's name: a DNS label."""
    token = secrets.token_hex(3)
    words = re.sub(r"[^a-z0-9]+", "-", f"gemmfleet-{run}-{pool}".lower())
    return f"{words[: MAX_NAME - len(token) - 1].strip('-')}-{token}"


def manifest(
    request: PodRequest, run: str, pool: str, name: str, script: str, avoid: Collection[str] = ()
) -> dict[str, Any]:
    """The pod to ask for: ours, with the user's template merged in; never on a node of `avoid`.

    `script`: the holder, for the container's `sh -c`.
    """
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": request.image,
        "command": ["sh", "-c", script],
        "env": [{"name": LEASE_VARIABLE, "value": name}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    if request.gpus:
        container["resources"] = {"limits": {request.resource: str(request.gpus)}}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    if request.time_s is not None:
        spec["activeDeadlineSeconds"] = request.time_s
    labels = {RUN_LABEL: run, POOL_LABEL: pool}
    ours = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
    pod = dict(_merged(ours, request.template))
    if avoid:
        pod["spec"] = _away_from(pod["spec"], avoid)
    return pod


def _merged(ours: Any, theirs: Any) -> Any:
    """Both; mappings key by key, lists entry by entry where entries have names; else theirs wins."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        both = {k: _merged(ours[k], theirs[k]) for k in ours.keys() & theirs.keys()}
        return {**ours, **theirs, **both}
    if not isinstance(ours, list) or not isinstance(theirs, list):
        return theirs
    out = list(ours)
    for entry in theirs:
        same = next((i for i, o in enumerate(out) if _is_same(o, entry)), None)
        if same is None:
            out.append(entry)
        else:
            out[same] = _merged(out[same], entry)
    return out


def _is_same(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return bool(ours == theirs)
    if ours.get("name") == CONTAINER and "name" not in theirs and "mountPath" not in theirs:
        return True  # a template's container without a name is ours
    return any(key in theirs and ours.get(key) == theirs[key] for key in LIST_KEYS)


def _away_from(spec: Json, hosts: Collection[str]) -> dict[str, Any]:
    """A pod's spec that no host of `hosts` will do for: in every alternative of its node affinity."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [h]} for h in sorted(hosts)]
    affinity = spec.get("affinity") or {}
    of_node = affinity.get("nodeAffinity") or {}
    required = of_node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or [{}]
    terms = [{**t, "matchFields": [*(t.get("matchFields") or ()), *fields]} for t in terms]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {**spec, "affinity": {**affinity, "nodeAffinity": {**of_node, **required}}}


# --- what the state of one means ------------------------------------------------------------------------------------

DISRUPTIONS = {
    "PreemptionByScheduler": EndCause.PREEMPTED,
    "PreemptionByKubeScheduler": EndCause.PREEMPTED,
    "EvictionByEvictionAPI": EndCause.EVICTED,
    "TerminationByKubelet": EndCause.EVICTED,
    "DeletionByTaintManager": EndCause.NODE_FAILURE,
    "DeletionByPodGC": EndCause.NODE_FAILURE,
}
"""Reason of the condition DisruptionTarget (Kubernetes 1.26 and later)."""
REASONS = {
    "Evicted": EndCause.EVICTED,
    "DeadlineExceeded": EndCause.TIME_LIMIT,
    "Preempting": EndCause.PREEMPTED,
    "NodeShutdown": EndCause.DRAINED,
    "Shutdown": EndCause.DRAINED,
    "Terminated": EndCause.DRAINED,
    "NodeLost": EndCause.NODE_FAILURE,
}
"""Reason of a pod's status."""
HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError")
"""Reasons why a container waits that no waiting mends."""
DOUBTFUL = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "RunContainerError", "CrashLoopBackOff")
"""Reasons that may pass, and seldom do."""


def lease_of(pod: Json, *, gone: bool = False, released: bool = False, patient: bool = True) -> Lease:
    """The lease that a pod is. `gone`: it was deleted, this is its last state; `released`: by us.

    `patient`: its `trouble` may pass.
    """
    status = pod.get("status") or {}
    host = str(pod["spec"].get("nodeName") or "")
    state, why, cause = LeaseState.ENDED, *_end(pod, gone, released, patient)
    if cause is None and gone:
        cause = EndCause.RELEASED if released else EndCause.CANCELLED
        why = "released" if released else "the pod was deleted"
    if cause is None:
        running = "running" in _container(status)
        state = LeaseState.READY if running else LeaseState.QUEUED
        why = _closing(pod) if running else _waiting(status, host)
    return Lease(str(pod["metadata"]["name"]), state, host, why[:500], _ends_at(pod), cause)


def trouble(pod: Json) -> Literal["", "start", "node"]:
    """Return what may pass: its image cannot be pulled or its container not started, or its node is NotReady."""
    if (_container(pod.get("status") or {}).get("waiting") or {}).get("reason") in DOUBTFUL:
        return "start"
    return "node" if _node_is_gone(pod) else ""


def _end(pod: Json, gone: bool, released: bool, patient: bool) -> tuple[str, EndCause | None]:
    """(why, cause) of one that is over; ("", None) of any other."""
    status = pod.get("status") or {}
    container, host = _container(status), pod["spec"].get("nodeName")
    waits, ended = container.get("waiting") or {}, container.get("terminated")
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    target = _condition(status, "DisruptionTarget")
    disrupted = DISRUPTIONS.get(target.get("reason", "")) if target.get("status") == "True" else None
    if status.get("phase") in ("Succeeded", "Failed") or ended:
        ended = ended or {}
        words = _joined(reason or ended.get("reason", ""), message or ended.get("message", ""))
        if ended.get("reason") == "OOMKilled":
            return words, EndCause.OUT_OF_MEMORY
        if reason in REASONS:
            return words, REASONS[reason]
        if disrupted is not None:
            return _joined(target["reason"], target.get("message", "")), disrupted
        if "deletionTimestamp" in pod["metadata"] and not released:
            return "the pod was deleted", EndCause.CANCELLED
        if released or ended.get("exitCode") == 0:
            return words, EndCause.RELEASED
        code = ended.get("exitCode")
        return (words or "it failed") + (f", exit code {code}" if code is not None else ""), EndCause.FAILED
    if reason == "NodeLost" or (_node_is_gone(pod) and (gone or not patient)):
        return f"node {host} is NotReady", EndCause.NODE_FAILURE
    if waits.get("reason") in HOPELESS or (not patient and waits.get("reason") in DOUBTFUL):
        return _joined(waits["reason"], waits.get("message", "")), EndCause.FAILED
    if disrupted is not None and (gone or ("deletionTimestamp" in pod["metadata"] and "running" not in container)):
        return _joined(target["reason"], target.get("message", "")), disrupted
    return "", None


def _node_is_gone(pod: Json) -> bool:
    """NotReady: the control plane takes back `Ready`, and nothing else, of a pod on a node that beats no more."""
    status = pod.get("status") or {}
    ready, of_containers = _condition(status, "Ready"), _condition(status, "ContainersReady")
    lost = ready.get("status") == "False" and of_containers.get("status") == "True"
    return status.get("reason") == "NodeLost" or (lost and not pod["spec"].get("readinessGates"))


def _waiting(status: Json, host: str) -> str:
    """The scheduler's or the node's words on a pod that does not run yet."""
    waits = _container(status).get("waiting") or {}
    if waits.get("reason"):
        return _joined(waits["reason"], waits.get("message", ""))
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return str(scheduled.get("message") or scheduled.get("reason") or "not scheduled")
    return f"starts on {host}" if host else "waits for the scheduler"


def _closing(pod: Json) -> str:
    """Reason why a pod that runs is about to end; "" where it is not."""
    target = _condition(pod.get("status") or {}, "DisruptionTarget")
    if target.get("status") == "True":
        return _joined(target.get("reason", ""), target.get("message", ""))
    return "the pod is being deleted" if "deletionTimestamp" in pod["metadata"] else ""


def _ends_at(pod: Json) -> float | None:
    started, limit = (pod.get("status") or {}).get("startTime"), pod["spec"].get("activeDeadlineSeconds")
    times = [epoch(started) + limit] if started and limit is not None else []
    if deleted := pod["metadata"].get("deletionTimestamp"):
        times.append(epoch(deleted))  # its grace period included
    return min(times, default=None)


def epoch(text: str) -> float:
    """Epoch seconds of a time of the API."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _container(status: Json) -> Json:
    """State of our container."""
    for container in _entries(status.get("containerStatuses")):
        if container.get("name") == CONTAINER:
            return dict(container.get("state") or {})
    return {}


def _condition(status: Json, kind: str) -> Json:
    return next((c for c in _entries(status.get("conditions")) if c.get("type") == kind), {})


def _entries(given: Any) -> Iterator[Json]:
    yield from given or ()


def _joined(reason: str, words: str) -> str:
    return f"{reason}: {words.strip()}" if reason and words else (reason or words).strip()
