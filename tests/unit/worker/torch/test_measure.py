"""The timing policy, on virtual clocks: nothing here sleeps or depends on the machine's speed."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.marks import drawn
from worker import without_gc
from worker.tuners.common.measure import (
    SETTLE_S,
    SMALL_MARGIN,
    SUSTAINED_ROUNDS,
    SUSTAINED_S,
    TIE_CEILING,
    Measurement,
    SamplingPolicy,
    leaders,
    margin,
    measure,
    pick,
    rerank,
    spread,
    uncertainty,
)


class Machine:
    """A virtual clock, and timers on it: a call takes its true time, times the noise of the moment."""

    def __init__(self, seed: int = 0, noise: float = 0.0, burst: float = 0.0, drift: float = 0.0) -> None:
        self.now = 0.0
        self.calls = 0
        self._rng = random.Random(seed)
        self._noise, self._burst, self._drift = noise, burst, drift

    def clock(self) -> float:
        return self.now

    def timer(self, seconds: float) -> Callable[[int], float]:
        def run(calls: int) -> float:
            self.calls += calls
            factor = math.exp(self._rng.gauss(0, self._noise)) * (1 + self._drift * self.now)
            if self._rng.random() < self._burst:
                factor *= self._rng.uniform(2, 10)  # another process had the core
            took = calls * seconds * factor
            self.now += took
            return took

        return run


def found(us: float, spread: float = 0.01, samples: int = 20, low: float | None = None) -> Measurement:
    return Measurement(us, spread, samples, 1, "steady", us if low is None else low)


def test_short_calls_are_batched_and_a_steady_timer_needs_the_least_samples() -> None:
    m = Machine()
    got = measure(m.timer(1e-3), SamplingPolicy(), cap_s=10, now=m.clock)
    assert (got.samples, got.calls, got.why) == (SamplingPolicy().min_samples, 1, "steady")
    assert got.us == pytest.approx(1000)
    assert got.spread == pytest.approx(0, abs=1e-9)
    short = measure(m.timer(3e-6), SamplingPolicy(min_sample_s=200e-6), cap_s=10, now=m.clock)
    assert short.calls == 67
    assert short.us == pytest.approx(3)


def test_noise_takes_more_samples_and_the_median_is_near_the_truth() -> None:
    m = Machine(seed=3, noise=0.05, burst=0.1)
    got = measure(m.timer(1e-3), SamplingPolicy(), cap_s=10, now=m.clock)
    assert got.samples > SamplingPolicy().min_samples
    assert got.us == pytest.approx(1000, rel=0.05)


def test_the_cap_ends_a_measurement() -> None:
    m = Machine(seed=1, noise=0.5)
    got = measure(m.timer(1e-3), SamplingPolicy(target=1e-6, max_samples=10**6), cap_s=0.05, now=m.clock)
    assert got.why == "time"
    assert m.now < 0.06
    m = Machine()
    got = measure(m.timer(2.0), SamplingPolicy(), cap_s=0.5, now=m.clock)
    assert (got.samples, got.why, m.calls) == (1, "time", 1), "the warm-up is the one sample"
    assert got.us == pytest.approx(2e6)


def test_a_hopeless_candidate_stops_early_with_its_honest_number() -> None:
    m = Machine(seed=2, noise=0.02)
    got = measure(m.timer(5e-3), SamplingPolicy(), cap_s=10, best_us=1000, now=m.clock)
    assert (got.samples, got.why) == (SamplingPolicy().hopeless_after, "hopeless")
    assert got.us == pytest.approx(5000, rel=0.05)
    m = Machine(seed=2, noise=0.02)
    far = measure(m.timer(50e-3), SamplingPolicy(), cap_s=10, best_us=1000, now=m.clock)
    assert (far.samples, far.why) == (2, "hopeless")


def test_one_disturbed_sample_does_not_make_a_candidate_hopeless() -> None:
    times = iter([1e-3, 1e-3, 0.1] + [1e-3] * 50)
    got = measure(lambda calls: next(times), SamplingPolicy(), cap_s=10, best_us=900, now=lambda: 0.0)
    assert got.why == "steady"
    assert got.us == pytest.approx(1000)


def test_every_timing_is_followed_by_a_sign_of_life_and_gc_rests() -> None:
    ticks: list[bool] = []
    m = Machine()
    measure(m.timer(1e-3), SamplingPolicy(), cap_s=1, now=m.clock, tick=lambda: ticks.append(gc.isenabled()))
    assert len(ticks) == SamplingPolicy().min_samples + 1
    assert not any(ticks)
    with pytest.raises(KeyboardInterrupt), without_gc():
        raise KeyboardInterrupt
    assert gc.isenabled()


@pytest.mark.parametrize("us", [-1.0, 0.0, math.nan, math.inf, 5e-324, 1e-9])
def test_what_is_no_time_is_never_a_leader(us: float) -> None:
    assert not found(us).valid
    assert leaders([found(us), found(7.0)]) == [1]
    assert leaders([found(us)]) == []


def test_leaders_are_the_nearest_few_a_runner_up_and_the_disturbed() -> None:
    assert leaders([found(u) for u in (110.5, 100, 109, 105, 101, 102, 300)]) == [1, 4, 5, 3]
    assert leaders([found(130), found(100), found(140)]) == [1, 0], "one alone takes the next along"
    assert leaders([found(151), found(100)]) == [1]
    assert leaders([found(105), found(100), found(140)]) == [1, 0]
    disturbed = found(400, spread=0.8, low=95)
    assert leaders([found(100), disturbed, found(400, low=395), found(300, samples=2, low=99)]) == [0, 1, 3]
    assert leaders([found(100), found(400, spread=0.01, low=95)]) == [0], "steady, whatever its least"


def test_spread_and_uncertainty() -> None:
    assert spread([1.0]) == 0
    assert spread([1, 2, 3, 4, 5]) == pytest.approx(1 / 3)
    rng = random.Random(0)
    samples = [rng.gauss(1, 0.1) for _ in range(400)]
    # the median of 400 normal samples of sigma 0.1 has a standard error of 1.2533 * 0.1 / 20
    assert uncertainty(samples) == pytest.approx(0.00627, rel=0.15)


def contest(times: Sequence[float], seed: int, **noise: float) -> int:
    m = Machine(seed=seed, **noise)
    verdict = rerank(
        [m.timer(t) for t in times], [found(1e6 * t) for t in times], [(i,) for i in reversed(range(len(times)))],
        random.Random(seed), cap_s=1.0, now=m.clock,
    )  # fmt: skip
    return verdict.winner


def test_the_rerank_finds_the_truly_faster_under_noise() -> None:
    """5 % apart in 6 % noise with bursts and a drift; the slower is the simpler, so ties are no help."""
    right = sum(contest((1.00e-3, 1.05e-3), seed, noise=0.06, burst=0.1, drift=0.2) == 0 for seed in range(200))
    assert right >= 180


def test_a_tie_goes_to_the_simpler() -> None:
    rounds = [[1.000, 1.0015, 1.10]] * 9
    verdict = pick(rounds, [(2, 5), (1, 9), (1, 1)])
    assert verdict.tied == (0, 1)
    assert verdict.winner == 1
    assert verdict.margin is not None
    assert verdict.margin < 0, "the tie made it win"
    assert pick([[1.0]] * 5, [(0,)]).margin is None
    assert pick(rounds, [(1, 5), (1, 9), (1, 1)]).winner == 0


def test_the_rerank_ends_when_it_is_decided_or_its_time_is_up() -> None:
    m = Machine(seed=9, noise=0.3)
    late = rerank([m.timer(1e-3)] * 3, [found(1e3)] * 3, [(0,), (1,), (2,)], random.Random(0), cap_s=0.0, now=m.clock)
    assert late.rounds == 5
    m = Machine(seed=4, noise=0.005)
    timers = [m.timer(1e-3), m.timer(1.5e-3)]
    clear = rerank(timers, [found(1e3)] * 2, [(0,), (1,)], random.Random(0), cap_s=100, now=m.clock)
    assert (clear.winner, clear.rounds) == (0, 5)


@drawn(60)
@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=5), st.integers(0, 2**31), st.integers(3, 9))
def test_the_winner_is_one_of_the_tied_and_the_tied_are_near(truth: list[float], seed: int, n: int) -> None:
    rng = random.Random(seed)
    rounds = [[t * math.exp(rng.gauss(0, 0.02)) for t in truth] for _ in range(n)]
    verdict = pick(rounds, [(i,) for i in range(len(truth))])
    assert verdict.winner in verdict.tied
    assert all(verdict.lag[i] <= TIE_CEILING for i in verdict.tied)
    assert verdict.winner == min(verdict.tied)
    assert len(verdict.us) == len(truth)


# --- margins, repeats, sustained --------------------------------------------------------------------------------


def test_the_margin_is_the_lead_over_the_runner_up_in_standard_errors() -> None:
    rng = random.Random(1)
    winner = [1.0] * 200
    near, far = ([c * math.exp(rng.gauss(0, 0.01)) for _ in winner] for c in (1.01, 1.5))
    # the median of 200 ratios with a standard deviation of 1 % has a standard error of 1.253 * 0.01 / sqrt(200)
    assert margin(winner, [far, near]) == pytest.approx(0.01 / 0.000886, rel=0.2)
    assert (margin(near, [winner]) or 0) < 0
    assert margin(winner, []) is None
    assert margin([1.0] * 5, [[1.01] * 5]) == pytest.approx(100), "no clock is better than 1e-4"


def test_a_small_margin_is_ranked_again_as_often_as_asked_and_all_rounds_count() -> None:
    def ranked(apart: float, again: int) -> tuple[int, float | None]:
        m = Machine(seed=3, noise=0.02)
        timers = [m.timer(1e-3), m.timer(1e-3 * (1 + apart))]
        v = rerank(timers, [found(1e3)] * 2, [(0,), (1,)], random.Random(0), 0.0, now=m.clock, again=again)
        return v.rounds, v.margin

    assert ranked(0.0001, 0)[0] == 5
    rounds, lead = ranked(0.0001, 3)
    assert rounds == 20
    assert lead is not None
    assert abs(lead) < SMALL_MARGIN
    assert ranked(0.5, 3)[0] == 5, "a clear winner is not ranked again"


def test_a_sustained_ranking_runs_each_contender_before_its_sample() -> None:
    said: list[tuple[int, int]] = []

    def timer(i: int, us: float) -> Callable[[int], float]:
        def run(calls: int) -> float:
            said.append((i, calls))
            return calls * us / 1e6

        return run

    us = [1000.0, 2000.0]
    timers, first = [timer(i, t) for i, t in enumerate(us)], [found(t) for t in us]
    assert rerank(timers, first, [(0,), (1,)], random.Random(0), 0.0, sustained=True).winner == 0
    assert set(said[::2]) == {(i, round(SETTLE_S / t * 1e6)) for i, t in enumerate(us)} == {(0, 200), (1, 100)}
    assert set(said[1::2]) == {(i, round(SUSTAINED_S / t * 1e6)) for i, t in enumerate(us)} == {(0, 100), (1, 50)}


def test_sustained_the_clearly_slower_drop_out_and_the_nearest_are_told_apart() -> None:
    """Eight within 6 % in noise of 1.1 % a sample, as at a power cap: the winner is within 1.5 % of the fastest."""
    near = right = 0
    for seed in range(60):
        m, taken = Machine(seed=seed, noise=0.011), [0] * 8
        us = [1000.0 * (1 + 0.008 * i) for i in range(8)]

        def counted(i: int, timer: Callable[[int], float], taken: list[int] = taken) -> Callable[[int], float]:
            def run(calls: int) -> float:
                taken[i] += 1
                return timer(calls)

            return run

        timers = [counted(i, m.timer(t / 1e6)) for i, t in enumerate(us)]
        v = rerank(timers, [found(t) for t in us], [(0,)] * 8, random.Random(seed), 0.0, now=m.clock, sustained=True)
        assert taken[7] < taken[0] == 2 * v.rounds
        assert v.rounds == SUSTAINED_ROUNDS
        near += v.winner <= 1
        right += v.winner == 0
    assert near >= 57
    assert right >= 40


def test_a_candidate_settles_before_its_samples_unless_it_is_far_off() -> None:
    policy = SamplingPolicy(min_samples=3, settle_s=0.1, far=1.6)
    m = Machine()
    measure(m.timer(1e-3), policy, cap_s=10, now=m.clock)
    assert m.calls == 1 + 100 + 3
    m = Machine()
    measure(m.timer(1e-3), policy, cap_s=10, best_us=500, now=m.clock)
    assert m.calls == 1 + 2
