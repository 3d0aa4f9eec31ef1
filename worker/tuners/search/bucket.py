"""The search for one config file: `FileSearch` goes through its buckets, `BucketSearch` finds one bucket's config.

A bucket is some points (M, and what else a time depends on) that get one config. Each point is searched, then the
leaders of all and today's configs are measured at every point, interleaved, and one is chosen for all of them
(`choice.py`). A point is a `PointTask`; its candidates are a `ShapeTask`, which a `ProblemSearch` goes through
(problem_search.py). The order of calls, for each bucket:

    search    the points one after the other; each keeps its leaders
    compare   all leaders and today's config, at each point
    settle    choose, and report every shape of the bucket

A shape is parked while the others of its bucket are measured; the bucket's verdict settles them all.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from worker.protocol import Row, SpecShape
from worker.text import clean
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.search.choice import Point, choose_config
from worker.tuners.search.options import EXHAUSTIVE
from worker.tuners.search.problem_search import ProblemSearch, SearchContext, ShapeTask, candidate_row
from worker.tuners.search.ranker import CandidateRanker
from worker.tuners.search.seeds import Seeds
from worker.tuners.search.source import KernelSource
from worker.tuners.search.space import best_of_each_tile
from worker.tuners.search.tile_config import TileConfig

FAST_LIST = 600
"""Most candidates of the fast search, beside the seeds."""
FINALISTS = 3
"""This many leaders of each point are measured at all points of the bucket."""


@dataclass(frozen=True, slots=True)
class PointTime:
    """Time of a config at one point, its errRatio, and the spread of the samples. `high_us`: today's time there times
    the upper end of the 95 % interval of the ratio to it, where they were measured side by side."""

    us: float
    err: float
    spread: float
    high_us: float


@dataclass(slots=True)
class PointTask:
    """A point of a bucket with its problem, its search if it has one, and its measurements."""

    point: Point
    shape: SpecShape
    """The shape of its M, or that in whose name it is measured."""
    problem: Any
    today: TileConfig
    """The config that it has now."""
    search_task: ShapeTask | None = None
    """Its candidates; None where it is only compared."""
    explored: list[int] = field(default_factory=list)
    """Candidates of the search that come behind the seeds."""
    leaders: list[TileConfig] = field(default_factory=list)
    """The configs that were kept of its search."""
    times: dict[str, PointTime] = field(default_factory=dict)
    """Final times by the config's name."""
    rounds: int = 0
    """Rounds of its ranking."""

    @property
    def today_us(self) -> float:
        """Time of today's config, -1 where it does not run."""
        return self.us_of(self.today.name)

    def us_of(self, name: str) -> float:
        """Time of a config, -1 where it has none."""
        return self.times[name].us if name in self.times else -1.0


def group_by_file(shapes: Sequence[SpecShape], m_column: str = "M") -> list[list[SpecShape]]:
    """The shapes of each config file: those that differ in M alone."""
    groups: dict[tuple[tuple[str, int | str], ...], list[SpecShape]] = {}
    for shape in shapes:
        without_m = tuple((column, value) for column, value in shape.key.items() if column != m_column)
        groups.setdefault(without_m, []).append(shape)
    return list(groups.values())


def shape_name(key: Mapping[str, int | str]) -> str:
    """A shape's key columns as one text: `16x1280x8192xtorch.bfloat16x...`."""
    return "x".join(map(str, key.values()))


