"""The configs of a file, measured side by side at one M: the record of each routing, and the row of the M's shape.

`EngineFile` makes a `FileAtM` for each M that it measures, and calls, in this order:

    measure       each routing: the configs that may be chosen, then the fastest and today's once more, interleaved
    records       a `PointRecord` of each routing, which is sent and cut (worker/triton_configs/point_record.py)
    settle_with   only at an M of the workload: the row of its shape, with the config that the cut chose

Imports neither torch nor triton.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from worker.triton_configs.cutting import KEEP
from worker.triton_configs.point_record import ConfigTime, PointRecord, name_of_config
from worker.tuners.search.bucket import BucketSearch, FileSearch, PointTask, PointTime
from worker.tuners.search.problem_search import Effort, ProblemSearch
from worker.tuners.search.tile_config import TileConfig

UNPAIRED = 1.01
"""A time that was not taken beside today's may be longer by this factor."""


class FileAtM(BucketSearch):
    """The file's configs and today's at one M, at each routing of the source."""

    is_beside_today = True

    def __init__(
        self,
        file: FileSearch,
        points: Sequence[PointTask],
        configs: Sequence[TileConfig],
        effort: Effort,
        *,
        quiet: bool,
    ) -> None:
        """`points`: the M at each routing. `configs`: the file's. `quiet`: the candidates' rows are not emitted."""
        self._m = points[0].point.m
        super().__init__(file, f"M={self._m}", points, {})
        for config in (*configs, *(task.today for task in points)):
            self.configs.setdefault(config.name, config)
        self._choosable = dict(self.configs)  # today's, and those that were slower than it at no routing so far
        self._effort = effort
        self._is_quiet = quiet

    def measure(self) -> None:
        """Measure the configs at each routing, the fastest and today's interleaved.

        A range gets no config that is slower than today's at any routing. So a config that is slower at one routing is
        not measured at the next. Those that were among the fastest at the first routing are ranked at all, because a
        range needs a config that is known beside today's at each.
        """
        leaders_of_first: set[str] = set()
        for number, task in enumerate(self.points):
            leaders = self._measure_routing(task, leaders_of_first, quiet=self._is_quiet or number > 0)
            if number == 0:
                leaders_of_first = leaders
            self._drop_slower_than_today(task)

    def _measure_routing(self, task: PointTask, always_leaders: set[str], *, quiet: bool) -> set[str]:
        """Measure the configs at one routing; the names of those that were interleaved with today's."""
        if task.point.weight:
            self.file.put_in_flight(task.shape)
        comparison = self.comparison_at(task, list(self._choosable.values()))
        comparison.quiet = quiet
        search = ProblemSearch(self.file.context, comparison, [], self._effort)
        search.measure()
        names = [candidate.name for candidate in comparison.candidates]
        leaders = {*search.leaders(), *(i for i in search.measured if names[i] in always_leaders)}
        if len(names) > 1:
            self._rank(task, search, leaders, comparison)
        for i, measurement in search.measured.items():
            high_us = UNPAIRED * measurement.us
            task.times.setdefault(names[i], PointTime(measurement.us, search.errs[i], measurement.spread, high_us))
        if not task.times:
            self.file.settle_shape(task, None, *search.why_none())
        return {names[i] for i in leaders}

    def _drop_slower_than_today(self, task: PointTask) -> None:
        """Drop the configs that were slower than today's at a routing, or wrong."""
        point = self._record_of(task).point
        for name, config in list(self._choosable.items()):
            if name != task.today.name and not point.allows(name_of_config(config.values)):
                del self._choosable[name]

    def records(self) -> Iterator[tuple[PointTask, PointRecord]]:
        """The record of each routing at which a config is right."""
        for task in self.points:
            if task.times:
                yield task, self._record_of(task)

    def _record_of(self, task: PointTask) -> PointRecord:
        others = [name for name in task.times if name != task.today.name]
        times = [self._time_of(task, name) for name in (task.today.name, *others)]
        return PointRecord(dict(self.file.facts), self._m, task.point.label, task.point.weight, times)

    def _time_of(self, task: PointTask, name: str) -> ConfigTime:
        values = self.configs[name].values
        time = task.times.get(name)
        if time is None:
            return ConfigTime(values, -1.0, -1.0, 1.0)
        return ConfigTime(values, time.us, time.high_us, time.err)

    def settle_with(self, chosen: str) -> None:
        """Settle the shape with a config by its name in a record; KEEP: with today's."""
        task = self.points[0]
        config = task.today
        values = None
        if chosen != KEEP:
            config = next(config for config in self.configs.values() if name_of_config(config.values) == chosen)
            values = config.values
        if config.name not in task.times:
            detail = f"no config is right at M={self._m} at every routing, and {config.name} is not"
            self.file.settle_shape(task, None, "no_candidate", detail)
            return
        row = self.verdict_row(task, config, is_change=chosen != KEEP)
        self.file.settle_shape(task, {**row, "triton_config": json.dumps({"values": values})})
