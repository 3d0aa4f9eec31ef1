"""Stories of a run, for `explain`: what happened to a group, shape, node or candidate, its state, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from orchestrator import events as ev
from orchestrator.errors import InputError
from orchestrator.ledger import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.policy import Policy
from orchestrator.reasons import Reason
from orchestrator.run.view.places import Node
from orchestrator.run.view.reading import (
    FaultedCandidate,
    SlotWarning,
    ViewReader,
    faulted,
    reproductions,
    slot_warnings,
)
from orchestrator.run.view.sentences import INCIDENTS, advice, clock, sentence
from worker.text import and_more, plural

_OF_A_SHAPE = (ev.ShapeStarted, ev.ShapeTuned, ev.ShapeRefused, ev.FailShape, ev.SettleShape)
JournalEntry = tuple[float, ev.Record]


def of_group(ledger: LedgerReader, group: str, entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """Records of a group, and the verdicts and failures of its shapes."""
    shapes = set(ledger.group_shapes(group))

    def wanted(r: ev.Record) -> bool:
        if isinstance(r, ev.FailShape | ev.SettleShape):
            return r.attempt == group or r.shape in shapes
        if isinstance(r, ev.RetryAsked):
            return not shapes.isdisjoint(r.shapes)
        return getattr(r, "attempt", None) == group

    return [(t, r) for t, r in entries if wanted(r)]


def of_shape(ledger: LedgerReader, shape: int, entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """Records of a shape: the start and end of its groups, and all on the shape itself."""
    groups = {g for (g,) in ledger.query("SELECT grp FROM members WHERE shape=?", (shape,))}

    def wanted(r: ev.Record) -> bool:
        if isinstance(r, _OF_A_SHAPE):
            return r.shape == shape
        if isinstance(r, ev.RetryAsked):
            return shape in r.shapes
        return getattr(r, "attempt", None) in groups

    return [(t, r) for t, r in entries if wanted(r)]


def of_node(ledger: LedgerReader, node: str, entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """Records of a node: joining and leaving, its slots' canaries (not timed ones) and quarantines, its attempts' start
    and end (not their shapes)."""
    attempts = {a.id for a in ledger.attempts(node=node)}

    def wanted(r: ev.Record) -> bool:
        if isinstance(r, (ev.ShapeStarted, ev.ShapeTuned, ev.SettleShape, ev.CanaryTimed)):
            return False
        return getattr(r, "node", None) == node or getattr(r, "attempt", None) in attempts

    return [(t, r) for t, r in entries if wanted(r)]


Step = tuple[float, str, ev.Record | None]
MOST_SHAPES = 5
MOST_SCRIPTS = 3


@dataclass(frozen=True, slots=True)
class Story:
    """Story of one thing: its events, its state now, and what the user can do."""

    subject: str
    kind: str
    now: str
    steps: list[Step] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


class StoryWriter:
    """Stories of one run. `groups`, `nodes`: all of the run."""

    def __init__(self, paths: RunPaths, ledger: LedgerReader) -> None:
        self._paths, self._ledger = paths, ledger
        self._reader, self._policy = ViewReader(), Policy()
        self._view = self._reader.update(ledger)
        self._entries = list(ledger.journal_records())
        for t, record in self._entries:
            self._policy.apply(record, t)
        self.groups = {g.id: g for g in ledger.groups()}
        self.nodes = self._view.places.nodes
        self._shapes = {s.id: s for s in ledger.shapes()}
        self._faulted: list[FaultedCandidate] = faulted(ledger)
        self._slot_warnings: list[SlotWarning] = slot_warnings(ledger)

    def find_shape(self, what: str) -> int | None:
        if what.isdigit() and int(what) in self._shapes:
            return int(what)
        return next((i for i in self._shapes if self._reader.name(i) == what), None)

    # --- all that went wrong ------------------------------------------------------------------------------------------

    def troubles(self, most: int) -> list[Story]:
        """Stories of nodes, groups and candidates with problems, at most `most` of each."""
        troubled = {str(getattr(r, "node", "")) for _, r in self._entries if _kind(r)}
        nodes = [n for n in self.nodes if n in troubled]
        nodes += [n for n in dict.fromkeys(u.node for u in self._slot_warnings) if n not in nodes]
        stories = [self._queue(pool) for pool, leases in self._view.places.queued.items() if leases]
        stories += [self.node(n, brief=True) for n in nodes[:most]]
        stories += [self.group(g) for g in self.troubled()[:most]]
        return stories + [self.candidate(f) for f in self._faulted[:most]]

    def _queue(self, pool: str) -> Story:
        """The leases of a pool that wait, in the scheduler's words."""
        now = sentence(ev.LeasesQueued(pool, self._view.places.queued[pool])).removeprefix(f"{pool}: ")
        return Story(pool, "pool", now, advice=["it waits for its turn; a smaller request may be granted sooner"])

    def troubled(self) -> list[str]:
        """Groups that ended badly, or have a failed or an unconfirmed shape."""
        failed = {s.group for s in self._shapes.values() if s.state == "failed" or s.confirmed is False}
        bad = {r.attempt for _, r in self._entries if isinstance(r, ev.AttemptEnded) and r.outcome is not Reason.DONE}
        return [g for g in self.groups if g in failed or g in bad]

    # --- one thing ----------------------------------------------------------------------------------------------------

    def group(self, id_: str) -> Story:
        g = self.groups[id_]
        now = f"{g.state}, {plural(g.shapes, 'shape')}, {g.pending} of them not settled"
        if g.state == "waiting":
            now += f": {self._policy.why(id_)}"
        members = self._ledger.group_shapes(id_)
        attempts = [a.id for a in self._ledger.attempts(group=id_)]
        return Story(
            id_,
            "group",
            now,
            self._steps(of_group(self._ledger, id_, self._entries)),
            self._advice(members, attempts),
        )

    def shape(self, id_: int) -> Story:
        s = self._shapes[id_]
        now = s.state + (f" ({s.reason})" if s.reason else "")
        now += f": {s.detail}" if s.state in ("failed", "skipped") and s.detail else ""
        if s.state == "pending":
            now += f": {self._policy.why(id_)}"
        if s.state == "tuned" and s.confirmed is not None:
            now += ("" if s.confirmed else ", unconfirmed") + f": {s.detail}"
        notes = [
            f"Candidate {f.kernel} did not come to an end on {_place(f)}: {_why(f)}"
            for f in self._faulted
            if id_ in f.shapes
        ]
        attempts = [r.attempt for _, r in self._entries if isinstance(r, ev.ShapeStarted) and r.shape == id_]
        steps = self._steps(of_shape(self._ledger, id_, self._entries))
        return Story(self._reader.name(id_), "shape", now, steps, notes + self._advice((id_,), attempts))

    def node(self, name: str, *, brief: bool = False) -> Story:
        """`brief`: without the attempts that went well there."""
        node = self.nodes[name]
        of = f"lease {node.lease} on {node.host}; " if node.lease else ""
        now = f"{of}{plural(node.tuned, 'shape')} tuned, {node.failed} failed there; {_state(node)}"
        entries = of_node(self._ledger, name, self._entries)
        kinds = {_kind(r) for _, r in entries} - {""}
        if brief:
            entries = list(_brief(entries))
        steps = self._steps(entries)
        steps += [(u.t, f"{_place(u)} ({u.attempt}): {u.text}", None) for u in self._slot_warnings if u.node == name]
        flags = self._view.places.timed.flags().items()
        now += "".join(f"; slot {slot} is {why}" for (n, slot), why in flags if n == name)
        notes = [] if brief else self._left_out(name)
        return Story(
            name, "node", now, sorted(steps, key=lambda s: s[0]), notes + [INCIDENTS[k] for k in sorted(kinds)]
        )

    def _left_out(self, node: str) -> list[str]:
        """Sentences on the candidates that the node's blocklist makes later runs leave out."""
        found = [f for f in self._faulted if f.node == node]
        notes = [f"Later runs leave out candidate {f.kernel} on {_place(f)}: {_why(f)}" for f in found]
        again = "to try them again, delete .cache/aiter/*/blocklist.jsonl in the node's work folder"
        return [*notes, f"A node leaves out such candidates for seven days; {again}"] if notes else []

    def candidate(self, f: FaultedCandidate) -> Story:
        """Story of a candidate that faulted."""
        names = and_more([self._reader.name(i) for i in f.shapes], MOST_SHAPES)
        now = f"did not come to an end on {_place(f)} at {names}: {_why(f)}"
        advice_ = self._again(f.attempts)[:MOST_SCRIPTS]
        return Story(f"{f.kernel} ({f.backend})" if f.backend else f.kernel, "candidate", now, [], advice_)

    def _advice(self, shapes: Iterable[int], attempts: Iterable[str]) -> list[str]:
        reasons: dict[str, str] = {}
        for s in (self._shapes[i] for i in shapes):
            if s.state == "failed" and s.reason:
                a = self._view.work.attempts.get(s.attempt or "")
                reasons.setdefault(s.reason, a.node if a else "")
        out = [text for reason, node in reasons.items() for text in advice(reason, self._paths.named, node)]
        return out + self._again(attempts)

    def _again(self, attempts: Iterable[str]) -> list[str]:
        found = reproductions(self._paths, dict.fromkeys(attempts))
        return [f"To see the fault again, on that node in the image: {script}" for script in found]

    # --- words --------------------------------------------------------------------------------------------------------

    def _steps(self, entries: list[tuple[float, ev.Record]]) -> list[Step]:
        return [(t, sentence(r, self._named, self._at(r), self._view.places.spot), r) for t, r in entries]

    def _at(self, record: ev.Record) -> str:
        return self._view.place(record.attempt) if isinstance(record, ev.AttemptEnded) else ""

    def _named(self, shape: int) -> str | None:
        return self._reader.name(shape) if shape in self._shapes else None


