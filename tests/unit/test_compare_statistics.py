"""`compare` on simulated tables: how often it accuses, how often it finds; and the parts that this rests on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.compare import Draw, Simulated, most_to_be_found, rates
from orchestrator.analysis.compare.noise import LEVELS, chance, learn
from orchestrator.analysis.compare.repeats import Floats, settle
from orchestrator.analysis.compare.verdict import Rule, judge

NAN = math.nan


def table(*rows: list[float]) -> Floats:
    width = max(map(len, rows))
    return np.array([[*r, *[NAN] * (width - len(r))] for r in rows])


@pytest.mark.parametrize(
    ("rows", "tables", "slower", "draw"), [(61, 600, 200, "log"), (61, 600, 200, "even"), (1000, 300, 50, "log")]
)
def test_unchanged_tables_are_not_accused_and_a_slow_down_is_found(
    rows: int, tables: int, slower: int, draw: Draw, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three repeats, then seven more, in turn, of what the first look left open."""
    r = rates(Simulated(rows, 3, draw, slower=0.03), tables, slower, seed=rows)
    with capsys.disabled():
        print(
            f"\n  {rows} rows, {tables} tables, noise drawn {draw}: unchanged tables accused {r.accused:.2%}"
            f" (first look {r.accused_first:.2%}, plain rule {r.accused_by_rule:.1%});"
            f" 3 % slower row found {r.found:.1%} (first look {r.found_first:.1%}, plain rule {r.found_by_rule:.1%})"
        )
    assert r.accused_first <= 0.01
    assert r.accused <= 0.01
    assert r.found >= 0.9
    assert r.found_first + r.left_open >= 0.99  # nothing is lost at the first look
    assert r.accused_by_rule > 0.9
    assert r.again < 0.3


def test_why_there_is_a_second_look() -> None:
    """With three repeats even the best of all tests finds too little; with seven nothing stands in its way."""
    assert most_to_be_found(61, 3, "log") < 0.75
    assert most_to_be_found(1000, 3, "log") < 0.2
    assert most_to_be_found(1000, 7, "log") > 0.99


def test_five_repeats_find_it_at_the_first_look() -> None:
    r = rates(Simulated(61, 5, "log", slower=0.03), 300, 300, seed=8)
    assert r.accused <= 0.01
    assert r.found_first >= 0.9


def test_the_probability_is_what_it_says_it_is() -> None:
    """Of unchanged rows about 1 in 100 has p below 0.01; noisy rows, from which the quiet repeats are chosen, too."""
    rng = np.random.default_rng(5)
    for noise in (0.003, 0.01, 0.02):
        low = total = 0
        for _ in range(150):
            sides = Simulated(100).measure(
                rng, np.full(100, 1e3), np.full(100, noise), repeats=5, paired=True, changed=False
            )
            p = judge(*sides, paired=True, sizes=False).p
            low, total = low + int((p <= 0.005).sum()), total + int(np.isfinite(p).sum())
        assert low / total < 0.013, noise  # either direction: 2 * 0.005
        assert noise == 0.02 or low / total > 0.005, noise


def test_repeats_that_agree_and_strays() -> None:
    s = settle(table([100, 101, 102], [100, 101, 130], [100, 101], [100], [], [100, 101, 99, 130, 150],
                     [100, 104, 108, 112], [100, 100, 100, 130, 130, 130, 130], [100, 100, 105]))  # fmt: skip
    assert s.stable.tolist() == [True, False, False, False, False, True, False, True, True]
    assert s.count[5] == 3
    assert s.us[[0, 5]] == pytest.approx([101, 100])
    assert s.us[1] == 101  # of an unstable side the median
    assert s.us[7] == 130  # most of them
    assert math.isnan(s.us[4])


def test_noise_is_learned_from_the_table() -> None:
    """A row that looks quiet among noisy ones is not taken for quiet; among quiet ones it is."""
    rng = np.random.default_rng(2)
    four, none = np.full(200, 4.0), np.zeros(200)
    for true in (0.002, 0.01):
        squares = (true * rng.standard_normal((200, 4))) ** 2
        sums = squares.sum(axis=1)
        sums[0] = 4 * 0.002**2
        noise = learn(sums, four, none, none)
        assert noise.typical == pytest.approx(true, rel=0.25)
        assert noise.by_row[0] == pytest.approx(true, rel=0.35)


def test_the_chance_of_a_known_noise_is_the_normal_tail() -> None:
    sums = np.full(3, 4000 * 0.01**2)  # so many degrees of freedom that the noise is known: 1 %
    noise = learn(sums, np.full(3, 4000.0), np.zeros(3), np.zeros(3))
    at = chance(noise, np.array([0.0, 0.01, 0.03]), np.ones(3), 0.0)
    near = LEVELS[np.argmax(noise.weights[0])]
    expected = [0.5, *(0.5 * math.erfc(d / near / math.sqrt(2)) for d in (0.01, 0.03))]
    assert at == pytest.approx(expected, rel=0.3)


def test_verdicts_one_by_one() -> None:
    quiet = [100.0, 100.1, 100.2]
    golden = table(quiet, quiet, quiet, quiet, [3.0, 3.0, 3.01], quiet[:2], [], quiet, [10.0, 10.01, 10.02])
    tot = table([110, 110.1, 110.2], [100, 100.1, 100.3], [90, 90.1, 90.2], [101.2, 101.3, 101.4], [9, 9.1, 9.2],
                [120, 120, 120], quiet, [], [10.3, 10.31, 10.32])  # fmt: skip
    j = judge(golden, tot)
    assert j.verdicts.tolist() == [
        "regression", "ok", "improved", "boundary", "ignored", "unstable", "new", "missing", "ok",
    ]  # fmt: skip
    assert j.seen_from[0] < 0.1
    assert j.seen_from[8] == pytest.approx(0.005 + 0.5 / 10.01)  # the rule alone: 0.5 % and 0.5 us of 10 us
    assert j.suspect.tolist() == [False, False, False, True, False, True, False, False, False]


def test_the_rule_is_held_to_its_letter() -> None:
    golden = table([1000.0, 1000.0, 1000.0])
    for tot, beyond in ((1005.4, False), (1005.6, True)):
        j = judge(golden, table([tot] * 3))
        assert bool(j.beyond[0]) is beyond
        assert j.verdicts[0] in (("regression", "boundary") if beyond else ("ok",))
    loose = judge(golden, table([1090.0] * 3), rule=Rule(1.1, 0.0, 0.0))
    assert loose.verdicts.tolist() == ["ok"]
    assert judge(golden, table([1090.0] * 3), rule=Rule(1.0, 0.0, 1001.0)).verdicts.tolist() == ["ignored"]


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


def test_pairs_are_used_where_they_are_quieter() -> None:
    golden, tot = sides(40, 0.0)
    assert not judge(golden, tot, paired=True).in_pairs
    together = np.exp(0.008 * np.random.default_rng(3).standard_normal((40, 3)))
    j = judge(golden * together, tot * together, paired=True)
    assert j.in_pairs
    tot *= np.where(np.arange(40) < 5, 1.02, 1.0)[:, None]
    paired, apart = (judge(golden * together, tot * together, paired=p) for p in (True, False))
    assert np.nanmedian(paired.p[:5]) < np.nanmedian(apart.p[:5])


def test_an_empty_side_and_a_table_without_a_judged_row() -> None:
    assert judge(table([NAN], [5.0]), table([7.0], [NAN])).verdicts.tolist() == ["new", "missing"]
    assert judge(table([5.0]), table([7.0])).verdicts.tolist() == ["unstable"]
