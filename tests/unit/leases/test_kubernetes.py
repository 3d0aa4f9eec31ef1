"""The list of pods of a small server; tests/integration/test_kubernetes.py has the real API server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from orchestrator.errors import TransportError, UnreachableError
from orchestrator.leases import kubernetes
from orchestrator.leases.base import EndCause, LeaseState
from orchestrator.leases.kubernetes import CONTAINER, KubernetesSource, PodRequest

pytest.importorskip("kubernetes")

STATUS = {"phase": "Running", "containerStatuses": [{
    "name": CONTAINER, "image": "any", "imageID": "", "ready": True, "restartCount": 0,
    "state": {"running": {"startedAt": "2026-01-31T15:45:00Z"}},
}]}  # fmt: skip
POD = {
    "kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a"},
    "spec": {"nodeName": "k1", "containers": [{"name": CONTAINER}]},
    "status": STATUS,
}  # fmt: skip
PODS = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": [POD]}
FORBIDDEN = {"kind": "Status", "message": 'pods is forbidden: User "tuner" cannot list resource "pods"', "code": 403}
Answer = tuple[int, bytes]
LISTED: Answer = (200, json.dumps(PODS).encode())
REFUSED: Answer = (403, json.dumps(FORBIDDEN).encode())


class Server:
    """An API server that answers `answer`."""

    def __init__(self) -> None:
        self.answer = LISTED
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, body = server.answer
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads it."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def kubeconfig(self, folder: Path) -> Path:
        path = folder / "kubeconfig"
        context = {"cluster": "c", "user": "u"}
        path.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._http.server_port}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}], "contexts": [{"name": "x", "context": context}],
        }))  # fmt: skip
        return path

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def source(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesSource]:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    source = KubernetesSource("r1", "pool", PodRequest("any"))
    yield source
    source.close()


def test_a_refusal_is_one_and_an_answer_that_is_no_list_of_pods_is_none(
    server: Server, source: KubernetesSource
) -> None:
    """A proxy in front of a server that is away answers like this; the client raises errors of many kinds then."""
    assert [x.id for x in source.list()] == ["a"]
    server.answer = REFUSED
    with pytest.raises(TransportError, match="cannot list resource") as refused:
        source.list()
    assert not isinstance(refused.value, UnreachableError)
    for body in (b"<html>maintenance</html>", b'{"items": 5}', b"", b'{"kind": "PodList"'):
        server.answer = (200, body)
        with pytest.raises(UnreachableError):
            source.list()


def test_trouble_that_lasts_ends_a_lease(
    server: Server, source: KubernetesSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    conditions = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    server.answer = (
        200,
        json.dumps({**PODS, "items": [{**POD, "status": {**STATUS, "conditions": conditions}}]}).encode(),
    )
    assert [x.state for x in source.list()] == [LeaseState.READY]
    monkeypatch.setattr(kubernetes, "NOT_READY_S", 0.0)
    assert [(x.cause, x.why) for x in source.list()] == [(EndCause.FAILED, "node k1 is NotReady")]
    server.answer = LISTED
    assert [x.state for x in source.list()] == [LeaseState.READY]
