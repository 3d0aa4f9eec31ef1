"""The repeats of one side: which agree, and what they say together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

AGREE = 1.05
"""Repeats agree where the slowest takes at most so many times the fastest: the runbook's 5 %."""
ENOUGH = 3
"""So many repeats must agree, or a side is unstable."""


@dataclass(frozen=True, slots=True)
class Settled:
    """One side of a table, an entry a row.

    `us` is the mean of the kept repeats (of an unstable side the median of all) and NaN without any; `log` the
    mean of their logarithms; `squares` the sum of the squared deviations from it; `kept` marks them in the
    (rows, repeats) array (of an unstable side all); `count` is how many they are; `total` how many repeats there are.
    """

    us: Floats
    log: Floats
    squares: Floats
    kept: Bools
    count: npt.NDArray[np.int64]
    total: npt.NDArray[np.int64]
    stable: Bools

    @property
    def strays(self) -> Floats:
        """How many repeats were left out."""
        return np.asarray(self.total - self.count, dtype=np.float64)


def settle(us: Floats) -> Settled:
    """Judge an array (rows, repeats) of microseconds, NaN where there is no repeat; further axes may come before.

    A side is stable where three repeats lie within 5 % and most of all repeats lie within 5 % of the median. Those
    that do not are strays and left out of the mean. Of an unstable side nothing is left out: its repeats show how
    little is known of it.
    """
    ordered = np.sort(us, axis=-1)  # NaN goes last
    there = np.isfinite(us)
    total = there.sum(axis=-1)
    middle = np.maximum((total - 1) // 2, 0)
    median = np.take_along_axis(ordered, middle[..., None], axis=-1)
    with np.errstate(invalid="ignore"):
        three = ordered[..., ENOUGH - 1 :] <= AGREE * ordered[..., : 1 - ENOUGH]
        near = there & (us <= AGREE * median) & (us * AGREE >= median)
    count = near.sum(axis=-1)
    stable = three.any(axis=-1) & (count >= ENOUGH) & (2 * count > total)
    kept = np.where(stable[..., None], near, there)
    count = kept.sum(axis=-1)
    logs = np.log(np.where(kept, us, 1.0))
    n = np.maximum(count, 1)
    log = logs.sum(axis=-1) / n
    squares = (np.where(kept, logs - log[..., None], 0.0) ** 2).sum(axis=-1)
    mean = np.where(kept, us, 0.0).sum(axis=-1) / n
    return Settled(np.where(stable, mean, median[..., 0]), log, squares, kept, count, total, stable)
