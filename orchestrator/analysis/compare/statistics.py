"""Statistics of a comparison: which repeats agree, the noise of each row, the shift of the whole table.

The noise is learned from the whole table: one noise for all rows where nothing speaks against it, else empirical Bayes
on a grid of noise levels. Three repeats a side show little of a row's noise: 4 degrees of freedom, so that a noisy row
often looks quiet. What all rows say together narrows it down. Where the rows' scatter is what one common noise would
give (a likelihood ratio against the mixture below), the pooled variance judges all rows, nearly as well as if the noise
were known. Else the share of rows at each noise level is fitted to the table by maximum likelihood (Kiefer and
Wolfowitz 1956; EM), and a row's own repeats weigh the levels (Robbins 1956); limma's moderated t (Smyth 2004) is the
same with a fixed family of distributions. A row's own share is taken out of the fit before its repeats weigh it: they
must not count twice.

Arrays may have further axes before the rows: a benchmark judges thousands of tables at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import erfc, sqrt

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

AGREE = 1.05
"""Repeats agree where the slowest takes at most so many times the fastest: the runbook's 5 %."""
ENOUGH = 3
"""Repeats that must agree, or a side is unstable."""


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
    by_pair = np.median(halves[judged] / _median_chi_squared(pairs[judged] - 1.0))
    by_side = np.median(squares[judged] / _median_chi_squared(degrees[judged]))
    if by_pair >= PAIRS_QUIETER * by_side:
        return sides
    spread = np.where(use, np.sqrt(2 / np.maximum(pairs, 1)), sides.spread)
    return Evidence(halves, np.where(use, pairs - 1.0, 0.0), spread, in_pairs=True)


def _median_chi_squared(degrees: Floats) -> Floats:
    """The median of chi squared, by Wilson and Hilferty's approximation (1931)."""
    return np.asarray(degrees * (1 - 2 / (9 * degrees)) ** 3)


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


LEVELS: Floats = np.geomspace(0.0005, 0.32, 52)
"""The noise levels: standard deviations of the logarithm of one repeat, 0.05 % to 32 %."""
UNKNOWN_ROWS = 2.0
"""The fit sees so many rows more, spread evenly over all levels: a table cannot be sure that no other row is noisy."""
UNKNOWN_ROWS_ALIKE = 0.3
"""The same where all rows look equally noisy."""
ALIKE = 1.0
"""Rows are taken to be equally noisy where the mixture's likelihood exceeds the pooled one's by less: twice the
difference of the logarithms. Tables of equal rows stay below it in nine cases of ten."""
STRAYS = 0.02
"""Share of repeats that are outliers for reasons of their own."""
ROUNDS = 100
_STEPS = np.linspace(-6.0, 6.0, 41)


@dataclass(frozen=True, slots=True)
class Noise:
    """`weights` (rows, levels): how likely each row is at each of `levels` (1, levels); `alike`: one noise for all."""

    levels: Floats
    weights: Floats
    alike: Bools

    @property
    def by_row(self) -> Floats:
        """Each row's noise: root of the mean variance."""
        return np.asarray(np.sqrt((self.weights * self.levels**2).sum(axis=-1)))


def learn(squares: Floats, degrees: Floats, strays: Floats) -> Noise:
    """Noise of rows with sums of squares `squares` of `degrees` degrees of freedom (0: the row says nothing).

    `strays` is how many repeats of each row were left out for being more than 5 % from the median. They are evidence
    too: a noisy row has more of them, and what is kept of it looks quieter than it is.
    """
    says = degrees > 0
    exponent = (
        -degrees[..., None] * np.log(LEVELS) - squares[..., None] / (2 * LEVELS**2) + strays[..., None] * _stray(LEVELS)
    )
    exponent = np.where(says[..., None], exponent, 0.0)
    highest = exponent.max(axis=-1, keepdims=True)
    likelihood = np.exp(exponent - highest)
    rows = says.sum(axis=-1)[..., None]
    shares = np.full((*rows.shape[:-1], len(LEVELS)), 1 / len(LEVELS))
    unknown = UNKNOWN_ROWS / len(LEVELS)
    informative = likelihood * says[..., None]
    for _ in range(ROUNDS):
        there = (likelihood @ shares[..., None])[..., 0]
        shares = (shares * ((1 / there)[..., None, :] @ informative)[..., 0, :] + unknown) / (rows + UNKNOWN_ROWS)
    there = (likelihood * shares[..., None, :]).sum(axis=-1, keepdims=True)
    own = np.where(says[..., None], likelihood * shares[..., None, :] / there, 0.0)
    others = np.maximum(shares[..., None, :] * (rows + UNKNOWN_ROWS)[..., None] - own, unknown)
    mixed = likelihood * others
    mixed /= mixed.sum(axis=-1, keepdims=True)
    return _alike_or_mixed(squares, degrees, strays, (np.log(there) + highest)[..., 0], exponent, mixed)


