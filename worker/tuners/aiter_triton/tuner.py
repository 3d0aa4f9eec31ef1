"""The tuner `aiter-triton` as the worker sees it: the search over configs of AITER's wrappers, bucket by bucket.

The shapes of a group fall into buckets of M; a bucket gets one config. Each of its M (the workload's and the bucket's
bound) is searched, then the leaders of all and today's config are measured at every M, interleaved. The first M's
search teaches the others (their estimates, and what compiles). A shape is parked while the others of its bucket are
measured; the bucket's verdict settles them all. Rows carry what a config file needs (`triton_config`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from worker.protocol import SpecShape
from worker.text import clean
from worker.triton_configs.kinds import ConfigKind
from worker.triton_configs.resolve import (
    ConfigFileError,
    Resolved,
    ResolveError,
    bound_of,
    slower,
)
from worker.tuners.aiter_triton import space
from worker.tuners.aiter_triton.space import AiterConfig, KindProblem, Seeds, config_of, problem_of
from worker.tuners.aiter_triton.spec import Options
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.search.model import CandidateRanker
from worker.tuners.search.search import Search, SearchContext, ShapeTask, row
from worker.tuners.search.source import EXHAUSTIVE

if TYPE_CHECKING:
    from worker.tuners.aiter_triton.source import AiterSource
import os
from typing import TYPE_CHECKING

from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.protocol import Spec
from worker.protocol.paths import AITER_ROOT_ENV
from worker.tuners.aiter_triton.spec import kind_of, source_of
from worker.tuners.search.measuring import NoDeviceError
from worker.tuners.search.tuner import SearchTuner

if TYPE_CHECKING:
    from worker.tuners.aiter_triton.source import AiterSource


GAIN = 0.005  # A weighted sum that is better by less than this share is no reason to change a file


@dataclass(frozen=True, slots=True)
class Point:
    """An M at which a bucket's configs are measured. `weight`: calls of the workload, 0 for a bound that is none of
    its M."""

    m: int
    weight: float


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


def best(
    points: Sequence[Point], us: Mapping[int, Mapping[str, float]], today: Mapping[int, str]
) -> tuple[str, list[str]]:
    """(the winner, configs that beat it but slow an M down); "" as the winner keeps what is there.

    `us[m][config]`: microseconds at M, today's among them as far as it runs; `today[m]`: its config. The winner has the
    least weighted sum of those that were measured at every M and slow none down, and improves on today's.
    """
    everywhere = set.intersection(*(set(us.get(p.m, {})) for p in points))
    harmful = {
        c for c in everywhere for p in points
        if (old := us[p.m].get(today[p.m])) is not None and c != today[p.m] and slower(old, us[p.m][c])
    }  # fmt: skip
    weights = {p.m: p.weight if any(q.weight for q in points) else 1.0 for p in points}

    def cost(config_at: Mapping[int, str]) -> float:
        return sum(weights[p.m] * us[p.m].get(config_at[p.m], math.inf) for p in points if weights[p.m])

    costs = {c: cost({p.m: c for p in points}) for c in sorted(everywhere)}
    winner = min(everywhere - harmful, key=lambda c: (costs[c], c), default="")
    if winner and costs[winner] >= (1 - GAIN) * cost(today):
        winner = ""
    best_cost = costs[winner] if winner else cost(today)
    return winner, [c for c in costs if c in harmful and costs[c] < best_cost]


FAST_LIST = 600  # the fast search looks at so many candidates at most, beside the seeds


class FileSearch:
    """The search for one config file: its shapes differ in M only."""

    def __init__(
        self, context: SearchContext, options: Options, source: AiterSource, seeds: Seeds, family: str
    ) -> None:
        """`default`: configs by bucket that are measured instead of a search, by the wrapper and through `callers`.
        `facts` go into the rows."""
        self.context, self._options, self._source, self.seeds, self._family = context, options, source, seeds, family
        self._shapes: dict[int, SpecShape] = {}  # shapes by their M
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
                self._put_first(t)  # winners of the bucket before it are known by now
            prior = BucketSearch(self, bucket, tasks, [t.task for t in following]).run(prior)
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

    def _put_first(self, t: PointTask) -> None:
        """Have today's config begin, then the seeds."""
        at = {c: i for i, c in enumerate(t.task.candidates)}
        t.task.ranker.first([at[c] for c in self._first(t.problem, t.config_today) if c in at])

    def _tasks(self, bucket: str, points: Sequence[Point]) -> list[PointTask]:
        """A task for each M, those of the workload's shapes first."""
        ordered = sorted(points, key=lambda p: p.m not in self._shapes)
        like = self._shapes[ordered[0].m]
        return [self._task(point, like, self.default.get(bucket)) for point in ordered]

    def _task(self, point: Point, like: SpecShape, fixed: AiterConfig | None) -> PointTask:
        """`like`: a shape of the bucket, in whose name a bound is measured that is no shape."""
        self.context.emit.alive()
        shape = self._shapes.get(point.m)
        p = self._problem(shape or SpecShape(like.id, {**like.key, "M": point.m}))
        today = self.seeds.today(p.m, p.n, p.k, p.batch)
        config = config_of(today.values)
        candidates = self._candidates(p, config) if fixed is None else list(dict.fromkeys([config, fixed]))
        always = frozenset(candidates.index(c) for c in (config, fixed) if c)
        task = self.context.task(shape or like, p, candidates, always, quiet=shape is None)
        made = PointTask(point, shape, p, today, config, task)
        self._put_first(made)
        return made

    def _problem(self, shape: SpecShape) -> KindProblem:
        return problem_of(self._source.name, self._family, dict(shape.key), self.context.target.gfx)

    def _first(self, p: KindProblem, today: AiterConfig) -> list[AiterConfig]:
        """Today's config, then the seeds."""
        return list(dict.fromkeys([today, *self.seeds.of(p.m, p.n, p.k, p.batch)]))

    def _candidates(self, p: KindProblem, today: AiterConfig) -> list[AiterConfig]:
        """Today's config and the seeds, then legal ones by the model."""
        first = self._first(p, today)
        most = self._options.max_candidates or (FAST_LIST if self._options.search != EXHAUSTIVE else 0)
        rest = self._source.candidates(p, self.context.target, first, most)
        return space.distinct([*first, *rest], p, self._source.completed(p))


