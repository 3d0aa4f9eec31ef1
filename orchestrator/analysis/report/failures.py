"""The failures of a run with their history and advice; the incidents of nodes and slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from orchestrator.ledger import LedgerReader
from orchestrator.reasons import Reason
from orchestrator.run.view import RunView
from orchestrator.run.view.places import Places
from orchestrator.run.view.sentences import INCIDENTS, advice, sentence

MOST_SHAPES = 200
"""So many of a reason are told one by one; all are in the table."""
MOST_INCIDENTS = 200
_ALWAYS = ("trouble", "away", "busy", "quarantine", "gone")


def failures(ledger: LedgerReader, view: RunView, named: Callable[[int], str], run: str) -> list[dict[str, Any]]:
    """Failures by reason, the most frequent first. `run`: its name on a command line."""
    by_reason: dict[str, list[dict[str, Any]]] = defaultdict(list)
    nodes: dict[str, str] = {}
    for f in ledger.failed():
        shapes = by_reason[f.reason]
        nodes.setdefault(f.reason, f.node)
        if len(shapes) >= MOST_SHAPES:
            continue
        story = [[round(t, 1), sentence(r, named)] for t, r in view.notable.get(f.id, ())]
        shapes.append(
            {
                "id": f.id, "shape": named(f.id), "detail": f.detail, "confirmed": f.confirmed,
                "where": f"{f.node} slot {f.slot}" if f.node else "", "attempts": f.attempts,
                "verdict": _is_verdict(f.reason), "story": story,
            }
        )  # fmt: skip
    return [
        {
            "reason": reason, "count": n, "message": _message(reason), "advice": advice(reason, run, nodes[reason]),
            "shapes": by_reason[reason],
        }
        for reason, n in ledger.failures().items()
    ]  # fmt: skip


def incidents(places: Places) -> list[dict[str, Any]]:
    """Incidents of nodes and slots, oldest first: outages, quarantines, failed canaries."""
    found: list[tuple[float, float | None, str, str]] = [
        (s.start, s.end, s.kind, s.text) for s in places.spans if s.kind in _ALWAYS
    ]
    found += [(m.t, m.t, m.kind, m.text) for m in places.marks if m.kind in INCIDENTS]
    found.sort(key=lambda f: f[0])
    return [
        {"t": round(t, 1), "end": None if end is None else round(end, 1), "kind": kind, "text": text,
         "advice": INCIDENTS[kind]}
        for t, end, kind, text in found[-MOST_INCIDENTS:]
    ]  # fmt: skip


def _message(reason: str) -> str:
    try:
        return Reason(reason).message()
    except ValueError:
        return reason


def _is_verdict(reason: str) -> bool:
    try:
        return Reason(reason).is_verdict
    except ValueError:
        return False
