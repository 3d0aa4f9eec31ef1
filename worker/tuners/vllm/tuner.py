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
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.families import ENGINE, FAMILIES
from worker.protocol import Spec, SpecShape
from worker.protocol.paths import VLLM_ROOT_ENV
from worker.registry import parse_options
from worker.triton_configs.engine import Device, EngineError, device_here, unpack
from worker.triton_configs.keys import USUAL_KEYS, served
from worker.triton_configs.resolve import slower
from worker.tuners.search.bucket import (
    BucketSearch,
    FileSearch,
    Point,
    PointTask,
    by_file,
    weighted_sum,
    worst_regret,
)
from worker.tuners.search.measuring import NoDeviceError
from worker.tuners.search.search import SearchContext, ShapeTask
from worker.tuners.search.source import SearchOptions, known
from worker.tuners.search.tiles import NEAREST, Seeds, TileConfig, Values, away, config_of
from worker.tuners.search.tuner import SearchTuner
from worker.tuners.vllm.spec import FAMILIES as OF_VLLM
from worker.tuners.vllm.spec import NAME

if TYPE_CHECKING:
    from worker.tuners.vllm.source import EngineSource, LayerProblem

LAST = 8192  # the last key is measured up to here, as it serves every larger M
OWN_KEY, OWN_KEY_US = 1.01, 0.1  # an M is a key if its range's config takes longer there than its own best by both


class EngineSeeds(Seeds):
    """Configs that an engine has for a layer, and others that may be good for it."""

    def __init__(self, source: EngineSource) -> None:
        super().__init__()
        self.source, self._engine = source, source.engine()

    def sizes(self, p: LayerProblem) -> tuple[int, ...]:
        return (p.m, *_sizes(self._engine.file_name(p.layer)))

    def there(self, p: LayerProblem) -> list[TileConfig]:
        """Today's, its neighbours in the file, the default, those of the nearest files of this device."""
        table = self._engine.table(p.layer) or {}
        keys = sorted(table)
        near = min(range(len(keys)), key=lambda i: abs(keys[i] - p.m), default=0)
        found: list[Values] = [self._engine.config(p.layer, p.m)]
        found += [table[k] for k in (*keys[near + 1 : near + 2], *keys[max(0, near - 1) : near])]
        found.append(self.source.default(p))
        _, *sizes = self.sizes(p)
        others = sorted(self._others(p), key=lambda other: (away(sizes, other), other))
        found += [self._engine.config(self.source.sibling(p.layer, other), p.m) for other in others[:NEAREST]]
        return [config_of(values, ENGINE) for values in found]

    def _others(self, p: LayerProblem) -> set[tuple[int, ...]]:
        """Sizes in the names of the files that are there for other layers of the kind on this device."""
        head, mark, rest = self._engine.file_name(p.layer).partition(",device_name")
        pattern = re.sub(r"\d+", "*", head) + escape(mark + rest)
        return {_sizes(path.name) for folder in self._engine.folders(p.layer) for path in folder.glob(pattern)}


def _sizes(name: str) -> tuple[int, ...]:
    """Sizes in the name of a file."""
    return tuple(map(int, re.findall(r"\d+", name.partition(",device_name")[0])))


