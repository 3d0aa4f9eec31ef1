"""The repeats of both sides, row by row: which of them agree, and how far they scatter."""

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
        """Number of repeats left out."""
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
    at_median = np.maximum((total - 1) // 2, 0)
    median = np.take_along_axis(ordered, at_median[..., None], axis=-1)
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


PAIRS_QUIETER = 0.4
"""Runs are taken in pairs where that brings the median row's variance below this share of its variance by sides ..."""
ROWS_FOR_PAIRS = 20
"""... in a table of at least so many rows: in a small one that may be chance."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Sums of squares of so many degrees of freedom; `spread` is the standard deviation of a row's change in units of
    its noise; `in_pairs`: runs were taken in pairs."""

    squares: Floats
    degrees: Floats
    spread: Floats
    in_pairs: bool


def evidence(golden: Floats, tot: Floats, a: Settled, b: Settled, usable: Bools, paired: bool) -> Evidence:
    """Evidence of noise in the repeats of the `usable` rows; the others have no degrees of freedom.

    Sides: squares about both means, n + m - 2 degrees, spread sqrt(1/n + 1/m). Pairs: squares of the differences
    about their mean, halved so that the noise is that of one repeat, n - 1 degrees, spread sqrt(2/n).
    Pairs have fewer degrees of freedom: they are taken only where the whole table is much quieter in pairs.
    """
    n, m = np.maximum(a.count, 1), np.maximum(b.count, 1)
    squares, degrees = a.squares + b.squares, np.where(usable, n + m - 2.0, 0.0)
    sides = Evidence(squares, degrees, np.sqrt(1 / n + 1 / m), in_pairs=False)
    if not paired or golden.ndim > 2:
        return sides
    kept = a.kept & b.kept
    pairs = kept.sum(axis=1)
    apart = np.log(np.where(kept, tot, 1.0)) - np.log(np.where(kept, golden, 1.0))
    mean = apart.sum(axis=1) / np.maximum(pairs, 1)
    halves = (np.where(kept, apart - mean[:, None], 0.0) ** 2).sum(axis=1) / 2
    use = usable & (pairs > 1) & (pairs == a.count) & (pairs == b.count)  # no stray in one side only
    judged = use & a.stable & b.stable
    if judged.sum() < ROWS_FOR_PAIRS:
        return sides
    by_pair = np.median(halves[judged] / _middle_of_squares(pairs[judged] - 1.0))
    by_side = np.median(squares[judged] / _middle_of_squares(degrees[judged]))
    if by_pair >= PAIRS_QUIETER * by_side:
        return sides
    spread = np.where(use, np.sqrt(2 / np.maximum(pairs, 1)), sides.spread)
    return Evidence(halves, np.where(use, pairs - 1.0, 0.0), spread, in_pairs=True)


def _middle_of_squares(degrees: Floats) -> Floats:
    """The median of chi squared, by Wilson and Hilferty's approximation (1931)."""
    return np.asarray(degrees * (1 - 2 / (9 * degrees)) ** 3)
