"""Exec of a pod against a server of its protocol; tests/integration/test_kubernetes.py has the real API server."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from orchestrator.errors import HostKeyError, LoginError, TransportError, UnreachableError
from orchestrator.transport.exec import websocket
from orchestrator.transport.exec.api_errors import refusal, unreached
from orchestrator.transport.exec.websocket import PodChannel, WebSocketOpener
from tests.waiting import PATIENCE_S

pytest.importorskip("kubernetes")
sync = pytest.importorskip("websockets.sync.server")

FAILED = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [
    {"reason": "ExitCode", "message": "7"}
]}}  # fmt: skip
Start = Callable[[Callable[[Any], None]], PodChannel]


def bearer() -> dict[str, dict[str, str]]:
    return {"BearerToken": {"in": "header", "key": "authorization", "value": "Bearer t"}}


def opener_to(port: int, auth: Callable[[], Any] = bearer) -> WebSocketOpener:
    config = SimpleNamespace(
        host=f"http://127.0.0.1:{port}", proxy=None, verify_ssl=True, ssl_ca_cert=None,
        assert_hostname=None, cert_file=None, tls_server_name=None, auth_settings=auth,
    )  # fmt: skip
    return WebSocketOpener("n1", SimpleNamespace(configuration=config), "tuning", "a", "gemmfleet")


@pytest.fixture
def start() -> Iterator[Start]:
    """Connect to a server that answers as the given function does."""
    servers: list[tuple[Any, threading.Thread]] = []
    channels: list[PodChannel] = []

    def connect(answer: Callable[[Any], None]) -> PodChannel:
        server = sync.serve(answer, "127.0.0.1", 0, subprotocols=[websocket.PROTOCOL], compression=None)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        opener = opener_to(server.socket.getsockname()[1])
        channels.append(opener.start("echo 'a b'", time.monotonic() + PATIENCE_S))
        return channels[-1]

    yield connect
    for channel in channels:
        channel.close()
    for server, thread in servers:
        server.shutdown()
        thread.join()


def status(connection: Any, given: object) -> None:
    connection.send(b"\3" + json.dumps(given).encode())


def test_a_command_is_asked_for_as_the_api_wants_it(start: Start) -> None:
    seen = []

    def answer(connection: Any) -> None:
        seen.append((connection.request.path, connection.request.headers["Authorization"], connection.subprotocol))
        status(connection, {"status": "Success"})

    assert start(answer).exit_code() == 0
    ((path, token, protocol),) = seen
    assert (token, protocol) == ("Bearer t", "v4.channel.k8s.io")
    assert urlsplit(path).path == "/api/v1/namespaces/tuning/pods/a/exec"
    assert parse_qs(urlsplit(path).query) == {
        "container": ["gemmfleet"], "stdin": ["true"], "stdout": ["true"], "stderr": ["true"],
        "command": ["sh", "-c", "echo 'a b'"],
    }  # fmt: skip


def test_messages_in_parts_and_streams_are_put_together(start: Start) -> None:
    def answer(connection: Any) -> None:
        connection.send(b"\1")
        connection.send([b"\1one ", b"two ", b"three"])
        connection.send(b"\2words")
        connection.send(b"\1 four")
        status(connection, FAILED)

    channel = start(answer)
    out = b""
    while more := channel.read(4):
        out += more
    assert out == b"one two three four"
    assert channel.exit_code() == 7
    assert channel.error() == "ended with code 7: words"


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"status": "Failure", "message": 'exec: "x": executable file not found in $PATH'}, 126, "ended with code 126"),
        ({"status": "Failure", "message": "container not found"}, None, "broke (container not found)"),
        ([1], None, "broke ([1])"),
        ({"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "x"}]}}, None, "broke ("),
    ],
)
def test_statuses_without_an_exit_code(start: Start, given: object, code: int | None, words: str) -> None:
    channel = start(lambda connection: status(connection, given))
    assert channel.read(10) == b""
    assert channel.exit_code() == code
    assert words in channel.error()


def test_a_limit_does_not_lose_what_comes_later(start: Start) -> None:
    go = threading.Event()

    def answer(connection: Any) -> None:
        go.wait(PATIENCE_S)
        connection.send(b"\1late")
        status(connection, {"status": "Success"})

    channel = start(answer)
    with pytest.raises(TimeoutError):
        channel.read(10, 0.0)
    assert not channel.ended
    go.set()
    assert channel.read(10) == b"late"
    assert channel.exit_code() == 0
    assert channel.ended


@pytest.mark.parametrize("end", ["close_socket", "shutdown", "close"])
def test_a_connection_that_ends_without_a_status_is_a_broken_one(start: Start, end: str) -> None:
    def answer(connection: Any) -> None:
        connection.send(b"\1some")
        if end == "shutdown":
            connection.socket.shutdown(socket.SHUT_RDWR)
        else:
            getattr(connection, end)()

    channel = start(answer)
    assert channel.read(10) == b"some"
    assert channel.read(10) == b""
    assert channel.exit_code() is None
    assert channel.error().startswith("the connection broke (")
    with pytest.raises(UnreachableError):
        channel.write(b"x")


def test_a_connection_on_which_nothing_comes_back_breaks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PING_S", 0.01)
    monkeypatch.setattr(websocket, "SILENCE_S", 0.1)
    go = threading.Event()

    def answer(connection: Any) -> None:
        with connection.protocol_mutex:  # no ping is answered
            go.wait(PATIENCE_S)

    channel = start(answer)
    try:
        assert channel.read(10) == b""
        assert "broke (nothing was heard for" in channel.error()
        with pytest.raises(UnreachableError):
            channel.write(b"x")
    finally:
        go.set()


def test_a_silent_command_keeps_its_connection_and_a_slow_reader_loses_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "PING_S", 0.01)
    monkeypatch.setattr(websocket, "OUTPUT_BYTES", 1000)
    pongs: list[Any] = []

    def answer(connection: Any) -> None:
        for _ in range(20):
            pongs.append(connection.ping())
            pongs[-1].wait(PATIENCE_S)
        for i in range(1000):
            connection.send(b"\1" + b"%09d\n" % i)
        status(connection, {"status": "Success"})

    channel = start(answer)
    out = b""
    while more := channel.read(7):
        out += more
    assert [int(line) for line in out.split()] == list(range(1000))
    assert channel.exit_code() == 0


def test_a_server_that_never_ends_its_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for the whole of connecting: every byte of such a server comes in time."""
    monkeypatch.setattr(websocket, "CONNECT_S", 0.2)
    ended = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.send(b"HTTP/1.1 101 Switching Protocols\r\nX: ")
            while not ended.wait(0.01):
                connection.send(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=drip, args=(listening,))
        server.start()
        try:
            with pytest.raises(UnreachableError, match="timed out"):
                opener_to(listening.getsockname()[1]).start("true", time.monotonic() + PATIENCE_S)
        finally:
            ended.set()
            server.join()


