"""The story of a group, shape or node in sentences with times, made from the journal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator import events as ev
from orchestrator.busy import busy_sentence
from orchestrator.errors import InputError
from orchestrator.ledger import LedgerReader, history
from orchestrator.scheduling import Policy
from orchestrator.shapes import describe

if TYPE_CHECKING:
    from orchestrator.paths import RunPaths

MOST_STORIES = 20


@dataclass(frozen=True, slots=True)
class Story:
    """What happened to one thing, oldest first, and how it stands now."""

    subject: str
    kind: str
    now: str
    steps: list[tuple[float, str, ev.Record]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The stories that answer the question."""

    run: str
    stories: list[Story]

    def lines(self) -> list[str]:
        if not self.stories:
            return ["nothing went wrong so far: no group failed, moved or was split (name a group to hear its story)"]
        out: list[str] = []
        for s in self.stories:
            out.append(f"{s.kind} {s.subject}: {s.now}")
            out += [f"  {time.strftime('%H:%M:%S', time.localtime(t))}  {text}" for t, text, _ in s.steps]
        return out

    def to_json(self) -> dict[str, Any]:
        import json

        return {
            "run": self.run,
            "stories": [
                {
                    "kind": s.kind,
                    "subject": s.subject,
                    "now": s.now,
                    "steps": [
                        {"t": t, "text": text, "type": type(r).__name__, **json.loads(ev.to_json(r))}
                        for t, text, r in s.steps
                    ],
                }
                for s in self.stories
            ],
        }


def explain(paths: RunPaths, what: str | None) -> Explanation:
    """The story of `what` (a group, a shape as 16x1280x8192 or its number, a node), or of all that did not go well."""
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        teller = _Teller(ledger)
        if what is None:
            return Explanation(paths.run, [teller.group(g) for g in teller.troubled()][:MOST_STORIES])
        if what in teller.groups:
            return Explanation(paths.run, [teller.group(what)])
        if what in teller.nodes:
            return Explanation(paths.run, [teller.node(what)])
        shape = teller.find_shape(what)
        if shape is not None:
            return Explanation(paths.run, [teller.shape(shape)])
        raise InputError(
            f"run {paths.run} has no group, shape or node {what!r}"
            f" (groups: {', '.join(list(teller.groups)[:6])} ...; nodes: {', '.join(sorted(teller.nodes))})"
        )


class _Teller:
    def __init__(self, ledger: LedgerReader) -> None:
        self._ledger = ledger
        self._family = ledger.family
        self._policy = Policy()
        self.nodes: set[str] = set()
        for t, record in ledger.journal_records():
            self._policy.apply(record, t)
            if isinstance(record, ev.NodeExpected | ev.NodeBusy | ev.NodeJoined | ev.NodeTroubled | ev.NodeLost):
                self.nodes.add(record.node)
        self.groups = {g.id: g for g in ledger.groups()}
        self._shapes = {s.id: s for s in ledger.shapes()}

    def troubled(self) -> list[str]:
        """Groups that were split, have a failed shape, or needed more than one attempt."""
        failed = {s.group for s in self._shapes.values() if s.state == "failed"}
        return [g.id for g in self.groups.values() if g.state == "split" or g.id in failed or g.attempts > 1]

    def find_shape(self, what: str) -> int | None:
        if what.isdigit() and int(what) in self._shapes:
            return int(what)
        return next((i for i in self._shapes if self.name(i) == what), None)

    def name(self, shape: int) -> str:
        key = dict(zip(self._family.key_names, self._shapes[shape].key, strict=True))
        return describe(key)

    def group(self, id_: str) -> Story:
        g = self.groups[id_]
        now = f"{g.state}, {g.shapes} shapes, {g.pending} of them not settled"
        if g.state == "waiting":
            now += f": {self._policy.why(id_)}"
        return Story(id_, "group", now, self._told(history.of_group(self._ledger, id_)))

    def shape(self, id_: int) -> Story:
        s = self._shapes[id_]
        now = s.state + (f" ({s.reason}): {s.detail}" if s.state == "failed" else "")
        if s.state == "pending":
            now += f": {self._policy.why(s.group or '')}"
        return Story(self.name(id_), "shape", now, self._told(history.of_shape(self._ledger, id_)))

    def node(self, name: str) -> Story:
        tuned, failed = self._ledger.per_node().get(name, (0, 0))
        now = f"{tuned} shapes tuned, {failed} failed there"
        return Story(name, "node", now, self._told(history.of_node(self._ledger, name)))

    def _told(self, entries: list[tuple[float, ev.Record]]) -> list[tuple[float, str, ev.Record]]:
        return [(t, sentence(r, self._named), r) for t, r in entries]

    def _named(self, shape: int) -> str | None:
        return self.name(shape) if shape in self._shapes else None


