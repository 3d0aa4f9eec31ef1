"""Drives one node with two threads. They deploy, launch, follow and write, and report to the loop as messages.

The loop calls `start` once, then `put` and `take_back` for each decision and `check_pulse` in each turn, and at the end
`leave` and `close`. shutdown.py ends the workers before that: `connect_to_stop` (only for a node that is not up),
`fetch_reproductions`, `keep_results`, `tidy`.

The reader thread prepares the node (deployed_node.py) and then reads its stream (node_stream.py). After any failure it
posts `NodeTroubled`, pauses, and starts from the beginning, so the first start and a recovery are the same code. Each
such round is a *session* and has a number. The writer thread sends specs and control files. It drops a write for an
earlier session, because the preparation since then has already told the controller that it never arrived.

A worker that dies is found in the beats by the reader and launched again by the writer (node_workers.py). If that does
not help, `SlotLost` is posted; policy/slot_changes.py says what becomes of the slot and its shapes. A later `NodeUp`
gives the slot another chance.

An exception that neither thread expects is a bug. It ends both threads, and `DriverFailed` is posted.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial

import tenacity

from orchestrator import clean
from orchestrator.controller.deployed_node import DeployedNode, deploy, take_over, younger_epoch
from orchestrator.controller.messages import Beat, DriverFailed, Message, NodeTakenOver, NodeUp, Taken, read_frames
from orchestrator.controller.node_stream import NodeStream, follow_argument
from orchestrator.controller.node_workers import NodeWorkers
from orchestrator.controller.timeouts import Timeouts
from orchestrator.engines import Engine
from orchestrator.errors import LeftOutError, NodeError, TakenOverError, TransportError
from orchestrator.events import NodeBusy, NodeTroubled, SlotLost
from orchestrator.machines.admission import NodeAdmission
from orchestrator.machines.node_folder import fetch_reproductions
from orchestrator.transport.base import RemoteFile, Transport
from worker.protocol import InboxName, ProtocolError

CUT_OFF_S = 1.0
"""A thread whose calls were cut off may need this long to notice."""


class NodeDriver:
    """The connection to one node folder, and the threads that use it."""

    def __init__(
        self,
        transport: Transport,
        engine: Engine,
        deployed: DeployedNode,
        admission: NodeAdmission,
        post: Callable[[Message], None],
        timeouts: Timeouts,
    ) -> None:
        """`admission`: waits while the node is occupied, before workers start. `post`: sends a message to the loop."""
        self.node = transport.node
        self.folder = deployed.folder
        self.slots = deployed.slots
        may_have_started = bool(deployed.offsets)
        self.workers = NodeWorkers(
            engine, self.slots, deployed.env, launch=deployed.launch, may_have_started=may_have_started
        )
        self._transport = transport
        self._deployed = deployed
        self._offsets = dict(deployed.offsets)
        """The next byte to post of each (stream, slot)."""
        self._post = post
        self._admission = admission
        self._is_connected = deployed.is_connected
        self._closing = threading.Event()
        self._io = threading.Lock()
        """Held while a thread uses the transport."""
        self._session = 0
        """Number of the last preparation."""
        self._writes: queue.SimpleQueue[tuple[int | None, Callable[[], None]] | None] = queue.SimpleQueue()
        """(the session that it is for, None for any; what to do). None ends the writer."""
        self._close_channel: Callable[[], None] = lambda: None
        self._heard_at = time.monotonic()
        """Time of the stream's last frame. Infinite while the loop is behind: then the silence is our fault."""
        self._silence = ""
        """The reason why `check_pulse` closed the stream."""
        self._timeouts = timeouts
        self._patience_s = timeouts.first_word
        """Seconds for which the stream may be silent."""
        self._reader = self._thread_of(self._read_loop, f"read {self.node}")
        self._writer = self._thread_of(self._write_loop, f"write {self.node}")

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    def put(self, session: int, files: dict[str, bytes]) -> None:
        """Let the writer put files into the node folder. `files`: path below the folder -> content."""
        remote = {name: RemoteFile(data) for name, data in files.items()}
        self._writes.put((session, partial(self._transport.put, self.folder, remote)))

    def take_back(self, session: int, name: InboxName) -> None:
        """Let the writer take a spec out of the inbox again. `Taken` says whether no worker was faster."""
        self._writes.put((session, partial(self._take_back, name)))

    def check_pulse(self) -> None:
        """Close a stream that has been silent for too long. The reader then starts again."""
        silent_s = time.monotonic() - self._heard_at
        if silent_s > self._patience_s:
            self._heard_at = time.monotonic()
            self._silence = f"no word for {silent_s:.0f} s"
            self._close_channel()

    def connect_to_stop(self, seconds: float) -> None:
        """Connect to a node that is not up, in order to stop its workers. Its stream is not read. A start in progress
        has `seconds` to end. Raise NodeError."""
        self._closing.set()
        self.workers.settle(seconds)
        self._transport.close()  # ends the threads' calls
        if not self._io.acquire(timeout=seconds):
            raise TransportError(self.node, "it is still busy with something else")
        try:
            self._transport.connect()
            if self.workers.cut_off:  # if the node still starts a worker, that ends at once
                self._transport.put(self.folder, {"control/stop": RemoteFile(b"now\n")})
        finally:
            self._io.release()

    def hang_up(self) -> None:
        """End all calls in progress."""
        self._transport.close()

    def keep_results(self) -> None:
        """Copy the node's rows and logs into its folder of results, if it has one. Raise NodeError."""
        if self._deployed.results is not None:
            parts = [f"{self.folder}/events", f"{self.folder}/logs"]
            done = self._transport.run(["cp", "-R", "-p", *parts, f"{self._deployed.results}/"], timeout=300.0)
            if done.code != 0:
                raise TransportError(
                    self.node, f"its results could not be kept in {self._deployed.results}: {done.text}"
                )

    def fetch_reproductions(self) -> None:
        """Copy reproductions of faults into the run's folder. Raises NodeError, OSError."""
        if self._deployed.home is not None:
            fetch_reproductions(self._transport, self.folder, self._deployed.home)

    def tidy(self) -> None:
        """Remove what the run left in the engine. The last call before `close`. Raises NodeError."""
        self._closing.set()  # the stream may end too, and that must not begin a new session
        self.workers.engine.tidy()

    def leave(self) -> None:
        """Ask both threads to end, without waiting."""
        self._closing.set()
        self._writes.put(None)
        self._close_channel()

    def close(self, until: float) -> None:
        """End both threads. They have until then (time.monotonic()) to finish. The workers go on."""
        self.leave()
        for thread in (self._reader, self._writer):
            thread.join(max(0.0, until - time.monotonic()))
        self._transport.close()  # ends every call
        for thread in (self._reader, self._writer):
            thread.join(CUT_OFF_S)
        self.workers.engine.close()

    def _thread_of(self, loop: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=self._report_failure, args=(loop,), name=name, daemon=True)

    def _report_failure(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop. Report an unexpected exception, or the run would wait for this node for ever."""
        try:
            loop()
        except Exception as e:  # noqa: BLE001  whatever it is, it is a bug
            self._post(DriverFailed(self.node, clean.text(f"{type(e).__name__}: {e}", 300), traceback.format_exc()))
            self.leave()

    def _read_loop(self) -> None:
        timeouts = self._timeouts
        backoff = tenacity.wait_exponential(multiplier=timeouts.backoff, max=timeouts.longest_backoff)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((NodeError, ProtocolError)),
            wait=backoff + tenacity.wait_random(0, timeouts.jitter),
            stop=tenacity.stop_when_event_set(self._closing),
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )
        while not self._closing.is_set():
            try:
                retrying(self._run_session)
            except (TakenOverError, LeftOutError):
                return
            except (NodeError, ProtocolError):
                if not self._closing.is_set():
                    raise

    def _run_session(self) -> None:
        """Prepare the node and read its stream to the end. A stream that worked for a while resets the backoff."""
        try:
            up = self._prepare()
            if self._closing.is_set():
                return
            began = time.monotonic()
            why = self._follow(up)
        except (NodeError, ProtocolError) as e:
            self._post_trouble(e)
            raise
        if self._closing.is_set():
            return
        self._post(NodeTroubled(self.node, self._silence or f"the stream ended: {why}"))
        if time.monotonic() - began < self._timeouts.steady:
            raise TransportError(self.node, f"the stream ended at once: {why}")

    def _prepare(self) -> NodeUp:
        """Deploy, take the node over and launch the workers. Return what to report once its stream begins."""
        with self._io:
            if self._closing.is_set():
                raise TransportError(self.node, "the run ends")
            self._session += 1
            if not self._is_connected:
                self._transport.connect()
            self._is_connected = False
            deploy(self._transport, self._deployed)
            self._refuse_younger_controller()
            present = take_over(self._transport, self._deployed)
            if self.workers.launch:
                self._launch()
            self._heard_at = time.monotonic()
        return NodeUp(self.node, self._session, present)

    def _refuse_younger_controller(self) -> None:
        """Raise TakenOverError if the node obeys a controller with a higher epoch."""
        epoch = younger_epoch(self._transport, self._deployed)
        if epoch is not None:
            self._post(NodeTakenOver(self.node, epoch))
            raise TakenOverError(f"{self.node}: a younger controller (epoch {epoch}) took this run over")

    def _launch(self) -> None:
        """Start the workers when the node is free. Raises LeftOutError if it is occupied and we skip it."""
        self._transport.run(["rm", "-f", f"{self.folder}/control/stop"], timeout=20.0)
        self.workers.engine.prepare()
        with self._admission(self._closing, self._post_busy):
            if not self._closing.is_set():
                self.workers.start()

    def _follow(self, up: NodeUp) -> str:
        """Read the stream to its end and return why it ended. Raises LeftOutError if the node is left out."""
        self._silence = ""
        self._patience_s = self._timeouts.first_word
        offsets = json.dumps(follow_argument(self._offsets), separators=(",", ":"))
        channel = self._transport.open(["sh", f"{self.folder}/follow.sh", "--from", offsets])
        self._close_channel = channel.close
        if self._closing.is_set():
            channel.close()
        stream = NodeStream(up, self._offsets, self._admission, self._post, self._post_busy)
        try:
            for frame in read_frames(channel.read):
                self._heard_at = math.inf
                stream.handle(frame)
                if isinstance(frame, Beat):
                    self._revive_dead(frame)
                self._patience_s = self._timeouts.silence
                self._heard_at = time.monotonic()
        finally:
            channel.close()
            why = channel.error()
        return why

    def _revive_dead(self, beat: Beat) -> None:
        for slot in self.workers.dead(beat):
            self._writes.put((None, partial(self._revive, slot)))

    def _post_busy(self, doing: str, detail: str) -> None:
        self._post(NodeBusy(self.node, doing, detail))

    def _post_trouble(self, error: Exception) -> None:
        self._post(NodeTroubled(self.node, str(error).removeprefix(f"{self.node}: ")))

    def _write_loop(self) -> None:
        while True:
            entry = self._writes.get()
            if entry is None:
                return
            session, write = entry
            try:
                with self._io:
                    if session in (None, self._session):
                        write()
            except NodeError as e:
                self._post_trouble(e)
                self._close_channel()  # the next preparation finds out what arrived

    def _take_back(self, name: InboxName) -> None:
        won = self._transport.rename(f"{self.folder}/inbox/{name}", f"{self.folder}/taken/{name}")
        self._post(Taken(self.node, name.attempt, won))

    def _revive(self, slot: str) -> None:
        why_given_up = "" if self._closing.is_set() else self.workers.revive(slot)
        if why_given_up:
            self._post(SlotLost(self.node, slot, why_given_up))
