"""The verdict on every row of a table and on the whole table: a rule of thumb, and the odds that chance breaks it.

Each row is judged by a moderated t-test, as in limma (Smyth 2004). Three repeats on each side give a row's variance
with only 4 degrees of freedom, so a noisy row often looks quiet. The other rows help. If the variances differ no more
than one common noise would explain (Bartlett 1937), all rows share the pooled variance. Otherwise the mean and spread
of the log variances give the table's typical variance, and how many degrees of freedom it is worth as a prior.

Everything is computed on logarithms of the times, so noise is a share of the time. Arrays may have further axes before
the rows: a benchmark judges thousands of tables at once.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import erfc, inf, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.errors import InputError
from orchestrator.files.faults import shown

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# The worst first.
VERDICTS = ("regression", "boundary", "unstable", "missing", "new", "improved", "ok", "ignored")
# Verdicts of rows that could not be judged.
OPEN = ("boundary", "unstable", "missing")
# Expected false regressions in an unchanged table ...
BOUND = 0.008
# ... and this part of it for the table as a whole: at most one unchanged table in a hundred is accused.
TABLE_BOUND = 0.25
# The bound for a second measurement, small enough that both together stay near BOUND.
AGAIN_BOUND = 0.002
# Repeats agree if the slowest takes at most this many times as long as the fastest: the runbook's 5 %.
AGREE = 1.05
# A side is unstable unless this many repeats agree.
ENOUGH = 3
# A smaller standard deviation of a repeat counts as luck or rounding.
LEAST_NOISE = 0.0005
# All rows share one noise if Bartlett's statistic exceeds its mean by fewer standard deviations.
ALIKE = 1.8
# A row whose variance is more than this many times the common one is judged with a prior anyway.
LOUD = 3.0
# The share of limma's prior degrees of freedom that counts, and the most (or a quarter of the rows): a few noisy rows
# make the prior too sure.
PRIOR, MOST_PRIOR = 0.5, 10.0
# Share of repeats that are outliers for another reason than the row's noise.
STRAYS = 0.01
# Expected difference of two sessions of the same software: 0.5 % each, so 0.7 % between the two.
DRIFT = 0.007
# At most this much of a shift of the whole table counts as drift.
MOST_DRIFT = 0.02
# With fewer rows than this we do not estimate the shift of a table, and use DRIFT.
ENOUGH_ROWS = 10
_MAD = 1.4826


@dataclass(frozen=True, slots=True)
class Rule:
    """A row is suspected if tot > rel * golden + abs_us. Rows with golden below `ignore_below` us are ignored."""

    rel: float = 1.005
    abs_us: float = 0.5
    ignore_below: float = 4.0

    @classmethod
    def parse(cls, text: str, ignore_below: float) -> Rule:
        """Return the rule of `REL,ABS`. Raises InputError."""
        with suppress(ValueError):
            rel, abs_us = map(float, text.split(","))
            if 1 <= rel < inf and 0 <= abs_us < inf:
                return cls(rel, abs_us, ignore_below)
        raise InputError(f"--rule {shown(text)}: must be two numbers REL,ABS, as 1.005,0.5: at least 1 and at least 0")

    def limit(self, us: Floats) -> Floats:
        """A row with a longer time than this is suspected."""
        return np.asarray(self.rel * us + self.abs_us)


STANDARD = Rule()


def judge(
    golden: Floats, tot: Floats, *, rule: Rule = STANDARD, bound: float = BOUND, paired: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Judges arrays (rows, repeats) of microseconds, with NaN for missing repeats. `paired`: the sides took turns.

    Returns arrays with one entry for each row (NaN if unknown), and values for the table. Arrays of several tables
    (tables, rows, repeats) are judged table by table. A row without evidence of noise is unstable, so a table of
    averages stays open as a whole.

    For a row: `p` is the probability that an unchanged row shows a change in this direction of at least this size.
    `seen_from` is the smallest change (0.02: 2 % slower) that would have been called a regression. `beyond_rule` is the
    verdict of the rule alone. The repeats are those that agree, and all. For a table: `threshold` is the limit for p,
    and `judged` counts the judged rows. `averaged`: no row has repeats. `table_shift` is the median change;
    `shift_removed` of it counts as drift. `table_slower`: the table as a whole is a regression.
    """
    a, b = settle(golden), settle(tot)
    both = (a.count > 0) & (b.count > 0)
    ignored = both & (a.us < rule.ignore_below)
    usable = both & ~ignored
    noise, degrees = learn(a, b, usable)
    known = usable & (degrees > 0)
    whole = a.stable & b.stable & known
    change = np.where(usable, b.log - a.log, 0.0)
    spread = np.sqrt(1 / np.maximum(a.count, 1) + 1 / np.maximum(b.count, 1))
    shift, removed, extra, table_p = shift_of(change, noise * spread, whole, paired)
    rows = usable.sum(axis=-1)
    threshold = bound / np.maximum(rows, 1)
    moved, deviation = change - removed[..., None], np.hypot(noise * spread, extra[..., None])
    p = np.where(known, tail(np.abs(moved) / deviation, degrees), np.nan)
    adjusted = b.us * np.exp(-removed[..., None])
    over, under = usable & (adjusted > rule.limit(a.us)), whole & (a.us > rule.limit(adjusted))
    sure = p <= threshold[..., None]
    verdicts = np.select(
        [(a.count == 0) & (b.count > 0), (a.count > 0) & (b.count == 0), ignored, over & sure & (moved > 0),
         usable & ~whole, over, under & sure],
        ["new", "missing", "ignored", "regression", "unstable", "boundary", "improved"], "ok",
    )  # fmt: skip
    seen = np.maximum(np.expm1(smallest(threshold[..., None], degrees) * deviation), rule.limit(a.us) / a.us - 1)
    return {
        "golden_us": a.us, "tot_us": b.us, "change": b.us / a.us - 1, "verdict": verdicts, "p": p,
        "seen_from": np.where(whole, seen, np.nan), "beyond_rule": usable & (b.us > rule.limit(a.us)),
        "golden_repeats": (a.count * a.stable, a.count + a.strays),
        "tot_repeats": (b.count * b.stable, b.count + b.strays),
    }, {
        "threshold": threshold, "judged": rows, "averaged": bool(usable.any()) and not known.any(),
        "table_shift": np.expm1(shift), "shift_removed": np.expm1(removed),
        "table_slower": (2 * (over & whole).sum(axis=-1) > whole.sum(axis=-1)) & (table_p <= TABLE_BOUND * bound),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settled:
    """One side of a table, with one entry for each row.

    `us`: the mean of the kept repeats (for an unstable side the median of all), NaN without repeats. `log`: the mean of
    their logarithms. `squares`: the sum of the squared deviations from it. `count`: how many were kept (for an unstable
    side all). `strays`: how many were left out.
    """

    us: Floats
    log: Floats
    squares: Floats
    count: npt.NDArray[np.int64]
    strays: npt.NDArray[np.int64]
    stable: Bools


def settle(us: Floats) -> Settled:
    """Judges the repeats in an array (rows, repeats) of microseconds, with NaN for missing repeats.

    A side is stable if three repeats lie within 5 %, and most repeats lie within 5 % of the median. The others are left
    out. Nothing is left out of an unstable side: its repeats show how uncertain it is.
    """
    ordered = np.sort(us, axis=-1)  # NaN goes last
    there = np.isfinite(us)
    total = there.sum(axis=-1)
    median = np.take_along_axis(ordered, np.maximum((total - 1) // 2, 0)[..., None], axis=-1)
    near = there & (us <= AGREE * median) & (us * AGREE >= median)
    three = (ordered[..., ENOUGH - 1 :] <= AGREE * ordered[..., : 1 - ENOUGH]).any(axis=-1)
    stable = three & (near.sum(axis=-1) >= ENOUGH) & (2 * near.sum(axis=-1) > total)
    kept = np.where(stable[..., None], near, there)
    count = kept.sum(axis=-1)
    n, logs = np.maximum(count, 1), np.log(np.where(kept, us, 1.0))
    log = logs.sum(axis=-1) / n
    squares = (np.where(kept, logs - log[..., None], 0.0) ** 2).sum(axis=-1)
    mean = np.where(stable, np.where(kept, us, 0.0).sum(axis=-1) / n, median[..., 0])
    return Settled(mean, log, squares, count, total - count, stable)


def learn(a: Settled, b: Settled, usable: Bools) -> tuple[Floats, Floats]:
    """(standard deviation of one repeat, its degrees of freedom) of each row, from the repeats of the `usable` rows."""
    squares = a.squares + b.squares
    degrees = np.where(usable, np.maximum(a.count, 1) + np.maximum(b.count, 1) - 2.0, 0.0)
    variance = moderated(squares, degrees)[0]
    # repeats that noise made outliers count as 5 % from the mean; else the rest of a noisy row would look too quiet
    by_noise = _erfc(np.log(AGREE) / np.sqrt(2 * variance))
    strays = np.where(usable, a.strays + b.strays, 0) * by_noise / (STRAYS + by_noise)
    variance, known = moderated(squares + strays * np.log(AGREE) ** 2, degrees + strays * (degrees > 0))
    return np.sqrt(variance), known


def moderated(squares: Floats, degrees: Floats) -> tuple[Floats, Floats]:
    """(variance of each row, its degrees of freedom) from sums of squares.

    A row with 0 degrees of freedom has no evidence and gets the prior.
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
    return variance, np.where(joins, all_degrees, worth + d)


def _digamma(x: Floats) -> Floats:
    y = x + 6
    return np.log(y) - 1 / (2 * y) - 1 / (12 * y**2) + 1 / (120 * y**4) - sum(1 / (x + i) for i in range(6))


def _trigamma(x: Floats) -> Floats:
    y = x + 6
    return 1 / y + 1 / (2 * y**2) + 1 / (6 * y**3) - 1 / (30 * y**5) + sum(1 / (x + i) ** 2 for i in range(6))


_erfc = np.vectorize(erfc, otypes=[np.float64])
_quantile = np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])


def tail(t: Floats, degrees: Floats) -> Floats:
    """The share of Student's t beyond `t` >= 0, by Hill's normal approximation (1970, CACM algorithm 395)."""
    a = np.maximum(degrees, 1.0) - 0.5
    b, y = 48 * a**2, a * np.log1p(t**2 / np.maximum(degrees, 1.0))
    z = (((((-0.4 * y - 3.3) * y - 24) * y - 85.5) / (0.8 * y**2 + 100 + b) + y + 3) / b + 1) * np.sqrt(y)
    return np.asarray(_erfc(z / sqrt(2)) / 2)


def smallest(p: Floats, degrees: Floats) -> Floats:
    """The t beyond which the share of Student's t is `p`, by Wallace's approximation (1959), never too small.

    With 4 degrees of freedom it is 6 % too large at p = 1e-4 and 11 % at 1e-5, with 10 it is 1 % too large at 1e-5.
    """
    d = np.maximum(degrees, 1.0)
    return np.asarray(np.sqrt(d * np.expm1((_quantile(p) * (8 * d + 3) / (8 * d + 1)) ** 2 / d)))


def shift_of(change: Floats, deviation: Floats, rows: Bools, paired: bool) -> tuple[Floats, Floats, Floats, Floats]:
    """The common shift of each table, given the standard deviations `deviation` of its rows' changes. Returns the
    median change, the part of it that is removed as drift, the standard deviation that this leaves in a row's change,
    and the probability that an unchanged table shows as large a rest.

    The standard error is that of a median. It uses the robust spread (1.4826 MAD) of the changes, or the spread that
    their noise explains, whichever is larger. Sides that took turns (`paired`) have no drift.
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
    return shift, removed, extra, np.asarray(_erfc(z / sqrt(2)) / 2)


def _median(x: Floats, where: Bools) -> Floats:
    """The median of the marked values along the last axis; 0 if none is marked."""
    marked = np.ma.median(np.ma.array(x, mask=~where), axis=-1)  # type: ignore[no-untyped-call]
    return np.asarray(np.ma.filled(marked, 0.0))
