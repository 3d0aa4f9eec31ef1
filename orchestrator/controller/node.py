"""Drives one node with two threads. They deploy, launch, follow and write, and report to the loop as messages.

The loop calls `start` once, then `put` and `take_back` for each decision and `check_pulse` in each turn, and at the end
`leave` and `close`. shutdown.py ends the workers before that: `connect_to_stop` (only for a node that is not up),
`bring_home`, `keep_results`, `tidy`.

The reader prepares the node and then reads its stream. After any failure it posts `NodeTroubled`, pauses, and starts
from the beginning, so the first start and a recovery are the same code. The writer sends specs and control files.
Preparations are numbered, and the number is called a *session*. A write for an earlier session is dropped, because the
preparation since then has already told the controller that it never arrived.
"""

from __future__ import annotations

import json
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tenacity

from orchestrator.controller.context import Timeouts
from orchestrator.controller.messages import Beat, FromStream, Message, NodeTakenOver, NodeUp, Taken, read_frames
from orchestrator.controller.node_workers import NodeWorkers
from orchestrator.engines import Engine
from orchestrator.errors import LeftOutError, NodeError, TakenOverError, TransportError
from orchestrator.events import NodeBusy, NodeTroubled, SlotLost
from orchestrator.ledger.ingest import Chunk
from orchestrator.machines.admission import NodeAdmission
from orchestrator.machines.node_folder import attempts_in, bring_home, missing_files, take_back_all
from orchestrator.machines.occupancy import closed_lock
from orchestrator.transport.base import RemoteFile, Transport
from worker.protocol import InboxName, ProtocolError

EVENTS_FILE = re.compile(r"[0-9]{1,4}\.jsonl\b")
"""The name of a slot's file of records, `3.jsonl`, with which an error in a beat begins."""
CUT_OFF_S = 1.0
"""A thread whose calls were cut off may need this long to notice."""


@dataclass(frozen=True, slots=True)
class DeployedNode:
    """The files and folders that a driver deploys to a node, and how it starts the workers there."""

    folder: str
    files: Mapping[str, RemoteFile]
    """Path below the folder -> file."""
    folders: Sequence[str]
    """Folders that must exist before a worker starts."""
    slots: tuple[str, ...]
    env: Mapping[str, str]
    """Variables of the workers that are in no file."""
    epoch: int
    offsets: Mapping[tuple[str, str], int]
    """The next byte to read of each (stream, slot)."""
    launch: bool
    """False takes over the running workers and starts none."""
    results: str | None = None
    """Folder on the node for results that stay there after the run."""
    home: Path | None = None
    """Local folder for reproductions of faults, if the tuner writes them."""
    is_connected: bool = False
    """The transport is connected and was just used."""


