"""The timing policy, on virtual clocks: nothing here sleeps or depends on the machine's speed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from worker.tuners.common.measure import (
    SMALL_MARGIN,
    SUSTAINED_ROUNDS,
    Finalist,
    Measurement,
    Ranking,
    SamplingPolicy,
    leaders,
    margin,
    measure,
    pick,
    rerank,
    uncertainty,
)


class Machine:
    """A virtual clock, and timers on it: a call takes its true time, times the noise of the moment."""

    def __init__(self, seed: int = 0, noise: float = 0.0, burst: float = 0.0, drift: float = 0.0) -> None:
        self.now = 0.0
        self.taken: list[tuple[float, int]] = []  # (seconds of a call, calls) of each timing
        self._rng = random.Random(seed)
        self._noise, self._burst, self._drift = noise, burst, drift

    @property
    def calls(self) -> int:
        return sum(calls for _, calls in self.taken)

    def timer(self, seconds: float) -> Callable[[int], float]:
        def run(calls: int) -> float:
            self.taken.append((seconds, calls))
            factor = math.exp(self._rng.gauss(0, self._noise)) * (1 + self._drift * self.now)
            if self._rng.random() < self._burst:
                factor *= self._rng.uniform(2, 10)  # another process had the core
            took = calls * seconds * factor
            self.now += took
            return took

        return run

    def measure(self, us: float, policy: SamplingPolicy | None = None, **more: Any) -> Measurement:
        given = {"cap_s": 10, **more}
        return measure(self.timer(us / 1e6), policy or SamplingPolicy(), now=lambda: self.now, **given)

    def rank(self, us: Sequence[float], cap_s: float = 0.0, seed: int = 0, **more: Any) -> Ranking:
        """The last is the simplest."""
        finalists = [Finalist(self.timer(t / 1e6), found(t), (-i,)) for i, t in enumerate(us)]
        return rerank(finalists, random.Random(seed), cap_s, now=lambda: self.now, **more)


def found(us: float, spread: float = 0.01, samples: int = 20, low: float | None = None) -> Measurement:
    return Measurement(us, spread, samples, 1, "steady", us if low is None else low)


@pytest.mark.parametrize(
    ("us", "policy", "more", "samples", "calls", "why"),
    [
        (1000, {}, {}, 7, 1, "steady"),
        (3, {"min_sample_s": 200e-6}, {}, 7, 67, "steady"),  # short calls are batched
        (1000, {"target": -1, "max_samples": 10**6}, {"cap_s": 0.05}, 49, 1, "time"),
        (2e6, {}, {"cap_s": 0.5}, 1, 1, "time"),  # the warm-up is the one sample
        (5000, {}, {"best_us": 1000}, 5, 1, "hopeless"),
        (50_000, {}, {"best_us": 1000}, 2, 1, "hopeless"),
    ],
)
def test_sampling_ends_when_it_is_steady_hopeless_or_out_of_time(
    us: float, policy: dict[str, float], more: dict[str, float], samples: int, calls: int, why: str
) -> None:
    got = Machine().measure(us, SamplingPolicy(**policy), **more)  # type: ignore[arg-type]
    assert (got.samples, got.calls, got.why) == (samples, calls, why)
    assert got.us == pytest.approx(us)
    assert got.spread == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ([found(u) for u in (110.5, 100, 109, 105, 101, 102, 300)], [1, 4, 5, 3]),
        ([found(130), found(100), found(140)], [1, 0]),  # one alone takes the next along,
        ([found(151), found(100)], [1]),  # but not a far one
        ([found(100), found(400, 0.8, low=95), found(400, low=395), found(300, samples=2, low=99)], [0, 1, 3]),
        ([found(100), found(400, low=95)], [0]),  # steady, whatever its least
        ([found(us) for us in (-1.0, 0.0, math.nan, math.inf, 5e-324, 7.0)], [5]),  # these are not times
    ],
)
def test_leaders_are_the_nearest_few_a_runner_up_and_the_disturbed(times: list[Measurement], chosen: list[int]) -> None:
    assert leaders(times) == chosen


def test_the_rerank_finds_the_truly_faster_under_noise() -> None:
    """5 % apart in 6 % noise with bursts and a drift; the slower is the simpler, so ties do not help."""
    machines = [Machine(seed, noise=0.06, burst=0.1, drift=0.2) for seed in range(200)]
    assert sum(m.rank((1000, 1050), 1.0, seed).winner == 0 for seed, m in enumerate(machines)) >= 180


def test_a_tie_goes_to_the_simpler() -> None:
    rounds = [[1.000, 1.0015, 1.10]] * 9
    verdict = pick(rounds, [(2, 5), (1, 9), (1, 1)])
    assert (verdict.tied, verdict.winner) == ((0, 1), 1)
    assert (verdict.margin or 0) < 0, "the tie made it win"
    assert pick(rounds, [(1, 5), (1, 9), (1, 1)]).winner == 0


def test_the_margin_is_the_lead_over_the_runner_up_in_standard_errors() -> None:
    rng = random.Random(1)
    winner = [1.0] * 400
    near, far = ([c * math.exp(rng.gauss(0, 0.01)) for _ in winner] for c in (1.01, 1.5))
    # the median of 400 ratios with a standard deviation of 1 % has a standard error of 1.253 * 0.01 / sqrt(400)
    assert uncertainty(near) == pytest.approx(0.000627, rel=0.15)
    assert margin(winner, [far, near]) == pytest.approx(0.01 / 0.000627, rel=0.2)
    assert (margin(near, [winner]) or 0) < 0
    assert margin(winner, []) is None
    assert margin([1.0] * 5, [[1.01] * 5]) == pytest.approx(100), "no clock is better than 1e-4"


def test_a_ranking_ends_when_it_is_decided_or_its_time_is_up_and_a_small_margin_is_ranked_again() -> None:
    assert Machine(seed=9, noise=0.3).rank((1000, 1000, 1000)).rounds == 5, "its time was up at once"
    clear = Machine(seed=4, noise=0.005).rank((1000, 1500), 100)
    assert (clear.winner, clear.rounds) == (0, 5)
    close = Machine(seed=3, noise=0.02).rank((1000, 1000.1), again=3)
    assert close.rounds == 20, "all rounds count"
    assert abs(close.margin or 99) < SMALL_MARGIN
    assert Machine(seed=3, noise=0.02).rank((1000, 1500), again=3).rounds == 5


def test_sustained_the_clearly_slower_drop_out_and_the_nearest_are_told_apart() -> None:
    """Eight within 6 % in noise of 1.1 % a sample, as at a power cap: the winner is within 1.5 % of the fastest."""
    us = [1000.0 * (1 + 0.008 * i) for i in range(8)]
    winners = []
    for seed in range(60):
        m = Machine(seed, noise=0.011)
        v = m.rank(us, 0.0, seed, sustained=True)
        taken = [sum(seconds == t / 1e6 for seconds, _ in m.taken) for t in us]
        assert taken[7] < taken[0] == 2 * v.rounds
        assert v.rounds == SUSTAINED_ROUNDS
        winners.append(v.winner)
    assert sum(w <= 1 for w in winners) >= 57
    assert winners.count(0) >= 40


@pytest.mark.parametrize(("best_us", "calls"), [(math.inf, 1 + 100 + 3), (500, 1 + 2)])
def test_a_candidate_settles_before_its_samples_unless_it_is_far_off(best_us: float, calls: int) -> None:
    m = Machine()
    m.measure(1000, SamplingPolicy(min_samples=3, settle_s=0.1, far=1.6), best_us=best_us)
    assert m.calls == calls
