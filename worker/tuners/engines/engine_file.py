"""The search for one config file of an engine: which M are searched and measured, in which order (`EngineFile`).

A file maps M to configs by its keys; a key serves the range of M that is nearest to it. `EngineTuner` calls
`EngineFile.run` once for each file of a group. The steps:

1. Each usual key whose range holds an M of the workload is searched, and if the engine has a file for each product
   (SGLang) the products one after the other (`pair_search.py`). The winners of all keys, today's config and the default
   are the file's configs.
2. Those are measured at many M (`file_at_m.py`): the workload's, each of whose shapes gets its row then; the sizes that
   a server captures; chunks of prefill. An M of the workload at which a short search finds a clearly better config is
   searched too. Each M is sent as a record of its own (worker/triton_configs/point_record.py).
3. The ranges are cut (worker/triton_configs/cutting.py). Between two ranges, and where the model of times expects
   another config to be faster, further M are measured, and so on (`further_ms.py`).

The controller cuts again, from the records of all attempts, and writes the file. Imports neither torch nor triton.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from worker.protocol import SpecShape
from worker.triton_configs.cutting import KEEP, MeasuredPoint, cut_ranges, unite_points
from worker.triton_configs.m_ranges import USUAL_KEYS, ranges_served
from worker.triton_configs.point_record import name_of_config
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.engines.engine_seeds import EngineSeeds
from worker.tuners.engines.file_at_m import FileAtM
from worker.tuners.engines.further_ms import FileTimes, ms_to_close, ms_within, nearest_keys
from worker.tuners.engines.pair_search import PairSearch
from worker.tuners.engines.specs import EngineOptions
from worker.tuners.search.bucket import BucketSearch, FileSearch, PointTask
from worker.tuners.search.choice import Point
from worker.tuners.search.forked_process import now
from worker.tuners.search.problem_search import FULL, QUICK, Effort, ProblemSearch, SearchContext, ShapeTask
from worker.tuners.search.ranker import StopRules
from worker.tuners.search.space import Space
from worker.tuners.search.tile_config import TileConfig, tile_config

if TYPE_CHECKING:
    from worker.tuners.engines.source import EngineSource, LayerProblem

LAST_M = 8192
"""The last range ends here, or at the largest M of the workload; larger M keep what they have."""
MOST_M = 120
"""M that are measured for a file at most, beside those of its searches."""
ROUNDS = 2
"""Times in a row that ranges are cut and further M measured between them."""
FELLOW = 1.1
"""Beside the winner of a search the fastest config of each other BLOCK_SIZE_M is the file's, if it takes at most this
many times as long. Its waves begin at other M, so that between the keys it may be the faster one."""
LEAST_EXTRA_S = 30.0
EXTRA_SHARE = 0.3
"""The M beyond the workload's may take this share of the seconds of the searches, or LEAST_EXTRA_S if that is more."""
SHORT_SEARCH = StopRules(at_least=8, patience=4, at_most=12)
CLEARLY = 0.97
"""An M of the workload is searched itself if a short search finds a config of at most this share of the time."""
PROMISING = 1.15
"""A config that is expected to take this many times as long as the fastest is not measured at an M."""


