"""Keeps track of a run's nodes (up, in trouble or given up), and shuts all their workers down at once.

The shutdown also reaches nodes that were given up or were still being prepared.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from orchestrator.controller.messages import StopLimits, Timeouts
from orchestrator.controller.node import NodeDriver
from orchestrator.errors import NodeError


class NodeRegistry:
    """The drivers of a run's nodes with their states. The controller's loop owns it."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self.drivers: dict[str, NodeDriver] = {}
        self.sessions: dict[str, int] = {}
        """Node -> the session that writes to it must name. A node that was never up has none."""
        self.up: set[str] = set()
        self.lost: set[str] = set()
        self._trouble: dict[str, tuple[float, str]] = {}
        """Node -> (since when, what)."""
        self._reported: set[str] = set()
        """Nodes that have reported trouble."""
        self._waiting: dict[str, str] = {}
        """Occupied nodes, and who uses them. No timeout runs while they wait."""

    def start(self, driver: NodeDriver) -> None:
        """Start a node's driver; the node is expected from now on."""
        self.drivers[driver.node] = driver
        self._trouble[driver.node] = (time.time(), "not up yet")
        driver.start()

    def remove(self, node: str) -> None:
        """Forget a node that will not return. Its driver ends by itself."""
        driver = self.drivers.pop(node, None)
        for states in (self.up, self.lost, self._reported):
            states.discard(node)
        for of in (self.sessions, self._trouble, self._waiting):
            of.pop(node, None)
        if driver is not None:
            threading.Thread(target=driver.close, args=(time.monotonic() + self.timeouts.close,), daemon=True).start()

    def arrived(self, node: str, session: int) -> None:
        """Record that the node was prepared and its stream began."""
        self.sessions[node] = session
        self.up.add(node)
        self.lost.discard(node)
        self._trouble.pop(node, None)
        self._reported.discard(node)
        self._waiting.pop(node, None)

    def node_occupied(self, node: str, doing: str, detail: str) -> bool:
        """Record that the node is occupied, and that we wait for it, skip it or share it. Return whether its work is
        lost: we skip it, or it worked before and none of its workers is left.
        """
        again = self._waiting.pop(node, None) is not None
        gone = node not in self.lost and (doing == "skip" or (doing == "wait" and node in self.sessions and not again))
        self._trouble[node] = (time.time(), f"occupied: {detail}" if doing != "free" else "not up yet")
        if doing == "wait":
            self._waiting[node] = detail
            self.lost.discard(node)
        elif doing == "skip":
            self.lost.add(node)
        return gone

    def in_trouble(self, node: str, detail: str) -> bool:
        """Record trouble. Its timeout counts from the first report. Return whether this is the first."""
        waited = self._waiting.pop(node, None) is not None
        first = node not in self._reported
        since = time.time() if first or waited else self._trouble[node][0]
        self.up.discard(node)
        self._trouble[node] = (since, detail)
        self._reported.add(node)
        return first

    def goes_on(self, node: str, detail: str) -> None:
        """Record progress of its preparation. Its timeout starts again."""
        if node not in self.up:
            self._trouble[node] = (time.time(), detail)

    def give_up(self) -> Iterator[tuple[str, str]]:
        """(node, why) for each node whose timeout has run out, once."""
        now = time.time()
        for node, (since, detail) in self._trouble.items():
            if node in self.sessions:
                limit_s = self.timeouts.lost
            else:
                limit_s = self.timeouts.never_up if node in self._reported else self.timeouts.starting
            if node not in self.lost and node not in self._waiting and now - since > limit_s:
                self.lost.add(node)
                yield node, detail

    @property
    def coming(self) -> set[str]:
        """Nodes neither up nor given up."""
        return self.drivers.keys() - self.up - self.lost

    @property
    def troubled(self) -> set[str]:
        """Nodes not up that have reported trouble."""
        return self._reported - self.up

    def why(self, node: str) -> str:
        """The node's trouble, "" for none."""
        return self._trouble.get(node, (0.0, ""))[1]

    @property
    def hopeless(self) -> bool:
        """Return whether every node was given up."""
        return bool(self.drivers) and self.lost >= self.drivers.keys()

    def details(self) -> list[str]:
        """The trouble of the nodes, one line each."""
        return [f"  {node}: {detail.removeprefix(f'{node}: ')}" for node, (_, detail) in self._trouble.items()]

    def reached(self) -> list[NodeDriver]:
        """The drivers of the nodes that are up, by name."""
        return [self.drivers[n] for n in sorted(self.up)]

    def workers_left(self) -> bool:
        """Return whether a worker may run on a node that is up."""
        try:
            return any(d.workers.alive() for d in self.reached())
        except NodeError:
            return True

    def close(self) -> None:
        """End all threads; the workers go on. All nodes together have `Timeouts.close` to finish their calls."""
        for driver in self.drivers.values():
            driver.leave()
        until = time.monotonic() + self.timeouts.close
        for driver in self.drivers.values():
            driver.close(until)


POLL_S = 0.1
MAX_PARALLEL = 32


@dataclass(frozen=True, slots=True)
class StoppedNode:
    """The result for one node. `ran`: how many running workers were stopped; None: none was ever started there. `left`:
    why some may still run, "" if none does."""

    ran: int | None
    left: str = ""


class Shutdown:
    """Shuts nodes down, one by one or all at once. `tidy`: also clean up in the engines."""

    def __init__(self, registry: NodeRegistry, pace: StopLimits, *, tidy: bool) -> None:
        self._registry, self._pace, self._tidy = registry, pace, tidy
        self._pool = ThreadPoolExecutor(MAX_PARALLEL, "shutdown")
        self._ends: dict[str, Future[StoppedNode]] = {}
        self._seen: dict[str, StoppedNode] = {}

    def begin(self, drivers: Iterable[NodeDriver]) -> None:
        """Begin to stop these nodes, each once. If a node is not up but may have workers, connect to it again."""
        for d in drivers:
            if d.node in self._ends or d.node in self._seen:
                continue
            started, is_up = d.workers.start_no_more(), d.node in self._registry.up
            if is_up or started:
                self._ends[d.node] = self._pool.submit(self._end, d, is_up)
            else:
                self._seen[d.node] = StoppedNode(None)

    def done(self) -> bool:
        return all(e.done() for e in self._ends.values())

    def close(self) -> dict[str, StoppedNode]:
        """Return the results by node. Calls in progress are cut off."""
        for node, end in self._ends.items():
            if not end.done():
                self._registry.drivers[node].hang_up()
        self._pool.shutdown(wait=False, cancel_futures=True)
        silent = StoppedNode(0, "it does not answer")
        return {**self._seen, **{n: e.result() if e.done() else silent for n, e in self._ends.items()}}

    def _end(self, driver: NodeDriver, is_up: bool) -> StoppedNode:
        ran = 0
        try:
            if not is_up:
                driver.call_again(self._pace.limit_s / 2)
            driver.workers.settle(self._pace.stop_s)
            for kill, patience in ((False, self._pace.stop_s), (True, self._pace.kill_s)):
                alive = len(driver.workers.alive())
                ran = max(ran, alive)
                if not alive:
                    break
                driver.workers.stop(kill=kill)
                until = time.monotonic() + patience
                while driver.workers.alive() and time.monotonic() < until:
                    time.sleep(min(POLL_S, patience / 20))
            with contextlib.suppress(NodeError, OSError):  # they stay on the node then
                driver.bring_home()
            driver.keep_results()
            if self._tidy:
                driver.tidy()
        except NodeError as e:
            return StoppedNode(ran, str(e))
        return StoppedNode(ran)
