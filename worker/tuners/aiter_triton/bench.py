"""The device as the measuring process uses it for AITER's wrappers. Imports torch, triton and AITER."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from worker.bench.backends.inputs import Inputs, needed_bytes
from worker.bench.case import Case
from worker.triton_configs.kinds import BY_NAME
from worker.tuners.aiter_triton.config import AiterConfig
from worker.tuners.aiter_triton.problem import KindProblem
from worker.tuners.aiter_triton.wrapper import Wrapper, compiling, enter
from worker.tuners.common.problem import Problem, UnavailableError, UnsupportedError
from worker.tuners.search.measuring_server import MeasuringServer
from worker.tuners.triton.device_bench import MAX_CALLS, ROOM, DeviceBench, LoadedCandidate, NeedsGpuError


class WrapperBench(DeviceBench):
    """A GPU (or the interpreter) with the inputs of one case on it; candidates are calls of a wrapper."""

    def __init__(self, root: str, kind: str, *, interpreted: bool) -> None:
        """Open the device and import the wrapper. Raises NeedsGpuError with the reason."""
        super().__init__(interpreted=interpreted)
        enter(root, self.target if interpreted else None)
        try:
            self._wrapper = Wrapper(BY_NAME[kind])
            self._others: dict[str, Wrapper] = {"": self._wrapper}
        except UnavailableError as e:
            raise NeedsGpuError(f"AITER's Triton wrapper of {kind} cannot be imported from {root}: {e}") from e
        self._case: Case | None = None
        self._first: dict[str, Any] = {}
        """Operands that are checked."""
        self._rotated: list[dict[str, Any]] = []

    def prepare(self, problem: Problem, seed: int, rotate_bytes: int, tick: Callable[[], None]) -> str:
        """Inputs that are checked, other ones that are timed in copies, the float32 reference, an output."""
        assert isinstance(problem, KindProblem)
        case, self._case = problem.case, None
        self._first, self._rotated = {}, []
        self._free()
        need, free = needed_bytes(case), self._device.available()
        if need > ROOM * free:
            return f"operands, output and reference need {need} bytes, {free} are available"
        try:
            checked = Inputs.make(case, self._device.torch, seed, 0)
            self._right, self._out = checked.reference(), checked.output()
            self._first = self._wrapper.operands(checked)
            tick()
            timed = Inputs.make(case, self._device.torch, seed, 1)
            span = 0 if self._interpreted else rotate_bytes
            count = max(1, min(MAX_CALLS, -(-span // timed.bytes), self._device.available() // 2 // timed.bytes))
            for i in range(count):
                self._rotated.append(self._wrapper.operands(timed if i == 0 else timed.copy()))
                tick()
        except (UnsupportedError, UnavailableError) as e:
            return str(e)
        self._case, self._problem = case, problem
        self._device.sync()
        return ""

    def load(self, candidate: AiterConfig) -> LoadedCandidate:  # type: ignore[override]
        """Compile (a hit in the disk cache), load, bind."""
        assert self._case is not None
        wrapper = self._others.get(candidate.caller)
        if wrapper is None:
            wrapper = self._others[candidate.caller] = Wrapper(self._wrapper.kind, candidate.caller)
        config = wrapper.completed(candidate.values, self._case)
        checked, *timed = (wrapper.call(o, self._out, config) for o in (self._first, *self._rotated))
        if not self._interpreted:
            with compiling() as kernels:
                checked()
            for kernel in kernels:
                _ = kernel.run  # Triton loads it then
        return LoadedCandidate(candidate, checked, timed)


def serve(conn: Connection, root: str, kind: str) -> None:
    """Main function of the measuring process: on the GPU, or in Triton's interpreter with TRITON_INTERPRET=1."""
    MeasuringServer(
        conn, lambda: WrapperBench(root, kind, interpreted=os.environ.get("TRITON_INTERPRET") == "1")
    ).serve()
