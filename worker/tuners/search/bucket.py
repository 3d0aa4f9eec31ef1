"""Points that get one config: each is searched, then the leaders of all and today's configs are measured at every
point, interleaved, and one is chosen for all of them.

A shape is parked while the others of its bucket are measured; the bucket's verdict settles them all.
"""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from worker.protocol import Row, SpecShape
from worker.text import clean
from worker.triton_configs.resolve import slower
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.search.model import CandidateRanker
from worker.tuners.search.search import Search, SearchContext, ShapeTask, row
from worker.tuners.search.source import EXHAUSTIVE, KernelSource
from worker.tuners.search.tiles import Seeds, TileConfig

GAIN = 0.005  # We change a file only if the cost is better by at least this share
FAST_LIST = 600  # most candidates of the fast search, beside the seeds
FINALISTS = 3  # this many leaders of each point are measured at all points of the bucket


@dataclass(frozen=True, slots=True)
class Point:
    """A call at which configs are measured. `weight`: calls of the workload, 0 for a point that it does not have.
    `label`: what else than M tells it from others, such as the routing of a mixture of experts."""

    m: int
    weight: float
    label: str = ""


# (points, a config's us at each, the least us at each) -> what the winner has the least of
Cost = Callable[[Sequence[Point], Sequence[float], Sequence[float]], float]


def weighted_sum(points: Sequence[Point], us: Sequence[float], least: Sequence[float]) -> float:
    """Time of the workload's calls; of all points where none is the workload's."""
    weights = [p.weight if any(q.weight for q in points) else 1.0 for p in points]
    return sum(w * t for w, t in zip(weights, us, strict=True) if w)


def worst_regret(points: Sequence[Point], us: Sequence[float], least: Sequence[float]) -> float:
    """The largest ratio to the fastest config of a point."""
    return max(t / best for t, best in zip(us, least, strict=True))


def best(
    points: Sequence[Point], us: Sequence[Mapping[str, float]], today: Sequence[str],
    high: Sequence[Mapping[str, float]] = (), cost: Cost = weighted_sum,
) -> tuple[str, list[str]]:  # fmt: skip
    """(the winner, configs that beat it but slow a point down); "" as the winner keeps what is there.

    By point: `us[i][config]` in microseconds, today's among them as far as it runs; `today[i]`: its config; `high`:
    what a config's time may be at most beside today's, where the noise is to count against it. The winner has the least
    cost of those that were measured everywhere, are faster than today's at a point and slower at none; and it improves
    on today's cost.
    """
    everywhere = set.intersection(*(set(u) for u in us))
    beside = [(u.get(old), h, old) for u, h, old in zip(us, high or us, today, strict=True)]
    harmful = {
        c for c in everywhere for was, h, old in beside if was is not None and c != old and slower(was, h[c])
    }  # fmt: skip
    faster = {c for c in everywhere for was, h, _ in beside if was is None or h[c] < was}
    least = [min(u.values(), default=math.inf) for u in us]

    def cost_of(names: Sequence[str]) -> float:
        return cost(points, [u.get(n, math.inf) for u, n in zip(us, names, strict=True)], least)

    costs = {c: cost_of([c] * len(us)) for c in sorted(everywhere)}
    winner = min((everywhere & faster) - harmful, key=lambda c: (costs[c], c), default="")
    if winner and costs[winner] >= (1 - GAIN) * cost_of(today):
        winner = ""
    best_cost = costs[winner] if winner else cost_of(today)
    return winner, [c for c in costs if c in harmful and costs[c] < best_cost]


@dataclass(frozen=True, slots=True)
class Timed:
    """Time of a config at one point, its errRatio, and the spread of the samples. `high_us`: today's time there times
    the upper end of the 95 % interval of the ratio to it, where they were measured side by side."""

    us: float
    err: float
    spread: float
    high_us: float


