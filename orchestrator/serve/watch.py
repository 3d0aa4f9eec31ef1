"""Watches a run: collects its document whenever the ledger says something new, all in one thread of its own."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from orchestrator.analysis.report.collector import Collector
from orchestrator.analysis.report.page import fit
from orchestrator.errors import OrchestratorError
from orchestrator.paths import RunPaths
from orchestrator.tables.faults import escaped

EVERY_S = 0.5
STALE_S = 10.0
"""Of a run that goes on: time alone changes what is told."""
IDLE_SHARE = 4.0
"""After a collection of n seconds there is none for so many times n: a large run must not keep a core busy."""
KEPT = 3
"""Documents to which changes can be told."""

T = TypeVar("T")


class Watch:
    """`latest` is (number, document). Begin with `start`, then `run` until it is cancelled; then `close`."""

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
        """The document of that number, None where it is not kept any more."""
        return next((document for n, document in self._kept if n == number), None)

    async def start(self) -> None:
        """The first document. Raises LedgerError, InputError."""
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
                self._tell(str(e))

    async def changed(self, number: int, wait_s: float) -> bool:
        """Whether there is another document than that of `number`, after at most so long."""
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

    def _tell(self, problem: str) -> None:
        """A trouble once; what was read before is shown on."""
        if problem != self._problem:
            self._problem = problem
            print(f"warning: {escaped(problem.partition(chr(10))[0])}", file=sys.stderr, flush=True)
