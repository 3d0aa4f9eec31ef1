"""The one loop that drives a run: messages in, ledger and policy, decisions out.

Order matters: what nodes reported, the events made of it and the decisions they led to are committed in one
transaction, and only then is anything sent. After a kill at any instant the journal is replayed, and what was
decided but never sent is found out by looking at the nodes (see NodeUp).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.dispatch import requests
from orchestrator.dispatch.board import Board
from orchestrator.dispatch.frames import Beat, Chunk
from orchestrator.dispatch.logbook import Logbook
from orchestrator.dispatch.messages import (
    FromStream,
    Message,
    NodeTakenOver,
    NodeTrouble,
    NodeUp,
    SlotGone,
    Taken,
)
from orchestrator.dispatch.node import NodeDriver
from orchestrator.errors import NodeError, NoUsableNodeError, OrchestratorError, TakenOverError
from orchestrator.events import (
    AskCanary,
    AttemptTaken,
    Decision,
    Event,
    NodeDraining,
    NodeJoined,
    NodeLost,
    Resumed,
    RetryAsked,
    Send,
    SlotLost,
    StopAsked,
    TakeBack,
    Tick,
)
from orchestrator.ledger import Ingest, Ledger
from orchestrator.scheduling import Policy
from orchestrator.status import RunStatus
from worker.protocol import ANY_SLOT, InboxName, Spec, SpecShape


class Watcher(Protocol):
    """Who looks on: told a few times a second."""

    def update(self, status: RunStatus) -> None: ...
    def note(self, text: str, *, bad: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """What every spec of a run carries beside its shapes."""

    run: str
    family: str
    tuner: str
    watchdog_s: float
    err_ratio: float
    options: dict[str, object]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long things may take, in seconds."""

    tick: float = 0.2
    view: float = 0.2
    lost: float = 90.0
    """A node that stopped answering is given up after this long."""
    never_up: float = 20.0
    """A node that could not be prepared even once is given up after this long (and still tried again)."""
    grace: float = 30.0
    """After the first Ctrl-C: what runs may end within it."""
    farewell: float = 10.0
    """At the end: workers that were told to stop may take so long."""


