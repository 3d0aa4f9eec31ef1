"""The device as the measuring process uses it: a GPU, or Triton's interpreter on the CPU. Imports torch and triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from worker.tuners.common.check import poison
from worker.tuners.common.device import Device, canary
from worker.tuners.common.problem import Problem, UnsupportedError
from worker.tuners.triton import launch, operands, target
from worker.tuners.triton.candidate import Candidate
from worker.tuners.triton.clocks import Clock, Unknown, clock_of
from worker.tuners.triton.operands import Operands
from worker.tuners.triton.timing import Call, GraphTimer, WallTimer

ROOM = 0.9
"""Of the free memory the operands may take."""


class NeedsGpuError(Exception):
    """There is no GPU, and nobody asked for the interpreter."""


@dataclass(slots=True)
class Bound:
    """A loaded candidate: calls on the checked operands and on each copy."""

    candidate: Candidate
    checked: Call
    timed: Sequence[Call]


class Chip:
    """A GPU (or the interpreter) with the operands of one problem on it."""

    def __init__(self, *, interpreted: bool) -> None:
        """Open the device. Raises NeedsGpuError."""
        if not interpreted and not torch.cuda.is_available():
            raise NeedsGpuError(
                "the tuner triton needs a GPU, and torch sees none here; use the tuner torch on this machine"
            )
        self._interpreted = interpreted
        self._device = Device("cpu" if interpreted else "cuda")
        self.target = target.known(90) if interpreted else target.of_device()
        self.clock: Clock = Unknown("the interpreter has no clock") if interpreted else _clock(self.target.backend)
        self._problem: Problem | None = None
        self._checked: Operands | None = None
        self.copies: list[Operands] = []
        self._workspace: torch.Tensor | None = None
        self._right = self._out = torch.empty(0)
        self._kernels: dict[str, Any] = {}
        """Loaded kernels of the problem's group by their key: candidates and M share them."""
        if not interpreted:
            torch.zeros(1, device=self._device.torch)  # the context, before a thread needs it

    def info(self) -> dict[str, Any]:
        """gfx, cu_num, device, torch, cuda or hip, triton, and where throttling is seen."""
        own: dict[str, Any] = {"triton": triton.__version__, "clock": self.clock.source}
        if self._interpreted:
            own["interpreter"] = "right answers only: its times are no GPU's"
        return {**self._device.info(), **own}

    def enter_thread(self) -> None:
        if not self._interpreted:
            torch.cuda.set_device(self._device.torch)

    def warm(self) -> None:
        """Have Triton make its driver's module, which is kept in its disk cache, and the libraries what they make once.

        A product (the reference's), a generator, a graph and its pool, events, a check.
        """
        self._kernels.clear()
        if self._interpreted:
            return
        triton.runtime.driver.active.get_current_target()
        triton.compiler.make_backend(launch.gpu_target(self.target))
        small = Problem("a16w16", 1, 16, 128, 128, "bfloat16")
        made = operands.make(small, self._device.torch, 0)
        right, out = operands.reference(made), operands.out_like(small, self._device.torch)
        operands.check(out, right)

        def product() -> None:
            torch.mm(made.x, made.w.t(), out=out)

        GraphTimer([product])(1)
        self._device.sync()

    def canary(self) -> tuple[bool, float, str]:
        return canary(self._device)

    def prepare(self, problem: Problem, seed: int, rotate_bytes: int, tick: Callable[[], None]) -> str:
        """Operands that are checked, other ones that are timed in copies, the float32 reference, an output."""
        weights = self._checked
        self._free()
        need, free = operands.needed_bytes(problem), self._device.available()
        if need > ROOM * free:
            return f"operands, output and reference need {need} bytes, {free} are available"
        if weights is None or weights.problem.group_key != problem.group_key:
            self._kernels.clear()
        shared = weights if weights is not None and weights.problem.group_key == problem.group_key else None
        try:
            self._checked = operands.make(problem, self._device.torch, seed, 0, shared)
            tick()
            timed = operands.make(problem, self._device.torch, seed, 1, self._checked)
            self._right = operands.reference(self._checked)
        except UnsupportedError as e:
            return str(e)
        tick()
        self.copies = operands.rotation(timed, 0 if self._interpreted else rotate_bytes, self._device.available())
        self._out = operands.out_like(problem, self._device.torch)
        self._problem = problem
        self._device.sync()
        return ""

    def load(self, candidate: Candidate) -> Bound:
        """Compile (a hit in the disk cache), load, bind."""
        assert self._problem is not None
        assert self._checked is not None
        made = launch.plan(self._problem, candidate, self.target)
        compiled = self._kernels.get(made.compile_key)
        if compiled is None:
            compiled = self._kernels[made.compile_key] = launch.compile_plan(made, self.target)
        workspace = self._room(made.workspace_bytes)

        def bound(o: Operands) -> Call:
            return launch.bind(made, compiled, o, self._out, workspace)

        return Bound(candidate, bound(self._checked), [bound(o) for o in self.copies])

    def check(self, loaded: Bound) -> float:
        poison([self._out])
        loaded.checked()
        return operands.check(self._out, self._right)

    def timer(self, loaded: Bound) -> GraphTimer | WallTimer:
        return (WallTimer if self._interpreted else GraphTimer)(loaded.timed)

    def _room(self, size: int) -> torch.Tensor | None:
        """The workspace, shared by all candidates of the problem; grown where one needs more."""
        if not size:
            return None
        if self._workspace is None or self._workspace.numel() < size:
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self._device.torch)
        return self._workspace

    def _free(self) -> None:
        """Let go of everything of the last problem."""
        self._problem = self._checked = self._workspace = None
        self.copies = []
        self._right = self._out = torch.empty(0)


def make_bench(*, interpreted: bool) -> Chip:
    """The device of this process."""
    return Chip(interpreted=interpreted)


def _clock(backend: str) -> Clock:
    p: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        pci = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    except AttributeError:  # an older torch
        return Unknown(f"torch {torch.__version__} does not tell the PCI address")
    return clock_of(backend, pci)
