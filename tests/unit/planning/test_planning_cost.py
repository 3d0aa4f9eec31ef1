"""The cost model: its guess, its fit to what earlier runs measured, and reading those runs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.controller.prepare import gather
from orchestrator.families import get_family
from orchestrator.ledger import Ledger
from orchestrator.planning.cost import CostModel, CostSample, units
from orchestrator.planning.plan import make_plan
from orchestrator.shapes.model import Shape
from tests.support.ledger_kit import A8W8, Run, ended
from tests.support.marks import drawn
from worker.families import FAMILIES

TRUTH = CostModel(setup_s=3.0, shape_s=1.5, flop_s=2e-10, weight_s=4e-8, source="")


def measured(model: CostModel, n: int, noise: float = 0.0, seed: int = 1) -> list[CostSample]:
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        shapes = rng.randint(1, 30)
        flops = shapes * 10 ** rng.uniform(7, 11)
        weights = shapes * 10 ** rng.uniform(5, 8)
        seconds = model.setup_s + model.shape_s * shapes + model.flop_s * flops + model.weight_s * weights
        out.append(CostSample(shapes, flops, weights, seconds * rng.uniform(1 - noise, 1 + noise)))
    return out


@pytest.mark.parametrize("tuner", ["torch", "aiter", "aiter-triton", "replay", "new"])
def test_every_family_has_a_first_guess_that_grows_with_the_shape(tuner: str) -> None:
    for family in FAMILIES.values():
        model = CostModel.default(tuner, family)
        small = {c.name: 32 if c.kind == "int" else "" for c in family.columns}
        large = {**small, family.m_column: 4096}
        assert 0 < model.cost_s(small, family) <= model.cost_s(large, family)
        assert f"first guess for tuner {tuner}" in model.source


def test_the_formula_is_as_its_docstring_says() -> None:
    cost = TRUTH.cost_s(Shape(1, (8, 64, 128)), A8W8)
    assert cost == pytest.approx(1.5 + 2e-10 * (2 * 8 * 64 * 128) + 4e-8 * (64 * 128))
    batched = get_family("batched_bf16")
    assert TRUTH.cost_s({"B": 4, "M": 8, "N": 64, "K": 128}, batched) == pytest.approx(
        1.5 + 2e-10 * (2 * 8 * 64 * 128 * 4) + 4e-8 * (64 * 128 * 4)
    )


def numbers(model: CostModel) -> list[float]:
    return [model.setup_s, model.shape_s, model.flop_s, model.weight_s]


def test_fit_finds_the_numbers_back() -> None:
    fitted = CostModel.default("torch", A8W8).fit(measured(TRUTH, 60))
    assert numbers(fitted) == pytest.approx(numbers(TRUTH), rel=1e-3)
    assert fitted.source == "fitted to 60 attempts of earlier runs (median error 0%)"


def test_fit_shrugs_off_noise_and_outliers() -> None:
    samples = measured(TRUTH, 80, noise=0.1)
    broken = [
        CostSample(s.shapes, s.flops, s.weights, s.seconds * wrong)
        for s, wrong in zip(samples[:16], (50, 0.05) * 8, strict=True)
    ]
    fitted = CostModel.default("torch", A8W8).fit(broken + samples[16:])
    for s in measured(TRUTH, 20, seed=7):
        guess = fitted.setup_s + fitted.shape_s * s.shapes + fitted.flop_s * s.flops + fitted.weight_s * s.weights
        assert guess == pytest.approx(s.seconds, rel=0.15)


def test_few_samples_only_correct_the_scale() -> None:
    default = CostModel.default("torch", A8W8)
    fitted = default.fit([CostSample(s.shapes, s.flops, s.weights, s.seconds * 3) for s in measured(default, 3)])
    assert numbers(fitted) == pytest.approx([3 * v for v in numbers(default)])
    assert default.fit([]) is default
    assert default.fit([CostSample(0, 0, 0, 5.0), CostSample(1, 1, 1, 0.0)]) is default


positive = st.floats(1e-3, 1e9)


@drawn(40)
@given(st.lists(st.builds(CostSample, st.integers(1, 50), positive, positive, st.floats(1e-3, 1e5)), max_size=30))
def test_no_measurement_makes_a_negative_or_broken_cost(samples: list[CostSample]) -> None:
    fitted = CostModel.default("torch", A8W8).fit(samples)
    assert all(0 <= v < float("inf") for v in numbers(fitted))


def earlier_run(folder: Path, **meta: str) -> None:
    folder.mkdir(parents=True)
    with Run(folder, groups=((1, 2), (3,), (4,))) as run:
        with run.ledger.transaction():
            for key, value in meta.items():
                run.ledger.set_meta(key, value)
        run.send("g0001-1")
        run.tune("g0001-1", 1, 2)
        run.says(ended("g0001-1"))
        run.send("g0002-1")
        run.tune("g0002-1", 3)
        run.says(ended("g0002-1", "fault"))
        run.send("g0003-1")
        run.says(ended("g0003-1"))


def test_samples_are_the_finished_attempts_of_the_same_family_tuner_and_gfx(tmp_path: Path) -> None:
    earlier_run(tmp_path / "one")
    earlier_run(tmp_path / "other-tuner", tuner="torch")
    earlier_run(tmp_path / "other-family", family="a4w4_blockscale")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "ledger.db").write_bytes(b"no database" * 1000)
    (tmp_path / "empty").mkdir()
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    flops = 2.0 * (1 + 2) * 64 * 128
    expected = [CostSample(2, flops, 2.0 * 64 * 128, 3.0)]
    assert gather(tmp_path, A8W8, "replay", "gfx950").samples == expected
    assert gather(tmp_path, A8W8, "replay").samples == expected
    assert gather(tmp_path, A8W8, "replay", "gfx942").samples == []
    assert gather(tmp_path / "missing", A8W8, "replay").samples == []
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before, "looking leaves nothing behind"


def test_a_first_guess_is_wide_and_each_run_makes_the_spread_narrower() -> None:
    guess = CostModel.default("torch", A8W8)
    assert guess.is_guess
    spreads = [guess.spread]
    for runs in (1, 3, 8):
        samples = [replace(s, run=f"r{i % runs}") for i, s in enumerate(measured(TRUTH, 40, noise=0.05))]
        fitted = guess.fit(samples, starts=[9.0, 12.0, 11.0])
        assert not fitted.is_guess
        assert fitted.start_s == 11.0
        spreads.append(fitted.spread)
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[1] < 2.0 < spreads[0]


def test_runs_that_differ_from_each_other_keep_the_spread_wide() -> None:
    samples = [replace(s, run=f"r{i % 4}") for i, s in enumerate(measured(TRUTH, 40))]
    uneven = [replace(s, seconds=s.seconds * (1, 3, 1, 4)[i % 4]) for i, s in enumerate(samples)]
    guess = CostModel.default("torch", A8W8)
    assert guess.fit(uneven).spread > 1.3 * guess.fit(samples).spread


@pytest.mark.parametrize(
    ("tuner", "options", "times"),
    [
        ("bench", {"backends": ["aiter", "torch"]}, 2.0),
        ("bench", {"backends": ["torch"], "sides": [1, 2, 3]}, 3.0),
        ("torch", {"budget_s_per_shape": 7.0}, 2.0),
        ("aiter-triton", {"search": "exhaustive"}, 4.0),
        ("aiter", {}, 1.0),
    ],
)
def test_options_that_make_a_shape_longer_count(tuner: str, options: dict[str, object], times: float) -> None:
    assert units(tuner, options) == times
    cost = CostModel.default(tuner, A8W8, "gfx950")
    shape = Shape(1, (8, 64, 128))
    assert cost.scaled(times).cost_s(shape, A8W8) == pytest.approx(times * cost.cost_s(shape, A8W8))
    assert cost.scaled(times).setup_s == cost.setup_s


def test_what_an_h200_took_is_within_the_first_range() -> None:
    """Seen there: benchmarks/results/controller.md, aiter-triton.md. (tuner, shapes, seconds of the whole command)."""
    for tuner, shapes, truth in (("aiter-triton", 10, 43.0), ("aiter-triton", 12, 42.0), ("bench", 15, 40.0)):
        cost = CostModel.default(tuner, A8W8, "sm_90").scaled(2.0 if tuner == "bench" else 1.0)
        todo = [Shape(i, (16 * (i % 5 + 1), 1280 * (i // 5 + 1), 8192)) for i in range(1, shapes + 1)]
        plan = make_plan(todo, A8W8, cost, {"n": 1}, tuner=tuner, gfx="sm_90", cu_num=132)
        assert plan.first_guess
        assert plan.range_s[0] <= truth <= plan.range_s[1]
        assert plan.end_s <= 4 * truth


def test_seconds_before_the_first_group_and_after_the_last_are_those_of_earlier_runs(tmp_path: Path) -> None:
    earlier_run(tmp_path / "one")
    assert gather(tmp_path, A8W8, "replay").starts == [], "no start is known of a run without its time"
    earlier_run(tmp_path / "two")
    with Ledger.open(tmp_path / "two" / "ledger.db") as ledger, ledger.transaction():
        times = "SELECT min(t) FILTER (WHERE type='AttemptStarted'), max(t) FILTER (WHERE type='AttemptEnded')"
        first, last = ledger.query(f"{times} FROM journal")[0]
        ledger.set_meta("created", first - 7.0)
        ledger.set_meta("ended", last + 2.0)
        ledger.set_meta("units", 2.0)
    found = gather(tmp_path, A8W8, "replay")
    assert found.starts == [pytest.approx(10.0)], "and the second in which the first attempt imported"
    assert sorted(s.shapes for s in found.samples) == [2, 4], "two backends make two of each shape"


def test_an_import_before_the_attempt_is_not_taken_from_its_seconds(tmp_path: Path) -> None:
    """A worker's canary imports before anything is claimed; the first attempt reports it."""
    folder = tmp_path / "one"
    folder.mkdir()
    with Run(folder, groups=((1, 2),)) as run:
        run.send("g0001-1")
        run.tune("g0001-1", 1, 2)
        run.says(ended("g0001-1", spent={"import": 8.0, "start": 9.0, "measure": 3.5}))
    assert [s.seconds for s in gather(tmp_path, A8W8, "replay").samples] == [4.0]
