"""The search for one config file of an engine: its seeds (`EngineSeeds`) and its measured M (`EngineFile`).

A file maps M to configs by its keys; a key serves the range of M that is nearest to it. The steps:

1. Each usual key whose range holds an M of the workload is searched, and if the engine has a file for each product
   (SGLang) the products one after the other. The winners of all keys, today's config and the default are the file's
   configs.
2. Those are measured at many M: the workload's, each of whose shapes gets its row then; the sizes that a server
   captures; chunks of prefill. An M of the workload at which a short search finds a clearly better config is searched
   too. Each M is sent as a record of its own (worker/triton_configs/point_record.py).
3. The ranges are cut (worker/triton_configs/cutting.py). Between two ranges, and where the model of times expects
   another config to be faster, further M are measured, and so on (`further_ms.py`).

The controller cuts again, from the records of all attempts, and writes the file. Imports neither torch nor triton.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from glob import escape
from typing import TYPE_CHECKING, Any

from worker.protocol import SpecShape
from worker.triton_configs.cutting import KEEP, MeasuredPoint, cut_ranges, unite_points
from worker.triton_configs.m_ranges import USUAL_KEYS, ranges_served
from worker.triton_configs.pair import ROWS, TMA, join_pair, split_pair
from worker.triton_configs.point_record import ConfigTime, PointRecord
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.engines.further_ms import FileTimes, ms_to_close, ms_within, nearest_keys
from worker.tuners.engines.specs import CAPTURED, EngineOptions
from worker.tuners.search.bucket import BucketSearch, FileSearch, PointTask, PointTime
from worker.tuners.search.choice import Point
from worker.tuners.search.forked_process import now
from worker.tuners.search.options import EXHAUSTIVE
from worker.tuners.search.problem_search import (
    FULL,
    QUICK,
    Effort,
    ProblemSearch,
    SearchContext,
    ShapeTask,
    candidate_row,
)
from worker.tuners.search.ranker import StopRules
from worker.tuners.search.seeds import NEAREST_FILES, Seeds, size_distance
from worker.tuners.search.space import Space
from worker.tuners.search.tile_config import TileConfig, Values, tile_config

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
PART_LIST = 300
"""Most candidates of one product of a pair."""
PART_SEARCH = StopRules(at_least=16, patience=12, at_most=40)
PAIRED_ROWS = 2
"""The second product is searched at this many BLOCK_SIZE_M, those of the fastest first products."""
CLEARLY = 0.97
"""An M of the workload is searched itself if a short search finds a config of at most this share of the time."""
PROMISING = 1.15
"""A config that is expected to take this many times as long as the fastest is not measured at an M."""
UNPAIRED = 1.01
"""A time that was not taken beside today's may be longer by this factor."""


class EngineSeeds(Seeds):
    """Configs that an engine has for a layer, and others that may be good for it."""

    def __init__(self, source: EngineSource) -> None:
        super().__init__()
        self.source = source
        self._engine = source.engine()

    def sizes(self, problem: LayerProblem) -> tuple[int, ...]:
        return (problem.m, *_sizes_in_name(self._engine.file_name(problem.layer)))

    def configs_of_files(self, problem: LayerProblem) -> list[TileConfig]:
        """Today's, its neighbours in the file, the default, those of the nearest files of this device."""
        configs: list[Values] = [self._engine.config(problem.layer, problem.m)]
        configs += self._neighbours_in_file(problem)
        configs.append(self.source.default_config(problem))
        _, *sizes = self.sizes(problem)
        others = sorted(self._sizes_of_other_files(problem), key=lambda other: (size_distance(sizes, other), other))
        for other in others[:NEAREST_FILES]:
            layer = self.source.with_sizes(problem.layer, other)
            configs.append(self._engine.config(layer, problem.m))
        return [tile_config(values, self.source.prefix) for values in configs]

    def _neighbours_in_file(self, problem: LayerProblem) -> list[Values]:
        """The entries above and below the one that serves M."""
        table = self._engine.table(problem.layer) or {}
        keys = sorted(table)
        if not keys:
            return []
        nearest = min(range(len(keys)), key=lambda i: abs(keys[i] - problem.m))
        neighbours = keys[nearest + 1 : nearest + 2] + keys[max(0, nearest - 1) : nearest]
        return [self._engine.config(problem.layer, key) for key in neighbours]

    def _sizes_of_other_files(self, problem: LayerProblem) -> set[tuple[int, ...]]:
        """Sizes in the names of the files that are there for other layers of the kind on this device."""
        head, mark, rest = self._engine.file_name(problem.layer).partition(",device_name")
        pattern = re.sub(r"\d+", "*", head) + escape(mark + rest)
        sizes: set[tuple[int, ...]] = set()
        for folder in self._engine.folders(problem.layer):
            sizes |= {_sizes_in_name(path.name) for path in folder.glob(pattern)}
        return sizes


