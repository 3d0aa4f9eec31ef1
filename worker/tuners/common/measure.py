"""Measures the median time of a call, and finds the fastest of several. All tuners share this timing policy.

It uses no library. A *timer* is a function that makes `calls` calls back to back and returns the seconds that they took
together, on the right clock for the device. The caller's preparations (threads, buffers) are part of its timer.

- `measure` takes samples of one candidate until its median is known well enough, its time is up, or it is
  hopeless next to the best so far.
- `rerank` measures the leaders again, one sample of each per round in random order, so that a drift of the
  machine hits all of them alike and the winner is not the one that was lucky once.
- `pick` chooses on the ratios of samples of one round; candidates within the noise of each other are
  tied, and the tie goes to the simplest.

Where a power cap sets the clock, a kernel's clock follows from what it draws, some tens of milliseconds later. Large
problems are therefore measured *sustained*: each candidate first runs until the clock is its own. What a few samples
in a row say of one is off by 3 to 8 % there, so that more are ranked, and those clearly behind drop out round by round.

Times are in seconds unless a name ends with `us`.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker import without_gc

Timer = Callable[[int], float]
Clock = Callable[[], float]

MIN_US = 1e-3
"""No call takes less than a nanosecond: anything below is a broken clock, not a winner."""

TIE_FLOOR = 0.002
"""Relative differences below this are always ties."""
TIE_CEILING = 0.005
"""Relative differences above this are never ties."""

RUNNER_UP = 1.5
"""A runner-up takes at most this many times as long as the best candidate."""
SMALL_MARGIN = 3.0
"""A smaller margin, in standard errors, may be luck."""
SURE = 1.96
"""Standard errors on either side of a 95 % interval."""
LEAST_ERROR = 1e-4
"""No ratio of two times is more exact than this."""
ROUNDS = 5
"""Fewest rounds of a ranking."""
MOST_ROUNDS = 41
"""Most rounds of each repeat of a ranking."""

SETTLE_S = 0.2
"""Sustained: seconds that a candidate runs before its samples, and before each sample of a ranking."""
SUSTAINED_S = 0.1
"""Sustained: seconds of a sample."""
SUSTAINED_ROUNDS = 12
"""Sustained: fewest rounds of a ranking."""
CLEAR_ROUNDS = 3
"""Sustained: rounds before a contender may drop out, because one sample may be far off."""
SUSTAINED_NOISE = 0.015
"""Standard deviation of the ratio of two sustained samples of a round, measured on an H200 at its power cap."""

WIDE = 0.15
"""With this spread or more, other work on the machine may decide a median."""
FEW = 5
"""With fewer samples than this, other work on the machine may decide a median."""


@dataclass(frozen=True, slots=True)
class SamplingPolicy:
    """The rule for when a candidate has been measured enough."""

    min_sample_s: float = 200e-6  # a sample makes enough calls to last this long
    max_calls: int = 1000
    min_samples: int = 7
    max_samples: int = 101
    target: float = 0.01  # stop at this relative uncertainty of the median (see `uncertainty`)
    # A candidate beyond this ratio to the best so far gets at most `hopeless_after` samples.
    hopeless: float = 3.0
    hopeless_after: int = 5
    far: float = 10.0  # beyond this ratio it gets at most two samples
    settle_s: float = 0.0  # a candidate within `far` runs this many seconds before its samples


@dataclass(frozen=True, slots=True)
class Measurement:
    """A candidate's time: median of `samples` samples of `calls` calls each."""

    us: float
    spread: float
    samples: int
    calls: int
    why: str  # reason for the end of sampling: `steady`, `enough`, `time` or `hopeless`
    low_us: float = 0.0  # the least of the samples

    @property
    def valid(self) -> bool:
        """True if it can be the time of a call: finite and not below a nanosecond (nor -1, 0, NaN, denormal)."""
        return math.isfinite(self.us) and self.us >= MIN_US

    @property
    def is_doubtful(self) -> bool:
        """True if other work on the machine may have decided the median."""
        return self.spread >= WIDE or self.samples < FEW


