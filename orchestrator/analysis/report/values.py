"""Numbers of a page: short, finite, summed up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def short(x: float | None, digits: int = 5) -> float | None:
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


def five(xs: Sequence[float]) -> dict[str, Any]:
    """n, min, q1, median, q3, max, geomean; n alone of nothing."""
    if not xs:
        return {"n": 0}
    s = sorted(xs)
    at = {"min": 0.0, "q1": 0.25, "median": 0.5, "q3": 0.75, "max": 1.0}
    out: dict[str, Any] = {"n": len(s), **{k: short(quantile(s, q)) for k, q in at.items()}}
    out["geomean"] = short(geomean(s)) if s[0] > 0 else None
    return out


def histogram(xs: Sequence[float], edges: Sequence[float]) -> list[int]:
    """How many lie between neighbouring edges; the last one counts what is beyond as well."""
    out = [0] * (len(edges) - 1)
    for x in xs:
        i = sum(1 for e in edges[1:-1] if x >= e)
        out[i] += 1
    return out
