"""The guard of the live page: admits only browsers on this machine that have the printed address.

`PageServer` (`live.py`) wraps its application into a `Guard`, and lets uvicorn serve each connection by `Connection`.
Any process of this machine can connect to the port, and so can a page of another site in the user's browser: none of
them has the token in the address.
"""

from __future__ import annotations

import asyncio
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HOST = "127.0.0.1"
HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
"""Headers of every response."""
MOST_STRANGERS = 64
"""Most open connections that have not shown the key of the page."""


class Strangers:
    """Open connections, by their address, that have not shown the key; the oldest is closed if there are too many.

    A limit of all connections would let any process of this machine shut the page's owner out.
    """

    def __init__(self) -> None:
        self._open: dict[object, asyncio.Transport] = {}

    def arrive(self, client: object, transport: asyncio.Transport) -> None:
        self._open[client] = transport
        if len(self._open) > MOST_STRANGERS:
            self._open.pop(next(iter(self._open))).close()

    def leave(self, client: object) -> None:
        """Forget a connection that has shown the key, or that is closed."""
        self._open.pop(client, None)


class Connection(H11Protocol):
    """A connection to a server whose application is a Guard."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.config.app.strangers.arrive(self.client, transport)  # type: ignore[union-attr]

    def connection_lost(self, exc: Exception | None) -> None:
        self.config.app.strangers.leave(self.client)  # type: ignore[union-attr]
        super().connection_lost(exc)


class Guard:
    """ASGI middleware that admits only browsers on this machine that have the printed address. `port`: our port.

    - The Host header must be ours. A foreign page whose name resolves to 127.0.0.1 (DNS rebinding) sends another one.
    - The token in the printed address is exchanged for a cookie at once, so no history, log or referrer keeps it.
    - The cookie is HttpOnly and SameSite=Strict. Requests from other origins are refused as well.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._hosts = ([f"{HOST}:{port}"], [f"localhost:{port}"])
        self._cookie = f"gemmfleet_{port}"  # cookies belong to a host, not to a port
        self.token = secrets.token_urlsafe(24)
        self._session = secrets.token_urlsafe(24)
        self.strangers = Strangers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (self._answer(Request(scope)) or self._app)(scope, receive, guarded)

    def _answer(self, request: Request) -> Response | None:
        """Return the guard's own answer, None if the request may pass."""
        if request.headers.getlist("host") not in self._hosts:
            return PlainTextResponse("This server answers as 127.0.0.1 and localhost only.\n", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("This server is read-only: it answers GET.\n", 405)
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return PlainTextResponse("Another site made this request. Open the printed address yourself.\n", 403)
        if request.scope["path"] == "/" and _same(request.query_params.get("token", ""), self.token):
            away = RedirectResponse("/", 303)
            away.set_cookie(self._cookie, self._session, httponly=True, samesite="strict")
            return away
        if _same(request.cookies.get(self._cookie, ""), self._session):
            self.strangers.leave(request.scope["client"])
            return None
        return PlainTextResponse("Open the address that the command printed: it holds the key to this page.\n", 403)


def _same(received: str, kept: str) -> bool:
    """Compare two keys in a time that tells nothing about them."""
    return secrets.compare_digest(received.encode("utf-8", "replace"), kept.encode())
