"""A real Kubernetes control plane on loopback, for tests: API server, scheduler, controller-manager, etcd.

The first three are one binary, KUBE_BIN, or its `.xz`, which is unpacked once into ~/.cache/gemmfleet-tests; etcd is
Debian's `etcd-server`. No distribution packages the binary. The tests ran with `cmd/hyper` of Debian's source package
`kubernetes` 1.20.2, built with Go 1.19 in half an hour: GO111MODULE=off, reflect2 that of
`golang-github-modern-go-reflect2-dev`, OpenAPI generated first. No kubelet can run here: tests/standins/kubelet.py
stands in for those of the nodes. RBAC is on, and all certificates are of an authority that is made for the cluster, so
TLS is really verified.

    with Cluster(folder, nodes=2) as cluster:
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig())

Users: `admin`, and `tuner`, who may do in the namespace `tuning` what ROLE says.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import lzma
import os
import secrets
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from ssl import create_default_context
from typing import IO, Any

import yaml

from tests.paths import ROOT
from tests.waiting import PATIENCE_S, wait_until

CACHE = Path.home() / ".cache" / "gemmfleet-tests"
ROLE = ROOT / "examples" / "kubernetes-role.yaml"
NAMESPACE = "tuning"
OF_NAMESPACE = f"/api/v1/namespaces/{NAMESPACE}"
RBAC = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
GRACE_S = 8
"""Seconds without a beat after which a node is NotReady."""
CONTROLLERS = "nodelifecycle,podgc,garbagecollector,namespace,resourcequota,serviceaccount"


def why_not() -> str:
    """Reason why there can be no cluster here; "" for none."""
    given = os.environ.get("KUBE_BIN", "")
    if not given:
        return "KUBE_BIN names no Kubernetes API server"
    if not Path(given).is_file():
        return f"KUBE_BIN: {given} is not a file"
    for command, package in (("etcd", "etcd-server"), ("openssl", "openssl")):
        if shutil.which(command) is None:
            return f"there is no {command} (Debian: {package})"
    return ""


def binary() -> Path:
    """The program that KUBE_BIN names; unpacked where it is an `.xz`."""
    given = Path(os.environ["KUBE_BIN"])
    if given.suffix != ".xz":
        return given
    CACHE.mkdir(parents=True, exist_ok=True)
    state = given.stat()
    name = hashlib.sha256(f"{given.name} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    program = CACHE / f"kube-{name}"
    with (CACHE / "kube.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            aside = program.with_suffix(".part")
            with lzma.open(given) as packed, aside.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
            aside.chmod(0o755)
            aside.rename(program)
    return program


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def free_ports(n: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]


class Cluster:
    """A control plane and the stand-in kubelets of nodes `k1`, `k2`, ..., each with GPUs."""

    def __init__(self, folder: Path, nodes: int = 2, gpus: int = 2) -> None:
        self.folder = folder
        self.nodes = [f"k{i + 1}" for i in range(nodes)]
        self._gpus = gpus
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._tokens = {user: secrets.token_hex(16) for user in ("admin", "tuner")}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._etcd, self._peer, self._api, manager, scheduler, *kubelets = free_ports(5 + len(self.nodes))
        self._certificates()
        admin = self.kubeconfig("admin")
        self._run(
            "etcd", "etcd", "--name", "tests", "--data-dir", "etcd", "--unsafe-no-fsync",
            "--listen-client-urls", _url(self._etcd), "--advertise-client-urls", _url(self._etcd),
            "--listen-peer-urls", _url(self._peer), "--initial-advertise-peer-urls", _url(self._peer),
            "--initial-cluster", f"tests={_url(self._peer)}",
        )  # fmt: skip
        self.start_api()
        common = ("--kubeconfig", admin, "--leader-elect=false", "--bind-address", "127.0.0.1", "--port", "0")
        self._run(
            "manager", binary(), "controller-manager", *common, "--secure-port", manager, "--cert-dir", "manager",
            "--controllers", CONTROLLERS, "--service-account-private-key-file", "sa.key",
            "--node-monitor-grace-period", f"{GRACE_S}s", "--node-monitor-period", "1s",
        )  # fmt: skip
        self._run("scheduler", binary(), "scheduler", *common, "--secure-port", scheduler, "--cert-dir", "scheduler")
        self._kubelets(dict(zip(self.nodes, kubelets, strict=True)))
        self._namespace()
        wait_until(lambda: all(map(self.is_ready, self.nodes)), "the nodes are ready")

    def _stop(self) -> None:
        for name, process in reversed(self._processes.items()):
            if name != "kubelets":
                process.kill()
            elif process.stdin is not None:
                with contextlib.suppress(OSError):  # they end with their input
                    process.stdin.close()
        for process in self._processes.values():
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def start_api(self) -> None:
        """Bring the API server up, at first or again."""
        self._run(
            "api", binary(), "apiserver", "--etcd-servers", _url(self._etcd), "--cert-dir", "api",
            "--tls-cert-file", "node.pem", "--tls-private-key-file", "node.pem", "--bind-address", "127.0.0.1",
            "--advertise-address", "127.0.0.1", "--secure-port", self._api, "--client-ca-file", "ca.pem",
            "--service-cluster-ip-range", "198.18.96.0/24", "--token-auth-file", "tokens.csv",
            "--service-account-key-file", "sa.pub", "--service-account-signing-key-file", "sa.key",
            "--service-account-issuer", "https://kubernetes.default.svc", "--authorization-mode", "RBAC",
            "--kubelet-certificate-authority", "ca.pem", "--kubelet-client-certificate", "node.pem",
            "--kubelet-client-key", "node.pem", "--kubelet-preferred-address-types", "InternalIP", "--profiling=false",
        )  # fmt: skip
        wait_until(self._api_is_ready, "the API server is ready")

    def stop_api(self) -> None:
        process = self._processes.pop("api")
        process.kill()
        process.wait()

    def _run(self, name: str, *argv: object, **options: Any) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*map(str, argv)], cwd=options.pop("cwd", self.folder), stdin=options.pop("stdin", subprocess.DEVNULL),
                stdout=options.pop("stdout", log), stderr=log, start_new_session=True, text=True,
            )  # fmt: skip
        self._processes[name] = process
        return process

    def _api_is_ready(self) -> bool:
        assert self._processes["api"].poll() is None, (self.folder / "api.log").read_text()[-2000:]
        with contextlib.suppress(OSError):
            return self.get("/readyz") == b"ok"
        return False

    def _kubelets(self, ports: dict[str, int]) -> None:
        settings = {
            "server": self.server, "ca": str(self.ca), "token": self._tokens["admin"], "nodes": ports,
            "certificate": str(self.folder / "node.pem"), "folder": str(self.folder / "pods"), "gpus": self._gpus,
        }  # fmt: skip
        config = self.folder / "kubelets.json"
        config.touch(0o600)
        config.write_text(json.dumps(settings))
        argv = (sys.executable, "-m", "tests.standins.kubelet", config)
        process = self._run("kubelets", *argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._replied(process.stdout, "ready")

    def _replied(self, replies: IO[str] | None, wanted: str) -> None:
        assert replies is not None
        if (reply := replies.readline().strip()) != wanted:
            raise AssertionError(f"the kubelets: {reply!r} {(self.folder / 'kubelets.log').read_text()[-2000:]}")

    def _certificates(self) -> None:
        import trustme

        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca))
        trustme.CA().cert_pem.write_to_path(str(self.wrong_ca))
        leaf = authority.issue_cert("127.0.0.1", "localhost")
        leaf.private_key_and_cert_chain_pem.write_to_path(str(self.folder / "node.pem"))
        for command in ("genrsa -out sa.key 2048", "rsa -in sa.key -pubout -out sa.pub"):
            subprocess.run(["openssl", *command.split()], cwd=self.folder, check=True, capture_output=True)
        tokens = self.folder / "tokens.csv"
        tokens.touch(0o600)
        groups = {"admin": "system:masters"}
        tokens.write_text("".join(f"{t},{u},{u},{groups.get(u, '')}\n" for u, t in self._tokens.items()))

    def _namespace(self) -> None:
        """The namespace, with the role of the page."""
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        (role,) = (d for d in yaml.safe_load_all(ROLE.read_text()) if d and d["kind"] == "Role")
        of = {"metadata": {"name": "tuner"}}
        self.request("POST", f"{RBAC}/roles", {**of, "rules": role["rules"]})
        to = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "tuner"}
        binding = {**of, "subjects": [{"kind": "User", "name": "tuner"}], "roleRef": to}
        self.request("POST", f"{RBAC}/rolebindings", binding)
        wait_until(lambda: self.get(f"{OF_NAMESPACE}/serviceaccounts/default"), "pods can be made in the namespace")

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self._api}"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def wrong_ca(self) -> Path:
        """Certificate of an authority that has nothing to do with the cluster."""
        return self.folder / "wrong-ca.pem"

    def kubeconfig(self, user: str = "tuner", *, ca: Path | None = None, insecure: bool = False) -> Path:
        """A kubeconfig of a user; `ca`: in place of the cluster's own."""
        trust = {"insecure-skip-tls-verify": True} if insecure else {"certificate-authority": str(ca or self.ca)}
        path = self.folder / f"kubeconfig-{user}-{secrets.token_hex(3)}"
        path.touch(0o600)
        path.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "lab",
            "clusters": [{"name": "lab", "cluster": {"server": self.server, **trust}}],
            "users": [{"name": user, "user": {"token": self._tokens[user]}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": user, "namespace": NAMESPACE}}],
        }))  # fmt: skip
        return path

    def request(self, method: str, path: str, body: object = None) -> bytes:
        """Answer of the API server. Raises OSError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._tokens['admin']}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.server + path, data, headers, method=method)
        context = create_default_context(cafile=str(self.ca))
        with urllib.request.urlopen(request, context=context, timeout=PATIENCE_S) as answer:
            return bytes(answer.read())

    def get(self, path: str) -> bytes:
        try:
            return self.request("GET", path)
        except urllib.error.HTTPError:
            return b""

    def pods(self) -> list[dict[str, Any]]:
        """All pods of the namespace."""
        return list(json.loads(self.get(f"{OF_NAMESPACE}/pods"))["items"])

    def delete_pod(self, name: str) -> None:
        """A pod that has just gone is deleted, too."""
        with contextlib.suppress(urllib.error.HTTPError):
            self.request("DELETE", f"{OF_NAMESPACE}/pods/{name}")

    def quota(self, **hard: str) -> None:
        """A ResourceQuota of the namespace; `mend` removes it."""
        path = f"{OF_NAMESPACE}/resourcequotas"
        self.request("POST", path, {"metadata": {"name": "tests"}, "spec": {"hard": hard}})

        def counted() -> bool:
            return bool(json.loads(self.get(f"{path}/tests") or b"{}").get("status", {}).get("used"))

        wait_until(counted, "the controller has counted, and refuses what is too much")

    def mend(self) -> None:
        """Restore the first state: no quota, no pod, every node ready."""
        with contextlib.suppress(urllib.error.HTTPError):
            self.request("DELETE", f"{OF_NAMESPACE}/resourcequotas/tests")
        for node in self.nodes:
            self.fault("revive", node)
        for pod in self.pods():
            self.delete_pod(pod["metadata"]["name"])
        wait_until(lambda: not self.pods(), "no pod is left")
        wait_until(lambda: all(map(self.is_ready, self.nodes)), "the nodes are ready")

    def is_ready(self, node: str) -> bool:
        """Ready in the eyes of the control plane."""
        found = json.loads(self.get(f"/api/v1/nodes/{node}") or b"{}")
        conditions: Sequence[dict[str, str]] = found.get("status", {}).get("conditions", ())
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def fault(self, verb: str, name: str) -> None:
        """kill or revive of a node; evict, cut or freeze of a pod (tests/standins/kubelet.py)."""
        process = self._processes["kubelets"]
        assert process.stdin is not None
        process.stdin.write(f"{verb} {name}\n")
        process.stdin.flush()
        self._replied(process.stdout, "ok")
