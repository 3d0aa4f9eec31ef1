"""The ASGI application for a run: it serves the page and a stream of changes to its document."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.errors import InputError, OrchestratorError
from orchestrator.files.faults import escaped
from orchestrator.pages import Document
from orchestrator.paths import RunPaths
from orchestrator.report.collector import Collector
from orchestrator.report.page import fit, render_page, safe

EVERY_S = 0.5
STALE_S = 10.0
"""The document of a running run is renewed at this age, because it shows elapsed times."""
IDLE_SHARE = 4.0
"""Pause after a collection, as a multiple of its time, so that a large run does not keep a core busy."""
KEPT = 3
"""We keep this many documents to compute changes from."""


class DocumentWatch:
    """Keeps the latest documents of a run. `latest`: (number, document). Call `start`, then `run` until cancelled."""

    def __init__(self, paths: RunPaths) -> None:
        self._collector = Collector(paths)
        self._kept: deque[tuple[int, Document]] = deque(maxlen=KEPT)
        self._changed = asyncio.Event()
        self._stamp: object = None
        self._wait_s = EVERY_S
        self._at = 0.0
        self._problem = ""

    @property
    def latest(self) -> tuple[int, Document]:
        return self._kept[-1]

    def of(self, number: int) -> Document | None:
        """Return the document with that number, None if it is no longer kept."""
        return next((document for n, document in self._kept if n == number), None)

    async def start(self) -> None:
        """Collect the first document. Raises LedgerError, InputError."""
        await self._collect(await asyncio.to_thread(self._collector.stamp))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._wait_s)
            try:
                stamp = await asyncio.to_thread(self._collector.stamp)
                going = bool(self.latest[1]["going"])
                if stamp != self._stamp or (going and time.monotonic() - self._at > STALE_S):
                    await self._collect(stamp)
                self._problem = ""
            except OrchestratorError as e:
                self._warn(str(e))

    async def changed(self, number: int, wait_s: float) -> bool:
        """Wait at most `wait_s` for a document newer than `number`; return whether there is one."""
        if self.latest[0] == number:
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                return False
        return self.latest[0] != number

    async def _collect(self, stamp: object) -> None:
        began = time.monotonic()
        document = await asyncio.to_thread(lambda: fit(self._collector.document()))
        self._at = time.monotonic()
        self._wait_s = max(EVERY_S, IDLE_SHARE * (self._at - began))
        self._stamp = stamp
        self._kept.append((self._kept[-1][0] + 1 if self._kept else 1, document))
        self._changed.set()
        self._changed = asyncio.Event()

    def _warn(self, problem: str) -> None:
        """Print a problem once. The last document stays."""
        if problem != self._problem:
            self._problem = problem
            print(f"warning: {escaped(problem.partition(chr(10))[0])}", file=sys.stderr, flush=True)


def changes(old: Document | None, new: Document) -> Document:
    """Return the change from `old` to `new`: {"full": new}, or {"parts": {name: value}, "rows": [[number, row]]}."""
    if old is None or _frame(old) != _frame(new):
        return {"full": new}
    rows = [[i, row] for i, (was, row) in enumerate(zip(old["shapes"], new["shapes"], strict=True)) if was != row]
    return {"parts": {k: v for k, v in new.items() if k != "shapes" and old[k] != v}, "rows": rows}


def _frame(d: Document) -> tuple[Any, ...]:
    """Return the frame of a page: its parts, columns and backends, and the order of the shapes. A change of the frame
    needs a full document."""
    return (d.keys(), d["columns"], [b["name"] for b in d["backends"]], [r[0] for r in d["shapes"]])


MOST_STREAMS = 16
BEAT_S = 15.0
LOOK_S = 0.5
"""A stream notices within this time that the server is ending."""


def make_app(watch: DocumentWatch, ending: Callable[[], bool]) -> Starlette:
    """Return the application that shows the documents. Its streams end when `ending` says that the server will end."""
    streams = 0

    async def page(request: Request) -> Response:
        number, document = watch.latest
        text = await asyncio.to_thread(render_page, document, events=f"events?from={number}")
        return HTMLResponse(text, headers={"Content-Security-Policy": "frame-ancestors 'none'"})

    async def events(request: Request) -> Response:
        nonlocal streams
        if streams >= MOST_STREAMS:
            return PlainTextResponse("Too many pages are open.\n", 503)
        streams += 1
        # the number of the page's current document, from its last event or its address
        number = request.headers.get("last-event-id") or request.query_params.get("from", "")
        seen = int(number) if number.isascii() and number.isdigit() and len(number) < 18 else 0

        async def closing() -> AsyncIterator[str]:
            nonlocal streams
            try:
                async for text in _stream(watch, seen, ending):
                    yield text
            finally:
                streams -= 1

        return StreamingResponse(closing(), media_type="text/event-stream")

    return Starlette(routes=[Route("/", page), Route("/events", events)])


async def _stream(watch: DocumentWatch, seen: int, ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield server-sent events: each change, and a comment every BEAT_S, so that a dead link is noticed."""
    yield "retry: 2000\n\n"
    quiet = time.monotonic()
    while not ending():
        if await watch.changed(seen, LOOK_S):
            number, document = watch.latest
            text = json.dumps(safe(changes(watch.of(seen), document)), allow_nan=False, separators=(",", ":"))
            yield f"id: {number}\nevent: change\ndata: {text}\n\n"
            seen, quiet = number, time.monotonic()
        elif time.monotonic() - quiet > BEAT_S:
            yield ": here\n\n"
            quiet = time.monotonic()


HOST = "127.0.0.1"
GRACE_S = 3
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


def _same(given: str, kept: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "replace"), kept.encode())


class PageServer:
    """The live page of a run. `url` holds the token; `run` blocks until `stop`, Ctrl-C or SIGTERM."""

    def __init__(self, paths: RunPaths, port: int = 0) -> None:
        """Listen on `port`, 0 for any free port. Raises InputError if it is in use."""
        self._socket = _listen(port)
        number = int(self._socket.getsockname()[1])
        self._watch = DocumentWatch(paths)
        guard = Guard(make_app(self._watch, lambda: self._server.should_exit), number)
        self.url = f"http://{HOST}:{number}/?token={guard.token}"
        config = uvicorn.Config(
            guard,
            http=Connection,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until stopped. Raises LedgerError or InputError if the first page fails."""
        try:
            asyncio.run(self._serve())
        finally:
            self._socket.close()

    async def _serve(self) -> None:
        await self._watch.start()
        watching = asyncio.create_task(self._watch.run())
        await self._server.serve(sockets=[self._socket])
        watching.cancel()

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
