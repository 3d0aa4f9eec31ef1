"""The seconds that a run still takes: a range that holds the truth, and grows with what is overdue."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from orchestrator.planning.estimate import Bulk, Measured, Range, UnderWay, seconds_left


def test_nothing_left_is_no_time_and_something_is_never_none() -> None:
    assert seconds_left([], 4, spread=2.0) is None
    for quiet in (0.0, 1.0, 30.0, 3000.0):
        running = [UnderWay(10.0, 9.99, 10.0, quiet)]
        left = seconds_left([], 1, spread=1.1, running=running)
        assert left is not None
        assert 1.0 <= left.low_s <= left.mid_s <= left.high_s
        assert seconds_left(Bulk(0, 0.0), 1, spread=1.1, running=running) == left


def test_before_the_start_the_spread_is_the_range_and_preparing_comes_on_top() -> None:
    left = seconds_left([10.0, 10.0, 10.0, 10.0], 2, spread=3.0, start=Range(5.0, 10.0, 30.0))
    assert left is not None
    assert left.mid_s == pytest.approx(30.0)
    assert left.low_s < 10.0 + 5.0
    assert left.high_s > 60.0 + 30.0


def test_groups_that_are_over_make_the_factor_known() -> None:
    wide = seconds_left([10.0] * 20, 2, spread=6.0)
    known = seconds_left([10.0] * 20, 2, spread=6.0, over=[(10.0, 2.0)] * 10)
    assert wide is not None
    assert known is not None
    assert known.mid_s == pytest.approx(20.0, rel=0.1)
    assert known.high_s / known.low_s < 2.0 < wide.high_s / wide.low_s


def test_a_group_in_flight_for_longer_than_expected_makes_all_that_is_left_longer() -> None:
    soon, late = (
        seconds_left([10.0] * 4, 1, spread=4.0, running=[UnderWay(10.0, 0.0, 0.0, quiet)]) for quiet in (1.0, 100.0)
    )
    assert soon is not None
    assert late is not None
    assert late.mid_s > 2 * soon.mid_s


def test_many_groups_take_no_longer_to_think_of_and_come_to_the_same() -> None:
    few = seconds_left([1.0] * 4096, 64, spread=2.0)
    many = seconds_left([1.0] * 8192, 64, spread=2.0)
    assert few is not None
    assert many is not None
    assert many.mid_s == pytest.approx(2 * few.mid_s, rel=0.02)


def test_groups_that_are_over_are_kept_as_sums_and_say_the_same() -> None:
    rng = random.Random(3)
    over = [(rng.uniform(1.0, 90.0), rng.uniform(1.0, 200.0)) for _ in range(500)] + [(0.0, 5.0), (5.0, 0.0)]
    running = [UnderWay(10.0, 5.0, 7.0, 1.0), UnderWay(20.0, 0.0, 0.0, 300.0)]
    kept = Measured(over[:300])
    for pair in over[300:]:
        kept.add(*pair)
    at_once = seconds_left([30.0] * 40, 4, spread=3.0, over=over, running=running)
    summed = seconds_left([30.0] * 40, 4, spread=3.0, over=kept, running=running)
    assert at_once is not None
    assert summed is not None
    ratio = [math.log(t / e) for e, t in over if e and t]
    assert summed.mid_s == pytest.approx(at_once.mid_s)
    assert kept.count == 500
    assert kept.log == pytest.approx(sum(ratio))
    slow = Measured((1.3 * e, t) for e, t in over)
    for name in Measured.__slots__:
        assert getattr(kept.paced(1.3), name) == pytest.approx(getattr(slow, name))
    assert seconds_left(Bulk(5000, 5000.0), 8, spread=2.0) == seconds_left([1.0] * 5000, 8, spread=2.0)


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
    left = seconds_left(
        [e for at, _, e in runs if at > now], slots, spread=spread,
        over=[(e, end - at) for at, end, e in runs if end <= now],
        running=[UnderWay(e, 0.0, 0.0, now - at) for at, end, e in runs if at <= now < end],
    )  # fmt: skip
    assert left is not None
    return last - now, left


def test_after_a_third_of_a_run_it_is_right_by_a_factor_of_1_3() -> None:
    rng = random.Random(1)
    cases = [simulated(rng, 5.0) for _ in range(300)]
    assert sum(1 / 1.3 <= left.mid_s / truth <= 1.3 for truth, left in cases) >= 285
    assert sum(left.low_s <= truth <= left.high_s for truth, left in cases) >= 270
