"""The tuner `aiter-triton` as the worker sees it: the search over configs of AITER's wrappers, bucket by bucket.

The shapes of a group fall into buckets of M; a bucket gets one config. Each of its M (the workload's and the bucket's
bound) is searched, then the leaders of all and today's config are measured at every M and at the least of the bucket,
interleaved. There is nothing to cut as in an engine's files, because AITER's look-up finds buckets at the bounds of its
caller only (`STANDARD_M_BOUNDS` of utils/gemm_config_utils.py). The first M's search teaches the others (their
estimates, and what compiles). A shape is parked while the others of its bucket are measured; the bucket's verdict
settles them all. Rows carry what a config file needs (`triton_config`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.protocol import Spec, SpecShape
from worker.protocol.paths import AITER_ROOT_ENV
from worker.triton_configs.config_file import ConfigFileError, bound_of
from worker.triton_configs.resolve import ResolveError
from worker.tuners.aiter_triton.problem import KindProblem, problem_of
from worker.tuners.aiter_triton.seeds import AiterSeeds
from worker.tuners.aiter_triton.spec import AiterTritonOptions, hash_sources, kind_of
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.search.bucket import BucketSearch, FileSearch, PointTask, group_by_file, refuse_shape
from worker.tuners.search.choice import Point
from worker.tuners.search.measuring_process import NoDeviceError
from worker.tuners.search.problem_search import SearchContext, ShapeTask
from worker.tuners.search.tile_config import TileConfig, tile_config
from worker.tuners.search.tuner import SearchTuner

if TYPE_CHECKING:
    from worker.tuners.aiter_triton.source import AiterSource


def bucket_of(m: int, bounds: Sequence[int], today: str) -> str:
    """The bucket that an M is tuned for: of the smallest bound that is not below it, also where the file has no such
    bucket; above the last bound today's."""
    return next((f"M_LEQ_{x}" for x in bounds if m <= x), today)


def points_of_buckets(
    weights: Mapping[int, float], bucket_names: Mapping[int, str], bounds: Sequence[int]
) -> dict[str, list[Point]]:
    """The points of each bucket of a workload (M -> weight, M -> bucket), the most weighty first; buckets by their M
    ascending. Each is measured at its bound as well, and at its least M, behind the one of `bounds` before."""
    ms_of_bucket: dict[str, set[int]] = {}
    for m in sorted(weights):
        name = bucket_names[m]
        side, bound = bound_of(name)
        ms_of_bucket.setdefault(name, set()).update((m, bound or m))
        if side == "LEQ" and bounds:
            ms_of_bucket[name].add(1 + max((x for x in bounds if x < m), default=0))
    points: dict[str, list[Point]] = {}
    for name, ms in ms_of_bucket.items():
        of_bucket = [Point(m, weights.get(m, 0.0)) for m in ms]
        points[name] = sorted(of_bucket, key=lambda point: (point.weight, point.m), reverse=True)
    return points


