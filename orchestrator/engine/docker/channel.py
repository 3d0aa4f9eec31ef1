"""HTTP to a node's Docker through `docker system dial-stdio`, over channels of the connection that is open anyway.

A channel becomes one end of a socket pair: two threads carry the bytes. So the client's time limits are the
socket's own, and hold whatever the transport does.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import requests
import requests.adapters
import urllib3
from urllib3.connection import HTTPConnection

from orchestrator.errors import NodeError
from orchestrator.transport.base import Channel

MAX_CHANNELS = 2
"""At most so many dial-stdio channels a node: one may be busy with a pull."""
PIECE = 65536


class Wire:
    """A channel as a socket."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.socket, self._far = socket.socketpair()
        self.words = ""
        """What the command said when it ended."""
        self._ended = threading.Event()
        for carry in (self._inwards, self._outwards):
            threading.Thread(target=carry, name="docker channel", daemon=True).start()

    def last_words(self, seconds: float = 2.0) -> str:
        """What the command said at its end; empty where it has not ended."""
        self._ended.wait(seconds)
        return self.words

    def _inwards(self) -> None:
        with contextlib.suppress(OSError, NodeError):
            while data := self._channel.read(PIECE):
                self._far.sendall(data)
        with contextlib.suppress(OSError):
            self._far.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, NodeError):
            self._channel.close()
            self.words = self._channel.error()
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
    def last_words(self) -> str:
        """What the command of the youngest channel said at its end."""
        return self._pool.youngest.last_words() if self._pool.youngest else ""

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
        self.youngest: Wire | None = None

    def _new_conn(self) -> HTTPConnection:
        return _Connection(self)

    def dial(self) -> Wire:
        self.youngest = Wire(self._open_channel())
        return self.youngest


class _Connection(HTTPConnection):
    def __init__(self, pool: _Pool) -> None:
        super().__init__("localhost")
        self._node_pool = pool

    def connect(self) -> None:
        self.sock = self._node_pool.dial().socket
        if isinstance(self.timeout, (int, float)):
            self.sock.settimeout(self.timeout)
