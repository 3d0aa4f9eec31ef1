"""Stories of a run, for `explain`: the history of a shape, group, node or candidate, its state now, and what to do.

`gemmfleet explain` calls `explain`, which reads the ledger once. The state of a run has no candidates that faulted, so
`find_faulted` looks for them in the rows and among the blocked candidates. The steps of a shape are made in
`history.py`, the incidents of a node in `timeline.py`, and the advice in `advice.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field

from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.pages import Document
from orchestrator.paths import RunConfig, RunPaths, runs_option
from orchestrator.policy.model import Attempt, Shape
from orchestrator.policy.sentences import describe_attempt, describe_wait
from orchestrator.reasons import Reason
from orchestrator.view.advice import advise_on_failure, advise_on_incident
from orchestrator.view.formatting import clock
from orchestrator.view.header import names_of
from orchestrator.view.history import Step, shape_steps, went_wrong
from orchestrator.view.sentences import describe_end, describe_queue, describe_settled
from orchestrator.view.slot_speed import flags
from orchestrator.view.status import done_word, node_detail, node_state
from orchestrator.view.timeline import find_incidents, kind_of
from worker.families import backend_of
from worker.protocol import HOT_C, hardware_evidence
from worker.text import and_more, plural

FAULTS = ("fault", "error", "hang", "oom")
"""Statuses of rows whose candidate faulted; `wrong`, `unsupported`, `timeout` (a budget) are answers."""
REPRODUCTION = "reproduce.sh"
"""The script that a worker leaves in the folder of an attempt that faulted (worker/tuners/aiter)."""
MOST = 50
"""Most candidates that are looked at, and most scripts that are named."""
MOST_STEPS = 14
"""Steps of one thing: the first and the last ones are shown."""
WIDE = 240
"""Characters of a step of a shape, group or candidate on a terminal."""
MOST_CANDIDATES = 8
MOST_SHAPES = 5
MOST_SCRIPTS = 3
MOST_STORIES = 20
"""Most stories of a kind."""
_FAULTED = f"""SELECT kernel_name, libtype, node, slot, status, shape, detail, attempt FROM rows
    WHERE status IN ({", ".join(repr(f) for f in FAULTS)}) AND winner=0 ORDER BY id"""


@dataclass(frozen=True, slots=True)
class CandidateFault:
    """One time that a candidate faulted. `what`: `fault: SIGSEGV`. `elsewhere`: sentence on its result on other slots,
    "" if nothing is known of that."""

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
    faults: list[CandidateFault] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.backend})" if self.backend else self.name

    @property
    def shapes(self) -> Collection[int]:
        """Shapes at which it faulted, in the order of its faults."""
        return dict.fromkeys(fault.shape for fault in self.faults)

    def describe(self, shape: int | None = None) -> str:
        """`faulted on n1 slot 0 (fault: SIGSEGV); it ran on another slot`, of all shapes or of one."""
        faults = [fault for fault in self.faults if shape in (None, fault.shape)]
        slots = list(dict.fromkeys(f"{fault.node} slot {fault.slot}" for fault in faults))
        text = f"faulted on {and_more(slots, 4)} ({faults[0].what})"
        elsewhere = faults[-1].elsewhere if len(slots) == 1 else ""
        return f"{text}; {elsewhere}" if elsewhere else text


def find_faulted(ledger: LedgerReader) -> list[FaultedCandidate]:
    """Candidates that faulted, those with the most shapes first."""
    candidates: dict[tuple[str, str], FaultedCandidate] = {}

    def add(name: str, libtype: str, fault: CandidateFault) -> None:
        backend = backend_of(ledger.family.name, {"libtype": libtype, "kernelName": name}) or libtype
        candidates.setdefault((name, backend), FaultedCandidate(name, backend)).faults.append(fault)

    for name, libtype, node, slot, status, shape, detail, attempt in ledger.query(_FAULTED):
        fault = CandidateFault(shape, node, slot, attempt, _describe_fault(status, detail))
        add(name or "a candidate without a name", libtype, fault)
    blocked = ledger.blocked_candidates()
    libtypes = dict(ledger.query("SELECT DISTINCT kernel_name, libtype FROM rows")) if blocked else {}
    for candidate in blocked:
        elsewhere = "it ran on another slot" if candidate.verdict == "ran" else ""
        if candidate.verdict is None and not candidate.confirmed:
            elsewhere = "unconfirmed: no other slot has tried it"
        what = _describe_fault(candidate.outcome, candidate.detail)
        fault = CandidateFault(candidate.shape, candidate.node, candidate.slot, candidate.attempt, what, elsewhere)
        add(candidate.name or " ".join(candidate.candidate), libtypes.get(candidate.name, ""), fault)
    return sorted(candidates.values(), key=lambda candidate: -len(candidate.shapes))[:MOST]


def _describe_fault(status: str, detail: str) -> str:
    return f"{status}: {detail}" if detail else status


def slot_warnings(ledger: LedgerReader) -> dict[str, list[Step]]:
    """Steps by node for attempts during which hardware errors rose, or whose GPU was hot."""
    steps: dict[str, list[Step]] = defaultdict(list)
    attempts = ledger.replayed.attempts
    for id_, report in ledger.reports().items():
        before = report.conditions.get("before", {})
        after = report.conditions.get("after", {})
        attempt = attempts.get(id_)
        if attempt is None:
            continue
        warnings = [hardware_evidence(before, after)] if before and after else []
        hottest = _hottest(after)
        if hottest >= HOT_C:
            warnings.append(f"{hottest:.0f} C at its end")
        for text in warnings:
            if text:
                t = attempt.ended_at or attempt.sent_at
                steps[attempt.node].append(Step(t, f"slot {attempt.slot} ({id_}): {text}", "reading"))
    return steps


def _hottest(reading: Document) -> float:
    """The highest temperature of a reading, 0 if it has none."""
    sensors = reading.get("temperature_c")
    if not isinstance(sensors, dict):
        return 0.0
    return max((degrees for degrees in sensors.values() if isinstance(degrees, int | float)), default=0.0)


@dataclass(frozen=True, slots=True)
class Story:
    """Story of one thing: its events, its state now, and what the user can do."""

    subject: str
    kind: str
    now: str
    steps: list[Step] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        lines = [f"{self.kind} {self.subject}: {self.now}"]
        steps = [f"  {clock(step.t)}  {self._shortened(step.text)}" for step in self.steps]
        skipped = len(steps) - MOST_STEPS
        if skipped > 0:
            first = MOST_STEPS // 2
            steps = [*steps[:first], f"            ... and {skipped} more", *steps[first + skipped :]]
        return [*lines, *steps, *(f"  - {text}" for text in self.advice)]

    def _shortened(self, text: str) -> str:
        # what happened to a node may end with a command to type
        if self.kind == "node" or len(text) <= WIDE:
            return text
        return text[: WIDE - 3] + "..."


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
        return [line for story in self.stories for line in story.lines()]

    def to_json(self) -> Document:
        stories = [{**asdict(story), "steps": [step._asdict() for step in story.steps]} for story in self.stories]
        return {"run": self.run, "stories": stories}


def explain(paths: RunPaths, what: str | None) -> Explanation:
    """The story of `what` (a group, a shape as 16x1280x8192 or its number, a node), or of all that did not go well."""
    with LedgerReader.open_readonly(paths.ledger) as ledger, ledger.snapshot():
        stories = _stories_of(what, _Stories(paths, ledger), ledger)
    return Explanation(paths.run, stories, command(f"explain {paths.run} NAME{runs_option(paths.root.parent)}"))


def _stories_of(what: str | None, stories: _Stories, ledger: LedgerReader) -> list[Story]:
    state = ledger.replayed
    if what is None:
        return stories.troubles()
    if what in state.attempts:
        return [stories.group(state.attempts[what])]
    if what in state.nodes:
        return [stories.node(what)]
    shapes = [int(what)] if what.isdigit() else [id_ for id_ in ledger.keys if stories.named(id_) == what]
    if shapes and shapes[0] in ledger.keys:
        return [stories.shape(shapes[0])]
    groups = and_more(list(state.attempts), 6) or "none yet"
    nodes = ", ".join(sorted(state.nodes)) or "none yet"
    raise InputError(
        f"run {ledger.meta('run')} has no group, shape or node {what!r} (groups: {groups}; nodes: {nodes})"
    )


class _Stories:
    """Stories of one run."""

    def __init__(self, paths: RunPaths, ledger: LedgerReader) -> None:
        self._paths = paths
        self._ledger = ledger
        self._state = ledger.replayed
        self._done = done_word(RunConfig.read(paths.config).tuner)
        self.named = names_of(ledger)
        self._faulted = find_faulted(ledger)
        self._warnings = slot_warnings(ledger)

    def troubles(self) -> list[Story]:
        """Stories of pools, nodes, shapes and candidates with problems, at most MOST_STORIES of each."""
        state = self._state
        nodes = [name for name in state.nodes if self._warnings.get(name) or find_incidents(state, name)]
        order = {"failed": 0, "pending": 1, "tuned": 2}
        shapes = [shape for shape in state.shapes.values() if went_wrong(state, shape)]
        shapes.sort(key=lambda shape: (order[shape.state], shape.confirmed is not False))
        return [
            *(self.pool(name) for name, leases in state.queued_leases.items() if leases),
            *(self.node(name, brief=True) for name in nodes[:MOST_STORIES]),
            *(self.shape(shape.id) for shape in shapes[:MOST_STORIES]),
            *(self.candidate(candidate) for candidate in self._faulted[:MOST_STORIES]),
        ]

    def pool(self, name: str) -> Story:
        """Story of the leases of a pool that wait in its scheduler's queue."""
        queue = describe_queue(self._state.queued_leases[name])
        return Story(name, "pool", queue, advice=["A smaller request may be granted sooner."])

    def shape(self, id_: int) -> Story:
        """Story of a shape, with the candidates that faulted at it."""
        name = self.named(id_)
        shape = self._state.shapes.get(id_)
        skipped = self._ledger.skipped().get(id_)
        if skipped is not None:
            reason = f" ({skipped[0]})" if skipped[0] else ""
            return Story(name, "shape", f"skipped{reason}: {skipped[1]}")
        if shape is None:
            return Story(name, "shape", "pending")
        if shape.state == "pending":
            now = f"pending: {describe_wait(self._state, id_)}"
        else:
            now = describe_settled(shape, self._done)
        faulted = [candidate for candidate in self._faulted if id_ in candidate.shapes]
        notes = [f"Candidate {candidate.title} {candidate.describe(id_)}" for candidate in faulted[:MOST_CANDIDATES]]
        if len(faulted) > MOST_CANDIDATES:
            notes.append(f"{plural(len(faulted) - MOST_CANDIDATES, 'more candidate')} faulted at this shape.")
        notes += self._advice([shape]) + self._reproductions(shape.attempts)
        return Story(name, "shape", now, shape_steps(self._state, shape), notes)

    def group(self, attempt: Attempt) -> Story:
        """Story of the shapes of one process."""
        place = f"{attempt.node} slot {attempt.slot}"
        shapes = plural(len(attempt.shapes), "shape")
        state = "running" if attempt.state == "started" else attempt.state
        now = f"{state} on {place}, {shapes}, {len(self._state.unsettled(attempt.shapes))} of them not settled"
        if attempt.state != "over":
            now += f": {describe_attempt(self._state, attempt)}"
        names = and_more([self.named(i) for i in attempt.shapes], MOST_SHAPES)
        sent = f"sent to {place} with {names}, estimated {attempt.cost_s:.1f} s"
        steps = [Step(attempt.sent_at, sent, "sent")]
        if attempt.started_at is not None:
            steps.append(Step(attempt.started_at, f"begun on {place}", "begun"))
        if attempt.current is not None:
            steps.append(Step(attempt.current_at, f"{self.named(attempt.current)} in flight", "running"))
        if attempt.landed:
            steps.append(Step(attempt.moved_at, f"{len(attempt.landed)} of {shapes} came to a result", "settled"))
        if attempt.ended_at is not None:
            steps.append(Step(attempt.ended_at, describe_end(attempt, self.named), kind_of(attempt)))
        notes = self._advice(self._state.shapes[i] for i in attempt.shapes) + self._reproductions([attempt.id])
        return Story(attempt.id, "group", now, steps, notes)

    def node(self, name: str, *, brief: bool = False) -> Story:
        """Story of a node. `brief`: without the attempts that went well there."""
        node = self._state.nodes[name]
        incidents = find_incidents(self._state, name)
        steps = [Step(incident.start, incident.text, incident.kind) for incident in incidents]
        steps += self._warnings.get(name, [])
        by_kind = sorted(incidents, key=lambda incident: incident.kind)
        notes = list(dict.fromkeys(advise_on_incident(incident, node, self._paths) for incident in by_kind))
        if not brief:
            begun = [
                attempt
                for attempt in self._state.attempts.values()
                if attempt.node == name and attempt.started_at is not None
            ]
            steps += [self._attempt_step(attempt) for attempt in begun]
            notes = self._blocked_notes(name) + notes
        return Story(name, "node", self._describe_node(name), sorted(steps), notes)

    def _describe_node(self, name: str) -> str:
        """`8 shapes tuned, 1 failed there; ready; slot 1 quarantined (3 faults ...)`."""
        node = self._state.nodes[name]
        text = f"{plural(node.tuned, 'shape')} {self._done}, {node.failed} failed there; {node_state(node)}"
        if node.lease:
            text = f"lease {node.lease} on {node.host}; {text}"
        detail = node_detail(node)
        if detail:
            text += f" ({detail})"
        for slot in node.slots.values():
            if slot.why:
                text += f"; slot {slot.name} {slot.state} ({slot.why})"
        for (node_name, slot_name), flag in flags(self._state).items():
            if node_name == name:
                text += f"; slot {slot_name} is {flag}"
        return text

    def _attempt_step(self, attempt: Attempt) -> Step:
        """Step of an attempt that a worker began: its end, or that it runs."""
        if attempt.ended_at:
            return Step(attempt.ended_at, describe_end(attempt, self.named), kind_of(attempt))
        return Step(attempt.started_at or 0.0, f"attempt {attempt.id} is running", kind_of(attempt))

    def candidate(self, candidate: FaultedCandidate) -> Story:
        """Story of a candidate that faulted."""
        names = and_more([self.named(i) for i in candidate.shapes], MOST_SHAPES)
        scripts = self._reproductions(fault.attempt for fault in candidate.faults)[:MOST_SCRIPTS]
        return Story(candidate.title, "candidate", f"{candidate.describe()}; at {names}", [], scripts)

    def _blocked_notes(self, node: str) -> list[str]:
        """Sentences on the blocked candidates of the node, which later runs leave out."""
        blocked = [candidate for candidate in self._faulted if any(fault.node == node for fault in candidate.faults)]
        if not blocked:
            return []
        notes = [
            f"Later runs leave out candidate {candidate.title}: {candidate.describe()}"
            for candidate in blocked[:MOST_CANDIDATES]
        ]
        more = f", {len(blocked) - len(notes)} more than these" if len(blocked) > len(notes) else ""
        again = "to try them again, delete .cache/aiter/*/blocklist.jsonl in the node's work folder"
        return [*notes, f"A node leaves out such candidates for seven days{more}; {again}"]

    def _advice(self, shapes: Iterable[Shape]) -> list[str]:
        """Advice on each reason for which one of the shapes failed, with the node of the first."""
        nodes: dict[Reason, str] = {}
        for shape in shapes:
            if shape.state == "failed" and shape.reason is not None:
                attempt = self._state.attempts.get(shape.attempt)
                nodes.setdefault(shape.reason, attempt.node if attempt else "")
        advice = []
        for reason, node in nodes.items():
            advice += advise_on_failure(reason, self._paths.named, node)
        return advice

    def _reproductions(self, attempts: Iterable[str]) -> list[str]:
        """Paths of the scripts with which AITER's tuner shows a fault of these attempts again."""
        scripts = []
        for attempt in dict.fromkeys(attempts):
            scripts += sorted(self._paths.attempt(attempt).glob(f"**/{REPRODUCTION}"))
        return [f"To see the fault again, on that node in the image: {script}" for script in scripts[:MOST]]
