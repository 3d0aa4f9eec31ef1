"""One GPU as the benchmarks use it: kernels are compiled ahead in processes, then checked and timed through graphs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figure import LeftOutError
from worker.families.triton_config import KernelConfig, from_name
from worker.tuners.common.problem import Problem

if TYPE_CHECKING:
    from worker.tuners.search.target import Target
    from worker.tuners.triton.operands import Operands

Row = dict[str, Any]


def compiled(job: tuple[Problem, str, Target]) -> tuple[float, str]:
    """(seconds, error or "") of compiling one candidate into Triton's disk cache, in a process of its own."""
    from worker.tuners.triton import launch

    started = time.perf_counter()
    p, name, target = job
    try:
        launch.compile_plan(launch.plan(p, from_name(name), target), target)
    except launch.CompileError as e:
        return time.perf_counter() - started, f"{e.kind}: {e}"
    return time.perf_counter() - started, ""


class Gpu:
    """One GPU: compiles ahead in processes, checks and times."""

    def __init__(self, pool: ProcessPoolExecutor, out: Path | None, end: float) -> None:
        import torch

        from worker.tuners.search.target import of_device
        from worker.tuners.triton import launch

        if not torch.cuda.is_available():
            raise LeftOutError("needs a GPU that torch sees")
        self.target = of_device()
        self.device = torch.device("cuda")
        self.workspace = torch.full((4 * launch.COUNTERS + (256 << 20),), 255, dtype=torch.uint8, device=self.device)
        self.workspace[: 4 * launch.COUNTERS] = 0
        self.end = end
        self._pool, self._out = pool, out
        self._jobs: dict[str, Future[tuple[float, str]]] = {}
        self._kernels: dict[str, Any] = {}

    def write(self, row: Row) -> None:
        """Keep a row at once: the machine may be taken away."""
        if self._out:
            with self._out.open("a") as f:
                f.write(json.dumps(row) + "\n")

    def ahead(self, p: Problem, candidates: Iterable[KernelConfig]) -> None:
        """Have candidates compiled, each kernel once."""
        from worker.tuners.triton import launch

        for c in candidates:
            key = launch.plan(p, c, self.target).compile_key
            if key not in self._jobs:
                self._jobs[key] = self._pool.submit(compiled, (p, c.name, self.target))

    def kernel(self, p: Problem, c: KernelConfig) -> Any:
        """The compiled kernel, waited for. Raises CompileError."""
        from worker.tuners.triton import launch

        plan = launch.plan(p, c, self.target)
        if plan.compile_key not in self._kernels:
            error = self._jobs[plan.compile_key].result()[1]
            if error:
                raise launch.CompileError("error", error)
            self._kernels[plan.compile_key] = launch.compile_plan(plan, self.target)
        return self._kernels[plan.compile_key]

    def call(self, o: Operands, c: KernelConfig, out: Any) -> Callable[[], None]:
        """A bound call. Raises CompileError."""
        from worker.tuners.triton import launch

        plan = launch.plan(o.problem, c, self.target)
        return launch.bind(plan, self.kernel(o.problem, c), o, out, self.workspace)

    @property
    def compile_seconds(self) -> list[float]:
        """Compile time of each kernel."""
        return [job.result()[0] for job in self._jobs.values() if job.done() and not job.cancelled()]

    def checked(self, o: Operands, right: Any, c: KernelConfig, times: int) -> Row:
        """A row of the check: share of wrong elements, and whether `times` calls gave the same bits."""
        import torch

        from worker.tuners.triton import launch, operands

        row: Row = {"problem": asdict(o.problem), "candidate": c.name}
        try:
            out = operands.out_like(o.problem, self.device)
            call = self.call(o, c, out)
            call()
            first, same = out.clone(), True
            for _ in range(times):
                out.fill_(float("nan"))
                call()
                same = same and torch.equal(out, first)
            kernel = self.kernel(o.problem, c)
            row |= {"wrong": operands.check(first, right), "same": same, "shared": kernel.metadata.shared}
            row |= {"registers": kernel.n_regs, "spills": kernel.n_spills}
        except launch.CompileError as e:
            row["error"] = str(e)[:500]
        if int(self.workspace[: 4 * launch.COUNTERS].view(torch.int32).abs().max()):
            row["counters"] = "not zero"
        return row

    def graph(self, calls: Sequence[Callable[[], Any]], us: float) -> tuple[Any, int]:
        """A graph of about 2 ms of calls, going round them; and how many calls it has."""
        import torch

        count = max(len(calls), min(200, int(2000 / us)))
        made = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made):
            for i in range(count):
                calls[i % len(calls)]()
        return made, count

    def sample(self, graph: tuple[Any, int]) -> float:
        """us of one call in one replay."""
        import torch

        cuda: Any = torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        graph[0].replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / graph[1]