def test_credentials_that_cannot_be_had_are_named() -> None:
    from kubernetes.config import ConfigException

    def auth() -> Any:
        raise ConfigException("exec: process returned 1")

    with pytest.raises(LoginError, match=r"credentials cannot be had \(exec: process returned 1"):
        opener_to(1, auth).start("true", time.monotonic() + PATIENCE_S)


def test_connecting_again_ends_what_was_started_before(start: Start) -> None:
    channel = start(lambda connection: connection.recv())
    opener = opener_to(1)
    opener._channels.add(channel)
    opener.connect()
    assert channel.ended
    assert channel.read(10) == b""


def test_answers_of_the_api_server() -> None:
    body = json.dumps({"kind": "Status", "message": 'pods "a" is forbidden: exceeded quota'})
    assert str(refusal("n1", 403, body)) == 'n1: pods "a" is forbidden: exceeded quota'
    assert isinstance(refusal("n1", 401, "Unauthorized"), LoginError)
    gone, busy = refusal("n1", 404, "not found"), refusal("n1", 503, "")
    assert isinstance(gone, UnreachableError)
    assert not gone.transient
    assert isinstance(busy, UnreachableError)
    assert busy.transient
    assert "503: it gave no reason" in str(busy)


def test_a_certificate_that_is_not_trusted_is_found_below_other_errors() -> None:
    wrong = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed")
    try:
        try:
            raise wrong
        except ssl.SSLError as e:
            raise RuntimeError("outer") from e
    except RuntimeError as e:
        found: TransportError = unreached("n1", "https://c", e)
    assert isinstance(found, HostKeyError)


def test_an_api_server_that_cannot_be_reached_is_named_with_the_systems_words() -> None:
    wrapped = RuntimeError("HTTPSConnection(host='c', port=443): Failed to establish a new connection: [Errno 111]")
    wrapped.__context__ = ConnectionRefusedError(111, "Connection refused")
    found = unreached("n1", "https://c", wrapped)
    assert isinstance(found, UnreachableError)
    assert found.reason == "the API server https://c cannot be reached (Connection refused)"
    late = RuntimeError("HTTPSConnection(host='c', port=443): Connection to c timed out. (connect timeout=5.0)")
    assert "reached (Connection to c timed out. (connect timeout=5.0))" in str(unreached("n1", "https://c", late))
