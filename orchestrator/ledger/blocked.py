"""Blocked candidates (table `withheld`): those that an attempt did not measure because they had faulted.

LedgerReader reads the rows, and `judge_blocked` gives each candidate a verdict from other GPUs: it faulted there too,
or it ran there, and then the node that blocked it may try it again (controller/outbox.py sends the verdicts to the
nodes).

These verdicts are about a candidate. Whether a shape's result is final although candidates are missing is decided from
the events alone, by policy/blame.py (`_confirmed_result`), with the same rule: two GPUs. Who changes one changes both.
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
    """Its identity, which is the same only within one image."""
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
    """Its end on another GPU: `ran`, `faulted`, or None if that is not known."""
    key: tuple[str, ...]
    gpu: str
    """The GPU's stable id if it has one, else the slot. (The worker's entry calls it `slot`.)"""
    image: str
    """The hash of the container's image; without a container, a key of the AITER that is installed."""
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
    leave it out, it ran there. GPUs are counted over `rows`, so all rows of a shape must be among them.
    """
    blocked = sorted(map(_candidate_of, rows), key=lambda b: (b.shape, state.order(b.attempt), b.candidate))
    gpus: dict[tuple[int, tuple[str, ...]], set[str]] = defaultdict(set)
    slots: dict[tuple[int, tuple[str, ...]], set[SlotId]] = defaultdict(set)
    for candidate in blocked:
        gpus[candidate.shape, candidate.candidate].add(candidate.gpu)
        slots[candidate.shape, candidate.candidate].add((candidate.node, candidate.slot))
    # An attempt reports MAX_BLOCKED candidates at most. One that reports that number may have blocked others too, so
    # that it says of no candidate that it ran.
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
        attempt=attempt,
        shape=shape,
        candidate=tuple(json.loads(candidate)),
        node=node,
        slot=slot,
        name=name,
        outcome=outcome,
        detail=detail,
        source=source,
        confirmed=bool(confirmed),
        verdict=None,
        key=tuple(entry["key"]),
        gpu=entry["slot"],
        image=entry["image"],
        driver=entry["driver"],
        t=entry["t"],
    )
