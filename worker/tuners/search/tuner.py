"""A tuner of Triton kernels as the worker sees it: the base of those that use the search engine.

The engine compiles candidates of a GEMM ahead, measures them on one GPU, and ranks the fastest. It knows no kernels:
these come from a kernel source (`source.py`), and `aiter-triton` is one. `SearchTuner` owns a pool of compile
processes and the process that owns the GPU. Its subclasses decide what to search, and how to settle shapes.

What outlives a run on a node is in its `KernelStore`:

    <cache>/triton/<key>/compiled/      Triton's own disk cache (TRITON_CACHE_DIR), kept below a size
    <cache>/triton/<key>/blocked.jsonl  one line a fault: family, candidate, what
    <cache>/triton/<key>/about.json     the fields that are hashed to the key

`key` is a hash of the kernels' source, Triton's version and the device. Files are appended to under a lock, so that
the slots of a node share them; a torn or foreign line is skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from worker.device import own_cores
from worker.protocol import Spec
from worker.protocol.paths import CACHE_ENV
from worker.tuners.base import Emit, Place, TunerFault
from worker.tuners.search.compiling import CompilePool, CompileResult
from worker.tuners.search.measuring import Answer, Ask, MeasuringProcess, serve
from worker.tuners.search.search import FAULTS_TO_BLOCK, SearchContext
from worker.tuners.search.source import KernelSource, SearchOptions

CACHE_BYTES = 2 << 30  # of compiled kernels, for one source, version and device


class KernelStore:
    """The folder of one source, version and device."""

    def __init__(self, cache: Path, about: Mapping[str, str]) -> None:
        """`about`: source, triton, device and what else a compiled kernel depends on. Makes the folder."""
        text = json.dumps(dict(about), sort_keys=True)
        self.root = cache / "triton" / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.compiled, self._faults = self.root / "compiled", self.root / "blocked.jsonl"
        self.compiled.mkdir(parents=True, exist_ok=True)
        (self.root / "about.json").write_text(json.dumps(dict(about), indent=1, sort_keys=True) + "\n")

    def faulted(self, family: str, candidate: str, what: str) -> int:
        """Keep that a candidate took its process down; the number of times so far."""
        line = {"family": family, "candidate": candidate, "what": what[:300]}
        with open(self._faults, "ab", buffering=0) as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            # the line before may be torn by a kill: then only it is lost
            f.write(b"\n" + json.dumps(line, separators=(",", ":")).encode())
        return self.faults(family)[candidate]

    def faults(self, family: str) -> Counter[str]:
        """Number of times that each candidate of a family took its process down."""
        counts: Counter[str] = Counter()
        kept = self._faults.read_bytes() if self._faults.exists() else b""
        for text in kept.split(b"\n"):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # torn or foreign
                line = json.loads(text)
                counts[line["candidate"]] += line["family"] == family
        return counts

    def blocked(self, family: str) -> set[str]:
        """Candidates that faulted often enough to be skipped from now on."""
        return {name for name, count in self.faults(family).items() if count >= FAULTS_TO_BLOCK}

    def prune(self, most_bytes: int) -> int:
        """Drop the compiled kernels that were used longest ago until the rest is within `most_bytes`; how many."""
        sized = []
        for folder in self.compiled.iterdir():
            with contextlib.suppress(OSError):  # another slot removes it
                files = [f.stat() for f in folder.iterdir()]
                sized.append((max((s.st_atime for s in files), default=0.0), sum(s.st_size for s in files), folder))
        total, dropped = sum(size for _, size, _ in sized), 0
        for _, size, folder in sorted(sized, key=lambda s: s[0]):
            if total <= most_bytes:
                break
            shutil.rmtree(folder, ignore_errors=True)
            total -= size
            dropped += 1
        return dropped


CANARY_S = 120.0


class SearchTuner(ABC):
    """Measures the candidates of a kernel source on the first GPU."""

    timed_canary_s = 0.5
    parsed: Callable[[Mapping[str, Any]], SearchOptions]  # options of a node or spec; raises ValueError

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
        self._raw, self._place = options, place
        self.parsed(options)

    def open(self) -> dict[str, Any]:
        """Start the processes. gfx, cu_num, device, torch, triton, clock, compilers. NoDeviceError without a GPU."""
        start = time.perf_counter()
        options = self.parsed(self._raw)
        self._source, digest = self.source()
        # the device decides about the folder, so the process that opens it looks first
        self._measurer = MeasuringProcess(serve, {}, options.hang_s, (self._source,))
        opened = self._measurer.restart()
        facts = ("device", "gfx", "cu_num", "triton", "torch", "cuda", "hip")
        about = {k: str(opened.info[k]) for k in facts if opened.info.get(k)}
        self._store = KernelStore(self.cache, {**about, "source": digest})
        self._store.prune(CACHE_BYTES)
        self._scratch = self._store.root / "tmp" / str(os.getpid())
        self._scratch.mkdir(parents=True, exist_ok=True)
        env = {
            "TRITON_CACHE_DIR": str(self._store.compiled), "TMPDIR": str(self._scratch),
            "TRITON_STORE_BINARY_ONLY": "1",  # a megabyte of listings a kernel would be read whenever it is loaded
        }  # fmt: skip
        self._measurer.settle(env)
        compilers = options.compilers or max(1, own_cores() - 1)
        self._pool = CompilePool(compilers, self._source, opened.target, env)
        self._import_s = time.perf_counter() - start
        return {**opened.info, "compilers": compilers, "store": self._store.root.name, **self.about}

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
        options, start = self.parsed({**self._raw, **spec.options}), time.monotonic()
        spent = dict.fromkeys(("inputs", "check", "measure", "compile"), 0.0)
        if not self._measurer.alive:
            self._measurer.restart(emit.alive)
        self._measurer.hang_s = options.hang_s
        assert self._measurer.opened is not None
        context = SearchContext(
            self._source, self._measurer.opened.target, self._pool, self._measurer, self._store, options, emit,
            spec.err_ratio, spent, self._compiled,
        )  # fmt: skip
        ended = False
        try:
            self.search(spec, context)
            ended = True
        finally:
            self._pool.want([])  # running jobs may end: their kernels are kept on the disk
            if not ended:  # its answers would be taken for the next spec's
                self._measurer.end()
        spent["other"] = max(0.0, time.monotonic() - start - sum(spent.values()))
        spent["import"], self._import_s = self._import_s, 0.0
        return {k: round(v, 6) for k, v in spent.items()}

    def _ask(self, what: str) -> Any:
        """The measuring process's answer. Raises TunerFault if it ends, or gives none."""
        if not self._measurer.alive:
            self._measurer.restart()
        self._measurer.send(Ask(what))
        said = self._measurer.wait(CANARY_S)
        if not isinstance(said, Answer):
            raise TunerFault("fault", getattr(said, "detail", f"unexpected answer {said!r}"))
        return said.value
