"""How often `compare` accuses unchanged stacks and finds a slow-down, on simulated tables (docs/compare.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from orchestrator.analysis.compare.repeats import Floats, settle
from orchestrator.analysis.compare.verdict import Rule, judge

Draw = Literal["even", "log"]


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
    """Shares of tables: `accused` without a change, by the plain rule, by the first look, by both; `found` of the
    slower row likewise, and `open` where the first look left it for the second. `again`: share of rows looked at
    again."""

    accused_plain: float
    accused_first: float
    accused: float
    found_plain: float
    found_first: float
    open: float
    found: float
    again: float


def rates(of: Simulated, tables: int, seed: int, second: int = 7) -> Rates:
    """Simulate `tables` tables without and as many with a slower row. The second look measures what the first left
    open anew, `second` repeats in turn."""
    rng = np.random.default_rng(seed)
    plain, first, both, opened, again = (
        np.zeros((2, tables), bool),
        *(np.zeros((2, tables), bool) for _ in range(3)),
        [],
    )
    for changed in (0, 1):
        for t in range(tables):
            base, noise = of.rows_of(rng)
            golden, tot = of.measure(rng, base, noise, repeats=of.repeats, paired=False, changed=bool(changed))
            look = judge(golden, tot, sizes=False)
            rule = settle(tot).us > Rule().limit(settle(golden).us)
            flagged = look.verdicts == "regression"
            at = np.flatnonzero(look.suspect)
            more = flagged.copy()
            if len(at):
                new = of.measure(
                    rng, base[at], noise[at], repeats=second, paired=True, changed=bool(changed) and at[0] == 0
                )
                more[at] |= judge(*new, paired=True, sizes=False).verdicts == "regression"
            pick: Callable[[np.ndarray], bool] = (lambda x: bool(x[0])) if changed else (lambda x: bool(x.any()))
            plain[changed, t], first[changed, t], both[changed, t] = pick(rule), pick(flagged), pick(more)
            opened[changed, t] = look.suspect[0]
            if not changed:
                again.append(len(at) / of.rows)
    return Rates(
        *(float(x[0].mean()) for x in (plain, first, both)),
        float(plain[1].mean()), float(first[1].mean()), float(opened[1].mean()), float(both[1].mean()),
        float(np.mean(again)),
    )  # fmt: skip
