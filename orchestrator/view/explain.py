"""Stories of a run, for `explain`: the history of a shape, group, node or candidate, its state now, and what to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunConfig, RunPaths, runs_option
from orchestrator.policy.model import Attempt, Shape
from orchestrator.policy.sentences import describe_attempt, describe_wait
from orchestrator.reasons import Reason
from orchestrator.view.status import done_word, flags, names_of, node_detail, node_state
from orchestrator.view.words import (
    Step,
    advice,
    clock,
    end_of,
    incident_advice,
    incidents_of,
    kind_of,
    leases_words,
    settled_words,
    shape_steps,
    went_wrong,
)
from worker.families import backend_of
from worker.protocol import HOT_C, evidence
from worker.text import and_more, plural

FAULTS = ("fault", "error", "hang", "oom")
"""Statuses of rows whose candidate faulted; `wrong`, `unsupported`, `timeout` (a budget) are answers."""
REPRODUCTION = "reproduce.sh"
MOST = 50
_FAULTED = f"""SELECT kernel_name, libtype, node, slot, status, shape, detail, attempt FROM rows
    WHERE status IN ({", ".join(repr(f) for f in FAULTS)}) AND winner=0 ORDER BY id"""


@dataclass(frozen=True, slots=True)
class Seen:
    """One time that a candidate faulted. `elsewhere`: sentence on its result on other slots."""

    shape: int
    node: str
    slot: str
    attempt: str
    what: str
    elsewhere: str = ""


@dataclass(slots=True)
class FaultedCandidate:
    """A candidate that faulted, and each time that it did."""

    name: str
    backend: str
    seen: list[Seen] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.backend})" if self.backend else self.name

    @property
    def shapes(self) -> dict[int, None]:
        return dict.fromkeys(x.shape for x in self.seen)

    def words(self, shape: int | None = None) -> str:
        """`faulted on n1 slot 0 (fault: SIGSEGV); it ran on another slot`, of all shapes or of one."""
        seen = [x for x in self.seen if shape in (None, x.shape)]
        places = list(dict.fromkeys(f"{x.node} slot {x.slot}" for x in seen))
        elsewhere = seen[-1].elsewhere if len(places) == 1 else ""
        return "; ".join(filter(None, (f"faulted on {and_more(places, 4)} ({seen[0].what})", elsewhere)))


def faulted(ledger: LedgerReader) -> list[FaultedCandidate]:
    """Candidates that faulted, those with the most shapes first."""
    found: dict[tuple[str, str], FaultedCandidate] = {}

    def add(name: str, libtype: str, seen: Seen) -> None:
        backend = backend_of(ledger.family.name, {"libtype": libtype, "kernelName": name}) or libtype
        found.setdefault((name, backend), FaultedCandidate(name, backend)).seen.append(seen)

    for name, libtype, node, slot, status, shape, detail, attempt in ledger.query(_FAULTED):
        add(name or "a candidate without a name", libtype, Seen(shape, node, slot, attempt, _what(status, detail)))
    left_out = ledger.left_out()
    known = dict(ledger.query("SELECT DISTINCT kernel_name, libtype FROM rows")) if left_out else {}
    for w in left_out:
        elsewhere = "it ran on another slot" if w.verdict == "ran" else ""
        if w.verdict is None and not w.confirmed:
            elsewhere = "unconfirmed: no other slot has tried it"
        seen = Seen(w.shape, w.node, w.slot, w.attempt, _what(w.outcome, w.detail), elsewhere)
        add(w.name or " ".join(w.candidate), known.get(w.name, ""), seen)
    return sorted(found.values(), key=lambda f: -len(f.shapes))[:MOST]


def _what(status: str, detail: str) -> str:
    return f"{status}: {detail}" if detail else status


def slot_warnings(ledger: LedgerReader) -> dict[str, list[Step]]:
    """Steps by node for attempts during which hardware errors rose, or whose GPU was hot."""
    out, attempts = defaultdict[str, list[Step]](list), ledger.replayed.attempts
    for id_, report in ledger.reports().items():
        a = attempts.get(id_)
        before, after = (report.conditions.get(when, {}) for when in ("before", "after"))
        words = [evidence(before, after)] if before and after else []
        warm = after.get("temperature_c")
        degrees = [x for x in warm.values() if isinstance(x, int | float)] if isinstance(warm, dict) else []
        words += [f"{max(degrees):.0f} C at its end"] if max(degrees, default=0.0) >= HOT_C else []
        if a is not None:
            t = a.ended_at or a.sent_at
            out[a.node] += [(t, f"slot {a.slot} ({id_}): {text}", "reading") for text in words if text]
    return out


MOST_STEPS = 14
"""Steps of one thing: the first and the last ones are shown."""
WIDE = 240
"""Characters of a step of a shape, group or candidate on a terminal."""
MOST_CANDIDATES = 8
MOST_SHAPES = 5
MOST_SCRIPTS = 3
MOST_STORIES = 20
"""Most stories of a kind."""


@dataclass(frozen=True, slots=True)
class Story:
    """Story of one thing: its events, its state now, and what the user can do."""

    subject: str
    kind: str
    now: str
    steps: list[Step] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        out = [f"{self.kind} {self.subject}: {self.now}"]
        skip = len(self.steps) - MOST_STEPS
        wide = None if self.kind == "node" else WIDE  # what happened to a node may end with a command to type
        for i, (t, text, _) in enumerate(self.steps):
            if skip > 0 and i == MOST_STEPS // 2:
                out.append(f"            ... and {skip} more")
            if skip <= 0 or not MOST_STEPS // 2 <= i < MOST_STEPS // 2 + skip:
                out.append(f"  {clock(t)}  {text if wide is None or len(text) <= wide else text[: wide - 3] + '...'}")
        return out + [f"  - {text}" for text in self.advice]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Stories for `explain`."""

    run: str
    stories: list[Story]
    next: str
    """The command that explains one thing of this run."""

    def lines(self) -> list[str]:
        if not self.stories:
            return [f"Nothing has failed. For the history of one group, shape or node, name it: {self.next}"]
        return [line for s in self.stories for line in s.lines()]

    def to_json(self) -> dict[str, Any]:
        names = ("t", "text", "kind")
        stories = [{**asdict(s), "steps": [dict(zip(names, x, strict=True)) for x in s.steps]} for s in self.stories]
        return {"run": self.run, "stories": stories}


