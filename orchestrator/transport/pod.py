"""Kubernetes' official client, with errors of ours: calls of the API server, and commands in a pod's container.

leases/kubernetes.py calls `connect` once for each pool and `call` for each request. `PodOpener` starts commands for the
transport `exec` (exec.py); a running command is a `PodChannel`.

Server, certificates and credentials are read by that client alone (the extra `kubernetes`, imported when the first pool
of pods is made): the kubeconfig, or in a pod its service account. Kubernetes cannot end a command's input without
closing the connection, so a command must know how much it is to read. If the connection breaks, the command is not
killed; its input ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.errors import HostKeyError, InputError, LoginError, TransportError, UnreachableError
from orchestrator.transport.base import Channel

CONNECT_S = 5.0
CALL_S = 20.0
SILENCE_S = 60.0
"""Silence that ends a stream, and the longest wait for a command that takes none of its input."""
LOOK_S = 1.0
"""A wait for output looks this often whether the connection was closed."""
CHUNK = 128 * 1024
"""Bytes of input that go into one message."""
MAX_STDERR = 256 * 1024
"""Bytes that we keep of the end of standard error."""
STDIN, STDOUT, STDERR, STATUS = range(4)
"""Channels of Kubernetes' protocol for commands (v4.channel.k8s.io)."""


def connect(context: str | None) -> tuple[Any, str]:
    """Read the kubeconfig, and return (the official client's ApiClient, the namespace of `context`). Nothing is sent
    yet. Raises InputError."""
    try:
        import urllib3
        from kubernetes import client, config
        from kubernetes.config import incluster_config
    except ImportError as e:
        way = "pip install '.[kubernetes]' in a checkout of gemmfleet"
        raise InputError(f"nodes with `lease: kubernetes` need the package kubernetes ({e}): {way}") from e
    settings = client.Configuration()
    settings.retries = False
    file = os.environ.get("KUBECONFIG") or None
    try:
        if context is None and file is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=settings)
            namespace = Path(incluster_config.SERVICE_TOKEN_FILENAME).with_name("namespace").read_text().strip()
        else:
            config.load_kube_config(file, context, settings, persist_config=False)
            contexts, active = config.list_kube_config_contexts(config_file=file)
            used = next((c for c in contexts if c["name"] == context), active)
            namespace = used["context"].get("namespace") or ""
    except Exception as e:  # the client raises many kinds for a file that is no kubeconfig
        where = file or "~/.kube/config"
        raise InputError(f"the kubeconfig {where} cannot be used ({e}): set KUBECONFIG, or `context:`") from e
    if not settings.verify_ssl:
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # `nodes check` says so
    return client.ApiClient(settings), namespace or "default"


def call(node: str, method: Callable[..., Any], *args: Any, seconds: float = CALL_S, **options: Any) -> Any:
    """Call a method of the client, within `seconds`, and return its result. `node`: the name in errors. Raises
    TransportError."""
    try:
        return method(*args, **options, _request_timeout=(CONNECT_S, seconds))
    except Exception as e:
        server = method.__self__.api_client.configuration.host  # type: ignore[attr-defined]
        raise _error(node, server, e) from e


def status_of(e: BaseException) -> int:
    """The HTTP status of the answer behind an error of `call`, 0 if the server did not answer."""
    return getattr(e.__cause__, "status", 0)


def _error(node: str, server: str, e: Exception) -> TransportError:
    """Our error for one of the client, which raises many kinds. `server`: the API server's address."""
    from kubernetes.client import ApiException
    from kubernetes.config import ConfigException

    if isinstance(e, ConfigException):
        return LoginError(node, f"the kubeconfig's credentials cannot be had ({e})")
    if isinstance(e, ValueError | TypeError):  # it could not read the answer, which may come from a proxy
        words = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
        return UnreachableError(node, f"the answer does not come from an API server ({words})")
    if not isinstance(e, ApiException):
        return unreached(node, server, e)
    within = e.__context__  # the client says only in words why an exec or TLS failed; the error behind says more
    status = e.status or getattr(within, "status_code", 0)
    if not status:
        return unreached(node, server, within or e)
    body = e.body or getattr(within, "resp_body", None) or e.reason or ""
    return refusal(node, status, body if isinstance(body, str) else body.decode("utf-8", "replace"))


def refusal(node: str, status: int, words: str) -> TransportError:
    """The error for an answer of the API server that refuses. `words`: its message, or the JSON that holds it."""
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
    """The error for a failed connection to the API server. The deepest cause in `e` tells why."""
    cause: BaseException | None = e
    words = re.sub(r"^\w+\(host=[^)]*\): ", "", str(e))
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = getattr(cause, "verify_message", "") or str(cause)
            way = "see `certificate-authority` in your kubeconfig"
            return HostKeyError(node, f"the certificate of the API server {server} is not trusted ({why}): {way}")
        words = getattr(cause, "strerror", None) or words
        reason = getattr(cause, "reason", None)  # urllib3's
        cause = reason if isinstance(reason, BaseException) else cause.__cause__ or cause.__context__
    return UnreachableError(node, f"the API server {server} cannot be reached ({words})")


