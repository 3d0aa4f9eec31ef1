"""The contract between the search and a family of kernels: `KernelSource`, and the plain data that it hands over.

Importing this module imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from worker.tuners.search.target import Target

if TYPE_CHECKING:
    import torch

Call = Callable[[], None]


class Candidate(Protocol):
    """One way to run a kernel. Plain data: it is sent to the measuring process."""

    @property
    def name(self) -> str:
        """A text that spells every knob. Two candidates of a problem have different names."""

    @property
    def split_k(self) -> int:
        """The number of programs that share one tile's K."""

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Of two candidates that are equally fast, the one with the lower value wins."""

    @property
    def features(self) -> tuple[float, ...]:
        """The candidate as a point: a step of one knob is a distance of about 1."""


class CompileJob(Protocol):
    """The work of a compile process for one candidate. Plain data."""

    @property
    def compile_key(self) -> str:
        """Jobs with the same key compile the same kernel."""


class Facts(Protocol):
    """Facts of a compiled kernel."""

    @property
    def same_as(self) -> Hashable:
        """Equal for candidates that start the same machine code alike. One of them is measured."""

    @property
    def spills(self) -> int:
        """The registers that did not fit. A kernel that spills is measured last."""

    @property
    def shared_bytes(self) -> int:
        """The shared memory that one program takes."""


class Inputs(Protocol):
    """The operands of one problem as they were drawn, before a kernel wants them in its own order."""

    @property
    def bytes(self) -> int:
        """The memory that they take."""

    def copy(self) -> Inputs:
        """The same values in other memory."""

    def output(self) -> torch.Tensor:
        """An output of the problem's form, filled with NaN."""

    def reference(self) -> torch.Tensor:
        """The right answer in float32; its last dimension is the output's."""


class KernelSource(Protocol):
    """A family of kernels that can be searched.

    A source is small, plain data: each process of the search has a copy and calls `enter` first. The tuner's process
    asks for candidates, estimates and jobs; compile processes compile; the measuring process, which alone uses the
    GPU, makes operands and launches.
    """

    def enter(self, target: Target | None) -> None:
        """Import the kernels into this process; calling it again does nothing.

        With a target, kernels are only compiled for it here, and no GPU is touched. None: the GPU's driver answers.
        Raises UnavailableError.
        """

    def candidates(self, problem: Any, target: Target, first: Sequence[Any] = (), most: int = 0) -> Sequence[Candidate]:
        """The legal candidates, the best estimate first, without doubles, at most `most` of them (0: all).

        `first` holds candidates that were good before; others that are like them belong to the list.
        """

    def estimate_us(self, problem: Any, candidate: Any, target: Target) -> float:
        """The estimated microseconds of a call. It only decides the order, and measurements correct it."""

    def job(self, problem: Any, candidate: Any) -> CompileJob:
        """The candidate's compile job."""

    def compile(self, job: Any, target: Target) -> Facts:
        """Compile into Triton's disk cache. Raises UnsupportedError, and what the compiler raises."""

    def needed_bytes(self, problem: Any) -> int:
        """The least memory that the problem takes: operands, output and reference."""

    def inputs(self, problem: Any, device: torch.device, seed: int, draw: int) -> Inputs:
        """Draw the operands by (seed, problem, draw). Raises UnsupportedError."""

    def operands(self, inputs: Any) -> Any:
        """The operands as the kernels want them (shuffled, padded). This is not timed. Raises UnsupportedError."""

    def launch(self, problem: Any, candidate: Any, operands: Sequence[Any], out: torch.Tensor) -> Sequence[Call]:
        """One call on each of the operands. A call writes `out` and can be captured in a graph."""
