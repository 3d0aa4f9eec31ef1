"""The timeline of every slot, the failures of a run with history and advice, the incidents of nodes and slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from orchestrator.ledger import LedgerReader
from orchestrator.reasons import Reason
from orchestrator.run.view import RunView
from orchestrator.run.view.places import Places
from orchestrator.run.view.sentences import INCIDENTS, advice, sentence
from orchestrator.run.view.work import Attempt

MOST_SEGMENTS = 20_000
"""More would be too small to see and too many to send: neighbours of one kind become one."""
LONG_PAUSE = 0.15
"""A share of the whole: where nothing happened for longer (a controller that was away over night), time is cut."""


def timeline(places: Places, named: Callable[[int], str], start: float, end: float) -> dict[str, Any]:
    """Seconds from `start`. `lanes`: node, slot, segments (start, end or null, kind, attempt, group, tuned, outcome,
    shape, detail); `spans`: node, slot or null, start, end or null, kind, text; `marks`: t, kind, text, node, slot."""

    def at(t: float | None) -> float | None:
        return None if t is None else round(max(0.0, t - start), 1)

    total = sum(map(len, places.lanes.values()))
    gap = (end - start) / 500.0 if total > MOST_SEGMENTS else 0.0
    out = []
    for node, slot in sorted(places.lanes, key=lambda p: (p[0], len(p[1]), p[1])):
        merged = _merged(places.lanes[node, slot], gap) if gap else places.lanes[node, slot]
        segments = [
            [at(s.start), at(s.end), s.kind, s.id, s.group, s.tuned, s.outcome,
             named(s.flight) if s.flight is not None else "", s.detail[:300]]
            for s in merged
        ]  # fmt: skip
        out.append([node, slot, segments])
    return {
        "start": round(start, 1),
        "length": at(end),
        "lanes": out,
        "spans": [[s.node, s.slot, at(s.start), at(s.end), s.kind, s.text[:300]] for s in places.spans],
        "marks": [[at(m.t), m.kind, m.text[:300], m.node, m.slot] for m in places.marks],
        "pauses": [[at(a), at(b)] for a, b in _pauses(places, start, end)],
        "coarse": bool(gap),
    }


def _merged(lane: list[Attempt], gap: float) -> Iterator[Attempt]:
    """Neighbours that ended well become one, named after the first."""
    kept: Attempt | None = None
    for s in lane:
        if (
            kept is not None and kept.kind == s.kind == "done" and kept.end is not None and s.end is not None
            and s.end - kept.start < 4 * gap and s.start - kept.end < gap
        ):  # fmt: skip
            kept = replace(kept, end=s.end, tuned=kept.tuned + s.tuned)
            continue
        if kept is not None:
            yield kept
        kept = s
    if kept is not None:
        yield kept


def _pauses(places: Places, start: float, end: float) -> Iterator[tuple[float, float]]:
    """Long whiles without a segment or a mark of the controller."""
    busy = [(s.start, s.end if s.end is not None else end) for lane in places.lanes.values() for s in lane]
    busy += [(m.t, m.t) for m in places.marks]
    reached = start
    for a, b in sorted(busy):
        if a - reached > LONG_PAUSE * (end - start):
            yield reached, a
        reached = max(reached, b)


MOST_SHAPES = 200
"""The most of a reason that are listed one by one; all are in the table."""
MOST_INCIDENTS = 200
_ALWAYS = ("trouble", "away", "ended", "busy", "quarantine", "gone")


def failures(ledger: LedgerReader, view: RunView, named: Callable[[int], str], run: str) -> list[dict[str, Any]]:
    """Failures by reason, the most frequent first. `run`: its name on a command line."""
    by_reason: dict[str, list[dict[str, Any]]] = defaultdict(list)
    nodes: dict[str, str] = {}
    for f in ledger.failed():
        shapes = by_reason[f.reason]
        nodes.setdefault(f.reason, f.node)
        if len(shapes) >= MOST_SHAPES:
            continue
        known = _known(f.reason)
        story = [[round(t, 1), sentence(r, named, spot=view.places.spot)] for t, r in view.notable.get(f.id, ())]
        shapes.append(
            {
                "id": f.id, "shape": named(f.id), "detail": f.detail, "confirmed": f.confirmed,
                "where": f"{f.node} slot {f.slot}" if f.node else "", "attempts": f.attempts,
                "verdict": bool(known and known.is_verdict), "story": story,
            }
        )  # fmt: skip
    return [
        {
            "reason": reason, "count": n, "message": known.message() if (known := _known(reason)) else reason,
            "advice": advice(reason, run, nodes[reason]), "shapes": by_reason[reason],
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


def _known(reason: str) -> Reason | None:
    """The reason of that name; None where another version of gemmfleet wrote it."""
    return next((r for r in Reason if r.value == reason), None)
