"""The tuner `triton` as the worker sees it. It owns a pool of compile processes and one process that owns the GPU."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.device.probe import own_cores
from worker.families.triton_config import KernelConfig, from_name
from worker.protocol import Choice, Spec, SpecShape
from worker.tuners.base import Emit, Place, TunerFault
from worker.tuners.common.problem import Problem, UnsupportedError, parse
from worker.tuners.search.candidate_ranker import CandidateRanker, StopRules, features
from worker.tuners.search.measuring_process import Alive, Canary, CanaryResult, CanaryTimes, Opened, TimeCanary
from worker.tuners.search.options import EXHAUSTIVE, Options
from worker.tuners.search.processes import Serve, now
from worker.tuners.search.search import Search, SearchContext, ShapeTask
from worker.tuners.search.store import KernelStore
from worker.tuners.search.time_accounting import TimeAccount

if TYPE_CHECKING:
    from worker.tuners.search.measuring_process import MeasuringProcess
    from worker.tuners.search.processes import CompilePool, CompileResult, Work

CANARY_S = 120.0
SOURCES = ("kernels.py", "launch.py")
"""Files of this package that decide about the compiled code."""
FAST_LIST = 400
"""The fast search looks at so many candidates at most, the best by the model."""


class TritonTuner:
    """Measures our own Triton kernels on the first GPU; what is below `tune` differs for other kernels."""

    def __init__(self, serve: Serve | None = None) -> None:
        """`serve`: main function of the measuring process; tests have others."""
        self._serve = serve
        self._raw: Mapping[str, Any] = {}
        self._place = Place()
        self._pool: CompilePool | None = None
        self._measurer: MeasuringProcess | None = None
        self._store: KernelStore | None = None
        self._compiled: dict[str, CompileResult] = {}
        self._import_s = 0.0
        self.account: TimeAccount | None = None
        """Account of the last `tune`."""

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        """The node's options. ValueError for bad ones."""
        self._raw, self._place = options, place
        self.parsed(options)

    def open(self) -> dict[str, Any]:
        """Start the processes. gfx, cu_num, device, torch, triton, clock, compilers. NoDeviceError without a GPU."""
        start = time.perf_counter()
        from worker.tuners.search.measuring_process import MeasuringProcess
        from worker.tuners.search.processes import CompilePool

        options = self.parsed(self._raw)
        cache = KernelStore.cache_of(self._place.node_dir).absolute()
        # the device decides about the folder, so the process that opens it looks first
        serve, args, work = self.processes(options)
        measurer = MeasuringProcess(self._serve or serve, {}, options.hang_s, args)
        opened = measurer.restart()
        self._store = KernelStore(cache, self.about(opened))
        self._store.prune(options.cache_mb << 20)
        scratch = self._store.root / "tmp" / str(os.getpid())
        scratch.mkdir(parents=True, exist_ok=True)
        env = {"TRITON_CACHE_DIR": str(self._store.compiled), "TMPDIR": str(scratch)}
        env["TRITON_STORE_BINARY_ONLY"] = "1"  # a megabyte of listings a kernel would be read whenever it is loaded
        measurer.settle(env)
        self._measurer = measurer
        compilers = options.compilers or max(1, own_cores() - 1)
        self._pool = CompilePool(compilers, work, env, options.compile_timeout_s)
        self._import_s = time.perf_counter() - start
        return {**opened.info, "compilers": self._pool.size, "store": self._store.root.name}

    def close(self) -> None:
        """End the processes. (The worker does not need it: they end with this process.)"""
        if self._pool is not None:
            self._pool.close()
        if self._measurer is not None:
            self._measurer.end()
        if self._store is not None:
            shutil.rmtree(self._store.root / "tmp" / str(os.getpid()), ignore_errors=True)

    def forget(self) -> None:
        """Begin cold: compiled kernels and winners of this device are removed from the store."""
        assert self._store is not None
        assert self._pool is not None
        self._pool.drop()
        self._compiled.clear()
        shutil.rmtree(self._store.compiled, ignore_errors=True)
        self._store.compiled.mkdir()
        (self._store.root / "winners.jsonl").unlink(missing_ok=True)
        if self._measurer is not None and self._measurer.alive:
            self._measurer.settle({})  # it forgets what it has loaded

    def canary(self) -> tuple[bool, float, str]:
        """A product of Hadamard matrices, whose answer is known, by the measuring process."""
        answer = self._ask(Canary())
        if isinstance(answer, CanaryResult):
            return answer.ok, answer.us, answer.detail
        return False, -1.0, getattr(answer, "detail", f"unexpected answer {answer!r}")

    timed_canary_s = 0.5

    def time_canary(self) -> tuple[float, float]:
        """Times of a product and of a copy, to compare GPUs, by the measuring process. Raises TunerFault."""
        answer = self._ask(TimeCanary())
        if isinstance(answer, CanaryTimes):
            return answer.compute_us, answer.memory_us
        raise TunerFault("fault", getattr(answer, "detail", f"unexpected answer {answer!r}"))

    def _ask(self, command: Canary | TimeCanary) -> Any:
        """The measuring process's answer, or its end."""
        measurer = self._opened().measurer
        if not measurer.alive:
            measurer.restart()
        measurer.send(command)
        until = now() + CANARY_S
        while now() < until:
            for message in measurer.receive(0.2):
                if not isinstance(message, Alive):
                    return message
        return TimeoutError(f"no answer within {CANARY_S:g} s")

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Tune the shapes of a spec; wall seconds by kind (import: only the first time). ValueError, TunerFault."""
        options = self.parsed({**self._raw, **spec.options})
        context = self._opened(options, emit, spec.err_ratio)
        self.account = account = context.account
        if not context.measurer.alive:
            context.measurer.restart(emit.alive)
        ended = False
        context.pool.expect()
        try:
            self.search(spec, context)
            ended = True
        finally:
            context.pool.want([])  # running jobs may end: their kernels are kept on the disk
            account.compiled += context.pool.spans()
            account.rested += context.pool.rests()
            if not ended:  # its answers would be taken for the next spec's
                context.measurer.end()
        account.end = now()
        print(f"gemmfleet: {account.summary()}", flush=True)
        spent = account.spent()
        spent["other"] = max(0.0, account.wall_s - sum(spent.values()))
        spent["import"], self._import_s = self._import_s, 0.0
        return {k: round(v, 6) for k, v in spent.items()}

    def parsed(self, raw: Mapping[str, Any]) -> Options:
        """Options of a spec or node. Raises ValueError."""
        return Options.parse(raw)

    def processes(self, options: Options) -> tuple[Serve, tuple[Any, ...], Work]:
        """Main function of the measuring process with its further arguments, and what compiles a job."""
        from worker.tuners.triton import device_bench, launch

        return device_bench.serve, (), launch.compile_job

    def about(self, opened: Opened) -> dict[str, str]:
        """Versions and device that a compiled kernel and its time depend on."""
        return about(opened, source_hash(Path(__file__).resolve().parent))

    def search(self, spec: Spec, context: SearchContext) -> None:
        """Search every shape of a spec, and settle it."""
        tasks = self._tasks(spec, context)
        prior: CandidateRanker | None = None
        for i, (shape, task) in enumerate(tasks):
            context.emit.started(shape.id)
            if isinstance(task, str):
                context.emit.failed(shape.id, "unsupported", task)
                continue
            task.ranker.first(hints(task, context.store) if context.options.hints else [])
            if prior is not None:
                task.ranker.learn(prior)
            following = [e for _, e in tasks[i + 1 :] if isinstance(e, ShapeTask)]
            Search(context, task, following).run()
            prior = task.ranker

    def _tasks(self, spec: Spec, context: SearchContext) -> list[tuple[SpecShape, ShapeTask | str]]:
        """Each shape with its task, or the reason why it has none."""
        out: list[tuple[SpecShape, ShapeTask | str]] = []
        for shape in spec.shapes:
            context.emit.alive()
            try:
                problem = parse("triton", spec.family, shape.key, context.target.fp8)
                out.append((shape, _task(shape, problem, context, spec.only_of(shape.id))))
            except UnsupportedError as e:
                out.append((shape, str(e)))
        return out

    def _opened(
        self, options: Options | None = None, emit: Emit | None = None, err_limit: float = 0.0
    ) -> SearchContext:
        if self._pool is None or self._measurer is None or self._store is None:
            raise RuntimeError("the tuner was not opened")
        assert self._measurer.opened is not None
        options = options or self.parsed(self._raw)
        self._measurer.hang_s = options.hang_s
        account = TimeAccount(now(), self._pool.size)
        emit = emit or Emit(lambda _: None)
        return SearchContext(
            self._pool, self._measurer, self._store, self._measurer.opened.target, options, emit, err_limit, account,
            self._compiled,
        )  # fmt: skip


def source_hash(package: Path) -> str:
    """A hash of the kernels' source and of launch.py."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(name.encode() + b"\0" + (package / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def about(opened: Opened, source: str) -> dict[str, str]:
    """Versions and device that a compiled kernel and its time depend on; `source`: a hash of the kernels'."""
    info = {k: str(opened.info.get(k, "")) for k in ("device", "gfx", "cu_num", "triton", "torch", "cuda", "hip")}
    return {**{k: v for k, v in info.items() if v}, "source": source}


