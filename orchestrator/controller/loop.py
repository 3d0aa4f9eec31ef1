"""The loop that drives a run: it takes messages, updates ledger and policy, and carries out decisions.

Order matters: reports, their events and the decisions that follow are committed in one transaction, and only then is
anything sent. If we are killed at any moment, the next controller replays the journal, and looks at the nodes to find
decisions that were never sent (see NodeUp).
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from orchestrator.controller.leases import LeasedNodes, LeaseTurn
from orchestrator.controller.messages import FromStream, Message, StopLimits, Taken, Timeouts, Watcher
from orchestrator.controller.node import NodeDriver
from orchestrator.controller.nodes import NodeRegistry, NodeReports, Outbox, Shutdown, StoppedNode
from orchestrator.errors import NoUsableNodeError, OrchestratorError, TakenOverError
from orchestrator.events import (
    Decision,
    Event,
    LeaseEnded,
    NodeDraining,
    NodeExpected,
    NodeLost,
    Resumed,
    RetryAsked,
    StopAsked,
    Tick,
)
from orchestrator.ledger.ingest import Chunk, Ingest
from orchestrator.ledger.writer import Ledger
from orchestrator.paths import RunConfig, take_requests
from orchestrator.policy import Policy
from orchestrator.view.live import LiveStatus
from worker.protocol import TableKernel
from worker.text import plural

TURN_S = 0.03
"""After this many CPU seconds a turn takes no further message, because decisions wait for the end of their turn. It is
not wall time: on a busy machine that would only mean more turns, each with its own commit."""
VIEW_SHARE = 20.0
"""The view gets at most one in this many seconds of the loop's time."""


