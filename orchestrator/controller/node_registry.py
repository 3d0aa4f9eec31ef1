"""The nodes of a run as its loop sees them: which are up, in trouble, occupied by others, or given up.

The neighbours: node_reports.py makes events of what nodes report, outbox.py makes files on nodes of decisions, and
shutdown.py ends the workers of a node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from orchestrator.controller.node_driver import NodeDriver
from orchestrator.controller.shutdown import Shutdown
from orchestrator.controller.timeouts import Timeouts
from orchestrator.errors import NodeError


class NodePhase(Enum):
    """The phase of a node.

    start --> COMING --its stream began--> UP --trouble--> COMING
    COMING --others occupy it, and we wait--> OCCUPIED --trouble, or it is free--> COMING
    COMING, OCCUPIED --its stream began--> UP
    COMING --its timeout ran out--> LOST        (OCCUPIED has no timeout)
    any --others occupy it, and we skip it--> LOST
    LOST --its stream began--> UP               (a lost node is still tried)
    LOST --others occupy it, and we wait--> OCCUPIED
    UP --others occupy it too, and we share it--> UP
    any --an error of our own ended its driver--> FAILED
    """

    COMING = auto()
    UP = auto()
    OCCUPIED = auto()
    LOST = auto()
    FAILED = auto()


GIVEN_UP = (NodePhase.LOST, NodePhase.FAILED)


@dataclass(slots=True, eq=False)
class RegisteredNode:
    """A node with its driver and its phase."""

    driver: NodeDriver
    since: float
    """Start of its timeout, in epoch seconds: the first report of its trouble, or the last progress."""
    trouble: str | None = "not up yet"
    """Its trouble in words. None if it has none; then it has no timeout either."""
    phase: NodePhase = NodePhase.COMING
    session: int | None = None
    """The session that writes to it must name. A node that was never up has none."""
    is_reached: bool = False
    """Its stream is open. A node that is skipped while it is up is lost, and still reached."""
    has_reported: bool = False
    """It has reported trouble since it was up last."""


class NodeRegistry:
    """The nodes of a run with their drivers. The controller's loop owns it."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self._nodes: dict[str, RegisteredNode] = {}

    @property
    def drivers(self) -> dict[str, NodeDriver]:
        """The drivers by the names of their nodes, in the order in which they were started."""
        return {name: node.driver for name, node in self._nodes.items()}

    def has(self, name: str) -> bool:
        return name in self._nodes

    def start(self, driver: NodeDriver) -> None:
        """Start a node's driver; the node is expected from now on."""
        self._nodes[driver.node] = RegisteredNode(driver, time.time())
        driver.start()

    def remove(self, name: str) -> None:
        """Forget a node that will not return. Its driver ends by itself."""
        node = self._nodes.pop(name, None)
        if node is not None:
            until = time.monotonic() + self.timeouts.close
            threading.Thread(target=node.driver.close, args=(until,), daemon=True).start()

    def begin_shutdown(self, name: str) -> Shutdown:
        """Begin to end the workers of one node while the run goes on, because its lease is given back."""
        shutdown = Shutdown(self.timeouts.stop, tidy=True)
        shutdown.begin(self._nodes[name].driver, is_up=self.session_of(name) is not None)
        return shutdown

    def record_up(self, name: str, session: int) -> None:
        """Record that the node was prepared and its stream began."""
        node = self._nodes[name]
        node.phase = NodePhase.UP
        node.session = session
        node.is_reached = True
        node.has_reported = False
        node.trouble = None

    def record_occupied(self, name: str, doing: str, detail: str) -> bool:
        """Record what we do about a node that others occupy (`doing`, `detail`: see NodeBusy). Return whether its work
        is lost: we skip it, or it worked before and none of its workers is left.

        Sharing a node that is up does not stop it: it works on, and its timeout does not start.
        """
        node = self._nodes.get(name)
        if node is None or (doing == "share" and node.phase is NodePhase.UP):
            return False
        was_lost = node.phase is NodePhase.LOST
        was_waiting = node.phase is NodePhase.OCCUPIED
        node.since = time.time()
        node.trouble = "not up yet" if doing == "free" else f"occupied: {detail}"
        if doing == "wait":
            node.phase = NodePhase.OCCUPIED
            return not was_lost and not was_waiting and node.session is not None
        if doing == "skip":
            node.phase = NodePhase.LOST
            return not was_lost
        if was_waiting:
            node.phase = NodePhase.COMING
        return False

    def record_trouble(self, name: str, detail: str) -> bool:
        """Record trouble. Its timeout counts from the first report. Return whether this is the first."""
        node = self._nodes[name]
        is_first = not node.has_reported
        if is_first or node.phase is NodePhase.OCCUPIED:
            node.since = time.time()
        if node.phase is not NodePhase.LOST:
            node.phase = NodePhase.COMING
        node.is_reached = False
        node.has_reported = True
        node.trouble = detail
        return is_first

    def record_failed(self, name: str, detail: str) -> bool:
        """Record that an error of our own ended the node's driver. Return whether the node's work is lost by that."""
        node = self._nodes[name]
        was_given_up = node.phase in GIVEN_UP
        node.phase = NodePhase.FAILED
        node.is_reached = False
        node.trouble = detail
        return not was_given_up

    def has_failed(self, name: str) -> bool:
        """Return whether an error of our own ended the node's driver."""
        node = self._nodes.get(name)
        return node is not None and node.phase is NodePhase.FAILED

    def record_progress(self, name: str, detail: str) -> None:
        """Record progress of its preparation. Its timeout starts again."""
        node = self._nodes.get(name)
        if node is not None and not node.is_reached:
            node.since = time.time()
            node.trouble = detail

    def give_up(self) -> Iterator[tuple[str, str]]:
        """(node, why) for each node whose timeout has run out, once."""
        now = time.time()
        for name, node in self._nodes.items():
            if node.trouble is None or node.phase is NodePhase.OCCUPIED or node.phase in GIVEN_UP:
                continue
            if now - node.since > self._patience_s(node):
                node.phase = NodePhase.LOST
                yield name, node.trouble

    def _patience_s(self, node: RegisteredNode) -> float:
        if node.session is not None:
            return self.timeouts.lost
        return self.timeouts.never_up if node.has_reported else self.timeouts.starting

    @property
    def reached(self) -> set[str]:
        """Nodes whose stream is open."""
        return {name for name, node in self._nodes.items() if node.is_reached}

    @property
    def coming(self) -> set[str]:
        """Nodes that are neither up nor given up."""
        phases = (NodePhase.COMING, NodePhase.OCCUPIED)
        return {name for name, node in self._nodes.items() if node.phase in phases and not node.is_reached}

    @property
    def troubled(self) -> set[str]:
        """Nodes not reached that have reported trouble."""
        return {name for name, node in self._nodes.items() if node.has_reported and not node.is_reached}

    @property
    def is_hopeless(self) -> bool:
        """Return whether every node was given up."""
        return bool(self._nodes) and all(node.phase in GIVEN_UP for node in self._nodes.values())

    def session_of(self, name: str) -> int | None:
        """The session that writes to the node must name, None if it is not reached."""
        node = self._nodes.get(name)
        return node.session if node is not None and node.is_reached else None

    def was_up(self, name: str) -> bool:
        """Return whether the node was ever up."""
        node = self._nodes.get(name)
        return node is not None and node.session is not None

    def trouble_of(self, name: str) -> str:
        """The node's trouble, "" for none."""
        node = self._nodes.get(name)
        return (node.trouble or "") if node is not None else ""

    def details(self) -> list[str]:
        """The trouble of the nodes, one line each."""
        troubles = {name: node.trouble for name, node in self._nodes.items() if node.trouble is not None}
        return [f"  {name}: {trouble.removeprefix(f'{name}: ')}" for name, trouble in troubles.items()]

    def reached_drivers(self) -> list[NodeDriver]:
        """The drivers of the nodes that are reached, by name."""
        return [self._nodes[name].driver for name in sorted(self.reached)]

    def has_workers(self) -> bool:
        """Return whether a worker may run on a node that is reached."""
        try:
            return any(driver.workers.alive() for driver in self.reached_drivers())
        except NodeError:
            return True

    def close(self) -> None:
        """End all threads; the workers go on. All nodes together have `Timeouts.close` to finish their calls."""
        drivers = self.drivers.values()
        for driver in drivers:
            driver.leave()
        until = time.monotonic() + self.timeouts.close
        for driver in drivers:
            driver.close(until)
