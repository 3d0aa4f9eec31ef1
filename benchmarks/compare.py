"""How often `compare` accuses unchanged stacks and finds a slow-down, on simulated tables (docs/compare.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmarks.figure import Figure
from orchestrator.analysis.compare.repeats import Floats
from orchestrator.analysis.compare.verdict import Rule, judge

Draw = Literal["even", "log"]
DRAWS: tuple[Draw, ...] = ("log", "even")


@dataclass(frozen=True, slots=True)
class Simulated:
    """Golden times log-uniform from 20 to 5,000 us; each row's noise drawn from 0.2 to 2 % (`draw`: evenly, or evenly
    on a log scale); normal noise on the logarithm; 2 % of the repeats take 1.05 to 1.5 times as long; each side drifts
    as a whole by a normal 0.5 %, unless both are measured in turn (`paired`). With `slower`, row 0 takes 200 us,
    has 0.5 % noise and is slower by so much."""

    rows: int
    repeats: int = 3
    draw: Draw = "log"
    slower: float = 0.0
    outliers: float = 0.02
    drift: float = 0.005

    def rows_of(self, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """(golden us, noise) of the rows."""
        base = np.exp(rng.uniform(np.log(20), np.log(5000), self.rows))
        if self.draw == "even":
            noise = rng.uniform(0.002, 0.02, self.rows)
        else:
            noise = np.exp(rng.uniform(np.log(0.002), np.log(0.02), self.rows))
        if self.slower:
            base[0], noise[0] = 200.0, 0.005
        return base, noise

    def measure(
        self, rng: np.random.Generator, base: Floats, noise: Floats, *, repeats: int, paired: bool, changed: bool
    ) -> tuple[Floats, Floats]:
        """(golden, tot) as (rows, repeats); `changed`: row 0 is slower."""
        sides = []
        drift = np.exp(self.drift * rng.standard_normal(2))
        for side in range(2):
            shape = (len(base), repeats)
            us = base[:, None] * np.exp(noise[:, None] * rng.standard_normal(shape)) * (1.0 if paired else drift[side])
            stray = rng.random(shape) < self.outliers
            us = np.where(stray, us * rng.uniform(1.05, 1.5, shape), us)
            if side and changed:
                us[0] *= 1 + self.slower
            sides.append(us)
        return sides[0], sides[1]


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of tables. `accused`: any regression though nothing changed; `found`: the slower row is a regression;
    each by the plain rule, at the first look, at the first or the second. `left_open`: the first look put the slower
    row on the list for the second; `again`: the share of an unchanged table's rows on that list."""

    accused_by_rule: float
    accused_first: float
    accused: float
    found_by_rule: float
    found_first: float
    left_open: float
    found: float
    again: float


def rates(of: Simulated, tables: int, slower: int, seed: int, second: int = 7) -> Rates:
    """Simulate `tables` tables without a change and `slower` with a slower row. The second look measures anew what
    the first left open, `second` repeats a side, in turn."""
    rng = np.random.default_rng(seed)
    unchanged = np.array([_looks(of, rng, False, second) for _ in range(tables)])
    changed = np.array([_looks(of, rng, True, second)[:, 0] for _ in range(slower)]).mean(axis=0)
    any_row, again = unchanged[:, :3].any(axis=2).mean(axis=0), unchanged[:, 3].mean()
    found = float(changed[0]), float(changed[1]), float(changed[3]), float(changed[2])
    return Rates(float(any_row[0]), float(any_row[1]), float(any_row[2]), *found, float(again))


def _looks(of: Simulated, rng: np.random.Generator, changed: bool, second: int) -> npt.NDArray[np.bool_]:
    """(4, rows): flagged by the rule, at the first look, at the first or second look; on the list for the second."""
    base, noise = of.rows_of(rng)
    golden, tot = of.measure(rng, base, noise, repeats=of.repeats, paired=False, changed=changed)
    look = judge(golden, tot, sizes=False)
    # as the rule is used by hand: on the means of all repeats
    by_rule = tot.mean(axis=1) > Rule().limit(golden.mean(axis=1))
    first = look.verdicts == "regression"
    both, at = first.copy(), np.flatnonzero(look.suspect)
    if len(at):
        anew = of.measure(rng, base[at], noise[at], repeats=second, paired=True, changed=changed and at[0] == 0)
        both[at] |= judge(*anew, paired=True, sizes=False).verdicts == "regression"
    return np.array([by_rule, first, both, look.suspect])


def most_to_be_found(rows: int, repeats: int, draw: Draw, seed: int = 1, samples: int = 100_000) -> float:
    """How often the best of all tests finds the slower row where it accuses one unchanged table in a hundred.

    By Neyman and Pearson's lemma that is the likelihood ratio test, here of (difference of the means, pooled variance)
    of a row, told even what it looks for and how noise is drawn, with neither drift nor outliers in its way. The rate
    of false alarms is the mean of 1 / ratio over samples of the slower row, where the ratio is above the threshold.
    """
    rng = np.random.default_rng(seed)
    degrees, true, change = 2 * (repeats - 1), 0.005, 0.03
    d = change + true * np.sqrt(2 / repeats) * rng.standard_normal(samples)
    variance = true**2 * rng.chisquare(degrees, samples) / degrees
    levels = np.geomspace(0.002, 0.02, 100)
    share = np.ones_like(levels) if draw == "log" else levels

    def density(level: float, shift: float) -> Floats:
        exponent = -((d - shift) ** 2) * repeats / 4 - degrees * variance / 2
        return np.asarray(np.exp(exponent / level**2) / level ** (degrees + 1))

    unchanged = sum(density(level, 0.0) * w for level, w in zip(levels, share / share.sum(), strict=True))
    inverse = np.sort(unchanged / density(true, change))
    false_alarms = np.cumsum(inverse) / samples
    return float(np.searchsorted(false_alarms, 0.01 / rows) / samples)


SIZES = ((61, 3000, 1000), (1000, 600, 200))
"""Rows, unchanged tables, tables with a slower row."""


def run(folder: Path) -> list[Figure]:
    """Both sizes of table, both ways to draw the noise; prints the table of docs/compare.md as well."""
    figures = []
    print("| rows | noise drawn | repeats | unchanged tables accused: rule, first look, both looks"
          " | slower row found: rule, first look, both looks | at most, first look | looked at again |")  # fmt: skip
    print("|---:|---|---:|---|---|---:|---:|")
    for rows, tables, slower in SIZES:
        for draw in DRAWS:
            for repeats in (3, 5):
                r = rates(Simulated(rows, repeats, draw, slower=0.03), tables, slower, seed=rows + repeats)
                print(f"| {rows} | {draw} | {repeats} | {r.accused_by_rule:.1%}, {r.accused_first:.2%}, {r.accused:.2%}"
                      f" | {r.found_by_rule:.1%}, {r.found_first:.1%}, {r.found:.1%}"
                      f" | {most_to_be_found(rows, repeats, draw):.1%} | {r.again:.1%} |")  # fmt: skip
                if repeats == 3:
                    how = f"{tables} simulated tables, noise drawn {draw}; the plain rule: "
                    figures += [
                        Figure(f"unchanged {rows} rows accused, both looks", 100 * r.accused, 1.0, "%",
                               f"{how}{r.accused_by_rule:.1%}"),
                        Figure(f"3 % slower row of {rows} found, both looks", 100 * r.found, 90.0, "%",
                               f"{how}{r.found_by_rule:.1%}; at the first look {r.found_first:.1%}", at_least=True),
                    ]  # fmt: skip
    return figures