def explain(paths: RunPaths, what: str | None) -> Explanation:
    """The story of `what` (a group, a shape as 16x1280x8192 or its number, a node), or of all that did not go well."""
    with LedgerReader.open_readonly(paths.ledger) as ledger, ledger.snapshot():
        again = command(f"explain {paths.run} NAME{runs_option(paths.root.parent)}")
        return Explanation(paths.run, _stories_of(what, _Stories(paths, ledger), ledger), again)


def _stories_of(what: str | None, stories: _Stories, ledger: LedgerReader) -> list[Story]:
    state = ledger.replayed
    if what is None:
        return stories.troubles()
    if what in state.attempts:
        return [stories.group(state.attempts[what])]
    if what in state.nodes:
        return [stories.node(what)]
    shape = int(what) if what.isdigit() else next((i for i in ledger.keys if stories.named(i) == what), -1)
    if shape in ledger.keys:
        return [stories.shape(shape)]
    raise InputError(
        f"run {ledger.meta('run')} has no group, shape or node {what!r} (groups: {and_more(list(state.attempts), 6)};"
        f" nodes: {', '.join(sorted(state.nodes))})"
    )


class _Stories:
    """Stories of one run."""

    def __init__(self, paths: RunPaths, ledger: LedgerReader) -> None:
        self._paths, self._ledger, self._state = paths, ledger, ledger.replayed
        self._done = done_word(RunConfig.read(paths.config).tuner)
        self.named = names_of(ledger)
        self._faulted = faulted(ledger)
        self._warnings = slot_warnings(ledger)

    def troubles(self) -> list[Story]:
        """Stories of pools, nodes, shapes and candidates with problems, at most MOST_STORIES of each."""
        state = self._state
        pools = [
            Story(pool, "pool", leases_words(leases), advice=["A smaller request may be granted sooner."])
            for pool, leases in state.queued_leases.items()
            if leases
        ]
        nodes = [n for n in state.nodes if self._warnings.get(n) or incidents_of(state, n)]
        rank = {"failed": 0, "pending": 1, "tuned": 2}
        shapes = [s for s in state.shapes.values() if went_wrong(state, s)]
        shapes.sort(key=lambda s: (rank[s.state], s.confirmed is not False))
        return [
            *pools,
            *(self.node(n, brief=True) for n in nodes[:MOST_STORIES]),
            *(self.shape(s.id) for s in shapes[:MOST_STORIES]),
            *(self.candidate(f) for f in self._faulted[:MOST_STORIES]),
        ]

    def shape(self, id_: int) -> Story:
        s, skipped = self._state.shapes.get(id_), self._ledger.skipped().get(id_)
        if s is None or skipped is not None:
            reason = f" ({skipped[0]})" if skipped and skipped[0] else ""
            now = f"skipped{reason}: {skipped[1]}" if skipped else "pending"
            return Story(self.named(id_), "shape", now)
        now = settled_words(s, self._done) if s.state != "pending" else f"pending: {describe_wait(self._state, id_)}"
        found = [f for f in self._faulted if id_ in f.shapes]
        notes = [f"Candidate {f.title} {f.words(id_)}" for f in found[:MOST_CANDIDATES]]
        if len(found) > MOST_CANDIDATES:
            notes.append(f"{plural(len(found) - MOST_CANDIDATES, 'more candidate')} faulted at this shape.")
        notes += self._advice([s]) + self._again(s.attempts)
        return Story(self.named(id_), "shape", now, shape_steps(self._state, s), notes)

    def group(self, a: Attempt) -> Story:
        """Story of the shapes of one process."""
        where, left = f"on {a.node} slot {a.slot}", len(self._state.unsettled(a.shapes))
        ended = "running" if a.state == "started" else a.state
        now = f"{ended} {where}, {plural(len(a.shapes), 'shape')}, {left} of them not settled"
        now += f": {describe_attempt(self._state, a)}" if a.state != "over" else ""
        names = and_more([self.named(i) for i in a.shapes], MOST_SHAPES)
        steps = [(a.sent_at, f"sent to {a.node} slot {a.slot} with {names}, estimated {a.cost_s:.1f} s", "sent")]
        if a.started_at is not None:
            steps.append((a.started_at, f"begun {where}", "begun"))
        if a.current is not None:
            steps.append((a.current_at, f"{self.named(a.current)} in flight", "running"))
        if a.landed:
            done = f"{len(a.landed)} of {plural(len(a.shapes), 'shape')} came to a result"
            steps.append((a.moved_at, done, "settled"))
        if a.ended_at is not None:
            steps.append((a.ended_at, end_of(self._state, a, self.named), kind_of(a)))
        return Story(
            a.id, "group", now, steps, self._advice(self._state.shapes[i] for i in a.shapes) + self._again([a.id])
        )

    def node(self, name: str, *, brief: bool = False) -> Story:
        """`brief`: without the attempts that went well there."""
        state, node = self._state, self._state.nodes[name]
        of = f"lease {node.lease} on {node.host}; " if node.lease else ""
        now = f"{of}{plural(node.tuned, 'shape')} {self._done}, {node.failed} failed there; {node_state(node)}"
        now += f" ({detail})" if (detail := node_detail(node)) else ""
        now += "".join(f"; slot {s.name} {s.state} ({s.why})" for s in node.slots.values() if s.why)
        now += "".join(f"; slot {slot} is {words}" for (n, slot), words in flags(state).items() if n == name)
        incidents = incidents_of(state, name)
        steps = [(i.start, i.text, i.kind) for i in incidents] + self._warnings.get(name, [])
        ordered = sorted(incidents, key=lambda incident: incident.kind)
        notes = list(dict.fromkeys(incident_advice(i, node, self._paths) for i in ordered))
        if not brief:
            steps += [
                (
                    a.ended_at or a.started_at,
                    end_of(state, a, self.named) if a.ended_at else f"attempt {a.id} is running",
                    kind_of(a),
                )
                for a in state.attempts.values()
                if a.node == name and a.started_at is not None
            ]
            notes = self._left_out(name) + notes
        return Story(name, "node", now, sorted(steps), notes)

    def candidate(self, f: FaultedCandidate) -> Story:
        """Story of a candidate that faulted."""
        names = and_more([self.named(i) for i in f.shapes], MOST_SHAPES)
        again = self._again(x.attempt for x in f.seen)[:MOST_SCRIPTS]
        return Story(f.title, "candidate", f"{f.words()}; at {names}", [], again)

    def _left_out(self, node: str) -> list[str]:
        """Sentences on the candidates that the node's blocklist makes later runs leave out."""
        found = [f for f in self._faulted if any(x.node == node for x in f.seen)]
        notes = [f"Later runs leave out candidate {f.title}: {f.words()}" for f in found[:MOST_CANDIDATES]]
        if not notes:
            return []
        more = f", {len(found) - len(notes)} more than these" if len(found) > len(notes) else ""
        again = "to try them again, delete .cache/aiter/*/blocklist.jsonl in the node's work folder"
        return [*notes, f"A node leaves out such candidates for seven days{more}; {again}"]

    def _advice(self, shapes: Iterable[Shape]) -> list[str]:
        nodes: dict[Reason, str] = {}
        for s in shapes:
            if s.state == "failed" and s.reason is not None:
                a = self._state.attempts.get(s.attempt)
                nodes.setdefault(s.reason, a.node if a else "")
        return [text for reason, node in nodes.items() for text in advice(reason, self._paths.named, node)]

    def _again(self, attempts: Iterable[str]) -> list[str]:
        found = [p for a in dict.fromkeys(attempts) for p in sorted(self._paths.attempt(a).glob(f"**/{REPRODUCTION}"))]
        return [f"To see the fault again, on that node in the image: {script}" for script in found[:MOST]]
