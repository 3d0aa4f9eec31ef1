"""A tuner of Triton kernels as the worker sees it: the base of those that use the search engine.

The engine compiles candidates of a GEMM ahead, measures them on one GPU, and ranks the fastest. It knows no kernels:
these come from a kernel source (`source.py`), and `aiter-triton` is one. `SearchTuner` owns a pool of compile
processes and the process that owns the GPU. Its subclasses decide what to search, and how to settle shapes.

What outlives a run on a node is in its `KernelStore`.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from worker.device import own_cores
from worker.protocol import Spec
from worker.protocol.paths import CACHE_ENV
from worker.tuners.base import Emit, Place, TunerFault
from worker.tuners.common.helper_process import HelperError
from worker.tuners.search.compile_pool import CompilePool, CompileResult
from worker.tuners.search.kernel_store import KernelStore
from worker.tuners.search.measuring_process import MeasuringProcess
from worker.tuners.search.measuring_server import serve_measuring
from worker.tuners.search.messages import CallBench
from worker.tuners.search.options import SearchOptions
from worker.tuners.search.problem_search import SearchContext
from worker.tuners.search.source import KernelSource

CANARY_S = 120.0
"""Seconds until a canary has to answer."""


class SearchTuner(ABC):
    """Measures the candidates of a kernel source on the first GPU."""

    timed_canary_s = 0.5
    read_options: Callable[[Mapping[str, Any]], SearchOptions]  # options of a node or spec; raises ValueError

    def __init__(self) -> None:
        self._raw: Mapping[str, Any] = {}
        self._place = Place()
        self._source: KernelSource  # since `open`, as the next four
        self._pool: CompilePool
        self._measurer: MeasuringProcess
        self._store: KernelStore
        self._scratch: Path
        self._compiled: dict[str, CompileResult] = {}
        self.about: dict[str, Any] = {}  # what `open` reports of the kernels
        self._import_s = 0.0

    @abstractmethod
    def source(self) -> tuple[KernelSource, str]:
        """The kernels, and a hash of their sources; `about` is set. Raises NoDeviceError if there are no kernels, with
        the reason."""

    @abstractmethod
    def search(self, spec: Spec, context: SearchContext) -> None:
        """Search every shape of a spec, and settle it."""

    @property
    def cache(self) -> Path:
        """The folder of what outlives a run on the node."""
        return Path(os.environ.get(CACHE_ENV, "") or (self._place.node_dir or Path.cwd()) / "cache").absolute()

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        """The node's options. ValueError for bad ones."""
        self._raw = options
        self._place = place
        self.read_options(options)

    def open(self) -> dict[str, Any]:
        """Start the processes. gfx, cu_num, device, torch, triton, clock, compilers. NoDeviceError without a GPU."""
        start = time.perf_counter()
        options = self.read_options(self._raw)
        self._source, digest = self.source()
        # the device decides about the folder, so the process that opens it looks first
        self._measurer = MeasuringProcess(serve_measuring, {}, options.hang_s, (self._source,))
        device = self._measurer.restart()
        facts = ("device", "gfx", "cu_num", "triton", "torch", "cuda", "hip")
        about = {name: str(device.info[name]) for name in facts if device.info.get(name)}
        self._store = KernelStore(self.cache, {**about, "source": digest})
        self._store.prune()
        self._scratch = self._store.root / "tmp" / str(os.getpid())
        self._scratch.mkdir(parents=True, exist_ok=True)
        env = {
            "TRITON_CACHE_DIR": str(self._store.compiled),
            "TMPDIR": str(self._scratch),
            # else a megabyte of listings a kernel would be read whenever it is loaded
            "TRITON_STORE_BINARY_ONLY": "1",
        }
        self._measurer.set_environment(env)
        compilers = options.compilers or max(1, own_cores() - 1)
        self._pool = CompilePool(compilers, self._source, device.target, env)
        self._import_s = time.perf_counter() - start
        return {**device.info, "compilers": compilers, "store": self._store.root.name, **self.about}

    def close(self) -> None:
        """End the processes. (The worker does not need it: they end with this process.)"""
        self._pool.close()
        self._measurer.end()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def canary(self) -> tuple[bool, float, str]:
        """A product of Hadamard matrices, whose answer is known, by the measuring process."""
        try:
            ok, us, detail = self._call_bench("canary")
        except TunerFault as e:
            return False, -1.0, str(e)
        return ok, us, detail

    def time_canary(self) -> tuple[float, float]:
        """Times of a product and of a copy, to compare GPUs, by the measuring process. Raises TunerFault."""
        compute_us, memory_us = self._call_bench("time_canary")
        return compute_us, memory_us

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Tune the shapes of a spec; wall seconds by kind (import: only the first time). ValueError, TunerFault."""
        start = time.monotonic()
        options = self.read_options({**self._raw, **spec.options})
        spent = dict.fromkeys(("inputs", "check", "measure", "compile"), 0.0)
        if not self._measurer.is_alive:
            self._measurer.restart(emit.alive)
        self._measurer.limit_s = options.hang_s
        assert self._measurer.device is not None
        context = SearchContext(
            source=self._source,
            target=self._measurer.device.target,
            pool=self._pool,
            measurer=self._measurer,
            store=self._store,
            options=options,
            emit=emit,
            err_limit=spec.err_ratio,
            spent=spent,
            compiled=self._compiled,
        )
        try:
            self.search(spec, context)
        except BaseException:
            self._measurer.end()  # else its answers would be taken for the next spec's
            raise
        finally:
            self._pool.request([])  # running jobs may end: their kernels are kept on the disk
        spent["other"] = max(0.0, time.monotonic() - start - sum(spent.values()))
        spent["import"] = self._import_s
        self._import_s = 0.0
        return {kind: round(seconds, 6) for kind, seconds in spent.items()}

    def _call_bench(self, method: str) -> Any:
        """The measuring process's answer. Raises TunerFault if it ends, or gives none."""
        if not self._measurer.is_alive:
            self._measurer.restart()
        self._measurer.send(CallBench(method))
        try:
            answer = self._measurer.wait_for_answer(min(CANARY_S, self._measurer.limit_s))
        except HelperError as e:
            raise TunerFault("fault", str(e)) from e
        return answer.value
