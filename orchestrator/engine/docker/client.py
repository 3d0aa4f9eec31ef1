"""Docker's API on a node: the SDK's client over `docker system dial-stdio`, and its failures as EngineErrors.

The channels are those of the connection that is open anyway. A channel becomes one end of a socket pair, for which two
threads carry the bytes: so the client's time limits are the socket's own, and hold whatever the transport does.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import docker
import docker.errors
import requests
import requests.adapters
import urllib3
from urllib3.connection import HTTPConnection

from orchestrator.engine.docker.spec import DockerOptions
from orchestrator.errors import EngineError, NodeError
from orchestrator.transport import Transport
from orchestrator.transport.base import Channel


def engine_error(
    node: str, options: DockerOptions, message: str, group: Callable[[], str] = lambda: "docker"
) -> EngineError:
    """EngineError with the way out. `message`: of docker, sudo or the daemon. `group` finds who may use Docker's
    socket, where that matters."""
    lowered = message.lower()
    command = " ".join(options.docker_command)
    for pattern, text in _TABLE:
        if re.search(pattern, lowered, re.MULTILINE):
            hint = text.format(
                image=(options.written or options).image,
                command=command,
                group=group() if "{group}" in text else "",
                pull=options.pull,
            )
            return EngineError(node, f"{hint} ({_short(message)})")
    return EngineError(node, f"Docker: {_short(message)}")


_TABLE = (
    (
        r"permission denied while trying to connect|dial unix .*permission denied",
        "this user may not use Docker: add it to the group {group} on the node (sudo usermod -aG {group} USER, then log"
        " in again), or set docker_command: [sudo, -n, docker] in the inventory",
    ),
    (
        r"a password is required|sudo: .*not allowed|is not in the sudoers",
        "{command} asks for a password or is not allowed: allow it without one in the node's sudoers, or add the user"
        " to the group docker",
    ),
    (
        r"cannot connect to the docker daemon|is the docker daemon running|"
        r"dial unix .*(no such file|connection refused)",
        "Docker does not run there: start it (sudo systemctl start docker)",
    ),
    (
        r"no space left on device",
        "no space left on the node: docker system df shows what takes it, docker system prune frees it",
    ),
    (
        r"no such image|manifest unknown|pull access denied|repository does not exist|not found: manifest|"
        r"unable to find image|manifest for .* not found",
        "the image {image} is not there (pull: {pull}): correct `image:`, load it on the node (docker load), or set"
        " pull: missing",
    ),
    (
        r"\S+: (command )?not found$|failed to run command .*no such file|ended with code 127",
        "there is no {command} on the node: install Docker, or say docker_command in the inventory",
    ),
    (r"lookup .*: (no such host|i/o timeout)|tls handshake timeout|client\.timeout",
     "the node cannot reach the registry of {image}: load the image by hand (docker save, docker load)"),
    (
        r"error gathering device information|there is no /dev/",
        "a device of the inventory is not on the node: correct `devices:`, or load the GPU's driver",
    ),
    (r"already in use by container", "another run has a container of this name: is a second controller at work?"),
)  # fmt: skip


def _short(message: str) -> str:
    lines = [line.strip() for line in message.strip().splitlines() if line.strip() and "--help'" not in line]
    return " / ".join(lines[-3:])[-600:] or "it gave no message"


MAX_CHANNELS = 2
"""At most so many dial-stdio channels a node: one may be busy with a pull."""
PIECE = 65536


class ChannelSocket:
    """A channel as a socket."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.socket, self._far = socket.socketpair()
        self.message = ""
        """Message of the command when it ended."""
        self._ended = threading.Event()
        for carry in (self._inwards, self._outwards):
            threading.Thread(target=carry, name="docker channel", daemon=True).start()

    def last_message(self, seconds: float = 2.0) -> str:
        """Message of the command at its end; empty where it has not ended."""
        self._ended.wait(seconds)
        return self.message

    def _inwards(self) -> None:
        with contextlib.suppress(OSError, NodeError):
            while data := self._channel.read(PIECE):
                self._far.sendall(data)
        with contextlib.suppress(OSError):
            self._far.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, NodeError):
            self._channel.close()
            self.message = self._channel.error()
        self._ended.set()

    def _outwards(self) -> None:
        with contextlib.suppress(OSError, NodeError):
            while data := self._far.recv(PIECE):
                self._channel.write(data)
        self._channel.close()
        with contextlib.suppress(OSError):
            self._far.close()


