"""HTTP server of the live page: on the loopback interface, read-only, for the browser with the printed address."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any, cast
from urllib.parse import parse_qs

from orchestrator.command_hints import command
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.paths import RunPaths

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HEADERS = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""Headers of every response."""


class Guard:
    """ASGI middleware that admits only a browser of this machine with the printed address; `port`: that listened on.

    - Host must be ours: a foreign page whose name resolves to 127.0.0.1 (DNS rebinding) sends another one.
    - The token of the printed address is exchanged for a cookie at once, so no history, log or referrer keeps it.
    - The cookie is HttpOnly and SameSite=Strict; requests from other origins are refused as well.
    """

    def __init__(self, app: App, port: int) -> None:
        self._app = app
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._cookie = f"gemmfleet_{port}"  # cookies belong to a host, not to a port
        self.token = secrets.token_urlsafe(24)
        self._session = secrets.token_urlsafe(24)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await _answer(guarded, *refusal)
        elif self._brings_token(scope):
            header = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"
            away = [(b"location", b"/"), (b"set-cookie", header.encode())]
            await _answer(guarded, 303, "", away)
        elif self._known(scope):
            await self._app(scope, receive, guarded)
        else:
            await _answer(guarded, 403, "Open the address that the command printed: it holds the key to this page.")

    def _refusal(self, scope: Message) -> tuple[int, str] | None:
        if _header(scope, b"host") not in self._hosts:
            return 421, "This server answers as 127.0.0.1 and localhost only."
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This server is read-only: it answers GET."
        if _header(scope, b"sec-fetch-site") in ("cross-site", "same-site"):
            return 403, "Another site began this request. Open the printed address yourself."
        return None

    def _brings_token(self, scope: Message) -> bool:
        if scope["path"] != "/":
            return False
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[-1]
        return _same(given, self.token)

    def _known(self, scope: Message) -> bool:
        try:
            cookies = SimpleCookie(_header(scope, b"cookie"))
        except CookieError:
            return False
        cookie = cookies.get(self._cookie)
        return cookie is not None and _same(cookie.value, self._session)


def _same(given: str, kept: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), kept.encode())


def _header(scope: Message, name: bytes) -> str:
    """Return a header that occurs exactly once, else ""."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else ""


async def _answer(send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    kind = [(b"content-type", b"text/plain; charset=utf-8"), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": kind})
    await send({"type": "http.response.body", "body": f"{text}\n".encode() if text else b""})


HOST = "127.0.0.1"
GRACE_S = 3


class PageServer:
    """The live page of a run. `url` holds the token; `run` blocks until `stop`, Ctrl-C or SIGTERM."""

    def __init__(self, paths: RunPaths, port: int = 0) -> None:
        """Listen on `port`, 0 for any free one.

        Raises InputError where it is in use, or the extra `live` is not installed.
        """
        try:
            import uvicorn

            from orchestrator.report.live import make_app
        except ModuleNotFoundError as e:
            raise InputError(
                f"--live needs {e.name}, which is not installed: make report ARGS=--live, or"
                f" pip install 'gemmfleet[live]'; {command('report')} without --live does not need it"
            ) from e
        self._socket = _listen(port)
        number = int(self._socket.getsockname()[1])
        self._failed: list[OrchestratorError] = []
        app = make_app(paths, ending=lambda: self._server.should_exit, failed=self._failed.append)
        guard = Guard(cast(App, app), number)
        self.url = f"http://{HOST}:{number}/?token={guard.token}"
        config = uvicorn.Config(
            cast(Any, guard), log_level="critical", access_log=False, server_header=False, ws="none", lifespan="on",
            timeout_graceful_shutdown=GRACE_S, limit_concurrency=64,
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until stopped. Raises LedgerError or InputError where the first page fails."""
        try:
            self._server.run(sockets=[self._socket])
        except SystemExit:  # uvicorn exits so when the application does not start
            if not self._failed:
                raise
        finally:
            self._socket.close()
        for e in self._failed:
            raise e

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.should_exit = True


def _listen(port: int) -> socket.socket:
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        s.bind((HOST, port))
        s.listen(64)  # a browser that connects before the first page waits for it
    except OSError as e:
        s.close()
        raise InputError(
            f"port {port} of this machine cannot be used: {e.strerror}; without --port a free one is"
        ) from e
    return s
