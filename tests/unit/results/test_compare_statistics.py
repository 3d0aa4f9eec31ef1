"""`compare` on simulated tables: how often it accuses, how often it finds; and the parts that this rests on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.compare import Simulated, most_to_be_found, rates
from orchestrator.results.compare import Floats, judge

NAN = math.nan


def table(*rows: list[float]) -> Floats:
    width = max(map(len, rows))
    return np.array([[*r, *[NAN] * (width - len(r))] for r in rows])


@pytest.mark.parametrize(
    ("of", "tables"),
    [
        (Simulated(61), 500),
        (Simulated(61, paired=True), 500),
        (Simulated(12, noisy=0.1, noisy_noise=0.03), 1500),
        (Simulated(61, draw="log", strays=0.02), 500),
    ],
)
def test_unchanged_tables_do_not_end_with_1(of: Simulated, tables: int) -> None:
    """Held at 1 %; the seeds are fixed, and the benchmark measures the rates on more tables."""
    assert rates(of, tables, seed=of.rows).accused <= 0.01


@pytest.mark.parametrize(("slower", "tables"), [(0.02, 500), (0.05, 200)])
def test_power_beside_the_test_that_knows_the_noise(slower: float, tables: int) -> None:
    r = rates(Simulated(61, slower=slower), tables, seed=4)
    best = most_to_be_found(61, 3, 0.005, slower)
    assert r.found >= 0.88 * best  # 0.9 and more over many tables
    assert r.found + r.listed >= 0.99  # nothing is lost: what is not found is left open
    assert slower < 0.05 or r.found >= 0.99


@pytest.mark.parametrize("rows", [5, 12, 61])
def test_a_table_that_is_slower_everywhere_is_a_regression_of_the_table(rows: int) -> None:
    rng = np.random.default_rng(rows)
    golden = rng.uniform(100, 1000, (rows, 1)) * np.exp(0.002 * rng.standard_normal((rows, 3)))
    for slower, verdict in ((1.1, True), (1.0, False)):
        j = judge(golden, golden * slower * np.exp(0.002 * rng.standard_normal((rows, 3))))
        assert bool(j.slower) is verdict
    if rows >= 10:  # up to 2 % may be drift
        assert not judge(golden, golden * 1.015).slower
        assert judge(golden, golden * 1.015, paired=True).slower


def test_verdicts_one_by_one() -> None:
    quiet = [100.0, 100.1, 100.2]
    golden = table(quiet, quiet, quiet, quiet, [3.0, 3.0, 3.01], quiet[:2], [], quiet, [10.0, 10.01, 10.02])
    tot = table([110, 110.1, 110.2], [100, 100.1, 100.3], [90, 90.1, 90.2], [101.2, 101.3, 101.4], [9, 9.1, 9.2],
                [120, 120, 120], quiet, [], [10.3, 10.31, 10.32])  # fmt: skip
    j = judge(golden, tot)
    assert j.verdicts.tolist() == [
        "regression", "ok", "improved", "boundary", "ignored", "regression", "new", "missing", "ok",
    ]  # fmt: skip
    assert j.seen_from[0] < 0.1
    assert j.seen_from[8] == pytest.approx(0.005 + 0.5 / 10.01)  # the rule alone: 0.5 % and 0.5 us of 10 us


def sides(rows: int, shift: float, noise: float = 0.003, seed: int = 1) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    base = rng.uniform(100, 1000, (rows, 1))
    return base * np.exp(noise * rng.standard_normal((rows, 3))), base * np.exp(
        shift + noise * rng.standard_normal((rows, 3))
    )


def test_drift_of_a_session_is_removed_and_a_slow_down_of_all_is_not() -> None:
    j = judge(*sides(60, 0.01))
    assert j.removed == pytest.approx(0.01, abs=0.002)
    assert not (j.verdicts == "regression").any()
    assert judge(*sides(60, 0.06)).removed == pytest.approx(0.02)
    assert (judge(*sides(60, 0.06)).verdicts == "regression").mean() > 0.5
    paired = judge(*sides(60, 0.03, 0.002), paired=True)
    assert paired.removed == 0
    assert (paired.verdicts == "regression").any()
    few = judge(*sides(5, 0.01))
    assert few.removed == 0
    assert not (few.verdicts == "regression").any()
