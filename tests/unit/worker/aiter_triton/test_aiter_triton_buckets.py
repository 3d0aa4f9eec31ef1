"""Buckets of a workload's M, the config that each gets, and the seeds of a search."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.standins.triton_tree import make, values
from worker.triton_configs.kinds import BY_NAME
from worker.triton_configs.resolve import ResolveError, slower
from worker.tuners.aiter_triton.tuner import Point, Seeds, best, bucket_of, plan

BOUNDS = (16, 64, 256)
OLD = "today"


def test_an_m_is_measured_with_the_others_of_its_bucket_and_with_the_bound() -> None:
    weights = {20: 3.0, 48: 10.0, 16: 1.0, 1000: 2.0}
    works = plan(weights, {m: bucket_of(m, BOUNDS, "any") for m in weights})
    assert [w.name for w in works] == ["M_LEQ_16", "M_LEQ_64", "any"]
    assert works[0].points == (Point(16, 1.0),), "the bound is one of the workload's"
    assert works[1].points == (Point(48, 10.0), Point(20, 3.0), Point(64, 0.0)), "the most weighty first"
    assert works[2].points == (Point(1000, 2.0),), "no bound lies beyond the last"


def test_the_least_weighted_sum_wins() -> None:
    points = [Point(20, 1.0), Point(48, 10.0), Point(64, 0.0)]
    us = {
        20: {OLD: 20.0, "a": 10.0, "b": 19.0},
        48: {OLD: 20.0, "a": 19.0, "b": 15.0},
        64: {OLD: 20.0, "a": 20.0, "b": 20.0},
    }
    assert best(points, us, dict.fromkeys((20, 48, 64), OLD)) == ("b", [])


def test_a_config_that_slows_one_m_down_is_rejected_even_at_the_bound() -> None:
    points = [Point(48, 10.0), Point(64, 0.0)]
    us = {48: {OLD: 20.0, "a": 10.0, "b": 18.0}, 64: {OLD: 20.0, "a": 20.7, "b": 20.5}}
    assert best(points, us, {48: OLD, 64: OLD}) == ("b", ["a"])
    tiny = {48: {OLD: 20.0, "a": 10.0}, 64: {OLD: 2.0, "a": 3.9}}
    assert best(points, tiny, {48: OLD, 64: OLD}) == ("a", []), "below 4 us the timer decides"


def test_what_is_no_better_or_not_measured_everywhere_changes_nothing() -> None:
    points = [Point(48, 1.0), Point(64, 0.0)]
    us = {48: {OLD: 20.0, "a": 19.95, "b": 5.0}, 64: {OLD: 20.0, "a": 20.0}}
    assert best(points, us, {48: OLD, 64: OLD}) == ("", [])


def test_where_todays_config_does_not_run_any_right_one_is_better() -> None:
    assert best([Point(48, 1.0)], {48: {"a": 30.0, "b": 20.0}}, {48: OLD}) == ("b", [])


TIMES = st.lists(st.floats(1, 100), min_size=5, max_size=5)


@given(st.dictionaries(st.integers(1, 6), st.tuples(st.floats(0, 9), TIMES), min_size=1))
def test_no_winner_is_slower_anywhere_than_the_rule_allows(drawn: dict[int, tuple[float, list[float]]]) -> None:
    points = [Point(m, weight) for m, (weight, _) in drawn.items()]
    us = {m: dict(zip([OLD, "a", "b", "c", "d"], times, strict=True)) for m, (_, times) in drawn.items()}
    winner, harmful = best(points, us, dict.fromkeys(us, OLD))
    assert winner not in harmful
    if winner:
        assert not any(slower(us[m][OLD], us[m][winner]) for m in us)
        weight = {p.m: p.weight if any(q.weight for q in points) else 1.0 for p in points}
        assert sum(weight[m] * us[m][winner] for m in us) < sum(weight[m] * us[m][OLD] for m in us)


def test_seeds_are_todays_bucket_its_neighbours_the_defaults_and_those_of_near_shapes(tmp_path: Path) -> None:
    kind = BY_NAME["a16w16"]
    configs = {
        "DEFAULT.json": {"M_LEQ_16": values(16), "M_LEQ_64": values(32), "any": values(64)},
        "GEMM-A16W16-N=512-K=1024.json": {"M_LEQ_16": values(17), "M_LEQ_64": values(33), "any": values(65)},
        "GEMM-A16W16-N=512-K=2048.json": {"any": values(128)},
        "GEMM-A16W16-N=16-K=65536.json": {"any": values(256)},
        "GEMM-A16W16-N=1024-K=1024.json": {"any": {"BLOCK_SIZE_M": 99}},
    }
    seeds = Seeds(make(tmp_path, configs), "90", kind)
    assert seeds.bounds == BOUNDS
    assert seeds.today(40, 512, 1024, None).values == values(33)
    rows = [c.values["BLOCK_SIZE_M"] for c in seeds.of(40, 512, 1024, None)]
    assert rows == [33, 65, 17, 32, 128, 256], "a bucket without the kind's keys is none"
    assert [c.values["BLOCK_SIZE_M"] for c in seeds.of(40, 4096, 1024, None)][:2] == [32, 64]


def test_a_chip_without_a_default_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ResolveError, match="no default file for gfx950"):
        Seeds(make(tmp_path, {"DEFAULT.json": {"any": values()}}), "gfx950", BY_NAME["a16w16"])
