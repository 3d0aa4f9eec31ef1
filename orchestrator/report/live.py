"""The live page of a run: a server that sends the page, and then each change of its document.

`gemmfleet report --live` makes a `PageServer` and calls `run`. A `DocumentWatch` collects the document of the run again
whenever the run changed (`collector.py`); a browser gets the page with one document, and asks `/events` for the changes
since that one. `guard.py` decides who may connect.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from orchestrator.errors import InputError, OrchestratorError
from orchestrator.files.faults import escaped
from orchestrator.pages import Document
from orchestrator.paths import RunPaths
from orchestrator.report.collector import Collector
from orchestrator.report.guard import HOST, Connection, Guard
from orchestrator.report.page import fit, render_page, safe

EVERY_S = 0.5
"""Seconds between two looks at the run."""
STALE_S = 10.0
"""The document of a running run is renewed at this age, because it shows elapsed times."""
IDLE_SHARE = 4.0
"""Pause after a collection, as a multiple of its time, so that a large run does not keep a core busy."""
KEPT = 3
"""We keep this many documents to compute changes from."""
MOST_STREAMS = 16
BEAT_S = 15.0
"""A stream without changes sends a comment this often, so that a dead link is noticed."""
LOOK_S = 0.5
"""A stream notices within this time that the server is ending."""
GRACE_S = 3
"""Seconds for the open streams when the server ends."""


class DocumentWatch:
    """Keeps the latest documents of a run, numbered from 1. `latest`: (number, document). Call `start`, then `run`,
    which ends when its task is cancelled."""

    def __init__(self, paths: RunPaths) -> None:
        self._collector = Collector(paths)
        self._kept: deque[tuple[int, Document]] = deque(maxlen=KEPT)
        self._changed = asyncio.Event()
        self._stamp: object = None
        self._wait_s = EVERY_S
        self._collected_at = 0.0
        self._problem = ""

    @property
    def latest(self) -> tuple[int, Document]:
        return self._kept[-1]

    def document_of(self, number: int) -> Document | None:
        """The document with that number, None if it is no longer kept."""
        return next((document for n, document in self._kept if n == number), None)

    async def start(self) -> None:
        """Collect the first document. Raises LedgerError, InputError."""
        await self._collect(await asyncio.to_thread(self._collector.stamp))

    async def run(self) -> None:
        """Collect the document again whenever the run changed."""
        while True:
            await asyncio.sleep(self._wait_s)
            try:
                stamp = await asyncio.to_thread(self._collector.stamp)
                is_stale = self.latest[1]["going"] and time.monotonic() - self._collected_at > STALE_S
                if stamp != self._stamp or is_stale:
                    await self._collect(stamp)
                self._problem = ""
            except OrchestratorError as e:
                self._warn(str(e))

    async def wait_for_newer(self, number: int, wait_s: float) -> bool:
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
        self._collected_at = time.monotonic()
        self._wait_s = max(EVERY_S, IDLE_SHARE * (self._collected_at - began))
        self._stamp = stamp
        number = self.latest[0] + 1 if self._kept else 1
        self._kept.append((number, document))
        self._changed.set()
        self._changed = asyncio.Event()

    def _warn(self, problem: str) -> None:
        """Print a problem once. The last document stays."""
        if problem != self._problem:
            self._problem = problem
            print(f"warning: {escaped(problem.partition(chr(10))[0])}", file=sys.stderr, flush=True)


def changes(old: Document | None, new: Document) -> Document:
    """The change from `old` to `new`: `{"full": new}`, or `{"parts": {name: value}, "rows": [[number, row], ...]}`."""
    if old is None or _frame(old) != _frame(new):
        return {"full": new}
    pairs = zip(old["shapes"], new["shapes"], strict=True)
    rows = [[number, row] for number, (old_row, row) in enumerate(pairs) if old_row != row]
    parts = {name: value for name, value in new.items() if name != "shapes" and old[name] != value}
    return {"parts": parts, "rows": rows}


def _frame(document: Document) -> tuple[Any, ...]:
    """The parts, columns and backends of a page, and the order of its shapes. If they change, a browser needs the full
    document."""
    backends = [backend["name"] for backend in document["backends"]]
    return document.keys(), document["columns"], backends, [row[0] for row in document["shapes"]]


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
    quiet_since = time.monotonic()
    while not ending():
        if await watch.wait_for_newer(seen, LOOK_S):
            number, document = watch.latest
            text = json.dumps(safe(changes(watch.document_of(seen), document)), allow_nan=False, separators=(",", ":"))
            yield f"id: {number}\nevent: change\ndata: {text}\n\n"
            seen = number
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > BEAT_S:
            yield ": here\n\n"
            quiet_since = time.monotonic()


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