class PodOpener:
    """Starts commands in a container of a pod, each on a connection of its own."""

    def __init__(self, node: str, api: Any, namespace: str, pod: str, container: str) -> None:
        """`api`: a kubernetes.client.ApiClient."""
        self._node = node
        self._api = api
        self._container = {"name": pod, "namespace": namespace, "container": container}

    def connect(self) -> None:
        """Nothing to do: each command has a connection of its own."""

    close = connect

    def start(self, command: str, deadline: float) -> PodChannel:
        """Start a line of shell text. Raises TransportError."""
        from kubernetes import client
        from kubernetes.stream import stream
        from websocket import setdefaulttimeout

        setdefaulttimeout(CONNECT_S)
        # `stream` changes the ApiClient while it opens a connection
        core = client.CoreV1Api(client.ApiClient(self._api.configuration))
        try:
            link = stream(
                core.connect_get_namespaced_pod_exec,
                **self._container,
                command=["sh", "-c", command],
                stdin=True,
                stdout=True,
                stderr=True,
                tty=False,
                binary=True,
                _preload_content=False,
            )
        except Exception as e:
            raise _error(self._node, self._api.configuration.host, e) from e
        return PodChannel(self._node, link)


class PodChannel(Channel):
    """A command in a pod (base.py::Channel)."""

    def __init__(self, node: str, link: Any) -> None:
        """`link`: a kubernetes.stream.ws_client.WSClient. We make it read one message at a time and keep none of them,
        because it would otherwise collect all output in memory."""
        self._node = node
        self._link = link
        link._frames_immediately_available = lambda: False
        link._all = SimpleNamespace(write=len)
        link.sock.settimeout(SILENCE_S)
        self._link_lock = threading.Lock()  # TLS cannot read in one thread and write in another
        self._out = bytearray()
        self._stderr = bytearray()
        self._status = b""
        self._cut = ""

    @property
    def broken(self) -> str:
        return "" if self._status else self._cut

    @property
    def ended(self) -> bool:
        return bool(self._status or self._cut)

    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Return up to `size` bytes as soon as there are any, b"" at the end. Raise TimeoutError."""
        heard = time.monotonic()
        while not self._out and not self.ended:
            if self._take():
                heard = time.monotonic()
                continue
            if time.monotonic() >= (heard + SILENCE_S if deadline is None else deadline):
                if deadline is not None:
                    raise TimeoutError
                self._break(f"nothing was heard for {SILENCE_S:.0f} s")
            with contextlib.suppress(OSError, TypeError, ValueError):  # it was closed meanwhile
                poll = select.poll()
                poll.register(self._link.sock.sock, select.POLLIN)
                poll.poll(1000 * min(LOOK_S, max(0.0, (deadline or math.inf) - time.monotonic())))
        data = bytes(self._out[:size])
        del self._out[:size]
        return data

    def _take(self) -> bool:
        """Take the output that is there. Return whether there may be more at once."""
        link = self._link
        with self._link_lock:
            try:
                status, words, out = (link.read_channel(c) for c in (STATUS, STDERR, STDOUT))
            except Exception as e:  # noqa: BLE001  the websocket's and the socket's; whatever it is, there is no more
                self._cut = self._cut or str(e) or type(e).__name__
                return False
            self._out += out
            self._stderr += words
            del self._stderr[:-MAX_STDERR]
            self._status = self._status or status
            more = bool(status or words or out)
            if not more and not link.is_open():
                self._cut = self._cut or "the other side hung up"
            return more

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Send all of `data`. Raises TimeoutError, or BrokenPipeError if the command no longer reads its input."""
        from websocket import WebSocketException, WebSocketTimeoutException

        for start in range(0, len(data), CHUNK):
            if self.ended:
                raise BrokenPipeError(self._cut or "the command has ended")
            try:
                limit_s = SILENCE_S if deadline is None else max(0.001, deadline - time.monotonic())
                with self._link_lock:
                    self._link.sock.settimeout(limit_s)
                    self._link.write_channel(STDIN, data[start : start + CHUNK])
                    self._link.sock.settimeout(SILENCE_S)
            except (WebSocketTimeoutException, TimeoutError) as e:
                self._break("the link takes no more data")  # a part of it may be on its way
                raise TimeoutError from e
            except (WebSocketException, OSError, AttributeError) as e:
                raise BrokenPipeError(str(e)) from e

    def close(self) -> None:
        """End the command's input, and stop reading its output. Wakes readers up; never waits for the link."""
        self._break("closed")

    def _break(self, why: str) -> None:
        self._cut = self._cut or why
        self._link.sock.abort()  # wakes whoever reads or writes
        with self._link_lock:
            self._link.sock.shutdown()

    def error(self) -> str:
        """Return why it ended: its exit code and last message, or why the connection broke."""
        code, said = _exit_code_in(self._status) if self._status else (None, "")
        return self._describe_end(code, self._stderr or said.encode())


def _exit_code_in(status: bytes) -> tuple[int | None, str]:
    """(exit code, "") from the status that a command's end gives, or (None, its message). For example
    `{"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "3"}]}}`."""
    words = status.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        document = json.loads(words)
        words = str(document.get("message") or words)[-1000:]
        if document["status"] == "Success":
            return 0, ""
        for cause in document["details"]["causes"]:
            if cause["reason"] == "ExitCode":
                return int(cause["message"]), ""
    return None, words
