"""The docker SDK's client for one node, and its failures as EngineErrors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import docker
import docker.errors
import requests

from orchestrator.engine.docker.channel import ChannelAdapter
from orchestrator.engine.docker.faults import engine_error
from orchestrator.engine.docker.options import DockerOptions
from orchestrator.errors import EngineError, NodeError
from orchestrator.transport import Transport

LIMIT_S = 10.0
"""Of one request to Docker, silence; a pull has PULL_SILENCE_S."""
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
        """Docker gave no answer: too slow, or the channel ended with words of its own."""
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
        said = adapter.last_words if adapter else ""
        return self._error(said or str(e))

    def _error(self, said: str) -> EngineError:
        return engine_error(self._transport.node, self._options, said, self.socket_group)

    def socket_group(self) -> str:
        """The group that may use Docker's socket on the node."""
        try:
            done = self._transport.run(["stat", "-L", "-c", "%G", "/var/run/docker.sock"], timeout=10.0)
        except NodeError:
            return "docker"
        return done.out.decode("utf-8", "replace").strip() or "docker"


def _is_timeout(e: BaseException) -> bool:
    return "Read timed out" in str(e)
