"""One bucket's config: a search at each of its M, then the leaders of all and today's config at every M, interleaved.

The first M's search teaches the others (their estimates, and what compiles). A shape is parked while the others of its
bucket are measured; the bucket's verdict settles them all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.protocol import ConfigRow, SpecShape
from worker.triton_configs.resolve import Resolved
from worker.tuners.aiter_triton.buckets import Point, best
from worker.tuners.aiter_triton.config import AiterConfig
from worker.tuners.aiter_triton.problem import KindProblem
from worker.tuners.common.rows import short
from worker.tuners.triton.candidate_ranker import CandidateRanker, StopRules
from worker.tuners.triton.search import CompileJob, Search, SearchContext, ShapeTask, row

FINALISTS = 3
"""Of each M so many leaders are measured at all M of the bucket."""


@dataclass(slots=True)
class PointTask:
    """An M of a bucket: its shape (None for a bound that is none of the workload's), and what is searched there."""

    point: Point
    shape: SpecShape | None
    problem: KindProblem
    today: Resolved
    config_today: AiterConfig
    task: ShapeTask
    job_of: Callable[[AiterConfig], CompileJob]
    us: dict[str, float] = field(default_factory=dict)
    """Final times by the config's name."""
    errs: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    rounds: int = 0


class BucketSearch:
    """One bucket. `run` settles each of its shapes."""

    def __init__(
        self, context: SearchContext, name: str, tasks: Sequence[PointTask], following: Sequence[ShapeTask],
        facts: Mapping[str, Any], fixed: AiterConfig | None = None,
    ) -> None:  # fmt: skip
        """`tasks`: the workload's M before other ones. `following`: what is compiled ahead. `facts` go into rows.
        `fixed`: the config that the bucket gets whatever is measured; who merges it decides."""
        self._context, self._name, self._facts = context, name, facts
        self._tasks, self._following, self._fixed = list(tasks), list(following), fixed
        self._configs: dict[str, AiterConfig] = {}
        self._in_flight: SpecShape | None = None

    def run(self) -> None:
        """Search, compare, decide, settle."""
        there: list[PointTask] = []
        prior: CandidateRanker | None = None
        for i, t in enumerate(self._tasks):
            self._start(t)
            if prior is not None:
                t.task.ranker.learn(prior)
            search = Search(self._context, t.task, [*(o.task for o in self._tasks[i + 1 :]), *self._following])
            search.measure()
            if search.refused or not search.found:
                self._fail(t, *(("unsupported", search.refused) if search.refused else search.why_none()))
                continue
            prior = t.task.ranker
            there.append(t)
            self._take_leaders(t, search)
        if not any(t.shape for t in there):
            return
        if len(self._tasks) > 1:
            there = [t for t in there if self._compare(t)]
        if any(t.shape for t in there):
            self._settle(there)

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
        for i in [*search.leaders(), *order][:FINALISTS]:
            self._note(t.task.candidates[i])
        self._note(t.config_today)
        if self._fixed is not None:
            self._note(self._fixed)
        if len(self._tasks) == 1:
            self._rank(t, search, set(search.leaders()))

    def _note(self, c: Any) -> None:
        self._configs.setdefault(c.name, c)

    def _compare(self, t: PointTask) -> bool:
        """All finalists at one M, interleaved; True where some are right."""
        configs = list(self._configs.values())
        ranker = CandidateRanker([1.0] * len(configs), [c.features for c in configs], StopRules(all=True))
        shape = t.shape or (self._in_flight or t.task.shape)
        jobs = [t.job_of(c) for c in configs]
        task = ShapeTask(shape, t.problem, configs, jobs, ranker, frozenset(range(len(configs))), quiet=True)
        search = Search(self._context, task, self._following)
        search.measure()
        if search.refused or not search.found:
            self._fail(t, *(("unsupported", search.refused) if search.refused else search.why_none()))
            return False
        self._rank(t, search, set(search.found), task)
        return bool(t.us)

    def _rank(self, t: PointTask, search: Search, indexes: set[int], task: ShapeTask | None = None) -> None:
        """Times of these and today's at one M, one sample of each a round."""
        task = task or t.task
        names = [c.name for c in task.candidates]
        today = names.index(t.config_today.name) if t.config_today.name in names else -1
        ranked = None
        while ranked is None and (left := [i for i in sorted(indexes | {today}) if i in search.found]):
            ranked = search.ranked(left)
        for i, m in search.found.items():
            if i in indexes or i == today:
                t.us[names[i]], t.spread[names[i]] = m.us, m.spread
                t.errs[names[i]] = search.errs[i]
        if ranked is not None:
            t.rounds = ranked.ranking.rounds
            for i, us, spread in zip(ranked.indexes, ranked.ranking.us, ranked.ranking.spread, strict=True):
                t.us[names[i]], t.spread[names[i]] = us, spread

    def _settle(self, there: Sequence[PointTask]) -> None:
        """Choose, and settle every shape with the bucket's config."""
        points = [t.point for t in there]
        us = {t.point.m: t.us for t in there}
        today = {t.point.m: t.config_today.name for t in there}
        winner, harmful = best(points, us, today)
        if self._fixed is not None:
            winner = self._fixed.name if all(self._fixed.name in t.us for t in there) else ""
        for name in harmful:
            print(f"gemmfleet: {self._name}: {name} is rejected: {_harm(name, there)}", flush=True)
        for t in there:
            if t.shape is None:
                continue
            name = winner or (t.config_today.name if self._fixed is None else self._fixed.name)
            if name not in t.us:
                detail = f"no config is right at every M of {self._name}, and {name} is not at {t.point.m}"
                self._context.emit.failed(t.shape.id, "no_candidate", detail)
                continue
            c = self._configs[name]
            detail = f"{self._name}: {_against(t, name)}{'' if winner else '; left as it is'}"
            won = row(c, t.problem, "ok", t.us[name], t.errs[name], t.spread[name], t.rounds, short(detail))
            self._context.store.won(t.problem.family, t.problem.group_name, t.point.m, name, t.us[name])
            self._context.emit.tuned(t.shape.id, ConfigRow(**won, triton_config=self._document(winner, t, there)))
        self._in_flight = None

    def _document(self, winner: str, t: PointTask, there: Sequence[PointTask]) -> str:
        """What a config file needs of the bucket, as JSON: the winner's values (null: today's stay), and for this M and
        for those that are no shape's [M, count, today's us, winner's us, errRatio, place of today's values in `old`].
        """
        mine = [t, *(o for o in there if o.shape is None)]
        old = [o.today.values for o in mine]
        distinct = [v for i, v in enumerate(old) if v not in old[:i]]
        points = [
            [
                o.point.m, o.point.weight, round(o.us.get(o.config_today.name, -1.0), 4),
                round(o.us[winner], 4) if winner else -1.0, o.errs.get(winner, 1.0), distinct.index(o.today.values),
            ]
            for o in mine
        ]  # fmt: skip
        values = self._configs[winner].values if winner else None
        document = {**self._facts, "bucket": self._name, "values": values, "old": distinct, "points": points}
        return json.dumps(document, separators=(",", ":"))


def _against(t: PointTask, name: str) -> str:
    """`11.2 us, today's 13.4 us`."""
    old = t.us.get(t.config_today.name)
    return f"{t.us[name]:.4g} us" + (f", today's {old:.4g} us" if old is not None else ", today's does not run")


def _harm(name: str, there: Sequence[PointTask]) -> str:
    """Where a config is slower than today's."""
    parts = []
    for t in there:
        old = t.us.get(t.config_today.name)
        if old is not None and name in t.us:
            parts.append(f"M={t.point.m} {t.us[name]:.4g} us, today {old:.4g} us")
    return "; ".join(parts)
