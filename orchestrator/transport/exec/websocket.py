"""Commands in a container of a pod: the API's exec over a WebSocket, one connection a command.

The subprotocol is v4.channel.k8s.io: a message's first byte is its stream (0 input, 1 output, 2 errors, 3 the status in
the end). An input cannot be ended without the connection, so a command must know how much it is to read. A command
whose connection broke is not killed: its input ends. Server, certificates and token are those of the official client.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

from orchestrator.errors import HostKeyError, LoginError, TransportError, UnreachableError

PROTOCOL = "v4.channel.k8s.io"
PING_S, SILENCE_S = 2.0, 8.0
"""Seconds within which a silent connection is pinged, and of silence after which it counts as broken."""
STALL_S = 60.0
"""Limit in place of SILENCE_S while a command may be slow to read its input: a ping waits behind that input."""
UNREAD_BYTES = 32 * 1024
"""Input that fits into the pipe of a command that does not read."""
CONNECT_S = 10.0
CHUNK = 128 * 1024
MAX_WORDS = 256 * 1024
"""Bytes of standard error that are kept, from its end."""
KEEPALIVE = tuple(
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
)
"""Socket options: a connection on which nothing comes back is gone after some 10 s."""
NOT_STARTED = ("unable to start container process", "executable file not found", "no such file or directory")


def refusal(node: str, status: int, words: str) -> TransportError:
    """Error for an answer of the API server; `words`: its message, or the JSON that holds it."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        words = str(json.loads(words)["message"])
    words = words.strip()[-1000:] or "it gave no reason"
    if status == 401:
        return LoginError(node, f"the API server does not know this user ({words}): log in again, or see `context:`")
    if status == 404:
        return UnreachableError(node, words, transient=False)
    if 400 <= status < 429:
        return TransportError(node, words)
    return UnreachableError(node, f"the API server answered {status}: {words}")


def unreached(node: str, server: str, e: BaseException) -> TransportError:
    """Error for a connection to the API server that did not come about."""
    at: BaseException | None = e
    words = re.sub(r"^\w+\(host=[^)]*\): ", "", str(e))
    while at is not None:
        if isinstance(at, ssl.SSLCertVerificationError):
            why = getattr(at, "verify_message", "") or str(at)
            way = "see `certificate-authority` in your kubeconfig"
            return HostKeyError(node, f"the certificate of the API server {server} is not trusted ({why}): {way}")
        words = getattr(at, "strerror", None) or words
        reason = getattr(at, "reason", None)  # urllib3's
        at = reason if isinstance(reason, BaseException) else at.__cause__ or at.__context__
    return UnreachableError(node, f"the API server {server} cannot be reached ({words})")


class WebSocketOpener:
    """Starts commands in a container of a pod."""

    def __init__(self, node: str, api: Any, namespace: str, pod: str, container: str) -> None:
        """`api`: a kubernetes.client.ApiClient."""
        self._node, self._api = node, api
        self._path = f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}/exec"
        self._container = container
        self._channels: weakref.WeakSet[PodChannel] = weakref.WeakSet()

    def connect(self) -> None:
        """Nothing to do: every command has a connection of its own."""

    def close(self) -> None:
        """End all that was started."""
        for channel in list(self._channels):
            channel.close()

    def start(self, command: str | Sequence[str], deadline: float) -> PodChannel:
        """Start a command, or a line of shell text. Raises TransportError."""
        import websocket
        from kubernetes.stream.ws_client import websocket_proxycare

        argv = ["sh", "-c", command] if isinstance(command, str) else command
        words = [("container", self._container), *((s, "true") for s in ("stdin", "stdout", "stderr"))]
        query = urlencode([*words, *(("command", word) for word in argv)], errors="surrogateescape")
        config = self._api.configuration
        url = f"{config.host.replace('http', 'ws', 1)}{self._path}?{query}"
        auth = [f"{s['key']}: {s['value']}" for s in config.auth_settings().values() if s["in"] == "header"]
        options = {"header": auth, "subprotocols": [PROTOCOL], "timeout": max(0.001, _left(deadline, CONNECT_S))}
        if config.proxy:
            options = websocket_proxycare(options, config, url, {})
        link = websocket.WebSocket(sockopt=KEEPALIVE, sslopt=_tls(config), skip_utf8_validation=True)
        try:
            link.connect(url, **options)
        except websocket.WebSocketBadStatusException as e:
            raise refusal(self._node, e.status_code, (e.resp_body or b"").decode("utf-8", "replace")) from e
        except (websocket.WebSocketException, OSError) as e:
            raise unreached(self._node, config.host, e) from e
        channel = PodChannel(self._node, link)
        self._channels.add(channel)
        return channel