class Interrupts:
    """Counts Ctrl-C; the loop looks at it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


class Controller:
    """Drives one run to its end, or to an interruption. `run()` returns the run's state."""

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        ingest: Ingest,
        board: Board,
        spec: SpecOptions,
        keys: Callable[[int], dict[str, int | str]],
        logs: Path,
        requests_folder: Path,
        watcher: Watcher,
        epoch: int,
        patience: Patience | None = None,
        interrupts: Interrupts | None = None,
        cancel: bool = False,
        known: Collection[str] = (),
        newcomers: Callable[[Collection[str]], list[NodeDriver]] | None = None,
    ) -> None:
        self._ledger, self._policy, self._ingest, self._board = ledger, policy, ingest, board
        self._spec, self._keys, self._logs, self._requests = spec, keys, logs, requests_folder
        self._watcher, self._epoch = watcher, epoch
        self._patience = patience or Patience()
        self._interrupts = interrupts or Interrupts()
        self._queue: queue.Queue[Message] = queue.Queue(maxsize=512)
        self._closing = threading.Event()
        self._drivers: dict[str, NodeDriver] = {}
        self._sessions: dict[str, int] = {}
        self._up: set[str] = set()
        self._lost: set[str] = set()
        self._trouble: dict[str, tuple[float, str]] = {}
        self._inbox_names: dict[str, InboxName] = {}
        self._stop_since: float | None = None
        self._newcomers = newcomers or (lambda known: [])
        self._known = set(known)
        """Nodes that an earlier controller of this run had."""
        self._cancelled = cancel
        self._cancel_when_up = cancel
        self._next_view = 0.0
        self._logbooks: dict[str, Logbook] = {}

    # --- set-up ---------------------------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """For the drivers' threads: waits while the loop is behind."""
        while not self._closing.is_set():
            try:
                self._queue.put(message, timeout=0.5)
            except queue.Full:
                continue
            return

    def add(self, driver: NodeDriver) -> None:
        self._drivers[driver.node] = driver
        self._logbooks[driver.node] = Logbook(self._ledger, driver.node, self._logs)

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self, also: Iterable[Event] = ()) -> str:
        """Returns finished, interrupted or cancelled. Raises NoUsableNodeError, TakenOverError."""
        left = [NodeLost(n, "it is no longer in the inventory") for n in sorted(self._known - set(self._drivers))]
        self._transact([], first=[Resumed(self._epoch), *left, *also])
        started = time.time()
        for node in self._drivers:
            self._trouble[node] = (started, "not up yet")
        for driver in self._drivers.values():
            driver.start()
        try:
            return self._loop()
        finally:
            self._closing.set()
            for driver in self._drivers.values():
                driver.close()

    def _loop(self) -> str:
        while True:
            messages = self._messages()
            asked = [*self._from_person(), *self._nodes_given_up(), Tick()]
            self._transact(messages, last=asked)
            self._show()
            for driver in self._drivers.values():
                driver.check_pulse()
            if self._policy.progress().done:
                self._farewell()
                return "finished"
            ended = self._stopped()
            if ended:
                return ended
            self._give_up_where_hopeless()

    def _messages(self) -> list[Message]:
        out: list[Message] = []
        try:
            out.append(self._queue.get(timeout=self._patience.tick))
            while len(out) < 512:
                out.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return out

    def _transact(self, messages: Iterable[Message], first: Iterable[Event] = (), last: Iterable[Event] = ()) -> None:
        """Everything of one turn in one transaction, then the decisions' effects."""
        decisions: list[Decision] = []
        with self._ledger.transaction():
            for event in first:
                decisions += self._handle(event)
            for message in messages:
                for event in self._events_of(message):
                    decisions += self._handle(event)
            for event in last:
                decisions += self._handle(event)
        for decision in decisions:
            self._carry_out(decision)

    def _handle(self, event: Event) -> list[Decision]:
        now = time.time()
        if not isinstance(event, Tick):
            self._ledger.journal(event, now)
            self._board.event(event, now)
        decisions = self._policy.handle(event, now)
        for decision in decisions:
            self._ledger.journal(decision, now)
            self._board.decision(decision, now)
        return decisions

    # --- messages become events -----------------------------------------------------------------------------------

    def _events_of(self, message: Message) -> list[Event]:
        match message:
            case FromStream(node, frame):
                return self._from_stream(node, frame)
            case NodeUp(node, session, present):
                return self._node_up(node, session, present)
            case Taken(node, attempt, won):
                return [AttemptTaken(attempt, won)] if self._policy.is_outstanding(attempt) else []
            case SlotGone(node, slot, detail):
                return [SlotLost(node, slot, detail)]
            case NodeTrouble(node, detail):
                if node in self._up:
                    self._up.discard(node)
                    self._trouble[node] = (time.time(), detail)
                elif node in self._trouble:
                    self._trouble[node] = (self._trouble[node][0], detail)
                self._board.trouble(node, detail)
                return []
            case NodeTakenOver(node, epoch):
                raise TakenOverError(
                    f"a younger controller took run {self._spec.run} over (node {node} obeys epoch {epoch}, this is "
                    f"epoch {self._epoch}); this one ends and changes nothing more"
                )

    def _from_stream(self, node: str, frame: Chunk | Beat) -> list[Event]:
        if isinstance(frame, Beat):
            if frame.epoch > self._epoch:
                return self._events_of(NodeTakenOver(node, frame.epoch))
            self._board.beat(node, frame)
            return []
        if frame.stream == "L":
            self._logbooks[node].add(frame)
            return []
        return self._ingest.feed(node, frame.slot, frame.data)[0]

    def _node_up(self, node: str, session: int, present: frozenset[str]) -> list[Event]:
        self._sessions[node] = session
        self._up.add(node)
        self._lost.discard(node)
        self._trouble.pop(node, None)
        self._board.up(node)
        events: list[Event] = [
            AttemptTaken(a.attempt, True)
            for a in self._policy.outstanding()
            if a.node == node and a.attempt not in present
        ]
        events.append(NodeJoined(node, self._drivers[node].slots))
        return events

    def _nodes_given_up(self) -> list[Event]:
        now = time.time()
        events: list[Event] = []
        for node, (since, detail) in self._trouble.items():
            patience = self._patience.lost if node in self._sessions else self._patience.never_up
            if node not in self._lost and now - since > patience:
                self._lost.add(node)
                events.append(NodeLost(node, detail))
        return events

    def _let_join(self) -> None:
        """Nodes that the run's inventory has since it was edited."""
        try:
            drivers = self._newcomers(self._drivers.keys())
        except OrchestratorError as e:
            self._watcher.note(f"no node could join: {e}", bad=True)
            return
        for driver in drivers:
            self._watcher.note(f"{driver.node} joins")
            self._board.joins(driver.node, driver.slots)
            self.add(driver)
            self._trouble[driver.node] = (time.time(), "not up yet")
            driver.start()

    # --- people ---------------------------------------------------------------------------------------------------

    def _from_person(self) -> list[Event]:
        events: list[Event] = []
        for request in requests.take(self._requests):
            if request["kind"] == "cancel":
                self._cancelled = True
                self._watcher.note("cancelled by request: stopping the workers")
            elif request["kind"] == "drain":
                if request.get("node") in self._drivers:
                    self._watcher.note(f"{request['node']} drains by request")
                    events.append(NodeDraining(request["node"]))
            elif request["kind"] == "join":
                self._let_join()
            else:
                shapes = tuple(int(s) for s in request.get("shapes", ()))
                self._watcher.note(f"{len(shapes)} failed shapes queued again by request")
                events.append(RetryAsked(shapes))
        if (self._cancelled or self._interrupts.count) and self._stop_since is None:
            self._stop_since = time.monotonic()
            events.append(StopAsked())
            if not self._cancelled:
                self._watcher.note(
                    f"interrupted: no new work; what runs may end within {self._patience.grace:g} s "
                    "(Ctrl-C again stops it now)"
                )
        return events

    def _stopped(self) -> str | None:
        """After a stop was asked for: the state to end with, once it is time."""
        if self._stop_since is None:
            return None
        waited = time.monotonic() - self._stop_since
        if self._cancel_when_up and len(self._up) < len(self._drivers) and waited < self._patience.farewell:
            return None
        if self._cancelled or self._interrupts.count > 1:
            self._halt_workers()
            if self._cancelled:
                self._tidy()
            return "cancelled" if self._cancelled else "interrupted"
        if not self._policy.outstanding():
            self._farewell()
            return "interrupted"
        if waited > self._patience.grace:
            left = [f"{a.attempt} on {a.node}" for a in self._policy.outstanding()]
            self._drain_workers()
            self._watcher.note(f"left to the workers, which end when it is done: {', '.join(left[:8])}")
            return "interrupted"
        return None

    # --- decisions ------------------------------------------------------------------------------------------------

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Send(attempt, group, node, slot, seq):
                name = InboxName(seq, slot or ANY_SLOT, attempt)
                self._inbox_names[attempt] = name
                shapes = tuple(SpecShape(s, self._keys(s)) for s in self._policy.shapes_of(group))
                self._put(node, name, self._make_spec(attempt, "group", group, shapes))
            case TakeBack(attempt, node):
                known = self._inbox_names.get(attempt)
                if known is not None and node in self._up:
                    self._drivers[node].take_back(self._sessions[node], known)
            case AskCanary(node, slot, attempt):
                self._put(node, InboxName(0, slot, attempt), self._make_spec(attempt, "canary", "", ()))
            case _:
                pass

    def _put(self, node: str, name: InboxName, spec: Spec) -> None:
        # a node that is not up gets nothing: its next NodeUp says that this attempt is not there
        if node in self._up:
            self._drivers[node].put(self._sessions[node], {f"inbox/{name}": spec.dumps()})

    def _make_spec(self, attempt: str, kind: str, group: str, shapes: tuple[SpecShape, ...]) -> Spec:
        s = self._spec
        return Spec(
            attempt=attempt, run=s.run, epoch=self._epoch, kind=kind, group=group, family=s.family, tuner=s.tuner,
            shapes=shapes, watchdog_s=s.watchdog_s, err_ratio=s.err_ratio, options=dict(s.options),
        )  # fmt: skip

    # --- the end --------------------------------------------------------------------------------------------------

    def _drain_workers(self) -> None:
        for node in self._up:
            self._drivers[node].put(self._sessions[node], {"control/stop": b"drain\n"})

    def _farewell(self) -> None:
        """All is settled: let the workers close their books, and read them to the end."""
        self._drain_workers()
        self._listen(self._patience.farewell)
        self._halt_workers()
        if self._policy.progress().done and not self._policy.progress().failed:
            self._tidy()  # where something failed, dead containers stay as evidence until the run is pruned

    def _tidy(self) -> None:
        for node in sorted(self._up):
            try:
                self._drivers[node].tidy()
            except NodeError as e:
                self._watcher.note(f"something of the run may be left behind: {e}", bad=True)

    def _halt_workers(self) -> None:
        for node in sorted(self._up):
            try:
                if self._drivers[node].alive():
                    self._drivers[node].halt()
                    self._listen(5.0)
                if self._drivers[node].alive():
                    self._drivers[node].halt(kill=True)
                    self._listen(1.0)
            except NodeError as e:
                self._watcher.note(f"workers may be left behind: {e}", bad=True)

    def _listen(self, seconds: float) -> None:
        """Take in what still comes, until no worker is left and nothing comes any more, or the time is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            gone = not self._workers_left()
            messages = self._messages()
            self._transact([m for m in messages if isinstance(m, FromStream | Taken)])
            if gone and not any(isinstance(m, FromStream) and isinstance(m.frame, Chunk) for m in messages):
                return

    def _workers_left(self) -> bool:
        try:
            return any(self._drivers[node].alive() for node in self._up)
        except NodeError:
            return True

    def _show(self) -> None:
        now = time.monotonic()
        for text, bad in self._board.take_notes():
            self._watcher.note(text, bad=bad)
        if now >= self._next_view:
            self._next_view = now + self._patience.view
            self._watcher.update(self._board.status(self._policy))

    def _give_up_where_hopeless(self) -> None:
        if self._drivers and self._lost >= set(self._drivers):
            details = [f"  {node}: {detail}" for node, (_, detail) in self._trouble.items()]
            raise NoUsableNodeError("\n".join(["no node is left to work on:", *details]))
        coming = set(self._drivers) - self._up - self._lost
        stuck = None if coming else self._policy.progress().stuck
        if stuck:
            self._farewell()
            raise NoUsableNodeError(f"no slot is left to work on: {stuck}")
