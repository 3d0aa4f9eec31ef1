"""The loop that drives a run: it takes messages, updates ledger and policy, and carries out decisions.

drive.py makes a `Controller` and calls `run`. Each turn (`_take_turn`) takes what the drivers' threads posted, makes
events of it (node_reports.py), lets the policy decide, and carries the decisions out (outbox.py). Which nodes there are
is in node_registry.py, and leases are looked after by leases/leased_nodes.py. How a run ends is decided in `_loop`:
every shape is settled, it was stopped or reached a limit (`_state_if_stopped`), or nothing is left to work on.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.controller.context import RunContext
from orchestrator.controller.deployment import make_driver, plan_newcomers
from orchestrator.controller.limits import Limits
from orchestrator.controller.messages import FromStream, Message, Taken
from orchestrator.controller.node_driver import NodeDriver
from orchestrator.controller.node_registry import NodeRegistry
from orchestrator.controller.node_reports import NodeReports
from orchestrator.controller.outbox import Outbox
from orchestrator.controller.shutdown import Shutdown, StoppedNode
from orchestrator.controller.timeouts import StopLimits
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
from orchestrator.leases.lease_lifecycle import LeaseTurn
from orchestrator.leases.leased_nodes import LeasedNodes
from orchestrator.ledger.ingest import Chunk, Ingest
from orchestrator.machines.node_plan import NodePlan
from orchestrator.paths import take_requests
from orchestrator.transport.base import Transport
from orchestrator.view.live import LiveStatus
from worker.text import plural

TURN_S = 0.03
"""After this many CPU seconds a turn takes no further message, because decisions wait for the end of their turn. It is
not wall time: on a busy machine that would only mean more turns, each with its own commit."""
MAX_MESSAGES = 512
"""Most messages of a turn, and most that wait for the loop."""
VIEW_SHARE = 20.0
"""The view gets at most one in this many seconds of the loop's time."""


