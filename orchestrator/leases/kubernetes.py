"""Leases of Kubernetes: one pod each, which runs the holder (holder.py).

Three things are here: the calls to the API server (`KubernetesSource`), the pod that we ask for (`manifest`, which
merges the user's `pod:` section into ours), and the meaning of a pod's state (`lease_of`, `trouble`). A pod is the JSON
object that the API server gives; names of its fields are Kubernetes'. The rights that a user needs are in
examples/kubernetes-role.yaml.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from orchestrator.engines import OK, UNUSABLE, WARNING, Finding
from orchestrator.errors import TransportError
from orchestrator.inventory.model import Node
from orchestrator.leases.holder import holder_script, leftovers_in, prelude
from orchestrator.leases.lease import EndCause, Lease, LeaseState
from orchestrator.transport.base import Transport
from orchestrator.transport.exec import ExecTransport
from orchestrator.transport.pod import CALL_S, PodOpener, call, connect, status_of

CONTAINER = "gemmfleet"
"""The container of a pod that is the lease; others are the user's own."""
RUN_LABEL, POOL_LABEL = "gemmfleet/run", "gemmfleet/pool"
LEASE_VARIABLE = "GEMMFLEET_LEASE"
"""Variable in which the container finds the name of its pod."""
GRACE_S = 60
"""Time that workers have to write their last records after the SIGTERM of a deletion, an eviction or the time limit."""
MAX_NAME = 63
PULL_S = 60.0
"""An image that cannot be pulled is given up after this long."""
NOT_READY_S = 40.0
"""A node that is NotReady is given up after this long. After an outage of the API server all nodes may be NotReady:
kubelets renew their leases every 10 s, the control plane looks every 5 s, and pods are Ready up to 10 s later."""
LOG_S = 120.0
"""Seconds to fetch a pod's log."""
LOG_BYTES = 7_000_000
"""Archive that fits, in base64, into the 10 MiB of a log that a kubelet keeps (its containerLogMaxSize)."""
RIGHTS = (
    *(("pods", "", verb) for verb in ("get", "list", "create", "delete")),
    ("pods", "exec", "get"),
    ("pods", "exec", "create"),
    ("pods", "log", "get"),
)
"""(resource, subresource, verb): what the user must be allowed to do."""
WAYS = {
    "quota": "give fewer `gpus:`, or wait until the namespace has some again (kubectl describe quota)",
    "namespace": "correct `namespace:`, or make it (kubectl create namespace)",
    "pod": "correct the node's `pod:`",
}
"""The way out if a pod cannot be made, by the reason."""
Json = Mapping[str, Any]
"""An object of the API server."""