@dataclass(frozen=True, slots=True)
class Finalist:
    """A contender of the re-rank."""

    timer: Timer
    first: Measurement
    """Its measurement so far."""
    simplicity: tuple[int, ...] = ()
    """The order among contenders that are tied: the lowest wins."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Result of the re-rank, by the contenders' index."""

    winner: int
    us: tuple[float, ...]
    spread: tuple[float, ...]
    tied: tuple[int, ...]
    rounds: int
    # Lead over the runner-up in standard errors of their ratio (see `margin`), None without a runner-up.
    margin: float | None = None
    # Upper ends of the 95 % intervals of the ratios to the contender that is there today, () without one.
    high: tuple[float, ...] = ()


def spread(samples: Sequence[float]) -> float:
    """Half the interquartile range over the median; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / median if median > 0 else 0.0


def uncertainty(samples: Sequence[float]) -> float:
    """Relative standard error of the median: 1.253 sigma / sqrt(n), with sigma = IQR / 1.349 (normal noise)."""
    return 1.253 * (2 * spread(samples) / 1.349) / math.sqrt(len(samples))


def measure(
    timer: Timer,
    policy: SamplingPolicy,
    cap_s: float,
    best_us: float = math.inf,
    now: Clock = time.perf_counter,
    tick: Callable[[], None] = lambda: None,
) -> Measurement:
    """Median time of a call: warm-up, then samples until steady, hopeless or out of time.

    A warm-up that takes all of `cap_s` is itself the one sample. `tick` is called after each timing.
    """
    start = now()
    with without_gc():
        call_s = timer(1)
        tick()
        calls = _calls_of_a_sample(call_s, policy)
        if calls > 1:
            call_s = timer(calls) / calls
            calls = _calls_of_a_sample(call_s, policy)
        if now() - start >= cap_s:
            why = "hopeless" if _is_slow([call_s], best_us, policy.hopeless) else "time"
            return _measurement([call_s], calls, why)
        if policy.settle_s and call_s * 1e6 <= policy.far * best_us:
            timer(calls_of(policy.settle_s, call_s))
            tick()
        samples: list[float] = []
        while True:
            samples.append(timer(calls) / calls)
            tick()
            why = _why_stop(samples, best_us, policy, is_time_up=now() - start >= cap_s)
            if why:
                return _measurement(samples, calls, why)


def _why_stop(samples: Sequence[float], best_us: float, policy: SamplingPolicy, *, is_time_up: bool) -> str:
    """The reason to end the sampling of a candidate (see `Measurement.why`), "" to go on."""
    if is_time_up and _is_slow(samples, best_us, policy.hopeless):
        return "hopeless"
    times = policy.hopeless if len(samples) >= policy.hopeless_after else policy.far
    if len(samples) >= 2 and _is_slow(samples, best_us, times):
        return "hopeless"
    if len(samples) >= policy.min_samples and uncertainty(samples) <= policy.target:
        return "steady"
    if len(samples) >= policy.max_samples:
        return "enough"
    return "time" if is_time_up else ""


def calls_of(seconds: float, call_s: float) -> int:
    """Calls of `call_s` seconds that last `seconds`, at least one."""
    return max(1, math.ceil(seconds / max(call_s, 1e-9)))


def leaders(times: Sequence[Measurement], within: float = 0.10, most: int = 4, suspects: int = 2) -> list[int]:
    """Indexes of the candidates to measure again: the fastest and those within `within` of it, at most `most`.

    Where that is one alone, the next best as well, so that the winner has a margin, if it takes at most RUNNER_UP
    times as long. And up to `suspects` of those that were probably disturbed: a wide spread or few samples, the least
    of which is below the best median. The re-rank costs little and shows whether they are fast.
    """
    valid = [i for i, time in enumerate(times) if time.valid]
    if not valid:
        return []
    order = sorted(valid, key=lambda i: times[i].us)
    best_us = times[order[0]].us
    near = [i for i in order if times[i].us <= best_us * (1 + within)][:most]
    if near == order[:1] and len(order) > 1 and times[order[1]].us <= best_us * RUNNER_UP:
        near.append(order[1])
    others = [i for i in order if i not in near]
    maybe_fast = [i for i in others if times[i].is_doubtful and times[i].low_us <= best_us]
    maybe_fast.sort(key=lambda i: times[i].low_us)
    return near + maybe_fast[:suspects]


def rerank(
    finalists: Sequence[Finalist],
    rng: random.Random,
    cap_s: float,
    now: Clock = time.perf_counter,
    tick: Callable[[], None] = lambda: None,
    *,
    sustained: bool = False,
    again: int = 0,
    today: int | None = None,
) -> Ranking:
    """Measure the contenders again, interleaved, and pick (see `pick`).

    Each round takes one sample of every contender, in an order drawn anew, after one call of it (the previous run had
    other threads and other data in the cache). Ends at MOST_ROUNDS, when no more rounds can change the choice, or at
    `cap_s` once ROUNDS are in. While the margin is small that is repeated, up to `again` times; all rounds count.
    `today`: a contender whose ratios to all others have to be known as well.
    Sustained: each contender runs SETTLE_S before each sample, and who is clearly behind takes no further part.
    """
    rounds: list[list[float | None]] = []
    order = list(range(len(finalists)))
    if sustained:
        calls = [calls_of(SUSTAINED_S, finalist.first.us / 1e6) for finalist in finalists]
        calls_before = [calls_of(SETTLE_S, finalist.first.us / 1e6) for finalist in finalists]
        least = SUSTAINED_ROUNDS
    else:
        calls = [finalist.first.calls for finalist in finalists]
        calls_before = [1] * len(finalists)
        least = ROUNDS
    for repeat in range(again + 1):
        start = now()
        rounds_before = len(rounds)
        with without_gc():
            while len(rounds) - rounds_before < MOST_ROUNDS:
                rng.shuffle(order)
                taken: list[float | None] = [None] * len(finalists)
                for i in order:
                    timer = finalists[i].timer
                    timer(calls_before[i])
                    taken[i] = timer(calls[i]) / calls[i]
                    tick()
                rounds.append(taken)
                if sustained and len(rounds) >= CLEAR_ROUNDS:
                    order = _in_the_race(rounds)
                may_end = now() - start >= cap_s or (repeat == 0 and _decided(rounds, today))
                if may_end and len(rounds) - rounds_before >= least:
                    break
        ranking = pick(rounds, [finalist.simplicity for finalist in finalists], today)
        if ranking.margin is None or abs(ranking.margin) >= SMALL_MARGIN:
            break
    return ranking


def pick(
    rounds: Sequence[Sequence[float | None]], simplicity: Sequence[tuple[int, ...]], today: int | None = None
) -> Ranking:
    """The winner of re-rank samples (`rounds[r][i]`: seconds of contender i in round r, None once it dropped out).

    The fastest is the one of the lowest median. A contender is tied with it when the median of its ratio to it, taken
    within each round, is above 1 by no more than twice that median's standard error, but at least TIE_FLOOR and at
    most TIE_CEILING. Of the tied, the lowest `simplicity` wins.
    """
    columns = _times_of_contenders(rounds)
    ratios = _ratios(columns, _fastest(columns, len(rounds)))
    tied = tuple(i for i, ratio in enumerate(ratios) if statistics.median(ratio) - 1 <= _width_of_tie(ratio))
    winner = min(tied, key=lambda i: simplicity[i])
    others = [column for i, column in enumerate(columns) if i != winner]
    high: tuple[float, ...] = ()
    if today is not None:
        high = tuple(upper_bound(ratio) for ratio in _ratios(columns, columns[today]))
    return Ranking(
        winner=winner,
        us=tuple(statistics.median(column) * 1e6 for column in columns),
        spread=tuple(spread(column) for column in columns),
        tied=tied,
        rounds=len(rounds),
        margin=margin(columns[winner], others),
        high=high,
    )


def upper_bound(ratio: Sequence[float]) -> float:
    """Upper end of the 95 % interval of the median."""
    return statistics.median(ratio) * (1 + SURE * uncertainty(ratio))


def _width_of_tie(ratio: Sequence[float]) -> float:
    """The relative difference to the fastest up to which a contender is tied with it."""
    return min(TIE_CEILING, max(TIE_FLOOR, 2 * uncertainty(ratio)))


def margin(winner: Sequence[float], others: Sequence[Sequence[float]]) -> float | None:
    """Lead of the winner over the runner-up in standard errors of the median of their ratio within a round.

    Below 0 where the winner is the slower one of a tie; None where there is no other. The runner-up is the one of the
    least ratio; the samples of a round have the same index, and one that dropped out has fewer.
    """
    ratios = [[t / max(w, 1e-12) for t, w in zip(other, winner, strict=False)] for other in others]
    if not ratios:
        return None
    nearest = min(ratios, key=statistics.median)
    return (statistics.median(nearest) - 1) / max(LEAST_ERROR, uncertainty(nearest))


def _calls_of_a_sample(call_s: float, policy: SamplingPolicy) -> int:
    return min(policy.max_calls, calls_of(policy.min_sample_s, call_s))


def _is_slow(samples: Sequence[float], best_us: float, times: float) -> bool:
    """Compare the shortest sample, because disturbed samples say nothing about the candidate."""
    return min(samples) * 1e6 > times * best_us


def _measurement(samples: Sequence[float], calls: int, why: str) -> Measurement:
    us = statistics.median(samples) * 1e6
    return Measurement(us, spread(samples), len(samples), calls, why, min(samples) * 1e6)


def _times_of_contenders(rounds: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """The samples of each contender in the order of the rounds; one that dropped out has fewer."""
    return [[time for time in column if time is not None] for column in zip(*rounds, strict=True)]


def _fastest(columns: Sequence[Sequence[float]], rounds: int) -> Sequence[float]:
    """The samples of the contender with the lowest median, of those that took part in all rounds."""
    return min((column for column in columns if len(column) == rounds), key=statistics.median)


def _ratios(columns: Sequence[Sequence[float]], reference: Sequence[float]) -> list[list[float]]:
    """The ratio of each contender's sample to the reference's sample of the same round."""
    return [[time / max(base, 1e-12) for time, base in zip(column, reference, strict=False)] for column in columns]


def _in_the_race(rounds: Sequence[Sequence[float | None]]) -> list[int]:
    """The contenders of sustained rounds that may still be the fastest, by index."""
    columns = _times_of_contenders(rounds)
    contenders = []
    for i, ratio in enumerate(_ratios(columns, _fastest(columns, len(rounds)))):
        width = max(TIE_CEILING, 3 * uncertainty(ratio), 3 * SUSTAINED_NOISE / math.sqrt(len(ratio)))
        if len(ratio) == len(rounds) and statistics.median(ratio) - 1 <= width:
            contenders.append(i)
    return contenders


def _decided(rounds: Sequence[Sequence[float | None]], today: int | None) -> bool:
    """Return whether each contender is clearly slower than the fastest (and slower than today's, or faster), or its
    ratio is known to within the floor."""
    columns = _times_of_contenders(rounds)
    ratios = [r for r in _ratios(columns, _fastest(columns, len(rounds))) if len(r) == len(rounds)]
    if len(ratios) == 1:
        return uncertainty(max(columns, key=len)) <= TIE_FLOOR
    if today is not None:
        ratios += _ratios(columns, columns[today])
    return all(_is_known(ratio) for ratio in ratios)


def _is_known(ratio: Sequence[float]) -> bool:
    """Return whether the ratio is clearly no tie, or known to within the floor."""
    error = uncertainty(ratio)
    return abs(statistics.median(ratio) - 1) - 3 * error > TIE_CEILING or 2 * error <= TIE_FLOOR
