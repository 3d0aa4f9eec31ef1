"""The verdict on every row of a table and on the whole table: a rule of thumb, and the odds that chance breaks it.

`comparison.py` reads the two sides, calls `judge` here, and words the result. Nothing here reads files.

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
from math import inf, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import digamma, erfc, ndtr, polygamma, stdtr, stdtrit

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
# The share of limma's prior degrees of freedom that counts: a few noisy rows make the prior too sure.
PRIOR = 0.5
# The most degrees of freedom of the prior; a quarter of the rows is another limit.
MOST_PRIOR = 10.0
# Share of repeats that are outliers for another reason than the row's noise.
STRAYS = 0.01
# Expected difference of two sessions of the same software: 0.5 % each, so 0.7 % between the two.
DRIFT = 0.007
# At most this much of a shift of the whole table counts as drift.
MOST_DRIFT = 0.02
# With fewer rows than this we do not estimate the shift of a table, and use DRIFT.
ENOUGH_ROWS = 10
# The standard deviation of a normal distribution over its median absolute deviation.
_MAD = 1.4826


@dataclass(frozen=True, slots=True)
class RegressionRule:
    """A row is suspected if tot > rel * golden + abs_us. Rows with golden below `ignore_below` us are ignored."""

    rel: float = 1.005
    abs_us: float = 0.5
    ignore_below: float = 4.0

    @classmethod
    def parse(cls, text: str, ignore_below: float) -> RegressionRule:
        """Return the rule of `REL,ABS`. Raises InputError."""
        with suppress(ValueError):
            rel, abs_us = map(float, text.split(","))
            if 1 <= rel < inf and 0 <= abs_us < inf:
                return cls(rel, abs_us, ignore_below)
        raise InputError(f"--rule {shown(text)}: must be two numbers REL,ABS, as 1.005,0.5: at least 1 and at least 0")

    def limit(self, us: Floats) -> Floats:
        """A row with a longer time than this is suspected."""
        return np.asarray(self.rel * us + self.abs_us)


STANDARD = RegressionRule()


def judge(
    golden: Floats, tot: Floats, *, rule: RegressionRule = STANDARD, bound: float = BOUND, paired: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Judges arrays (rows, repeats) of microseconds, with NaN for missing repeats. `paired`: the sides took turns.

    Returns two dicts by name: arrays with one entry for each row (NaN if unknown), and values for the table. Arrays of
    several tables (tables, rows, repeats) are judged table by table. A row without evidence of noise is unstable, so a
    table of averages stays open as a whole.

    For a row: `golden_us`, `tot_us`; `change`, as a share; `verdict`, of VERDICTS; `p`, the probability that an
    unchanged row shows a change in this direction of at least this size; `seen_from`, the smallest change (0.02: 2 %
    slower) that would have been called a regression; `beyond_rule`, the verdict of the rule alone; `golden_repeats`,
    `tot_repeats`: how many agree, and all.

    For a table: `threshold`, the limit for p; `judged`, the number of judged rows; `averaged`: no row has repeats;
    `table_shift`, the median change; `shift_removed`, how much of it counts as drift; `table_slower`: the table as a
    whole is a regression.
    """
    before = settle_repeats(golden)
    after = settle_repeats(tot)
    on_both = (before.count > 0) & (after.count > 0)
    ignored = on_both & (before.us < rule.ignore_below)
    usable = on_both & ~ignored
    noise, degrees = learn_noise(before, after, usable)
    noise_is_known = usable & (degrees > 0)
    is_certain = before.stable & after.stable & noise_is_known
    judged = _sum(usable)

    # the change of each row, without the drift of the table
    change = np.where(usable, after.log - before.log, 0.0)
    error = noise * np.sqrt(1 / before.divisor + 1 / after.divisor)
    shift = estimate_shift(change, error, is_certain, paired)
    drift = _add_axis(shift.removed)
    moved = change - drift

    # how likely chance alone makes such a change, by the distribution function of Student's t (`stdtr`)
    deviation = np.hypot(error, _add_axis(shift.extra))
    t_degrees = np.maximum(degrees, 1.0)
    p = np.where(noise_is_known, stdtr(t_degrees, -np.abs(moved) / deviation), np.nan)
    threshold = bound / np.maximum(judged, 1)
    row_threshold = _add_axis(threshold)
    is_significant = p <= row_threshold

    # what the rule says without the drift
    limit = rule.limit(before.us)
    adjusted = after.us * np.exp(-drift)
    slower = usable & (adjusted > limit)
    faster = is_certain & (before.us > rule.limit(adjusted))
    verdicts = {  # the first that holds counts
        "new": (before.count == 0) & (after.count > 0),
        "missing": (before.count > 0) & (after.count == 0),
        "ignored": ignored,
        "regression": slower & is_significant & (moved > 0),
        "unstable": usable & ~is_certain,
        "boundary": slower,
        "improved": faster & is_significant,
    }
    # the smallest change of that likelihood, by the inverse (`stdtrit`). A row without evidence of noise has none; its
    # deviation times this limit would overflow expm1.
    least_change = np.where(is_certain, -stdtrit(t_degrees, row_threshold) * deviation, np.nan)
    seen_from = np.maximum(np.expm1(least_change), limit / before.us - 1)
    most_are_slower = 2 * _sum(slower & is_certain) > _sum(is_certain)
    rows = {
        "golden_us": before.us,
        "tot_us": after.us,
        "change": after.us / before.us - 1,
        "verdict": np.select(list(verdicts.values()), list(verdicts), "ok"),
        "p": p,
        "seen_from": seen_from,
        "beyond_rule": usable & (after.us > limit),
        "golden_repeats": before.repeats,
        "tot_repeats": after.repeats,
    }
    table = {
        "threshold": threshold,
        "judged": judged,
        "averaged": bool(usable.any()) and not noise_is_known.any(),
        "table_shift": np.expm1(shift.median),
        "shift_removed": np.expm1(shift.removed),
        "table_slower": most_are_slower & (shift.p <= TABLE_BOUND * bound),
    }
    return rows, table


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

    @property
    def divisor(self) -> npt.NDArray[np.int64]:
        """The number of kept repeats, 1 for a row without any, so that it can be divided by."""
        return np.maximum(self.count, 1)

    @property
    def repeats(self) -> tuple[Any, Any]:
        """The number of repeats that agree (0 for an unstable side), and of all."""
        return self.count * self.stable, self.count + self.strays


