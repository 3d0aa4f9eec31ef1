"""The one loop that drives a run: messages in, ledger and policy, decisions out.

Order matters: what nodes reported, the events made of it and the decisions they led to are committed in one
transaction, and only then is anything sent. After a kill at any instant the journal is replayed, and what was
decided but never sent is found out by looking at the nodes (see NodeUp).
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

from orchestrator.controller.exchange import NodeReports, Outbox
from orchestrator.controller.leases import LeasedNodes, LeaseTurn
from orchestrator.controller.messages import FromStream, Message, Taken, Timeouts, Watcher
from orchestrator.controller.node import NodeDriver
from orchestrator.controller.node_registry import NodeRegistry, Shutdown, StoppedNode, stop_workers
from orchestrator.errors import NoUsableNodeError, OrchestratorError, TakenOverError
from orchestrator.events import (
    Decision,
    Event,
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

TURN_S = 0.03
"""CPU seconds after which a turn begins no further message: decisions are carried out at the end of their turn. Not
wall time: where others have the machine, turns would only become more, each with a commit of its own."""
VIEW_SHARE = 20.0
"""Bound of the view's part of the loop's time: one in so many seconds."""


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
        epoch: int,
        timeouts: Timeouts | None = None,
        interrupts: Sequence[int] = (),
        cancel: bool = False,
        known: Collection[str] = (),
        newcomers: Callable[[Collection[str]], list[NodeDriver]] | None = None,
        leases: LeasedNodes | None = None,
        limit: Callable[[], str] = lambda: "",
    ) -> None:
        """`kernels`: shape id to the only kernels to measure of it. `interrupts`: one entry for each Ctrl-C so far.
        `known`: nodes that an earlier controller of this run had. `limit`: why no more work is to be claimed, "" while
        it is."""
        self._limit = limit
        self.limited = ""
        """Limit that ended the claims, "" for none."""
        self._ledger, self._policy, self._live_status = ledger, policy, live_status
        self._requests = requests_folder
        self._watcher, self._epoch = watcher, epoch
        self._timeouts = timeouts or Timeouts()
        self._interrupts = interrupts
        self._left_over: list[Message] = []
        """Messages that the last turn had no time for."""
        self._queue: queue.Queue[Message | None] = queue.Queue(maxsize=512)
        self._closing = threading.Event()
        self._registry = NodeRegistry(self._timeouts)
        self._reports = NodeReports(
            config.run, epoch, ledger, policy, self._registry, ingest, live_status, leases, logs
        )
        self._outbox = Outbox(self._registry, config, keys, kernels, epoch, ledger.blocklist_verdicts)
        self._first: list[NodeDriver] = []
        self._stop_since: float | None = None
        self._newcomers = newcomers or (lambda known: [])
        self._leases = leases
        self._known = set(known)
        self._cancelled = cancel
        self._cancel_when_up = cancel
        self._shutdown: Shutdown | None = None
        self._next_view = 0.0

    def post(self, message: Message) -> None:
        """Queue a message of a driver's thread; wait while the loop is behind."""
        while not self._closing.is_set():
            try:
                self._queue.put(message, timeout=0.5)
            except queue.Full:
                continue
            return

    def wake(self) -> None:
        """Begin the next turn at once."""
        with contextlib.suppress(queue.Full):  # then it begins anyway
            self._queue.put_nowait(None)

    def add(self, driver: NodeDriver) -> None:
        """Add a node of the start."""
        self._first.append(driver)

    def run(self, also: Iterable[Event] = ()) -> str:
        """Drive the run; return finished, interrupted or cancelled. Raise NoUsableNodeError, TakenOverError."""
        left = [
            NodeLost(n, "it is no longer in the inventory") for n in sorted(self._known - {d.node for d in self._first})
        ]
        expected = [NodeExpected(d.node, d.slots) for d in self._first]
        self._transact([], first=[Resumed(self._epoch), *left, *expected, *also])
        if self._policy.progress().done and not self._known:
            self._sum_up({d.node: StoppedNode(None) for d in self._first})
            return "finished"  # all shapes were tuned before, and no node has files of this run
        for driver in self._first:
            self._start(driver)
        if self._leases is not None:
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
            for text in self._leases.close(release=release) if self._leases is not None else ():
                self._watcher.note(text, bad=True)

    def _start(self, driver: NodeDriver) -> None:
        self._reports.open(driver.node)
        self._registry.start(driver)

    def _loop(self) -> str:
        while True:
            messages = self._messages()
            given_up = [NodeLost(node, why) for node, why in self._registry.give_up()]
            leased = self._leases.turn(self._policy, self._registry, time.time()) if self._leases is not None else None
            left = self._reports.unread(leased.rows) if leased is not None else []
            events = self._changed_leases(leased) if leased is not None else []
            last = [*self._requested(), *given_up, *events, Tick()]
            # what a lease left behind is read before its end
            self._transact([*messages, *left], last=last, whole=bool(left))
            self._show()
            self._registry.check_pulses()
            if self._policy.progress().done:
                self._shut_down()
                return "finished"
            ended = self._stopped()
            if ended:
                return ended
            self._give_up_where_hopeless()

    def _changed_leases(self, turn: LeaseTurn) -> list[Event]:
        """Start the nodes that became ready, and let go of those whose lease is over."""
        for text, bad in turn.notes:
            self._watcher.note(text, bad=bad)
        for node in turn.gone:
            self._registry.remove(node)
        for driver in turn.start:
            self._start(driver)
        return turn.events

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
        """Record everything of one turn in one transaction, then carry the decisions out. After TURN_S the other
        messages are left to the next turn, unless the turn is to be `whole`."""
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
            self._watcher.note(f"no node could join: {e}", bad=True)
            return []
        for driver in drivers:
            self._watcher.note(f"{driver.node} joins")
            self._start(driver)
        return [NodeExpected(d.node, d.slots) for d in drivers]

    def _requested(self) -> list[Event]:
        events: list[Event] = []
        for request in take_requests(self._requests):
            if request["kind"] == "cancel":
                self._cancelled = True
                self._watcher.note("cancelled by request: stopping the workers")
            elif request["kind"] == "drain":
                if request.get("node") in self._registry.drivers:
                    self._watcher.note(f"{request['node']} drains by request")
                    events.append(NodeDraining(request["node"]))
            elif request["kind"] == "join":
                events += self._let_join()
            else:
                shapes = tuple(int(s) for s in request.get("shapes", ()))
                self._watcher.note(f"{len(shapes)} failed shapes queued again by request")
                events.append(RetryAsked(shapes))
        if not self.limited and self._stop_since is None and (why := self._limit()):
            self.limited = why
            self._watcher.note(f"{why}: no new work; what runs may end")
            events.append(StopAsked(why))
        if (self._cancelled or self._interrupts) and self._stop_since is None:
            self._stop_since = time.monotonic()
            events.append(StopAsked())
            if not self._cancelled:
                self._watcher.note(
                    f"interrupted: no new work; what runs may end within {self._timeouts.grace:g} s "
                    "(Ctrl-C again stops it now)"
                )
        return events

    def _stopped(self) -> str | None:
        """State to end with after a stop was requested or a limit reached, once it is time; None before."""
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
            self._watcher.note(f"left to the workers, which end when it is done: {', '.join(left[:8])}")
            self._undo_preparations()
            return "interrupted"
        return None

    def _shut_down(self) -> None:
        """Let the workers finish after the last shape was settled, and read their records to the end; but not those
        that still measure what was settled elsewhere."""
        self._outbox.drain()
        self._listen(self._timeouts.shutdown, lambda: not self._registry.workers_left() or self._only_copies())
        self._stop_workers()

    def _only_copies(self) -> bool:
        left = self._policy.outstanding()
        return bool(left) and all(len(a.landed) < len(a.shapes) for a in left)

    def _stop_workers(self) -> None:
        progress = self._policy.progress()
        # where something failed, dead containers stay as evidence until the run is pruned
        tidy = self._cancelled or (progress.done and not progress.failed)
        pace = self._timeouts.cancel if self._cancelled else self._timeouts.stop
        self._sum_up(stop_workers(self._registry, self._listen, tidy=tidy, pace=pace))

    def _cancel_as_they_come(self, waited: float) -> str | None:
        """Cancel a run without a controller: stop each node once its records are read, without waiting long for any."""
        soon = self._timeouts.cancel
        if self._shutdown is None:
            self._shutdown = Shutdown(self._registry, soon, tidy=True)
        patient = waited < soon.limit_s / 2
        self._shutdown.begin(d for d in self._registry.reached() if d.node in self._reports.read_out or not patient)
        awaited = (self._registry.coming - self._registry.troubled) | (
            self._registry.up - self._reports.read_out if patient else set()
        )
        coming = self._leases is not None and self._leases.coming
        if waited < soon.limit_s and (awaited or coming or not self._shutdown.done()):
            return None
        self._listen(soon.kill_s, lambda: True)
        away = self._registry.drivers.keys() - self._registry.up
        self._sum_up({**{n: StoppedNode(0, self._registry.why(n)) for n in away}, **self._shutdown.close()})
        return "cancelled"

    def _undo_preparations(self) -> None:
        """Stop workers that may be starting on nodes that never were up."""
        busy = {a.node for a in self._policy.outstanding()}
        fresh = [
            d
            for n, d in self._registry.drivers.items()
            if d.workers.fresh and n not in busy and n not in self._registry.sessions
        ]
        self._sum_up(stop_workers(self._registry, self._listen, tidy=True, only=fresh))

    def _sum_up(self, seen: Mapping[str, StoppedNode]) -> None:
        """Note where workers may be left, and keep the result for `cancel`."""
        with self._ledger.transaction():
            self._ledger.set_meta("farewell", {"epoch": self._epoch, "nodes": {n: asdict(s) for n, s in seen.items()}})
        for node, found in seen.items():
            if found.left:
                text = f"workers may be left behind on {node}, they end when they are idle: {found.left}"
                self._watcher.note(text, bad=True)

    def _listen(self, seconds: float, over: Callable[[], bool]) -> None:
        """Read messages until `over` and nothing more comes, or the time is up."""
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
            self._watcher.note(text, bad=bad)
        if now >= self._next_view:
            self._watcher.update(self._live_status.status(time.time()))
            took = time.monotonic() - now  # with many slots: the work goes first
            self._next_view = now + max(self._timeouts.view, VIEW_SHARE * took)

    def _give_up_where_hopeless(self) -> None:
        if self._leases is not None and self._leases.coming:
            return
        awaited = self._leases.why() if self._leases is not None else []
        if self._registry.hopeless or (awaited and not self._registry.drivers):
            self._undo_preparations()
            raise NoUsableNodeError("\n".join(["no node is left to work on:", *awaited, *self._registry.details()]))
        stuck = None if self._registry.coming else self._policy.progress().stuck
        if stuck:
            self._shut_down()
            raise NoUsableNodeError(f"no slot is left to work on: {stuck}")
