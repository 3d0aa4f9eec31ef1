"""The trust that a page's numbers deserve: spread, repeats, close calls, and how the slots differ."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from orchestrator.analysis.report.measured import Winner
from orchestrator.ledger.model import Attempt
from orchestrator.run.view.places import Places


def rounded(x: float | None, digits: int = 5) -> float | None:
    """`x` with so many digits, None where there is no finite number (JSON has no other)."""
    if x is None or not math.isfinite(x):
        return None
    out = float(f"{x:.{digits}g}")
    return int(out) if out.is_integer() and abs(out) < 1e15 else out


def quantile(ordered: Sequence[float], q: float) -> float:
    """The quantile of an ascending, non-empty list, linear between neighbours."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def geomean(xs: Sequence[float]) -> float | None:
    """The geometric mean of positive numbers, None of nothing."""
    return math.exp(sum(map(math.log, xs)) / len(xs)) if xs else None


def five_numbers(xs: Sequence[float]) -> dict[str, Any]:
    """n, min, q1, median, q3, max, geomean; n alone of nothing."""
    if not xs:
        return {"n": 0}
    s = sorted(xs)
    at = {"min": 0.0, "q1": 0.25, "median": 0.5, "q3": 0.75, "max": 1.0}
    out: dict[str, Any] = {"n": len(s), **{k: rounded(quantile(s, q)) for k, q in at.items()}}
    out["geomean"] = rounded(geomean(s)) if s[0] > 0 else None
    return out


def histogram(xs: Sequence[float], edges: Sequence[float]) -> list[int]:
    """Number of values between neighbouring edges; the last bin counts all beyond as well."""
    out = [0] * (len(edges) - 1)
    for x in xs:
        i = sum(1 for e in edges[1:-1] if x >= e)
        out[i] += 1
    return out


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
        "median": rounded(quantile(ordered, 0.5), 3),
        "p90": rounded(quantile(ordered, 0.9), 3),
        "max": rounded(ordered[-1], 3),
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
        spread, canary = (
            five_numbers(by_slot.get(place, [])),
            five_numbers([us for us in places.canaries.get(place, []) if us > 0]),
        )
        usual = canary.get("median")
        reach = (canary["max"] - canary["min"]) / usual if usual and canary["n"] > 1 else None
        seen = clocks.get(place, [])
        out.append(
            [*place, spread["n"], rounded(spread.get("median"), 3), rounded(usual, 4), rounded(reach, 3),
             rounded(heat.get(place), 3), rounded(min(seen, default=None), 4), rounded(max(seen, default=None), 4)]
        )  # fmt: skip
    return out