@dataclass(slots=True)
class FollowedStream:
    """The state of one stream, from its frames so far."""

    is_up: bool = False
    """The node was reported as up."""
    waits_for: str = ""
    """The other runs that hold devices of our workers."""
    closed_lock: str = ""
    """The last lock that a worker could not open."""


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
        self._session = 0
        self._writes: queue.SimpleQueue[tuple[int | None, Callable[[], None]] | None] = queue.SimpleQueue()
        """(the session that it is for, None for any; what to do)."""
        self._close_channel: Callable[[], None] = lambda: None
        self._heard = time.monotonic()
        self._silence = ""
        self._timeouts = timeouts
        self._patience_s = timeouts.first_word
        self._reader = threading.Thread(target=self._read_loop, name=f"read {self.node}", daemon=True)
        self._writer = threading.Thread(target=self._write_loop, name=f"write {self.node}", daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    def put(self, session: int, files: dict[str, bytes]) -> None:
        """Write files into the node folder (paths relative to it), soon."""
        real = {n: RemoteFile(d) for n, d in files.items()}
        self._writes.put((session, lambda: self._transport.put(self.folder, real)))

    def take_back(self, session: int, name: InboxName) -> None:
        self._writes.put((session, partial(self._take_back, name)))

    def check_pulse(self) -> None:
        """Close a stream that has been silent for too long. The reader then starts again."""
        silent = time.monotonic() - self._heard
        if silent > self._patience_s:
            self._heard = time.monotonic()
            self._silence = f"no word for {silent:.0f} s"
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

    def bring_home(self) -> None:
        """Copy reproductions of faults into the run's folder. Raises NodeError, OSError."""
        if self._deployed.home is not None:
            bring_home(self._transport, self.folder, self._deployed.home)

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

    def _read_loop(self) -> None:
        t = self._timeouts
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((NodeError, ProtocolError)),
            wait=tenacity.wait_exponential(multiplier=t.backoff, max=t.longest_backoff)
            + tenacity.wait_random(0, t.jitter),
            stop=tenacity.stop_when_event_set(self._closing),
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )
        while not self._closing.is_set():
            try:
                retrying(self._session_once)
            except (TakenOverError, LeftOutError):
                return
            except (NodeError, ProtocolError):
                if not self._closing.is_set():
                    raise

    def _session_once(self) -> None:
        """Prepare the node and read its stream to the end. A stream that worked for a while resets the backoff."""
        try:
            present = self._prepare()
            if self._closing.is_set():
                return
            began = time.monotonic()
            why = self._follow(present)
        except (NodeError, ProtocolError) as e:
            self._post(NodeTroubled(self.node, str(e).removeprefix(f"{self.node}: ")))
            raise
        if self._closing.is_set():
            return
        self._post(NodeTroubled(self.node, self._silence or f"the stream ended: {why}"))
        if time.monotonic() - began < self._timeouts.steady:
            raise TransportError(self.node, f"the stream ended at once: {why}")

    def _prepare(self) -> frozenset[str]:
        """Deploy, take the node over, take back unclaimed attempts, launch. Return the claimed and ended attempts."""
        with self._io:
            if self._closing.is_set():
                raise TransportError(self.node, "the run ends")
            self._session += 1
            if not self._is_connected:
                self._transport.connect()
            self._is_connected = False
            self._deploy()
            self._refuse_younger_controller()
            # before and after the epoch rises, so that no old spec is left, not even an old controller's last one
            take_back_all(self._transport, self.folder)
            self._transport.put(self.folder, {"epoch": RemoteFile(f"{self._deployed.epoch}\n".encode())})
            take_back_all(self._transport, self.folder)
            present = attempts_in(self._transport, self.folder, "claimed", "attempts")
            if self.workers.launch:
                self._transport.run(["rm", "-f", f"{self.folder}/control/stop"], timeout=20.0)
                self.workers.engine.prepare()
                with self._admission(self._closing, self._post_busy):
                    if not self._closing.is_set():
                        self.workers.start()
            self._heard = time.monotonic()
        return frozenset(present)

    def _deploy(self) -> None:
        missing = missing_files(self._transport, self.folder, self._deployed.files)
        self._transport.put(self.folder, missing, self._deployed.folders)
        if self._deployed.results is not None:  # ours, before Docker makes it root's
            self._transport.put(self._deployed.results, {})

    def _refuse_younger_controller(self) -> None:
        """Raise TakenOverError if the node obeys a controller with a higher epoch."""
        epoch = self._transport.run(["cat", f"{self.folder}/epoch"], timeout=20.0).out.strip()[:18]
        if epoch.isdigit() and int(epoch) > self._deployed.epoch:
            self._post(NodeTakenOver(self.node, int(epoch)))
            raise TakenOverError(f"{self.node}: a younger controller (epoch {int(epoch)}) took this run over")

    def _follow(self, present: frozenset[str]) -> str:
        """Read the stream to its end and return why it ended. The node is up from its first frame on, but it is
        occupied while its workers wait for devices that another run holds. Raises LeftOutError if they cannot open a
        device's lock."""
        offsets: dict[str, dict[str, int]] = {"E": {}, "L": {}}
        for (name, slot), offset in self._offsets.items():
            offsets[name][slot] = offset
        self._silence = ""
        self._patience_s = self._timeouts.first_word
        channel = self._transport.open(
            ["sh", f"{self.folder}/follow.sh", "--from", json.dumps(offsets, separators=(",", ":"))]
        )
        self._close_channel = channel.close
        if self._closing.is_set():
            channel.close()
        stream = FollowedStream()
        try:
            for frame in read_frames(channel.read):
                self._heard = math.inf  # if the loop is behind, the silence is our fault
                if isinstance(frame, Beat):
                    self._check_beat(frame, stream)
                self._patience_s = self._timeouts.silence
                if not stream.is_up and not stream.waits_for:
                    stream.is_up = True
                    self._post(NodeUp(self.node, self._session, present))
                if isinstance(frame, Chunk):
                    self._advance_offset(frame)
                else:
                    for slot in self.workers.dead(frame):
                        self._writes.put((None, partial(self._revive, slot)))
                self._post(FromStream(self.node, frame))
                self._heard = time.monotonic()
        finally:
            channel.close()
            why = channel.error()
        return why

    def _check_beat(self, beat: Beat, stream: FollowedStream) -> None:
        """Raise an error if the stream cannot go on, and report whom the workers wait for."""
        unreadable = [error for error in beat.error.split("; ") if EVENTS_FILE.match(error)]
        if unreadable:
            # A slot's results file (see worker.agent.follow) can no longer be read, and the node would count as
            # working for ever. An unreadable log does not matter.
            raise ProtocolError(f"{self.node}: {'; '.join(unreadable)}")
        if beat.closed_lock not in ("", stream.closed_lock):
            stream.closed_lock = beat.closed_lock
            self._admission.decide((closed_lock(beat.closed_lock),), self._post_busy)
        if beat.waits == stream.waits_for:
            return
        if stream.is_up:  # the next preparation takes back its specs
            raise TransportError(self.node, f"its devices are held by {beat.waits}")
        stream.waits_for = beat.waits
        if beat.waits:
            self._post_busy("wait", beat.waits)
        else:
            self._post_busy("free", "its devices are ours now")

    def _advance_offset(self, chunk: Chunk) -> None:
        key = (chunk.stream, chunk.slot)
        expected = self._offsets.get(key, 0)
        if chunk.offset != expected:
            raise ProtocolError(f"{self.node}: {key} continues at {chunk.offset}, not {expected}")
        self._offsets[key] = chunk.offset + len(chunk.data)

    def _post_busy(self, doing: str, detail: str) -> None:
        self._post(NodeBusy(self.node, doing, detail))

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
                self._post(NodeTroubled(self.node, str(e).removeprefix(f"{self.node}: ")))
                self._close_channel()  # the next preparation finds out what arrived

    def _take_back(self, name: InboxName) -> None:
        won = self._transport.rename(f"{self.folder}/inbox/{name}", f"{self.folder}/taken/{name}")
        self._post(Taken(self.node, name.attempt, won))

    def _revive(self, slot: str) -> None:
        why_given_up = "" if self._closing.is_set() else self.workers.revive(slot)
        if why_given_up:
            self._post(SlotLost(self.node, slot, why_given_up))