class FileSearch(ABC):
    """The search for one config file, whose shapes differ in M only, bucket by bucket. While one is searched, what the
    next one needs is compiled.

    One shape is in flight. Every other one that was started is parked or settled.
    """

    callers: Sequence[str] = ()  # other operators that configs are measured through
    explores_tiles = False
    """True where a search tries one config of each tile, whatever the model says of tiles beside each other."""

    def __init__(self, context: SearchContext, source: KernelSource, seeds: Seeds, facts: Mapping[str, Any]) -> None:
        """`facts`: what is the same in all documents."""
        self.context = context
        self.source = source
        self.seeds = seeds
        self.facts = facts
        self.shapes: dict[int, SpecShape] = {}  # those that can be searched, by their M
        self.settled: set[int] = set()  # shapes by their id
        self.last_ranker: CandidateRanker | None = None  # of the latest search: it teaches the next
        self._in_flight: SpecShape | None = None

    @abstractmethod
    def add_shape(self, shape: SpecShape) -> None:
        """Take a shape. Raises UnsupportedError, ValueError, OSError."""

    @abstractmethod
    def buckets(self) -> Iterator[BucketSearch]:
        """The buckets of all shapes, with a search at each of their points."""

    @abstractmethod
    def tune_bucket(self, bucket: BucketSearch, following: Sequence[ShapeTask]) -> None:
        """Search a bucket."""

    def run(self, shapes: Sequence[SpecShape]) -> None:
        """Search the buckets of these shapes, and settle every shape."""
        for shape in shapes:
            self.context.emit.alive()
            try:
                self.add_shape(shape)
            except (UnsupportedError, ValueError, OSError) as e:
                refuse_shape(self.context, shape, str(e))
        with_end: Iterator[BucketSearch | None] = itertools.chain(self.buckets(), [None])
        for bucket, next_bucket in itertools.pairwise(with_end):
            assert bucket is not None
            for task in bucket.points:  # winners of the buckets before are known by now
                if task.search_task is not None:
                    self._put_first(task, self._first_configs(task))
            self.tune_bucket(bucket, search_tasks(next_bucket.points) if next_bucket else [])

    def weight(self, m: int) -> float:
        """Calls of the workload at an M."""
        if m not in self.shapes:
            return 0.0
        return dict(self.context.options.counts).get(shape_name(self.shapes[m].key), 1.0)

    def add_search(self, task: PointTask, fixed: Sequence[TileConfig] = (), *, quiet: bool = False) -> PointTask:
        """Give a point its search: today's config and the seeds, then legal configs by the model; or only `fixed`."""
        self.context.emit.alive()
        options = self.context.options
        first = self._first_configs(task)
        space = self.source.space(task.problem, self.context.target)
        if fixed:
            candidates = list(dict.fromkeys(fixed))
            always = frozenset(range(len(candidates)))
        else:
            most = options.max_candidates
            if not most and options.search != EXHAUSTIVE:
                most = FAST_LIST
            candidates = space.distinct([*first, *space.candidates(first, most)])
            always = frozenset([candidates.index(task.today)])
        us = [space.estimate(candidate) for candidate in candidates]
        is_quiet = quiet or not task.point.weight
        task.search_task = self.context.make_task(task.shape, task.problem, candidates, always, us, quiet=is_quiet)
        if self.explores_tiles and not fixed:
            task.explored = best_of_each_tile(candidates, us)
        self._put_first(task, first)
        return task

    def _first_configs(self, task: PointTask) -> list[TileConfig]:
        """Today's config, then the seeds."""
        return list(dict.fromkeys([task.today, *self.seeds.seeds_of(task.problem)]))

    def _put_first(self, task: PointTask, first: Sequence[TileConfig]) -> None:
        """Have a search begin with these, as far as they are among its candidates, then with `explored`."""
        assert task.search_task is not None
        index_of: dict[Any, int] = {candidate: i for i, candidate in enumerate(task.search_task.candidates)}
        indexes = [index_of[config] for config in first if config in index_of]
        task.search_task.ranker.put_first(list(dict.fromkeys([*indexes, *task.explored])))

    def start_shape(self, task: PointTask) -> None:
        """Put a point's shape in flight. A point of no shape is measured with the last one in flight."""
        if task.point.weight:
            self.put_in_flight(task.shape)

    def put_in_flight(self, shape: SpecShape) -> None:
        """Let a fault be charged to this shape from now on, unless it is settled."""
        if shape is self._in_flight or shape.id in self.settled:
            return
        if self._in_flight is not None:
            self.context.emit.parked(self._in_flight.id)
        self.context.emit.started(shape.id)
        self._in_flight = shape

    def settle_shape(self, task: PointTask, winner: Row | None, reason: str = "", detail: str = "") -> None:
        """Report the row of a point's shape, or why it has no row. Only the first verdict of a shape counts."""
        shape = task.shape
        if not task.point.weight or shape.id in self.settled:
            return
        if winner is not None:
            self.context.emit.tuned(shape.id, winner)
        else:
            self.context.emit.failed(shape.id, reason, detail)
        self.settled.add(shape.id)
        if self._in_flight is shape:
            self._in_flight = None


def refuse_shape(context: SearchContext, shape: SpecShape, why: str) -> None:
    """Settle a shape that cannot be searched."""
    context.emit.started(shape.id)
    context.emit.failed(shape.id, "unsupported", why)


