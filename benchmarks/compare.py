"""Rates at which `compare` accuses unchanged stacks, leaves rows open and finds a slow-down, on simulated tables,
beside the bound that no test can pass (benchmarks/results/compare.md). Thousands of tables are judged at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import numpy as np

from benchmarks.figure import Figure
from orchestrator.results.verdicts import AGAIN_BOUND, OPEN, Floats, RegressionRule, judge

Draw = Literal["same", "log", "even"]
BATCH = 250
"""Tables that are judged at once: a matter of memory."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """Golden times log-uniform from 20 to 5,000 us, normal noise on the logarithm of each repeat: of all rows `noise`
    (`draw` same), or of each row drawn from 0.2 to 2 % (evenly, or evenly on a log scale); `noisy` of the rows have
    `noisy_noise`; `strays` of the repeats take 1.05 to 1.5 times as long; each side drifts as a whole by a normal
    `drift`, unless both are measured in turn (`paired`). The first `changed` rows take 200 us and have 0.5 % noise (or
    the common one), and are slower by `slower`. One repeat a side: the mean of three, as in averaged tables."""

    rows: int
    repeats: int = 3
    draw: Draw = "same"
    noise: float = 0.005
    noisy: float = 0.0
    noisy_noise: float = 0.03
    strays: float = 0.0
    drift: float = 0.005
    slower: float = 0.0
    changed: int = 2
    paired: bool = False

    def rows_of(self, rng: np.random.Generator, tables: int) -> tuple[Floats, Floats]:
        """(golden us, noise) as (tables, rows)."""
        shape = (tables, self.rows)
        base = np.exp(rng.uniform(np.log(20), np.log(5000), shape))
        noise = np.full(shape, self.noise)
        if self.draw == "even":
            noise = rng.uniform(0.002, 0.02, shape)
        elif self.draw == "log":
            noise = np.exp(rng.uniform(np.log(0.002), np.log(0.02), shape))
        if self.noisy:
            noise[:, self.rows - max(1, round(self.noisy * self.rows)) :] = self.noisy_noise
        if self.slower:
            base[:, : self.changed] = 200.0
            noise[:, : self.changed] = self.noise
        return base, noise / (np.sqrt(3) if self.repeats == 1 else 1)

    def measure(
        self, rng: np.random.Generator, base: Floats, noise: Floats, *, repeats: int, paired: bool
    ) -> tuple[Floats, Floats]:
        """(golden, tot) as (tables, rows, repeats), no row slower."""
        sides = []
        for _ in range(2):
            shape = (*base.shape, repeats)
            logs = noise[..., None] * rng.standard_normal(shape)
            if not paired:
                logs += self.drift * rng.standard_normal((*base.shape[:-1], 1, 1))
            us = base[..., None] * np.exp(logs)
            if self.strays:
                us = np.where(rng.random(shape) < self.strays, us * rng.uniform(1.05, 1.5, shape), us)
            sides.append(us)
        return sides[0], sides[1]


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares: `accused` of tables end with 1, `left_open` with 4; `found` of the slower rows are a regression, `listed`
    of them could not be judged; `by_rule` of tables the rule alone accuses; `again` of all rows are left open."""

    accused: float
    left_open: float
    found: float
    listed: float
    by_rule: float
    again: float


def rates(of: Simulated, tables: int, seed: int) -> Rates:
    """Simulate this many tables. With `slower`, `found` and `listed` are about the slower rows."""
    rng = np.random.default_rng(seed)
    sums, left = np.zeros(6), tables
    while left > 0:
        n = min(BATCH, left)
        left -= n
        golden, tot = of.measure(rng, *of.rows_of(rng, n), repeats=of.repeats, paired=of.paired)
        tot[:, : of.changed] *= 1 + of.slower
        look, table = judge(golden, tot, paired=of.paired)
        regression = look["verdict"] == "regression"
        accused = regression.any(axis=1) | table["table_slower"]
        # as the rule is used by hand: on the means of all repeats
        by_rule = (tot.mean(axis=2) > RegressionRule().limit(golden.mean(axis=2))).any(axis=1)
        suspect = np.isin(look["verdict"], OPEN)
        slow, listed = regression[:, : of.changed].mean(axis=1), suspect[:, : of.changed].mean(axis=1)
        left_open = ~accused & suspect.any(axis=1)
        sums += [x.sum() for x in (accused, left_open, slow, listed, by_rule, suspect.mean(axis=1))]
    return Rates(*(float(x) for x in sums / tables))


def both_looks(of: Simulated, tables: int, seed: int, second: int = 7) -> tuple[float, float]:
    """(share of tables that end with 1 at one of two looks, share of the slower rows found): what the first look left
    open is measured anew, `second` repeats a side, in turn."""
    rng = np.random.default_rng(seed)
    accused = found = 0.0
    base, noise = of.rows_of(rng, tables)
    golden, tot = of.measure(rng, base, noise, repeats=of.repeats, paired=of.paired)
    tot[:, : of.changed] *= 1 + of.slower
    for i in range(tables):
        look, table = judge(golden[i], tot[i], paired=of.paired)
        slow, whole = look["verdict"] == "regression", bool(table["table_slower"])
        at = np.flatnonzero(np.isin(look["verdict"], OPEN))
        if len(at):
            a, b = of.measure(rng, base[i, at], noise[i, at], repeats=second, paired=True)
            b[at < of.changed] *= 1 + of.slower
            anew, table = judge(a, b, paired=True, bound=AGAIN_BOUND)
            slow[at] |= anew["verdict"] == "regression"
            whole |= bool(table["table_slower"])
        accused += bool(slow.any() or whole)
        found += float(slow[: of.changed].mean())
    return accused / tables, found / tables


