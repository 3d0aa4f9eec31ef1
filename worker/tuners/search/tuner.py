"""A tuner of Triton kernels as the worker sees it. It owns a pool of compile processes and the process that owns the
GPU; what it searches, and how shapes are settled, is for its subclass to say."""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from worker.device import own_cores
from worker.protocol import Spec
from worker.tuners.base import Emit, Place, TunerFault
from worker.tuners.search.compiling import CompilePool, CompileResult, compile_candidate
from worker.tuners.search.measuring import Alive, Answer, Ask, MeasuringProcess
from worker.tuners.search.search import SearchContext
from worker.tuners.search.source import KernelSource, SearchOptions, TimeAccount
from worker.tuners.search.store import CACHE_BYTES, KernelStore

CANARY_S = 120.0


class SearchTuner(ABC):
    """Measures the candidates of a kernel source on the first GPU."""

    timed_canary_s = 0.5

    def __init__(self) -> None:
        self._raw: Mapping[str, Any] = {}
        self._place = Place()
        self._source: KernelSource  # since `open`, as the next three
        self._pool: CompilePool
        self._measurer: MeasuringProcess
        self._store: KernelStore
        self._compiled: dict[str, CompileResult] = {}
        self._import_s = 0.0

    @abstractmethod
    def parsed(self, raw: Mapping[str, Any]) -> SearchOptions:
        """Options of a node or spec. Raises ValueError."""

    @abstractmethod
    def source(self) -> tuple[KernelSource, str]:
        """The kernels, and a hash of their sources. Raises NoDeviceError with the reason why there are none."""

    @abstractmethod
    def search(self, spec: Spec, context: SearchContext) -> None:
        """Search every shape of a spec, and settle it."""

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        """The node's options. ValueError for bad ones."""
        self._raw, self._place = options, place
        self.parsed(options)

    def open(self) -> dict[str, Any]:
        """Start the processes. gfx, cu_num, device, torch, triton, clock, compilers. NoDeviceError without a GPU."""
        start = time.perf_counter()
        from worker.tuners.search.device_bench import serve  # it imports torch

        options = self.parsed(self._raw)
        cache = KernelStore.cache_of(self._place.node_dir).absolute()
        self._source, digest = self.source()
        # the device decides about the folder, so the process that opens it looks first
        self._measurer = MeasuringProcess(serve, {}, options.hang_s, (self._source,))
        opened = self._measurer.restart()
        facts = ("device", "gfx", "cu_num", "triton", "torch", "cuda", "hip")
        about = {k: str(opened.info[k]) for k in facts if opened.info.get(k)}
        self._store = KernelStore(cache, {**about, "source": digest})
        self._store.prune(CACHE_BYTES)
        scratch = self._scratch
        scratch.mkdir(parents=True, exist_ok=True)
        env = {"TRITON_CACHE_DIR": str(self._store.compiled), "TMPDIR": str(scratch)}
        env["TRITON_STORE_BINARY_ONLY"] = "1"  # a megabyte of listings a kernel would be read whenever it is loaded
        self._measurer.settle(env)
        compilers = options.compilers or max(1, own_cores() - 1)
        work = partial(compile_candidate, self._source, opened.target)
        self._pool = CompilePool(compilers, work, env)
        self._import_s = time.perf_counter() - start
        return {**opened.info, "compilers": self._pool.size, "store": self._store.root.name}

    def close(self) -> None:
        """End the processes. (The worker does not need it: they end with this process.)"""
        self._pool.close()
        self._measurer.end()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def canary(self) -> tuple[bool, float, str]:
        """A product of Hadamard matrices, whose answer is known, by the measuring process."""
        try:
            ok, us, detail = self._ask("canary")
        except TunerFault as e:
            return False, -1.0, str(e)
        return ok, us, detail

    def time_canary(self) -> tuple[float, float]:
        """Times of a product and of a copy, to compare GPUs, by the measuring process. Raises TunerFault."""
        compute_us, memory_us = self._ask("time_canary")
        return compute_us, memory_us

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Tune the shapes of a spec; wall seconds by kind (import: only the first time). ValueError, TunerFault."""
        options = self.parsed({**self._raw, **spec.options})
        account = TimeAccount(time.monotonic())
        if not self._measurer.alive:
            self._measurer.restart(emit.alive)
        self._measurer.hang_s = options.hang_s
        assert self._measurer.opened is not None
        context = SearchContext(
            self._source, self._measurer.opened.target, self._pool, self._measurer, self._store, options, emit,
            spec.err_ratio, account, self._compiled,
        )  # fmt: skip
        ended = False
        try:
            self.search(spec, context)
            ended = True
        finally:
            self._pool.want([])  # running jobs may end: their kernels are kept on the disk
            if not ended:  # its answers would be taken for the next spec's
                self._measurer.end()
        account.end = time.monotonic()
        print(f"gemmfleet: {account.summary()}", flush=True)
        spent = account.spent()
        spent["other"] = max(0.0, account.wall_s - sum(spent.values()))
        spent["import"], self._import_s = self._import_s, 0.0
        return {k: round(v, 6) for k, v in spent.items()}

    def _ask(self, what: str) -> Any:
        """The measuring process's answer. Raises TunerFault if it ends, or gives none."""
        if not self._measurer.alive:
            self._measurer.restart()
        self._measurer.send(Ask(what))
        until = time.monotonic() + CANARY_S
        while time.monotonic() < until:
            for message in self._measurer.receive(0.2):
                if isinstance(message, Answer):
                    return message.value
                if not isinstance(message, Alive):
                    raise TunerFault("fault", getattr(message, "detail", f"unexpected answer {message!r}"))
        raise TunerFault("fault", f"no answer within {CANARY_S:g} s")

    @property
    def _scratch(self) -> Path:
        return self._store.root / "tmp" / str(os.getpid())
