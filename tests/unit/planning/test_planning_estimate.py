"""The seconds that a run still takes: a range that holds the truth, and grows with what is overdue."""

from __future__ import annotations

import heapq
import math
import random
from typing import Any

import pytest

from orchestrator.planning.estimate import Bulk, Measured, Range, UnderWay, seconds_left


def estimate(*args: Any, **more: Any) -> Range:
    found = seconds_left(*args, **more)
    assert found is not None
    return found


def test_nothing_left_is_no_time_and_something_is_never_none() -> None:
    assert seconds_left([], 4, spread=2.0) is None
    for quiet in (0.0, 1.0, 30.0, 3000.0):
        running = [UnderWay(10.0, 9.99, 10.0, quiet)]
        left = estimate([], 1, spread=1.1, running=running)
        assert 1.0 <= left.low_s <= left.mid_s <= left.high_s
        assert estimate(Bulk(0, 0.0), 1, spread=1.1, running=running) == left


def test_before_the_start_the_spread_is_the_range_and_preparing_comes_on_top() -> None:
    left = estimate([10.0, 10.0, 10.0, 10.0], 2, spread=3.0, start=Range(5.0, 10.0, 30.0))
    assert left.mid_s == pytest.approx(30.0)
    assert left.low_s < 10.0 + 5.0
    assert left.high_s > 60.0 + 30.0


def test_groups_that_are_over_make_the_factor_known() -> None:
    wide = estimate([10.0] * 20, 2, spread=6.0)
    known = estimate([10.0] * 20, 2, spread=6.0, over=[(10.0, 2.0)] * 10)
    assert known.mid_s == pytest.approx(20.0, rel=0.1)
    assert known.high_s / known.low_s < 2.0 < wide.high_s / wide.low_s


def test_a_group_in_flight_for_longer_than_expected_makes_all_that_is_left_longer() -> None:
    soon, late = (
        estimate([10.0] * 4, 1, spread=4.0, running=[UnderWay(10.0, 0.0, 0.0, quiet)]) for quiet in (1.0, 100.0)
    )
    assert late.mid_s > 2 * soon.mid_s


def test_many_groups_take_no_longer_to_think_of_and_come_to_the_same() -> None:
    few = estimate([1.0] * 4096, 64, spread=2.0)
    many = estimate([1.0] * 8192, 64, spread=2.0)
    assert many.mid_s == pytest.approx(2 * few.mid_s, rel=0.02)


def test_groups_that_are_over_are_kept_as_sums_and_say_the_same() -> None:
    rng = random.Random(3)
    over = [(rng.uniform(1.0, 90.0), rng.uniform(1.0, 200.0)) for _ in range(500)] + [(0.0, 5.0), (5.0, 0.0)]
    running = [UnderWay(10.0, 5.0, 7.0, 1.0), UnderWay(20.0, 0.0, 0.0, 300.0)]
    kept = Measured(over[:300])
    for pair in over[300:]:
        kept.add(*pair)
    at_once = estimate([30.0] * 40, 4, spread=3.0, over=over, running=running)
    summed = estimate([30.0] * 40, 4, spread=3.0, over=kept, running=running)
    ratio = [math.log(t / e) for e, t in over if e and t]
    assert summed.mid_s == pytest.approx(at_once.mid_s)
    assert kept.count == 500
    assert kept.log == pytest.approx(sum(ratio))
    slow = Measured((1.3 * e, t) for e, t in over)
    for name in Measured.__slots__:
        assert getattr(kept.paced(1.3), name) == pytest.approx(getattr(slow, name))
    assert estimate(Bulk(5000, 5000.0), 8, spread=2.0) == estimate([1.0] * 5000, 8, spread=2.0)


def simulated(rng: random.Random, spread: float) -> tuple[float, Range]:
    """(seconds that were left after a third of a run, what was thought of them)."""
    factor = math.exp(rng.gauss(0.0, math.log(spread) / 1.645))
    slots, estimates = rng.randint(1, 8), [rng.uniform(5.0, 60.0) for _ in range(rng.randint(24, 120))]
    estimates.sort(reverse=True)
    free = [(0.0, i) for i in range(slots)]
    runs = []
    for e in estimates:
        at, slot = heapq.heappop(free)
        end = at + e * factor * math.exp(rng.gauss(0.0, 0.2))
        heapq.heappush(free, (end, slot))
        runs.append((at, end, e))
    last = max(end for _, end, _ in runs)
    now = last / 3
    left = estimate(
        [e for at, _, e in runs if at > now], slots, spread=spread,
        over=[(e, end - at) for at, end, e in runs if end <= now],
        running=[UnderWay(e, 0.0, 0.0, now - at) for at, end, e in runs if at <= now < end],
    )  # fmt: skip
    return last - now, left


def test_after_a_third_of_a_run_it_is_right_by_a_factor_of_1_3() -> None:
    rng = random.Random(1)
    cases = [simulated(rng, 5.0) for _ in range(300)]
    assert sum(1 / 1.3 <= left.mid_s / truth <= 1.3 for truth, left in cases) >= 285
    assert sum(left.low_s <= truth <= left.high_s for truth, left in cases) >= 270
