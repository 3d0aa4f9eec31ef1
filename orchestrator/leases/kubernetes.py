"""Leases that are pods. One watch is kept for all of a pool; what it saw last is the answer to `list`.

Server, certificates and credentials are read by the official client alone (the extra `kubernetes`, imported when the
first such pool is made): the kubeconfig, or in a pod its service account. Rights: examples/kubernetes-role.yaml.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.engines import OK, UNUSABLE, WARNING, Finding
from orchestrator.errors import InputError, LoginError, NodeError, TransportError
from orchestrator.leases import holder
from orchestrator.leases.base import Lease, LeaseState
from orchestrator.leases.pods import CONTAINER, POOL_LABEL, RUN_LABEL, PodRequest, lease_of, manifest, new_name, trouble
from orchestrator.tables.faults import did_you_mean
from orchestrator.transport.base import Transport
from orchestrator.transport.exec.transport import ExecTransport
from orchestrator.transport.exec.websocket import KEEPALIVE, WebSocketOpener, refusal, unreached

CONNECT_S, CALL_S, LOG_S = 5.0, 20.0, 120.0
WATCH_S = 30
"""A watch ends by itself after so long, and the pods are listed again: a server that hangs is noticed."""
SYNC_S = 30.0
"""Patience of the first `list` with an API server that does not answer."""
RETRY_S = (0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts to watch again."""
LOG_BYTES = 7_000_000
"""Archive that fits, in base64, into the 10 MiB of a log that a kubelet keeps (its containerLogMaxSize)."""
PULL_S = 60.0
"""An image that could not be pulled for so long is given up, with its lease."""
NOT_READY_S = 15.0
"""And a node that is NotReady for so long: all of them may be for a moment after the API server was away."""
RIGHTS = (
    *(("pods", "", verb) for verb in ("get", "list", "watch", "create", "delete")),
    ("pods", "exec", "get"),
    ("pods", "exec", "create"),
    ("pods", "log", "get"),
)
"""(resource, subresource, verb) of examples/kubernetes-role.yaml."""


def connect(context: str | None) -> tuple[Any, str]:
    """(the official client's ApiClient, namespace of the context). Raises InputError with the way out."""
    try:
        import urllib3
        from kubernetes import client, config
        from kubernetes.config import incluster_config
    except ImportError as e:
        way = "pip install 'gemmfleet[kubernetes]'"
        raise InputError(f"nodes with `lease: kubernetes` need the package kubernetes ({e}): {way}") from e
    settings = client.Configuration()
    settings.retries = False
    settings.socket_options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *KEEPALIVE,
    ]  # fmt: skip
    file = os.environ.get("KUBECONFIG") or None
    try:
        if context is None and file is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=settings)
            place = Path(incluster_config.SERVICE_TOKEN_FILENAME).with_name("namespace")
            namespace = place.read_text().strip() if place.is_file() else ""
        else:
            contexts, active = config.list_kube_config_contexts(config_file=file)
            known = {c["name"]: c for c in contexts}
            if context is not None and context not in known:
                raise InputError(
                    f"the kubeconfig has no context {context}{did_you_mean(context, known)} "
                    f"(it has: {', '.join(sorted(known)) or 'none'}; `kubectl config get-contexts`)"
                )
            namespace = ((known[context] if context else active)["context"] or {}).get("namespace") or ""
            config.load_kube_config(file, context, settings, persist_config=False)
    except InputError:
        raise
    except Exception as e:  # the client raises many kinds for a file that is no kubeconfig
        where = file or "~/.kube/config"
        raise InputError(f"the kubeconfig {where} cannot be used ({e}): set KUBECONFIG, or `context:`") from e
    if not settings.verify_ssl:
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # `check` says so
    return client.ApiClient(settings), namespace or "default"