def _stray(level: Floats) -> Floats:
    """The logarithm of the chance that a repeat strays: for reasons of its own, or by noise of this level."""
    return np.asarray(np.log(STRAYS + (1 - STRAYS) * 2 * above(np.log(AGREE) / level)))


def _pooled(squares: Floats, degrees: Floats, strays: Floats) -> Floats:
    """The common variance by maximum likelihood: that of the squares, or more where repeats strayed."""
    seen = np.sqrt(np.maximum(squares / np.maximum(degrees, 1), LEVELS[0] ** 2))
    levels = seen[..., None] * np.exp(np.linspace(0.0, 0.4, 41))
    likely = -degrees[..., None] * np.log(levels) - squares[..., None] / (2 * levels**2)
    at = (likely + strays[..., None] * _stray(levels)).argmax(axis=-1)
    return np.asarray(np.take_along_axis(levels, at[..., None], axis=-1)[..., 0] ** 2)


def _alike_or_mixed(
    squares: Floats, degrees: Floats, strays: Floats, fitted: Floats, exponent: Floats, mixed: Floats
) -> Noise:
    """The mixture, or the pooled variance (and UNKNOWN_ROWS_ALIKE) where the rows look alike."""
    says, total = degrees > 0, degrees.sum(axis=-1)
    of_rows = (np.where(says, x, 0.0).sum(axis=-1) for x in (squares, degrees, strays))
    variance = _pooled(*of_rows)
    pooled = -degrees / 2 * np.log(variance)[..., None] - squares / (2 * variance[..., None])
    pooled += strays * _stray(np.sqrt(variance))[..., None]
    gained = 2 * np.where(says, fitted - pooled, 0.0).sum(axis=-1)
    alike = (gained <= ALIKE) & (total > 0)
    around, known = pooled_levels(variance, total)
    rows = says.sum(axis=-1)
    doubt = (UNKNOWN_ROWS_ALIKE / (rows + UNKNOWN_ROWS_ALIKE))[..., None, None] / len(LEVELS)
    at_levels = doubt * np.exp(np.minimum(exponent - pooled[..., None], 300.0))
    at_pooled = (1 - doubt * len(LEVELS)) * known[..., None, :]
    together = np.concatenate([at_levels, np.broadcast_to(at_pooled, (*squares.shape, len(_STEPS)))], axis=-1)
    together /= together.sum(axis=-1, keepdims=True)
    apart = np.concatenate([mixed, np.zeros((*squares.shape, len(_STEPS)))], axis=-1)
    levels = np.concatenate([np.broadcast_to(LEVELS, (*variance.shape, len(LEVELS))), around], axis=-1)[..., None, :]
    return Noise(levels, np.where(alike[..., None, None], together, apart), alike)


def pooled_levels(variance: Floats, degrees: Floats) -> tuple[Floats, Floats]:
    """(levels, weights): a common noise of which a variance of so many degrees of freedom is known.

    Weighed so, normal tails make Student's t.
    """
    n = np.maximum(degrees, 1)[..., None]
    steps = _STEPS / np.sqrt(2 * n)
    exponent = -n * steps - n / 2 * np.exp(-2 * steps)
    weights = np.exp(exponent - exponent.max(axis=-1, keepdims=True))
    return np.sqrt(variance)[..., None] * np.exp(steps), weights / weights.sum(axis=-1, keepdims=True)


