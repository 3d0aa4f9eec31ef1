"""How far the numbers can be trusted: spread, repeats, close calls, and how the slots differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from orchestrator.analysis.report.measured import Winner
from orchestrator.analysis.report.values import five, histogram, quantile, short
from orchestrator.ledger.model import Attempt
from orchestrator.run.view.places import Places

EDGES = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, float("inf"))
"""Of the histograms: shares."""


def noise(winners: Iterable[Winner], places: Places, attempts: Iterable[Attempt]) -> dict[str, Any]:
    """`spread`: half the interquartile range over the median, of winners. `repeat`: how far a winner's last time is
    from its first, as a share. `close`: winners whose lead over the best other kernel is within their spread.
    """
    spreads: list[float] = []
    repeats: list[float] = []
    close = judged = 0
    by_slot: dict[tuple[str, str], list[float]] = defaultdict(list)
    for w in winners:
        if w.spread is not None and w.spread >= 0:
            spreads.append(w.spread)
            by_slot[w.node, w.slot].append(w.spread)
            if w.runner_up_us is not None:
                judged += 1
                close += w.runner_up_us <= w.us * (1.0 + w.spread)
        if w.first_us is not None:
            repeats.append(abs(w.us / w.first_us - 1.0))
    return {
        "edges": [None if e == float("inf") else e for e in EDGES],
        "spread": _summed(spreads),
        "repeat": _summed(repeats),
        "close": close,
        "judged": judged,
        "slots": _slots(by_slot, places, attempts),
    }


def _summed(shares: list[float]) -> dict[str, Any]:
    if not shares:
        return {"n": 0}
    ordered = sorted(shares)
    return {
        "n": len(ordered),
        "median": short(quantile(ordered, 0.5), 3),
        "p90": short(quantile(ordered, 0.9), 3),
        "max": short(ordered[-1], 3),
        "bins": histogram(ordered, EDGES),
    }


def _slots(by_slot: dict[tuple[str, str], list[float]], places: Places, attempts: Iterable[Attempt]) -> list[list[Any]]:
    """node, slot, winners, median spread, canary's median us, its range over that, hottest C, clocks from and to."""
    heat: dict[tuple[str, str], float] = {}
    clocks: dict[tuple[str, str], list[float]] = defaultdict(list)
    for a in attempts:
        place = (a.node, a.slot or "")
        for reading in a.conditions.values():
            warm = reading.get("temperature_c")
            degrees = [x for x in warm.values() if isinstance(x, (int, float))] if isinstance(warm, dict) else []
            heat[place] = max([heat.get(place, float("-inf")), *degrees])
            clock = reading.get("clock_mhz")
            if isinstance(clock, (int, float)) and not isinstance(clock, bool):
                clocks[place].append(float(clock))
    out: list[list[Any]] = []
    for place in sorted({*by_slot, *places.lanes}, key=lambda p: (p[0], len(p[1]), p[1])):
        spread, canary = five(by_slot.get(place, [])), five([us for us in places.canaries.get(place, []) if us > 0])
        middle = canary.get("median")
        reach = (canary["max"] - canary["min"]) / middle if middle and canary["n"] > 1 else None
        seen = clocks.get(place, [])
        out.append(
            [*place, spread["n"], short(spread.get("median"), 3), short(middle, 4), short(reach, 3),
             short(heat.get(place), 3), short(min(seen, default=None), 4), short(max(seen, default=None), 4)]
        )  # fmt: skip
    return out