def refuse(context: SearchContext, shape: SpecShape, why: str) -> None:
    """Settle a shape that cannot be searched."""
    context.emit.started(shape.id)
    context.emit.failed(shape.id, "unsupported", why)


def shape_name(key: Mapping[str, int | str]) -> str:
    """A shape's key columns as one text: `16x1280x8192xtorch.bfloat16x...`."""
    return "x".join(map(str, key.values()))


FINALISTS = 3  # of each M so many leaders are measured at all M of the bucket


@dataclass(frozen=True, slots=True)
class Timed:
    """Time of a config at one M, its errRatio, and the spread of the samples."""

    us: float
    err: float
    spread: float


@dataclass(slots=True)
class PointTask:
    """An M of a bucket: its shape (None for a bound that is none of the workload's), and what is searched there."""

    point: Point
    shape: SpecShape | None
    problem: KindProblem
    today: Resolved
    config_today: AiterConfig
    task: ShapeTask
    times: dict[str, Timed] = field(default_factory=dict)  # final times by the config's name
    rounds: int = 0

    @property
    def old_us(self) -> float:
        """Time of today's config, -1 where it does not run."""
        return self.us(self.config_today.name)

    def us(self, name: str) -> float:
        """Time of a config, -1 where it has none."""
        return self.times[name].us if name in self.times else -1.0