class KubernetesSource:
    """Pods of one pool of one run (LeaseSource)."""

    def __init__(self, run: str, pool: Node) -> None:
        """Read the configuration; no request to the API server yet. `pool`: the inventory's node, with its `pod:` to be
        merged into ours. Raises InputError."""
        self._api, ours = connect(pool.context)
        from kubernetes import client

        self._run = run
        self._pool = pool.name
        self._node = pool
        self._workdir = pool.workdir or ""
        self._script = holder_script(run, pool.name, self._workdir, most=LOG_BYTES)
        self._namespace = pool.namespace or ours
        self._core = client.CoreV1Api(self._api)
        self._troubled: dict[str, float] = {}
        """Pod -> when it was first seen in trouble (time.monotonic())."""

    def ask(self, count: int, avoid: Collection[str] = ()) -> None:
        """Make `count` pods, none of them on a host of `avoid` (in quarantine lately)."""
        for _ in range(count):
            self._call(self._core.create_namespaced_pod, body=self._pod(avoid))

    def list(self) -> Sequence[Lease]:
        """The pods as leases, oldest first. A pod that has been in trouble for too long counts as ended."""
        ours = f"{RUN_LABEL}={self._run},{POOL_LABEL}={self._pool}"
        answer = self._call(self._core.list_namespaced_pod, label_selector=ours)
        pods = [self._api.sanitize_for_serialization(pod) for pod in answer.items]
        pods.sort(key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))
        now = time.monotonic()
        troubled: dict[str, float] = {}
        leases = []
        for pod in pods:
            lease = lease_of(pod)
            why, limit_s = trouble(pod)
            if why:
                troubled[lease.id] = self._troubled.get(lease.id, now)
                if now - troubled[lease.id] >= limit_s and lease.state is not LeaseState.ENDED:
                    lease = replace(lease, state=LeaseState.ENDED, why=why, cause=EndCause.FAILED)
            leases.append(lease)
        self._troubled = troubled
        return leases

    def release(self, leases: Collection[Lease]) -> None:
        """Delete pods, also those that have ended."""
        for lease in leases:
            self._call_on_pod(self._core.delete_namespaced_pod, lease)

    def transport(self, lease: Lease, node: str) -> Transport:
        """Files and commands in a pod that runs. `node`: its name in messages."""
        opener = PodOpener(node, self._api, self._namespace, lease.id, CONTAINER)
        return ExecTransport(node, opener, prelude(self._workdir, lease.id))

    def leftovers(self, lease: Lease) -> bytes | None:
        """The archive of workers' files that the holder wrote into the pod's log at its end, or None."""
        log = self._call_on_pod(self._core.read_namespaced_pod_log, lease, container=CONTAINER, seconds=LOG_S)
        return leftovers_in(log.encode()) if log else None

    def forget(self) -> None:
        """A pod leaves nothing outside itself."""

    def close(self) -> None:
        """The pods go on."""
        self._api.close()

    def _call(self, method: Any, *args: Any, seconds: float = CALL_S, **options: Any) -> Any:
        return call(self._pool, method, *args, seconds=seconds, namespace=self._namespace, **options)

    def _call_on_pod(self, method: Any, lease: Lease, **options: Any) -> Any:
        """The answer to a call about one pod; None if the pod is gone."""
        try:
            return self._call(method, name=lease.id, **options)
        except TransportError as e:
            if status_of(e) != 404:
                raise
            return None

    def _pod(self, avoid: Collection[str] = ()) -> dict[str, Any]:
        return manifest(self._node, self._run, new_name(self._run, self._pool), self._script, avoid)

    def check(self) -> Sequence[Finding]:
        """Findings on the API server, what the user may do there, and whether it would take the pod."""
        try:
            return list(self._findings())
        except TransportError as e:
            return [Finding(UNUSABLE, "kubernetes", e.reason, "see `kubectl cluster-info`")]  # with the same KUBECONFIG

    def _findings(self) -> Iterator[Finding]:
        from kubernetes import client

        version = call(self._pool, client.VersionApi(self._api).get_code)
        where = f"namespace {self._namespace} of {self._api.configuration.host}"
        yield Finding(OK, "kubernetes", f"{version.git_version}, {where}")
        if not self._api.configuration.verify_ssl:
            what = "the kubeconfig says insecure-skip-tls-verify: anyone can pose as the API server"
            yield Finding(WARNING, "tls", what, "give the cluster's `certificate-authority` there")
        denied = [right for right in RIGHTS if not self._may(*right)]
        if denied:
            words = ", ".join(f"{verb} {kind}{'/' + sub if sub else ''}" for kind, sub, verb in denied)
            way = f"have examples/kubernetes-role.yaml bound to you there (kubectl apply -n {self._namespace})"
            yield Finding(UNUSABLE, "permissions", f"you may not {words} in namespace {self._namespace}", way)
        if ("pods", "", "create") not in denied:
            try:
                create = self._core.create_namespaced_pod
                self._call(create, body=self._pod(), dry_run="All", field_validation="Strict")
            except TransportError as e:
                if not status_of(e):
                    raise
                about = "pod"
                if "exceeded quota" in e.reason:
                    about = "quota"
                elif status_of(e) == 404:
                    about = "namespace"
                yield Finding(UNUSABLE, about, e.reason, WAYS[about])

    def _may(self, resource: str, subresource: str, verb: str) -> bool:
        """Return whether the user may do this in the namespace, according to the API server."""
        attributes = {"namespace": self._namespace, "resource": resource, "subresource": subresource, "verb": verb}
        from kubernetes import client

        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        method = client.AuthorizationV1Api(self._api).create_self_subject_access_review
        return bool(call(self._pool, method, {**review, "spec": {"resourceAttributes": attributes}}).status.allowed)


TAKEN = {
    "metadata.name": "pods are named after the run and the pool",
    "metadata.generateName": "pods are named after the run and the pool",
    "metadata.namespace": "give `namespace:` of the node",
    "spec.restartPolicy": "a lease that ended is never started again",
    "spec.activeDeadlineSeconds": "give `time:` of the node",
    "spec.nodeName": "give `spec.nodeSelector`: the scheduler must know of the pod",
    "image": "give `image:` of the node",
    "command": "gemmfleet sets it to keep the pod running",
    "args": "gemmfleet sets `command` to keep the pod running",
}
"""Fields of a pod, and of our container, that the user's `pod:` must not set -> the reason, or what to set instead."""
LIST_KEYS = ("name", "mountPath", "containerPort", "devicePath")
"""Entries of two lists that have the same value in one of these fields are merged into one."""


