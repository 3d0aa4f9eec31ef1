"""The tail of the normal distribution."""

from __future__ import annotations

from functools import cache
from math import erfc, sqrt

import numpy as np

from orchestrator.analysis.compare.repeats import Floats

_FARTHEST = 37.0
"""Standard deviations beyond which the tail is no longer a normal number."""


def above(z: Floats) -> Floats:
    """The share of a standard normal above `z`, to 5 digits: the logarithm of erfc, interpolated."""
    at, log = _tail()
    return np.asarray(np.exp(np.interp(z, at, log)))


@cache
def _tail() -> tuple[Floats, Floats]:
    at = np.linspace(-_FARTHEST, _FARTHEST, 40_001)
    return at, np.log([erfc(z / sqrt(2)) / 2 for z in at.tolist()])
