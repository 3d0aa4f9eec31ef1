"""The verdict on every row of a table: the rule of thumb, and how likely chance alone breaks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from orchestrator.analysis.compare.noise import Noise, chance, learn
from orchestrator.analysis.compare.repeats import ENOUGH, Bools, Floats, Settled, settle

Verdict = Literal["regression", "boundary", "unstable", "missing", "new", "improved", "ok", "ignored"]
VERDICTS: tuple[Verdict, ...] = (
    "regression", "boundary", "unstable", "missing", "new", "improved", "ok", "ignored",
)  # fmt: skip
"""The worst first."""

BOUND = 0.005
"""Expected false regressions in a table in which nothing changed. With a second look at what was left open, measured
anew, it is twice that: at most one unchanged pair of stacks in a hundred is accused."""
DRIFT = 0.007
"""What two sessions differ by for reasons of their own: 0.5 % each, so 0.7 % between the two."""
MOST_DRIFT = 0.02
"""A larger shift of the whole table is not taken for drift beyond this."""
ENOUGH_ROWS = 10
"""From so many rows on the shift of the table is estimated; with fewer, DRIFT counts as noise."""
SUSPECT = 0.05
"""A boundary row that chance explains no better than this deserves a second look."""
PAIRS_QUIETER = 0.4
"""Runs are taken in pairs where that brings the middle row's variance below so much of what it is by sides ..."""
ROWS_FOR_PAIRS = 20
"""... in a table of at least so many rows: in a small one that may be chance."""
_PRECISION = 1e-5


@dataclass(frozen=True, slots=True)
class Rule:
    """A row is suspected where tot > rel * golden + abs_us; golden below `ignore_below` us is ignored."""

    rel: float = 1.005
    abs_us: float = 0.5
    ignore_below: float = 4.0

    def limit(self, us: Floats) -> Floats:
        """The time from which on a row is suspected."""
        return np.asarray(self.rel * us + self.abs_us)


@dataclass(frozen=True, slots=True)
class Judged:
    """A table judged; arrays have an entry a row, NaN where nothing can be said.

    `p` is how likely a row without a change shows one of this direction and at least this size; `seen_from` the
    smallest change (0.02: 2 % slower) that would have been called a regression; `noise` the standard deviation of one
    repeat; `beyond` what the rule alone says; `suspect` which rows deserve a second look.
    """

    verdicts: npt.NDArray[np.object_]
    golden: Settled
    tot: Settled
    change: Floats
    p: Floats
    noise: Floats
    seen_from: Floats
    beyond: Bools
    suspect: Bools
    paired: bool
    in_pairs: bool
    shift: Floats
    removed: float
    threshold: float
    rows: int


def judge(
    golden: Floats, tot: Floats, *, rule: Rule | None = None, bound: float = BOUND, paired: bool = False,
    sizes: bool = True,
) -> Judged:  # fmt: skip
    """Judge arrays (rows, repeats) of microseconds, NaN where there is no repeat; paired: column by column.

    `sizes` False leaves out `seen_from`, which takes most of the time.
    """
    rule = rule or Rule()
    width = max(golden.shape[1], tot.shape[1], ENOUGH)
    golden, tot = (np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=np.nan) for x in (golden, tot))
    a, b = settle(golden), settle(tot)
    both = (a.count > 0) & (b.count > 0)
    with np.errstate(invalid="ignore"):
        ignored = both & (a.us < rule.ignore_below)
    usable = both & a.stable & b.stable & ~ignored
    threes, others = _selected(golden, a) + _selected(tot, b)
    squares, degrees, spread, in_pairs = _evidence(golden, tot, a, b, usable, paired)
    judged = usable & (degrees > 0)
    noise = learn(squares, np.where(judged, degrees, 0.0), threes, others)
    rows = int(judged.sum())
    change = np.where(judged, b.log - a.log, np.nan)
    shift, removed, extra = _drift(change[judged], paired)
    threshold = bound / max(rows, 1)
    moved = np.where(judged, change - removed, 0.0)
    p = np.where(judged, chance(noise, np.abs(moved), spread, extra), np.nan)
    seen = _seen_from(noise, spread, extra, threshold) if sizes else np.full(len(p), np.nan)
    with np.errstate(invalid="ignore"):
        adjusted = b.us * np.exp(-removed)
        beyond = both & ~ignored & (b.us > rule.limit(a.us))
        over = judged & (adjusted > rule.limit(a.us))
        under = judged & (a.us > rule.limit(adjusted))
        sure = p <= threshold
        seen_from = np.where(judged, np.maximum(np.expm1(seen), rule.limit(a.us) / a.us - 1), np.nan)
    verdicts = np.full(len(a.us), "ok", dtype=object)
    verdicts[under & sure] = "improved"
    verdicts[over | (judged & beyond)] = "boundary"
    verdicts[over & sure] = "regression"
    verdicts[both & ~judged] = "unstable"
    verdicts[ignored] = "ignored"
    verdicts[(a.count > 0) & (b.count == 0)] = "missing"
    verdicts[(a.count == 0) & (b.count > 0)] = "new"
    suspect = (verdicts == "unstable") | ((verdicts == "boundary") & over & (np.nan_to_num(p, nan=1.0) <= SUSPECT))
    level = np.where(judged, noise.by_row, np.nan)
    return Judged(
        verdicts, a, b, change, p, level, seen_from, beyond, suspect, paired, in_pairs, shift, removed, threshold, rows
    )


