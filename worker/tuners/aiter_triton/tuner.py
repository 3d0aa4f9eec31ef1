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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.protocol import Spec, SpecShape
from worker.protocol.paths import AITER_ROOT_ENV
from worker.triton_configs.kinds import ConfigKind
from worker.triton_configs.resolve import ConfigFileError, ResolveError, bound_of
from worker.tuners.aiter_triton.space import KindProblem, Seeds, problem_of
from worker.tuners.aiter_triton.spec import Options, kind_of, source_of
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.search.bucket import (
    BucketSearch,
    Flight,
    Point,
    PointTask,
    by_file,
    put_first,
    refuse,
    shape_name,
    task_of,
)
from worker.tuners.search.measuring import NoDeviceError
from worker.tuners.search.model import CandidateRanker
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


class FileSearch:
    """The search for one config file: its shapes differ in M only."""

    def __init__(
        self, context: SearchContext, options: Options, source: AiterSource, seeds: Seeds, family: str
    ) -> None:
        """`default`: configs by bucket that are measured instead of a search, by the wrapper and through `callers`.
        `facts` go into the rows."""
        self.context, self._options, self._source, self.seeds, self._family = context, options, source, seeds, family
        self._shapes: dict[int, SpecShape] = {}  # shapes by their M
        self.flight = Flight(context.emit)
        kind, arch = source.kind, str(context.target.arch)
        self.default = {name: config_of(values) for name, values in options.default}
        self.callers = [c.function for c in kind.callers if self.default and c.given is not None and c.reads_on(arch)]
        self.facts = {"kind": kind.name, "arch": arch, **({"default": True} if self.default else {})}

    def run(self, shapes: Sequence[SpecShape]) -> None:
        """Search the buckets of these shapes, and settle every shape."""
        names: dict[int, str] = {}
        for shape in shapes:
            self.context.emit.alive()
            try:
                m, bucket = self._add(shape)
                names[m] = bucket
            except (UnsupportedError, ResolveError, ConfigFileError, OSError) as e:
                refuse(self.context, shape, str(e))
        counts = dict(self._options.counts)
        works = list(plan({m: counts.get(shape_name(self._shapes[m].key), 1.0) for m in names}, names).items())
        tasks, prior = self._tasks(*works[0]) if works else [], None
        for i, (bucket, _) in enumerate(works):
            following = self._tasks(*works[i + 1]) if i + 1 < len(works) else []
            for t in tasks:
                if t.search is not None:
                    put_first(t.search, self._first(t))  # winners of the bucket before it are known by now
            prior = AiterBucket(self, bucket, tasks).run(prior, [t.search for t in following if t.search])
            tasks = following

    def _add(self, shape: SpecShape) -> tuple[int, str]:
        """(M, the bucket that it is tuned for) of a shape of the group. Raises UnsupportedError, ResolveError,
        ConfigFileError, OSError."""
        p = self._problem(shape)
        today = self.seeds.today(p.m, p.n, p.k, p.batch)
        bucket = bucket_of(p.m, self.seeds.bounds, today.bucket)
        if self.default:
            bucket = self.seeds.bucket_with(self.default, p.m)
            if today.specialised or bucket not in self.default:
                where = f"{today.bucket} of {today.path.name}"
                raise UnsupportedError(f"M={p.m} reads {where}, which the option `default` leaves as it is")
        self._shapes[p.m] = shape
        return p.m, bucket

    def _tasks(self, bucket: str, points: Sequence[Point]) -> list[PointTask]:
        """A task for each M, those of the workload's shapes first."""
        ordered = sorted(points, key=lambda p: p.m not in self._shapes)
        like = self._shapes[ordered[0].m]
        return [self._task(point, like, self.default.get(bucket)) for point in ordered]

    def _task(self, point: Point, like: SpecShape, fixed: TileConfig | None) -> PointTask:
        """`like`: a shape of the bucket, in whose name a bound is measured that is no shape."""
        self.context.emit.alive()
        shape = self._shapes.get(point.m)
        p = self._problem(shape or SpecShape(like.id, {**like.key, "M": point.m}))
        today = self.seeds.today(p.m, p.n, p.k, p.batch).values
        made = PointTask(point, shape, shape or like, p, today, config_of(today))
        space = self._source.space(p, self.context.target)
        made.search = task_of(self.context, made, space, self._first(made), [made.old, fixed] if fixed else [])
        return made

    def _problem(self, shape: SpecShape) -> KindProblem:
        return problem_of(self._source.name, self._family, dict(shape.key), self.context.target.gfx)

    def _first(self, t: PointTask) -> list[TileConfig]:
        """Today's config, then the seeds."""
        p = t.problem
        return list(dict.fromkeys([t.old, *self.seeds.of(p.m, p.n, p.k, p.batch)]))