def template_faults(template: Json, resource: str = "amd.com/gpu") -> list[str]:
    """Faults of a `pod:` section, each with its path and the way out. `resource`: Kubernetes' name for our GPUs."""
    legal = ("apiVersion", "kind", "metadata", "spec")
    faults = [f"{k} is not a part of a pod template (legal: metadata, spec)" for k in template if k not in legal]
    metadata = template.get("metadata", {})
    spec = template.get("spec", {})
    if not isinstance(metadata, Mapping):
        return [*faults, "metadata must be a mapping"]
    if not isinstance(spec, Mapping):
        return [*faults, "spec must be a mapping"]
    containers = spec.get("containers", ())
    if not isinstance(containers, Sequence) or not all(isinstance(c, Mapping) for c in containers):
        return [*faults, "spec.containers must be a list of mappings"]
    ways = {f"metadata.{k}": TAKEN.get(f"metadata.{k}") for k in metadata}
    ways |= {f"spec.{k}": TAKEN.get(f"spec.{k}") for k in spec}
    labels = [str(k) for k in metadata.get("labels") or {}]
    ways |= {f"metadata.labels.{k}": "it is how pods are found again" for k in labels if k.startswith("gemmfleet/")}
    for i, container in enumerate(containers):
        if container.get("name", CONTAINER) != CONTAINER:
            continue
        ways |= {f"spec.containers.{i}.{k}": TAKEN.get(k) for k in container}
        if resource in ((container.get("resources") or {}).get("limits") or {}):
            ways[f"spec.containers.{i}.resources.limits.{resource}"] = "give `gpus:` of the node"
    return faults + [f"{path} cannot be set here: {way}" for path, way in ways.items() if way]


def new_name(run: str, pool: str) -> str:
    """A new pod's name: a DNS label."""
    token = secrets.token_hex(3)
    words = re.sub(r"[^a-z0-9]+", "-", f"gemmfleet-{run}-{pool}".lower())
    return f"{words[: MAX_NAME - len(token) - 1].strip('-')}-{token}"