@dataclass(slots=True)
class PointTask:
    """A point of a bucket. `shape`: the one of its M, or that in whose name it is measured. `old`: the config that it
    has now; `search`: None where it is only compared."""

    point: Point
    shape: SpecShape
    problem: Any
    old: TileConfig
    search: ShapeTask | None = None
    leaders: list[TileConfig] = field(default_factory=list)  # what was kept of its search
    times: dict[str, Timed] = field(default_factory=dict)  # final times by the config's name
    rounds: int = 0

    @property
    def old_us(self) -> float:
        """Time of today's config, -1 where it does not run."""
        return self.us(self.old.name)

    def us(self, name: str) -> float:
        """Time of a config, -1 where it has none."""
        return self.times[name].us if name in self.times else -1.0


def by_file(shapes: Sequence[SpecShape], m: str = "M") -> list[list[SpecShape]]:
    """The shapes of each config file: those that differ in M (the column `m`) alone."""
    out: dict[tuple[tuple[str, int | str], ...], list[SpecShape]] = {}
    for shape in shapes:
        out.setdefault(tuple((k, v) for k, v in shape.key.items() if k != m), []).append(shape)
    return list(out.values())


def shape_name(key: Mapping[str, int | str]) -> str:
    """A shape's key columns as one text: `16x1280x8192xtorch.bfloat16x...`."""
    return "x".join(map(str, key.values()))


class FileSearch(ABC):
    """The search for one config file, whose shapes differ in M only, bucket by bucket. While one is searched, what the
    next one needs is compiled.

    One shape is in flight. Every other one that was started is parked or settled.
    """

    callers: Sequence[str] = ()  # other operators that configs are measured through

    def __init__(self, context: SearchContext, source: KernelSource, seeds: Seeds, facts: Mapping[str, Any]) -> None:
        """`facts`: what is the same in all documents."""
        self.context, self.source, self.seeds, self.facts = context, source, seeds, facts
        self.shapes: dict[int, SpecShape] = {}  # those that can be searched, by their M
        self.settled: set[int] = set()
        self._flying: SpecShape | None = None
        self.prior: CandidateRanker | None = None  # of the latest search

    @abstractmethod
    def add(self, shape: SpecShape) -> None:
        """Take a shape. Raises UnsupportedError, ValueError, OSError."""

    @abstractmethod
    def buckets(self) -> Iterator[BucketSearch]:
        """The buckets of all shapes, with a search at each of their points."""

    @abstractmethod
    def tune(self, bucket: BucketSearch, following: Sequence[ShapeTask]) -> None:
        """Search a bucket."""

    def run(self, shapes: Sequence[SpecShape]) -> None:
        """Search the buckets of these shapes, and settle every shape."""
        for shape in shapes:
            self.context.emit.alive()
            try:
                self.add(shape)
            except (UnsupportedError, ValueError, OSError) as e:
                refuse(self.context, shape, str(e))
        end: list[Any] = [None]
        for bucket, then in itertools.pairwise(itertools.chain(self.buckets(), end)):
            for t in bucket.points:  # winners of the buckets before are known by now
                self._put_first(t, self._first(t))
            self.tune(bucket, searches(then.points) if then else [])

    def weight(self, m: int) -> float:
        """Calls of the workload at an M."""
        shape = self.shapes.get(m)
        return dict(self.context.options.counts).get(shape_name(shape.key), 1.0) if shape else 0.0

    def task(self, t: PointTask, fixed: Sequence[TileConfig] = (), *, quiet: bool = False) -> PointTask:
        """A point with its search: today's config and the seeds, then legal configs by the model; or only `fixed`."""
        self.context.emit.alive()
        options, first = self.context.options, self._first(t)
        space, candidates = self.source.space(t.problem, self.context.target), list(dict.fromkeys(fixed))
        if not fixed:
            most = options.max_candidates or (FAST_LIST if options.search != EXHAUSTIVE else 0)
            candidates = space.distinct([*first, *space.candidates(first, most)])
        always, us = frozenset(candidates.index(c) for c in (fixed or [t.old])), list(map(space.estimate, candidates))
        t.search = self.context.task(t.shape, t.problem, candidates, always, us, quiet=quiet or not t.point.weight)
        self._put_first(t, first)
        return t

    def _first(self, t: PointTask) -> list[TileConfig]:
        """Today's config, then the seeds."""
        return list(dict.fromkeys([t.old, *self.seeds.of(t.problem)]))

    def _put_first(self, t: PointTask, first: Sequence[TileConfig]) -> None:
        """Have a search begin with these, as far as they are among its candidates."""
        assert t.search is not None
        at: dict[Any, int] = {c: i for i, c in enumerate(t.search.candidates)}
        t.search.ranker.first([at[c] for c in first if c in at])

    def start(self, t: PointTask) -> None:
        """Put a point's shape in flight. A point of no shape is measured with the last one in flight."""
        if not t.point.weight or t.shape is self._flying or t.shape.id in self.settled:
            return
        if self._flying is not None:
            self.context.emit.parked(self._flying.id)
        self.context.emit.started(t.shape.id)
        self._flying = t.shape

    def settle(self, t: PointTask, winner: Row | None, reason: str = "", detail: str = "") -> None:
        """Report the row of a point's shape, or why it has no row. Only the first verdict of a shape counts."""
        if not t.point.weight or t.shape.id in self.settled:
            return
        if winner is not None:
            self.context.emit.tuned(t.shape.id, winner)
        else:
            self.context.emit.failed(t.shape.id, reason, detail)
        self.settled.add(t.shape.id)
        self._flying = None if self._flying is t.shape else self._flying


