"""How long a call takes, and which of several is the fastest: the timing policy every tuner shares.

Pure of any library: a *timer* is a function that makes `calls` calls back to back and returns the seconds they
took together, on whatever clock is right for the device. The caller prepares (threads, buffers) inside its timer.

- `measure` takes samples of one candidate until its median is known well enough, its time is up, or it is
  hopeless next to the best so far.
- `rerank` measures the leaders again, one sample of each per round in random order, so that a drift of the
  machine hits all of them alike and the winner is not the one that was lucky once.
- `pick` chooses on the ratios of samples of one round; candidates that the noise cannot tell apart are
  tied, and the tie goes to the simplest.

Times are in seconds unless a name says `us`.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

Timer = Callable[[int], float]
Clock = Callable[[], float]

MIN_US = 1e-3
"""No call takes less than a nanosecond: anything below is a broken clock, not a winner."""

TIE_FLOOR, TIE_CEILING = 0.005, 0.02
"""Differences below the floor are always a tie, above the ceiling never."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When a candidate has been measured enough."""

    min_sample_s: float = 200e-6
    """A sample makes as many calls as it takes to last so long."""
    max_calls: int = 1000
    min_samples: int = 7
    max_samples: int = 101
    target: float = 0.01
    """Relative uncertainty of the median (see `uncertainty`) to stop at."""
    hopeless: float = 3.0
    """So many times slower than the best so far is not worth more samples."""
    hopeless_after: int = 2


@dataclass(frozen=True, slots=True)
class Measurement:
    """A candidate's time: median of `samples` samples of `calls` calls each."""

    us: float
    spread: float
    samples: int
    calls: int
    why: str
    """Why sampling ended: `steady`, `enough`, `time` or `hopeless`."""

    @property
    def valid(self) -> bool:
        return valid_us(self.us)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the re-rank says of its contenders, by their index."""

    winner: int
    us: tuple[float, ...]
    spread: tuple[float, ...]
    lag: tuple[float, ...]
    """Median of the ratio to the fastest within a round, less 1."""
    tied: tuple[int, ...]
    rounds: int


def valid_us(us: float) -> bool:
    """Whether `us` can be the time of a call: finite and not below a nanosecond (nor -1, 0, NaN, denormal)."""
    return math.isfinite(us) and us >= MIN_US


def spread(samples: Sequence[float]) -> float:
    """Half the interquartile range over the median; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle > 0 else 0.0


def uncertainty(samples: Sequence[float]) -> float:
    """Relative standard error of the median: 1.253 sigma / sqrt(n), with sigma = IQR / 1.349 (normal noise)."""
    return 1.253 * (2 * spread(samples) / 1.349) / math.sqrt(len(samples))


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection while the clock runs."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def measure(
    timer: Timer,
    policy: Policy,
    cap_s: float,
    best_us: float = math.inf,
    now: Clock = time.perf_counter,
    tick: Callable[[], None] = lambda: None,
) -> Measurement:
    """Median time of a call: warm-up, then samples until steady, hopeless or out of time.

    A warm-up that takes all of `cap_s` is itself the one sample. `tick` is called after each timing.
    """
    start = now()
    with quiet():
        each = timer(1)
        tick()
        calls = _calls(each, policy)
        if calls > 1:
            each = timer(calls) / calls
            calls = _calls(each, policy)
        if now() - start >= cap_s:
            return _measurement([each], calls, "hopeless" if _slow([each], best_us, policy) else "time")
        samples: list[float] = []
        while True:
            samples.append(timer(calls) / calls)
            tick()
            n, over = len(samples), now() - start >= cap_s
            if (n >= policy.hopeless_after or over) and _slow(samples, best_us, policy):
                return _measurement(samples, calls, "hopeless")
            if n >= policy.min_samples and uncertainty(samples) <= policy.target:
                return _measurement(samples, calls, "steady")
            if n >= policy.max_samples:
                return _measurement(samples, calls, "enough")
            if over:
                return _measurement(samples, calls, "time")


