"""Ends the workers of nodes, and fetches the reproductions of faults and the results that lie there. It also reaches
nodes that were given up or never came up.

Call `begin` for each node, then `is_done` until it is true or the time is up, and `close` for the results. Each node is
ended in a thread of its own (`_end`).
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from orchestrator.controller.node_driver import NodeDriver
from orchestrator.controller.timeouts import StopLimits
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
    """Shuts nodes down, one by one or all at once."""

    def __init__(self, pace: StopLimits, *, tidy: bool) -> None:
        """`tidy`: also clean up in the engines."""
        self._pace = pace
        self._tidy = tidy
        self._threads = ThreadPoolExecutor(MAX_PARALLEL, "shutdown")
        self._never_started: list[NodeDriver] = []
        self._ends: dict[NodeDriver, Future[StoppedNode]] = {}

    def begin(self, driver: NodeDriver, *, is_up: bool) -> None:
        """Begin to stop a node, once. If it is not up but may have workers, connect to it again."""
        if driver in self._ends or driver in self._never_started:
            return
        may_have_workers = driver.workers.start_no_more()
        if is_up or may_have_workers:
            self._ends[driver] = self._threads.submit(self._end, driver, is_up)
        else:
            self._never_started.append(driver)

    def is_done(self) -> bool:
        return all(end.done() for end in self._ends.values())

    def close(self) -> dict[str, StoppedNode]:
        """Return the results by node. Calls in progress are cut off."""
        for driver, end in self._ends.items():
            if not end.done():
                driver.hang_up()
        self._threads.shutdown(wait=False, cancel_futures=True)
        results = {driver.node: StoppedNode(None) for driver in self._never_started}
        for driver, end in self._ends.items():
            results[driver.node] = end.result() if end.done() else StoppedNode(0, "it does not answer")
        return results

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
