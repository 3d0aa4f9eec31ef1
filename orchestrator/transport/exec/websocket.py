"""Commands in a container of a pod: the API's exec over a WebSocket, one connection a command.

The subprotocol is v4.channel.k8s.io: a message's first byte is its stream (0 input, 1 output, 2 errors, 3 the status in
the end). An input cannot be ended without the connection, so a command must know how much it is to read. A command
whose connection broke is not killed: its input ends. Server, certificates and token are those of the official client.
All connections are in the event loop of one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from orchestrator.errors import UnreachableError
from orchestrator.transport.exec.api_errors import no_credentials, refusal, unreached

PROTOCOL = "v4.channel.k8s.io"
PING_S, SILENCE_S = 2.0, 8.0
"""Seconds between pings, and of silence after which a connection counts as broken."""
STALL_S = 60.0
"""Limit in place of SILENCE_S while a command may be slow to read its input: a ping waits behind that input."""
INPUT_BYTES = 32 * 1024
"""Input that fits into the pipe of a command that does not read."""
OUTPUT_BYTES = 1024 * 1024
"""Output that is kept for a slow reader; the rest is left to the connection."""
CONNECT_S, CLOSE_S = 10.0, 1.0
CHUNK = 128 * 1024
MAX_WORDS = 256 * 1024
"""Bytes of standard error that are kept, from its end."""
NOT_STARTED = ("unable to start container process", "executable file not found", "no such file or directory")


class WebSocketOpener:
    """Starts commands in a container of a pod."""

    def __init__(self, node: str, api: Any, namespace: str, pod: str, container: str) -> None:
        """`api`: a kubernetes.client.ApiClient."""
        self._node, self._api = node, api
        self._path = f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}/exec"
        self._container = container
        self._channels: weakref.WeakSet[PodChannel] = weakref.WeakSet()

    def connect(self) -> None:
        """End what is left of before: every command has a connection of its own."""
        self.close()

    def close(self) -> None:
        """End all that was started."""
        for channel in list(self._channels):
            channel.close()

    def start(self, command: str | Sequence[str], deadline: float) -> PodChannel:
        """Start a command, or a line of shell text. Raises TransportError."""
        from kubernetes.config import ConfigException
        from websockets.exceptions import InvalidStatus, WebSocketException

        argv = ["sh", "-c", command] if isinstance(command, str) else command
        words = [("container", self._container), *((s, "true") for s in ("stdin", "stdout", "stderr"))]
        query = urlencode([*words, *(("command", word) for word in argv)], errors="surrogateescape")
        config = self._api.configuration
        url = f"{config.host.replace('http', 'ws', 1)}{self._path}?{query}"
        try:
            opening = self._open(url, open_timeout=min(CONNECT_S, _left(deadline)), **_options(config))
            channel = asyncio.run_coroutine_threadsafe(opening, _loop()).result()
        except ConfigException as e:
            raise no_credentials(self._node, e) from e
        except InvalidStatus as e:
            body = bytes(e.response.body or b"").decode("utf-8", "replace")
            raise refusal(self._node, e.response.status_code, body) from e
        except (WebSocketException, OSError, ValueError) as e:
            raise unreached(self._node, config.host, e) from e
        self._channels.add(channel)
        return channel

    async def _open(self, url: str, **options: Any) -> PodChannel:
        from websockets.asyncio.client import connect

        link = await connect(
            url, subprotocols=[PROTOCOL], compression=None, max_size=None, ping_interval=None, **options
        )
        return PodChannel(self._node, link)


def _options(config: Any) -> dict[str, Any]:
    """Options of a connection by the client's configuration. Raises ConfigException."""
    from kubernetes.client.rest import should_bypass_proxies

    proxy = config.proxy if config.proxy and not should_bypass_proxies(config.host, config.no_proxy or "") else None
    auth = {s["key"]: s["value"] for s in config.auth_settings().values() if s["in"] == "header"}
    options: dict[str, Any] = {"proxy": proxy, "additional_headers": auth}
    if config.host.startswith("https"):
        options["ssl"] = _tls(config)
        if config.tls_server_name:
            options["server_hostname"] = config.tls_server_name
    return options


def _tls(config: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not config.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    elif config.ssl_ca_cert:
        context.load_verify_locations(config.ssl_ca_cert)
    else:
        context.load_default_certs()
    if config.assert_hostname is False:
        context.check_hostname = False
    if config.cert_file:
        context.load_cert_chain(config.cert_file, config.key_file)
    return context


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all connections, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="pods", daemon=True).start()
    return loop


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