def search_tasks(points: Sequence[PointTask]) -> list[ShapeTask]:
    """The searches of points, without those that are only compared."""
    return [task.search_task for task in points if task.search_task]


class BucketSearch:
    """One bucket of points, which get one config."""

    is_beside_today = False
    """True where the ranking says how much longer than today's config each may take (`PointTime.high_us`)."""

    def __init__(
        self,
        file: FileSearch,
        name: str,
        points: Sequence[PointTask],
        facts: Mapping[str, Any],
        *,
        alone: bool = False,
    ) -> None:
        """`facts`: for its documents, beside the file's; `alone`: there is one point, whose leaders are ranked at
        once."""
        self.file = file
        self.name = name
        self.points = list(points)
        self.facts = facts
        self.alone = alone
        self.configs: dict[str, TileConfig] = {}  # those that are compared, by name

    def search(self, following: Sequence[ShapeTask]) -> None:
        """Search the points, and keep the leaders of each and its config of today. Each search teaches the next."""
        for number, task in enumerate(self.points, 1):
            if task.search_task is None:
                self.configs.setdefault(task.today.name, task.today)
                continue
            self.file.start_shape(task)
            if self.file.last_ranker is not None:
                task.search_task.ranker.learn_from(self.file.last_ranker)
            next_tasks = [*search_tasks(self.points[number:]), *following]
            search = ProblemSearch(self.file.context, task.search_task, next_tasks)
            search.measure()
            if not search.measured:
                self.file.settle_shape(task, None, *search.why_none())
                continue
            self.file.last_ranker = task.search_task.ranker
            finalists = self.choose_finalists(task, search)
            leaders: list[Any] = [task.search_task.candidates[i] for i in finalists]
            task.leaders = self.configs_to_compare(leaders, task)
            self.add_configs(task)
            if self.alone:
                self._rank(task, search, set(finalists), task.search_task)

    def choose_finalists(self, task: PointTask, search: ProblemSearch) -> list[int]:
        """The leaders of a search. If they go on to other points: exactly FINALISTS, as far as that many are right."""
        leaders = search.leaders()
        if self.alone:
            return leaders
        fastest_first = sorted(search.measured, key=lambda i: search.measured[i].us)
        return list(dict.fromkeys([*leaders, *fastest_first]))[:FINALISTS]

    def configs_to_compare(self, leaders: list[TileConfig], task: PointTask) -> list[TileConfig]:
        """The configs that are compared for a point that was searched."""
        return [*leaders, task.today]

    def add_configs(self, task: PointTask) -> None:
        """Have what was kept of a point, or else its config of today, compared at all points."""
        for config in task.leaders or [task.today]:
            self.configs.setdefault(config.name, config)

    def comparison_at(self, task: PointTask, configs: Sequence[TileConfig]) -> ShapeTask:
        """These configs at one point."""
        every = frozenset(range(len(configs)))
        return self.file.context.make_task(task.shape, task.problem, configs, every, quiet=True)

    def compare(self, task: PointTask, following: Sequence[ShapeTask]) -> bool:
        """All finalists at one point, interleaved; True where some are right."""
        comparison = self.comparison_at(task, list(self.configs.values()))
        search = ProblemSearch(self.file.context, comparison, following)
        search.measure()
        for why in search.failures:
            print(f"gemmfleet: {self.name}, M={task.point.m}: {clean(why, 300)}", flush=True)
        self._rank(task, search, set(search.measured), comparison)
        if not task.times:  # all were wrong when looked at again
            self.file.settle_shape(task, None, *search.why_none())
        return bool(task.times)

    def choose_winner(self, measured: Sequence[PointTask]) -> tuple[str, list[str]]:
        """Call `choose_config` with the measurements of these points, without those through other operators."""
        names = {name for name, config in self.configs.items() if not config.caller}
        us = [{name: time.us for name, time in task.times.items() if name in names} for task in measured]
        points = [task.point for task in measured]
        return choose_config(points, us, [task.today.name for task in measured])

    def settle(self, measured: Sequence[PointTask]) -> None:
        """Choose, and settle every shape with the bucket's config."""
        tasks_of_shapes = [task for task in measured if task.point.weight]
        if not tasks_of_shapes:
            return
        winner, harmful = self.choose_winner(measured)
        for name in harmful:
            where = ", ".join(f"M={t.point.m} {t.us_of(name):.4g} us (today's {t.today_us:.4g})" for t in measured)
            print(f"gemmfleet: {self.name}: {name} is rejected, it slows an M down: {where}", flush=True)
        for task in tasks_of_shapes:
            name = winner or self.name_if_unchanged(task)
            if name in task.times:
                self._settle_with(task, name, winner, measured)
            else:
                detail = f"no config is right at every M of {self.name}, and {name} is not at {task.point.m}"
                self.file.settle_shape(task, None, "no_candidate", detail)

    def _settle_with(self, task: PointTask, name: str, winner: str, measured: Sequence[PointTask]) -> None:
        """Settle a point's shape with the time of a config. `winner`: "" if today's configs stay."""
        config = self.configs[name]
        row = self.verdict_row(task, config, is_change=bool(winner))
        self.file.seeds.add_winner(task.problem, config)
        self.file.settle_shape(task, {**row, "triton_config": self.document(winner, task, measured)})

    def verdict_row(self, task: PointTask, config: TileConfig, *, is_change: bool) -> Row:
        """The row of a point's shape with the time of a config; `is_change`: it replaces today's."""
        time = task.times[config.name]
        today = f"today's {task.today_us:.4g} us" if task.today_us > 0 else "today's does not run"
        detail = f"{self.name}: {time.us:.4g} us, {today}"
        if not is_change:
            detail += "; left as it is"
        return candidate_row(config, task.problem, "ok", time.us, time.err, time.spread, task.rounds, detail)

    def name_if_unchanged(self, task: PointTask) -> str:
        """The config whose time a point's row has where nothing is changed."""
        return task.today.name

    def document(self, winner: str, task: PointTask, measured: Sequence[PointTask]) -> str:
        """The verdict for a point's row, as JSON; orchestrator/configs/bucket_decision.py shows one, and reads it.

        `values`: the winner's, null if today's stay. `old`: today's values, each once. `points`: this M and those that
        the workload does not have, through each operator that computes them, as [M, count, today's us, the winner's us,
        errRatio, index of today's values in `old`, operator ("": the usual one)].
        """
        tasks = [other for other in measured if other.shape is task.shape or not other.point.weight]
        old_values: list[dict[str, Any]] = []
        for other in tasks:
            if other.today.values not in old_values:
                old_values.append(other.today.values)
        points: list[list[Any]] = []
        for other, caller in itertools.product(tasks, ("", *self.file.callers)):
            us, err = self._rounded_time_of_winner(winner, other, caller)
            if caller and us < 0:
                continue
            old_us = round(other.us_of(replace(other.today, caller=caller).name), 4)
            old_place = old_values.index(other.today.values)
            points.append([other.point.m, other.point.weight, old_us, us, err, old_place, caller])
        values = self.configs[winner].values if winner else None
        document = {**self.file.facts, **self.facts, "values": values, "old": old_values, "points": points}
        return json.dumps(document, separators=(",", ":"))

    def _rounded_time_of_winner(self, winner: str, task: PointTask, caller: str) -> tuple[float, float]:
        """Microseconds and errRatio of the winner at a point through an operator; (-1, 1) without a winner."""
        if not winner:
            return -1.0, 1.0
        time = task.times.get(replace(self.configs[winner], caller=caller).name)
        if time is None:
            return -1.0, 1.0
        return round(time.us, 4), round(time.err, 6)

    def _rank(self, task: PointTask, search: ProblemSearch, indexes: set[int], searched: ShapeTask) -> None:
        """Keep the times of these candidates and today's at one point (`PointTask.times`), one sample of each a round.

        A config that is not ranked (its process died) has the time of its search. `searched`: the task of the search.
        """
        names = [candidate.name for candidate in searched.candidates]
        today = names.index(task.today.name)
        wanted = indexes | {today}
        ranked = search.rank(sorted(wanted), today if self.is_beside_today else None)
        for i, measurement in search.measured.items():
            if i in wanted:
                task.times[names[i]] = PointTime(measurement.us, search.errs[i], measurement.spread, measurement.us)
        if ranked is None:
            return
        ranking = ranked.ranking
        task.rounds = ranking.rounds
        today_us = dict(zip(ranked.indexes, ranking.us, strict=True)).get(today, 0.0)
        high_us = [today_us * ratio for ratio in ranking.high] or ranking.us
        for i, us, spread, at_most_us in zip(ranked.indexes, ranking.us, ranking.spread, high_us, strict=True):
            if i == today:
                at_most_us = us
            task.times[names[i]] = PointTime(us, search.errs[i], spread, at_most_us)