def settle_repeats(us: Floats) -> Settled:
    """Judges the repeats in an array (rows, repeats) of microseconds, with NaN for missing repeats.

    A side is stable if three repeats lie within 5 %, and most repeats lie within 5 % of the median. The others are left
    out. Nothing is left out of an unstable side: its repeats show how uncertain it is.
    """
    ordered = np.sort(us, axis=-1)  # NaN goes last
    present = np.isfinite(us)
    total = _sum(present)
    middle = np.maximum((total - 1) // 2, 0)
    median = np.take_along_axis(ordered, _add_axis(middle), axis=-1)
    near = present & (us <= AGREE * median) & (us * AGREE >= median)
    near_count = _sum(near)
    three_agree = (ordered[..., ENOUGH - 1 :] <= AGREE * ordered[..., : 1 - ENOUGH]).any(axis=-1)
    stable = three_agree & (near_count >= ENOUGH) & (2 * near_count > total)

    kept = np.where(_add_axis(stable), near, present)
    count = _sum(kept)
    divisor = np.maximum(count, 1)
    logs = np.log(np.where(kept, us, 1.0))
    log = _sum(logs) / divisor
    squares = _sum(np.where(kept, logs - _add_axis(log), 0.0) ** 2)
    mean = _sum(np.where(kept, us, 0.0)) / divisor
    return Settled(np.where(stable, mean, median[..., 0]), log, squares, count, total - count, stable)


def learn_noise(before: Settled, after: Settled, usable: Bools) -> tuple[Floats, Floats]:
    """(standard deviation of one repeat, its degrees of freedom) of each row, from the repeats of the `usable` rows."""
    squares = before.squares + after.squares
    degrees = np.where(usable, before.divisor + after.divisor - 2.0, 0.0)
    variance, _ = moderate_variances(squares, degrees)
    # repeats that noise made outliers count as 5 % from the mean; else the rest of a noisy row would look too quiet
    by_noise = erfc(np.log(AGREE) / np.sqrt(2 * variance))
    strays = np.where(usable, before.strays + after.strays, 0) * by_noise / (STRAYS + by_noise)
    squares += strays * np.log(AGREE) ** 2
    variance, degrees = moderate_variances(squares, degrees + np.where(degrees > 0, strays, 0))
    return np.sqrt(variance), degrees


def moderate_variances(squares: Floats, degrees: Floats) -> tuple[Floats, Floats]:
    """(variance of each row, its degrees of freedom) from sums of squares.

    A row with 0 degrees of freedom has no evidence and gets the prior.
    """
    has_evidence = degrees > 0
    divisor = np.where(has_evidence, degrees, 1.0)

    def total(x: Floats | float) -> Floats:
        return np.asarray(np.where(has_evidence, x, 0.0).sum(axis=-1, keepdims=True))

    rows = np.maximum(total(1.0), 1)
    further_rows = np.maximum(rows - 1, 1)
    log_variances = np.log(np.maximum(squares / divisor, LEAST_NOISE**2))

    # Bartlett's test: do all rows have the same noise?
    all_degrees = total(divisor)
    all_divisor = np.maximum(all_degrees, 1)
    pooled = np.maximum(total(squares) / all_divisor, LEAST_NOISE**2)
    bartlett = all_degrees * np.log(pooled) - total(divisor * log_variances)
    bartlett /= 1 + (total(1 / divisor) - 1 / all_divisor) / (3 * further_rows)
    alike = bartlett <= rows - 1 + ALIKE * np.sqrt(2 * (rows - 1))
    shares_pooled = alike & (squares <= LOUD * pooled * np.where(has_evidence, degrees, 0.0))

    # Smyth's prior: the mean and the excess spread of the log variances give its variance and half its degrees
    half = divisor / 2
    logs = log_variances - digamma(half) + np.log(half)
    mean = total(logs) / rows
    excess = total((logs - mean) ** 2) / further_rows - total(polygamma(1, half)) / rows
    grid = np.geomspace(1e4, 0.05, 400)
    half_prior = np.interp(np.maximum(excess, 1e-4), polygamma(1, grid), grid)
    prior = np.exp(mean + digamma(half_prior) - np.log(half_prior))
    worth = np.minimum(2 * PRIOR * half_prior, np.minimum(MOST_PRIOR, rows / 4))
    all_worth = worth + np.where(has_evidence, degrees, 0.0)
    moderate = (worth * prior + np.where(has_evidence, squares, 0.0)) / all_worth

    variance = np.maximum(np.where(shares_pooled, pooled, moderate), LEAST_NOISE**2)
    return variance, np.where(shares_pooled, all_degrees, all_worth)


class Shift(NamedTuple):
    """The common change of all rows, for each table.

    `median`: the median change. `removed`: the part of it that is taken away as drift. `extra`: the standard deviation
    that this leaves in a row's change. `p`: the probability that an unchanged table shows as large a rest.
    """

    median: Floats
    removed: Floats
    extra: Floats
    p: Floats


def estimate_shift(change: Floats, deviation: Floats, rows: Bools, paired: bool) -> Shift:
    """The common change of the marked `rows`, given the standard deviations `deviation` of their changes.

    The standard error is that of a median. It uses the robust spread (1.4826 MAD) of the changes, or the spread that
    their noise explains, whichever is larger. Sides that took turns (`paired`) have no drift.
    """
    count = _sum(rows)
    has_enough = count >= ENOUGH_ROWS
    shift = _median(change, rows)
    expected = _median(deviation, rows)
    seen = _MAD * _median(np.abs(change - _add_axis(shift)), rows)
    spread = np.where(has_enough, np.maximum(seen, expected), expected)
    error = spread * sqrt(np.pi / 2) / np.sqrt(np.maximum(count, 1) + 0.57)
    removed = np.where(has_enough & (not paired), np.clip(shift, -MOST_DRIFT, MOST_DRIFT), 0.0)
    if paired:
        extra = np.zeros_like(shift)
        shift_error = error
    else:
        extra = np.where(has_enough, error, DRIFT)
        shift_error = np.where(has_enough, error, np.hypot(error, DRIFT))
    return Shift(shift, removed, extra, ndtr((removed - shift) / np.maximum(shift_error, 1e-9)))


def _sum(values: Any) -> Any:
    """The sum along the last axis."""
    return values.sum(axis=-1)


def _add_axis(values: Any) -> Any:
    """Values of tables or rows with another axis, so that they are applied to each row or repeat."""
    return values[..., None]


def _median(x: Floats, where: Bools) -> Floats:
    """The median of the marked values along the last axis; 0 if none is marked."""
    marked = np.ma.median(np.ma.array(x, mask=~where), axis=-1)  # type: ignore[no-untyped-call]
    return np.asarray(np.ma.filled(marked, 0.0))
