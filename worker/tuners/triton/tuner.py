"""The tuner `triton` as the worker sees it. It owns a pool of compile processes and one process that owns the GPU."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.agent.cpu_affinity import own_cores
from worker.protocol import Spec, SpecShape
from worker.tuners.base import Emit, Place
from worker.tuners.common.problem import Problem, UnsupportedError, parse
from worker.tuners.triton import messages as say
from worker.tuners.triton.candidate import Candidate, from_name
from worker.tuners.triton.candidate_ranker import Race, Rules, features
from worker.tuners.triton.options import EXHAUSTIVE, Options
from worker.tuners.triton.processes import Serve, now
from worker.tuners.triton.search import Search
from worker.tuners.triton.search_context import Bound, Entry
from worker.tuners.triton.store import Store, source_hash
from worker.tuners.triton.time_accounting import Account

if TYPE_CHECKING:
    from worker.tuners.triton.measurer import Measurer
    from worker.tuners.triton.pool import Done, Pool

CANARY_S = 120.0
FAST_LIST = 400
"""The fast search looks at so many candidates at most, the best by the model."""


class TritonTuner:
    """Measures our own Triton kernels on the first GPU."""

    def __init__(self, serve: Serve | None = None) -> None:
        """`serve`: what the measuring process does; tests have others."""
        self._serve = serve
        self._raw: Mapping[str, Any] = {}
        self._place = Place()
        self._pool: Pool | None = None
        self._measurer: Measurer | None = None
        self._store: Store | None = None
        self._compiled: dict[str, Done] = {}
        self._import_s = 0.0
        self.account: Account | None = None
        """Of the last `tune`."""

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        """The node's options. ValueError for bad ones."""
        self._raw, self._place = options, place
        Options.parse(options)

    def open(self) -> dict[str, Any]:
        """Start the processes. gfx, cu_num, device, torch, triton, clock, compilers. NoDeviceError without a GPU."""
        start = time.perf_counter()
        from worker.tuners.triton import compiling, measuring
        from worker.tuners.triton.measurer import Measurer
        from worker.tuners.triton.pool import Pool

        options = Options.parse(self._raw)
        cache = Store.cache_of(self._place.node_dir).absolute()
        # the device decides about the folder, so the process that opens it looks first
        measurer = Measurer(self._serve or measuring.serve, {}, options.hang_s)
        opened = measurer.restart()
        self._store = Store(cache, about(opened))
        self._store.prune(options.cache_mb << 20)
        scratch = self._store.root / "tmp" / str(os.getpid())
        scratch.mkdir(parents=True, exist_ok=True)
        env = {"TRITON_CACHE_DIR": str(self._store.compiled), "TMPDIR": str(scratch)}
        env["TRITON_STORE_BINARY_ONLY"] = "1"  # a megabyte of listings a kernel would be read whenever it is loaded
        measurer.settle(env)
        self._measurer = measurer
        compilers = options.compilers or max(1, own_cores() - 1)
        self._pool = Pool(compilers, compiling.work, env, options.compile_timeout_s)
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
        measurer = self._opened().measurer
        if not measurer.alive:
            measurer.restart()
        measurer.send(say.Canary())
        until = now() + CANARY_S
        while now() < until:
            for message in measurer.receive(0.2):
                if isinstance(message, say.CanarySaid):
                    return message.ok, message.us, message.detail
                if not isinstance(message, say.Alive):
                    return False, -1.0, getattr(message, "detail", f"it said {message!r}")
        return False, -1.0, f"no answer within {CANARY_S:g} s"

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Tune the shapes of a spec; wall seconds by kind (import: only the first time). ValueError, TunerFault."""
        options = Options.parse({**self._raw, **spec.options})
        bound = self._opened(options, emit, spec.err_ratio)
        self.account = account = bound.account
        if not bound.measurer.alive:
            bound.measurer.restart(emit.alive)
        ended = False
        bound.pool.expect()
        try:
            entries = self._entries(spec, bound)
            prior: Race | None = None
            for i, (shape, entry) in enumerate(entries):
                emit.started(shape.id)
                if isinstance(entry, str):
                    emit.failed(shape.id, "unsupported", entry)
                    continue
                entry.race.first(_hints(entry, bound.store) if options.hints else [])
                if prior is not None:
                    entry.race.learn(prior)
                following = [e for _, e in entries[i + 1 :] if isinstance(e, Entry)]
                Search(bound, entry, following).run()
                prior = entry.race
            ended = True
        finally:
            bound.pool.want([])  # what runs may end: its kernels are kept on the disk
            account.compiled += bound.pool.spans()
            account.rested += bound.pool.rests()
            if not ended:  # its answers would be taken for the next spec's
                bound.measurer.end()
        account.end = now()
        print(f"gemmfleet: {account.told()}", flush=True)
        spent = account.spent()
        spent["other"] = max(0.0, account.wall_s - sum(spent.values()))
        spent["import"], self._import_s = self._import_s, 0.0
        return {k: round(v, 6) for k, v in spent.items()}

    def _entries(self, spec: Spec, bound: Bound) -> list[tuple[SpecShape, Entry | str]]:
        """Each shape with what is to be searched, or why it cannot be."""
        out: list[tuple[SpecShape, Entry | str]] = []
        for shape in spec.shapes:
            bound.emit.alive()
            try:
                problem = parse("triton", spec.family, shape.key, bound.target.fp8)
                out.append((shape, _entry(shape, problem, bound)))
            except UnsupportedError as e:
                out.append((shape, str(e)))
        return out

    def _opened(self, options: Options | None = None, emit: Emit | None = None, err_limit: float = 0.0) -> Bound:
        if self._pool is None or self._measurer is None or self._store is None:
            raise RuntimeError("the tuner triton was not opened")
        assert self._measurer.opened is not None
        options = options or Options.parse(self._raw)
        self._measurer.hang_s = options.hang_s
        account = Account(now(), self._pool.size)
        emit = emit or Emit(lambda _: None)
        return Bound(
            self._pool, self._measurer, self._store, self._measurer.opened.target, options, emit, err_limit, account,
            self._compiled,
        )  # fmt: skip


def about(opened: say.Opened) -> dict[str, str]:
    """What a compiled kernel and its time depend on."""
    package = Path(__file__).resolve().parent
    info = {k: str(opened.info.get(k, "")) for k in ("device", "gfx", "cu_num", "triton", "torch", "cuda", "hip")}
    return {**{k: v for k, v in info.items() if v}, "source": source_hash(package)}


def candidates_of(problem: Problem, bound: Bound) -> list[Candidate]:
    """The legal candidates in the model's order, as many as are asked for."""
    from worker.tuners.triton import model, space

    o = bound.options
    legal = space.candidates(problem, bound.target)
    if o.only:
        named = [c for c in map(from_name, o.only) if space.why_illegal(problem, c, bound.target) is None]
        return model.order(problem, bound.target, named)
    ordered = model.order(problem, bound.target, legal)
    most = o.max_candidates or (FAST_LIST if o.search != EXHAUSTIVE else 0)
    return ordered[:most] if most else ordered


def _entry(shape: SpecShape, problem: Problem, bound: Bound) -> Entry:
    """Raises UnsupportedError where no candidate is legal."""
    from worker.tuners.triton import launch, model

    found = candidates_of(problem, bound)
    if not found:
        raise UnsupportedError(f"no candidate of {problem.family} is legal for this shape on {bound.target.name}")
    estimates = [model.estimate_us(problem, c, bound.target) for c in found]
    race = Race(estimates, [features(c) for c in found], Rules(all=bound.options.search == EXHAUSTIVE))
    launches = [launch.plan(problem, c, bound.target) for c in found]
    return Entry(shape, problem, found, launches, race)


def _hints(entry: Entry, store: Store) -> list[int]:
    """Indexes of candidates that won before, on this problem or near it."""
    names = store.hints(entry.problem.family, entry.problem.group_name, entry.problem.m)
    known = {c.name: i for i, c in enumerate(entry.candidates)}
    return [known[name] for name in names if name in known]