def _brief(entries: Iterable[tuple[float, ev.Record]]) -> Iterator[tuple[float, ev.Record]]:
    """Yield a node's problems, and what ended each."""
    open_: set[str | None] = set()
    for t, r in entries:
        slot = getattr(r, "slot", None)
        if _kind(r):
            open_.add(slot)
            yield t, r
        elif isinstance(r, ev.NodeJoined | ev.CanaryPassed | ev.NodeBusy) and slot in open_:
            open_.discard(slot)
            yield t, r


def _place(x: FaultedCandidate | SlotWarning) -> str:
    return f"{x.node} slot {x.slot}" if x.slot else x.node


def _why(f: FaultedCandidate) -> str:
    return "; ".join(x for x in (f"{f.status}: {f.detail}" if f.detail else f.status, f.elsewhere) if x)


def _state(node: Node) -> str:
    bad = [f"slot {s.name} {s.state}" + (f" ({s.why})" if s.why else "") for s in node.slots.values() if s.why]
    return "; ".join([node.state + (f" ({node.detail})" if node.detail else ""), *bad])


def _kind(record: ev.Record) -> str:
    """Kind of incident for which there is advice, "" for none."""
    match record:
        case ev.NodeTroubled():
            return "trouble"
        case ev.NodeLost():
            return "away"
        case ev.LeaseEnded(cause=cause):
            return "" if cause == "released" else "ended"
        case ev.NodeBusy(doing=doing):
            return "" if doing == "free" else "busy"
        case ev.Quarantine():
            return "quarantine"
        case ev.SlotLost():
            return "gone"
        case ev.CanaryFailed():
            return "canary"
        case _:
            return ""


