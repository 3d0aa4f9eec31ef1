"""The tuner `vllm` as the worker sees it: the search for the config files of vLLM's Triton kernels, file by file.

A file maps M to configs by its keys. The usual keys that serve an M of the workload are searched, and so is each M of
the workload that is none; where the config that a range of M would get loses against the own best of such an M, that
becomes a key as well. Then the leaders of a range and today's configs are measured at both its ends, its key and every
M of the workload within, interleaved, and one is chosen or everything left as it is. While a range is searched, what
the comparison of the one before it needs is compiled. Rows carry what a config file needs (`triton_config`).
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.families import ENGINE, FAMILIES
from worker.protocol import Spec, SpecShape
from worker.protocol.paths import VLLM_ROOT_ENV
from worker.triton_configs.engine import Device, EngineError, Layer, device_here, unpack
from worker.triton_configs.keys import USUAL_KEYS, served
from worker.triton_configs.resolve import slower
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
from worker.tuners.search.source import SearchOptions, known
from worker.tuners.search.tiles import NEAREST, NEAREST_WON, TileConfig, Values, away, config_of
from worker.tuners.search.tuner import SearchTuner
from worker.tuners.vllm.spec import op_of, parse

if TYPE_CHECKING:
    from worker.tuners.vllm.source import EngineSource, LayerProblem

LAST = 8192  # the last key is measured up to here, as it serves every larger M
OWN_KEY, OWN_KEY_US = 1.01, 0.1  # an M is a key if its range's config takes longer there than its own best by both


class Seeds:
    """Configs that an engine has for a layer, and others that may be good for it."""

    def __init__(self, source: EngineSource) -> None:
        self._op, self._engine = source.op, source.engine()
        self._today: dict[tuple[Any, int], Values] = {}
        self._won: dict[tuple[int, ...], TileConfig] = {}  # winners of this run by (M, sizes in the file's name)

    def today(self, p: LayerProblem) -> Values:
        """The config of a launch now. Raises EngineError."""
        at = (p.layer, p.m)
        if at not in self._today:
            self._today[at] = self._engine.config(p.layer, p.m)
        return self._today[at]

    def won(self, p: LayerProblem, config: TileConfig) -> None:
        """Keep a winner for layers like it."""
        self._won[(p.m, *self._sizes(self.file_name(p.layer)))] = config

    def of(self, p: LayerProblem) -> list[TileConfig]:
        """Configs to try first: today's, its neighbours in the file, the default, those of the nearest files of this
        device, and winners of this run for the nearest layers."""
        table = self._engine.table(p.layer) or {}
        keys = sorted(table)
        near = min(range(len(keys)), key=lambda i: abs(keys[i] - p.m), default=0)
        found = [self.today(p), *(table[k] for k in (*keys[near + 1 : near + 2], *keys[max(0, near - 1) : near]))]
        found.append(self._op.default(self._engine, p))
        sizes = self._sizes(self.file_name(p.layer))
        others = sorted(self._others(p), key=lambda other: (away(sizes, other), other))
        found += [self._engine.config(self._op.sibling(p.layer, other), p.m) for other in others[:NEAREST]]
        won = sorted(self._won, key=lambda at: away(at, (p.m, *sizes)))[:NEAREST_WON]
        return list(dict.fromkeys([*(config_of(values, ENGINE) for values in found), *(self._won[at] for at in won)]))

    def file_name(self, layer: Layer) -> str:
        """The name of a layer's file."""
        return self._engine.file_name(layer)

    def _others(self, p: LayerProblem) -> set[tuple[int, ...]]:
        """Sizes in the names of the files that are there for other layers of the kind on this device."""
        head, mark, rest = self.file_name(p.layer).partition(",device_name")
        pattern = re.sub(r"\d+", "*", head) + escape(mark + rest)
        return {self._sizes(path.name) for folder in self._engine.folders(p.layer) for path in folder.glob(pattern)}

    @staticmethod
    def _sizes(name: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", name.partition(",device_name")[0])))


class FileSearch:
    """The search for one config file: its shapes differ in M only."""

    def __init__(self, context: SearchContext, source: EngineSource, seeds: Seeds, about: dict[str, Any]) -> None:
        """`about`: engine and device, for the rows."""
        self.context, self.seeds, self._about, self.flight = context, seeds, about, Flight(context.emit)
        self.op, self._counts, self._family = source.op, dict(context.options.counts), context.options.family
        self._shapes: dict[int, SpecShape] = {}  # shapes by their M
        self._problem: LayerProblem  # of any of them
        self._searched: dict[int, list[PointTask]] = {}  # by M, as far as something was right there
        self._keys = set(USUAL_KEYS)

    def run(self, shapes: Sequence[SpecShape]) -> None:
        """Search the ranges that serve these shapes, and settle every shape."""
        for shape in shapes:
            try:
                p = self._problem = self.op.problem(self._family, shape.key, self.context.target.gfx, "")
                self.seeds.today(p)
            except (UnsupportedError, EngineError) as e:
                refuse(self.context, shape, str(e))
            else:
                self._shapes[p.m] = shape
        works = [(key, first) for key, (first, last) in served(USUAL_KEYS).items() if self._within(first, last)]
        tasks, prior = self._tasks(works[0][0]) if works else [], None
        for i, (key, first) in enumerate(works):
            following = self._tasks(works[i + 1][0]) if i + 1 < len(works) else []
            for t in tasks:
                if t.search is not None:
                    put_first(t.search, self.seeds.of(t.problem))  # winners of the ranges before are known by now
            ahead = [r.comparison(t) for r in self._final(first) for t in r.points]
            prior = self._search(key, tasks, prior, [*ahead, *(t.search for t in following if t.search)])
            self._settle(self._final(first), following)
            tasks = following
        self._settle(self._final(None), [])

    @property
    def facts(self) -> dict[str, Any]:
        """The part of the rows that is the same for the whole file."""
        layer = self._problem.layer
        return {**self._about, "layer": asdict(layer), "file": self.seeds.file_name(layer)}

    def _within(self, first: int, last: int | None) -> list[int]:
        """The M of the workload in a range."""
        return [m for m in sorted(self._shapes) if first <= m and (last is None or m <= last)]

    def _search(
        self, key: int, tasks: Sequence[PointTask], prior: CandidateRanker | None, following: Sequence[ShapeTask]
    ) -> CandidateRanker | None:
        """Search the key of a usual range, and the M of the workload within; such an M becomes a key where the range's
        config loses there, or at the key because of it. Returns what was learned."""
        first, last = served(USUAL_KEYS)[key]
        part = RangeSearch(self, f"{first}..{last or ''}", tasks, alone=first == last and len(tasks) == 1)
        for i, t in enumerate(tasks):
            learned = part.search(t, prior, [*(o.search for o in tasks[i + 1 :] if o.search), *following])
            if learned is not None:
                prior = learned
                self._searched.setdefault(t.point.m, []).append(t)
        there = [t for t in tasks if t.leaders]
        if len({t.point.m for t in there}) > 1:
            there = [t for t in there if part.compare(t, following)]
            winner = part.choose(there)[0] if there else ""
            # where M that are no keys keep the key from its own best, they part from it
            held = [fastest(t) for t in there if t.point.m == key and t.shape is not None and loses(t, winner)]
            for name in (winner, *held):
                self._keys |= {t.point.m for t in there if loses(t, name)}
        return prior

    def _final(self, before: int | None) -> list[RangeSearch]:
        """Ranges whose shapes are not settled, below an M from which on there may be further keys."""
        out = []
        for key, (first, last) in served(self._keys).items():
            mine = [m for m in self._within(first, last) if not self.flight.is_settled(self._shapes[m])]
            if mine and (before is None or (last is not None and last < before)):
                out.append(self._range(key, first, last or max(LAST, *self._shapes)))
        return out

    def _range(self, key: int, first: int, last: int) -> RangeSearch:
        """The comparison of a range. It begins with the results of the M that were searched."""
        ms = sorted({first, key, last, *self._within(first, last)}, key=lambda m: (m not in self._shapes, m))
        known = {t.point: t for m in ms for t in self._searched.get(m, ())}
        named = self._shapes[ms[0]]
        points = [self._point(m, label, named, known) for m in ms for label in self.op.labels]
        return RangeSearch(self, f"{first}..{last}", points, key=key, first=first, last=last)

    def _tasks(self, key: int) -> list[PointTask]:
        """The searches for a usual key: first each M of the workload that the key serves, then the key itself."""
        within = self._within(*served(USUAL_KEYS)[key])
        points = itertools.product(dict.fromkeys([*within, key]), self.op.searched)
        tasks = [self._point(m, label, self._shapes[within[0]], {}) for m, label in points]
        for t in tasks:
            self.context.emit.alive()
            space = self.op.space(t.problem, self.context.target)
            t.search = task_of(self.context, t, space, self.seeds.of(t.problem))
            t.search.quiet |= t.point.label != self.op.searched[0]
        return tasks

    def _point(self, m: int, label: str, named: SpecShape, known: dict[Point, PointTask]) -> PointTask:
        shape = self._shapes.get(m)
        weight = self._counts.get(shape_name(shape.key), 1.0) if shape else 0.0
        point, p = Point(m, weight, label), self.op.at(self._problem, m, label)
        today = self.seeds.today(p)
        return known.get(point) or PointTask(point, shape, shape or named, p, today, config_of(today, ENGINE))

    def _settle(self, ranges: Sequence[RangeSearch], following: Sequence[PointTask]) -> None:
        for part in ranges:
            part.finish([t.search for t in following if t.search])


def loses(t: PointTask, winner: str) -> bool:
    """True where the config that a point would get is slower there than the best that was found for it."""
    us, best = t.us(winner or t.old.name), t.us(fastest(t))
    return us < 0 or us > max(OWN_KEY * best, best + OWN_KEY_US)


def fastest(t: PointTask) -> str:
    """The config that takes the least time at a point."""
    return min(t.times, key=lambda name: t.times[name].us)


class RangeSearch(BucketSearch):
    """A range of M that one entry serves."""

    proven = True

    def __init__(
        self, file: FileSearch, name: str, points: Sequence[PointTask], *, alone: bool = False, key: int = 0,
        first: int = 0, last: int = 0,
    ) -> None:  # fmt: skip
        self._file, self.points, self._key, self._first, self._last = file, list(points), key, first, last
        self.cost = file.op.cost
        super().__init__(file.context, file.flight, f"M={name}", file.seeds.won, alone=alone)
        for t in points:
            self.add(t)

    def finish(self, following: Sequence[ShapeTask]) -> None:
        """Compare, decide, settle. The ends are only measured if a new config wins at the workload's own M, and without
        the configs that were slower there."""
        there: list[PointTask] = []
        for i, t in enumerate(self.points):
            if t.shape is not None and self._flight.is_settled(t.shape):
                continue
            if there and not any(p.point.weight for p in self.points[i:]):
                if not super().choose(there)[0]:
                    break
                for name in self._slow(there):
                    self.configs.pop(name, None)
            self._flight.start(t.shape)
            if set(self.configs) <= set(t.times) or self.compare(t, following):
                there.append(t)
        if any(t.shape for t in there):
            self.settle(there)

    def _slow(self, there: Sequence[PointTask]) -> set[str]:
        """New configs that are slower than today's at one of these points."""
        found = {n for t in there for n, x in t.times.items() if t.old_us > 0 and slower(t.old_us, x.high_us)}
        return found - {t.old.name for t in self.points}

    def choose(self, there: Sequence[PointTask]) -> tuple[str, list[str]]:
        """Choose as the base does. Without a time at each point no winner is proven."""
        winner, harmful = super().choose(there)
        return winner if len(there) == len(self.points) else "", harmful

    def document(self, winner: str, t: PointTask, there: Sequence[PointTask]) -> str:
        """The range for its file, as JSON (docs/reference/files.md): the new values (null: today's stay), and for this
        M and those that are no shape's [M, count, today's us, new us, errRatio, place of today's values in `old`,
        label]."""
        mine = [o for o in there if o.shape in (None, t.shape)]
        old = [o.today for o in mine]
        distinct = [v for i, v in enumerate(old) if v not in old[:i]]
        points = []
        for o in mine:
            new = o.times[winner] if winner else None
            points.append([
                o.point.m, o.point.weight, round(o.old_us, 4), round(new.us, 4) if new else -1.0,
                round(new.err, 6) if new else 1.0, distinct.index(o.today), o.point.label,
            ])  # fmt: skip
        values = self.configs[winner].values if winner else None
        document = {
            **self._file.facts, "key": self._key, "first": self._first,
            "last": self._last, "values": values, "old": distinct, "points": points,
        }  # fmt: skip
        return json.dumps(document, separators=(",", ":"))


class EngineTuner(SearchTuner):
    """Measures configs of vLLM's Triton kernels on the first GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._about: dict[str, Any] = {}  # since `open`
        self._seeds: Seeds | None = None

    def open(self) -> dict[str, Any]:
        """Opens the search, and reports the engine, too. Raises NoDeviceError without a GPU or vLLM."""
        info = super().open()
        return {**info, "engine": {k: self._about[k] for k in ("project", "version", "source")}}

    def parsed(self, raw: Mapping[str, Any]) -> SearchOptions:
        return parse(raw)

    def source(self) -> tuple[EngineSource, str]:
        from worker.tuners.vllm.source import EngineSource  # here, as below: it imports torch

        options = self.parsed(self._raw)
        op = op_of(options)
        try:
            root = self._root(options)
            device, named_by = (_INTERPRETED, "") if os.environ.get("TRITON_INTERPRET") == "1" else device_here(root)
            source = EngineSource(str(root), device, op)
            engine = source.engine()
        except EngineError as e:
            raise NoDeviceError(f"the tuner vllm: {e}") from e
        if engine.project != "vllm":
            raise NoDeviceError(f"the tuner vllm: {root} is {engine.project}, whose kernels are others")
        self._about = {
            "project": engine.project, "version": engine.version, "source": engine.source_hash(op.name),
            "device": asdict(device), "named_by": named_by,
        }  # fmt: skip
        return source, self._about["source"]

    def search(self, spec: Spec, context: SearchContext) -> None:
        """Search the files of a group's shapes, and settle every shape."""
        from worker.tuners.vllm.source import EngineSource

        source = context.source
        assert isinstance(source, EngineSource)
        source.enter(context.target)
        self._seeds = seeds = self._seeds or Seeds(source)
        for shapes in by_file(spec.shapes, FAMILIES[spec.family].m_column):
            FileSearch(context, source, seeds, self._about).run(shapes)

    def _root(self, options: SearchOptions) -> Path:
        """The package, or a folder that holds it. Raises EngineError."""
        named = options.root or os.environ.get(VLLM_ROOT_ENV, "")
        if not named:
            spec = importlib.util.find_spec("vllm")
            places = list(spec.submodule_search_locations or ()) if spec else []
            if not places:
                raise EngineError("vLLM is not installed for this Python: name its folder or wheel, vllm: {root: ...}")
            return Path(places[0])
        root = Path(named)
        return unpack(root, self.cache / "engines" / self._place.slot / root.stem) if root.suffix == ".whl" else root


_INTERPRETED = Device(known(90).name, 90)