class AiterBucket(BucketSearch):
    """One bucket. `run` settles each of its shapes."""

    def __init__(self, file: FileSearch, name: str, tasks: Sequence[PointTask]) -> None:
        """`tasks`: the workload's M before other ones. A bucket of `file.default` gets that config whatever is
        measured; who merges it decides."""
        self._file, self._tasks, self._fixed = file, list(tasks), file.default.get(name)
        alone = len(self._tasks) == 1 and self._fixed is None
        super().__init__(file.context, file.flight, name, file.seeds.won, alone=alone)

    def run(self, prior: CandidateRanker | None, following: Sequence[ShapeTask]) -> CandidateRanker | None:
        """Search, compare, decide, settle. `prior`: what an earlier bucket's search learned; returns this one's."""
        there: list[PointTask] = []
        for i, t in enumerate(self._tasks):
            learned = self.search(t, prior, [*(o.search for o in self._tasks[i + 1 :] if o.search), *following])
            if learned is not None:
                prior = learned
                there.append(t)
        if not self.alone and any(t.shape for t in there):
            there = [t for t in there if self.compare(t, following)]
        if any(t.shape for t in there):
            self.settle(there)
        return prior

    def kept(self, leaders: list[TileConfig], t: PointTask) -> list[TileConfig]:
        if self._fixed is None:
            return super().kept(leaders, t)
        both = (t.old, self._fixed)
        return [replace(c, caller=caller) for caller in ("", *self._file.callers) for c in both]

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
        mine = [t, *(o for o in there if o.shape is None)]
        old = [o.today for o in mine]
        distinct = [v for i, v in enumerate(old) if v not in old[:i]]
        values = self.configs[winner].values if winner else None
        points = []
        for o, caller in itertools.product(mine, ("", *self._file.callers)):
            new = o.times.get(replace(self.configs[winner], caller=caller).name) if winner else None
            if new or not caller:
                points.append([
                    o.point.m, o.point.weight, round(o.us(replace(o.old, caller=caller).name), 4),
                    round(new.us if new else -1.0, 4), new.err if new else 1.0, distinct.index(o.today), caller,
                ])  # fmt: skip
        document = {**self._file.facts, "bucket": self.name, "values": values, "old": distinct, "points": points}
        return json.dumps(document, separators=(",", ":"))


class AiterTritonTuner(SearchTuner):
    """Measures configs of AITER's Triton GEMMs on the first GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._tree: Tree  # since `open`
        self._kind: ConfigKind
        self._seeds: Seeds | None = None

    def open(self) -> dict[str, Any]:
        """Opens the search, and reports AITER's tree, too. Raises NoDeviceError without a GPU or a tree."""
        info = super().open()
        tree = {"root": str(self._tree.root), "version": self._tree.version, "commit": self._tree.commit}
        return {**info, "aiter": tree, "kind": self._kind.name}

    def parsed(self, raw: Mapping[str, Any]) -> Options:
        return Options.parse(raw)

    def source(self) -> tuple[AiterSource, str]:
        from worker.tuners.aiter_triton.source import AiterSource

        options = self.parsed(self._raw)
        self._kind = kind_of(options)
        try:
            self._tree = choose(options.root or os.environ.get(AITER_ROOT_ENV, ""))[0]
        except NotATreeError as e:
            raise NoDeviceError(f"the tuner aiter-triton: {e}") from e
        digest = source_of(self._tree.package / "ops" / "triton", self._kind.name)
        return AiterSource(str(self._tree.root), self._kind.name), digest

    def search(self, spec: Spec, context: SearchContext) -> None:
        """Search the buckets of a group's shapes, and settle every shape."""
        from worker.tuners.aiter_triton.source import AiterSource

        options, source = context.options, context.source
        assert isinstance(options, Options)
        assert isinstance(source, AiterSource)
        try:
            self._seeds = seeds = self._seeds or Seeds(self._tree.root, str(context.target.arch), self._kind)
        except (ResolveError, ConfigFileError, OSError) as e:
            for shape in spec.shapes:
                refuse(context, shape, str(e))
            return
        source.enter(context.target)
        for shapes in by_file(spec.shapes):
            FileSearch(context, options, source, seeds, spec.family).run(shapes)
