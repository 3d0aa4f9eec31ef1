"""The story of a group, shape or node in sentences with times; or all that went wrong in a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator import events as ev
from orchestrator.errors import InputError
from orchestrator.ledger import LedgerReader
from orchestrator.run.view.sentences import clock
from orchestrator.run.view.stories import Step, Story, StoryWriter

if TYPE_CHECKING:
    from orchestrator.paths import RunPaths

MOST_STORIES = 20
"""Of a kind."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The stories that answer the question."""

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
        teller = StoryWriter(paths, ledger)
        if what is None:
            return Explanation(paths.run, teller.troubles(MOST_STORIES))
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
