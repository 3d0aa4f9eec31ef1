"""The search for one config file of vLLM's: its seeds (`EngineSeeds`), its keys (`EngineFile`), its ranges
(`RangeSearch`).

A file maps M to configs by its keys; a key serves the range of M that is nearest to it. The steps:

1. The usual keys that serve an M of the workload are searched, and so is each M of the workload that is no key.
2. Where the config that a range of M would get loses against the own best of such an M, that M becomes a key as well.
3. The leaders of a range and today's configs are measured at both its ends, its key and every M of the workload within,
   interleaved, and one is chosen or everything left as it is. While a range is searched, what the comparison of the one
   before it needs is compiled.

Imports neither torch nor triton.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from glob import escape
from typing import TYPE_CHECKING, Any

from worker.families import ENGINE
from worker.protocol import SpecShape
from worker.triton_configs.m_ranges import USUAL_KEYS, ranges_served
from worker.triton_configs.slowdown import is_slower
from worker.tuners.search.bucket import BucketSearch, FileSearch, PointTask
from worker.tuners.search.choice import Point, weighted_sum, worst_regret
from worker.tuners.search.problem_search import SearchContext, ShapeTask
from worker.tuners.search.seeds import NEAREST_FILES, Seeds, size_distance
from worker.tuners.search.tile_config import TileConfig, Values, tile_config

if TYPE_CHECKING:
    from worker.tuners.vllm.source import EngineSource, LayerProblem

LAST_M = 8192
"""The last key is measured up to here, as it serves every larger M."""
OWN_KEY_RATIO = 1.01
OWN_KEY_US = 0.1
"""An M is a key if its range's config takes longer there than its own best by both."""


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
        return [tile_config(values, ENGINE) for values in configs]

    def _neighbours_in_file(self, problem: LayerProblem) -> list[Values]:
        """The entries above and below the one that serves M."""
        table = self._engine.table(problem.layer) or {}
        keys = sorted(table)
        if not keys:
            return []
        nearest = min(range(len(keys)), key=lambda i: abs(keys[i] - problem.m))
        neighbours = keys[nearest + 1 : nearest + 2] + keys[max(0, nearest - 1) : nearest]
        return [table[key] for key in neighbours]

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
    """The search for one config file of vLLM's."""

    source: EngineSource

    def __init__(self, context: SearchContext, seeds: EngineSeeds, facts: dict[str, Any]) -> None:
        """`facts`: engine and device, for the rows."""
        super().__init__(context, seeds.source, seeds, facts)
        self._problem: LayerProblem  # of any of the shapes
        self._searched: dict[Point, PointTask] = {}  # as far as something was right there
        self._keys = set(USUAL_KEYS)

    def add_shape(self, shape: SpecShape) -> None:
        problem = self.source.problem(self.context.options.family, shape.key, self.context.target.gfx)
        engine = self.source.engine()
        engine.config(problem.layer, problem.m)  # raises if the engine cannot be asked for it
        self._problem = problem
        self.shapes[problem.m] = shape
        self.facts = {**self.facts, "layer": asdict(problem.layer), "file": engine.file_name(problem.layer)}

    def buckets(self) -> Iterator[RangeSearch]:
        """The usual ranges. Each is searched at the M of the workload that it serves, then at the key itself."""
        for key, (first, last) in ranges_served(USUAL_KEYS).items():
            workload_ms = self._workload_within(first, last)
            if not workload_ms:
                continue
            named = self.shapes[workload_ms[0]]
            points: list[PointTask] = []
            for m in dict.fromkeys([*workload_ms, key]):
                for label in self.source.searched:
                    is_quiet = label != self.source.searched[0]
                    points.append(self.add_search(self._point(m, label, named), quiet=is_quiet))
            yield RangeSearch(self, points, key, first, last, alone=first == last and len(points) == 1)

    def tune_bucket(self, bucket: BucketSearch, following: Sequence[ShapeTask]) -> None:
        """Search a usual range, which may add keys. Then the ranges before it are settled: no later range changes
        those."""
        assert isinstance(bucket, RangeSearch)
        ahead = [part.comparison_at(task) for part in self._final_ranges(bucket.first) for task in part.points]
        bucket.search([*ahead, *following])
        measured = [task for task in bucket.points if task.leaders]
        self._searched |= {task.point: task for task in measured}
        if len({task.point.m for task in measured}) > 1:
            self._add_keys(bucket, measured, following)
        for part in self._final_ranges(bucket.first if following else None):
            part.finish(following)

    def _add_keys(self, bucket: RangeSearch, searched: Sequence[PointTask], following: Sequence[ShapeTask]) -> None:
        """An M within becomes a key where the range's config loses.

        If the winner loses at the usual key itself, because M that are no keys keep the key from its own best, the M
        where the key's best loses part from it as well.
        """
        measured = [task for task in searched if bucket.compare(task, following)]
        winner = bucket.choose_winner(measured)[0] if measured else ""
        names = [winner]
        for task in measured:
            if task.point.m == bucket.key and task.point.weight and loses(task, winner):
                names.append(fastest_at(task))
        for name in names:
            self._keys |= {task.point.m for task in measured if loses(task, name)}

    def _workload_within(self, first: int, last: int | None) -> list[int]:
        """The M of the workload in a range."""
        return [m for m in sorted(self.shapes) if first <= m and (last is None or m <= last)]

    def _final_ranges(self, before: int | None) -> list[RangeSearch]:
        """Ranges whose shapes are not settled, below an M from which on there may be further keys (None: all). Each
        begins with the results of the M that were searched."""
        ranges: list[RangeSearch] = []
        for key, (first, last) in ranges_served(self._keys).items():
            workload_ms = self._workload_within(first, last)
            if all(self.shapes[m].id in self.settled for m in workload_ms):
                continue
            if before and (last is None or last >= before):
                continue
            measured_last = last or max(LAST_M, *self.shapes)
            ms = sorted({first, key, measured_last, *workload_ms}, key=lambda m: (m not in self.shapes, m))
            named = self.shapes[ms[0]]
            points = [self._point(m, label, named) for m in ms for label in self.source.labels]
            ranges.append(RangeSearch(self, points, key, first, measured_last))
        return ranges

    def _point(self, m: int, label: str, named: SpecShape) -> PointTask:
        """A point. `named`: the shape in whose name it is measured if it is not a shape of the workload."""
        point = Point(m, self.weight(m), label)
        if point in self._searched:
            return self._searched[point]
        problem = replace(self._problem, m=m, label=label)
        today = tile_config(self.source.engine().config(problem.layer, m), ENGINE)
        return PointTask(point, self.shapes.get(m, named), problem, today)


