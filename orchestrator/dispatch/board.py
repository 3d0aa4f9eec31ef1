"""The picture of the run in memory: told every event and decision, asked by the live view. Decides nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from orchestrator.busy import busy_sentence
from orchestrator.dispatch.frames import Beat
from orchestrator.events import (
    AttemptEnded,
    AttemptStarted,
    CanaryFailed,
    CanaryPassed,
    Decision,
    Event,
    FailShape,
    NodeBusy,
    NodeDraining,
    NodeJoined,
    NodeLost,
    Quarantine,
    Send,
    ShapeStarted,
    ShapeTuned,
    SlotLost,
    Split,
)
from orchestrator.reasons import Reason
from orchestrator.scheduling import Policy
from orchestrator.status import NodeStatus, RunStatus, SlotStatus

RATE_WINDOW_S = 300.0


class Board:
    """`describe` names a shape for people, `cost_s` is the estimated seconds of one on a slot."""

    def __init__(
        self,
        run: str,
        family: str,
        tuner: str,
        total: int,
        skipped: int,
        nodes: dict[str, tuple[str, ...]],
        describe: Callable[[int], str],
        cost_s: Callable[[int], float],
        cost_left_s: float,
        started: float,
    ) -> None:
        self._status = RunStatus(
            run, "preparing", total=total, skipped=skipped, family=family, tuner=tuner, started=started
        )
        self._status.nodes = [NodeStatus(n, slots=[SlotStatus(s) for s in slots]) for n, slots in nodes.items()]
        self._nodes = {n.name: n for n in self._status.nodes}
        self._describe, self._cost_s, self._cost_left = describe, cost_s, cost_left_s
        self._where: dict[str, tuple[NodeStatus, SlotStatus]] = {}
        self._sent: dict[str, str] = {}
        self._settled_at: deque[float] = deque()
        self._spent = self._estimated = 0.0
        self._notes: list[tuple[str, bool]] = []

    # --- what happened --------------------------------------------------------------------------------------------

    def event(self, event: Event, now: float) -> None:
        match event:
            case NodeJoined(node, _):
                n = self._node(node)
                n.state, n.detail = "ready", ""
            case NodeLost(node, detail):
                n = self._node(node)
                n.state, n.detail = "unreachable", detail
                self._note(f"{node}: given up for now: {detail}", bad=True)
            case NodeBusy(node, doing, detail):
                self._node(node).detail = "" if doing == "free" else busy_sentence(node, doing, detail)
                self._note(busy_sentence(node, doing, detail), bad=doing != "free")
            case NodeDraining(node):
                self._node(node).state = "draining"
            case CanaryPassed(node, slot, _):
                self._slot(node, slot).state = "idle"
                self._status.state = "running"
            case CanaryFailed(node, slot, detail):
                self._slot(node, slot).state = "canary failed"
                self._note(f"{node} slot {slot}: the canary failed: {detail}", bad=True)
            case SlotLost(node, slot, detail):
                self._slot(node, slot).state = "lost"
                self._note(f"{node} slot {slot}: lost: {detail}", bad=True)
            case AttemptStarted(attempt, node, slot):
                s = self._slot(node, slot)
                s.attempt, s.state, s.since, s.doing = attempt, "busy", now, attempt
                self._where[attempt] = (self._node(node), s)
            case ShapeStarted(attempt, shape):
                if attempt in self._where:
                    s = self._where[attempt][1]
                    s.doing, s.since = f"{self._describe(shape)}  ({attempt})", now
            case ShapeTuned(attempt, shape):
                self._settled(shape, now)
                if attempt in self._where:
                    node_status, s = self._where[attempt]
                    node_status.tuned += 1
                    self._spent += now - s.since
                    self._estimated += self._cost_s(shape)
            case AttemptEnded(attempt, outcome, in_flight, detail, _):
                self._ended(attempt, outcome, in_flight, detail)
            case _:
                pass

    def decision(self, decision: Decision, now: float) -> None:
        match decision:
            case Send(attempt, _, node, _, _):
                self._sent[attempt] = node
            case FailShape(shape, reason, detail, attempt, confirmed):
                self._settled(shape, now)
                sent_to = self._sent.get(attempt or "")
                if sent_to in self._nodes:
                    self._nodes[sent_to].failed += 1
                sure = "" if confirmed or reason.is_verdict else " (unconfirmed)"
                self._note(f"{self._describe(shape)} failed: {reason.message()}{sure}: {detail}", bad=True)
            case Split(group, children, why):
                self._note(f"group {group} split into {', '.join(c for c, _ in children)}: {why}")
            case Quarantine(node, slot, why, until):
                self._slot(node, slot).state = "quarantined"
                self._note(f"{node} slot {slot}: quarantined for {until - now:.0f} s: {why}", bad=True)
            case _:
                pass

    def _ended(self, attempt: str, outcome: Reason, in_flight: int | None, detail: str) -> None:
        where = self._where.pop(attempt, None)
        if where is not None:
            slot = where[1]
            slot.attempt, slot.state, slot.doing = None, "idle", ""
        if outcome not in (Reason.DONE, Reason.CANCELLED):
            place = f" on {where[0].name} slot {where[1].slot}" if where else ""
            shape = f" at {self._describe(in_flight)}" if in_flight is not None else ""
            self._note(f"attempt {attempt}{place}: {outcome.message()}{shape}: {detail}", bad=True)

    def up(self, node: str) -> None:
        """The node was prepared."""
        self._node(node).detail = ""

    def joins(self, node: str, slots: tuple[str, ...]) -> None:
        """A node was added to the run."""
        self._node(node).slots = [SlotStatus(s) for s in slots]

    def trouble(self, node: str, detail: str) -> None:
        """The node does not answer, or could not be prepared."""
        n = self._node(node)
        if n.detail != detail:
            self._note(f"{node}: {detail}", bad=True)
        n.detail = detail
        if n.state not in ("preparing", "draining"):
            n.state = "unreachable"

    def progress(self, node: str, detail: str) -> None:
        """Its preparation goes on."""
        self._node(node).detail = detail

    def beat(self, node: str, beat: Beat) -> None:
        if beat.error:
            self.trouble(node, beat.error)

    # --- what is asked --------------------------------------------------------------------------------------------

    def take_notes(self) -> list[tuple[str, bool]]:
        """(text, bad) of what happened since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def status(self, policy: Policy) -> RunStatus:
        s, now, p = self._status, time.time(), policy.progress()
        s.tuned, s.failed, s.running = p.tuned, p.failed, sum(n.running for n in s.nodes)
        while self._settled_at and now - self._settled_at[0] > RATE_WINDOW_S:
            self._settled_at.popleft()
        if len(self._settled_at) > 1 and now > self._settled_at[0]:
            s.rate_per_min = (len(self._settled_at) - 1) * 60.0 / (now - self._settled_at[0])
        slots = sum(1 for n in s.nodes for x in n.slots if x.state in ("idle", "busy")) or 1
        ratio = self._spent / self._estimated if self._estimated > 0 else 1.0
        s.eta_s = self._cost_left * ratio / slots
        for n in s.nodes:
            if n.state in ("ready", "busy"):
                n.state = "busy" if n.running else "ready"
            if n.slots and all(x.state == "quarantined" for x in n.slots):
                n.state = "quarantined"
        return s

    def _settled(self, shape: int, now: float) -> None:
        self._settled_at.append(now)
        self._cost_left = max(0.0, self._cost_left - self._cost_s(shape))

    def _node(self, name: str) -> NodeStatus:
        """A node that left the inventory may still be spoken of."""
        if name not in self._nodes:
            self._nodes[name] = NodeStatus(name)
            self._status.nodes.append(self._nodes[name])
        return self._nodes[name]

    def _slot(self, node: str, slot: str) -> SlotStatus:
        n = self._node(node)
        for s in n.slots:
            if s.slot == slot:
                return s
        n.slots.append(SlotStatus(slot))
        return n.slots[-1]

    def _note(self, text: str, *, bad: bool = False) -> None:
        self._notes.append((text, bad))