class KubernetesSource:
    """Pods of one pool of one run."""

    def __init__(
        self, run: str, pool: str, request: PodRequest, *, context: str | None = None, namespace: str | None = None
    ) -> None:
        """Read the configuration; no request to the API server yet. Raises InputError."""
        self._api, of_context = connect(context)
        from kubernetes import client

        self._run, self._pool, self._request = run, pool, request
        self._script = holder.script(run, pool, request.workdir, most=LOG_BYTES)
        self._namespace = namespace or of_context
        self._core = client.CoreV1Api(self._api)
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
        self._error: NodeError | None = None
        self._closed = threading.Event()
        self._watch: Any = None

    # --- the interface ---------------------------------------------------------------------------------------------

    def ask(self, n: int, avoid: Collection[str] = ()) -> None:
        for _ in range(n):
            name, body = self._pod(avoid)
            with _tolerating(409):  # it was there: the answer to a first attempt got lost
                made = self._call(self._core.create_namespaced_pod, self._namespace, body)
                with self._lock:
                    if name not in self._over:  # the watch may have seen more of it
                        self._pods.setdefault(name, self._api.sanitize_for_serialization(made))

    def list(self) -> Sequence[Lease]:
        self._start()
        until = time.monotonic() + SYNC_S
        with self._lock:
            while not self._synced and self._error is None and (left := until - time.monotonic()) > 0:
                self._lock.wait(left)
            if self._error is not None:
                raise self._error
            if not self._synced:
                raise unreached(self._pool, self._api.configuration.host, TimeoutError("no answer in time"))
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
            with _tolerating(404):
                self._call(self._core.delete_namespaced_pod, name, self._namespace)

    def transport(self, lease: Lease, node: str) -> Transport:
        opener = WebSocketOpener(node, self._api, self._namespace, lease.id, CONTAINER)
        return ExecTransport(node, opener, holder.prelude(self._request.workdir, lease.id))

    def leftovers(self, lease_id: str) -> bytes | None:
        log = ""
        with _tolerating(404):
            call = self._core.read_namespaced_pod_log
            log = self._call(call, lease_id, self._namespace, container=CONTAINER, seconds=LOG_S)
        return holder.leftovers_in(log.encode())

    def close(self) -> None:
        self._closed.set()
        if self._watch is not None:
            self._watch.stop()
        if self._thread is not None:
            self._thread.join(1.0)
        self._api.close()

    def _pod(self, avoid: Collection[str] = ()) -> tuple[str, dict[str, Any]]:
        """A new pod's name and body."""
        name = new_name(self._run, self._pool)
        return name, manifest(self._request, self._run, self._pool, name, self._script, avoid)

    # --- calls -----------------------------------------------------------------------------------------------------

    def _call(self, call: Callable[..., Any], *args: Any, seconds: float = CALL_S, **options: Any) -> Any:
        """The result of a call, of which twice is as good as once. Raises TransportError."""
        import urllib3
        from kubernetes.client import ApiException
        from kubernetes.config import ConfigException

        for last in (False, True):
            try:
                return call(*args, **options, _request_timeout=(CONNECT_S, seconds))
            except ApiException as e:
                if not e.status:  # the client's word for errors of TLS
                    raise unreached(self._pool, self._api.configuration.host, e) from e
                raise refusal(self._pool, e.status, e.body or e.reason or "") from e
            except ConfigException as e:
                raise LoginError(self._pool, f"the kubeconfig's credentials cannot be had ({e})") from e
            except (urllib3.exceptions.HTTPError, OSError) as e:
                if last or isinstance(e, urllib3.exceptions.TimeoutError):
                    raise unreached(self._pool, self._api.configuration.host, e) from e
        raise AssertionError

    # --- the watch -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep_watching, name=f"pods {self._pool}", daemon=True)
                self._thread.start()

    def _keep_watching(self) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                for _ in self._watched():
                    failures = 0
                self._closed.wait(RETRY_S[0])
            except NodeError as e:
                with self._lock:
                    self._error = e
                    self._lock.notify_all()
                self._closed.wait(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1

    def _watched(self) -> Iterator[None]:
        """List, then watch until that ends; an item for each thing that was seen. Raises TransportError."""
        import urllib3
        from kubernetes import client, watch

        call = self._core.list_namespaced_pod
        ours = f"{RUN_LABEL}={self._run},{POOL_LABEL}={self._pool}"
        with self._lock:
            known = set(self._pods)
        found = self._call(call, self._namespace, label_selector=ours)
        self._relisted([self._api.sanitize_for_serialization(p) for p in found.items], known)
        yield
        self._watch = watch.Watch()
        events = self._watch.stream(
            call, self._namespace, label_selector=ours, resource_version=found.metadata.resource_version,
            timeout_seconds=WATCH_S, _request_timeout=(CONNECT_S, WATCH_S + CONNECT_S),
        )  # fmt: skip
        try:
            for event in events:
                if self._closed.is_set():
                    return
                self._saw(event["raw_object"], gone=event["type"] == "DELETED")
                yield
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

        version = self._call(client.VersionApi(self._api).get_code)
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
        if ("pods", "", "create") in denied:
            return
        try:
            _, body = self._pod()
            self._call(
                self._core.create_namespaced_pod, self._namespace, body, dry_run="All", field_validation="Strict"
            )
        except TransportError as e:
            if _status(e) is None:
                raise
            about = "quota" if "exceeded quota" in e.reason else "namespace" if _status(e) == 404 else "pod"
            ways = {
                "quota": "give fewer `gpus:`, or wait until the namespace has some again (kubectl describe quota)",
                "namespace": "correct `namespace:`, or make it (kubectl create namespace)",
            }
            yield Finding(UNUSABLE, about, e.reason, ways.get(about, "correct the node's `pod:`"))

    def _may(self, resource: str, subresource: str, verb: str) -> bool:
        from kubernetes import client

        of = {"namespace": self._namespace, "resource": resource, "subresource": subresource, "verb": verb}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        call = client.AuthorizationV1Api(self._api).create_self_subject_access_review
        return bool(self._call(call, {**review, "spec": {"resourceAttributes": of}}).status.allowed)


@contextlib.contextmanager
def _tolerating(status: int) -> Iterator[None]:
    """Let the API server's answers of one status pass."""
    try:
        yield
    except TransportError as e:
        if _status(e) != status:
            raise


def _status(e: TransportError) -> int | None:
    """HTTP status of the answer that an error is made of."""
    return getattr(e.__cause__, "status", None)
