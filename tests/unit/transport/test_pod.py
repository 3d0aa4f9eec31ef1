"""Exec of a pod against a server of its protocol; tests/integration/test_transports.py has the real API server."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from orchestrator.errors import HostKeyError, LoginError, TransportError, UnreachableError
from orchestrator.transport import pod
from orchestrator.transport.pod import PodChannel, PodOpener, refusal, unreached
from tests.waiting import PATIENCE_S

client = pytest.importorskip("kubernetes.client")
web = pytest.importorskip("aiohttp.web")

FAILED = {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "7"}]}}
Answer = Callable[[Any, Any], Awaitable[None]]
"""Answers a WebSocket, of a request."""
Start = Callable[[Answer], PodChannel]


def opener_to(port: int) -> PodOpener:
    settings = client.Configuration()
    settings.host, settings.api_key["BearerToken"] = f"http://127.0.0.1:{port}", "Bearer t"
    return PodOpener("n1", client.ApiClient(settings), "tuning", "a", "gemmfleet")


@pytest.fixture
def start() -> Iterator[Start]:
    """Connect to a server that answers as the given function does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    channels: list[PodChannel] = []
    runners: list[Any] = []

    async def serve(answer: Answer) -> int:
        async def handle(request: Any) -> Any:
            if request.headers["Authorization"] != "Bearer t":
                return web.json_response({"message": "who are you"}, status=401)
            connection = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
            await connection.prepare(request)
            await answer(connection, request)
            return connection

        app = web.Application()
        app.router.add_get("/{path:.*}", handle)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        return int(site._server.sockets[0].getsockname()[1])

    def connect(answer: Answer) -> PodChannel:
        port = asyncio.run_coroutine_threadsafe(serve(answer), loop).result()
        channels.append(opener_to(port).start("echo 'a b'", time.monotonic() + PATIENCE_S))
        return channels[-1]

    yield connect
    for channel in channels:
        channel.close()
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def all_of(channel: PodChannel) -> bytes:
    out = b""
    while more := channel.read(4):
        out += more
    return out


def test_a_command_is_asked_for_and_its_streams_are_put_together(start: Start) -> None:
    seen: list[Any] = []

    async def answer(connection: Any, request: Any) -> None:
        seen.append((request.path, dict(request.query), request.query.getall("command")))
        for message in (b"\1", b"\1one two", b"\2words", b"\1 three", b"\3" + json.dumps(FAILED).encode()):
            await connection.send_bytes(message)

    channel = start(answer)
    assert all_of(channel) == b"one two three"
    assert channel.error() == "ended with code 7: words"
    with pytest.raises(UnreachableError):
        channel.write(b"x")
    ((path, query, command),) = seen
    assert path == "/api/v1/namespaces/tuning/pods/a/exec"
    assert command == ["sh", "-c", "echo 'a b'"]
    assert {k: v.lower() for k, v in query.items() if k != "command"} == {
        "container": "gemmfleet", "stdin": "true", "stdout": "true", "stderr": "true", "tty": "false",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"status": "Success"}, "ended with code 0"),
        ({"status": "Failure", "message": "container not found"}, "ended without an exit code: container not found"),
        ([1], "ended without an exit code: [1]"),
        (
            {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "x"}]}},
            "without an exit code",
        ),
    ],
)
def test_what_a_status_says(start: Start, given: object, words: str) -> None:
    channel = start(lambda connection, _: connection.send_bytes(b"\3" + json.dumps(given).encode()))
    assert channel.read(10) == b""
    assert words in channel.error()


def test_a_limit_does_not_lose_what_comes_later(start: Start) -> None:
    async def answer(connection: Any, request: Any) -> None:
        message = await connection.receive()
        await connection.send_bytes(b"\1late " + message.data[1:])
        await connection.send_bytes(b"\3" + json.dumps({"status": "Success"}).encode())

    channel = start(answer)
    with pytest.raises(TimeoutError):
        channel.read(10, time.monotonic())
    assert not channel.ended
    channel.write(b"it")
    assert all_of(channel) == b"late it"
    assert channel.ended


@pytest.mark.parametrize("hard", [False, True])
def test_a_connection_that_ends_without_a_status_is_a_broken_one(start: Start, hard: bool) -> None:
    async def answer(connection: Any, request: Any) -> None:
        await connection.send_bytes(b"\1some")
        if hard:
            request.transport.abort()

    channel = start(answer)
    assert all_of(channel) in (b"some", b"")  # a connection that is cut may lose the last message
    assert channel.error().startswith("the connection broke (")
    with pytest.raises(UnreachableError):
        channel.write(b"x")


def test_a_stream_on_which_nothing_comes_for_a_minute_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(connection: Any, request: Any) -> None:
        await connection.receive()

    channel = start(answer)
    monkeypatch.setattr(pod, "SILENCE_S", 0.0)
    assert channel.read(10) == b""
    assert "broke (nothing was heard for" in channel.error()


def test_a_server_that_is_away_is_named_with_the_systems_words() -> None:
    with pytest.raises(UnreachableError, match=r"the API server http://127.0.0.1:1 cannot be reached \(Connection ref"):
        opener_to(1).start("true", time.monotonic() + PATIENCE_S)


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
    outer = RuntimeError("outer")
    outer.__cause__ = wrong
    found: TransportError = unreached("n1", "https://c", outer)
    assert isinstance(found, HostKeyError)