def _selected(us: Floats, side: Settled) -> Floats:
    """(1 where a side had just three repeats, else the number that it kept): what chose the repeats, for `learn`."""
    three = np.isfinite(us).sum(axis=1) == ENOUGH
    return np.array([three, np.where(three, 0, side.count)], dtype=np.float64)


def _evidence(
    golden: Floats, tot: Floats, a: Settled, b: Settled, usable: Bools, paired: bool
) -> tuple[Floats, Floats, Floats, bool]:
    """(squares, degrees of freedom, spread, whether runs were taken in pairs).

    Sides: squares about both means, n + m - 2 degrees, spread sqrt(1/n + 1/m). Pairs: squares of the differences
    about their mean, halved so that the noise is that of one repeat, n - 1 degrees, spread sqrt(2/n).
    Pairs have fewer degrees of freedom: they are taken only where the whole table is much quieter in pairs.
    """
    n, m = np.maximum(a.count, 1), np.maximum(b.count, 1)
    squares, degrees = a.squares + b.squares, (a.count + b.count - 2).astype(np.float64)
    spread = np.sqrt(1 / n + 1 / m)
    if not paired or not usable.any():
        return squares, degrees, spread, False
    kept = a.kept & b.kept
    pairs = kept.sum(axis=1)
    apart = np.log(np.where(kept, tot, 1.0)) - np.log(np.where(kept, golden, 1.0))
    middle = apart.sum(axis=1) / np.maximum(pairs, 1)
    halves = (np.where(kept, apart - middle[:, None], 0.0) ** 2).sum(axis=1) / 2
    use = usable & (pairs == a.count) & (pairs == b.count)  # no stray in one side only: means of the same runs
    if use.sum() < ROWS_FOR_PAIRS:
        return squares, degrees, spread, False
    by_pair = np.median(halves[use] / _middle_of_squares(pairs[use] - 1.0))
    by_side = np.median(squares[use] / _middle_of_squares(degrees[use]))
    if by_pair >= PAIRS_QUIETER * by_side:
        return squares, degrees, spread, False
    return halves, np.where(use, pairs - 1.0, 0.0), np.sqrt(2 / np.maximum(pairs, 1)), True


def _middle_of_squares(degrees: Floats) -> Floats:
    """The median of chi squared, by Wilson and Hilferty's approximation (1931)."""
    return np.asarray(degrees * (1 - 2 / (9 * degrees)) ** 3)


def _drift(change: Floats, paired: bool) -> tuple[Floats, float, float]:
    """(the table's shift and its standard error, what of it is removed, the standard deviation that stays).

    The shift is the median change; its standard error 1.2533 / sqrt(rows) of their robust spread (1.4826 MAD).
    """
    if not len(change):
        return np.zeros(2), 0.0, 0.0 if paired else DRIFT
    shift = float(np.median(change))
    error = 1.2533 * 1.4826 * float(np.median(np.abs(change - shift))) / np.sqrt(len(change))
    both = np.array([shift, error])
    if paired:
        return both, 0.0, 0.0
    if len(change) < ENOUGH_ROWS:
        return both, 0.0, DRIFT
    return both, float(np.clip(shift, -MOST_DRIFT, MOST_DRIFT)), float(error)


def _seen_from(noise: Noise, spread: Floats, extra: float, threshold: float) -> Floats:
    """The change that has exactly the probability `threshold` under no change, by bisection."""
    low, high = np.zeros(len(spread)), np.full(len(spread), 2.0)
    for _ in range(int(np.ceil(np.log2(2.0 / _PRECISION)))):
        middle = (low + high) / 2
        far = chance(noise, middle, spread, extra) > threshold
        low, high = np.where(far, middle, low), np.where(far, high, middle)
    return high