def most_to_be_found(rows: int, repeats: int, noise: float, slower: float) -> float:
    """The power of the best test that knows every row's noise and that nothing drifts, and accuses one unchanged table
    in a hundred: by Neyman and Pearson's lemma, the difference of the means against its known standard error."""
    threshold = NormalDist().inv_cdf(0.99 ** (1 / rows))
    return 1 - NormalDist().cdf(threshold - float(np.log1p(slower)) / (noise * float(np.sqrt(2 / repeats))))


UNCHANGED = (
    ("all rows 0.5 %", Simulated(61)),
    ("all rows 0.5 %, in turn", Simulated(61, paired=True)),
    ("all rows 0.5 %, 12 rows", Simulated(12)),
    ("all rows 0.5 %, 300 rows", Simulated(300)),
    ("all rows 2 %", Simulated(61, noise=0.02)),
    ("a tenth 3 %, the others 0.5 %", Simulated(61, noisy=0.1)),
    ("a tenth 3 %, the others 0.5 %, 12 rows", Simulated(12, noisy=0.1)),
    ("a tenth 3 %, the others 0.5 %, 300 rows", Simulated(300, noisy=0.1)),
    ("a tenth 1 %, the others 0.5 %", Simulated(61, noisy=0.1, noisy_noise=0.01)),
    ("one row 1.5 %, the others 0.5 %", Simulated(61, noisy=0.01, noisy_noise=0.015)),
    ("0.2 to 2 %, log; 2 % strays", Simulated(61, draw="log", strays=0.02)),
    ("0.2 to 2 %, even; 2 % strays", Simulated(61, draw="even", strays=0.02)),
    ("averaged, all rows 0.5 %", Simulated(61, 1)),
    ("averaged, all rows 0.5 %, 12 rows", Simulated(12, 1)),
    ("averaged, a tenth 3 %, the others 0.5 %", Simulated(61, 1, noisy=0.1)),
)


def run(folder: Path) -> list[Figure]:
    """Prints the tables of benchmarks/results/compare.md as well."""
    figures = []
    print("| unchanged tables of 61 rows, three repeats | exit 1 | exit 4 | rows left open | the rule alone accuses |")
    print("|---|---:|---:|---:|---:|")
    for name, of in UNCHANGED:
        tables = 600 if of.rows == 300 else 3000
        r = rates(of, tables, seed=of.rows)
        print(f"| {name} | {r.accused:.2%} | {r.left_open:.1%} | {r.again:.1%} | {r.by_rule:.1%} |", flush=True)
        if name.startswith(("all rows", "a tenth 3 %", "averaged, all rows")):
            figures.append(Figure(f"unchanged tables accused, {name}", 100 * r.accused, 1.0, "%", f"{tables} tables"))
    print("\n| two rows of 61 slower by, all rows 0.5 % | found | at most | of the bound | found in turn | listed |")
    print("|---:|---:|---:|---:|---:|---:|")
    for slower in (0.015, 0.02, 0.025, 0.03, 0.05):
        r = rates(Simulated(61, slower=slower), 1000, seed=1)
        turn = rates(Simulated(61, slower=slower, paired=True), 1000, seed=2)
        most = most_to_be_found(61, 3, 0.005, slower)
        print(
            f"| {slower:.1%} | {r.found:.1%} | {most:.1%} | {r.found / most:.2f} | {turn.found:.1%} | {r.listed:.1%} |"
        )
        if slower >= 0.02:
            figures.append(Figure(f"{slower:.1%} slower rows found", 100 * r.found, 90 * most, "%",
                                  "2,000 rows in 1,000 tables of 61; the bound is 0.9 of the best test's power",
                                  at_least=True))  # fmt: skip
    figures.append(Figure("5 % slower rows of 61 found", 100 * rates(Simulated(61, slower=0.05), 2000, seed=3).found,
                          99.0, "%", "4,000 rows in 2,000 tables", at_least=True))  # fmt: skip
    print("\n| both looks, 3 % slower row of 0.5 % noise, 2 % strays | exit 1 unchanged | found |\n|---|---:|---:|")
    for rows, draw, tables in ((61, "log", 1500), (61, "even", 1500)):
        of = Simulated(rows, draw=draw, strays=0.02, changed=1)  # type: ignore[arg-type]
        slow = Simulated(rows, draw=draw, strays=0.02, changed=1, slower=0.03)  # type: ignore[arg-type]
        accused, found = both_looks(of, tables, rows)[0], both_looks(slow, tables // 5, rows)[1]
        print(f"| {rows} rows, noise 0.2 to 2 %, {draw} | {accused:.2%} | {found:.1%} |", flush=True)
        figures += [
            Figure(f"unchanged {rows} rows accused, both looks, {draw}", 100 * accused, 1.5, "%", f"{tables} tables"),
            Figure(f"3 % slower row of {rows} found, both looks, {draw}", 100 * found, 90.0, "%",
                   f"{tables // 5} tables", at_least=True),
        ]  # fmt: skip
    return figures