class ChannelAdapter(requests.adapters.HTTPAdapter):
    """Sends requests for any URL to the one node."""

    def __init__(self, open_channel: Callable[[], Channel]) -> None:
        super().__init__()
        self._pool = _Pool(open_channel)

    @property
    def last_message(self) -> str:
        """Message of the youngest channel's command at its end."""
        return self._pool.youngest.last_message() if self._pool.youngest else ""

    def get_connection_with_tls_context(
        self, request: Any, verify: Any, proxies: Any = None, cert: Any = None
    ) -> urllib3.HTTPConnectionPool:
        return self._pool

    def request_url(self, request: requests.PreparedRequest, proxies: Mapping[str, str] | None) -> str:
        return request.path_url  # no proxy is ever between us and the channel

    def close(self) -> None:
        super().close()
        self._pool.close()


class _Pool(urllib3.HTTPConnectionPool):
    def __init__(self, open_channel: Callable[[], Channel]) -> None:
        super().__init__("localhost", maxsize=MAX_CHANNELS, block=True)
        self._open_channel = open_channel
        self.youngest: ChannelSocket | None = None

    def _new_conn(self) -> HTTPConnection:
        return _Connection(self)

    def dial(self) -> ChannelSocket:
        self.youngest = ChannelSocket(self._open_channel())
        return self.youngest


class _Connection(HTTPConnection):
    def __init__(self, pool: _Pool) -> None:
        super().__init__("localhost")
        self._node_pool = pool

    def connect(self) -> None:
        self.sock = self._node_pool.dial().socket
        if isinstance(self.timeout, (int, float)):
            self.sock.settimeout(self.timeout)


LIMIT_S = 10.0
"""Longest silence of one request to Docker; of a pull PULL_SILENCE_S."""
PULL_SILENCE_S = 300.0

T = TypeVar("T")


class NodeClient(docker.APIClient):  # type: ignore[misc]
    """An APIClient whose requests all go through one adapter."""

    def __init__(self, adapter: ChannelAdapter, timeout: float) -> None:
        self._adapter = adapter
        super().__init__(base_url="http://docker:80", version="auto", timeout=timeout)

    def get_adapter(self, url: str) -> ChannelAdapter:
        return self._adapter

    def close(self) -> None:
        super().close()
        self._adapter.close()


class Docker:
    """A node's Docker, dialled at the first use. Every method raises EngineError or TransportError only."""

    def __init__(self, transport: Transport, options: DockerOptions, limit_s: float = LIMIT_S) -> None:
        self._transport, self._options, self._limit_s = transport, options, limit_s
        self._lock = threading.Lock()
        self._client: NodeClient | None = None

    def ask(self, question: Callable[[NodeClient], T], *, again: bool = True) -> T:
        """The answer to `question(client)`. One that is safe to repeat is repeated once where the channel had died."""
        adapter = None
        try:
            try:
                client, adapter = self._dialled()
                return question(client)
            except requests.exceptions.ConnectionError as e:
                if not again or isinstance(e, requests.exceptions.Timeout) or _is_timeout(e):
                    raise
                self.close()
                client, adapter = self._dialled()
                return question(client)
        except (docker.errors.NotFound, docker.errors.APIError) as e:
            raise self._error(str(e.explanation or e)) from e
        except (docker.errors.DockerException, requests.exceptions.RequestException) as e:
            raise self._broken(e, adapter) from e

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _dialled(self) -> tuple[NodeClient, ChannelAdapter]:
        with self._lock:
            if self._client is None:
                adapter = ChannelAdapter(self._open)
                try:
                    self._client = NodeClient(adapter, self._limit_s)
                except docker.errors.DockerException as e:
                    error = self._broken(e, adapter)
                    adapter.close()
                    raise error from e
            return self._client, self._client.get_adapter("")

    def _open(self) -> Any:
        return self._transport.open([*self._options.docker_command, "system", "dial-stdio"])

    def _broken(self, e: BaseException, adapter: ChannelAdapter | None) -> NodeError:
        """Error for a missing answer: too slow, or the channel ended with a message."""
        cause: BaseException | None = e
        while cause is not None:
            if isinstance(cause, NodeError):
                return cause
            if isinstance(cause, requests.exceptions.Timeout) or _is_timeout(cause):
                return EngineError(
                    self._transport.node,
                    f"Docker does not answer within {self._limit_s:g} s: it hangs or is overloaded"
                    " (sudo systemctl restart docker ends the node's containers and may help)",
                )
            cause = cause.__cause__ or cause.__context__
        message = adapter.last_message if adapter else ""
        return self._error(message or str(e))

    def _error(self, message: str) -> EngineError:
        return engine_error(self._transport.node, self._options, message, self.socket_group)

    def socket_group(self) -> str:
        """The group that may use Docker's socket on the node."""
        try:
            done = self._transport.run(["stat", "-L", "-c", "%G", "/var/run/docker.sock"], timeout=10.0)
        except NodeError:
            return "docker"
        return done.out.decode("utf-8", "replace").strip() or "docker"


def _is_timeout(e: BaseException) -> bool:
    return "Read timed out" in str(e)
