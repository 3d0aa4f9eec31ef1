"""A stand-in for the GPU's process and for the compiler: what they do to us, without a GPU.

The processes, their pipes and their deaths are real; only the device is made up. A candidate's time is a formula of
its knobs, `behave` says by its name what it does instead: die by a signal, hang, raise a text of CUDA or HIP.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from worker.families.triton_config import KernelConfig
from worker.protocol import SpecShape
from worker.tuners.base import Emit
from worker.tuners.common.problem import Problem
from worker.tuners.search.candidate_ranker import CandidateRanker, StopRules, features
from worker.tuners.search.clocks import GpuClock, UnknownClock
from worker.tuners.search.measuring_process import MeasuringProcess
from worker.tuners.search.measuring_server import MeasuringServer
from worker.tuners.search.options import Options
from worker.tuners.search.processes import CompilePool
from worker.tuners.search.search import Search, SearchContext, ShapeTask
from worker.tuners.search.store import KernelStore
from worker.tuners.search.target import Target, known
from worker.tuners.search.time_accounting import TimeAccount
from worker.tuners.triton.launch import plan

PROBLEM = Problem("a16w16", 1, 64, 256, 512, "bfloat16")
SIGNALS = {"segv": signal.SIGSEGV, "abort": signal.SIGABRT, "kill": signal.SIGKILL}


def true_us(c: KernelConfig) -> float:
    """Microseconds of a candidate: least at 64x64x64 with 4 warps and 3 stages."""
    off = abs(c.block_m - 64) / 64 + abs(c.block_n - 64) / 64 + abs(c.num_warps - 4) / 4 + abs(c.num_stages - 3) / 3
    return 20.0 * (1 + 0.3 * off)


class Timer:
    """A GPU's clock that is never wrong, but takes the time it says."""

    size = 4

    def __init__(self, us: float) -> None:
        self._us = us

    def __call__(self, calls: int) -> float:
        return self._us * calls / 1e6


@dataclass(frozen=True, slots=True)
class Held:
    """A candidate that is loaded."""

    candidate: KernelConfig


class StandIn:
    """A bench (worker/tuners/search/measuring_server.py) whose candidates behave as planned."""

    def __init__(self, behave: Mapping[str, str], once: str = "") -> None:
        self._behave, self._once = dict(behave), once
        self.target: Target = known(90)
        self.clock: GpuClock = UnknownClock("a stand-in")
        self._checks: dict[str, int] = {}

    def info(self) -> dict[str, Any]:
        return {"gfx": "sm_90", "cu_num": 132, "device": "stand-in", "triton": "0", "torch": "0"}

    def enter_thread(self) -> None:
        """There is no device."""

    def warm(self) -> None:
        """There is nothing to load."""

    def canary(self) -> tuple[bool, float, str]:
        return True, 1.0, "a stand-in"

    def time_canary(self) -> tuple[float, float]:
        return 2.0, 3.0

    def prepare(self, problem: Problem, seed: int, rotate_bytes: int, tick: Callable[[], None]) -> str:
        return "no room" if problem.k == 999 else ""

    def load(self, candidate: KernelConfig) -> Held:
        return Held(candidate)

    def check(self, held: Held) -> float:
        loaded = held.candidate
        self._checks[loaded.name] = self._checks.get(loaded.name, 0) + 1
        for words, what in self._behave.items():
            if words in loaded.name and self._strikes(words):
                self._do(what, loaded)
                if what == "wrong" or (what == "wrong later" and self._checks[loaded.name] > 1):
                    return 0.5
        return 0.0

    def timer(self, held: Held) -> Timer:
        return Timer(true_us(held.candidate))

    def _strikes(self, words: str) -> bool:
        """Always, or with `once` (a folder) only the first time in any process."""
        if not self._once:
            return True
        try:
            (Path(self._once) / words).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _do(self, what: str, loaded: KernelConfig) -> None:
        if what in SIGNALS:
            os.kill(os.getpid(), SIGNALS[what])
        elif what == "hang":
            time.sleep(600)
        elif what.startswith("raise "):
            raise RuntimeError(what.removeprefix("raise "))


def serve(conn: Connection, behave: Mapping[str, str], once: str = "") -> None:
    """The stand-in for the measuring process."""
    MeasuringServer(conn, lambda: StandIn(behave, once)).serve()


def serve_nothing(conn: Connection) -> None:
    """A machine without a GPU."""

    def make() -> StandIn:
        raise RuntimeError("torch sees no GPU here")

    MeasuringServer(conn, make).serve()


def compile_job(job: Any) -> tuple[str, str]:
    """The stand-in for the compiler: a job is a launch plan and a target; BK 16 does what its K step says."""
    made, _ = job
    if made.constexprs["BK"] == 16:
        return "unsupported", "out of resource: shared memory"
    if made.constexprs["BK"] == 32:
        os.kill(os.getpid(), signal.SIGSEGV)
    return "ok", ""


class Kit:
    """A search over the stand-ins, and its messages."""

    def __init__(self, tmp: Path, behave: Mapping[str, str], once: bool = False, **options: Any) -> None:
        folder = tmp / "once"
        folder.mkdir(exist_ok=True)
        self.options = Options.parse({"hang_s": 20, "min_samples": 3, "max_samples": 5, **options})
        args = (dict(behave), str(folder) if once else "")
        self.measurer = MeasuringProcess(serve, {}, self.options.hang_s, args)
        self.measurer.restart()
        self.pool = CompilePool(2, compile_job, {}, 60.0)
        self.store = KernelStore(tmp, {"device": "stand-in"})
        self.messages: list[dict[str, Any]] = []
        self.context = SearchContext(
            self.pool, self.measurer, self.store, known(90), self.options, Emit(self.messages.append), 0.05,
            TimeAccount(time.monotonic(), 2),
        )  # fmt: skip

    def close(self) -> None:
        self.pool.close()
        self.measurer.end()

    def task(self, candidates: list[KernelConfig], problem: Problem = PROBLEM, id_: int = 1) -> ShapeTask:
        """A shape with these candidates; the model thinks all alike."""
        shape = SpecShape(id_, {"M": problem.m, "N": problem.n, "K": problem.k})
        rules = StopRules(at_least=3, patience=2, all=self.options.search == "exhaustive")
        ranker = CandidateRanker([20.0] * len(candidates), [features(c) for c in candidates], rules)
        return ShapeTask(shape, problem, candidates, [plan(problem, c, known(90)) for c in candidates], ranker)

    def run(self, candidates: list[KernelConfig], problem: Problem = PROBLEM) -> None:
        Search(self.context, self.task(candidates, problem), []).run()

    def of(self, type_: str) -> list[dict[str, Any]]:
        return [m for m in self.messages if m["type"] == type_]

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """Rows by kernelName, the last of each."""
        return {m["row"]["kernelName"]: m["row"] for m in self.of("row")}


__all__ = ["Kit", "StandIn", "compile_job", "serve", "serve_nothing", "true_us"]
