"""The statistics of a comparison: repeats that agree, the noise of each row, the shift of the whole table.

Each row is judged by a moderated t-test, as limma does (Smyth 2004). Three repeats a side give a row's variance with 4
degrees of freedom only, so a noisy row often looks quiet. What all rows say narrows it down. If the variances differ no
more than one common noise would make them (Bartlett 1937), all rows share the pooled variance. Else the mean and spread
of the log variances give the table's typical variance, and how many degrees of freedom it is worth as a prior.

All is computed on logarithms of the times, so noise is a share of the time. Arrays may have further axes before the
rows: a benchmark judges thousands of tables at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import erfc, sqrt

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Repeats agree if the slowest takes at most so many times the fastest: the runbook's 5 %.
AGREE = 1.05
# Repeats that must agree, or a side is unstable.
ENOUGH = 3
# A smaller standard deviation of a repeat is taken for luck or rounding.
LEAST_NOISE = 0.0005
# All rows share one noise if Bartlett's statistic exceeds its mean by fewer standard deviations.
ALIKE = 1.8
# A row whose variance is more than so many times the common one is judged by a prior all the same.
LOUD = 3.0
# The share of limma's prior degrees of freedom that counts, and the most (or a quarter of the rows): a few noisy rows
# make the prior too sure.
PRIOR, MOST_PRIOR = 0.5, 10.0
# Share of repeats that stray for reasons of their own, not by the row's noise.
STRAYS = 0.01
# Runs are taken in pairs if that brings the median row's variance below this share of its variance by sides ...
PAIRS_QUIETER = 0.4
# ... in a table of at least so many rows: in a small one that may be chance.
ROWS_FOR_PAIRS = 20
# Expected difference of two sessions of the same software: 0.5 % each, so 0.7 % between the two.
DRIFT = 0.007
# A larger shift of the whole table is not taken for drift beyond this.
MOST_DRIFT = 0.02
# Least rows from which the shift of a table is estimated; with fewer, DRIFT counts.
ENOUGH_ROWS = 10
_MAD = 1.4826


@dataclass(frozen=True, slots=True)
class Settled:
    """One side of a table, an entry a row.

    `us` is the mean of the kept repeats (of an unstable side the median of all) and NaN without any; `log` the mean of
    their logarithms; `squares` the sum of the squared deviations from it; `kept` marks them in the (rows, repeats)
    array (of an unstable side all); `count` is how many they are, `strays` how
    many were left out.
    """

    us: Floats
    log: Floats
    squares: Floats
    kept: Bools
    count: npt.NDArray[np.int64]
    strays: npt.NDArray[np.int64]
    stable: Bools


def settle(us: Floats) -> Settled:
    """Judges the repeats in an array (rows, repeats) of microseconds, NaN where there is none.

    A side is stable if three repeats lie within 5 % and most of all repeats lie within 5 % of the median. The others
    are left out. Of an unstable side nothing is left out: its repeats show how little is known of it.
    """
    ordered = np.sort(us, axis=-1)  # NaN goes last
    there = np.isfinite(us)
    total = there.sum(axis=-1)
    median = np.take_along_axis(ordered, np.maximum((total - 1) // 2, 0)[..., None], axis=-1)
    three = ordered[..., ENOUGH - 1 :] <= AGREE * ordered[..., : 1 - ENOUGH]
    near = there & (us <= AGREE * median) & (us * AGREE >= median)
    stable = three.any(axis=-1) & (near.sum(axis=-1) >= ENOUGH) & (2 * near.sum(axis=-1) > total)
    kept = np.where(stable[..., None], near, there)
    count = kept.sum(axis=-1)
    n = np.maximum(count, 1)
    logs = np.log(np.where(kept, us, 1.0))
    log = logs.sum(axis=-1) / n
    squares = (np.where(kept, logs - log[..., None], 0.0) ** 2).sum(axis=-1)
    mean = np.where(kept, us, 0.0).sum(axis=-1) / n
    return Settled(np.where(stable, mean, median[..., 0]), log, squares, kept, count, total - count, stable)


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of each row: `level`, the standard deviation of one repeat, known with `degrees` of freedom.

    `spread` is the standard deviation of a row's change in units of its noise; `alike`: all rows share one noise;
    `in_pairs`: runs were taken in pairs.
    """

    level: Floats
    degrees: Floats
    spread: Floats
    alike: Bools
    in_pairs: bool