def sentence(record: ev.Record, named: Callable[[int], str | None]) -> str:
    """One record in words; `named` gives the name of a shape, None where there is none of that number."""

    def name(shape: int) -> str:
        return named(shape) or f"shape {shape}"

    match record:
        case ev.GroupAdded(_, shapes, cost):
            return f"planned with {len(shapes)} shapes, estimated {cost:.1f} s"
        case ev.Send(attempt, _, node, slot, _):
            return f"attempt {attempt} sent to {node}" + (f", slot {slot}" if slot else "")
        case ev.AttemptStarted(attempt, node, slot):
            return f"attempt {attempt} started on {node} slot {slot}"
        case ev.ShapeStarted(attempt, shape):
            return f"{name(shape)} in flight ({attempt})"
        case ev.ShapeTuned(attempt, shape):
            return f"{name(shape)} tuned ({attempt})"
        case ev.ShapeRefused(attempt, shape, reason, detail):
            return f"{name(shape)}: {reason.message()}: {detail} ({attempt})"
        case ev.AttemptEnded(attempt, outcome, in_flight, detail, seconds):
            at = f" at {name(in_flight)}" if in_flight is not None and named(in_flight) else ""
            return f"attempt {attempt} ended after {seconds:.1f} s: {outcome.message()}{at}" + (
                f": {detail}" if detail else ""
            )
        case ev.AttemptTaken(attempt, won):
            how = "taken back unclaimed" if won else "claimed before it could be taken back"
            return f"attempt {attempt} was {how}"
        case ev.TakeBack(attempt, node):
            return f"attempt {attempt} is to be taken back from {node}"
        case ev.Split(group, children, why):
            parts = ", ".join(f"{c} ({len(s)})" for c, s in children)
            return f"group {group} split into {parts}: {why}"
        case ev.Requeue(_, why):
            return f"queued again: {why}"
        case ev.FailShape(shape, reason, detail, _, confirmed):
            sure = "" if confirmed or reason.is_verdict else " (unconfirmed)"
            return f"{name(shape)} failed: {reason.message()}{sure}: {detail}"
        case ev.RetryAsked(shapes):
            return f"a person asked for {len(shapes)} failed shapes to be tried again"
        case ev.NodeExpected(node, slots):
            return f"{node} is being prepared ({len(slots)} slots)"
        case ev.NodeJoined(node, slots):
            return f"{node} joined with {len(slots)} slots"
        case ev.NodeTroubled(node, detail, since):
            well = time.strftime("%H:%M:%S", time.localtime(since))
            return f"{node} is in trouble since {well}, and is tried again: {detail}"
        case ev.NodeLost(node, detail):
            return f"{node} was given up: {detail}"
        case ev.NodeDraining(node):
            return f"{node} is draining"
        case ev.NodeBusy(node, doing, detail):
            return busy_sentence(node, doing, detail)
        case ev.SlotLost(node, slot, detail):
            return f"{node} slot {slot} was lost: {detail}"
        case ev.CanaryPassed(node, slot, us):
            return f"{node} slot {slot}: the canary passed ({us:.0f} us)"
        case ev.CanaryFailed(node, slot, detail):
            return f"{node} slot {slot}: the canary failed: {detail}"
        case ev.Quarantine(node, slot, why, until):
            return f"{node} slot {slot} quarantined until {time.strftime('%H:%M:%S', time.localtime(until))}: {why}"
        case ev.AskCanary(node, slot, _):
            return f"{node} slot {slot} was asked for a canary"
        case ev.StopAsked():
            return "a person asked to stop"
        case ev.Resumed(epoch):
            return f"a controller took the run up (epoch {epoch})"
        case _:
            return type(record).__name__