class EngineFile(FileSearch):
    """The search for one config file of an engine; in SGLang it may be two, of which each M gets an entry of both."""

    source: EngineSource
    explores_tiles = True

    def __init__(self, context: SearchContext, seeds: EngineSeeds, facts: dict[str, Any]) -> None:
        """`facts`: engine and device, for the records."""
        super().__init__(context, seeds.source, seeds, facts)
        self._problem: LayerProblem  # of any of the shapes
        options = context.options
        assert isinstance(options, EngineOptions)
        self._captured = options.captured
        self._labels = options.with_captured(seeds.source.labels)
        drawn = seeds.source.searched_labels
        if options.captured and len(drawn) > 1:
            drawn = drawn[:-1]  # captured routings take the place of the last
        self._searched_labels = options.with_captured(drawn)
        self._configs: dict[str, TileConfig] = {}  # the file's, by their names in points
        self._keys_won: dict[str, set[int]] = {}  # searched M at which a config, by that name, was among the fastest
        self._searched_ms: set[int] = set()  # M that were searched
        self._points: list[MeasuredPoint] = []
        self._deadline = math.inf  # no further M is begun after it
        self._spaces: dict[int, Space] = {}  # by M, for the model of times
        self._began = now()

    def add_shape(self, shape: SpecShape) -> None:
        problem = self.source.problem(self.context.options.family, shape.key, self.context.target.gfx)
        engine = self.source.engine()
        engine.config(problem.layer, problem.m)  # raises if the engine cannot be asked for it
        if any(len(counts) != problem.layer.e for counts in self._captured):
            raise UnsupportedError(f"the captured routings are not of {problem.layer.e} experts")
        self._problem = replace(problem, captured=self._captured)
        self.shapes[problem.m] = shape
        self.facts = {**self.facts, "layer": asdict(problem.layer), "file": engine.file_name(problem.layer)}

    # --- searches: the configs of the file

    def buckets(self) -> Iterator[BucketSearch]:
        """A search at each usual key whose range holds an M of the workload."""
        for key, (first, last) in ranges_served(USUAL_KEYS).items():
            workload_ms = [m for m in sorted(self.shapes) if first <= m <= (last or m)]
            if workload_ms:
                yield self._search_at(key, self.shapes[workload_ms[0]])

    def _search_at(self, m: int, named: SpecShape, *, quiet: bool = False) -> KeySearch:
        """A search at one M; rows are of the first routing. `named`: as of `_point`."""
        points: list[PointTask] = []
        for number, label in enumerate(self._searched_labels):
            points.append(self.add_search(self._point(m, label, named), quiet=quiet or number > 0))
        self._searched_ms.add(m)
        return KeySearch(self, f"M={m}", points, {})

    def start_shape(self, task: PointTask) -> None:
        """Put the shape in flight in whose name a point is measured."""
        self.put_in_flight(task.shape)

    def tune_bucket(self, bucket: BucketSearch, following: Sequence[ShapeTask]) -> None:
        """Search one M. Its winner and that one's fellows are configs of the file, and the best pairs."""
        bucket.search(following)
        for task in bucket.points:
            if task.leaders:
                self.seeds.add_winner(task.problem, task.leaders[0])
            self._keep(task.leaders, task.point.m)
        if self.source.has_pairs(self.context.target):
            task = bucket.points[0]
            search = PairSearch(self.context, self.source, task, list(self._configs.values()), following)
            self._keep(search.run(), task.point.m)

    def _keep(self, winners: Iterable[TileConfig], m: int) -> None:
        """Add winners of a searched M to the file's configs."""
        for config in winners:
            name = name_of_config(config.values)
            self._configs.setdefault(name, config)
            self._keys_won.setdefault(name, set()).add(m)

    # --- measurements of all configs, M by M

    def run(self, shapes: Sequence[SpecShape]) -> None:
        """Search the usual keys, then measure the file's configs at the M of the workload, at those of a server, and
        where ranges meet. Settle every shape."""
        super().run(shapes)
        if not self.shapes:
            return
        default = tile_config(self.source.default_config(self._problem), self.source.prefix)
        self._configs.setdefault(name_of_config(default.values), default)
        for m in sorted(self.shapes):
            self._tune_shape_at(m)
        self._measure_further_ms(now() - self._began)

    def _tune_shape_at(self, m: int) -> None:
        """Measure an M of the workload, search it if the file's configs are slow there, and settle its shape.

        It gets the config that is best there at all routings, by the rule of the cut.
        """
        measured = self._measure(m, FULL)
        if m not in self._searched_ms and self._lose_to_short_search(m):
            self.tune_bucket(self._search_at(m, self.shapes[m], quiet=True), [])
            measured = self._measure(m, FULL)
        points = [point for point in self._points if point.m == m]
        is_complete = len(points) == len(self._labels)
        measured.settle_with(cut_ranges(points)[0].config if is_complete else KEEP)

    def _lose_to_short_search(self, m: int) -> bool:
        """Try the few configs that the searches so far let expect to be the fastest at an M of the workload. True if
        one is clearly faster than all of the file's."""
        label = self._searched_labels[0]
        task = self.add_search(self._point(m, label, self.shapes[m]), quiet=True)
        assert task.search_task is not None
        task.search_task.ranker.rules = SHORT_SEARCH
        if self.last_ranker is not None:
            task.search_task.ranker.learn_from(self.last_ranker)
        search = ProblemSearch(self.context, task.search_task, [])
        search.measure()
        file_us = [us for point in self._points if (point.m, point.label) == (m, label) for us in point.us.values()]
        best_us = min((measurement.us for measurement in search.measured.values()), default=math.inf)
        return best_us < CLEARLY * min(file_us, default=math.inf)

    def _measure_further_ms(self, searches_s: float) -> None:
        """Measure M that the workload does not have, as far as there is time. `searches_s`: seconds so far.

        Where ranges meet comes first each time: the M between two keep what they have.
        """
        keys = sorted(self._searched_ms & set(USUAL_KEYS))
        frame, steps = ms_within(keys, max(LAST_M, *self.shapes))
        self._measure_each(frame)
        self._deadline = now() + max(LEAST_EXTRA_S, EXTRA_SHARE * searches_s)
        self._close_gaps()
        for step in steps:
            self._measure_each(filter(self._is_quick, step))
            self._close_gaps()

    def _close_gaps(self) -> None:
        """Measure where ranges would meet best."""
        for _ in range(ROUNDS):
            ranges = cut_ranges(self._points, gaps_cost=False)
            next_ms = ms_to_close(FileTimes(self._points, self._estimate), ranges)
            if not self._measure_each(filter(self._is_quick, next_ms)):
                return

    def _is_quick(self, m: int) -> bool:
        """True where an M takes no seconds: a large problem is measured at the clock that it can sustain."""
        return not replace(self._problem, m=m).is_sustained

    def _measure_each(self, ms: Iterable[int]) -> bool:
        """Measure each M that was not, as far as there is time and room. True if all were, and there was one."""
        measured = {point.m for point in self._points}
        room = max(0, MOST_M - len(measured))
        new_ms = [m for m in dict.fromkeys(ms) if m not in measured][:room]
        for m in new_ms:
            if now() > self._deadline:
                return False
            self._measure(m, QUICK)
        return bool(new_ms)

    def _measure(self, m: int, effort: Effort) -> FileAtM:
        """Measure the file's configs at an M, the most promising first, and send what was right there."""
        any_shape = next(iter(self.shapes.values()))
        tasks = [self._point(m, label, any_shape) for label in self._labels]
        has_rows = m in self.shapes and m not in self._searched_ms
        measuring = FileAtM(self, tasks, self._promising(m), effort, quiet=not has_rows)
        measuring.measure()
        for task, record in measuring.records():
            self._points = unite_points([*self._points, record.point])
            self.context.emit.point(task.shape.id, record.to_document())
        return measuring

    def _promising(self, m: int) -> list[TileConfig]:
        """The configs to measure at an M: the winners of the searches nearby, and those of others that may be about as
        fast, by their nearest measurement and the model; those that are expected to be fastest first."""
        times = FileTimes(self._points, self._estimate)
        expected_us = {name: times.expected_at(name, m) for name in self._configs}
        least_us = min((us for us in expected_us.values() if us), default=0.0)
        near_keys = nearest_keys(sorted(self._searched_ms), m)
        promising: list[TileConfig] = []
        for name in sorted(expected_us, key=lambda name: expected_us[name]):
            won_nearby = not near_keys.isdisjoint(self._keys_won.get(name, set()))
            if won_nearby or expected_us[name] <= PROMISING * least_us:
                promising.append(self._configs[name])
        return promising

    def _point(self, m: int, label: str, named: SpecShape) -> PointTask:
        """A point. `named`: the shape in whose name it is measured if its M is not one of the workload."""
        problem = replace(self._problem, m=m, label=label)
        today = tile_config(self.source.engine().config(problem.layer, m), self.source.prefix)
        return PointTask(Point(m, self.weight(m), label), self.shapes.get(m, named), problem, today)

    def _estimate(self, name: str, m: int) -> float:
        """The model's time of a config, by the name that it has in points, at an M."""
        if m not in self._spaces:
            problem = replace(self._problem, m=m, label=self._labels[0])
            self._spaces[m] = self.source.space(problem, self.context.target)
        return self._spaces[m].estimate(tile_config(json.loads(name), self.source.prefix))


class KeySearch(BucketSearch):
    """The search of one M, whose leaders become configs of the file."""

    def choose_finalists(self, task: PointTask, search: ProblemSearch) -> list[int]:
        """The fastest, then its fellows; none at a large problem, which has many waves and takes seconds an M."""
        assert task.search_task is not None
        candidates: Sequence[Any] = task.search_task.candidates
        us = {i: measurement.us for i, measurement in search.measured.items()}
        fastest: dict[int, int] = {}  # by BLOCK_SIZE_M
        for i in sorted(us, key=lambda i: us[i]):
            fastest.setdefault(candidates[i].knobs.block_m, i)
        most_us = min(us.values())
        if not task.problem.is_sustained:
            most_us *= FELLOW
        return [i for i in fastest.values() if us[i] <= most_us]

    def configs_to_compare(self, leaders: list[TileConfig], task: PointTask) -> list[TileConfig]:
        return leaders
