"""The tuner `aiter-triton` as the worker sees it: the search of the tuner `triton`, over configs of AITER's wrappers.

The shapes of a group fall into buckets of M; a bucket gets one config. Each of its M (the workload's and the bucket's
bound) is searched, the leaders of all and today's config are then measured at every one of them, interleaved, and the
policy of buckets.py decides. Rows carry what a config file needs (`triton_config`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from worker.aiter_tree.locate import NotATreeError, Tree, choose
from worker.protocol import Spec, SpecShape
from worker.protocol.environment import AITER_ROOT_ENV
from worker.triton_configs.files import ConfigFileError
from worker.triton_configs.kinds import ConfigKind
from worker.triton_configs.resolve import ResolveError
from worker.tuners.aiter_triton.bucket_search import BucketSearch
from worker.tuners.aiter_triton.buckets import BucketWork, plan
from worker.tuners.aiter_triton.seeds import Seeds
from worker.tuners.aiter_triton.spec import Options, kind_of
from worker.tuners.aiter_triton.tasks import TaskMaker
from worker.tuners.common.problem import UnsupportedError
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
            self._tree = choose(options.root or os.environ.get(AITER_ROOT_ENV, ""), search=None)[0]
        except NotATreeError as e:
            raise NoDeviceError(f"the tuner aiter-triton: {e}") from e
        return serve, (str(self._tree.root), self._kind().name), compile_job

    def about(self, opened: Opened) -> dict[str, str]:
        folder = self._tree.package / "ops" / "triton"
        digest = hashlib.sha256(self._kind().name.encode())
        for path in sorted((*folder.glob("gemm/**/*.py"), *folder.glob("_triton_kernels/**/*.py"))):
            digest.update(path.read_bytes())
        return about(opened, digest.hexdigest()[:16])

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
        making = TaskMaker(context, context.options, self._kind(), self._entered(context), seeds, str(self._tree.root))
        buckets = self._buckets(spec, context, making)
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

    def _buckets(self, spec: Spec, context: SearchContext, making: TaskMaker) -> list[BucketWork]:
        """The buckets of the shapes that can be searched; the others are settled at once."""
        names: dict[int, str] = {}
        for shape in spec.shapes:
            context.emit.alive()
            try:
                m, bucket = making.add(shape, spec.family)
                names[m] = bucket
            except (UnsupportedError, ResolveError, ConfigFileError, OSError) as e:
                self._refuse(context, shape, str(e))
        counts = dict(making.options.counts)
        weights = {m: counts.get(_name(making.shapes[m].key), 1.0) for m in names}
        return plan(weights, names)

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


def _name(key: Mapping[str, int | str]) -> str:
    """A shape as `counts` names it."""
    return "x".join(map(str, key.values()))