class PodChannel:
    """A command in a pod: the Channel of `open`, and with time limits what kept shells are made of."""

    def __init__(self, node: str, link: Any) -> None:
        """`link`: a websockets.asyncio.client.ClientConnection, whose loop runs this."""
        self._node, self._link, self._loop = node, link, asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._out, self._words = bytearray(), bytearray()
        self._code: int | None = None
        self._broken = ""
        """Reason why the connection is gone."""
        self._room = asyncio.Event()
        """Set when a reader took of an output that had reached OUTPUT_BYTES."""
        self._heard = time.monotonic()
        self._unread = 0
        """Bytes of input since the other side was heard."""
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._look_after())]

    @property
    def _over(self) -> bool:
        return self._code is not None or bool(self._broken)

    # --- in the loop -----------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        try:
            while True:
                self._take(await self._link.recv(decode=False))
                while len(self._out) >= OUTPUT_BYTES and not self._over:
                    self._room.clear()
                    await self._room.wait()
        except Exception as e:  # noqa: BLE001  ConnectionClosed; and whatever it is, nobody must wait for more
            rcvd = getattr(e, "rcvd", None)
            self._break((rcvd and rcvd.reason) or str(e.__cause__ or "") or "the other side hung up")

    async def _look_after(self) -> None:
        """Break a connection on which nothing comes back."""
        with contextlib.suppress(Exception):  # `_receive` has the reason
            while not self._over:
                await asyncio.sleep(PING_S)
                if len(self._out) >= OUTPUT_BYTES:
                    self._hear()  # it is we who do not listen
                silent = time.monotonic() - self._heard
                if silent >= (SILENCE_S if self._unread < INPUT_BYTES else STALL_S):
                    self._break(f"nothing was heard for {silent:.0f} s")
                elif self._unread < INPUT_BYTES:
                    (await self._link.ping()).add_done_callback(self._hear)

    def _hear(self, pong: object = None) -> None:
        self._heard, self._unread = time.monotonic(), 0

    def _take(self, message: bytes) -> None:
        self._hear()
        stream, data = message[:1], memoryview(message)[1:]
        with self._changed:
            if stream == b"\1":
                self._out += data
            elif stream == b"\2":
                self._words += data
                del self._words[:-MAX_WORDS]
            elif stream == b"\3" and data:
                self._end(bytes(data))
            self._changed.notify_all()

    def _end(self, status: bytes) -> None:
        """Take the status (meta/v1) that comes last."""
        words = status.decode("utf-8", "replace")
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
            given = json.loads(words)
            words = str(given.get("message") or words)
            if given["status"] == "Success":
                self._code = 0
                return
            for cause in (given.get("details") or {}).get("causes") or []:
                if cause["reason"] == "ExitCode":
                    self._code = int(cause["message"])
                    return
        if any(text in words.lower() for text in NOT_STARTED):
            self._words += words.encode()
            self._code = 126
        else:
            self._broken = self._broken or words[-1000:]

    def _break(self, why: str) -> None:
        """End the connection; whoever waits for it wakes up. From any thread."""
        with self._changed:
            self._broken = self._broken or why
            self._changed.notify_all()
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop)

    async def _hang_up(self) -> None:
        self._room.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._link.close()
        self._link.transport.abort()

    async def _send(self, data: bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        for at in range(0, len(data), CHUNK):
            if self._over:
                raise BrokenPipeError(self._broken or "the command has ended")
            part = b"\0" + data[at : at + CHUNK]
            self._unread += len(part)
            try:
                await self._link.send(part)
            except ConnectionClosed as e:
                raise BrokenPipeError(self._broken or "the other side hung up") from e

    # --- in other threads ------------------------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], object], deadline: float | None) -> None:
        if not self._changed.wait_for(condition, None if deadline is None else _left(deadline)):
            raise TimeoutError

    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Return up to `size` bytes as soon as there are any, b"" at the end. Raise TimeoutError."""
        with self._changed:
            self._wait(lambda: self._out or self._over, deadline)
            full = len(self._out) >= OUTPUT_BYTES
            data = bytes(self._out[:size])
            del self._out[:size]
        if full:
            self._loop.call_soon_threadsafe(self._room.set)
        return data

    def exit_code(self, deadline: float | None = None) -> int | None:
        """Exit code, after the output; None: unknown, as the connection broke. Raise TimeoutError."""
        with self._changed:
            self._wait(lambda: self._over, deadline)
            return self._code

    @property
    def stderr(self) -> bytes:
        """Standard error as far as it came, its end."""
        return bytes(self._words)

    @property
    def ended(self) -> bool:
        return self._over

    def write(self, data: bytes) -> None:
        """Send all of `data` to its standard input. Raises TransportError where it does not take it any more."""
        try:
            self.send(data)
        except OSError as e:
            raise UnreachableError(self._node, f"the connection broke ({self._broken or e})") from e

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Raises TimeoutError, or OSError where the command listens no more. Small data is not waited for: an answer to
        it, or the end, shows what became of it."""
        if self._over:
            raise BrokenPipeError(self._broken or "the command has ended")
        sending = asyncio.run_coroutine_threadsafe(self._send(data), self._loop)
        if len(data) < INPUT_BYTES:
            return
        try:
            sending.result(None if deadline is None else _left(deadline))
        except TimeoutError:
            self._break("the link takes no more data")  # a part of it may be on its way
            raise

    def close(self) -> None:
        """End the command's input; nobody reads its output. Readers wake up; never waits for the link."""
        self._break("closed")

    def error(self) -> str:
        """Reason of its end: exit code and last message, or that of the broken connection."""
        try:
            code = self.exit_code(time.monotonic() + 2.0)
        except TimeoutError:
            code = None
        last = self.stderr.decode("utf-8", "replace").strip()[-1000:]
        text = f"the connection broke ({self._broken})" if code is None else f"ended with code {code}"
        if code is None and not self._broken:
            text = "ended without an exit code"
        return text + (f": {last}" if last else "")