class BucketSearch:
    """One bucket. `run` settles each of its shapes."""

    def __init__(self, file: FileSearch, name: str, tasks: Sequence[PointTask], following: Sequence[ShapeTask]) -> None:
        """`tasks`: the workload's M before other ones. `following`: what is compiled ahead. A bucket of `file.default`
        gets that config whatever is measured; who merges it decides."""
        self._file, self._context, self._name, self._following = file, file.context, name, following
        self._tasks, self._fixed = list(tasks), file.default.get(name)
        self._alone = len(self._tasks) == 1 and self._fixed is None
        self._configs: dict[str, AiterConfig] = {}
        self._in_flight: SpecShape | None = None

    def run(self, prior: CandidateRanker | None = None) -> CandidateRanker | None:
        """Search, compare, decide, settle. `prior`: what an earlier bucket's search learned; returns this one's."""
        there: list[PointTask] = []
        for i, t in enumerate(self._tasks):
            self._start(t)
            if prior is not None:
                t.task.ranker.learn(prior)
            search = Search(self._context, t.task, [*(o.task for o in self._tasks[i + 1 :]), *self._following])
            search.measure()
            if not search.found:
                self._fail(t, *search.why_none())
                continue
            prior = t.task.ranker
            there.append(t)
            self._take_leaders(t, search)
        if not self._alone and any(t.shape for t in there):
            there = [t for t in there if self._compare(t)]
        if any(t.shape for t in there):
            self._settle(there)
        return prior

    def _start(self, t: PointTask) -> None:
        if t.shape is None:
            return  # measured with the last shape in flight
        if self._in_flight is not None:
            self._context.emit.parked(self._in_flight.id)
        self._context.emit.started(t.shape.id)
        self._in_flight = t.shape

    def _fail(self, t: PointTask, reason: str, detail: str) -> None:
        if t.shape is not None:
            self._context.emit.failed(t.shape.id, reason, detail)
            self._in_flight = None if self._in_flight is t.shape else self._in_flight

    def _take_leaders(self, t: PointTask, search: Search) -> None:
        """The fastest of one M, and its config of today; where the bucket has no other M they are ranked at once."""
        found = search.found
        order = sorted(found, key=lambda i: found[i].us)
        finalists = search.leaders() if self._alone else list(dict.fromkeys([*search.leaders(), *order]))[:FINALISTS]
        mine: list[Any] = [*(t.task.candidates[i] for i in finalists), t.config_today]
        if self._fixed is not None:
            both = (t.config_today, self._fixed)
            mine = [replace(c, caller=caller) for caller in ("", *self._file.callers) for c in both]
        for c in mine:
            self._configs.setdefault(c.name, c)
        if self._alone:
            self._rank(t, search, set(finalists), t.task)

    def _compare(self, t: PointTask) -> bool:
        """All finalists at one M, interleaved; True where some are right."""
        configs = list(self._configs.values())
        every = frozenset(range(len(configs)))
        task = self._context.task(t.task.shape, t.problem, configs, every, quiet=True, estimated=False)
        search = Search(self._context, task, self._following)
        search.measure()
        for why in search.failures:
            print(f"gemmfleet: {self._name}, M={t.point.m}: {clean(why, 300)}", flush=True)
        self._rank(t, search, set(search.found), task)
        if not t.times:  # all were wrong when looked at again
            self._fail(t, *search.why_none())
        return bool(t.times)

    def _rank(self, t: PointTask, search: Search, indexes: set[int], task: ShapeTask) -> None:
        """Times of these and today's at one M, one sample of each a round."""
        names = [c.name for c in task.candidates]
        wanted = indexes | {names.index(t.config_today.name)}
        ranked = search.ranked(sorted(wanted))
        for i, m in search.found.items():
            if i in wanted:
                t.times[names[i]] = Timed(m.us, search.errs[i], m.spread)
        if ranked is not None:
            v, t.rounds = ranked.ranking, ranked.ranking.rounds
            for i, us, spread in zip(ranked.indexes, v.us, v.spread, strict=True):
                t.times[names[i]] = Timed(us, search.errs[i], spread)

    def _settle(self, there: Sequence[PointTask]) -> None:
        """Choose, and settle every shape with the bucket's config."""
        own = {name for name, c in self._configs.items() if not c.caller}
        us = {t.point.m: {name: timed.us for name, timed in t.times.items() if name in own} for t in there}
        winner, harmful = best([t.point for t in there], us, {t.point.m: t.config_today.name for t in there})
        if self._fixed is not None:
            winner = self._fixed.name if all(self._fixed.name in t.times for t in there) else ""
        for name in harmful:
            where = ", ".join(f"M={t.point.m} {t.us(name):.4g} us (today's {t.old_us:.4g})" for t in there)
            print(f"gemmfleet: {self._name}: {name} is rejected, it slows an M down: {where}", flush=True)
        for t in there:
            if t.shape is None:
                continue
            name = winner or (t.config_today.name if self._fixed is None else self._fixed.name)
            if name not in t.times:
                detail = f"no config is right at every M of {self._name}, and {name} is not at {t.point.m}"
                self._context.emit.failed(t.shape.id, "no_candidate", detail)
                continue
            c, timed = self._configs[name], t.times[name]
            old = f"today's {t.old_us:.4g} us" if t.old_us > 0 else "today's does not run"
            detail = f"{self._name}: {timed.us:.4g} us, {old}{'' if winner else '; left as it is'}"
            won = row(c, t.problem, "ok", timed.us, timed.err, timed.spread, t.rounds, detail)
            self._file.seeds.won(t.problem, c)
            self._context.emit.tuned(t.shape.id, dict(won, triton_config=self._document(winner, t, there)))
        self._in_flight = None

    def _document(self, winner: str, t: PointTask, there: Sequence[PointTask]) -> str:
        """Document of the bucket for its config file, as JSON: the winner's values (null: today's stay), and for this M
        and those that are no shape's, through each operator that computes it, [M, count, today's us, winner's us,
        errRatio, place of today's values in `old`, operator ("": the wrapper)].
        """
        mine = [t, *(o for o in there if o.shape is None)]
        old = [o.today.values for o in mine]
        distinct = [v for i, v in enumerate(old) if v not in old[:i]]
        values = self._configs[winner].values if winner else None
        points = []
        for o, caller in itertools.product(mine, ("", *self._file.callers)):
            new = o.times.get(replace(self._configs[winner], caller=caller).name) if winner else None
            if new or not caller:
                points.append([
                    o.point.m, o.point.weight, round(o.us(replace(o.config_today, caller=caller).name), 4),
                    round(new.us if new else -1.0, 4), new.err if new else 1.0, distinct.index(o.today.values), caller,
                ])  # fmt: skip
        document = {**self._file.facts, "bucket": self._name, "values": values, "old": distinct, "points": points}
        return json.dumps(document, separators=(",", ":"))


class AiterTritonTuner(SearchTuner):
    """Measures configs of AITER's Triton GEMMs on the first GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._tree: Tree  # since `open`
        self._kind: ConfigKind
        self._seeds: Seeds | None = None

    def open(self) -> dict[str, Any]:
        """As the search's; also AITER's tree. NoDeviceError where there is no GPU, or no tree."""
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
        for shapes in _by_file(spec.shapes):
            FileSearch(context, options, source, seeds, spec.family).run(shapes)


def _by_file(shapes: Sequence[SpecShape]) -> list[list[SpecShape]]:
    """The shapes of each config file: those that differ in M alone."""
    out: dict[tuple[tuple[str, int | str], ...], list[SpecShape]] = {}
    for shape in shapes:
        out.setdefault(tuple((k, v) for k, v in shape.key.items() if k != "M"), []).append(shape)
    return list(out.values())
