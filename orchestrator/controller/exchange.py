"""Connects the loop with the nodes: turns reports into events of the policy, and decisions into files.

Reports come as messages of the nodes' threads, and as rows that a stream did not deliver. We send specs into inboxes,
take unclaimed ones back, and drain the workers at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.controller.messages import Beat, FromStream, Message, NodeProgress, NodeTakenOver, NodeUp, Taken
from orchestrator.controller.node_registry import NodeRegistry
from orchestrator.errors import TakenOverError
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

if TYPE_CHECKING:  # avoids a cycle: leases.py drives nodes, and their messages come here
    from orchestrator.controller.leases import LeasedNodes


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
    """Puts reports of a run's nodes into the ledger, registry and live status. `logs`: folder of the nodes' logs."""

    def __init__(
        self,
        run: str,
        epoch: int,
        ledger: Ledger,
        policy: Policy,
        registry: NodeRegistry,
        ingest: Ingest,
        live_status: LiveStatus,
        leases: LeasedNodes | None,
        logs: Path,
    ) -> None:
        self._run, self._epoch = run, epoch
        self._ledger, self._policy, self._registry = ledger, policy, registry
        self._ingest, self._live_status, self._leases = ingest, live_status, leases
        self._logs = logs
        self._missed: dict[str, set[str]] = {}
        """Node -> attempts that it should hold, but that its last beat lacks."""
        self._logbooks: dict[str, NodeLog] = {}
        self.read_out: set[str] = set()
        """Nodes whose records were read to the end."""

    def open(self, node: str) -> None:
        """Start a log of the node, or append to the existing one."""
        self._logbooks[node] = NodeLog(self._ledger, node, self._logs)

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
                return [AttemptTaken(attempt, won)] if attempt in self._policy.state.open else []
            case SlotLost(node):
                return [message] if node in self._registry.drivers else []
            case NodeTroubled(node, detail):
                if node not in self._registry.drivers:
                    return []  # its lease is over
                if self._leases is not None:
                    self._leases.look(node)
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
            if node not in self._logbooks:
                self.open(node)
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
            self._logbooks[node].add(frame)
            return []
        return self._ingest.feed(node, frame.slot, frame.data)[0]

    def _vanished(self, node: str, held: frozenset[str]) -> list[str]:
        """Attempts sent a while ago that are missing in two beats in a row: the record of their end is lost."""
        state, before = self._policy.state, time.time() - self._registry.timeouts.vanished
        there = state.nodes[node].slots.values() if node in state.nodes else ()
        sent = [state.attempts[a] for slot in there for a in (slot.running, *slot.queued) if a and a not in held]
        missing = {a.id for a in sent if a.sent_at < before and not a.taking}
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
