"""The nodes of a run as its loop sees them: which are up, in trouble or given up; their reports, which become events of
the policy; the policy's decisions, which become files on the nodes; and the end of all their workers.

Reports come as messages of the nodes' threads, and as rows that a stream did not deliver. We send specs into inboxes,
take unclaimed ones back, and drain the workers at the end. A shutdown also reaches nodes that were given up or were
still being prepared.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.controller.messages import (
    Beat,
    FromStream,
    Message,
    NodeProgress,
    NodeTakenOver,
    NodeUp,
    StopLimits,
    Taken,
    Timeouts,
)
from orchestrator.controller.node import NodeDriver
from orchestrator.errors import NodeError, TakenOverError
from orchestrator.events import (
    AskCanary,
    AttemptEnded,
    AttemptTaken,
    Decision,
    Event,
    NodeBusy,
    NodeJoined,
    NodeLost,
    NodeTroubled,
    Send,
    SlotLost,
    TakeBack,
)
from orchestrator.ledger.ingest import Chunk, Ingest
from orchestrator.ledger.reader import LeftOut
from orchestrator.ledger.writer import Ledger
from orchestrator.paths import RunConfig
from orchestrator.policy import Policy
from orchestrator.reasons import Reason
from orchestrator.view.live import LiveStatus
from worker.protocol import BlocklistVerdict, InboxName, Spec, SpecShape, TableKernel


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


MAX_LINE = 64 * 1024


class NodeLog:
    """The log file of a node, with lines `[slot] line`. Its length is committed together with the streams' offsets.

    Bytes beyond the committed length were written by a controller that died before its commit. They are cut off,
    because the stream delivers them again.
    """

    def __init__(self, ledger: Ledger, node: str, folder: Path) -> None:
        self._ledger, self._node = ledger, node
        self._path = folder / f"{node}.log"
        self._rest: dict[str, bytes] = {}
        self._length = ledger.offsets(node).get(("log", ""), 0)
        with self._path.open("ab") as f:
            f.truncate(self._length)

    def add(self, chunk: Chunk) -> None:
        """Append the whole lines of a chunk; call within the ledger's transaction."""
        rest = self._rest.get(chunk.slot, b"")
        data = rest + chunk.data
        end = data.rfind(b"\n") + 1
        if not end and len(data) > MAX_LINE:
            end = len(data)
        self._rest[chunk.slot] = data[end:]
        if not end:
            return
        tag = f"[{chunk.slot}] ".encode()
        text = b"".join(tag + line + b"\n" for line in data[:end].removesuffix(b"\n").split(b"\n"))
        with self._path.open("r+b") as f:
            f.seek(self._length)
            f.write(text)
        self._length += len(text)
        self._ledger.set_offset(self._node, "", "log", self._length)
        self._ledger.set_offset(self._node, chunk.slot, "L", chunk.offset - len(rest) + end)


VANISHED = "its end was not recorded, and the node no longer knows it"


class NodeReports:
    """Puts reports of a run's nodes into the ledger, registry and live status. `look`: looks at once what became of a
    node's lease. `logs`: folder of the nodes' logs."""

    def __init__(
        self,
        run: str,
        epoch: int,
        ledger: Ledger,
        policy: Policy,
        registry: NodeRegistry,
        ingest: Ingest,
        live_status: LiveStatus,
        look: Callable[[str], object],
        logs: Path,
    ) -> None:
        self._run, self._epoch = run, epoch
        self._ledger, self._policy, self._registry = ledger, policy, registry
        self._ingest, self._live_status, self._look = ingest, live_status, look
        self._log_folder = logs
        self._logs: dict[str, NodeLog] = {}
        self._missed: dict[str, set[str]] = {}
        """Node -> attempts that it should hold, but that its last beat lacks."""

        self.read_out: set[str] = set()
        """Nodes whose records were read to the end."""

    def events_of(self, message: Message) -> list[Event]:
        """The events that a message means for the policy. Call it within a transaction of the ledger. Raises
        TakenOverError."""
        match message:
            case FromStream(node, frame):
                return self._from_stream(node, frame)
            case NodeUp(node, session, present):
                if node not in self._registry.drivers:
                    return []
                self._registry.arrived(node, session)
                lost = [a.id for a in self._policy.outstanding() if a.node == node and a.id not in present]
                return [*(AttemptTaken(a, True) for a in lost), NodeJoined(node, self._registry.drivers[node].slots)]
            case Taken(node, attempt, won):
                return [AttemptTaken(attempt, won)] if attempt in self._policy.state.open_attempts else []
            case SlotLost(node):
                return [message] if node in self._registry.drivers else []
            case NodeTroubled(node, detail):
                if node not in self._registry.drivers:
                    return []  # its lease is over
                self._look(node)
                first = self._registry.in_trouble(node, detail)
                self._live_status.trouble(node, detail, on_record=first)
                return [message] if first else []
            case NodeProgress(node, detail):
                self._registry.goes_on(node, detail)
                self._live_status.progress(node, detail)
                return []
            case NodeBusy(node, doing, detail):
                gone = self._registry.node_occupied(node, doing, detail)
                return [message, NodeLost(node, f"occupied: {detail}")] if gone else [message]
            case NodeTakenOver(node, epoch):
                raise TakenOverError(
                    f"a younger controller took run {self._run} over (node {node} obeys epoch {epoch}, this is "
                    f"epoch {self._epoch}); this one ends and changes nothing more"
                )

    def unread(self, rows: Iterable[tuple[str, Chunk]]) -> list[FromStream]:
        """The part of each file that the stream did not deliver."""
        out = []
        for node, file in rows:
            at = self._ledger.offsets(node).get((file.stream, file.slot), 0)
            if len(file.data) > at:
                out.append(FromStream(node, Chunk(file.stream, file.slot, at, file.data[at:])))
        return out

    def _from_stream(self, node: str, frame: Chunk | Beat) -> list[Event]:
        if isinstance(frame, Beat):
            if frame.epoch > self._epoch:
                return self.events_of(NodeTakenOver(node, frame.epoch))
            if frame.error:
                self._live_status.trouble(node, frame.error)
            if frame.held is None:
                return []
            self.read_out.add(node)
            return [AttemptEnded(a, Reason.DONE, None, VANISHED, 0.0) for a in self._vanished(node, frame.held)]
        if frame.stream == "L":
            if node not in self._logs:
                self._logs[node] = NodeLog(self._ledger, node, self._log_folder)
            self._logs[node].add(frame)
            return []
        return self._ingest.feed(node, frame.slot, frame.data)[0]

    def _vanished(self, node: str, held: frozenset[str]) -> list[str]:
        """Attempts sent a while ago that are missing in two beats in a row: the record of their end is lost."""
        state, before = self._policy.state, time.time() - self._registry.timeouts.vanished
        there = state.nodes[node].slots.values() if node in state.nodes else ()
        sent = [state.attempts[a] for slot in there for a in (slot.running, *slot.queued) if a and a not in held]
        missing = {a.id for a in sent if a.sent_at < before and not a.is_being_taken}
        gone, self._missed[node] = missing & self._missed.get(node, set()), missing
        return sorted(gone)


