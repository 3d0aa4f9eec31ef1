"""Search tasks of a group: for each M of a bucket the candidates, the seeds first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from worker.protocol import SpecShape
from worker.triton_configs.files import ConfigFileError
from worker.triton_configs.resolve import ResolveError
from worker.tuners.aiter_triton import space
from worker.tuners.aiter_triton.bucket_search import PointTask
from worker.tuners.aiter_triton.buckets import BucketWork, Point, bucket_of, plan
from worker.tuners.aiter_triton.config import AiterConfig, config_of
from worker.tuners.aiter_triton.problem import KindProblem, problem_of
from worker.tuners.aiter_triton.seeds import Seeds
from worker.tuners.aiter_triton.source import AiterSource
from worker.tuners.aiter_triton.spec import Options
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.search.options import EXHAUSTIVE
from worker.tuners.search.search import SearchContext

FAST_LIST = 600
"""The fast search looks at so many candidates at most, beside the seeds."""


class TaskMaker:
    """Makes the tasks of one group of shapes, which differ in M only."""

    def __init__(self, context: SearchContext, options: Options, source: AiterSource, seeds: Seeds) -> None:
        self._context, self.options, self._source, self.seeds = context, options, source, seeds
        self.shapes: dict[int, SpecShape] = {}
        """Shapes by their M."""
        self._family = ""
        self.default = {name: config_of(values) for name, values in options.default}
        """Configs by bucket that are measured instead of a search."""

    def buckets(
        self, shapes: Sequence[SpecShape], family: str, refuse: Callable[[SpecShape, str], None]
    ) -> list[BucketWork]:
        """The buckets of the shapes that can be searched; `refuse` gets the others with the reason."""
        names: dict[int, str] = {}
        for shape in shapes:
            self._context.emit.alive()
            try:
                m, bucket = self._add(shape, family)
                names[m] = bucket
            except (UnsupportedError, ResolveError, ConfigFileError, OSError) as e:
                refuse(shape, str(e))
        counts = dict(self.options.counts)
        return plan({m: counts.get(shape_name(self.shapes[m].key), 1.0) for m in names}, names)

    def _add(self, shape: SpecShape, family: str) -> tuple[int, str]:
        """(M, the bucket that it is tuned for) of a shape of the group. Raises UnsupportedError, ResolveError,
        ConfigFileError, OSError."""
        self._family = family
        p = self._problem(shape)
        today = self.seeds.today(p.m, p.n, p.k, p.batch)
        bucket = bucket_of(p.m, self.seeds.bounds, today.bucket)
        if self.default:
            bucket = self.seeds.bucket_with(self.default, p.m)
            if today.specialised or bucket not in self.default:
                where = f"{today.bucket} of {today.path.name}"
                raise UnsupportedError(f"M={p.m} reads {where}, which the option `default` leaves as it is")
        self.shapes[p.m] = shape
        return p.m, bucket

    def won(self, p: KindProblem, config: AiterConfig, us: float) -> None:
        """Keep a winner for shapes like it, of this run and of later ones."""
        self.seeds.won(p.m, p.n, p.k, p.batch, config)
        self._context.store.won(p.family, p.group_name, p.m, config.name, us)

    def put_first(self, t: PointTask) -> None:
        """Have today's config begin, then earlier winners and the seeds."""
        at = {c: i for i, c in enumerate(t.task.candidates)}
        first = [at[c] for c in self._first(t.problem, t.config_today) if c in at]
        known = self._context.winners(t.task) if self.options.hints else []
        t.task.ranker.first(list(dict.fromkeys([*first[:1], *known, *first[1:]])))

    def tasks(self, bucket: BucketWork) -> list[PointTask]:
        """A task for each M, those of the workload's shapes first."""
        points = sorted(bucket.points, key=lambda p: p.m not in self.shapes)
        like = self.shapes[next(p.m for p in points if p.m in self.shapes)]
        return [self._task(point, like, self.default.get(bucket.name)) for point in points]

    def _task(self, point: Point, like: SpecShape, fixed: AiterConfig | None) -> PointTask:
        """`like`: a shape of the bucket, in whose name a bound is measured that is no shape."""
        self._context.emit.alive()
        shape = self.shapes.get(point.m)
        measured = shape or SpecShape(like.id, {**like.key, "M": point.m})
        p = self._problem(measured)
        today = self.seeds.today(p.m, p.n, p.k, p.batch)
        config = config_of(today.values)
        candidates = self._candidates(p, config) if fixed is None else list(dict.fromkeys([config, fixed]))
        always = frozenset([candidates.index(config), *([candidates.index(fixed)] if fixed else [])])
        task = self._context.task(shape or like, p, candidates, always, quiet=shape is None)
        made = PointTask(point, shape, p, today, config, task)
        self.put_first(made)
        return made

    def _problem(self, shape: SpecShape) -> KindProblem:
        return problem_of(self._source.name, self._family, dict(shape.key), self._context.target.gfx)

    def _first(self, p: KindProblem, today: AiterConfig) -> list[AiterConfig]:
        """Today's config, then the seeds."""
        return list(dict.fromkeys([today, *self.seeds.of(p.m, p.n, p.k, p.batch)]))

    def _candidates(self, p: KindProblem, today: AiterConfig) -> list[AiterConfig]:
        """Today's config and the seeds, then legal ones by the model, or drawn."""
        o, source, target = self.options, self._source, self._context.target
        first = self._first(p, today)
        if o.sample:
            seed = f"{o.seed}:{p.group_name}:{p.m}"
            rest = space.drawn(source.kind, p, target, source.completed(p), o.sample, seed)
            first = [today]  # exactly what was drawn, and what it is compared with
        else:
            most = o.max_candidates or (FAST_LIST if o.search != EXHAUSTIVE else 0)
            rest = source.candidates(p, target, first, most)
        if o.only:
            return [today, *(c for c in [*first, *rest] if c.name in o.only and c != today)]
        return space.distinct([*first, *rest], p, source.completed(p))


def shape_name(key: Mapping[str, int | str]) -> str:
    """A shape's key columns as one text: `16x1280x8192xtorch.bfloat16x...`."""
    return "x".join(map(str, key.values()))
