"""ASGI application of a run: the page, and a stream of the changes of its document."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from orchestrator.errors import OrchestratorError
from orchestrator.paths import RunPaths
from orchestrator.report.collector import Collector
from orchestrator.report.page import fit, render_page, safe
from orchestrator.tables.textfiles import escaped

EVERY_S = 0.5
STALE_S = 10.0
"""Age at which the document of a running run is renewed, as times in it pass."""
IDLE_SHARE = 4.0
"""Pause after a collection, in multiples of its time: a large run must not keep a core busy."""
KEPT = 3
"""Documents kept, against which changes can be computed."""

T = TypeVar("T")


class DocumentWatch:
    """Latest documents of a run, `latest` as (number, document). Call `start`, `run` until cancelled, then `close`."""

    def __init__(self, paths: RunPaths) -> None:
        self._collector = Collector(paths)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="collector")
        self._kept: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEPT)
        self._changed = asyncio.Event()
        self._stamp: object = None
        self._wait_s = EVERY_S
        self._at = 0.0
        self._problem = ""

    @property
    def latest(self) -> tuple[int, dict[str, Any]]:
        return self._kept[-1]

    def of(self, number: int) -> dict[str, Any] | None:
        """Return the document of that number, None where it is no longer kept."""
        return next((document for n, document in self._kept if n == number), None)

    async def start(self) -> None:
        """Collect the first document. Raises LedgerError, InputError."""
        await self._collect(await self._in_thread(self._collector.stamp))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._wait_s)
            try:
                stamp = await self._in_thread(self._collector.stamp)
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

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    async def _collect(self, stamp: object) -> None:
        began = time.monotonic()
        document = await self._in_thread(lambda: fit(self._collector.document()))
        self._at = time.monotonic()
        self._wait_s = max(EVERY_S, IDLE_SHARE * (self._at - began))
        self._stamp = stamp
        self._kept.append((self._kept[-1][0] + 1 if self._kept else 1, document))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _in_thread(self, do: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, do)

    def _warn(self, problem: str) -> None:
        """Print a problem once; the last document stays."""
        if problem != self._problem:
            self._problem = problem
            print(f"warning: {escaped(problem.partition(chr(10))[0])}", file=sys.stderr, flush=True)


def changes(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return the change from `old` to `new`: {"full": new}, or {"parts": {name: value}, "rows": [[number, row]]}."""
    if old is None or old.keys() != new.keys() or old["columns"] != new["columns"] or not _aligned(old, new):
        return {"full": new}
    rows = [[i, row] for i, (was, row) in enumerate(zip(old["shapes"], new["shapes"], strict=True)) if was != row]
    return {"parts": {k: v for k, v in new.items() if k != "shapes" and old[k] != v}, "rows": rows}


def _aligned(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether both have the same shapes in the same order, and the same backends."""
    if [b["name"] for b in old["backends"]] != [b["name"] for b in new["backends"]]:
        return False
    return [r[0] for r in old["shapes"]] == [r[0] for r in new["shapes"]]


MOST_STREAMS = 16
BEAT_S = 15.0
LOOK_S = 0.5
"""Longest time until a stream notices that the server ends."""


def make_app(paths: RunPaths, *, ending: Callable[[], bool], failed: Callable[[OrchestratorError], None]) -> Starlette:
    """Return the application of a run.

    `ending` ends the streams when the server is about to end; `failed` receives the error that prevents the first page.
    """
    watch = DocumentWatch(paths)
    streams = 0

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await watch.start()
        except OrchestratorError as e:
            watch.close()
            failed(e)
            raise
        task = asyncio.create_task(watch.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            watch.close()

    async def page(request: Request) -> Response:
        number, document = watch.latest
        text = await asyncio.to_thread(render_page, document, events=f"events?from={number}")
        return HTMLResponse(text, headers={"Content-Security-Policy": "frame-ancestors 'none'"})

    async def events(request: Request) -> Response:
        nonlocal streams
        if streams >= MOST_STREAMS:
            return PlainTextResponse("Too many pages are open.\n", 503)
        streams += 1

        async def closing() -> AsyncIterator[str]:
            nonlocal streams
            try:
                async for text in _stream(watch, _seen(request), ending):
                    yield text
            finally:
                streams -= 1

        return StreamingResponse(closing(), media_type="text/event-stream")

    return Starlette(routes=[Route("/", page), Route("/events", events)], lifespan=lifespan)


def _seen(request: Request) -> int:
    """Return the number of the document that the page has, from its last event or its address; 0 without one."""
    number_text = request.headers.get("last-event-id") or request.query_params.get("from", "")
    return int(number_text) if number_text.isascii() and number_text.isdigit() and len(number_text) < 18 else 0


async def _stream(watch: DocumentWatch, seen: int, ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield server-sent events: each change, and every BEAT_S a comment, so that a dead link is noticed."""
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