class Outbox:
    """The controller's writes to the nodes. Nothing is sent to a node that is not up; its next NodeUp shows which
    attempts never arrived."""

    def __init__(
        self,
        registry: NodeRegistry,
        config: RunConfig,
        keys: Callable[[int], dict[str, int | str]],
        kernels: Mapping[int, Sequence[TableKernel]],
        epoch: int,
        verdicts: Callable[[str], tuple[list[LeftOut], list[LeftOut]]],
    ) -> None:
        """`kernels`: shape id -> the only kernels to measure. `verdicts`: see LedgerReader.blocklist_verdicts."""
        self._kernels, self._verdicts = kernels, verdicts
        self._registry, self._config, self._keys, self._epoch = registry, config, keys, epoch
        self._names: dict[str, InboxName] = {}

    def carry_out(self, decision: Decision) -> None:
        """Carry out a decision. Decisions that only change the state need no action."""
        match decision:
            case Send(attempt, node, slot, seq, ids):
                name = self._names[attempt] = InboxName(seq, slot, attempt)
                shapes = tuple(SpecShape(s, self._keys(s)) for s in ids)
                self._put(node, name, self._with_verdicts(self._make_spec(attempt, "group", attempt, shapes), node))
            case TakeBack(attempt, node):
                known = self._names.get(attempt)
                if known is not None and node in self._registry.up:
                    self._registry.drivers[node].take_back(self._registry.sessions[node], known)
            case AskCanary(node, slot, attempt):
                self._put(node, InboxName(0, slot, attempt), self._make_spec(attempt, "canary", "", ()))

    def drain(self) -> None:
        """Make every worker finish its attempt and claim no more. Send blocklist verdicts that no spec has carried."""
        for driver in self._registry.reached():
            files = {"control/stop": b"drain\n"}
            verdicts = self._with_verdicts(self._make_spec("verdicts", "canary", "", ()), driver.node)
            if verdicts.refuted or verdicts.confirmed:
                files = {"control/verdicts.json": verdicts.dumps(), **files}
            driver.put(self._registry.sessions[driver.node], files)

    def _put(self, node: str, name: InboxName, spec: Spec) -> None:
        if node in self._registry.up:
            self._registry.drivers[node].put(self._registry.sessions[node], {f"inbox/{name}": spec.dumps()})

    def _with_verdicts(self, spec: Spec, node: str) -> Spec:
        """The spec, with verdicts on candidates in the node's blocklist added."""
        ran, faulted = (
            [
                BlocklistVerdict(family=spec.family, key=[*w.key], candidate=[*w.candidate], slot=w.gpu, t=w.t)
                for w in which
            ]
            for which in self._verdicts(node)
        )
        return replace(spec, refuted=ran, confirmed=faulted)

    def _make_spec(self, attempt: str, kind: str, group: str, shapes: tuple[SpecShape, ...]) -> Spec:
        c = self._config
        return Spec(
            attempt=attempt, run=c.run, epoch=self._epoch, kind=kind, group=group, family=c.family, tuner=c.tuner,
            shapes=shapes, watchdog_s=c.watchdog_s, err_ratio=c.err_ratio, options=dict(c.options),
            only={str(x.id): [k._asdict() for k in self._kernels[x.id]] for x in shapes if x.id in self._kernels},
        )  # fmt: skip


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
                if kill and not alive:
                    break
                driver.workers.stop(kill=kill)  # the dead ones, too: a kept container must not come back
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
