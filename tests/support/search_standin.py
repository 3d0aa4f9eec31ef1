"""A kernel source without kernels, and a device without a GPU, for tests of the search.

The processes, their pipes and their deaths are real; only device and compiler are made up. A candidate's time is a
formula of its knobs; `behave` says by its name what it does instead: die by a signal, hang, raise a text of CUDA or
HIP, be wrong.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from worker.protocol import SpecShape
from worker.registry import parse_options
from worker.tuners.base import Emit
from worker.tuners.common.problem import Problem
from worker.tuners.search.compile_pool import CompilePool
from worker.tuners.search.kernel_store import KernelStore
from worker.tuners.search.measuring_process import MeasuringProcess
from worker.tuners.search.measuring_server import MeasuringServer
from worker.tuners.search.messages import CandidatesRanked
from worker.tuners.search.options import SearchOptions
from worker.tuners.search.problem_search import ProblemSearch, SearchContext, ShapeTask
from worker.tuners.search.ranker import StopRules
from worker.tuners.search.source import CompileFacts, KernelSource
from worker.tuners.search.target import Target, datasheet_target

PROBLEM = Problem("a16w16", 1, 64, 256, 512, "bfloat16")


@dataclass(frozen=True, slots=True)
class Tile:
    """A candidate."""

    m: int
    n: int
    k: int
    warps: int = 4
    waves: int = 0
    split_k: int = 1
    simplicity: tuple[int, ...] = (3,)

    @property
    def name(self) -> str:
        return f"tile_{self.m}x{self.n}x{self.k}_w{self.warps}_eu{self.waves}"

    @property
    def features(self) -> tuple[float, ...]:
        return (*(math.log2(s) for s in (self.m, self.n, self.k, self.warps)), 0.5 * self.waves)


def true_us(c: Tile) -> float:
    """Microseconds of a candidate: least at 64x64x64 with 4 warps."""
    return 20.0 * (1 + 0.3 * (abs(c.m - 64) / 64 + abs(c.n - 64) / 64 + abs(c.warps - 4) / 4))


class StandInSource:
    """A source of tiles. K steps of 16 do not compile, those of 32 crash the compiler, those of 8 take too much."""

    def enter(self, target: Target | None) -> None: ...

    def job(self, problem: Problem, candidate: Tile) -> Tile:
        return candidate

    def compile(self, job: Tile, target: Target) -> CompileFacts:
        if job.k == 16:
            raise RuntimeError("out of resource: shared memory")
        if job.k == 32:
            os.kill(os.getpid(), signal.SIGSEGV)
        return CompileFacts(target.shared_bytes + 1 if job.k == 8 else 1024, None, 0, job.name)

    def inputs(self, *args: Any, **named: Any) -> Any:
        raise NotImplementedError("the stand-in for the device makes no operands")

    space = needed_bytes = operands = launch = inputs


class Timer:
    """A GPU's clock that is never wrong, and takes no time."""

    size, remark = 4, ""

    def __init__(self, us: float) -> None:
        self._us = us

    def __call__(self, calls: int) -> float:
        return self._us * calls / 1e6


class StandIn:
    """A bench (worker/tuners/search/device_bench.py) whose candidates behave as planned, with `once` a folder only the
    first time in any process."""

    def __init__(self, behave: Mapping[str, str], once: str) -> None:
        self._behave, self._once = behave, once
        self.target: Target = datasheet_target(90)
        self._checked: set[str] = set()

    def info(self) -> dict[str, Any]:
        return {}

    def enter_thread(self) -> None: ...

    def warm(self) -> None: ...

    def canary(self) -> tuple[bool, float, str]:
        return True, 1.0, "a stand-in"

    def time_canary(self) -> tuple[float, float]:
        return 2.0, 3.0

    def prepare(self, problem: Problem, seed: int, rotate_bytes: int, tick: object) -> str:
        return "no room" if problem.k == 999 else ""

    def load(self, candidate: Tile) -> SimpleNamespace:
        return SimpleNamespace(candidate=candidate)

    def check(self, loaded: SimpleNamespace) -> float:
        name = loaded.candidate.name
        later = name in self._checked
        self._checked.add(name)
        for what in (w for words, w in self._behave.items() if words in name and self._strikes(words)):
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "hang":
                time.sleep(600)
            elif what.startswith("raise "):
                raise RuntimeError(what.removeprefix("raise "))
            elif what == "wrong" or later:
                return 0.5
        return 0.0

    def timer(self, loaded: SimpleNamespace) -> Timer:
        return Timer(true_us(loaded.candidate))

    def _strikes(self, words: str) -> bool:
        mark = Path(self._once) / words
        if self._once and mark.exists():
            return False
        if self._once:
            mark.touch()
        return True


def serve(conn: Connection, behave: Mapping[str, str], once: str) -> None:
    """The stand-in for the measuring process."""
    MeasuringServer(conn, lambda: StandIn(behave, once)).serve()


class Kit:
    """A search over the stand-ins, and its messages."""

    def __init__(self, tmp: Path, behave: Mapping[str, str], once: bool = False, **options: Any) -> None:
        given = {"search": "exhaustive", "hang_s": 20, "min_samples": 3, "max_samples": 5, **options}
        self.options = parse_options(SearchOptions, "stand-in", given)
        self.measurer = MeasuringProcess(serve, {}, self.options.hang_s, (dict(behave), str(tmp) if once else ""))
        self.measurer.restart()
        source: KernelSource = StandInSource()
        self.pool = CompilePool(2, source, datasheet_target(90), {})
        self.store = KernelStore(tmp, {"device": "stand-in"})
        self.messages: list[dict[str, Any]] = []
        self.context = SearchContext(
            source, datasheet_target(90), self.pool, self.measurer, self.store, self.options,
            Emit(self.messages.append), 0.05,
            dict.fromkeys(("inputs", "check", "measure", "compile"), 0.0), {},
        )  # fmt: skip
        self.search: ProblemSearch
        self.ranked: CandidatesRanked | None = None

    def close(self) -> None:
        self.pool.close()
        self.measurer.end()

    def task(self, candidates: list[Tile], problem: Problem = PROBLEM, id_: int = 1) -> ShapeTask:
        """A shape with these candidates, which are estimated alike."""
        shape = SpecShape(id_, {"M": problem.m, "N": problem.n, "K": problem.k})
        task = self.context.make_task(shape, problem, candidates, us=[20.0] * len(candidates))
        task.ranker.rules = StopRules(at_least=3, patience=2, all=task.ranker.rules.all)
        return task

    def run(self, candidates: list[Tile], problem: Problem = PROBLEM, task: ShapeTask | None = None) -> str:
        """Measure the candidates and rank the leaders; the name of the fastest, "" where none is right."""
        self.search = ProblemSearch(self.context, task or self.task(candidates, problem), ())
        self.search.measure()
        self.ranked = self.search.rank(self.search.leaders())
        return "" if self.ranked is None else candidates[self.ranked.indexes[self.ranked.ranking.winner]].name

    def rows(self, shape: int = 1) -> dict[str, dict[str, Any]]:
        """Rows of a shape by kernelName, the last of each."""
        mine = [m["row"] for m in self.messages if m["type"] == "row" and m["shape"] == shape]
        return {row["kernelName"]: row for row in mine}
