"""Figures of a page: numbers rounded so that JSON has them, and summaries of lists of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import geometric_mean

import numpy as np

from orchestrator.pages import Document


def rounded(x: float | None, digits: int = 5) -> float | None:
    """`x` with `digits` digits; None if it is not finite, because JSON has no such numbers."""
    if x is None or not math.isfinite(x):
        return None
    value = float(f"{x:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def geomean(xs: Sequence[float]) -> float | None:
    """The geometric mean of positive numbers; None for an empty list."""
    return geometric_mean(xs) if xs else None


def five_numbers(xs: Sequence[float]) -> Document:
    """n, min, q1, median, q3, max, geomean; only n if there are no numbers."""
    if not xs:
        return {"n": 0}
    quantiles = map(rounded, np.quantile(xs, (0.0, 0.25, 0.5, 0.75, 1.0)).tolist())
    summary = dict(zip(("min", "q1", "median", "q3", "max"), quantiles, strict=True))
    return {"n": len(xs), **summary, "geomean": rounded(geomean(xs)) if min(xs) > 0 else None}
