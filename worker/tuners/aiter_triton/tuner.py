"""The tuner `aiter-triton` as the worker sees it: the search over configs of AITER's wrappers, bucket by bucket.

The shapes of a group fall into buckets of M; a bucket gets one config. Each of its M (the workload's and the bucket's
bound) is searched, then the leaders of all and today's config are measured at every M, interleaved. The first M's
search teaches the others (their estimates, and what compiles). A shape is parked while the others of its bucket are
measured; the bucket's verdict settles them all. Rows carry what a config file needs (`triton_config`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.protocol import Spec, SpecShape
from worker.protocol.paths import AITER_ROOT_ENV
from worker.triton_configs.resolve import ConfigFileError, ResolveError, bound_of
from worker.tuners.aiter_triton.space import AiterSeeds, KindProblem, problem_of
from worker.tuners.aiter_triton.spec import Options, kind_of, source_of
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.search.bucket import BucketSearch, FileSearch, Point, PointTask, by_file, refuse
from worker.tuners.search.measuring import NoDeviceError
from worker.tuners.search.search import SearchContext, ShapeTask
from worker.tuners.search.tiles import TileConfig, config_of
from worker.tuners.search.tuner import SearchTuner

if TYPE_CHECKING:
    from worker.tuners.aiter_triton.source import AiterSource


def bucket_of(m: int, bounds: Sequence[int], today: str) -> str:
    """The bucket that an M is tuned for: of the smallest bound that is not below it, also where the file has no such
    bucket; above the last bound today's."""
    return next((f"M_LEQ_{x}" for x in bounds if m <= x), today)


def plan(weights: Mapping[int, float], names: Mapping[int, str]) -> dict[str, list[Point]]:
    """The points of each bucket of a workload (M -> weight, M -> bucket), the most weighty first; buckets by their M
    ascending. Each is measured at its bound as well."""
    found: dict[str, set[int]] = {}
    for m in sorted(weights):
        found.setdefault(names[m], set()).update((m, bound_of(names[m])[1] or m))
    return {
        name: [Point(m, w) for w, m in sorted(((weights.get(m, 0.0), m) for m in ms), reverse=True)]
        for name, ms in found.items()
    }


class AiterFile(FileSearch):
    """The search for one of AITER's config files."""

    seeds: AiterSeeds

    def __init__(
        self, context: SearchContext, options: Options, source: AiterSource, seeds: AiterSeeds, family: str
    ) -> None:
        """`default`: configs by bucket that are measured instead of a search, by the wrapper and through `callers`."""
        arch, self._kind, self._family, self._names = str(context.target.arch), source.kind, family, dict[int, str]()
        self.default = {name: config_of(values) for name, values in options.default}
        facts = {"kind": self._kind.name, "arch": arch, **({"default": True} if self.default else {})}
        super().__init__(context, source, seeds, facts)
        if self.default:
            self.callers = [c.function for c in self._kind.callers if c.given is not None and c.reads_on(arch)]

    def add(self, shape: SpecShape) -> None:
        p = self._problem(shape.key)
        today = self.seeds.today(p)
        bucket = bucket_of(p.m, self.seeds.bounds, today.bucket)
        if self.default:
            bucket = self.seeds.bucket_with(self.default, p.m)
            if today.specialised or bucket not in self.default:
                where = f"{today.bucket} of {today.path.name}"
                raise UnsupportedError(f"M={p.m} reads {where}, which the option `default` leaves as it is")
        self.shapes[p.m], self._names[p.m] = shape, bucket

    def buckets(self) -> Iterator[BucketSearch]:
        made = DefaultBucket if self.default else BucketSearch
        for bucket, points in plan({m: self.weight(m) for m in self._names}, self._names).items():
            tasks = [self._task(p, self.shapes[points[0].m], bucket) for p in points]  # the first is the workload's
            yield made(self, bucket, tasks, {"bucket": bucket}, alone=len(tasks) == 1 and not self.default)

    def tune(self, bucket: BucketSearch, following: Sequence[ShapeTask]) -> None:
        """Search, compare, decide, settle."""
        bucket.search(following)
        there = [t for t in bucket.points if t.leaders]
        if not bucket.alone and any(t.point.weight for t in there):
            there = [t for t in there if bucket.compare(t, following)]
        bucket.settle(there)

    def _task(self, point: Point, like: SpecShape, bucket: str) -> PointTask:
        """`like`: a shape of the bucket, in whose name a bound is measured that is no shape."""
        shape, fixed = self.shapes.get(point.m, like), self.default.get(bucket)
        p = self._problem({**shape.key, "M": point.m})
        today = config_of(self.seeds.today(p).values)
        return self.task(PointTask(point, shape, p, today), [today, fixed] if fixed else [])

    def _problem(self, key: Mapping[str, int | str]) -> KindProblem:
        return problem_of(self._kind.name, self._family, dict(key), self.context.target.gfx)


class DefaultBucket(BucketSearch):
    """A bucket that gets the config of `AiterFile.default`, whatever is measured; who merges it decides."""

    file: AiterFile

    def kept(self, leaders: list[TileConfig], t: PointTask) -> list[TileConfig]:
        both = (t.old, self.file.default[self.name])
        return [replace(c, caller=caller) for caller in ("", *self.file.callers) for c in both]

    def choose(self, there: Sequence[PointTask]) -> tuple[str, list[str]]:
        name = self.file.default[self.name].name
        return name if all(name in t.times for t in there) else "", super().choose(there)[1]

    def kept_name(self, t: PointTask) -> str:
        return self.file.default[self.name].name


class AiterTritonTuner(SearchTuner):
    """Measures configs of AITER's Triton GEMMs on the first GPU."""

    parsed = staticmethod(Options.parse)
    _tree: Tree  # since `open`, as the next
    _kernels: AiterSource
    _seeds: AiterSeeds | None = None

    def source(self) -> tuple[AiterSource, str]:
        from worker.tuners.aiter_triton.source import AiterSource

        options = self.parsed(self._raw)
        kind = kind_of(options).name
        try:
            self._tree = tree = choose(options.root or os.environ.get(AITER_ROOT_ENV, ""))[0]
        except NotATreeError as e:
            raise NoDeviceError(f"the tuner aiter-triton: {e}") from e
        of_tree = {"root": str(tree.root), "version": tree.version, "commit": tree.commit}
        self._kernels, self.about = AiterSource(str(tree.root), kind), {"aiter": of_tree, "kind": kind}
        return self._kernels, source_of(tree.package / "ops" / "triton", kind)

    def search(self, spec: Spec, context: SearchContext) -> None:
        """Search the buckets of a group's shapes, and settle every shape."""
        options, source = context.options, self._kernels
        assert isinstance(options, Options)
        try:
            self._seeds = seeds = self._seeds or AiterSeeds(self._tree.root, str(context.target.arch), source.kind)
        except (ResolveError, ConfigFileError, OSError) as e:
            for shape in spec.shapes:
                refuse(context, shape, str(e))
            return
        source.enter(context.target)
        for shapes in by_file(spec.shapes):
            AiterFile(context, options, source, seeds, spec.family).run(shapes)