class AiterFile(FileSearch):
    """The search for one of AITER's config files."""

    seeds: AiterSeeds

    def __init__(
        self, context: SearchContext, options: AiterTritonOptions, source: AiterSource, seeds: AiterSeeds, family: str
    ) -> None:
        """The option `default` has configs by bucket that are measured instead of a search, by the wrapper and through
        `callers`."""
        arch = str(context.target.arch)
        self._kind = source.kind
        self._family = family
        self._bucket_names: dict[int, str] = {}  # by M
        self.default = {name: tile_config(values) for name, values in options.default}
        facts: dict[str, Any] = {"kind": self._kind.name, "arch": arch}
        if self.default:
            facts["default"] = True
            callers = [caller for caller in self._kind.callers if caller.is_callable and caller.reads_on(arch)]
            self.callers = [caller.function for caller in callers]
        super().__init__(context, source, seeds, facts)

    def add_shape(self, shape: SpecShape) -> None:
        problem = self._problem(shape.key)
        today = self.seeds.today(problem)
        bucket = bucket_of(problem.m, self.seeds.bounds, today.bucket)
        if self.default:
            bucket = self.seeds.bucket_with(self.default, problem.m)
            if today.specialised or bucket not in self.default:
                where = f"{today.bucket} of {today.path.name}"
                raise UnsupportedError(f"M={problem.m} reads {where}, which the option `default` leaves as it is")
        self.shapes[problem.m] = shape
        self._bucket_names[problem.m] = bucket

    def buckets(self) -> Iterator[BucketSearch]:
        search_class = DefaultBucket if self.default else BucketSearch
        weights = {m: self.weight(m) for m in self._bucket_names}
        bounds = () if self.default else self.seeds.bounds  # who merges a default decides about its other M
        for bucket, points in points_of_buckets(weights, self._bucket_names, bounds).items():
            named = self.shapes[points[0].m]  # the first is the workload's
            tasks = [self._task(point, named, bucket) for point in points]
            is_alone = len(tasks) == 1 and not self.default
            yield search_class(self, bucket, tasks, {"bucket": bucket}, alone=is_alone)

    def tune_bucket(self, bucket: BucketSearch, following: Sequence[ShapeTask]) -> None:
        """Search, compare, decide, settle."""
        bucket.search(following)
        measured = [task for task in bucket.points if task.leaders or not task.search_task]
        has_shapes = any(task.point.weight for task in measured)
        if has_shapes and not bucket.alone:
            measured = [task for task in measured if bucket.compare(task, following)]
        bucket.settle(measured)

    def _task(self, point: Point, named: SpecShape, bucket: str) -> PointTask:
        """`named`: a shape of the bucket, in whose name an end of it is measured that is no shape. Its least M is only
        compared."""
        shape = self.shapes.get(point.m, named)
        problem = self._problem({**shape.key, "M": point.m})
        today = tile_config(self.seeds.today(problem).values)
        task = PointTask(point, shape, problem, today)
        if not point.weight and point.m != bound_of(bucket)[1]:
            return task
        fixed = [today, self.default[bucket]] if bucket in self.default else []
        return self.add_search(task, fixed)

    def _problem(self, key: Mapping[str, int | str]) -> KindProblem:
        return problem_of(self._kind.name, self._family, dict(key), self.context.target.gfx)


class DefaultBucket(BucketSearch):
    """A bucket that gets the config of `AiterFile.default`, whatever is measured; who merges it decides."""

    file: AiterFile

    @property
    def _fixed(self) -> TileConfig:
        return self.file.default[self.name]

    def configs_to_compare(self, leaders: list[TileConfig], task: PointTask) -> list[TileConfig]:
        """Today's and the fixed config, through the wrapper and each operator that reads the file."""
        configs: list[TileConfig] = []
        for caller in ("", *self.file.callers):
            configs += [replace(task.today, caller=caller), replace(self._fixed, caller=caller)]
        return configs

    def choose_winner(self, measured: Sequence[PointTask]) -> tuple[str, list[str]]:
        _, harmful = super().choose_winner(measured)
        is_right_everywhere = all(self._fixed.name in task.times for task in measured)
        return self._fixed.name if is_right_everywhere else "", harmful

    def name_if_unchanged(self, task: PointTask) -> str:
        return self._fixed.name


class AiterTritonTuner(SearchTuner):
    """Measures configs of AITER's Triton GEMMs on the first GPU."""

    read_options = staticmethod(AiterTritonOptions.parse)
    _tree: Tree  # since `open`, as the next
    _kernels: AiterSource
    _seeds: AiterSeeds | None = None

    def source(self) -> tuple[AiterSource, str]:
        from worker.tuners.aiter_triton.source import AiterSource

        options = self.read_options(self._raw)
        kind = kind_of(options).name
        try:
            tree = choose(options.root or os.environ.get(AITER_ROOT_ENV, ""))[0]
        except NotATreeError as e:
            raise NoDeviceError(f"the tuner aiter-triton: {e}") from e
        self._tree = tree
        self._kernels = AiterSource(str(tree.root), kind)
        tree_facts = {"root": str(tree.root), "version": tree.version, "commit": tree.commit}
        self.about = {"aiter": tree_facts, "kind": kind}
        return self._kernels, hash_sources(tree.package / "ops" / "triton", kind)

    def search(self, spec: Spec, context: SearchContext) -> None:
        """Search the buckets of a group's shapes, and settle every shape."""
        options = context.options
        source = self._kernels
        assert isinstance(options, AiterTritonOptions)
        try:
            if self._seeds is None:
                self._seeds = AiterSeeds(self._tree.root, str(context.target.arch), source.kind)
        except (ResolveError, ConfigFileError, OSError) as e:
            for shape in spec.shapes:
                refuse_shape(context, shape, str(e))
            return
        source.enter(context.target)
        for shapes in group_by_file(spec.shapes):
            AiterFile(context, options, source, self._seeds, spec.family).run(shapes)
