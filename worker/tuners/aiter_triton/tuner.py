"""The tuner `aiter-triton` as the worker sees it: the search over configs of AITER's wrappers.

The shapes of a group fall into buckets of M; a bucket gets one config. Each of its M (the workload's and the bucket's
bound) is searched, the leaders of all and today's config are then measured at every one of them, interleaved, and the
policy of buckets.py decides. Rows carry what a config file needs (`triton_config`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.protocol import Spec, SpecShape
from worker.protocol.paths import AITER_ROOT_ENV
from worker.triton_configs.kinds import ConfigKind
from worker.triton_configs.resolve import ConfigFileError, ResolveError
from worker.tuners.aiter_triton.buckets import BucketSearch, Seeds, TaskMaker
from worker.tuners.aiter_triton.spec import Options, kind_of, source_of
from worker.tuners.search.measuring import NoDeviceError
from worker.tuners.search.search import SearchContext
from worker.tuners.search.tuner import SearchTuner

if TYPE_CHECKING:
    from worker.tuners.aiter_triton.source import AiterSource


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

        options, source, kind = context.options, context.source, self._kind
        assert isinstance(options, Options)
        assert isinstance(source, AiterSource)
        arch = str(context.target.arch)
        try:
            self._seeds = seeds = self._seeds or Seeds(self._tree.root, arch, kind)
        except (ResolveError, ConfigFileError, OSError) as e:
            for shape in spec.shapes:
                self._refuse(context, shape, str(e))
            return
        source.enter(context.target)
        facts = {"kind": kind.name, "arch": arch, **({"default": True} if options.default else {})}
        callers = [c.function for c in kind.callers if c.given is not None and c.reads_on(arch)]
        for shapes in _by_file(spec.shapes):
            making = TaskMaker(context, options, source, seeds)
            buckets = making.buckets(shapes, spec.family, lambda shape, why: self._refuse(context, shape, why))
            tasks, prior = making.tasks(buckets[0]) if buckets else [], None
            for i, bucket in enumerate(buckets):
                following = making.tasks(buckets[i + 1]) if i + 1 < len(buckets) else []
                ahead, fixed = [t.task for t in following], making.default.get(bucket.name)
                for t in tasks:
                    making.put_first(t)  # winners of the bucket before it are known by now
                prior = BucketSearch(context, bucket.name, tasks, ahead, facts, making.won, fixed, callers).run(prior)
                tasks = following

    def _refuse(self, context: SearchContext, shape: SpecShape, why: str) -> None:
        context.emit.started(shape.id)
        context.emit.failed(shape.id, "unsupported", why)


def _by_file(shapes: Sequence[SpecShape]) -> list[list[SpecShape]]:
    """The shapes of each config file: those that differ in M alone."""
    out: dict[tuple[tuple[str, int | str], ...], list[SpecShape]] = {}
    for shape in shapes:
        out.setdefault(tuple((k, v) for k, v in shape.key.items() if k != "M"), []).append(shape)
    return list(out.values())
