"""Leases that are pods. One watch is kept for all of a pool; what it saw last is the answer to `list`.

Rights: examples/kubernetes-role.yaml.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from orchestrator.engines import OK, UNUSABLE, WARNING, Finding
from orchestrator.errors import NodeError, TransportError, UnreachableError
from orchestrator.leases import holder
from orchestrator.leases.api_server import CONNECT_S, ApiServer, status_of, tolerating
from orchestrator.leases.base import Lease, LeaseState
from orchestrator.leases.pods import CONTAINER, POOL_LABEL, RUN_LABEL, PodRequest, lease_of, manifest, new_name, trouble
from orchestrator.transport.base import Transport
from orchestrator.transport.exec.api_errors import refusal
from orchestrator.transport.exec.transport import ExecTransport
from orchestrator.transport.exec.websocket import WebSocketOpener

LOG_S = 120.0
WATCH_S = 30
"""A watch ends by itself after so long, and the pods are listed again: a server that hangs is noticed."""
SYNC_S = 30.0
"""Patience of the first `list` with an API server that does not answer."""
RETRY_S = (0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts to watch again."""
FORBIDDEN_S = 30.0
"""An API server that refuses what it allowed before may have just started, and not have read its roles yet: for so long
this counts as no answer."""
LOG_BYTES = 7_000_000
"""Archive that fits, in base64, into the 10 MiB of a log that a kubelet keeps (its containerLogMaxSize)."""
PULL_S = 60.0
"""An image that could not be pulled for so long is given up, with its lease."""
NOT_READY_S = 40.0
"""And a node that is NotReady for so long. After an outage of the API server all of them may be: kubelets renew their
leases every 10 s, the control plane looks every 5 s, and pods are Ready again up to 10 s later."""
RIGHTS = (
    *(("pods", "", verb) for verb in ("get", "list", "watch", "create", "delete")),
    ("pods", "exec", "get"),
    ("pods", "exec", "create"),
    ("pods", "log", "get"),
)
"""(resource, subresource, verb) of examples/kubernetes-role.yaml."""


