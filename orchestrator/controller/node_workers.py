"""Starts, revives and stops the workers of a node folder, by the node's engine.

The node's two threads (node_driver.py) start workers; the controller's thread stops them (shutdown.py).
`start_no_more` is the gate between them: after it no start begins, and `settle` waits for one that is in progress.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.controller.messages import Beat
from orchestrator.engines import Engine
from orchestrator.errors import TransportError

RELAUNCHES = 3
"""A dead worker is launched again this many times without a sign of life (in addition to launch.sh's restarts)."""


class NodeWorkers:
    """The workers of one node folder."""

    def __init__(
        self, engine: Engine, slots: Sequence[str], env: Mapping[str, str], *, launch: bool, may_have_started: bool
    ) -> None:
        """`launch`: False takes over the running workers and starts none. `may_have_started`: an earlier controller of
        the run may have started some."""
        self.engine = engine
        self._slots = slots
        self._env = env
        self.launch = launch
        """Permission to start workers; `start_no_more` withdraws it."""
        self.may_have_started = may_have_started or not launch
        """Our workers may be there, started by this controller or an earlier one."""
        self.fresh = not self.may_have_started
        """No earlier controller is known to have started any."""
        self.cut_off = False
        """The last start was interrupted; the node may still complete it."""
        self._gate = threading.Lock()
        """`start_no_more` holds it, and so does a start that is about to begin."""
        self._settled = threading.Event()
        """Set while no start is in progress."""
        self._settled.set()
        self._revived: dict[str, int] = {}
        """Slot whose worker was dead in the last beat -> how often it was launched again since it was alive last."""

    def start(self, slots: Sequence[str] = ()) -> None:
        """Start workers (all by default), unless `start_no_more` was called. Raise NodeError."""
        with self._gate:
            if not self.launch:
                return
            self.may_have_started = True
            self._settled.clear()
        try:
            self.engine.start(slots, env=self._env)
            self.cut_off = False
        except TransportError:
            self.cut_off = True
            raise
        finally:
            self._settled.set()

    def start_no_more(self) -> bool:
        """Start no more workers. Return whether some may have been started, perhaps by an unfinished preparation."""
        with self._gate:
            self.launch = False
            return self.may_have_started

    def settle(self, seconds: float) -> None:
        """Wait up to `seconds` for a start in progress to end."""
        self._settled.wait(seconds)

    def stop(self, *, kill: bool = False) -> None:
        """Stop them now, and start no more. Raise NodeError."""
        self.start_no_more()
        self.engine.stop(kill=kill)

    def alive(self) -> list[str]:
        """Slots whose worker runs now, according to the engine. Raise NodeError."""
        return [w.slot for w in self.engine.list() if w.state == "running"]

    def dead(self, beat: Beat) -> Iterator[str]:
        """Yield the slots whose worker was already dead in the previous beat: `revive` them."""
        for slot in self._slots:
            if beat.slots.get(slot, {}).get("alive", False):
                self._revived.pop(slot, None)
            elif slot not in self._revived:
                self._revived[slot] = 0  # seen dead once: launch.sh may be about to restart it
            else:
                yield slot

    def revive(self, slot: str) -> str:
        """Launch a dead worker again. If it is given up, return the reason, else "". Raise NodeError."""
        launches = self._revived.get(slot)
        if launches is None:
            return ""
        state = next((w for w in self.engine.list() if w.slot == slot), None)
        if state is None or state.state == "running" or state.code == 0:
            return ""
        launches += 1
        self._revived[slot] = launches  # the reader may have removed the slot meanwhile
        if launches > RELAUNCHES:
            last = launches == RELAUNCHES + 1
            return f"the worker keeps exiting with code {state.code}" if last else ""
        self.start([slot])
        return ""