def _sizes_in_name(name: str) -> tuple[int, ...]:
    """Sizes in the name of a file: (E, N) or (N, K)."""
    return tuple(map(int, re.findall(r"\d+", name.partition(",device_name")[0])))


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
        self._labels, self._searched_labels = labels_of(seeds.source, options)
        self._configs: dict[str, TileConfig] = {}  # the file's, by name
        self._keys_won: dict[str, set[int]] = {}  # keys at which a config was the fastest
        self._searched: set[int] = set()  # keys that were searched
        self._points: list[MeasuredPoint] = []
        self._until = math.inf  # further M are begun until then
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

    def buckets(self) -> Iterator[BucketSearch]:
        """A search at each usual key whose range holds an M of the workload."""
        for key, (first, last) in ranges_served(USUAL_KEYS).items():
            workload_ms = [m for m in sorted(self.shapes) if first <= m <= (last or m)]
            if not workload_ms:
                continue
            named = self.shapes.get(key, self.shapes[workload_ms[0]])
            points: list[PointTask] = []
            for label in self._searched_labels:
                is_quiet = label != self._searched_labels[0]
                points.append(self.add_search(self._point(key, label, named), quiet=is_quiet))
            self._searched.add(key)
            yield KeySearch(self, f"M={key}", points, {})

    def start_shape(self, task: PointTask) -> None:
        """Put the shape in flight in whose name a point is measured."""
        self.put_in_flight(task.shape)

    def tune_bucket(self, bucket: BucketSearch, following: Sequence[ShapeTask]) -> None:
        """Search a usual key. Its winner and that one's fellows are configs of the file."""
        bucket.search(following)
        for task in bucket.points:
            if task.leaders:
                self.seeds.add_winner(task.problem, task.leaders[0])
            self._keep(task.leaders, task.point.m)
        if self.source.has_pairs(self.context.target):
            self._keep(self._search_pairs(bucket.points[0], following), bucket.points[0].point.m)

    def _keep(self, winners: Iterable[TileConfig], m: int) -> None:
        """Add winners of a searched M to the file's configs."""
        for config in winners:
            self._configs.setdefault(config.name, config)
            self._keys_won.setdefault(config.name, set()).add(m)

    def _search_pairs(self, task: PointTask, following: Sequence[ShapeTask]) -> list[TileConfig]:
        """Search each product of a point for itself, as it runs in a pair, and join the fastest of each BLOCK_SIZE_M.

        The first product takes most of the time, so it decides which BLOCK_SIZE_M the second is searched at."""
        up_us = self._search_part(task, "up", (), following)
        fastest_up = sorted(up_us, key=lambda config: up_us[config])
        rows = list(dict.fromkeys(config.number(ROWS) for config in fastest_up))[:PAIRED_ROWS]
        down_us = self._search_part(task, "down", rows, following)
        us_of_pair = {
            (up, down): up_us[up] + down_us[down]
            for up, down in itertools.product(up_us, down_us)
            if up.number(ROWS) == down.number(ROWS)
        }
        fastest_of_rows: dict[int, TileConfig] = {}
        for up, down in sorted(us_of_pair, key=lambda pair: us_of_pair[pair]):
            pair = tile_config(join_pair(up.values, down.values), self.source.prefix)
            fastest_of_rows.setdefault(up.number(ROWS), pair)
        return list(fastest_of_rows.values())

    def _search_part(
        self, task: PointTask, part: str, rows: Sequence[int], following: Sequence[ShapeTask]
    ) -> dict[TileConfig, float]:
        """Microseconds of the right configs of one product, begun with those of the file; `rows`: only of these
        BLOCK_SIZE_M, if any are given."""
        problem = replace(task.problem, part=part)
        space = self.source.space(problem, self.context.target)
        seeds = [entry_of_part(config, part) for config in self._configs.values()]
        options = self.context.options
        most = min(PART_LIST, options.max_candidates or PART_LIST)
        found = space.distinct([*seeds, *space.candidates(seeds, most)])
        candidates = [config for config in found if not rows or config.number(ROWS) in rows]
        us = [space.estimate(config) for config in candidates]
        part_task = self.context.make_task(task.shape, problem, candidates, us=us, quiet=True)
        if options.search != EXHAUSTIVE:
            part_task.ranker.rules = PART_SEARCH
        part_task.ranker.put_first([i for i, config in enumerate(candidates) if config in seeds])
        search = ProblemSearch(self.context, part_task, following)
        search.measure()
        return {candidates[i]: measurement.us for i, measurement in search.measured.items()}

    def run(self, shapes: Sequence[SpecShape]) -> None:
        """Search the usual keys, then measure the file's configs at the M of the workload, at those of a server, and
        where ranges meet. Settle every shape."""
        super().run(shapes)
        if not self.shapes:
            return
        default = tile_config(self.source.default_config(self._problem), self.source.prefix)
        self._configs.setdefault(default.name, default)
        for m in sorted(self.shapes):
            measured = self._measure(m, FULL)
            if m not in self._searched and self._lose_to_short_search(m):
                self._search(m)
                measured = self._measure(m, FULL)
            self._settle(m, measured)
        search_s = now() - self._began
        frame, further = ms_within(sorted(self._searched & set(USUAL_KEYS)), max(LAST_M, *self.shapes))
        self._measure_each(frame)
        self._until = now() + max(LEAST_EXTRA_S, EXTRA_SHARE * search_s)
        # where ranges meet comes first each time: the M between two keep what they have
        self._close_gaps()
        for step in further:
            self._measure_each(filter(self._is_quick, step))
            self._close_gaps()

    def _lose_to_short_search(self, m: int) -> bool:
        """Try the few configs that the searches so far let expect to be the fastest at an M of the workload. True if
        one is clearly faster than all of the file's."""
        label = self._searched_labels[0]
        task = self.add_search(self._point(m, label, self.shapes[m]), quiet=True)
        assert task.search is not None
        task.search.ranker.rules = SHORT_SEARCH
        if self.last_ranker is not None:
            task.search.ranker.learn_from(self.last_ranker)
        search = ProblemSearch(self.context, task.search, [])
        search.measure()
        at_m = [us for point in self._points if (point.m, point.label) == (m, label) for us in point.us.values()]
        best_us = min((found.us for found in search.measured.values()), default=math.inf)
        return best_us < CLEARLY * min(at_m, default=math.inf)

    def _search(self, m: int) -> None:
        """Search an M of the workload that is no usual key, as those were."""
        points = [self.add_search(self._point(m, label, self.shapes[m]), quiet=True) for label in self._searched_labels]
        self.tune_bucket(KeySearch(self, f"M={m}", points, {}), [])
        self._searched.add(m)

    def _close_gaps(self) -> None:
        """Measure where ranges would meet best."""
        for _ in range(ROUNDS):
            times = FileTimes(self._points, cut_ranges(self._points, gaps_cost=False), self._estimate)
            if not self._measure_each(filter(self._is_quick, ms_to_close(times))):
                return

    def _is_quick(self, m: int) -> bool:
        """True where an M takes no seconds: a large problem is measured at the clock that it can sustain."""
        return not replace(self._problem, m=m).is_sustained

    def _measure_each(self, ms: Iterable[int]) -> bool:
        """Measure each M that was not, as far as there is time and room. True if there was one."""
        measured = {point.m for point in self._points}
        new_ms = [m for m in dict.fromkeys(ms) if m not in measured][: max(0, MOST_M - len(measured))]
        for m in new_ms:
            if now() > self._until:
                return False
            self._measure(m, QUICK)
        return bool(new_ms)

    def _measure(self, m: int, effort: Effort) -> FileAtM:
        """Measure the file's configs at an M, the most promising first, and send what was right there."""
        named = self.shapes.get(m, next(iter(self.shapes.values())))
        tasks = [self._point(m, label, named) for label in self._labels]
        configs = self._promising(m)
        measuring = FileAtM(self, tasks, configs, effort, quiet=m not in self.shapes or m in self._searched)
        measuring.measure()
        for task, record in measuring.records():
            self._points = unite_points([*self._points, record.point])
            self.context.emit.point(task.shape.id, record.to_document())
        return measuring

    def _promising(self, m: int) -> dict[str, TileConfig]:
        """The configs to measure at an M: the winners of the searches nearby, and those of others that may be about as
        fast, by their nearest measurement and the model; those that are expected to be fastest first."""
        times = FileTimes(self._points, (), self._estimate)
        expected = {name: times.expected_at(point_name(config), m) for name, config in self._configs.items()}
        most_us = PROMISING * min((us for us in expected.values() if us), default=0.0)
        near_keys = nearest_keys(sorted(self._searched), m)
        chosen = [name for name, us in expected.items() if us <= most_us or near_keys & self._keys_won.get(name, set())]
        return {name: self._configs[name] for name in sorted(chosen, key=lambda name: expected[name])}

    def _settle(self, m: int, measured: FileAtM) -> None:
        """Settle the shape of an M with the config that is best there at all routings, by the rule of the cut."""
        points = [point for point in self._points if point.m == m]
        chosen = cut_ranges(points)[0].config if len(points) == len(self._labels) else KEEP
        measured.settle_with(chosen)

    def _point(self, m: int, label: str, named: SpecShape) -> PointTask:
        """A point. `named`: the shape in whose name it is measured if it is not a shape of the workload."""
        problem = replace(self._problem, m=m, label=label)
        today = tile_config(self.source.engine().config(problem.layer, m), self.source.prefix)
        return PointTask(Point(m, self.weight(m), label), self.shapes.get(m, named), problem, today)

    def _estimate(self, name: str, m: int) -> float:
        """The model's time of a config, by the name that it has in points, at an M."""
        config = tile_config(json.loads(name), self.source.prefix)
        return self._space_at(m).estimate(config)

    def _space_at(self, m: int) -> Space:
        if m not in self._spaces:
            problem = replace(self._problem, m=m, label=self._labels[0])
            self._spaces[m] = self.source.space(problem, self.context.target)
        return self._spaces[m]