def loses(task: PointTask, winner: str) -> bool:
    """True where the config that a point would get ("": today's) is slower there than the best that was found for it,
    or does not run."""
    us = task.us_of(winner or task.today.name)
    best_us = task.us_of(fastest_at(task))
    return us < 0 or us > max(OWN_KEY_RATIO * best_us, best_us + OWN_KEY_US)


def fastest_at(task: PointTask) -> str:
    """The config that takes the least time at a point."""
    return min(task.times, key=lambda name: task.times[name].us)


class RangeSearch(BucketSearch):
    """A range of M that one entry serves."""

    noise_counts = True

    def __init__(
        self,
        file: EngineFile,
        points: Sequence[PointTask],
        key: int,
        first: int,
        last: int | None,
        *,
        alone: bool = False,
    ) -> None:
        facts = {"key": key, "first": first, "last": last}
        super().__init__(file, f"M={first}..{last or ''}", points, facts, alone=alone)
        self.key = key
        self.first = first
        self.cost = worst_regret if len(file.source.labels) > 1 else weighted_sum
        for task in points:
            self.add_configs(task)

    def finish(self, following: Sequence[ShapeTask]) -> None:
        """Compare, decide, settle. The workload's own M come first. The ends are only measured if a new config wins at
        those, and without the configs that were slower there."""
        measured: list[PointTask] = []
        for i, task in enumerate(self.points):
            if task.point.weight and task.shape.id in self.file.settled:
                continue
            only_ends_left = not any(other.point.weight for other in self.points[i:])
            if measured and only_ends_left:
                winner, _ = super().choose_winner(measured)
                if not winner:
                    break
                self._drop_slow_configs(measured)
            self.file.start_shape(task)
            has_all_times = set(self.configs) <= set(task.times)
            if has_all_times or self.compare(task, following):
                measured.append(task)
        self.settle(measured)

    def _drop_slow_configs(self, measured: Sequence[PointTask]) -> None:
        """Compare new configs no longer that are slower than today's at one of these points."""
        today = {task.today.name for task in self.points}
        for task in measured:
            for name, time in task.times.items():
                if name not in today and task.today_us > 0 and is_slower(task.today_us, time.high_us):
                    self.configs.pop(name, None)

    def choose_winner(self, measured: Sequence[PointTask]) -> tuple[str, list[str]]:
        """Choose as the base does. Without a time at each point no winner is proven."""
        winner, harmful = super().choose_winner(measured)
        return winner if len(measured) == len(self.points) else "", harmful