def learn(golden: Floats, tot: Floats, a: Settled, b: Settled, usable: Bools, paired: bool) -> Noise:
    """Learns the noise from the repeats of the `usable` rows.

    By sides: squares about both means, n + m - 2 degrees of freedom. By pairs: squares of the differences about their
    mean, halved so that the noise is that of one repeat, n - 1 degrees. Pairs have fewer degrees of freedom: they are
    taken only if the whole table is much quieter in pairs.
    """
    n, m = np.maximum(a.count, 1), np.maximum(b.count, 1)
    squares, degrees = a.squares + b.squares, np.where(usable, n + m - 2.0, 0.0)
    spread = np.sqrt(1 / n + 1 / m)
    kept = a.kept & b.kept
    pairs = kept.sum(axis=-1)
    use = usable & (pairs > 1) & (pairs == a.count) & (pairs == b.count)  # no stray in one side only
    judged = use & a.stable & b.stable
    in_pairs = False
    if paired and golden.ndim == 2 and judged.sum() >= ROWS_FOR_PAIRS:
        apart = np.log(np.where(kept, tot, 1.0)) - np.log(np.where(kept, golden, 1.0))
        mean = apart.sum(axis=1) / np.maximum(pairs, 1)
        halves = (np.where(kept, apart - mean[:, None], 0.0) ** 2).sum(axis=1) / 2
        by_pair, by_side = (np.median(s[judged] / d[judged]) for s, d in ((halves, pairs - 1.0), (squares, degrees)))
        in_pairs = bool(by_pair < PAIRS_QUIETER * by_side)
    if in_pairs:
        squares, degrees = halves, np.where(use, pairs - 1.0, 0.0)
        spread = np.where(use, np.sqrt(2 / np.maximum(pairs, 1)), spread)
    variance, known, alike = moderated(squares, degrees)
    # what strayed by noise counts as 5 % from the mean, or what is kept of a noisy row would look too quiet
    by_noise = _erfc(np.log(AGREE) / np.sqrt(2 * variance))
    strays = np.where(usable, a.strays + b.strays, 0) * by_noise / (STRAYS + by_noise)
    variance, known, alike = moderated(squares + strays * np.log(AGREE) ** 2, degrees + strays * (degrees > 0))
    return Noise(np.sqrt(variance), known, spread, alike, in_pairs)


def moderated(squares: Floats, degrees: Floats) -> tuple[Floats, Floats, Bools]:
    """(variance of each row, its degrees of freedom, whether the rows share one) from sums of squares.

    A row with 0 degrees of freedom says nothing and gets the prior.
    """
    says = degrees > 0
    d, rows = np.where(says, degrees, 1.0), np.maximum(says.sum(axis=-1, keepdims=True), 1)
    own = np.log(np.maximum(squares / d, LEAST_NOISE**2))

    def total(x: Floats) -> Floats:
        return np.asarray(np.where(says, x, 0.0).sum(axis=-1, keepdims=True))

    all_degrees = total(d)
    pooled = np.maximum(total(squares) / np.maximum(all_degrees, 1), LEAST_NOISE**2)
    odd = all_degrees * np.log(pooled) - total(d * own)
    odd /= 1 + (total(1 / d) - 1 / np.maximum(all_degrees, 1)) / (3 * np.maximum(rows - 1, 1))
    alike = odd <= rows - 1 + ALIKE * np.sqrt(2 * (rows - 1))
    logs = own - _digamma(d / 2) + np.log(d / 2)
    mean = total(logs) / rows
    excess = total((logs - mean) ** 2) / np.maximum(rows - 1, 1) - total(_trigamma(d / 2)) / rows
    grid = np.geomspace(1e4, 0.05, 400)
    half = np.interp(np.maximum(excess, 1e-4), _trigamma(grid), grid)
    prior = np.exp(mean + _digamma(half) - np.log(half))
    worth, d = np.minimum(2 * PRIOR * half, np.minimum(MOST_PRIOR, rows / 4)), np.where(says, degrees, 0.0)
    each = (worth * prior + np.where(says, squares, 0.0)) / (worth + d)
    joins = alike & (squares <= LOUD * pooled * d)
    variance = np.maximum(np.where(joins, pooled, each), LEAST_NOISE**2)
    return variance, np.where(joins, all_degrees, worth + d), alike[..., 0]


