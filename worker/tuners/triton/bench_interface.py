"""What the measuring process needs of a device; `onchip.py` has the real one, tests have others. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from worker.tuners.common.problem import Problem
from worker.tuners.triton.candidate import Candidate
from worker.tuners.triton.clocks import Clock
from worker.tuners.triton.target import Target


class Loaded(Protocol):
    """A candidate whose kernel is on the device, bound to the operands."""

    candidate: Candidate


class SizedTimer(Protocol):
    """A Timer (worker/tuners/common/measure.py) that makes `size` calls at once."""

    size: int

    def __call__(self, calls: int) -> float: ...


class Bench(Protocol):
    """A device with the operands of one problem on it."""

    target: Target
    clock: Clock

    def info(self) -> dict[str, Any]:
        """gfx, cu_num, device, and the versions that a result depends on."""
        ...

    def enter_thread(self) -> None:
        """Make the device current in this thread."""
        ...

    def warm(self) -> None:
        """Do what the first load would have to do once, and forget loaded kernels; the environment is settled."""
        ...

    def canary(self) -> tuple[bool, float, str]:
        """A small problem with a known answer: (ok, microseconds, detail)."""
        ...

    def prepare(self, problem: Problem, seed: int, rotate_bytes: int, tick: Callable[[], None]) -> str:
        """Make operands, copies and reference; why that cannot be, "" where it was done."""
        ...

    def load(self, candidate: Candidate) -> Any:
        """Load and bind it: what `check` and `timer` take. Called from the loading thread."""
        ...

    def check(self, loaded: Any) -> float:
        """errRatio of one call on a poisoned output and the X that no timed call uses."""
        ...

    def timer(self, loaded: Any) -> SizedTimer:
        """Times calls on the rotated copies."""
        ...