class KubernetesSource:
    """Pods of one pool of one run."""

    def __init__(
        self, run: str, pool: str, request: PodRequest, *, context: str | None = None, namespace: str | None = None
    ) -> None:
        """Read the configuration; no request to the API server yet. Raises InputError."""
        self._server = ApiServer(pool, context)
        from kubernetes import client

        self._run, self._pool, self._request = run, pool, request
        self._script = holder.script(run, pool, request.workdir, most=LOG_BYTES)
        self._namespace = namespace or self._server.namespace
        self._core = client.CoreV1Api(self._server.api)
        self._as_dict = self._server.api.sanitize_for_serialization
        self._lock = threading.Condition()
        self._pods: dict[str, dict[str, Any]] = {}
        """Name -> the pod as it was seen last; those that are there."""
        self._over: dict[str, Lease] = {}
        """Leases that ended, whether or not the pod is there."""
        self._released: set[str] = set()
        self._troubled: dict[str, float] = {}
        """Name -> time since which it has been in trouble."""
        self._thread: threading.Thread | None = None
        self._synced = False
        self._error: Exception | None = None
        self._closed = threading.Event()
        self._watch: Any = None

    # --- the interface ---------------------------------------------------------------------------------------------

    def ask(self, n: int, avoid: Collection[str] = ()) -> None:
        for _ in range(n):
            name, body = self._pod(avoid)
            with tolerating(409):  # it was there: the answer to a first attempt got lost
                made = self._server.call(self._core.create_namespaced_pod, self._namespace, body)
                with self._lock:
                    if name not in self._over:  # the watch may have seen more of it
                        self._pods.setdefault(name, self._as_dict(made))

    def list(self) -> Sequence[Lease]:
        self._start()
        until = time.monotonic() + SYNC_S
        with self._lock:
            while not self._synced and self._error is None and (left := until - time.monotonic()) > 0:
                self._lock.wait(left)
            if self._error is not None:
                raise self._error
            if not self._synced:
                raise self._server.unreached(TimeoutError("no answer in time"))
            leases = [self._judge(pod) for pod in self._pods.values()]
            there = {lease.id for lease in leases}
            leases += [lease for name, lease in self._over.items() if name not in there]
            # what is given up, and holds its GPUs
            lost = [e.id for e in leases if e.cause and e.cause.is_loss and e.id in there - self._released]
            lost = [name for name in lost if self._pods[name]["status"].get("phase") not in ("Succeeded", "Failed")]
        if lost:
            self.release(lost)
        return leases

    def release(self, ids: Collection[str]) -> None:
        with self._lock:
            self._released.update(ids)
        for name in ids:
            with tolerating(404):
                self._server.call(self._core.delete_namespaced_pod, name, self._namespace)

    def transport(self, lease: Lease, node: str) -> Transport:
        opener = WebSocketOpener(node, self._server.api, self._namespace, lease.id, CONTAINER)
        return ExecTransport(node, opener, holder.prelude(self._request.workdir, lease.id))

    def leftovers(self, lease_id: str) -> bytes | None:
        log = ""
        with tolerating(404):
            call = self._core.read_namespaced_pod_log
            log = self._server.call(call, lease_id, self._namespace, container=CONTAINER, seconds=LOG_S)
        return holder.leftovers_in(log.encode())

    def close(self) -> None:
        self._closed.set()
        if self._watch is not None:
            self._watch.stop()
        if self._thread is not None:
            self._thread.join(1.0)
        self._server.api.close()

    def _pod(self, avoid: Collection[str] = ()) -> tuple[str, dict[str, Any]]:
        """A new pod's name and body."""
        name = new_name(self._run, self._pool)
        return name, manifest(self._request, self._run, self._pool, name, self._script, avoid)

    # --- the watch -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep_watching, name=f"pods {self._pool}", daemon=True)
                self._thread.start()

    def _keep_watching(self) -> None:
        failures, refused_at = 0, 0.0
        while not self._closed.is_set():
            try:
                self._watch_once()
                failures, refused_at = 0, 0.0
            except Exception as e:  # noqa: BLE001  the client raises many kinds, and without a watch no end is seen
                failures += 1
                error = e
                if not isinstance(e, NodeError):
                    error = UnreachableError(self._pool, f"the pods cannot be watched ({type(e).__name__}: {e})")
                elif self._synced and status_of(e) in (401, 403):
                    refused_at = refused_at or time.monotonic()
                    if time.monotonic() - refused_at < FORBIDDEN_S:
                        words = f"the API server refuses what it allowed before; it may have just started ({e.reason})"
                        error = UnreachableError(self._pool, words)
                with self._lock:
                    self._error = error
                    self._lock.notify_all()
            self._closed.wait(RETRY_S[min(failures, len(RETRY_S) - 1)])

    def _watch_once(self) -> None:
        """List, then watch until that ends. Raises TransportError."""
        import urllib3
        from kubernetes import client, watch

        call = self._core.list_namespaced_pod
        ours = f"{RUN_LABEL}={self._run},{POOL_LABEL}={self._pool}"
        with self._lock:
            known = set(self._pods)
        found = self._server.call(call, self._namespace, label_selector=ours)
        version, pods = found.metadata.resource_version, [self._as_dict(p) for p in found.items]
        self._relisted(pods, known)
        self._watch = watch.Watch()
        events = self._watch.stream(
            call, self._namespace, label_selector=ours, resource_version=version,
            timeout_seconds=WATCH_S, _request_timeout=(CONNECT_S, WATCH_S + CONNECT_S),
        )  # fmt: skip
        try:
            for event in events:
                if self._closed.is_set():
                    return
                self._saw(event["raw_object"], gone=event["type"] == "DELETED")
        except client.ApiException as e:
            if e.status != 410:  # only what is too old to go on from: list again
                raise refusal(self._pool, e.status or 0, e.body or e.reason or "") from e
        except (urllib3.exceptions.HTTPError, OSError, ValueError):
            pass  # the list shows why

    def _relisted(self, pods: Sequence[dict[str, Any]], known: Collection[str]) -> None:
        """`known`: names from before the list; pods that were requested since then may be missing in it."""
        with self._lock:
            for name in set(known) - {p["metadata"]["name"] for p in pods}:
                if name in self._pods:
                    self._saw(self._pods[name], gone=True)
            for pod in pods:
                self._saw(pod)
            self._synced, self._error = True, None
            self._lock.notify_all()

    def _saw(self, pod: dict[str, Any], gone: bool = False) -> None:
        with self._lock:
            name = pod["metadata"]["name"]
            if gone:
                self._pods.pop(name, None)
                self._over.setdefault(name, lease_of(pod, gone=True, released=name in self._released))
            else:
                self._pods[name] = pod

    def _judge(self, pod: dict[str, Any]) -> Lease:
        """The lease of a pod that is there. One that ended once does not come back."""
        name = pod["metadata"]["name"]
        if name in self._over:
            return self._over[name]
        now = time.monotonic()
        wrong = trouble(pod)
        since = self._troubled.setdefault(name, now) if wrong else self._troubled.pop(name, now)
        limit = NOT_READY_S if wrong == "node" else PULL_S
        lease = lease_of(pod, released=name in self._released, patient=now - since < limit)
        if lease.state is LeaseState.ENDED:
            self._over[name] = lease
        return lease

    # --- what can be seen without a lease --------------------------------------------------------------------------

    def check(self) -> Sequence[Finding]:
        try:
            return list(self._findings())
        except TransportError as e:
            return [Finding(UNUSABLE, "kubernetes", e.reason, "see `kubectl cluster-info`")]  # with the same KUBECONFIG

    def _findings(self) -> Iterator[Finding]:
        from kubernetes import client

        version = self._server.call(client.VersionApi(self._server.api).get_code)
        where = f"namespace {self._namespace} of {self._server.api.configuration.host}"
        yield Finding(OK, "kubernetes", f"{version.git_version}, {where}")
        if not self._server.api.configuration.verify_ssl:
            what = "the kubeconfig says insecure-skip-tls-verify: anyone can pose as the API server"
            yield Finding(WARNING, "tls", what, "give the cluster's `certificate-authority` there")
        denied = [right for right in RIGHTS if not self._may(*right)]
        if denied:
            words = ", ".join(f"{verb} {kind}{'/' + sub if sub else ''}" for kind, sub, verb in denied)
            way = f"have examples/kubernetes-role.yaml bound to you there (kubectl apply -n {self._namespace})"
            yield Finding(UNUSABLE, "permissions", f"you may not {words} in namespace {self._namespace}", way)
        if ("pods", "", "create") in denied:
            return
        try:
            _, body = self._pod()
            self._server.call(
                self._core.create_namespaced_pod, self._namespace, body, dry_run="All", field_validation="Strict"
            )
        except TransportError as e:
            if status_of(e) is None:
                raise
            about = "quota" if "exceeded quota" in e.reason else "namespace" if status_of(e) == 404 else "pod"
            ways = {
                "quota": "give fewer `gpus:`, or wait until the namespace has some again (kubectl describe quota)",
                "namespace": "correct `namespace:`, or make it (kubectl create namespace)",
            }
            yield Finding(UNUSABLE, about, e.reason, ways.get(about, "correct the node's `pod:`"))

    def _may(self, resource: str, subresource: str, verb: str) -> bool:
        from kubernetes import client

        of = {"namespace": self._namespace, "resource": resource, "subresource": subresource, "verb": verb}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        call = client.AuthorizationV1Api(self._server.api).create_self_subject_access_review
        return bool(self._server.call(call, {**review, "spec": {"resourceAttributes": of}}).status.allowed)
