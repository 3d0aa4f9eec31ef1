"""The worth of a run's winners: their gain over the calls of a workload, and over the median candidate.

`gemmfleet gain` calls `calls_of_run` if the user gives no workload, then `times_before` and `gain_of_workload`, or
`gain_of_engine` for a run of an engine's tuner. The page of a run's end shows `gains_over_median`, and
`noise_note` on winners whose times are not to be trusted. What a run with --by-value won is in `planning/worth.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from orchestrator.command_hints import command
from orchestrator.configs.measured_ms import measured_of_run
from orchestrator.families import grid_point
from orchestrator.files.read import read_json
from orchestrator.ledger.reader import LedgerReader, ProfileRow
from orchestrator.paths import RunPaths
from orchestrator.shapes.model import COUNT, NOW, numbers
from orchestrator.shapes.reader import read_shapes
from orchestrator.tables.keys import Key
from orchestrator.tables.table import read_table
from worker.families import Family
from worker.text import and_more, plural
from worker.triton_configs.engine_package import Layer

MOST_NAMED = 4
SIGMA = 1.4826
"""The standard deviation of a normal distribution over half its interquartile range."""
SUM_ERROR = 0.03
"""The relative difference between a step and the sum of its calls' own times. Measured twice (decode steps replayed as
CUDA graphs; one model, one H200), at seven and at six M: the sum was 0.97 to 1.03 of the step."""


@dataclass(frozen=True, slots=True)
class ShapeGain:
    """A shape of the workload. Times of a call are in microseconds, with the standard deviation of their difference."""

    key: Key
    calls: float
    before_us: float
    after_us: float
    sigma_us: float = 0.0

    @property
    def won_us(self) -> float:
        """Microseconds that its calls gain (negative: lose)."""
        return self.calls * (self.before_us - self.after_us)


@dataclass(frozen=True, slots=True)
class WorkloadGain:
    """The gain of a run over the calls of a workload. `rows`: shapes with times before and after, the largest gain
    first. `left_out`: shapes without a time before."""

    rows: tuple[ShapeGain, ...]
    left_out: tuple[Key, ...]

    @property
    def before_us(self) -> float:
        return sum(row.calls * row.before_us for row in self.rows)

    @property
    def won_us(self) -> float:
        return sum(row.won_us for row in self.rows)

    @property
    def sigma_us(self) -> float:
        """Standard deviation of `won_us`. The calls of a shape share one error; errors of shapes are independent."""
        return math.hypot(*(row.calls * row.sigma_us for row in self.rows))

    def fits_in(self, seconds: float) -> bool:
        """True if the calls can have run in this time, one after the other."""
        return self.before_us / 1e6 <= seconds * (1 + SUM_ERROR)

    def share_of(self, seconds: float) -> float | None:
        """The part of this time that is won at most; None if the calls cannot have run in it."""
        return self.won_us / 1e6 / seconds if self.fits_in(seconds) else None


def calls_of_run(paths: RunPaths, ledger: LedgerReader) -> dict[Key, float]:
    """The calls of the run's own shapes: the column `count` of the user's list, or else one each."""
    if paths.annotations.exists():
        counts = numbers(read_shapes(paths.annotations, ledger.family), COUNT)
        if counts:
            return counts
    return dict.fromkeys(ledger.keys.values(), 1.0)


def gain_of_engine(run: Path, calls: Mapping[Key, float], family: Family) -> WorkloadGain:
    """The gain of a run of an engine's tuner, which measured both times side by side; of several routings the mean.

    An M that was not measured is left out. The spread is not known. Raises InputError.
    """
    times: dict[tuple[int, Layer], tuple[float, float]] = {}
    for (_, layer), rows in measured_of_run(run).items():
        for row in rows:
            pairs = [pair for pair in row.times.values() if pair[0] > 0]
            if pairs:
                times[row.m, layer] = (fmean(old for old, _ in pairs), fmean(new for _, new in pairs))
    gains = []
    left_out = []
    for key, count in calls.items():
        columns = family.named_key(key)
        pair = times.get((int(columns[family.m_column]), Layer.from_key(columns)))
        if pair is None:
            left_out.append(key)
        else:
            gains.append(ShapeGain(key, count, *pair))
    gains.sort(key=lambda gain: -gain.won_us)
    return WorkloadGain(tuple(gains), tuple(left_out))


def gain_of_workload(
    winners: Iterable[ProfileRow], calls: Mapping[Key, float], before: Mapping[Key, float], family: Family
) -> WorkloadGain:
    """The gain of a run with these winners. `calls`: how often the workload calls each shape. `before`: the time of
    each in microseconds (`times_before`).

    A shape without a row takes the row of its padded M, as AITER's lookup does. If there is no such row either, its
    time does not change.
    """
    after = {winner.key: (winner.us, SIGMA * winner.row.get("spread", 0.0)) for winner in winners}
    rows = []
    left_out = []
    for key, count in calls.items():
        keys = (key, grid_point(key, family, "fine"), grid_point(key, family, "coarse"))
        before_us = next((before[k] for k in keys if k in before), None)
        if before_us is None:
            left_out.append(key)
            continue
        us, spread = next((after[k] for k in keys if k in after), (before_us, 0.0))
        # a table has no spread: we assume that the time before has the same error as the time after
        rows.append(ShapeGain(key, count, before_us, us, spread * math.hypot(before_us, us)))
    rows.sort(key=lambda row: -row.won_us)
    return WorkloadGain(tuple(rows), tuple(left_out))


def times_before(
    paths: RunPaths, winners: Iterable[ProfileRow], table: Path | None, family: Family
) -> dict[Key, float]:
    """Times before the run in microseconds, by shape. The first of these counts that has the shape:

    1. `table`, the rows of the winners' chip;
    2. the rows that the run's merge found; if the old kernel was measured beside the new one, that time;
    3. the column now_us of the run's shapes.

    Raises InputError.
    """
    times: dict[Key, float] = {}
    if paths.annotations.exists():
        times |= numbers(read_shapes(paths.annotations, family), NOW)
    if paths.merge.exists():
        for row in read_json(paths.merge)["rows"]:
            us = row["old_us"]
            if row.get("rival_us") and row.get("judged") == "same profile":
                us = row["rival_us"]
            if us and all(name in row["key"] for name in family.key_names):
                times[tuple(row["key"][name] for name in family.key_names)] = us
    if table is not None:
        chips = {family.chip(winner.gfx, winner.cu_num or 0) for winner in winners}
        for line in read_table(table, family, doubled=True).rows:
            if line.us is not None and line.key[:2] in chips:
                times[line.key[2:]] = line.us
    return times


def gains_over_median(ledger: LedgerReader, winners: Iterable[ProfileRow]) -> dict[int, float]:
    """The median candidate's time over that of each winner, by shape; without winners that were alone.

    Candidates are the correct ones of the settling attempt, with their first times. 1.0: the choice made no difference.
    """
    winner_of = {winner.shape: winner for winner in winners}
    ids = ", ".join(map(str, winner_of))
    rows = ledger.query(f"SELECT shape, us, id, attempt FROM rows WHERE us > 0 AND status='ok' AND shape IN ({ids})")
    others: dict[int, list[float]] = {}
    for shape, us, row_id, attempt in rows:
        winner = winner_of[shape]
        if attempt == winner.attempt and row_id != winner.id:
            others.setdefault(shape, []).append(us)
    return {shape: median(times) / winner_of[shape].us for shape, times in others.items()}


def noise_note(shapes: Sequence[str], run: str) -> str:
    """A sentence on the noisy winners of these shapes, "" if no winner is noisy. `run`: as it is typed.

    The leaders are measured again before one of them wins. If the winner then takes another time than at first,
    something disturbed the machine, and neither its time nor the choice can be trusted.
    """
    if not shapes:
        return ""
    return (
        f"{plural(len(shapes), 'winner is', 'winners are')} noisy, not to be trusted: measured again, the time differs"
        f" from the first by more than both spreads explain ({and_more(shapes, MOST_NAMED)}); measure again:"
        f" {command(f'retry {run} --noisy')}"
    )