class EngineFile(FileSearch):
    """The search for one config file of vLLM's."""

    source: EngineSource

    def __init__(self, context: SearchContext, seeds: EngineSeeds, about: dict[str, Any]) -> None:
        """`about`: engine and device, for the rows."""
        super().__init__(context, seeds.source, seeds, about)
        self._problem: LayerProblem  # of any of the shapes
        self._searched: dict[Point, PointTask] = {}  # as far as something was right there
        self._keys = set(USUAL_KEYS)

    def add(self, shape: SpecShape) -> None:
        p = self.source.problem(self.context.options.family, shape.key, self.context.target.gfx)
        self.source.engine().config(p.layer, p.m)
        self._problem, self.shapes[p.m] = p, shape
        self.facts = {**self.facts, "layer": asdict(p.layer), "file": self.source.engine().file_name(p.layer)}

    def buckets(self) -> Iterator[RangeSearch]:
        """The usual ranges. Each is searched at the M of the workload that it serves, then at the key itself."""
        for key, (first, last) in served(USUAL_KEYS).items():
            ms = self._within(first, last)
            found = itertools.product(dict.fromkeys([*ms, key]), self.source.searched if ms else ())
            points = [
                self.task(self._point(m, label, self.shapes[ms[0]]), quiet=label != self.source.searched[0])
                for m, label in found
            ]
            if points:
                yield RangeSearch(self, points, key, first, last, alone=first == last and len(points) == 1)

    def tune(self, bucket: BucketSearch, following: Sequence[ShapeTask]) -> None:
        """Search a usual range. An M within becomes a key where the range's config loses, or at the key because of
        it. Then the ranges before it are settled."""
        assert isinstance(bucket, RangeSearch)
        ahead = [r.comparison(t) for r in self._final(bucket.first) for t in r.points]
        bucket.search([*ahead, *following])
        there = [t for t in bucket.points if t.leaders]
        self._searched |= {t.point: t for t in there}
        if len({t.point.m for t in there}) > 1:
            there = [t for t in there if bucket.compare(t, following)]
            winner = bucket.choose(there)[0] if there else ""
            # where M that are no keys keep the key from its own best, they part from it
            held = [fastest(t) for t in there if t.point.m == bucket.key and t.point.weight and loses(t, winner)]
            for name in (winner, *held):
                self._keys |= {t.point.m for t in there if loses(t, name)}
        for part in self._final(bucket.first if following else None):
            part.finish(following)

    def _within(self, first: int, last: int | None) -> list[int]:
        """The M of the workload in a range."""
        return [m for m in sorted(self.shapes) if first <= m and (last is None or m <= last)]

    def _final(self, before: int | None) -> list[RangeSearch]:
        """Ranges whose shapes are not settled, below an M from which on there may be further keys. Each begins with the
        results of the M that were searched."""
        out = []
        for key, (first, end) in served(self._keys).items():
            within, last = self._within(first, end), end or max(LAST, *self.shapes)
            if all(self.shapes[m].id in self.settled for m in within) or (before and (not end or end >= before)):
                continue
            ms = sorted({first, key, last, *within}, key=lambda m: (m not in self.shapes, m))
            points = [self._point(m, label, self.shapes[ms[0]]) for m in ms for label in self.source.labels]
            out.append(RangeSearch(self, points, key, first, last))
        return out

    def _point(self, m: int, label: str, named: SpecShape) -> PointTask:
        """A point. `named`: the shape in whose name it is measured if it is not a shape of the workload."""
        point, p = Point(m, self.weight(m), label), replace(self._problem, m=m, label=label)
        today = config_of(self.source.engine().config(p.layer, m), ENGINE)
        return self._searched.get(point) or PointTask(point, self.shapes.get(m, named), p, today)


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
        self, file: EngineFile, points: Sequence[PointTask], key: int, first: int, last: int | None, *,
        alone: bool = False,
    ) -> None:  # fmt: skip
        facts = {"key": key, "first": first, "last": last}
        super().__init__(file, f"M={first}..{last or ''}", points, facts, alone=alone)
        self.key, self.first = key, first
        self.cost = worst_regret if len(file.source.labels) > 1 else weighted_sum
        for t in points:
            self.add(t)

    def finish(self, following: Sequence[ShapeTask]) -> None:
        """Compare, decide, settle. The ends are only measured if a new config wins at the workload's own M, and without
        the configs that were slower there."""
        there: list[PointTask] = []
        for i, t in enumerate(self.points):
            if t.point.weight and t.shape.id in self.file.settled:
                continue
            if there and not any(p.point.weight for p in self.points[i:]):
                if not super().choose(there)[0]:
                    break
                for name in self._slow(there):
                    self.configs.pop(name, None)
            self.file.start(t)
            if set(self.configs) <= set(t.times) or self.compare(t, following):
                there.append(t)
        self.settle(there)

    def _slow(self, there: Sequence[PointTask]) -> set[str]:
        """New configs that are slower than today's at one of these points."""
        found = {n for t in there for n, x in t.times.items() if t.old_us > 0 and slower(t.old_us, x.high_us)}
        return found - {t.old.name for t in self.points}

    def choose(self, there: Sequence[PointTask]) -> tuple[str, list[str]]:
        """Choose as the base does. Without a time at each point no winner is proven."""
        winner, harmful = super().choose(there)
        return winner if len(there) == len(self.points) else "", harmful


class EngineTuner(SearchTuner):
    """Measures configs of vLLM's Triton kernels on the first GPU."""

    parsed = staticmethod(partial(parse_options, SearchOptions, NAME))
    _facts: dict[str, Any]  # of all documents; since `open`, as the next
    _seeds: EngineSeeds

    def source(self) -> tuple[EngineSource, str]:
        from worker.tuners.vllm.moe import Moe  # they import torch
        from worker.tuners.vllm.source import Linear

        options, sources = self.parsed(self._raw), dict(zip(OF_VLLM, (Linear, Moe), strict=True))
        try:
            root = self._root(options)
            device, named_by = (_INTERPRETED, "") if os.environ.get("TRITON_INTERPRET") == "1" else device_here(root)
            source = sources[options.family](str(root), device)
            engine = source.engine()
        except EngineError as e:
            raise NoDeviceError(f"the tuner vllm: {e}") from e
        if engine.project != "vllm":
            raise NoDeviceError(f"the tuner vllm: {root} is {engine.project}, whose kernels are others")
        self._seeds, digest = EngineSeeds(source), engine.source_hash(source.op)
        of_engine = {"project": engine.project, "version": engine.version, "source": digest}
        self.about = {"engine": of_engine}
        self._facts = {**of_engine, "device": asdict(device), "named_by": named_by}
        return source, digest

    def search(self, spec: Spec, context: SearchContext) -> None:
        """Search the files of a group's shapes, and settle every shape."""
        self._seeds.source.enter(context.target)
        for shapes in by_file(spec.shapes, FAMILIES[spec.family].m_column):
            EngineFile(context, self._seeds, self._facts).run(shapes)

    def _root(self, options: SearchOptions) -> Path:
        """The package, or a folder that holds it. Raises EngineError."""
        named = options.root or os.environ.get(VLLM_ROOT_ENV, "")
        if not named:
            spec = importlib.util.find_spec("vllm")
            if spec is None or not spec.submodule_search_locations:
                raise EngineError("vLLM is not installed for this Python: name its folder or wheel, vllm: {root: ...}")
            return Path(spec.submodule_search_locations[0])
        root = Path(named)
        return unpack(root, self.cache / "engines" / self._place.slot / root.stem) if root.suffix == ".whl" else root


_INTERPRETED = Device(known(90).name, 90)
