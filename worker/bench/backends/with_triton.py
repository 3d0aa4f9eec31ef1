"""Backend `own-triton`: gemmfleet's own kernels (worker/tuners/triton), with the tuned candidate of a shape, else with
the fastest of the first that the model names."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from worker.bench.backends.inputs import Inputs
from worker.bench.backends.measuring import BoundCase, Call, timer_of
from worker.bench.case import ROW8, Case
from worker.families import plain_twin
from worker.families.triton_config import KernelConfig, from_name
from worker.protocol.bench import Options
from worker.tuners.common.device import Device
from worker.tuners.common.measure import SamplingPolicy, measure
from worker.tuners.common.problem import Problem, UnavailableError, UnsupportedError, parse
from worker.tuners.search import target
from worker.tuners.triton import launch, model, space
from worker.tuners.triton.operands import Operands

QUICK = SamplingPolicy(min_samples=3, max_samples=5)
QUICK_S = 0.02


class TritonBackend:
    """Compiles in its own process; with TRITON_INTERPRET=1 results are right and no times are taken."""

    def __init__(self, options: Options, device: Device) -> None:
        self._options, self._device = options, device
        self._interpreted = os.environ.get("TRITON_INTERPRET") == "1"

    def load(self) -> dict[str, Any]:
        try:
            import triton
        except ImportError as e:
            raise UnavailableError(f"Triton is not installed: {e}") from e
        if not self._device.gpu and not self._interpreted:
            raise UnavailableError("Triton needs a GPU, and torch sees none")
        self._target = target.of_device() if self._device.gpu else target.known(90)
        return {"triton": triton.__version__}

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        key = dict(case.key)
        problem = parse("triton", plain_twin(case.family), key, self._target.fp8)
        tuned = self._options.winners.get("x".join(map(str, key.values())))
        best: tuple[float, KernelConfig, tuple[launch.LaunchPlan, Any]] | None = None
        why = ""
        for candidate in self._candidates(problem, tuned):
            try:
                made = launch.plan(problem, candidate, self._target)
                compiled = launch.compile_plan(made, self._target)
                us = 0.0
                if tuned is None and not self._interpreted:
                    us = self._quick(self._call(problem, made, compiled, first, first.output(), None))
            except launch.CompileError as e:
                why = f"{candidate.name}: {e}"
                continue
            if best is None or us < best[0]:
                best = (us, candidate, (made, compiled))
            if self._interpreted or tuned is not None:
                break
        if best is None:
            raise UnsupportedError(f"no candidate compiles; the last: {why}"[:500] if why else "no candidate is legal")
        _, candidate, (made, compiled) = best
        size = max(1, made.workspace_bytes)
        workspace = torch.zeros(size, dtype=torch.uint8, device=self._device.torch)  # calls on one stream share it

        def make(inputs: Inputs, out: torch.Tensor) -> Call:
            return self._call(problem, made, compiled, inputs, out, workspace)

        detail = "tuned" if tuned else "the best of the model's first"
        if self._interpreted:
            return BoundCase(made.kernel, candidate.name, make, "TRITON_INTERPRET=1: no timing", timed=False)
        return BoundCase(problem.family, candidate.name, make, detail)

    def _candidates(self, problem: Problem, tuned: str | None) -> list[KernelConfig]:
        if tuned is not None:
            return [from_name(tuned)]
        ordered = model.order(problem, self._target, space.candidates(problem, self._target))
        return ordered[: self._options.candidates]

    def _call(
        self, problem: Problem, made: launch.LaunchPlan, compiled: Any, inputs: Inputs, out: torch.Tensor,
        workspace: torch.Tensor | None,
    ) -> Call:  # fmt: skip
        xs, ws = inputs.xs, inputs.ws
        if inputs.case.format == ROW8:  # one scale a row, without a dimension of its own
            xs, ws = (None if s is None else s[..., 0].contiguous() for s in (xs, ws))
        operands = Operands(problem, inputs.x, inputs.w, xs, ws, inputs.bias)
        if workspace is None:
            workspace = torch.zeros(max(1, made.workspace_bytes), dtype=torch.uint8, device=out.device)
        once = launch.bind(made, compiled, operands, out, workspace)

        def run() -> torch.Tensor:
            once()
            return out

        return run

    def _quick(self, call: Call) -> float:
        """Microseconds of a call, roughly; infinity where the clock is broken."""
        us = measure(timer_of([call], self._device), QUICK, QUICK_S).us
        return us if us > 0 else math.inf
