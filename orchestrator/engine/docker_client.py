"""A node's Docker: the docker package, talking over a connection to the node that is already open.

`Docker.ask` gives a client to a function and returns its answer. The client talks to `docker system dial-stdio` on the
node, over channels of the node's transport. A failure becomes an EngineError that says what to do.
`docker_containers.py` runs workers with it, and `orchestrator/image/image_files.py` copies files out of images.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import docker
import docker.errors
import requests
import requests.adapters
import urllib3
from urllib3.connection import HTTPConnection

from orchestrator.engine.docker_errors import engine_error
from orchestrator.engine.docker_options import DockerOptions
from orchestrator.errors import EngineError, NodeError
from orchestrator.transport.base import Transport

LIMIT_S = 10.0
"""Longest silence during one request to Docker, unless the caller names another limit."""
PIECE = 65536
"""Bytes that are read from a channel at once."""
MAX_CHANNELS = 2
"""Most dial-stdio channels to one node. One of them may be busy with a pull."""

T = TypeVar("T")


def _socket(channel: Any) -> socket.socket:
    """Wraps a channel in a socket, so that the socket's time limits apply. Two threads carry the bytes."""
    near, far = socket.socketpair()

    def carry(read: Callable[[int], bytes], write: Callable[[bytes], object]) -> None:
        with contextlib.suppress(OSError, NodeError):
            while data := read(PIECE):
                write(data)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)  # the other thread wakes up
        channel.close()
        far.close()

    for way in ((channel.read, far.sendall), (far.recv, channel.write)):
        threading.Thread(target=carry, args=way, name="docker channel", daemon=True).start()
    return near


class _Connection(HTTPConnection):
    def __init__(self, open_channel: Callable[[], Any], host: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._open_channel = open_channel

    def connect(self) -> None:
        self.sock = _socket(self._open_channel())
        self.sock.settimeout(self.timeout if isinstance(self.timeout, (int, float)) else None)


class ChannelAdapter(requests.adapters.HTTPAdapter):
    """Sends requests for any URL to the one node, over channels."""

    def __init__(self, open_channel: Callable[[], Any]) -> None:
        super().__init__()
        self._pool = urllib3.HTTPConnectionPool("localhost", maxsize=MAX_CHANNELS, block=True)
        self._pool.ConnectionCls = partial(_Connection, open_channel)  # type: ignore[assignment]

    def get_connection_with_tls_context(
        self, request: Any, verify: Any, proxies: Any = None, cert: Any = None
    ) -> urllib3.HTTPConnectionPool:
        return self._pool

    def request_url(self, request: requests.PreparedRequest, proxies: Mapping[str, str] | None) -> str:
        return request.path_url  # there is never a proxy between us and the channel

    def close(self) -> None:
        super().close()
        self._pool.close()


class NodeClient(docker.APIClient):  # type: ignore[misc]
    """An APIClient whose requests all go through one adapter."""

    def __init__(self, adapter: ChannelAdapter, timeout: float) -> None:
        self._adapter = adapter
        super().__init__(base_url="http://docker:80", version="auto", timeout=timeout)
        self.mount("http://", adapter)  # which closes it with the client

    def get_adapter(self, url: str) -> ChannelAdapter:
        return self._adapter


class Docker:
    """A node's Docker, connected on first use. Its methods raise only EngineError and TransportError."""

    def __init__(self, transport: Transport, options: DockerOptions, limit_s: float = LIMIT_S) -> None:
        self._transport = transport
        self._options = options
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._youngest: Any = None
        """The most recently opened channel."""
        self._client: NodeClient | None = None

    def ask(self, question: Callable[[NodeClient], T], *, again: bool = True) -> T:
        """Return `question(client)`. With `again`, ask once more if the channel had died."""
        try:
            try:
                return question(self._dialled())
            except requests.exceptions.ConnectionError as e:
                if not again or _is_timeout(e):
                    raise
                self.close()
                return question(self._dialled())
        except docker.errors.APIError as e:
            raise engine_error(self._transport.node, self._options, str(e.explanation or e)) from e
        except (docker.errors.DockerException, requests.exceptions.RequestException) as e:
            raise self._broken(e) from e

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _dialled(self) -> NodeClient:
        with self._lock:
            if self._client is None:
                self._client = NodeClient(ChannelAdapter(self._open), self._limit_s)
            return self._client

    def _open(self) -> Any:
        self._youngest = self._transport.open([*self._options.docker_command, "system", "dial-stdio"])
        return self._youngest

    def _broken(self, e: BaseException) -> NodeError:
        """Error for a missing answer: too slow, or the channel ended with a message."""
        causes = [e]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        for cause in causes:
            if isinstance(cause, NodeError):
                return cause
        if any(map(_is_timeout, causes)):
            return EngineError(
                self._transport.node,
                f"Docker does not answer within {self._limit_s:g} s: it hangs or is overloaded"
                " (sudo systemctl restart docker ends the node's containers and may help)",
            )
        self._youngest.close()
        return engine_error(self._transport.node, self._options, self._youngest.error())


def _is_timeout(e: BaseException) -> bool:
    return isinstance(e, requests.exceptions.Timeout) or "Read timed out" in str(e)