class Controller:
    """Drives one run to its end, or to an interruption. `run()` returns the run's state."""

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        ingest: Ingest,
        live_status: LiveStatus,
        config: RunConfig,
        keys: Callable[[int], dict[str, int | str]],
        kernels: Mapping[int, Sequence[TableKernel]],
        logs: Path,
        requests_folder: Path,
        watcher: Watcher,
        mask: Callable[[str], str],
        epoch: int,
        timeouts: Timeouts,
        interrupts: Sequence[int],
        cancel: bool,
        known: Collection[str],
        newcomers: Callable[[Collection[str]], list[NodeDriver]],
        leases: LeasedNodes,
        limit: Callable[[], str],
    ) -> None:
        """`kernels`: shape id -> the only kernels to measure for it. `mask`: puts references (`${env:NAME}`) in
        place of their values, because the watcher's output may be kept. `interrupts`: one entry for each Ctrl-C so far.
        `known`: nodes that an earlier controller of this run had. `limit`: why to start no more work, "" if there is no
        reason."""
        self._limit = limit
        self.limited = ""
        """The limit that stopped new work, "" if none did."""
        self._ledger, self._policy, self._live_status = ledger, policy, live_status
        self._requests = requests_folder
        self._watcher, self._mask, self._epoch = watcher, mask, epoch
        self._timeouts, self._interrupts = timeouts, interrupts
        self._left_over: list[Message] = []
        """Messages that the last turn had no time for."""
        self._queue: queue.Queue[Message | None] = queue.Queue(maxsize=512)
        self._closing = threading.Event()
        self._registry = NodeRegistry(self._timeouts)
        self._reports = NodeReports(
            config.run, epoch, ledger, policy, self._registry, ingest, live_status, leases.look, logs
        )
        self._outbox = Outbox(self._registry, config, keys, kernels, epoch, ledger.blocklist_verdicts)
        self._first: list[NodeDriver] = []
        self._stop_since: float | None = None
        self._newcomers, self._leases = newcomers, leases
        self._known = set(known)
        self._cancelled = cancel
        self._cancel_when_up = cancel
        self._shutdown: Shutdown | None = None
        self._next_view = 0.0

    def post(self, message: Message) -> None:
        """Queue a message of a driver's thread. Blocks while the loop is behind."""
        while not self._closing.is_set():
            try:
                self._queue.put(message, timeout=0.5)
            except queue.Full:
                continue
            return

    def wake(self) -> None:
        """Begin the next turn at once."""
        with contextlib.suppress(queue.Full):  # a full queue starts a turn anyway
            self._queue.put_nowait(None)

    def _note(self, text: str, *, bad: bool = False) -> None:
        self._watcher.note(self._mask(text), bad=bad)

    def add(self, driver: NodeDriver) -> None:
        """Add a node before `run`."""
        self._first.append(driver)

    def run(self, also: Iterable[Event] = ()) -> str:
        """Drive the run; return finished, interrupted or cancelled. Raise NoUsableNodeError, TakenOverError."""
        left = [
            NodeLost(n, "it is no longer in the inventory") for n in sorted(self._known - {d.node for d in self._first})
        ]
        expected = [NodeExpected(d.node, d.slots) for d in self._first]
        self._transact([], first=[Resumed(self._epoch), *left, *expected, *also])
        if self._policy.done and not self._known:
            self._sum_up({d.node: StoppedNode(None) for d in self._first})
            return "finished"  # all shapes were tuned before, and no node has files of this run
        for driver in self._first:
            self._registry.start(driver)
        self._leases.start()
        release = True
        try:
            state = self._loop()
            release = state != "interrupted" or not self._policy.outstanding()
            return state
        except TakenOverError:
            release = False
            raise
        finally:
            self._closing.set()
            self._registry.close()
            for text in self._leases.close(release=release):
                self._note(text, bad=True)

    def _loop(self) -> str:
        while True:
            messages = self._messages()
            given_up = [NodeLost(node, why) for node, why in self._registry.give_up()]
            leased = self._leases.turn(self._policy, self._registry, time.time())
            self._follow_leases(leased)
            # read the rows that a lease left before its end is recorded
            left = self._reports.unread(leased.rows)
            last = [*self._requested(), *given_up, *leased.events, Tick()]
            self._transact([*messages, *left], last=last, whole=bool(left))
            self._show()
            for driver in self._registry.drivers.values():
                driver.check_pulse()
            if self._policy.done:
                self._shut_down()
                return "finished"
            ended = self._stopped()
            if ended:
                return ended
            self._give_up_where_hopeless()

    def _follow_leases(self, turn: LeaseTurn) -> None:
        """Start the nodes that became ready, and drop those whose lease is over."""
        for text, bad in turn.notes:
            self._note(text, bad=bad)
        for event in turn.events:
            if isinstance(event, LeaseEnded):
                self._registry.remove(event.node)
        for driver in turn.start:
            self._registry.start(driver)

    def _messages(self) -> list[Message]:
        out: list[Message | None] = [*self._left_over]
        try:
            out.append(self._queue.get(timeout=0.0 if out else self._timeouts.tick))
            while len(out) < 512:
                out.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        self._left_over = []
        return [m for m in out if m is not None]

    def _transact(
        self,
        messages: Sequence[Message],
        first: Iterable[Event] = (),
        last: Iterable[Event] = (),
        *,
        whole: bool = False,
    ) -> None:
        """Record one turn in one transaction, then carry out the decisions. After TURN_S the remaining messages wait
        for the next turn, unless the turn is to be `whole`."""
        decisions: list[Decision] = []
        until = math.inf if whole else time.thread_time() + TURN_S
        with self._ledger.transaction():
            for event in first:
                decisions += self._handle(event)
            for n, message in enumerate(messages):
                if n and time.thread_time() > until:
                    self._left_over = list(messages[n:])
                    break
                for event in self._reports.events_of(message):
                    decisions += self._handle(event)
            for event in last:
                decisions += self._handle(event)
        for decision in decisions:
            self._outbox.carry_out(decision)

    def _handle(self, event: Event) -> list[Decision]:
        now = time.time()
        if not isinstance(event, Tick):
            self._ledger.journal(event, now)
            self._live_status.feed(now, event)
        decisions = self._policy.handle(event, now)
        for decision in decisions:
            self._ledger.journal(decision, now)
            self._live_status.feed(now, decision)
        return decisions

    def _let_join(self) -> list[Event]:
        """Start the nodes that were added to the run's inventory."""
        try:
            drivers = self._newcomers(self._registry.drivers.keys())
        except OrchestratorError as e:
            self._note(f"no node could join: {e}", bad=True)
            return []
        for driver in drivers:
            self._note(f"{driver.node} joins")
            self._registry.start(driver)
        return [NodeExpected(d.node, d.slots) for d in drivers]

    def _requested(self) -> list[Event]:
        events: list[Event] = []
        for request in take_requests(self._requests):
            if request["kind"] == "cancel":
                self._cancelled = True
                self._note("cancelled by request: stopping the workers")
            elif request["kind"] == "drain":
                if request.get("node") in self._registry.drivers:
                    self._note(f"{request['node']} drains by request")
                    events.append(NodeDraining(request["node"]))
            elif request["kind"] == "join":
                events += self._let_join()
            else:
                shapes = tuple(int(s) for s in request.get("shapes", ()))
                self._note(f"{plural(len(shapes), 'shape')} queued again by request")
                events.append(RetryAsked(shapes))
        if not self.limited and self._stop_since is None and (why := self._limit()):
            self.limited = why
            self._note(f"{why}: no new work; running attempts may finish")
            events.append(StopAsked(why))
        if (self._cancelled or self._interrupts) and self._stop_since is None:
            self._stop_since = time.monotonic()
            events.append(StopAsked())
            if not self._cancelled:
                self._note(
                    f"interrupted: no new work; running attempts have {self._timeouts.grace:g} s to finish "
                    "(Ctrl-C again stops it now)"
                )
        return events

    def _stopped(self) -> str | None:
        """After a requested stop or a reached limit: the state to end with, once it is time to end; else None."""
        if self._stop_since is None:
            if not self.limited or self._policy.outstanding():
                return None
            self._shut_down()
            return "finished"
        waited = time.monotonic() - self._stop_since
        if self._cancel_when_up:
            return self._cancel_as_they_come(waited)
        if self._cancelled or len(self._interrupts) > 1:
            self._stop_workers()
            return "cancelled" if self._cancelled else "interrupted"
        if not self._policy.outstanding():
            self._shut_down()
            return "interrupted"
        if waited > self._timeouts.grace:
            left = [f"{a.id} on {a.node}" for a in self._policy.outstanding()]
            self._outbox.drain()
            self._note(f"the workers finish these by themselves, and then exit: {', '.join(left[:8])}")
            self._undo_preparations()
            return "interrupted"
        return None

    def _shut_down(self) -> None:
        """After the last shape was settled, let the workers finish and read their records to the end. Do not wait for
        workers that still measure shapes which were settled elsewhere."""
        self._outbox.drain()

        def over() -> bool:
            left = self._policy.outstanding()
            only_copies = bool(left) and all(len(a.landed) < len(a.shapes) for a in left)
            return only_copies or not self._registry.workers_left()

        self._listen(self._timeouts.shutdown, over)
        self._stop_workers()

    def _stop_workers(self) -> None:
        # if something failed, dead containers stay as evidence until the run is pruned
        tidy = self._cancelled or (self._policy.done and not self._policy.state.failed)
        pace = self._timeouts.cancel if self._cancelled else self._timeouts.stop
        self._stop(self._registry.drivers.values(), pace, tidy=tidy)

    def _stop(self, drivers: Iterable[NodeDriver], pace: StopLimits, *, tidy: bool) -> None:
        """Stop the workers of these nodes, and read their last messages."""
        shutdown = Shutdown(self._registry, pace, tidy=tidy)
        shutdown.begin(drivers)
        self._listen(pace.limit_s, shutdown.done)
        self._sum_up(shutdown.close())

    def _cancel_as_they_come(self, waited: float) -> str | None:
        """Cancel a run that has no controller. Stop each node once its records are read; do not wait long for any."""
        soon = self._timeouts.cancel
        if self._shutdown is None:
            self._shutdown = Shutdown(self._registry, soon, tidy=True)
        patient = waited < soon.limit_s / 2
        self._shutdown.begin(d for d in self._registry.reached() if d.node in self._reports.read_out or not patient)
        awaited = (self._registry.coming - self._registry.troubled) | (
            self._registry.up - self._reports.read_out if patient else set()
        )
        if waited < soon.limit_s and (awaited or self._leases.coming or not self._shutdown.done()):
            return None
        self._listen(soon.kill_s, lambda: True)
        away = self._registry.drivers.keys() - self._registry.up
        self._sum_up({**{n: StoppedNode(0, self._registry.why(n)) for n in away}, **self._shutdown.close()})
        return "cancelled"

    def _undo_preparations(self) -> None:
        """Stop workers that may be starting on nodes that were never up."""
        busy = {a.node for a in self._policy.outstanding()}
        fresh = [
            d
            for n, d in self._registry.drivers.items()
            if d.workers.fresh and n not in busy and n not in self._registry.sessions
        ]
        self._stop(fresh, self._timeouts.stop, tidy=True)

    def _sum_up(self, seen: Mapping[str, StoppedNode]) -> None:
        """Report where workers may be left, and store the result for `cancel`."""
        with self._ledger.transaction():
            self._ledger.set_meta("farewell", {"epoch": self._epoch, "nodes": {n: asdict(s) for n, s in seen.items()}})
        for node, found in seen.items():
            if found.left:
                text = f"workers may be left behind on {node} ({found.left}); they exit when they are idle"
                self._note(text, bad=True)

    def _listen(self, seconds: float, over: Callable[[], bool]) -> None:
        """Read messages until `over` holds and no more come, or the time is up."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ended = over()
            messages = self._messages()
            self._transact([m for m in messages if isinstance(m, FromStream | Taken)])
            if ended and not any(isinstance(m, FromStream) and isinstance(m.frame, Chunk) for m in messages):
                return

    def _show(self) -> None:
        now = time.monotonic()
        for text, bad in self._live_status.take_notes():
            self._note(text, bad=bad)
        if now >= self._next_view:
            self._watcher.update(self._live_status.status(time.time()))
            took = time.monotonic() - now  # with many slots the view is slow, and work goes first
            self._next_view = now + max(self._timeouts.view, VIEW_SHARE * took)

    def _give_up_where_hopeless(self) -> None:
        if self._leases.coming:
            return
        awaited = self._leases.why()
        if self._registry.hopeless or (awaited and not self._registry.drivers):
            self._undo_preparations()
            raise NoUsableNodeError("\n".join(["no node is left to work on:", *awaited, *self._registry.details()]))
        stuck = None if self._registry.coming else self._policy.stuck
        if stuck:
            self._shut_down()
            raise NoUsableNodeError(f"no slot is left to work on: {stuck}")
