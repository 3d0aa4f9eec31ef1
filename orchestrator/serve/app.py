"""ASGI application of a run: the page, and a stream of its changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from orchestrator.analysis.report.page import render_page, safe
from orchestrator.errors import OrchestratorError
from orchestrator.paths import RunPaths
from orchestrator.serve.watch import Watch, changes

MOST_STREAMS = 16
BEAT_S = 15.0
LOOK_S = 0.5
"""Longest time until a stream notices that the server ends."""


def make_app(paths: RunPaths, *, ending: Callable[[], bool], failed: Callable[[OrchestratorError], None]) -> Starlette:
    """Return the application of a run.

    `ending` tells streams that the server is about to end; `failed` receives the error that prevents the first page.
    """
    watch = Watch(paths)
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


async def _stream(watch: Watch, seen: int, ending: Callable[[], bool]) -> AsyncIterator[str]:
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
