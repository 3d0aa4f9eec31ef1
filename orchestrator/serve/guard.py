"""Access control: only a browser on this machine with the printed address, and read-only.

- Host must be ours: a foreign page whose name resolves to 127.0.0.1 (DNS rebinding) sends another one.
- The token of the printed address is exchanged for a cookie at once, so no history, log or referrer keeps it.
- The cookie is HttpOnly and SameSite=Strict; requests from other origins are refused as well.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

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
    """ASGI middleware that admits requests with the cookie; `port` is the one listened on."""

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