def chance(noise: Noise, change: Floats, spread: Floats, extra: Floats) -> Floats:
    """Probability that a row without a change shows `change` (of the logarithm) or more.

    `spread` is the standard deviation of the difference of the two means, in units of the row's noise; `extra` (one a
    table) a standard deviation that comes on top: the drift that could not be removed.
    """
    deviation = np.sqrt((spread[..., None] * noise.levels) ** 2 + extra[..., None, None] ** 2)
    return np.asarray((noise.weights * above(change[..., None] / deviation)).sum(axis=-1))


DRIFT = 0.007
"""Expected difference of two sessions of the same software: 0.5 % each, so 0.7 % between the two."""
MOST_DRIFT = 0.02
"""A larger shift of the whole table is not taken for drift beyond this."""
ENOUGH_ROWS = 10
"""Least rows from which shift and scatter of the table are estimated; with fewer, DRIFT and ASSUMED count."""
ASSUMED = 0.05
"""The scatter of a change between two single times, where too few rows show it."""

_MAD = 1.4826
_TRIMMED = 0.9733
"""The variance of a standard normal cut at three standard deviations."""
_WORTH = 0.7
"""Degrees of freedom of a row in the trimmed variance: the benchmark holds the rate of false alarms."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A table's common shift, one entry a table: the median change and its standard error, what of it is `removed` as
    drift, the standard deviation `extra` that a row's change keeps of it, and how likely a table without a change
    shows as much beyond what is removed."""

    change: Floats
    error: Floats
    removed: Floats
    extra: Floats
    p: Floats


def masked_median(x: Floats, where: Bools) -> Floats:
    """The median along the last axis of what is marked; 0 where nothing is."""
    ordered = np.sort(np.where(where, x, np.inf), axis=-1)
    n = np.maximum(where.sum(axis=-1), 1)[..., None]
    two = np.concatenate([np.take_along_axis(ordered, (n - 1) // 2, -1), np.take_along_axis(ordered, n // 2, -1)], -1)
    return np.asarray(np.where(where.any(axis=-1), np.where(np.isfinite(two), two, 0.0).mean(axis=-1), 0.0))


def noise_of_changes(change: Floats, rows: Bools) -> Noise:
    """The noise of one time in a table without repeats: the variance of the changes within three robust standard
    deviations (1.4826 MAD) of their median, or ASSUMED."""
    n = rows.sum(axis=-1)
    around = change - masked_median(change, rows)[..., None]
    scale = np.maximum(_MAD * masked_median(np.abs(around), rows), LEVELS[0])
    kept = rows & (np.abs(around) <= 3 * scale[..., None])
    count = np.maximum(kept.sum(axis=-1), 1)
    variance = (np.where(kept, around, 0.0) ** 2).sum(axis=-1) / np.maximum(count - 1, 1) / _TRIMMED
    few = n < ENOUGH_ROWS
    variance = np.where(few, ASSUMED**2, np.maximum(variance, 2 * LEVELS[0] ** 2)) / 2  # of the two times one
    levels, weights = pooled_levels(variance, np.where(few, 1e9, _WORTH * (count - 1)))
    return Noise(levels[..., None, :], weights[..., None, :], ~few)


def shift_of(change: Floats, deviation: Floats, rows: Bools, paired: bool) -> Shift:
    """The shift of tables whose rows' changes have standard deviations `deviation`.

    Its standard error is that of a median: of the robust spread (1.4826 MAD) of the changes or of what their noise
    makes expected, the larger. Paired sides have no drift.
    """
    n = rows.sum(axis=-1)
    shift = masked_median(change, rows)
    seen = _MAD * masked_median(np.abs(change - shift[..., None]), rows)
    expected = masked_median(deviation, rows)
    enough = n >= ENOUGH_ROWS
    error = np.where(enough, np.maximum(seen, expected), expected) * median_error(n)
    removed, extra, own = np.zeros_like(shift), np.zeros_like(shift), error
    if not paired:
        removed = np.where(enough, np.clip(shift, -MOST_DRIFT, MOST_DRIFT), 0.0)
        extra = np.where(enough, error, DRIFT)
        own = np.where(enough, error, np.hypot(error, DRIFT))
    return Shift(shift, error, removed, extra, above((shift - removed) / np.maximum(own, 1e-9)))


def median_error(rows: npt.NDArray[np.int64]) -> Floats:
    """The standard error of the median of so many standard normal numbers."""
    return np.asarray(sqrt(np.pi) / np.sqrt(2 * np.maximum(rows, 1) + np.pi - 2))
