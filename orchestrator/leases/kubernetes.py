"""Leases that are pods, which are listed every few seconds. Rights: examples/kubernetes-role.yaml."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.engines import OK, UNUSABLE, WARNING, Finding
from orchestrator.errors import TransportError
from orchestrator.leases import holder, pods
from orchestrator.leases.base import EndCause, Lease, LeaseState
from orchestrator.transport.base import Transport
from orchestrator.transport.exec.pod import CALL_S, PodOpener, call, connect, status_of
from orchestrator.transport.exec.transport import ExecTransport

LOG_S = 120.0
LOG_BYTES = 7_000_000
"""Archive that fits, in base64, into the 10 MiB of a log that a kubelet keeps (its containerLogMaxSize)."""
RIGHTS = (
    *(("pods", "", verb) for verb in ("get", "list", "create", "delete")),
    ("pods", "exec", "get"),
    ("pods", "exec", "create"),
    ("pods", "log", "get"),
)
"""(resource, subresource, verb) of examples/kubernetes-role.yaml."""
WAYS = {
    "quota": "give fewer `gpus:`, or wait until the namespace has some again (kubectl describe quota)",
    "namespace": "correct `namespace:`, or make it (kubectl create namespace)",
    "pod": "correct the node's `pod:`",
}
"""Ways out of a pod that cannot be made."""


class KubernetesSource:
    """Pods of one pool of one run (LeaseSource)."""

    def __init__(
        self, run: str, pool: str, request: pods.PodRequest, *, context: str | None = None, namespace: str | None = None
    ) -> None:
        """Read the configuration; no request to the API server yet. Raises InputError."""
        self._api, ours = connect(context)
        from kubernetes import client

        self._run, self._pool, self._request = run, pool, request
        self._script = holder.script(run, pool, request.workdir, most=LOG_BYTES)
        self._namespace, self._core = namespace or ours, client.CoreV1Api(self._api)
        self._troubled: dict[str, float] = {}
        """Name -> time since which it has been in trouble."""

    def ask(self, n: int, avoid: Collection[str] = ()) -> None:
        """Make `n` pods, none of them on a host of `avoid`."""
        for _ in range(n):
            self._call(self._core.create_namespaced_pod, body=self._pod(avoid))

    def list(self) -> Sequence[Lease]:
        """The pods that are there. One in trouble for too long has ended."""
        ours = f"{pods.RUN_LABEL}={self._run},{pods.POOL_LABEL}={self._pool}"
        found = self._call(self._core.list_namespaced_pod, label_selector=ours)
        there = [self._api.sanitize_for_serialization(pod) for pod in found.items]
        now, since, leases = time.monotonic(), self._troubled, []
        self._troubled = {}
        for pod in sorted(there, key=lambda p: (p["metadata"].get("creationTimestamp", ""), p["metadata"]["name"])):
            lease = pods.lease_of(pod)
            words, limit = pods.trouble(pod)
            if words:
                self._troubled[lease.id] = since.get(lease.id, now)
                if now - self._troubled[lease.id] >= limit and lease.state is not LeaseState.ENDED:
                    lease = replace(lease, state=LeaseState.ENDED, why=words, cause=EndCause.FAILED)
            leases.append(lease)
        return leases

    def release(self, leases: Collection[Lease]) -> None:
        """Delete pods, those that have ended, too."""
        for lease in leases:
            self._of_pod(self._core.delete_namespaced_pod, lease)

    def transport(self, lease: Lease, node: str) -> Transport:
        """Files and commands in a pod that runs. `node`: its name in messages."""
        opener = PodOpener(node, self._api, self._namespace, lease.id, pods.CONTAINER)
        return ExecTransport(node, opener, holder.prelude(self._request.workdir, lease.id))

    def leftovers(self, lease: Lease) -> bytes | None:
        """The rows that a pod's holder wrote into its log, or None."""
        log = self._of_pod(self._core.read_namespaced_pod_log, lease, container=pods.CONTAINER, seconds=LOG_S)
        return holder.leftovers_in(log.encode()) if log else None

    def close(self) -> None:
        """The pods go on."""
        self._api.close()

    def _call(self, method: Any, *args: Any, seconds: float = CALL_S, **options: Any) -> Any:
        return call(self._pool, method, *args, seconds=seconds, namespace=self._namespace, **options)

    def _of_pod(self, method: Any, lease: Lease, **options: Any) -> Any:
        """The answer of a method of one pod's; None where the pod is gone."""
        try:
            return self._call(method, name=lease.id, **options)
        except TransportError as e:
            if status_of(e) != 404:
                raise
            return None

    def _pod(self, avoid: Collection[str] = ()) -> dict[str, Any]:
        name = pods.new_name(self._run, self._pool)
        return pods.manifest(self._request, self._run, self._pool, name, self._script, avoid)

    # --- what can be seen without a lease --------------------------------------------------------------------------

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
                about = "quota" if "exceeded quota" in e.reason else "namespace" if status_of(e) == 404 else "pod"
                yield Finding(UNUSABLE, about, e.reason, WAYS[about])

    def _may(self, resource: str, subresource: str, verb: str) -> bool:
        from kubernetes import client

        of = {"namespace": self._namespace, "resource": resource, "subresource": subresource, "verb": verb}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        method = client.AuthorizationV1Api(self._api).create_self_subject_access_review
        return bool(call(self._pool, method, {**review, "spec": {"resourceAttributes": of}}).status.allowed)