def _tls(config: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE}
    if config.verify_ssl:
        options = {"cert_reqs": ssl.CERT_REQUIRED, "ca_certs": config.ssl_ca_cert}
        if config.assert_hostname is not None:
            options["check_hostname"] = config.assert_hostname
    if config.cert_file:
        options |= {"certfile": config.cert_file, "keyfile": config.key_file}
    if config.tls_server_name:
        options["server_hostname"] = config.tls_server_name
    return options


def _left(deadline: float | None, most: float) -> float:
    """Seconds until then."""
    return most if deadline is None else min(most, max(0.0, deadline - time.monotonic()))


def _frame(data: bytes, opcode: int) -> bytes:
    from websocket import ABNF

    return bytes(ABNF.create_frame(data, opcode).format())


class _Socket:
    """A socket that one thread reads while another writes: OpenSSL must not be in both at the same time."""

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self._raw = raw
        self._one = threading.Lock()
        self.until = 0.0
        """Deadline of `recv`."""
        self.heard = time.monotonic()

    def recv(self, size: int) -> bytes:
        """Receive as a socket does. Raises TimeoutError."""
        while True:
            with self._one, contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                data = self._raw.recv(size)
                self.heard = time.monotonic()
                return data
            self._wait(select.POLLIN, self.until)

    def send(self, data: bytes, deadline: float | None) -> None:
        """Send all of it. Raises OSError, TimeoutError."""
        view = memoryview(data)
        while view:
            with self._one, contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                view = view[self._raw.send(view) :]
                continue
            self._wait(select.POLLOUT, deadline)

    def _wait(self, events: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self._raw, events)
        ready = poll.poll(None if deadline is None else 1000 * _left(deadline, 3600.0))
        if not ready and deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError("timed out")

    def gettimeout(self) -> None:
        """No limit but `until`."""

    def close(self) -> None:
        """Break the connection; whoever waits for it wakes up."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._raw, socket.SHUT_RDWR)
        with self._one:
            self._raw.close()


class PodChannel:
    """A command in a pod: the Channel of `open`, and with time limits what kept shells are made of."""

    def __init__(self, node: str, link: Any) -> None:
        """`link`: a connected websocket.WebSocket."""
        self._node, self._link = node, link
        self._socket = link.sock = _Socket(link.sock)
        self._sending, self._reading = threading.Lock(), threading.RLock()
        self._out, self._words = bytearray(), bytearray()
        self._stream = 0
        self._code: int | None = None
        self._broken = ""
        """Reason why the connection is gone."""
        self._unread = 0
        """Bytes of input since the other side was heard."""
        self._waiting = self._pinged = time.monotonic()

    # --- output ----------------------------------------------------------------------------------------------------

    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Return up to `size` bytes as soon as there are any, b"" at the end. Raise TimeoutError."""
        with self._reading:
            self._waiting = time.monotonic()
            while not self._out:
                if self._over:
                    return b""
                self._take(deadline)
            data = bytes(self._out[:size])
            del self._out[:size]
            return data

    def exit_code(self, deadline: float | None = None) -> int | None:
        """Exit code; None: unknown, as the connection broke. Raise TimeoutError."""
        with self._reading:
            self._waiting = time.monotonic()
            while not self._over:
                self._take(deadline)
        return self._code

    @property
    def stderr(self) -> bytes:
        """Standard error as far as the output has been read, its end."""
        return bytes(self._words)

    @property
    def ended(self) -> bool:
        if self._reading.acquire(blocking=False):
            try:
                while not self._over:
                    self._take(time.monotonic())
            except TimeoutError:
                pass
            finally:
                self._reading.release()
        return self._over

    @property
    def _over(self) -> bool:
        return self._code is not None or bool(self._broken)

    def _take(self, deadline: float | None) -> None:
        """Take one message, or look after a silent connection. Raises TimeoutError."""
        import websocket

        self._socket.until = time.monotonic() + _left(deadline, PING_S)
        try:
            frame = self._link.recv_frame()
        except websocket.WebSocketTimeoutException:
            self._keep_alive()
            if deadline is not None and time.monotonic() >= deadline and not self._over:
                raise TimeoutError from None
            return
        except (websocket.WebSocketException, OSError, ValueError) as e:
            self._break(str(e) if isinstance(e, OSError) else "the other side hung up")
            return
        self._unread = 0
        data, code = frame.data, frame.opcode
        if code in (websocket.ABNF.OPCODE_BINARY, websocket.ABNF.OPCODE_TEXT, websocket.ABNF.OPCODE_CONT):
            if code != websocket.ABNF.OPCODE_CONT and data:
                self._stream, data = data[0], memoryview(data)[1:]
            self._put(data)
        elif code == websocket.ABNF.OPCODE_PING:
            self._answer(data, websocket.ABNF.OPCODE_PONG)
        elif code == websocket.ABNF.OPCODE_CLOSE:
            text = data[2:].decode("utf-8", "replace")
            self._break(text or "the other side hung up")

    def _put(self, data: Any) -> None:
        if self._stream == 1:
            self._out += data
        elif self._stream == 2:
            self._words += data
            del self._words[:-MAX_WORDS]
        elif self._stream == 3 and data:
            self._end(bytes(data))

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

    def _keep_alive(self) -> None:
        import websocket

        now = time.monotonic()
        silent = now - max(self._socket.heard, self._waiting)
        if silent >= (SILENCE_S if self._unread < UNREAD_BYTES else STALL_S):
            self._break(f"nothing was heard for {silent:.0f} s")
        elif now - self._pinged >= PING_S / 2 and silent >= PING_S / 2 and self._unread < UNREAD_BYTES:
            self._pinged = now
            self._answer(b"", websocket.ABNF.OPCODE_PING)

    def _answer(self, data: bytes, opcode: int) -> None:
        """Send a control frame, unless a thread is sending: a reader must not wait for that."""
        if self._sending.acquire(blocking=False):
            try:
                self._socket.send(_frame(data, opcode), time.monotonic() + 0.5)
            except (OSError, ValueError):  # a part of it may be on its way: nothing can follow
                self._broken = self._broken or "the link takes no more data"
            finally:
                self._sending.release()

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        self._socket.close()

    # --- input -----------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send all of `data` to its standard input. Raises TransportError where it does not take it any more."""
        try:
            self.send(data)
        except (OSError, ValueError) as e:
            raise UnreachableError(self._node, f"the connection broke ({self._broken or e})") from e

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Raises TimeoutError, or OSError where the command listens no more."""
        import websocket

        for at in range(0, len(data), CHUNK):
            part = b"\0" + data[at : at + CHUNK]
            self._unread += len(part)
            self._transmit(part, websocket.ABNF.OPCODE_BINARY, deadline)

    def _transmit(self, data: bytes, opcode: int, deadline: float | None) -> None:
        frame = _frame(data, opcode)
        with self._sending:
            if self._over:
                raise BrokenPipeError(self._broken or "the command has ended")
            try:
                self._socket.send(frame, deadline)
            except TimeoutError:
                self._break("the link takes no more data")  # a part of the frame may be on its way
                raise

    # --- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the command's input; nobody reads its output. Readers wake up; never waits for the link."""
        import websocket

        if not self._broken:
            self._answer(struct.pack("!H", 1000), websocket.ABNF.OPCODE_CLOSE)
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
