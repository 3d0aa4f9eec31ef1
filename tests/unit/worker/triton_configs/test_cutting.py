"""Ranges of M are cut from measured times: no M is worse than before, the cost is least, the order does not matter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engines import tree
from worker.triton_configs.cutting import (
    KEEP,
    KEY_PRICE,
    CutRange,
    MeasuredPoint,
    are_neighbours,
    cut_ranges,
    unite_points,
)
from worker.triton_configs.m_ranges import CAPTURE_SIZES
from worker.triton_configs.point_record import PointRecord


def point(m: int, us: dict[str, float], label: str = "", count: float = 1.0) -> MeasuredPoint:
    """A point whose config of today is called `today`."""
    return MeasuredPoint(m, label, count, "today", us, us)


TIMES = st.dictionaries(
    st.sampled_from(["today", "a", "b"]), st.sampled_from([10.0, 10.02, 11.0, 12.0, 20.0]), min_size=1
)
FILES = st.lists(st.tuples(st.integers(1, 60), TIMES, TIMES), min_size=1, max_size=5, unique_by=lambda row: row[0])


def regret(points: list[MeasuredPoint], config: str) -> float:
    times = [(p.today_us if config == KEEP else p.us[config]) / min(p.us.values()) - 1 for p in points]
    return max(min(10.0, share) for share in times)


def cost(by_m: dict[int, list[MeasuredPoint]], configs: dict[int, str]) -> float:
    """The cost of an assignment of configs to the measured M, as the docstring of `cut_ranges` says it."""
    total, before = 0.0, 0
    for m in sorted(by_m):
        follows = before and are_neighbours(before, m, by_m[m][0].label)
        if not follows or configs[m] != configs[before]:
            total += KEY_PRICE if configs[m] else 0.0
            if follows and before + 1 < m:
                total += (regret(by_m[before], KEEP) + regret(by_m[m], KEEP)) / 2
        total += regret(by_m[m], configs[m])
        before = m
    return total


@given(FILES, st.booleans(), st.randoms(use_true_random=False))
def test_no_m_is_worse_and_the_cost_is_that_of_brute_force(
    rows: list[tuple[int, dict[str, float], dict[str, float]]], two_routings: bool, random: Any
) -> None:
    points = [point(m, us, "x" if two_routings else "") for m, us, _ in rows]
    if two_routings:
        points += [point(m, us, "y") for m, _, us in rows]
    shuffled = random.sample(points, len(points))
    ranges = cut_ranges(unite_points(points))
    assert ranges == cut_ranges(unite_points(shuffled))
    by_m: dict[int, list[MeasuredPoint]] = {}
    for p in points:
        by_m.setdefault(p.m, []).append(p)
    chosen = {m: next(r.config for r in ranges if r.first <= m <= r.last) for m in by_m}
    assert all(config == KEEP or p.allows(config) for m, config in chosen.items() for p in by_m[m])
    legal = [[c for c in (KEEP, "today", "a", "b") if not c or all(p.allows(c) for p in by_m[m])] for m in sorted(by_m)]
    least = min(cost(by_m, dict(zip(sorted(by_m), way, strict=True))) for way in itertools.product(*legal))
    assert cost(by_m, chosen) == pytest.approx(least)


def test_a_range_ends_where_it_was_measured_and_a_gap_keeps_what_it_has() -> None:
    slow = {"today": 20.0, "a": 10.0, "b": 19.0}
    other = {"today": 20.0, "a": 21.0, "b": 10.0}
    measured = [point(1, slow), point(16, slow), point(24, slow), point(25, other), point(32, other), point(400, other)]
    assert cut_ranges(measured) == [CutRange(1, 24, "a"), CutRange(25, 32, "b"), CutRange(400, 400, "b")]
    gap = [point(64, {"today": 11.0, "a": 10.0}), point(90, {"today": 11.0, "b": 10.0})]
    assert cut_ranges(gap) == [CutRange(64, 64, "a"), CutRange(90, 90, "b")]
    assert cut_ranges([point(64, slow), point(90, other)]) == [CutRange(64, 90, "b")], "no gap where today's is slow"
    few_tokens = [point(1, slow, "uniform"), point(7, slow, "uniform")]
    assert cut_ranges(few_tokens) == [CutRange(1, 1, "a"), CutRange(7, 7, "a")], "each token brings experts of its own"


def test_a_second_attempt_can_only_be_more_careful() -> None:
    first = [point(64, {"today": 20.0, "a": 10.0}), point(80, {"today": 20.0, "a": 10.0})]
    again = [point(80, {"today": 20.0, "a": 25.0, "b": 12.0})]
    (_, united) = unite_points([*first, *again])
    assert (united.us["a"], united.us["b"]) == (25.0, 12.0)
    assert cut_ranges(unite_points([*again, *first])) == [CutRange(64, 64, "a"), CutRange(80, 80, "b")]


def test_an_m_without_all_routings_and_one_where_nothing_is_right_change_nothing() -> None:
    points = [point(64, {"today": 20.0, "a": 10.0}, "x"), point(64, {}, "y"), point(80, {"a": 1.0}, "x")]
    assert cut_ranges(unite_points(points)) == [CutRange(64, 64, KEEP)]


@pytest.mark.parametrize(
    "damage", [{"m": 0}, {"times": []}, {"times": [[{}, math.inf, 1.0, 0.0]]}, {"count": -1}, {"file": 3}, {"m": "x"}]
)
def test_a_record_that_no_measurement_made_is_refused(damage: dict[str, Any]) -> None:
    good = {"file": {"file": "x.json"}, "m": 64, "label": "", "count": 1.0, "times": [[{"a": 1}, -1.0, -1.0, 1.0]]}
    assert PointRecord.from_document(good).to_document() == good
    assert PointRecord.from_document(good).point.today_us == math.inf
    with pytest.raises(ValueError, match=r"out of range|not a number|not the record|invalid literal"):
        PointRecord.from_document({**good, **damage})


def test_capture_sizes_are_those_of_the_engine() -> None:
    text = (tree("vllm") / "vllm" / "config" / "compilation.py").read_text()
    assert "[1, 2, 4] + list(range(8, 256, 8)) + list(" in text
    assert list(CAPTURE_SIZES) == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
