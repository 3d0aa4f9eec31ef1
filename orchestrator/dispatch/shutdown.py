"""Shutdown of a run's workers on all nodes at once, also on nodes that were given up or were only being prepared."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.dispatch.node import NodeDriver
from orchestrator.dispatch.node_registry import NodeRegistry
from orchestrator.errors import NodeError

POLL_S = 0.1
MAX_PARALLEL = 32


@dataclass(frozen=True, slots=True)
class StopLimits:
    """Limits in seconds: for workers to stop, for killed ones to end, and for all of it on a slow node."""

    stop_s: float
    kill_s: float
    limit_s: float


USUAL, SOON = StopLimits(5.0, 2.0, 20.0), StopLimits(3.0, 1.5, 7.0)
"""At the end of a run; when it is cancelled, which is over within 10 s whatever its nodes do."""


@dataclass(frozen=True, slots=True)
class StoppedNode:
    """Result on one node. `ran`: number of workers that ran and were stopped; None: none was ever started there.
    `left`: why some may run on, "" where none does."""

    ran: int | None
    left: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Shutdown:
    """Shutdown of nodes, one by one or all at once; `tidy` removes what is left in the engines."""

    def __init__(self, registry: NodeRegistry, pace: StopLimits, *, tidy: bool) -> None:
        self._registry, self._pace, self._tidy = registry, pace, tidy
        self._pool = ThreadPoolExecutor(MAX_PARALLEL, "shutdown")
        self._ends: dict[str, Future[StoppedNode]] = {}
        self._seen: dict[str, StoppedNode] = {}

    def begin(self, drivers: Iterable[NodeDriver]) -> None:
        """Begin to stop these nodes, each once. Those not up are reconnected if workers may have been started there."""
        for d in drivers:
            if d.node in self._ends or d.node in self._seen:
                continue
            started = d.start_no_more()
            if d.node in self._registry.up:
                self._ends[d.node] = self._pool.submit(self._end, d)
            elif started:
                self._ends[d.node] = self._pool.submit(self._call_and_end, d)
            else:
                self._seen[d.node] = StoppedNode(None)

    def done(self) -> bool:
        return all(e.done() for e in self._ends.values())

    def close(self) -> dict[str, StoppedNode]:
        """Results by node; calls still under way are cut off."""
        for node, end in self._ends.items():
            if not end.done():
                self._registry.drivers[node].hang_up()
        self._pool.shutdown(wait=False, cancel_futures=True)
        silent = StoppedNode(0, "it does not answer")
        return {**self._seen, **{n: e.result() if e.done() else silent for n, e in self._ends.items()}}

    def _call_and_end(self, driver: NodeDriver) -> StoppedNode:
        try:
            driver.call_again(self._pace.limit_s / 2)
        except NodeError as e:
            return StoppedNode(0, str(e))
        return self._end(driver)

    def _end(self, driver: NodeDriver) -> StoppedNode:
        ran = 0
        try:
            driver.settle(self._pace.stop_s)
            for kill, patience in ((False, self._pace.stop_s), (True, self._pace.kill_s)):
                alive = len(driver.alive())
                ran = max(ran, alive)
                if not alive:
                    break
                driver.halt(kill=kill)
                until = time.monotonic() + patience
                while driver.alive() and time.monotonic() < until:
                    time.sleep(POLL_S)
            with contextlib.suppress(NodeError, OSError):  # they stay on the node then
                driver.bring_home()
            driver.keep_results()
            if self._tidy:
                driver.tidy()
        except NodeError as e:
            return StoppedNode(ran, str(e))
        return StoppedNode(ran)


def stop_workers(
    registry: NodeRegistry,
    listen: Callable[[float, Callable[[], bool]], None],
    *,
    tidy: bool,
    pace: StopLimits = USUAL,
    only: Iterable[NodeDriver] | None = None,
) -> Mapping[str, StoppedNode]:
    """Stop all workers on these nodes, by default on all. `listen(seconds, over)` reads what nodes still send."""
    shutdown = Shutdown(registry, pace, tidy=tidy)
    shutdown.begin(registry.drivers.values() if only is None else only)
    listen(pace.limit_s, shutdown.done)
    return shutdown.close()
