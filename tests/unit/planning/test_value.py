"""Value of shapes for a workload: expected times, order, classes, and what is won."""

from __future__ import annotations

import pytest

from orchestrator.planning.cost import CostModel
from orchestrator.planning.plan import make_work
from orchestrator.planning.roofline import CHIPS, EFFICIENCY, UNTUNED, Forecast, Worth, tiers, won, worths
from orchestrator.shapes.model import Key, Shape
from tests.support.ledger_kit import A8W8

MI355X = CHIPS["mi355x"]
FLAT = CostModel(setup_s=1.0, shape_s=2.0, flop_s=0.0, weight_s=0.0, source="test")
BIG = (4096, 8192, 8192)


def bound_us(key: Key) -> float:
    """Time at the data sheet's fp8 peak, of a shape that computing bounds."""
    m, n, k = map(int, key)
    return 2.0 * m * n * k / MI355X.peaks["fp8"] / 1e6


def test_the_expected_time_follows_the_most_similar_row_or_the_roofline() -> None:
    assert Forecast(A8W8, {}, MI355X).us(BIG) == pytest.approx(bound_us(BIG) / EFFICIENCY)
    near, far = (2048, 8192, 8192), (16384, 8192, 8192)
    known: dict[Key, float] = {near: bound_us(near) / 0.5, far: bound_us(far) / 0.8, BIG: 1e6}
    assert Forecast(A8W8, known, MI355X).us(BIG) == pytest.approx(bound_us(BIG) / 0.5), "not its own row's"
    others = [(4096, n, 8192) for n in (1024, 2048, 4096)]
    for chip in (MI355X, None):  # without a neighbour the median of all rows counts, on any chip
        usual, twice = (Forecast(A8W8, dict.fromkeys(others, us), chip).us((4096, 2048, 8192)) for us in (100.0, 200.0))
        assert twice == pytest.approx(2 * usual)


def test_what_was_not_measured_is_guessed_and_marked_so() -> None:
    shapes = [Shape(1, BIG), Shape(2, (1, 8192, 8192)), Shape(3, (2, 8192, 8192))]
    calls = dict(zip((s.key for s in shapes), (10.0, 1000.0, 1.0), strict=True))
    forecast = Forecast(A8W8, {}, MI355X)
    found = worths(shapes, calls, {BIG: 1e4, shapes[2].key: 0.001}, forecast, fixed={3})
    assert (found[1].calls, found[1].now_us, found[1].measured) == (10.0, 1e4, True)
    assert found[1].expected_us == pytest.approx(bound_us(BIG) / EFFICIENCY)
    assert found[1].value == pytest.approx(10 * (1e4 - found[1].expected_us))
    assert not found[2].measured
    assert found[2].now_us == pytest.approx(UNTUNED * found[2].expected_us)
    assert found[3].value == 0, "it is not to be tuned, and no gain is expected of a time below the expected one"


def test_only_shapes_of_about_the_same_value_share_a_process_and_the_most_valuable_come_first() -> None:
    shapes = [Shape(i, (i, 64, 128)) for i in range(1, 9)] + [Shape(9, (1, 128, 128))]
    values = {1: 1.0, 2: 100.0, 3: 90.0, 4: 1.5, 5: 0.0, 6: 30.0, 7: 0.0, 8: 24.0, 9: 50.0}
    assert tiers(values) == {1: 3, 2: 0, 3: 0, 4: 3, 5: 99, 6: 0, 7: 99, 8: 1, 9: 0}
    work = make_work(shapes, A8W8, FLAT, values=values)
    assert [({i for unit in w.units for i in unit}, w.tier) for w in work] == [
        ({2, 3, 6}, 0), ({9}, 0), ({8}, 1), ({1, 4}, 3), ({5, 7}, 99)
    ]  # fmt: skip
    assert len({w.kind for w in work}) == 5, "shapes of two tiers never share a process"


def test_what_is_won_and_what_is_left_of_it() -> None:
    of = {i: Worth(10.0, 20.0, 10.0, measured=i > 1) for i in range(1, 9)}
    nothing = won(of, {})
    assert (nothing.won_us, nothing.rest_us, nothing.share) == (0.0, 800.0, 0.0)
    assert (nothing.total_us, nothing.guessed_us) == (1600.0, 200.0)
    some = won(of, {1: 15.0, 2: 30.0})
    assert (some.won_us, some.rest_us) == (50.0, 600.0), "a slower winner replaces nothing"
    many = won(of, dict.fromkeys(range(1, 5), 15.0), failed=[5])
    assert many.won_us == 200.0
    assert many.rest_us == pytest.approx(300.0 * 200 / 500), "what is left is corrected by what the settled ones gave"
    assert won(of, dict.fromkeys(of, 20.0)).share == 1.0