class Controller:
    """Drives one run to its end, or to an interruption. `run()` returns the run's state."""

    def __init__(
        self,
        context: RunContext,
        live_status: LiveStatus,
        leases: LeasedNodes,
        plans: Sequence[NodePlan],
        *,
        launch: bool,
        interrupts: Sequence[int],
        cancel: bool,
    ) -> None:
        """`plans`: the machines to drive from the beginning. `launch`: False takes over the running workers and starts
        none. `interrupts`: one entry for each Ctrl-C so far. `cancel`: only stop the workers and read their last
        records."""
        policy, ledger = context.policy, context.ledger
        self._context = context
        self._ledger = ledger
        self._policy = policy
        self._timeouts = context.timeouts
        self._live_status = live_status
        self._leases = leases
        self._plans = plans
        self._launch = launch
        self._interrupts = interrupts
        self._limits = Limits(ledger, context.config)
        self.limited = ""
        """The limit that stopped new work, "" if none did."""
        self._left_over: list[Message] = []
        """Messages that the last turn had no time for."""
        self._queue: queue.Queue[Message | None] = queue.Queue(MAX_MESSAGES)
        self._closing = threading.Event()
        self._registry = NodeRegistry(context.timeouts)
        ingest = Ingest(ledger, policy.state)
        self._reports = NodeReports(context, self._registry, ingest, live_status, leases.check_lease_of)
        self._outbox = Outbox(context, self._registry)
        self._known = {node.name for node in policy.state.nodes.values() if not node.lease}
        """Nodes that an earlier controller of this run had, leases apart."""
        self._stop_since: float | None = None
        self._is_cancelled = cancel
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

    def run(self, first: Iterable[Event] = ()) -> str:
        """Drive the run; return finished, interrupted or cancelled. `first`: events to record before anything else
        happens. Raise NoUsableNodeError, TakenOverError."""
        drivers = [self._make_driver(plan) for plan in self._plans]
        removed = sorted(self._known - {driver.node for driver in drivers})
        lost = [NodeLost(node, "it is no longer in the inventory") for node in removed]
        expected = [NodeExpected(driver.node, driver.slots) for driver in drivers]
        self._transact([], first=[Resumed(self._context.epoch), *lost, *expected, *first])
        if self._policy.done and not self._known:
            self._sum_up({driver.node: StoppedNode(None) for driver in drivers})
            return "finished"  # all shapes were tuned before, and no node has files of this run
        for driver in drivers:
            self._registry.start(driver)
        self._leases.start(self.wake)
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
                self._context.note(text, bad=True)

    def _loop(self) -> str:
        """Take turns until the run ends, and return the state that it ends in."""
        while True:
            self._take_turn()
            self._update_view()
            for driver in self._registry.drivers.values():
                driver.check_pulse()
            if self._policy.done:
                self._shut_down()
                return "finished"
            end_state = self._state_if_stopped()
            if end_state:
                return end_state
            self._raise_if_hopeless()

    def _take_turn(self) -> None:
        """Record what happened since the last turn, and carry out the decisions that follow."""
        messages = self._take_messages()
        given_up = [NodeLost(node, why) for node, why in self._registry.give_up()]
        leased = self._leases.turn(self._policy, self._registry, time.time())
        self._follow_leases(leased)
        # read what the stream did not deliver of the files that a lease left, before the end of the lease is recorded
        left_files = [FromStream(node, file) for node, file in leased.rows]
        last = [*self._stops_and_requests(), *given_up, *leased.events, Tick()]
        self._transact([*messages, *left_files], last=last, whole=bool(left_files))

    def _follow_leases(self, turn: LeaseTurn) -> None:
        """Start the nodes that became ready, and drop those whose lease is over."""
        for text, bad in turn.notes:
            self._context.note(text, bad=bad)
        for event in turn.events:
            if isinstance(event, LeaseEnded):
                self._registry.remove(event.node)
        for ready in turn.start:
            self._registry.start(self._make_driver(ready.plan, ready.transport))

    def _make_driver(self, plan: NodePlan, transport: Transport | None = None) -> NodeDriver:
        return make_driver(self._context, plan, self.post, transport, launch=self._launch)

    def _take_messages(self) -> list[Message]:
        """Take the messages of a turn: those left over, and up to MAX_MESSAGES in all. Wait for the first if there is
        none."""
        messages: list[Message | None] = [*self._left_over]
        self._left_over = []
        try:
            messages.append(self._queue.get(timeout=0.0 if messages else self._timeouts.tick))
            while len(messages) < MAX_MESSAGES:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return [message for message in messages if message is not None]

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
        """Journal an event and the decisions that follow, and return these. Call it within a transaction."""
        now = time.time()
        if not isinstance(event, Tick):
            self._ledger.journal(event, now)
            self._live_status.feed(now, event)
        decisions = self._policy.handle(event, now)
        for decision in decisions:
            self._ledger.journal(decision, now)
            self._live_status.feed(now, decision)
        return decisions

    def _start_newcomers(self) -> list[Event]:
        """Start the nodes that were added to the run's inventory."""
        try:
            plans = plan_newcomers(self._context.paths, self._context.config, self._registry.drivers.keys())
            drivers = [self._make_driver(plan) for plan in plans]
        except OrchestratorError as e:
            self._context.note(f"no node could join: {e}", bad=True)
            return []
        for driver in drivers:
            self._context.note(f"{driver.node} joins")
            self._registry.start(driver)
        return [NodeExpected(d.node, d.slots) for d in drivers]

    def _stops_and_requests(self) -> list[Event]:
        """Events for what other commands requested, for a limit that is reached, and for Ctrl-C."""
        events: list[Event] = []
        for request in take_requests(self._context.paths.requests):
            events += self._events_of_request(request)
        if not self.limited and self._stop_since is None:
            self.limited = self._limits.reached()
            if self.limited:
                self._context.note(f"{self.limited}: no new work; running attempts may finish")
                events.append(StopAsked(self.limited))
        if (self._is_cancelled or self._interrupts) and self._stop_since is None:
            self._stop_since = time.monotonic()
            events.append(StopAsked())
            if not self._is_cancelled:
                self._context.note(
                    f"interrupted: no new work; running attempts have {self._timeouts.grace:g} s to finish "
                    "(Ctrl-C again stops it now)"
                )
        return events

    def _events_of_request(self, request: Mapping[str, Any]) -> list[Event]:
        """Events for a request of another command (paths.leave_request)."""
        match request["kind"]:
            case "cancel":
                self._is_cancelled = True
                self._context.note("cancelled by request: stopping the workers")
                return []
            case "drain":
                node = request.get("node", "")
                if not self._registry.has(node):
                    return []
                self._context.note(f"{node} drains by request")
                return [NodeDraining(node)]
            case "join":
                return self._start_newcomers()
            case _:
                shapes = tuple(int(s) for s in request.get("shapes", ()))
                self._context.note(f"{plural(len(shapes), 'shape')} queued again by request")
                return [RetryAsked(shapes)]

    def _state_if_stopped(self) -> str | None:
        """After a requested stop or a reached limit: the state to end with, once it is time to end; else None."""
        if self._stop_since is None:
            if not self.limited or self._policy.outstanding():
                return None
            self._shut_down()
            return "finished"
        waited = time.monotonic() - self._stop_since
        if self._cancel_when_up:
            return self._cancel_as_they_come(waited)
        if self._is_cancelled or len(self._interrupts) > 1:
            self._stop_workers()
            return "cancelled" if self._is_cancelled else "interrupted"
        # after one Ctrl-C: end when the running attempts have ended, or when their time is up
        if not self._policy.outstanding():
            self._shut_down()
            return "interrupted"
        if waited > self._timeouts.grace:
            running = [f"{attempt.id} on {attempt.node}" for attempt in self._policy.outstanding()]
            self._outbox.drain()
            self._context.note(f"the workers finish these by themselves, and then exit: {', '.join(running[:8])}")
            self._undo_preparations()
            return "interrupted"
        return None

    def _shut_down(self) -> None:
        """After the last shape was settled, let the workers finish and read their records to the end. Do not wait for
        workers that still measure shapes which were settled elsewhere."""
        self._outbox.drain()

        def is_over() -> bool:
            attempts = self._policy.outstanding()
            if attempts and all(len(attempt.landed) < len(attempt.shapes) for attempt in attempts):
                return True  # only copies are left
            return not self._registry.has_workers()

        self._listen(self._timeouts.shutdown, is_over)
        self._stop_workers()

    def _stop_workers(self) -> None:
        """Stop all workers, and read their last messages."""
        # if something failed, dead containers stay as evidence until the run is pruned
        tidy = self._is_cancelled or (self._policy.done and not self._policy.state.failed)
        pace = self._timeouts.cancel if self._is_cancelled else self._timeouts.stop
        self._stop(self._registry.drivers.values(), pace, tidy=tidy)

    def _stop(self, drivers: Iterable[NodeDriver], pace: StopLimits, *, tidy: bool) -> None:
        """Stop the workers of these nodes, and read their last messages."""
        shutdown = Shutdown(pace, tidy=tidy)
        for driver in drivers:
            shutdown.begin(driver, is_up=self._registry.session_of(driver.node) is not None)
        self._listen(pace.limit_s, shutdown.is_done)
        self._sum_up(shutdown.close())

    def _cancel_as_they_come(self, waited: float) -> str | None:
        """Cancel a run that has no controller. Stop each node once its records are read; do not wait long for any."""
        limits = self._timeouts.cancel
        if self._shutdown is None:
            self._shutdown = Shutdown(limits, tidy=True)
        read_out = self._reports.read_out
        waits_for_records = waited < limits.limit_s / 2
        for driver in self._registry.reached_drivers():
            if driver.node in read_out or not waits_for_records:
                self._shutdown.begin(driver, is_up=True)
        awaited = self._registry.coming - self._registry.troubled
        if waits_for_records:
            awaited |= self._registry.reached - read_out
        if waited < limits.limit_s and (awaited or self._leases.is_lease_coming or not self._shutdown.is_done()):
            return None
        self._listen(limits.kill_s, lambda: True)
        away = self._registry.drivers.keys() - self._registry.reached
        never_reached = {node: StoppedNode(0, self._registry.trouble_of(node)) for node in away}
        self._sum_up({**never_reached, **self._shutdown.close()})
        return "cancelled"

    def _undo_preparations(self) -> None:
        """Stop workers that may be starting on nodes that were never up."""
        busy = {attempt.node for attempt in self._policy.outstanding()}
        unused = []
        for node, driver in self._registry.drivers.items():
            if driver.workers.fresh and node not in busy and not self._registry.was_up(node):
                unused.append(driver)
        self._stop(unused, self._timeouts.stop, tidy=True)

    def _sum_up(self, stopped: Mapping[str, StoppedNode]) -> None:
        """Report where workers may be left, and store the result for `cancel`."""
        nodes = {node: asdict(result) for node, result in stopped.items()}
        with self._ledger.transaction():
            self._ledger.set_meta("farewell", {"epoch": self._context.epoch, "nodes": nodes})
        for node, result in stopped.items():
            if result.left:
                text = f"workers may be left behind on {node} ({result.left}); they exit when they are idle"
                self._context.note(text, bad=True)

    def _listen(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Read messages until `is_over` holds and no more come, or the time is up."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            was_over = is_over()
            messages = self._take_messages()
            self._transact([m for m in messages if isinstance(m, FromStream | Taken)])
            has_data = any(isinstance(m, FromStream) and isinstance(m.frame, Chunk) for m in messages)
            if was_over and not has_data:
                return

    def _update_view(self) -> None:
        """Give the watcher new notes, and now and then the status."""
        now = time.monotonic()
        for text, bad in self._live_status.take_notes():
            self._context.note(text, bad=bad)
        if now >= self._next_view:
            self._context.watcher.update(self._live_status.status(time.time()))
            seconds = time.monotonic() - now  # with many slots the view is slow, and work goes first
            self._next_view = now + max(self._timeouts.view, VIEW_SHARE * seconds)

    def _raise_if_hopeless(self) -> None:
        """Raise NoUsableNodeError if no node or no slot is left to work on, and none may come."""
        if self._leases.is_lease_coming:
            return
        awaited = self._leases.details()
        if self._registry.is_hopeless or (awaited and not self._registry.drivers):
            self._undo_preparations()
            raise NoUsableNodeError("\n".join(["no node is left to work on:", *awaited, *self._registry.details()]))
        stuck = None if self._registry.coming else self._policy.stuck
        if stuck:
            self._shut_down()
            raise NoUsableNodeError(f"no slot is left to work on: {stuck}")
