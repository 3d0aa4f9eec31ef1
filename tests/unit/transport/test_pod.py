"""Exec of a pod against a server of its protocol; tests/integration/test_transports.py has the real API server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.errors import LoginError, TransportError, UnreachableError
from orchestrator.transport import pod
from orchestrator.transport.pod import PodChannel, PodOpener, refusal
from tests.waiting import PATIENCE_S

client = pytest.importorskip("kubernetes.client")
web = pytest.importorskip("aiohttp.web")

Start = Callable[..., PodChannel]
CUT = b""
"""In place of a message: the server cuts the connection."""
SEEN: list[Any] = []
"""Requests that came."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Connect to a server that sends the given messages; without one it waits for ours."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    messages: list[bytes] = []
    channels: list[PodChannel] = []

    async def handle(request: Any) -> Any:
        SEEN[:] = [request.path, {**request.query, "command": request.query.getall("command")}, request.headers]
        connection = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await connection.prepare(request)
        if not messages:
            await connection.receive()
        for message in messages:
            if message == CUT:
                request.transport.abort()
            else:
                await connection.send_bytes(message)
        return connection

    async def serve() -> Any:
        app = web.Application()
        app.router.add_get("/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = asyncio.run_coroutine_threadsafe(serve(), loop).result()

    def connect(*given: bytes) -> PodChannel:
        messages[:] = given
        settings = client.Configuration()
        settings.host, settings.api_key["BearerToken"] = f"http://127.0.0.1:{runner.addresses[0][1]}", "Bearer t"
        opener = PodOpener("n1", client.ApiClient(settings), "tuning", "a", "gemmfleet")
        channels.append(opener.start("echo 'a b'", time.monotonic() + PATIENCE_S))
        return channels[-1]

    yield connect
    for channel in channels:
        channel.close()
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def code(text: str) -> object:
    return {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": text}]}}


@pytest.mark.parametrize(
    ("messages", "status", "out", "words"),
    [
        ([b"\1", b"\1one two", b"\2words", b"\1 three"], code("7"), b"one two three", "ended with code 7: words"),
        ([], {"status": "Success"}, b"", "ended with code 0"),
        ([], {"status": "Failure", "message": "no container"}, b"", "ended without an exit code: no container"),
        ([], [1], b"", "ended without an exit code: [1]"),
        ([], code("x"), b"", "ended without an exit code"),
        ([b"\1some"], None, b"some", "the connection broke ("),
        ([CUT], None, b"", "the connection broke ("),
    ],
)
def test_the_streams_of_a_command_and_its_end(
    start: Start, messages: list[bytes], status: object, out: bytes, words: str
) -> None:
    channel = start(*messages, *([b"\3" + json.dumps(status).encode()] if status else []))
    got = b""
    while more := channel.read(4):
        got += more
    assert got == out
    assert channel.error().startswith(words)
    with pytest.raises(UnreachableError):
        channel.write(b"x")
    path, query, headers = SEEN
    assert (path, headers["Authorization"]) == ("/api/v1/namespaces/tuning/pods/a/exec", "Bearer t")
    assert query.pop("command") == ["sh", "-c", "echo 'a b'"]
    assert {k: v.lower() for k, v in query.items()} == {
        "container": "gemmfleet", "stdin": "true", "stdout": "true", "stderr": "true", "tty": "false",
    }  # fmt: skip


def test_a_stream_on_which_nothing_comes_for_a_minute_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = start()
    monkeypatch.setattr(pod, "SILENCE_S", 0.0)
    assert channel.read(10) == b""
    assert "broke (nothing was heard for" in channel.error()


@pytest.mark.parametrize(
    ("status", "body", "kind", "transient", "words"),
    [
        (403, '{"message": "exceeded quota"}', TransportError, None, "n1: exceeded quota"),
        (401, "Unauthorized", LoginError, None, "does not know this user (Unauthorized)"),
        (404, "not found", UnreachableError, False, "not found"),
        (503, "", UnreachableError, True, "503: it gave no reason"),
    ],
)
def test_answers_of_the_api_server(
    status: int, body: str, kind: type[TransportError], transient: bool | None, words: str
) -> None:
    error = refusal("n1", status, body)
    assert (type(error), getattr(error, "transient", None)) == (kind, transient)
    assert words in str(error)