def _digamma(x: Floats) -> Floats:
    y = x + 6
    series = np.log(y) - 1 / (2 * y) - 1 / (12 * y**2) + 1 / (120 * y**4)
    return np.asarray(series - sum(1 / (x + i) for i in range(6)))


def _trigamma(x: Floats) -> Floats:
    y = x + 6
    series = 1 / y + 1 / (2 * y**2) + 1 / (6 * y**3) - 1 / (30 * y**5)
    return np.asarray(series + sum(1 / (x + i) ** 2 for i in range(6)))


_erfc = np.vectorize(erfc, otypes=[np.float64])


def tail(t: Floats, degrees: Floats) -> Floats:
    """The share of Student's t beyond `t` >= 0, by Hill's normal approximation (1970, CACM algorithm 395)."""
    a = np.maximum(degrees, 1.0) - 0.5
    b, y = 48 * a**2, a * np.log1p(t**2 / np.maximum(degrees, 1.0))
    z = (((((-0.4 * y - 3.3) * y - 24) * y - 85.5) / (0.8 * y**2 + 100 + b) + y + 3) / b + 1) * np.sqrt(y)
    return np.asarray(_erfc(z / sqrt(2)) / 2)


@dataclass(frozen=True, slots=True)
class Shift:
    """A table's common shift, one entry a table: the median change, what of it is `removed` as drift, the standard
    deviation `extra` that a row's change keeps of it, and how likely a table without a change shows as much beyond
    what is removed."""

    change: Floats
    removed: Floats
    extra: Floats
    p: Floats


def shift_of(change: Floats, deviation: Floats, rows: Bools, paired: bool) -> Shift:
    """The shift of tables whose rows' changes have standard deviations `deviation`.

    Its standard error is that of a median: of the robust spread (1.4826 MAD) of the changes or of what their noise
    makes expected, the larger. Paired sides have no drift.
    """
    n = rows.sum(axis=-1)
    shift, expected = _median(change, rows), _median(deviation, rows)
    seen = _MAD * _median(np.abs(change - shift[..., None]), rows)
    enough = n >= ENOUGH_ROWS
    error = np.where(enough, np.maximum(seen, expected), expected) * sqrt(np.pi / 2) / np.sqrt(np.maximum(n, 1) + 0.57)
    removed = np.where(enough & (not paired), np.clip(shift, -MOST_DRIFT, MOST_DRIFT), 0.0)
    extra = np.zeros_like(shift) if paired else np.where(enough, error, DRIFT)
    own = error if paired else np.where(enough, error, np.hypot(error, DRIFT))
    z = (shift - removed) / np.maximum(own, 1e-9)
    return Shift(shift, removed, extra, _erfc(z / sqrt(2)) / 2)


def _median(x: Floats, where: Bools) -> Floats:
    """The median along the last axis of what is marked; 0 where nothing is."""
    ordered = np.sort(np.where(where, x, np.inf), axis=-1)
    n = np.maximum(where.sum(axis=-1), 1)[..., None]
    middle = (np.take_along_axis(ordered, (n - 1) // 2, -1) + np.take_along_axis(ordered, n // 2, -1))[..., 0] / 2
    return np.where(where.any(axis=-1), middle, 0.0)
