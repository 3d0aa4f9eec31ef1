"""The tuner `aiter-triton` as the worker sees it: the search over configs of AITER's wrappers, bucket by bucket.

The shapes of a group fall into buckets of M; a bucket gets one config. Each of its M (the workload's and the bucket's
bound) is searched, then the leaders of all and today's config are measured at every M, interleaved. The first M's
search teaches the others (their estimates, and what compiles). A shape is parked while the others of its bucket are
measured; the bucket's verdict settles them all. Rows carry what a config file needs (`triton_config`).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
    found: dict[str, dict[int, float]] = {}
    for m in sorted(weights):
        members = found.setdefault(names[m], {})
        members[m] = weights[m]
        side, bound = bound_of(names[m])
        if side != "any":
            members.setdefault(bound, weights.get(bound, 0.0))
    return {
        name: [Point(m, w) for m, w in sorted(members.items(), key=lambda e: (-e[1], -e[0]))]
        for name, members in found.items()
    }


class AiterFile(FileSearch):
    """The search for one of AITER's config files."""

    seeds: AiterSeeds

    def __init__(
        self, context: SearchContext, options: Options, source: AiterSource, seeds: AiterSeeds, family: str
    ) -> None:
        """`default`: configs by bucket that are measured instead of a search, by the wrapper and through `callers`.
        `facts` go into the rows."""
        super().__init__(context, source, seeds)
        self._family, self._names = family, dict[int, str]()  # buckets by M
        self._kind, arch = source.kind, str(context.target.arch)
        self.default = {name: config_of(values) for name, values in options.default}
        there = [c for c in self._kind.callers if c.given is not None and c.reads_on(arch)]
        self.callers = [c.function for c in there] if self.default else []
        self.facts = {"kind": self._kind.name, "arch": arch, **({"default": True} if self.default else {})}

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

    def buckets(self) -> Iterator[AiterBucket]:
        for bucket, points in plan({m: self.weight(m) for m in self._names}, self._names).items():
            ordered = sorted(points, key=lambda p: p.m not in self.shapes)  # the workload's first
            yield AiterBucket(self, bucket, [self._task(p, self.shapes[ordered[0].m], bucket) for p in ordered])

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


class AiterBucket(BucketSearch):
    """One bucket."""

    file: AiterFile

    def __init__(self, file: AiterFile, name: str, points: Sequence[PointTask]) -> None:
        """`points`: the workload's M before other ones. A bucket of `file.default` gets that config whatever is
        measured; who merges it decides."""
        self._fixed = file.default.get(name)
        super().__init__(file, name, points, alone=len(points) == 1 and self._fixed is None)

    def kept(self, leaders: list[TileConfig], t: PointTask) -> list[TileConfig]:
        if self._fixed is None:
            return super().kept(leaders, t)
        both = (t.old, self._fixed)
        return [replace(c, caller=caller) for caller in ("", *self.file.callers) for c in both]

    def choose(self, there: Sequence[PointTask]) -> tuple[str, list[str]]:
        winner, harmful = super().choose(there)
        if self._fixed is None:
            return winner, harmful
        return self._fixed.name if all(self._fixed.name in t.times for t in there) else "", harmful

    def kept_name(self, t: PointTask) -> str:
        return super().kept_name(t) if self._fixed is None else self._fixed.name

    def document(self, winner: str, t: PointTask, there: Sequence[PointTask]) -> str:
        """Document of the bucket for its config file, as JSON: the winner's values (null: today's stay), and for this M
        and those that are no shape's, through each operator that computes it, [M, count, today's us, winner's us,
        errRatio, place of today's values in `old`, operator ("": the wrapper)].
        """
        mine = [t, *(o for o in there if not o.point.weight)]
        old = [o.old.values for o in mine]
        distinct = [v for i, v in enumerate(old) if v not in old[:i]]
        values = self.configs[winner].values if winner else None
        points = []
        for o, caller in itertools.product(mine, ("", *self.file.callers)):
            new = o.times.get(replace(self.configs[winner], caller=caller).name) if winner else None
            if new or not caller:
                points.append([
                    o.point.m, o.point.weight, round(o.us(replace(o.old, caller=caller).name), 4),
                    round(new.us if new else -1.0, 4), new.err if new else 1.0, distinct.index(o.old.values), caller,
                ])  # fmt: skip
        document = {**self.file.facts, "bucket": self.name, "values": values, "old": distinct, "points": points}
        return json.dumps(document, separators=(",", ":"))


class AiterTritonTuner(SearchTuner):
    """Measures configs of AITER's Triton GEMMs on the first GPU."""

    _tree: Tree  # since `open`, as the next
    _kernels: AiterSource
    _seeds: AiterSeeds | None = None

    def open(self) -> dict[str, Any]:
        """Opens the search, and reports AITER's tree, too. Raises NoDeviceError without a GPU or a tree."""
        opened, tree = super().open(), self._tree
        about = {"root": str(tree.root), "version": tree.version, "commit": tree.commit}
        return {**opened, "aiter": about, "kind": self._kernels.name}

    def parsed(self, raw: Mapping[str, Any]) -> Options:
        return Options.parse(raw)

    def source(self) -> tuple[AiterSource, str]:
        from worker.tuners.aiter_triton.source import AiterSource

        options = self.parsed(self._raw)
        kind = kind_of(options).name
        try:
            self._tree = choose(options.root or os.environ.get(AITER_ROOT_ENV, ""))[0]
        except NotATreeError as e:
            raise NoDeviceError(f"the tuner aiter-triton: {e}") from e
        self._kernels = AiterSource(str(self._tree.root), kind)
        return self._kernels, source_of(self._tree.package / "ops" / "triton", kind)

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