def refuse(context: SearchContext, shape: SpecShape, why: str) -> None:
    """Settle a shape that cannot be searched."""
    context.emit.started(shape.id)
    context.emit.failed(shape.id, "unsupported", why)


def searches(points: Sequence[PointTask]) -> list[ShapeTask]:
    """The searches of points."""
    return [t.search for t in points if t.search]


class BucketSearch:
    """One bucket of points. `proven`: noise counts against a new config."""

    proven = False

    cost: Cost = staticmethod(weighted_sum)

    def __init__(
        self, file: FileSearch, name: str, points: Sequence[PointTask], facts: Mapping[str, Any], *,
        alone: bool = False,
    ) -> None:  # fmt: skip
        """`facts`: for its documents, beside the file's; `alone`: there is one point, whose leaders are ranked at
        once."""
        self.file, self.name, self.points, self.alone = file, name, list(points), alone
        self.facts, self.configs = facts, dict[str, TileConfig]()

    def document(self, winner: str, t: PointTask, there: Sequence[PointTask]) -> str:
        """The verdict for a point's row, as JSON (docs/reference/files.md): the winner's values (null: today's stay),
        and for this M and those that are no shape's, through each operator that computes it, [M, count, today's us, the
        winner's us, errRatio, place of today's values in `old`, label or operator ("": the usual one)]."""
        mine = [o for o in there if o.shape is t.shape or not o.point.weight]
        old = [o.old.values for o in mine]
        distinct = [v for i, v in enumerate(old) if v not in old[:i]]
        points = []
        for o, caller in itertools.product(mine, ("", *self.file.callers)):
            new = o.times.get(replace(self.configs[winner], caller=caller).name) if winner else None
            if new or not caller:
                points.append([
                    o.point.m, o.point.weight, round(o.us(replace(o.old, caller=caller).name), 4),
                    round(new.us, 4) if new else -1.0, round(new.err, 6) if new else 1.0,
                    distinct.index(o.old.values), o.point.label or caller,
                ])  # fmt: skip
        values = self.configs[winner].values if winner else None
        document = {**self.file.facts, **self.facts, "values": values, "old": distinct, "points": points}
        return json.dumps(document, separators=(",", ":"))

    def search(self, following: Sequence[ShapeTask]) -> None:
        """Search the points, and keep the leaders of each and its config of today. Each search teaches the next."""
        for i, t in enumerate(self.points):
            self.file.start(t)
            assert t.search is not None
            if self.file.prior is not None:
                t.search.ranker.learn(self.file.prior)
            search = Search(self.file.context, t.search, [*searches(self.points[i + 1 :]), *following])
            search.measure()
            found = search.found
            if not found:
                self.file.settle(t, None, *search.why_none())
                continue
            self.file.prior = t.search.ranker
            order = sorted(found, key=lambda i: found[i].us)
            finalists = search.leaders() if self.alone else list(dict.fromkeys([*search.leaders(), *order]))[:FINALISTS]
            leaders: list[Any] = [t.search.candidates[i] for i in finalists]
            t.leaders = self.kept(leaders, t)
            self.add(t)
            if self.alone:
                self._rank(t, search, set(finalists), t.search)

    def kept(self, leaders: list[TileConfig], t: PointTask) -> list[TileConfig]:
        """The configs that are compared for one that was searched."""
        return [*leaders, t.old]

    def add(self, t: PointTask) -> None:
        """Have what was kept of a point, or else its config of today, compared at all points."""
        for c in t.leaders or [t.old]:
            self.configs.setdefault(c.name, c)

    def comparison(self, t: PointTask) -> ShapeTask:
        """All finalists at one point."""
        configs = list(self.configs.values())
        every = frozenset(range(len(configs)))
        return self.file.context.task(t.shape, t.problem, configs, every, quiet=True)

    def compare(self, t: PointTask, following: Sequence[ShapeTask]) -> bool:
        """All finalists at one point, interleaved; True where some are right."""
        task = self.comparison(t)
        search = Search(self.file.context, task, following)
        search.measure()
        for why in search.failures:
            print(f"gemmfleet: {self.name}, M={t.point.m}: {clean(why, 300)}", flush=True)
        self._rank(t, search, set(search.found), task)
        if not t.times:  # all were wrong when looked at again
            self.file.settle(t, None, *search.why_none())
        return bool(t.times)

    def choose(self, there: Sequence[PointTask]) -> tuple[str, list[str]]:
        """Call `best` with the measurements of these points."""
        own = {name for name, c in self.configs.items() if not c.caller}
        times = [{n: x for n, x in t.times.items() if n in own} for t in there]
        us = [{n: x.us for n, x in found.items()} for found in times]
        high = [{n: x.high_us for n, x in found.items()} for found in times] if self.proven else ()
        return best([t.point for t in there], us, [t.old.name for t in there], high, self.cost)

    def settle(self, there: Sequence[PointTask]) -> None:
        """Choose, and settle every shape with the bucket's config."""
        if not any(t.point.weight for t in there):
            return
        winner, harmful = self.choose(there)
        for name in harmful:
            where = ", ".join(f"M={t.point.m} {t.us(name):.4g} us (today's {t.old_us:.4g})" for t in there)
            print(f"gemmfleet: {self.name}: {name} is rejected, it slows an M down: {where}", flush=True)
        for t in (t for t in there if t.point.weight):
            name = winner or self.kept_name(t)
            if name not in t.times:
                detail = f"no config is right at every M of {self.name}, and {name} is not at {t.point.m}"
                self.file.settle(t, None, "no_candidate", detail)
                continue
            c, timed = self.configs[name], t.times[name]
            old = f"today's {t.old_us:.4g} us" if t.old_us > 0 else "today's does not run"
            detail = f"{self.name}: {timed.us:.4g} us, {old}{'' if winner else '; left as it is'}"
            won = row(c, t.problem, "ok", timed.us, timed.err, timed.spread, t.rounds, detail)
            self.file.seeds.won(t.problem, c)
            self.file.settle(t, {**won, "triton_config": self.document(winner, t, there)})

    def kept_name(self, t: PointTask) -> str:
        """The config whose time a point's row has where nothing is changed."""
        return t.old.name

    def _rank(self, t: PointTask, search: Search, indexes: set[int], task: ShapeTask) -> None:
        """Times of these and today's at one point, one sample of each a round."""
        names = [c.name for c in task.candidates]
        today = names.index(t.old.name)
        wanted = indexes | {today}
        ranked = search.ranked(sorted(wanted), today if self.proven else None)
        found = {i: m for i, m in search.found.items() if i in wanted}
        t.times |= {names[i]: Timed(m.us, search.errs[i], m.spread, m.us) for i, m in found.items()}
        if ranked is None:
            return
        v, t.rounds = ranked.ranking, ranked.ranking.rounds
        old_us = dict(zip(ranked.indexes, v.us, strict=True)).get(today, 0.0)
        high = [old_us * ratio for ratio in v.high] or v.us
        for i, us, spread, most in zip(ranked.indexes, v.us, v.spread, high, strict=True):
            t.times[names[i]] = Timed(us, search.errs[i], spread, us if i == today else most)
