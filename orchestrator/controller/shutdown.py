"""Ends the workers of nodes, and fetches the reproductions of faults and the results that lie there. It also reaches
nodes that were given up or never came up.

Call `begin` with drivers, once or several times, then `is_done` until it is true or the time is up, and `close` for the
results. Each node is ended in a thread of its own (`_end`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from orchestrator.controller.context import StopLimits
from orchestrator.controller.node_driver import NodeDriver
from orchestrator.controller.node_registry import NodeRegistry
from orchestrator.errors import NodeError

POLL_S = 0.1
"""Pause between two looks whether a worker is alive."""
MAX_PARALLEL = 32
"""Most nodes that are stopped at a time."""


@dataclass(frozen=True, slots=True)
class StoppedNode:
    """The result of ending the workers of one node, which the loop reports and stores for `cancel`."""

    ran: int | None
    """Running workers that were stopped; None if none was ever started there."""
    left: str = ""
    """The reason why some may still run, "" if none does. It is also given where a later step failed: the results could
    not be kept, or the engine not be cleaned up."""


class Shutdown:
    """Shuts nodes down, one by one or all at once. `tidy`: also clean up in the engines."""

    def __init__(self, registry: NodeRegistry, pace: StopLimits, *, tidy: bool) -> None:
        self._registry = registry
        self._pace = pace
        self._tidy = tidy
        self._pool = ThreadPoolExecutor(MAX_PARALLEL, "shutdown")
        self._ends: dict[str, Future[StoppedNode]] = {}
        self._never_started: dict[str, StoppedNode] = {}

    def begin(self, drivers: Iterable[NodeDriver]) -> None:
        """Begin to stop these nodes, each once. If a node is not up but may have workers, connect to it again."""
        for driver in drivers:
            node = driver.node
            if node in self._ends or node in self._never_started:
                continue
            may_have_workers = driver.workers.start_no_more()
            is_up = self._registry.session_of(node) is not None
            if is_up or may_have_workers:
                self._ends[node] = self._pool.submit(self._end, driver, is_up)
            else:
                self._never_started[node] = StoppedNode(None)

    def is_done(self) -> bool:
        return all(end.done() for end in self._ends.values())

    def close(self) -> dict[str, StoppedNode]:
        """Return the results by node. Calls in progress are cut off."""
        for node, end in self._ends.items():
            if not end.done():
                self._registry.drivers[node].hang_up()
        self._pool.shutdown(wait=False, cancel_futures=True)
        silent = StoppedNode(0, "it does not answer")
        ended = {node: end.result() if end.done() else silent for node, end in self._ends.items()}
        return {**self._never_started, **ended}

    def _end(self, driver: NodeDriver, is_up: bool) -> StoppedNode:
        """Stop the workers of a node, kill those that do not stop, and fetch what they left. In a thread."""
        ran = 0
        try:
            if not is_up:
                driver.connect_to_stop(self._pace.limit_s / 2)
            driver.workers.settle(self._pace.stop_s)
            ran = len(driver.workers.alive())
            self._stop(driver, kill=False, patience_s=self._pace.stop_s)
            alive = len(driver.workers.alive())
            if alive:
                ran = max(ran, alive)
                self._stop(driver, kill=True, patience_s=self._pace.kill_s)
            with contextlib.suppress(NodeError, OSError):  # reproductions that are not fetched stay on the node
                driver.fetch_reproductions()
            driver.keep_results()
            if self._tidy:
                driver.tidy()
        except NodeError as e:
            return StoppedNode(ran, str(e))
        return StoppedNode(ran)

    def _stop(self, driver: NodeDriver, *, kill: bool, patience_s: float) -> None:
        """Stop the workers and wait until none is alive. Dead ones are stopped too: a kept container must not come
        back."""
        driver.workers.stop(kill=kill)
        until = time.monotonic() + patience_s
        while driver.workers.alive() and time.monotonic() < until:
            time.sleep(min(POLL_S, patience_s / 20))