def leaders(us: Sequence[float], within: float = 0.10, most: int = 4) -> list[int]:
    """Indexes of the fastest and of those within `within` of it, fastest first, at most `most`."""
    order = sorted((i for i in range(len(us)) if valid_us(us[i])), key=lambda i: us[i])
    return [i for i in order if us[i] <= us[order[0]] * (1 + within)][:most]


def rerank(
    timers: Sequence[Timer],
    calls: Sequence[int],
    simplicity: Sequence[tuple[int, ...]],
    rng: random.Random,
    cap_s: float,
    min_rounds: int = 5,
    max_rounds: int = 41,
    now: Clock = time.perf_counter,
    tick: Callable[[], None] = lambda: None,
) -> Verdict:
    """Measure the contenders again, interleaved, and pick (see `pick`).

    Each round takes one sample of every contender, in an order drawn anew. Ends at `max_rounds`, when no more
    rounds can change the choice, or at `cap_s` once `min_rounds` are in.
    """
    start = now()
    rounds: list[list[float]] = []
    order = list(range(len(timers)))
    with quiet():
        while len(rounds) < max_rounds:
            rng.shuffle(order)
            taken = [0.0] * len(timers)
            for i in order:
                timers[i](1)  # what ran before had other threads and other data in the cache
                taken[i] = timers[i](calls[i]) / calls[i]
                tick()
            rounds.append(taken)
            if len(rounds) >= min_rounds and (now() - start >= cap_s or _decided(rounds)):
                break
    return pick(rounds, simplicity)


def pick(rounds: Sequence[Sequence[float]], simplicity: Sequence[tuple[int, ...]]) -> Verdict:
    """The winner of re-rank samples (`rounds[r][i]`: seconds of contender i in round r).

    The fastest is the one of the lowest median. A contender is tied with it when the median of its ratio to it,
    taken within each round, is above 1 by no more than twice that median's standard error, but at least TIE_FLOOR
    and at most TIE_CEILING. Of the tied, the lowest `simplicity` wins.
    """
    n = len(rounds[0])
    columns = [[r[i] for r in rounds] for i in range(n)]
    medians = [statistics.median(c) for c in columns]
    best = min(range(n), key=lambda i: medians[i])
    lag, margin = zip(*(_lag(columns[i], columns[best]) for i in range(n)), strict=True)
    tied = tuple(i for i in range(n) if lag[i] <= margin[i])
    return Verdict(
        winner=min(tied, key=lambda i: simplicity[i]),
        us=tuple(m * 1e6 for m in medians),
        spread=tuple(spread(c) for c in columns),
        lag=lag,
        tied=tied,
        rounds=len(rounds),
    )


def _calls(each: float, policy: Policy) -> int:
    return min(policy.max_calls, max(1, math.ceil(policy.min_sample_s / max(each, 1e-9))))


def _slow(samples: Sequence[float], best_us: float, policy: Policy) -> bool:
    return min(samples) * 1e6 > policy.hopeless * best_us


def _measurement(samples: Sequence[float], calls: int, why: str) -> Measurement:
    return Measurement(statistics.median(samples) * 1e6, spread(samples), len(samples), calls, why)


def _lag(column: Sequence[float], best: Sequence[float]) -> tuple[float, float]:
    """How much slower than the best, and what counts as a tie."""
    ratios = [c / max(b, 1e-12) for c, b in zip(column, best, strict=True)]
    return statistics.median(ratios) - 1, min(TIE_CEILING, max(TIE_FLOOR, 2 * uncertainty(ratios)))


def _decided(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether each contender is clearly apart from the fastest, or known to be as fast to within the floor."""
    n = len(rounds[0])
    columns = [[r[i] for r in rounds] for i in range(n)]
    medians = [statistics.median(c) for c in columns]
    best = min(range(n), key=lambda i: medians[i])
    if n == 1:
        return uncertainty(columns[0]) <= TIE_FLOOR
    for i in range(n):
        if i == best:
            continue
        ratios = [c / max(b, 1e-12) for c, b in zip(columns[i], columns[best], strict=True)]
        gap, error = statistics.median(ratios) - 1, uncertainty(ratios)
        if gap - 3 * error <= TIE_CEILING and 2 * error > TIE_FLOOR:
            return False
    return True
