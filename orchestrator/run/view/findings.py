"""Findings in a run's ledger and folder beside the journal: faults of candidates, health of slots, reproductions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from orchestrator.ledger import LedgerReader
from orchestrator.ledger.model import LeftOut
from orchestrator.nodes.check import HOT_C
from orchestrator.paths import RunPaths
from worker.device.health import evidence

FAULTS = ("fault", "error", "hang", "oom")
"""Statuses of rows whose candidate faulted; `wrong`, `unsupported`, `timeout` (a budget) are answers."""
REPRODUCTION = "reproduce.sh"
MOST = 50


@dataclass(frozen=True, slots=True)
class FaultedCandidate:
    """A candidate that faulted on a slot, with the shapes and its first message."""

    kernel: str
    backend: str
    node: str
    slot: str
    shapes: tuple[int, ...]
    status: str
    detail: str
    attempts: tuple[str, ...] = ()
    elsewhere: str = ""
    """Sentence on its result on another slot."""


class _Seen(NamedTuple):
    status: str
    shape: int
    detail: str
    attempt: str


@dataclass(frozen=True, slots=True)
class SlotWarning:
    """A slot with suspicious readings around an attempt."""

    node: str
    slot: str
    attempt: str
    t: float
    text: str


def faulted(ledger: LedgerReader) -> list[FaultedCandidate]:
    """Candidates that faulted, those with the most shapes first."""
    marks = ", ".join("?" * len(FAULTS))
    rows = ledger.query(
        f"""SELECT kernel_name, libtype, node, slot, status, shape, detail, attempt FROM rows
            WHERE status IN ({marks}) AND winner=0 ORDER BY id""",
        FAULTS,
    )
    by: dict[tuple[str, str, str, str, str], list[_Seen]] = defaultdict(list)
    for kernel, backend, node, slot, *rest in rows:
        by[kernel, backend, node, slot, ""].append(_Seen(*rest))
    for w in ledger.left_out():
        kernel = w.name or " ".join(w.candidate)
        by[kernel, "", w.node, w.slot, _elsewhere(w)].append(_Seen(w.outcome, w.shape, w.detail, w.attempt))
    found = [
        FaultedCandidate(
            kernel, backend, node, slot, tuple(dict.fromkeys(x.shape for x in seen)), seen[0].status, seen[0].detail,
            tuple(dict.fromkeys(x.attempt for x in seen)), elsewhere,
        )
        for (kernel, backend, node, slot, elsewhere), seen in by.items()
    ]  # fmt: skip
    return sorted(found, key=lambda f: -len(f.shapes))[:MOST]


def _elsewhere(w: LeftOut) -> str:
    match w.verdict:
        case "ran":
            return "it ran on another slot"
        case "faulted":
            return "it faulted on another slot, too"
        case _:
            return "it had faulted on two slots before" if w.confirmed else "unconfirmed: no other slot has tried it"


def slot_warnings(ledger: LedgerReader) -> list[SlotWarning]:
    """Attempts during which hardware errors rose, or whose GPU was hot."""
    out = []
    for a in ledger.attempts():
        before, after = (a.conditions.get(when, {}) for when in ("before", "after"))
        words = [evidence(before, after)] if before and after else []
        warm = after.get("temperature_c")
        hot = (
            max((x for x in warm.values() if isinstance(x, int | float)), default=0.0) if isinstance(warm, dict) else 0
        )
        words += [f"{hot:.0f} C at its end"] if hot >= HOT_C else []
        for text in filter(None, words):
            out.append(SlotWarning(a.node, a.slot or "", a.id, a.ended_at or a.sent_at, text))
    return out


def reproductions(paths: RunPaths, attempts: Iterable[str]) -> list[Path]:
    """Scripts that show a fault again, as the workers wrote them for these attempts."""
    return [p for a in attempts for p in sorted(paths.attempt(a).glob(f"**/{REPRODUCTION}"))][:MOST]
