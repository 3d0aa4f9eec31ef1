"""Registry of a run's nodes: which are up, which are in trouble since when, which were given up."""

from __future__ import annotations

import time
from collections.abc import Iterator

from orchestrator.dispatch.node import NodeDriver
from orchestrator.dispatch.settings import Timeouts
from orchestrator.errors import NodeError

CLOSE_S = 1.0


class NodeRegistry:
    """Drivers of a run's nodes with their states; owned by the controller's loop."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self.drivers: dict[str, NodeDriver] = {}
        self.sessions: dict[str, int] = {}
        """The session that writes to a node must name; a node that never was up has none."""
        self.up: set[str] = set()
        self.lost: set[str] = set()
        self._trouble: dict[str, tuple[float, str]] = {}
        """Node -> (since when, what)."""
        self._told: set[str] = set()
        """Nodes whose trouble was reported."""
        self._waiting: dict[str, str] = {}
        """Occupied nodes, and by whom; no timeout runs while they wait."""

    def start(self, driver: NodeDriver) -> None:
        """Start a node's driver; the node is expected from now on."""
        self.drivers[driver.node] = driver
        self._trouble[driver.node] = (time.time(), "not up yet")
        driver.start()

    def arrived(self, node: str, session: int) -> None:
        """Record that the node was prepared and its stream began."""
        self.sessions[node] = session
        self.up.add(node)
        self.lost.discard(node)
        self._trouble.pop(node, None)
        self._told.discard(node)
        self._waiting.pop(node, None)

    def node_occupied(self, node: str, doing: str, detail: str) -> bool:
        """Record that the node is occupied: it is waited for, left out, or shared. Return whether its work is lost: it
        is left out, or had worked before and none of its workers is left.
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
        """Record trouble; its timeout runs from the first report. Return whether this is the first."""
        waited = self._waiting.pop(node, None) is not None
        first = node not in self._told
        since = time.time() if first or waited else self._trouble[node][0]
        self.up.discard(node)
        self._trouble[node] = (since, detail)
        self._told.add(node)
        return first

    def goes_on(self, node: str, detail: str) -> None:
        """Record progress of its preparation: its timeout begins anew."""
        if node not in self.up:
            self._trouble[node] = (time.time(), detail)

    def give_up(self) -> Iterator[tuple[str, str]]:
        """(node, why) of those whose timeout has run out by now, each once."""
        now = time.time()
        for node, (since, detail) in self._trouble.items():
            if node in self.sessions:
                limit_s = self._timeouts.lost
            else:
                limit_s = self._timeouts.never_up if node in self._told else self._timeouts.starting
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
        return self._told - self.up

    def why(self, node: str) -> str:
        """Its trouble, "" for none."""
        return self._trouble.get(node, (0.0, ""))[1]

    @property
    def hopeless(self) -> bool:
        """Whether every node was given up."""
        return bool(self.drivers) and self.lost >= self.drivers.keys()

    def details(self) -> list[str]:
        """Trouble of each node, a line each."""
        return [f"  {node}: {detail}" for node, (_, detail) in self._trouble.items()]

    def reached(self) -> list[NodeDriver]:
        """The drivers of the nodes that are up, by name."""
        return [self.drivers[n] for n in sorted(self.up)]

    def workers_left(self) -> bool:
        """Whether a worker runs on a node that is up (or that is unknown)."""
        try:
            return any(d.alive() for d in self.reached())
        except NodeError:
            return True

    def check_pulses(self) -> None:
        """Break streams that have been silent for too long."""
        for driver in self.drivers.values():
            driver.check_pulse()

    def close(self) -> None:
        """End all threads; the workers go on. What a node is busy with may take CLOSE_S, of all nodes together."""
        for driver in self.drivers.values():
            driver.leave()
        until = time.monotonic() + CLOSE_S
        for driver in self.drivers.values():
            driver.close(until)
