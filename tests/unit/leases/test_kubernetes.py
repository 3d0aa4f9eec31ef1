"""The watch of pods against a small server; tests/integration/test_kubernetes.py has the real API server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from orchestrator.errors import TransportError, UnreachableError
from orchestrator.leases import kubernetes as module
from orchestrator.leases.kubernetes import KubernetesSource
from orchestrator.leases.pods import CONTAINER, PodRequest
from tests.waiting import wait_until

pytest.importorskip("kubernetes")

POD = {
    "kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a"},
    "spec": {"nodeName": "k1", "containers": [{"name": CONTAINER}]},
    "status": {"phase": "Running", "containerStatuses": [{
        "name": CONTAINER, "image": "any", "imageID": "", "ready": True, "restartCount": 0,
        "state": {"running": {"startedAt": "2026-01-31T15:45:00Z"}},
    }]},
}  # fmt: skip
PODS = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": [POD]}
FORBIDDEN = {"kind": "Status", "message": 'pods is forbidden: User "tuner" cannot list resource "pods"', "code": 403}
Answer = tuple[int, bytes]
LISTED: Answer = (200, json.dumps(PODS).encode())
REFUSED: Answer = (403, json.dumps(FORBIDDEN).encode())


class Server:
    """An API server whose lists are `answer`, and whose watches end at once."""

    def __init__(self) -> None:
        self.answer = LISTED
        self.lists = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, body = server.answer
                if code == 200 and "watch=True" in self.path:
                    body = b""
                else:
                    server.lists += 1
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

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
    monkeypatch.setattr(module, "RETRY_S", (0.01,))
    source = KubernetesSource("r1", "pool", PodRequest("any"))
    yield source
    source.close()


def error_of(source: KubernetesSource) -> Exception | None:
    try:
        source.list()
    except TransportError as e:
        return e
    return None


def test_a_refusal_after_a_success_is_no_answer_for_a_while_and_then_a_refusal(
    server: Server, source: KubernetesSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of the API server, which has not read its roles yet."""
    monkeypatch.setattr(module, "FORBIDDEN_S", 1e9)
    assert [x.id for x in source.list()] == ["a"]
    server.answer = REFUSED
    error = wait_until(lambda: error_of(source), "it is refused")
    assert isinstance(error, UnreachableError)
    assert "may have just started (pods is forbidden" in error.reason
    server.answer = LISTED
    wait_until(lambda: error_of(source) is None, "it is allowed again")
    assert [x.id for x in source.list()] == ["a"], "nothing is lost"
    monkeypatch.setattr(module, "FORBIDDEN_S", 0.0)
    server.answer = REFUSED
    error = wait_until(lambda: error_of(source), "it is refused for too long")
    assert not isinstance(error, UnreachableError)
    assert str(error).startswith("pool: pods is forbidden")


def test_a_refusal_from_the_start_is_one(server: Server, source: KubernetesSource) -> None:
    server.answer = REFUSED
    with pytest.raises(TransportError, match="cannot list resource") as refused:
        source.list()
    assert not isinstance(refused.value, UnreachableError)


@pytest.mark.parametrize("body", [b"<html>maintenance</html>", b'{"items": 5}', b"", b'{"kind": "PodList"'])
def test_an_answer_that_is_no_list_of_pods_ends_no_watch(server: Server, source: KubernetesSource, body: bytes) -> None:
    """As of a proxy in front of a server that is away: what its client raises then is of many kinds."""
    assert [x.id for x in source.list()] == ["a"]
    server.answer = (200, body)
    error = wait_until(lambda: error_of(source), "it is noticed")
    assert isinstance(error, UnreachableError), error
    before = server.lists
    wait_until(lambda: server.lists > before + 1, "it is tried again")
    server.answer = LISTED
    wait_until(lambda: error_of(source) is None, "it is back")
    assert [x.id for x in source.list()] == ["a"], "no lease was taken for gone"
