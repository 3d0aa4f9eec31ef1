"""The tuner `aiter-triton` as the worker sees it: the search of the tuner `triton`, over configs of AITER's wrappers.

The shapes of a group fall into buckets of M; a bucket gets one config. Each of its M (the workload's and the bucket's
bound) is searched, the leaders of all and today's config are then measured at every one of them, interleaved, and the
policy of buckets.py decides. Rows carry what a config file needs (`triton_config`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.protocol import Spec, SpecShape
from worker.protocol.environment import AITER_ROOT_ENV
from worker.triton_configs.files import ConfigFileError
from worker.triton_configs.kinds import ConfigKind
from worker.triton_configs.resolve import ResolveError
from worker.tuners.aiter_triton.bucket_search import BucketSearch
from worker.tuners.aiter_triton.seeds import Seeds
from worker.tuners.aiter_triton.spec import Options, kind_of, source_of
from worker.tuners.aiter_triton.tasks import TaskMaker
from worker.tuners.triton.measuring_process import NoDeviceError, Opened
from worker.tuners.triton.processes import Serve, Work
from worker.tuners.triton.search import SearchContext
from worker.tuners.triton.spec import Options as TritonOptions
from worker.tuners.triton.tuner import TritonTuner, about

if TYPE_CHECKING:
    from worker.tuners.aiter_triton.wrapper import Wrapper


class AiterTritonTuner(TritonTuner):
    """Measures configs of AITER's Triton GEMMs on the first GPU."""

    def __init__(self, serve: Serve | None = None) -> None:
        """`serve`: main function of the measuring process; tests have others."""
        super().__init__(serve)
        self._tree: Tree  # since `open`
        self._wrapper: Wrapper | None = None
        self._seeds: Seeds | None = None
        self._source = ""
        self._told = False

    def open(self) -> dict[str, Any]:
        """As the tuner triton's; also AITER's tree. NoDeviceError where there is no GPU, or no tree."""
        info = super().open()
        tree = {"root": str(self._tree.root), "version": self._tree.version, "commit": self._tree.commit}
        return {**info, "aiter": tree, "kind": self._kind().name}

    def parsed(self, raw: Mapping[str, Any]) -> Options:
        return Options.parse(raw)

    def processes(self, options: TritonOptions) -> tuple[Serve, tuple[Any, ...], Work]:
        from worker.tuners.aiter_triton.bench import serve
        from worker.tuners.aiter_triton.compile import compile_job

        assert isinstance(options, Options)
        try:
            self._tree = choose(options.root or os.environ.get(AITER_ROOT_ENV, ""))[0]
        except NotATreeError as e:
            raise NoDeviceError(f"the tuner aiter-triton: {e}") from e
        return serve, (str(self._tree.root), self._kind().name), compile_job

    def about(self, opened: Opened) -> dict[str, str]:
        self._source = source_of(self._tree.package / "ops" / "triton", self._kind().name)
        return about(opened, self._source)

    def search(self, spec: Spec, context: SearchContext) -> None:
        """Search the buckets of a group's shapes, and settle every shape."""
        assert isinstance(context.options, Options)
        arch = str(context.target.arch)
        try:
            self._seeds = seeds = self._seeds or Seeds(self._tree.root, arch, self._kind())
        except (ResolveError, ConfigFileError, OSError) as e:
            for shape in spec.shapes:
                self._refuse(context, shape, str(e))
            return
        options = self._ordered(context.options, context.target.gfx)
        making = TaskMaker(context, options, self._kind(), self._entered(context), seeds, str(self._tree.root))
        buckets = making.buckets(spec.shapes, spec.family, lambda shape, why: self._refuse(context, shape, why))
        facts = {"kind": self._kind().name, "arch": arch, **({"default": True} if context.options.default else {})}
        callers = [c.function for c in self._kind().callers if c.given is not None and c.reads_on(arch)]
        tasks, prior = making.tasks(buckets[0]) if buckets else [], None
        for i, bucket in enumerate(buckets):
            following = making.tasks(buckets[i + 1]) if i + 1 < len(buckets) else []
            ahead, fixed = [t.task for t in following], making.default.get(bucket.name)
            for t in tasks:
                making.put_first(t)  # winners of the bucket before it are known by now
            prior = BucketSearch(context, bucket.name, tasks, ahead, facts, making.won, fixed, callers).run(prior)
            tasks = following

    def _ordered(self, options: Options, gfx: str) -> Options:
        """The options, without an order that was made for another chip or kind; what differs is told once."""
        if options.order is None:
            return options
        assert self._measurer is not None
        assert self._measurer.opened is not None
        version = str(self._measurer.opened.info.get("triton", ""))
        here = {"kind": self._kind().name, "gfx": gfx, "triton": version, "source": self._source}
        about = options.order.about
        other = (about["kind"], about["gfx"]) != (here["kind"], gfx)
        if (differing := options.order.misfit(here)) and not self._told:
            does = "is left aside" if other else "is a weaker hint"
            print(f"gemmfleet: the order of candidates was made for {differing}: it {does}", flush=True)
        self._told = True
        return replace(options, order=None) if other else options

    def _refuse(self, context: SearchContext, shape: SpecShape, why: str) -> None:
        context.emit.started(shape.id)
        context.emit.failed(shape.id, "unsupported", why)

    def _entered(self, context: SearchContext) -> Wrapper:
        """AITER's wrapper in this process, which never touches the GPU."""
        from worker.tuners.aiter_triton.wrapper import Wrapper, enter

        if self._wrapper is None:
            enter(self._tree.root, context.target)
            self._wrapper = Wrapper(self._kind())
        return self._wrapper

    def _kind(self) -> ConfigKind:
        return kind_of(self.parsed(self._raw))
