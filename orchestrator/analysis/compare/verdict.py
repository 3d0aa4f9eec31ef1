"""The verdict on every row of a table, and on the table: the rule of thumb, and the odds that chance breaks it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from orchestrator.analysis.compare.statistics import (
    ENOUGH,
    Bools,
    Floats,
    Noise,
    Settled,
    Shift,
    chance,
    evidence,
    learn,
    noise_of_changes,
    settle,
    shift_of,
)

Verdict = Literal["regression", "boundary", "unstable", "missing", "new", "improved", "ok", "ignored"]
VERDICTS: tuple[Verdict, ...] = (
    "regression", "boundary", "unstable", "missing", "new", "improved", "ok", "ignored",
)  # fmt: skip
"""The worst first."""
OPEN: tuple[Verdict, ...] = ("boundary", "unstable", "missing")
"""Verdicts of rows that could not be judged."""

BOUND = 0.008
"""Expected false regressions in a table in which nothing changed ..."""
TABLE_BOUND = 0.25
"""... and this part of it for the table as a whole: at most one unchanged table in a hundred is accused."""
AGAIN_BOUND = 0.002
"""The bound of a second look, small enough that both looks together stay near that."""
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
    """A table judged; arrays have an entry a row, NaN where nothing is known. Several tables have one axis more.

    `p` is how likely a row without a change shows one of this direction and at least this size; `seen_from` the
    smallest change (0.02: 2 % slower) that would have been called a regression; `noise` the standard deviation of one
    repeat; `beyond` what the rule alone says; `suspect` which rows could not be judged. `averaged`: no row has repeats;
    `slower`: the table as a whole is a regression; `threshold` is that of a row's p.
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
    averaged: bool
    alike: Bools
    shift: Shift
    slower: Bools
    threshold: Floats
    rows: npt.NDArray[np.int64]


def judge(
    golden: Floats, tot: Floats, *, rule: Rule | None = None, bound: float = BOUND, paired: bool = False,
    sizes: bool = True,
) -> Judged:  # fmt: skip
    """Judge arrays (rows, repeats) of microseconds, NaN where there is no repeat; paired: column by column.

    Arrays of several tables (tables, rows, repeats) are judged table by table. `sizes` False leaves out `seen_from`,
    which takes most of the time.
    """
    rule = rule or Rule()
    width = max(golden.shape[-1], tot.shape[-1], ENOUGH)
    golden, tot = (_wide(x, width) for x in (golden, tot))
    a, b = settle(golden), settle(tot)
    both = (a.count > 0) & (b.count > 0)
    with np.errstate(invalid="ignore"):
        ignored = both & (a.us < rule.ignore_below)
    usable = both & ~ignored
    by = evidence(golden, tot, a, b, usable, paired)
    averaged = bool(usable.any()) and not by.degrees.any() and bool((a.total[usable] + b.total[usable] == 2).all())
    change = np.where(usable, b.log - a.log, np.nan)
    noise = noise_of_changes(change, usable) if averaged else learn(by.squares, by.degrees, a.strays + b.strays)
    whole = usable if averaged else a.stable & b.stable & usable & (by.degrees > 0)
    level = np.broadcast_to(noise.by_row, change.shape)
    shift = shift_of(change, level * by.spread, whole, paired)
    rows = usable.sum(axis=-1)
    threshold = bound / np.maximum(rows, 1)
    removed = shift.removed[..., None]
    moved = np.where(usable, change - removed, 0.0)
    known = usable & (averaged | np.asarray(by.degrees.any(axis=-1))[..., None])
    p = np.where(known, chance(noise, np.abs(moved), by.spread, shift.extra), np.nan)
    with np.errstate(invalid="ignore"):
        adjusted = b.us * np.exp(-removed)
        beyond = usable & (b.us > rule.limit(a.us))
        over: Bools = usable & (adjusted > rule.limit(a.us))
        under: Bools = whole & (a.us > rule.limit(adjusted))
        sure = p <= threshold[..., None]
    verdicts = np.full(a.us.shape, "ok", dtype=object)
    verdicts[np.asarray(under & sure)] = "improved"
    verdicts[over] = "boundary"
    verdicts[usable & ~whole] = "unstable"
    verdicts[np.asarray(over & sure & (moved > 0))] = "regression"
    verdicts[ignored] = "ignored"
    verdicts[(a.count > 0) & (b.count == 0)] = "missing"
    verdicts[(a.count == 0) & (b.count > 0)] = "new"
    most = 2 * (over & whole).sum(axis=-1) > whole.sum(axis=-1)
    slower = most & (shift.p <= TABLE_BOUND * bound)
    seen = _seen_from(noise, by.spread, shift.extra, threshold) if sizes else np.full(p.shape, np.nan)
    with np.errstate(invalid="ignore"):
        seen = np.where(whole, np.maximum(np.expm1(seen), rule.limit(a.us) / a.us - 1), np.nan)
    return Judged(
        verdicts, a, b, change, p, np.where(known, level, np.nan), seen, beyond, np.isin(verdicts, OPEN), paired,
        by.in_pairs, averaged, noise.alike, shift, slower, threshold, rows,
    )  # fmt: skip


def by_rule_only(of: Judged, rule: Rule) -> Judged:
    """The same table by the rule alone: what is beyond it is a regression, whatever the noise."""
    a, b = of.golden, of.tot
    verdicts = np.full(a.us.shape, "ok", dtype=object)
    with np.errstate(invalid="ignore"):
        verdicts[a.us > rule.limit(b.us)] = "improved"
        verdicts[of.beyond] = "regression"
    for same in ("missing", "new", "ignored"):
        verdicts[of.verdicts == same] = same
    return replace(of, verdicts=verdicts, suspect=verdicts == "missing", slower=np.zeros_like(of.slower))


def _wide(x: Floats, width: int) -> Floats:
    missing = np.full((*x.shape[:-1], width - x.shape[-1]), np.nan)
    return np.concatenate([x, missing], axis=-1)


def _seen_from(noise: Noise, spread: Floats, extra: Floats, threshold: Floats) -> Floats:
    """The change that has exactly the probability `threshold` under no change, by bisection."""
    low, high = np.zeros(spread.shape), np.full(spread.shape, 4.0)
    for _ in range(int(np.ceil(np.log2(4.0 / _PRECISION)))):
        middle = (low + high) / 2
        far = chance(noise, middle, spread, extra) > threshold[..., None]
        low, high = np.where(far, middle, low), np.where(far, high, middle)
    return high