def entry_of_part(config: TileConfig, part: str) -> TileConfig:
    """A product's own config as a candidate; the second product of a pair always loads through TMA."""
    up, down = split_pair(config.values)
    if part == "down":
        return tile_config({**down, TMA: True}, config.prefix)
    return tile_config({**up, TMA: bool(up.get(TMA))}, config.prefix)


def labels_of(source: EngineSource, options: EngineOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The labels at which each M of a file is measured, and those at which it is searched. Captured routings are
    searched in place of the last of several drawn ones."""
    if not options.captured:
        return source.labels, source.searched
    if options.captured_only:
        return (CAPTURED,), (CAPTURED,)
    searched = source.searched[:-1] or source.searched
    return (*source.labels, CAPTURED), (*searched, CAPTURED)


def point_name(config: TileConfig) -> str:
    """The name of a config in points, which is a text of its values."""
    return ConfigTime(dict(config.values), 0.0, 0.0, 0.0).name


class KeySearch(BucketSearch):
    """The search of one M, whose leaders become configs of the file."""

    def choose_finalists(self, task: PointTask, search: ProblemSearch) -> list[int]:
        """The fastest, then its fellows; none at a large problem, which has many waves and takes seconds an M."""
        assert task.search is not None
        candidates: Sequence[Any] = task.search.candidates
        us = {i: measurement.us for i, measurement in search.measured.items()}
        fastest: dict[int, int] = {}  # by BLOCK_SIZE_M
        for i in sorted(us, key=lambda i: us[i]):
            fastest.setdefault(candidates[i].knobs.block_m, i)
        most_us = min(us.values()) * (1 if task.problem.is_sustained else FELLOW)
        return [i for i in fastest.values() if us[i] <= most_us]

    def configs_to_compare(self, leaders: list[TileConfig], task: PointTask) -> list[TileConfig]:
        return leaders


class FileAtM(BucketSearch):
    """The file's configs and today's, measured side by side at one M, at each routing of the source."""

    is_beside_today = True

    def __init__(
        self,
        file: EngineFile,
        points: Sequence[PointTask],
        configs: Mapping[str, TileConfig],
        effort: Effort,
        *,
        quiet: bool,
    ) -> None:
        """`quiet`: the rows of the candidates are not emitted."""
        self._m = points[0].point.m
        super().__init__(file, f"M={self._m}", points, {})
        self.configs |= configs
        for task in points:
            self.configs.setdefault(task.today.name, task.today)
        self._effort = effort
        self._is_quiet = quiet

    def measure(self) -> None:
        """Measure all configs, the fastest and today's interleaved. Those of the first routing are so at all, because a
        range needs a config that is known beside today's at each."""
        leaders_of_first: set[str] = set()
        for number, task in enumerate(self.points):
            if task.point.weight:
                self.file.start_shape(task)
            comparison = self.comparison_at(task)
            comparison.quiet = self._is_quiet or number > 0
            search = ProblemSearch(self.file.context, comparison, [], self._effort)
            search.measure()
            names = {i: comparison.candidates[i].name for i in search.measured}
            leaders = {*search.leaders(), *(i for i in names if names[i] in leaders_of_first)}
            if number == 0:
                leaders_of_first = {names[i] for i in leaders}
            self._rank(task, search, leaders, comparison)
            for i, measurement in search.measured.items():
                name = comparison.candidates[i].name
                high_us = UNPAIRED * measurement.us
                task.times.setdefault(name, PointTime(measurement.us, search.errs[i], measurement.spread, high_us))
            if not task.times:
                self.file.settle_shape(task, None, *search.why_none())

    def records(self) -> Iterator[tuple[PointTask, PointRecord]]:
        """The record of each routing at which a config is right."""
        for task in self.points:
            if not task.times:
                continue
            others = [name for name in task.times if name != task.today.name]
            times = [self._time_of(task, name) for name in (task.today.name, *others)]
            yield task, PointRecord(dict(self.file.facts), self._m, task.point.label, task.point.weight, times)

    def _time_of(self, task: PointTask, name: str) -> ConfigTime:
        values = dict(self.configs[name].values)
        time = task.times.get(name)
        if time is None:
            return ConfigTime(values, -1.0, -1.0, 1.0)
        return ConfigTime(values, time.us, time.high_us, time.err)

    def settle_with(self, chosen: str) -> None:
        """Settle the shape with a config by its name in a record; KEEP: with today's."""
        task = self.points[0]
        config = task.today
        if chosen != KEEP:
            config = next(c for c in self.configs.values() if point_name(c) == chosen)
        time = task.times.get(config.name)
        if time is None:
            detail = f"no config is right at M={self._m} at every routing, and {config.name} is not"
            self.file.settle_shape(task, None, "no_candidate", detail)
            return
        today = f"today's {task.today_us:.4g} us" if task.today_us > 0 else "today's does not run"
        detail = f"M={self._m}: {time.us:.4g} us, {today}"
        if chosen == KEEP:
            detail += "; left as it is"
        row = candidate_row(config, task.problem, "ok", time.us, time.err, time.spread, task.rounds, detail)
        values = None if chosen == KEEP else config.values
        self.file.settle_shape(task, {**row, "triton_config": json.dumps({"values": values})})
