"""How far the two sides' repeats scatter, row by row: about each side's mean, or pair by pair."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.analysis.compare.repeats import Bools, Floats, Settled

PAIRS_QUIETER = 0.4
"""Runs are taken in pairs where that brings the middle row's variance below so much of what it is by sides ..."""
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
    """What the repeats of the rows that are `usable` show of their noise; the others have no degrees of freedom.

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
    middle = apart.sum(axis=1) / np.maximum(pairs, 1)
    halves = (np.where(kept, apart - middle[:, None], 0.0) ** 2).sum(axis=1) / 2
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
