"""Candidates that attempts left out because they had faulted (table `withheld`), and what other GPUs say about them.

LedgerReader reads the rows, and `judge_blocked` makes candidates of them. A candidate that faulted on two GPUs is bad;
one that ran on another GPU is good, and the node that blocked it may try it again (controller/outbox.py tells it).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.policy.model import Attempt, SlotId, State
from worker.protocol.candidates import MAX_BLOCKED

BLOCKED = """SELECT attempt, shape, candidate, node, slot, name, outcome, detail, source, confirmed, entry
    FROM withheld"""
"""Query whose rows `judge_blocked` takes."""


@dataclass(frozen=True, slots=True)
class BlockedCandidate:
    """A candidate that an attempt did not measure, because it had faulted (docs/explanation/scheduling.md)."""

    attempt: str
    shape: int
    candidate: tuple[str, ...]
    node: str
    slot: str
    name: str
    outcome: str
    detail: str
    source: str
    """`attempt`: it faulted in this attempt. `blocklist`: it had faulted on this node before."""
    confirmed: bool
    """The node had it as blocked already, confirmed by two slots."""
    verdict: str | None
    """The end on another GPU: `ran`, `faulted`, or None if no other GPU has tried it."""
    key: tuple[str, ...]
    gpu: str
    """The slot's name for the worker: its GPU's stable id if it has one."""
    image: str
    driver: str
    t: float
    """Time of the fault, in the node's epoch seconds."""

    def to_json(self) -> dict[str, Any]:
        """Entry of provenance.json."""
        fields = ("outcome", "detail", "node", "slot", "gpu", "image", "driver", "t", "source")
        return {
            "name": self.name or " ".join(self.candidate),
            **{name: getattr(self, name) for name in fields},
            "elsewhere": self.verdict or "not tried",
        }


def judge_blocked(state: State, rows: Sequence[Sequence[Any]]) -> list[BlockedCandidate]:
    """The candidates of rows of BLOCKED, with their verdicts from other GPUs, in the order of shapes and attempts.

    If two GPUs left a candidate out, it faulted on both. If the shape's result came from another slot that did not
    leave it out, it ran there. `rows` must have all that is known of a shape's candidates.
    """
    blocked = sorted(map(_candidate_of, rows), key=lambda b: (b.shape, state.order(b.attempt), b.candidate))
    gpus: dict[tuple[int, tuple[str, ...]], set[str]] = defaultdict(set)
    slots: dict[tuple[int, tuple[str, ...]], set[SlotId]] = defaultdict(set)
    for candidate in blocked:
        gpus[candidate.shape, candidate.candidate].add(candidate.gpu)
        slots[candidate.shape, candidate.candidate].add((candidate.node, candidate.slot))
    # the list of such an attempt is cut off: it may have left out candidates that the list lacks
    counts = Counter(candidate.attempt for candidate in blocked)
    cut_off = {attempt for attempt, count in counts.items() if count >= MAX_BLOCKED}

    def verdict(candidate: BlockedCandidate) -> str | None:
        if len(gpus[candidate.shape, candidate.candidate]) > 1:
            return "faulted"
        attempt = _attempt_of_result(state, candidate.shape)
        if attempt is None or attempt.id in cut_off:
            return None
        was_blocked_there = (attempt.node, attempt.slot) in slots[candidate.shape, candidate.candidate]
        return None if was_blocked_there else "ran"

    return [replace(candidate, verdict=verdict(candidate)) for candidate in blocked]


def _attempt_of_result(state: State, id_: int) -> Attempt | None:
    """The attempt that a shape's result is from, None if it has no result."""
    shape = state.shapes.get(id_)
    if shape is None:
        return None
    return state.attempts.get(shape.attempt if shape.state == "tuned" else shape.result)


def _candidate_of(row: Sequence[Any]) -> BlockedCandidate:
    """The candidate of a row of BLOCKED, still without a verdict."""
    attempt, shape, candidate, node, slot, name, outcome, detail, source, confirmed, entry_text = row
    entry = json.loads(entry_text)
    return BlockedCandidate(
        attempt,
        shape,
        tuple(json.loads(candidate)),
        node,
        slot,
        name,
        outcome,
        detail,
        source,
        bool(confirmed),
        None,
        tuple(entry["key"]),
        entry["slot"],
        entry["image"],
        entry["driver"],
        entry["t"],
    )