def candidates_of(problem: Problem, context: SearchContext, only: Choice | None = None) -> list[KernelConfig]:
    """The legal candidates in the model's order, as many as the options allow; the chosen ones alone, if given."""
    from worker.tuners.triton import model, space

    o = context.options
    legal = space.candidates(problem, context.target)
    if o.only:
        legal = [c for c in map(from_name, o.only) if space.why_illegal(problem, c, context.target) is None]
    if only is not None:
        legal = [c for c in legal if only.has((c.name,), c.name)]
    ordered = model.order(problem, context.target, legal)
    if o.only or only is not None:
        return ordered
    most = o.max_candidates or (FAST_LIST if o.search != EXHAUSTIVE else 0)
    return ordered[:most] if most else ordered


def _task(shape: SpecShape, problem: Problem, context: SearchContext, only: Choice | None) -> ShapeTask:
    """Raises UnsupportedError where no candidate is legal."""
    from worker.tuners.triton import launch, model

    found, named = candidates_of(problem, context, only), only is not None
    if not found:
        raise UnsupportedError(f"no candidate of {problem.family} is legal for this shape on {context.target.name}")
    estimates = [model.estimate_us(problem, c, context.target) for c in found]
    every = named or context.options.search == EXHAUSTIVE
    # a candidate that was measured too slow at the power cap hides its neighbours: more are tried there
    rules = StopRules(at_least=28, patience=14, all=every) if problem.is_sustained else StopRules(all=every)
    ranker = CandidateRanker(estimates, [features(c) for c in found], rules)
    launches = [launch.plan(problem, c, context.target) for c in found]
    always = frozenset(range(len(found)) if named else ())
    return ShapeTask(shape, problem, found, launches, ranker, always, named=named)


def hints(task: ShapeTask, store: KernelStore) -> list[int]:
    """Indexes of candidates that won before, on this problem or near it."""
    names = store.hints(task.problem.family, task.problem.group_name, task.problem.m)
    known = {c.name: i for i, c in enumerate(task.candidates)}
    return [known[name] for name in names if name in known]