MOST_STORIES = 20
"""Most stories of a kind."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Stories for `explain`."""

    run: str
    stories: list[Story]

    def lines(self) -> list[str]:
        if not self.stories:
            return ["nothing went wrong so far: no node, slot, group or candidate (name one to hear its story)"]
        out: list[str] = []
        for s in self.stories:
            out.append(f"{s.kind} {s.subject}: {s.now}")
            out += [f"  {clock(t)}  {text}" for t, text, _ in s.steps]
            out += [f"  - {text}" for text in s.advice]
        return out

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "stories": [
                {
                    "kind": s.kind, "subject": s.subject, "now": s.now, "steps": [_step(x) for x in s.steps],
                    "advice": s.advice,
                }
                for s in self.stories
            ],
        }  # fmt: skip


def _step(step: Step) -> dict[str, Any]:
    t, text, record = step
    if record is None:
        return {"t": t, "text": text, "type": "Reading"}
    return {"t": t, "text": text, "type": type(record).__name__, **json.loads(ev.to_json(record))}


def explain(paths: RunPaths, what: str | None) -> Explanation:
    """The story of `what` (a group, a shape as 16x1280x8192 or its number, a node), or of all that did not go well."""
    with LedgerReader.open_readonly(paths.ledger) as ledger, ledger.snapshot():
        stories = StoryWriter(paths, ledger)
        if what is None:
            return Explanation(paths.run, stories.troubles(MOST_STORIES))
        if what in stories.groups:
            return Explanation(paths.run, [stories.group(what)])
        if what in stories.nodes:
            return Explanation(paths.run, [stories.node(what)])
        shape = stories.find_shape(what)
        if shape is not None:
            return Explanation(paths.run, [stories.shape(shape)])
        raise InputError(
            f"run {paths.run} has no group, shape or node {what!r}"
            f" (groups: {', '.join(list(stories.groups)[:6])} ...; nodes: {', '.join(sorted(stories.nodes))})"
        )
