"""The verdict on every row of a table, and on the table: the rule of thumb, and the odds that chance breaks it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from orchestrator.analysis.compare.statistics import (
    ENOUGH,
    Bools,
    Floats,
    Noise,
    Settled,
    Shift,
    learn,
    settle,
    shift_of,
    tail,
)

# The worst first.
VERDICTS = ("regression", "boundary", "unstable", "missing", "new", "improved", "ok", "ignored")
# Verdicts of rows that could not be judged.
OPEN = ("boundary", "unstable", "missing")
# Expected false regressions in a table in which nothing changed ...
BOUND = 0.008
# ... and this part of it for the table as a whole: at most one unchanged table in a hundred is accused.
TABLE_BOUND = 0.25
# The bound of a second look, small enough that both looks together stay near that.
AGAIN_BOUND = 0.002


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
    """A table judged; arrays have an entry a row, NaN where nothing is known. Several tables have one axis more.

    `p` is how likely a row without a change shows one of this direction and at least this size; `seen_from` the
    smallest change (0.02: 2 % slower) that would have been called a regression; `beyond` what the rule alone says;
    `averaged`: no row has repeats, so none is judged; `slower`: the table as a whole is a regression; `threshold` is
    that of a row's p.
    """

    verdicts: npt.NDArray[np.object_]
    golden: Settled
    tot: Settled
    p: Floats
    noise: Noise
    seen_from: Floats
    beyond: Bools
    paired: bool
    averaged: bool
    shift: Shift
    slower: Bools
    threshold: Floats
    rows: npt.NDArray[np.int64]

    @property
    def suspect(self) -> Bools:
        """The rows that could not be judged."""
        return np.isin(self.verdicts, OPEN)


def judge(
    golden: Floats, tot: Floats, *, rule: Rule | None = None, bound: float = BOUND, paired: bool = False
) -> Judged:
    """Judges arrays (rows, repeats) of microseconds, NaN where there is no repeat; paired: column by column.

    Arrays of several tables (tables, rows, repeats) are judged table by table. A row without evidence of noise is
    unstable, so a table of averages is left open as a whole.
    """
    rule = rule or Rule()
    width = max(golden.shape[-1], tot.shape[-1], ENOUGH)
    pad = [(0, 0)] * (golden.ndim - 1)
    golden, tot = (np.pad(x, [*pad, (0, width - x.shape[-1])], constant_values=np.nan) for x in (golden, tot))
    a, b = settle(golden), settle(tot)
    both = (a.count > 0) & (b.count > 0)
    ignored = both & (a.us < rule.ignore_below)
    usable = both & ~ignored
    noise = learn(golden, tot, a, b, usable, paired)
    known = usable & (noise.degrees > 0)
    whole = a.stable & b.stable & known
    change = np.where(usable, b.log - a.log, 0.0)
    shift = shift_of(change, noise.level * noise.spread, whole, paired)
    rows = usable.sum(axis=-1)
    threshold = bound / np.maximum(rows, 1)
    removed, moved = shift.removed[..., None], change - shift.removed[..., None]
    deviation = np.hypot(noise.level * noise.spread, shift.extra[..., None])
    p = np.where(known, tail(np.abs(moved) / deviation, noise.degrees), np.nan)
    adjusted = b.us * np.exp(-removed)
    over, under = usable & (adjusted > rule.limit(a.us)), whole & (a.us > rule.limit(adjusted))
    sure = p <= threshold[..., None]
    verdicts = np.select(
        [(a.count == 0) & (b.count > 0), (a.count > 0) & (b.count == 0), ignored, over & sure & (moved > 0),
         usable & ~whole, over, under & sure],
        ["new", "missing", "ignored", "regression", "unstable", "boundary", "improved"], "ok",
    )  # fmt: skip
    most = 2 * (over & whole).sum(axis=-1) > whole.sum(axis=-1)
    seen = np.expm1(_smallest(threshold[..., None], noise.degrees) * deviation)
    seen = np.where(whole, np.maximum(seen, rule.limit(a.us) / a.us - 1), np.nan)
    return Judged(
        verdicts, a, b, p, noise, seen, usable & (b.us > rule.limit(a.us)), paired,
        bool(usable.any()) and not known.any(), shift, most & (shift.p <= TABLE_BOUND * bound), threshold, rows,
    )  # fmt: skip


def by_rule_only(of: Judged, rule: Rule) -> Judged:
    """The same table by the rule alone: what is beyond it is a regression, whatever the noise."""
    kept = np.isin(of.verdicts, ("missing", "new", "ignored"))
    improved = of.golden.us > rule.limit(of.tot.us)
    plain = np.select([kept, of.beyond, improved], [of.verdicts, "regression", "improved"], "ok")
    return replace(of, verdicts=plain, slower=np.zeros_like(of.slower))


def _smallest(threshold: Floats, degrees: Floats) -> Floats:
    """The t that has exactly the probability `threshold`, by bisection of its logarithm."""
    low, high = np.full(degrees.shape, -3.0), np.full(degrees.shape, 12.0)
    for _ in range(24):
        middle = (low + high) / 2
        far = tail(np.exp(middle), degrees) > threshold
        low, high = np.where(far, middle, low), np.where(far, high, middle)
    return np.asarray(np.exp(high))