def manifest(pool: Node, run: str, name: str, script: str, avoid: Collection[str] = ()) -> dict[str, Any]:
    """The pod to ask for: ours, with the user's `pod:` section merged in. `script`: the holder, for the container's
    `sh -c`. `avoid`: nodes on which it must not be."""
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": pool.image,
        "command": ["sh", "-c", script],
        "env": [{"name": LEASE_VARIABLE, "value": name}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    if pool.gpus:
        container["resources"] = {"limits": {pool.resource: str(pool.gpus)}}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "activeDeadlineSeconds": pool.time_s,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    labels = {RUN_LABEL: run, POOL_LABEL: pool.name}
    ours = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
    pod = dict(_merged(ours, pool.pod))
    if avoid:
        pod["spec"] = _away_from(pod["spec"], avoid)
    return pod


def _merged(ours: Any, theirs: Any) -> Any:
    """Merge two parts of a pod: mappings key by key, lists by their entries' names (`_is_same`). Of anything else
    theirs wins."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        both = {k: _merged(ours[k], theirs[k]) for k in ours.keys() & theirs.keys()}
        return {**ours, **theirs, **both}
    if not isinstance(ours, list) or not isinstance(theirs, list):
        return theirs
    merged = list(ours)
    for entry in theirs:
        index = next((i for i, known in enumerate(merged) if _is_same(known, entry)), None)
        if index is None:
            merged.append(entry)
        else:
            merged[index] = _merged(merged[index], entry)
    return merged


def _is_same(ours: Any, theirs: Any) -> bool:
    """Return whether two entries of a list mean the same container, volume, port or variable."""
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return bool(ours == theirs)
    if ours.get("name") == CONTAINER and "name" not in theirs and "mountPath" not in theirs:
        return True  # a template's container without a name is ours
    return any(key in theirs and ours.get(key) == theirs[key] for key in LIST_KEYS)


def _away_from(spec: Json, hosts: Collection[str]) -> dict[str, Any]:
    """The pod's spec, with these hosts ruled out in each alternative of its node affinity."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [h]} for h in sorted(hosts)]
    affinity = spec.get("affinity") or {}
    node_affinity = affinity.get("nodeAffinity") or {}
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or [{}]
    terms = [{**t, "matchFields": [*(t.get("matchFields") or ()), *fields]} for t in terms]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {**spec, "affinity": {**affinity, "nodeAffinity": {**node_affinity, **required}}}


CAUSES = {
    **dict.fromkeys(("Evicted", "Preempting", "NodeShutdown", "Shutdown", "Terminated"), EndCause.PREEMPTED),
    "DeadlineExceeded": EndCause.TIME_LIMIT,
}
"""Cause of a lease's end by the reason in its pod's status."""
DOUBTFUL = (
    "ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "RunContainerError", "CrashLoopBackOff",
    "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError",
)  # fmt: skip
"""Reasons why a container waits that may pass, but seldom do."""


def lease_of(pod: Json) -> Lease:
    """The lease of a pod: ended if the pod or our container has ended, ready if our container runs, else queued."""
    status, spec, metadata = pod.get("status") or {}, pod["spec"], pod["metadata"]
    name = str(metadata["name"])
    host = str(spec.get("nodeName") or "")
    container = _container(status)
    closing = _closing(status, metadata)
    is_over = status.get("phase") in ("Succeeded", "Failed") or status.get("reason") == "NodeLost"
    if container.get("terminated") or is_over:
        why, cause = _end(status, container.get("terminated") or {}, closing)
        return Lease(name, LeaseState.ENDED, host, why[:500], cause=cause)
    if "running" in container:
        return Lease(name, LeaseState.READY, host, closing[:500], _ends_at(pod))
    return Lease(name, LeaseState.QUEUED, host, _wait(status, container, host)[:500])


def _closing(status: Json, metadata: Json) -> str:
    """The reason why the pod is about to end, in words; "" if it is not."""
    target = _condition(status, "DisruptionTarget")  # Kubernetes 1.26 and later
    if target.get("status") == "True":
        return _joined(target.get("reason"), target.get("message"))
    return "the pod was deleted" if "deletionTimestamp" in metadata else ""


def _end(status: Json, terminated: Json, closing: str) -> tuple[str, EndCause]:
    """The reason why a pod ended, in words, and the cause. The first of these that is known counts: the reason in the
    pod's status, what was about to end it, the exit code of our container."""
    reason = str(status.get("reason") or "")
    code = terminated.get("exitCode")
    words = _joined(reason or terminated.get("reason"), status.get("message") or terminated.get("message"))
    cause = CAUSES.get(reason, EndCause.FAILED)
    if closing and reason not in CAUSES:
        return closing, EndCause.PREEMPTED
    if code == 0:
        return words, EndCause.RELEASED
    if code is not None and not reason:
        return f"{words or 'it failed'}, exit code {code}", cause
    return words, cause


def _wait(status: Json, container: Json, host: str) -> str:
    """Describes why a pod has not started yet."""
    waiting = container.get("waiting") or {}
    scheduled = _condition(status, "PodScheduled")
    if waiting.get("reason"):
        return _joined(waiting["reason"], waiting.get("message"))
    if scheduled.get("status") == "False":
        return str(scheduled.get("message") or scheduled.get("reason") or "not scheduled")
    return f"starts on {host}" if host else "waits for the scheduler"


def trouble(pod: Json) -> tuple[str, float]:
    """(trouble of a pod that may pass, seconds after which the pod is given up for it); ("", 0.0) for none."""
    status = pod.get("status") or {}
    waiting = _container(status).get("waiting") or {}
    if waiting.get("reason") in DOUBTFUL:
        return _joined(waiting["reason"], waiting.get("message")), PULL_S
    # if a node no longer reports, the control plane takes back the condition `Ready` of its pods, and nothing else
    is_ready = _condition(status, "Ready").get("status") != "False"
    are_containers_ready = _condition(status, "ContainersReady").get("status") == "True"
    if not is_ready and are_containers_ready and not pod["spec"].get("readinessGates"):
        return f"node {pod['spec'].get('nodeName')} is NotReady", NOT_READY_S
    return "", 0.0


def _ends_at(pod: Json) -> float | None:
    """The time at which the pod must end (epoch seconds), by its limit or its deletion; None if it has none."""
    times = []
    started = (pod.get("status") or {}).get("startTime")
    limit = pod["spec"].get("activeDeadlineSeconds")
    if started and limit is not None:
        times.append(_epoch(started) + limit)
    deleted = pod["metadata"].get("deletionTimestamp")
    if deleted:
        times.append(_epoch(deleted))  # its grace period included
    return min(times, default=None)


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _container(status: Json) -> Json:
    """The state of our container: {} or one of `waiting`, `running`, `terminated`."""
    for container in status.get("containerStatuses") or ():
        if container.get("name") == CONTAINER:
            return dict(container.get("state") or {})
    return {}


def _condition(status: Json, kind: str) -> Json:
    """The condition of that type in a pod's status, {} if it has none."""
    return next((c for c in status.get("conditions") or () if c.get("type") == kind), {})


def _joined(reason: str | None, words: str | None) -> str:
    return ": ".join(filter(None, (reason, (words or "").strip())))
