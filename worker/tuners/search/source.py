"""The contract between the search and a family of kernels: `KernelSource`, and the plain data that it hands over.

Importing this module imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from worker.tuners.search.target import Target

if TYPE_CHECKING:
    import torch

    from worker.tuners.search.space import Space

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
        """Value that decides between two candidates of the same speed: the lower one wins."""

    @property
    def features(self) -> tuple[float, ...]:
        """The candidate as a point: a step of one knob is a distance of about 1."""


@dataclass(frozen=True, slots=True)
class CompileFacts:
    """Facts of all kernels of one call, from `worker.tuners.search.compiling.facts_of`.

    shared_bytes: shared memory (LDS) of a program. vgprs: registers of a lane, None where the file does not say
    (NVIDIA). spills: registers that did not fit; a candidate that spills is measured last. hash: of the machine code.
    grid: what decides how the kernels are started.
    """

    shared_bytes: int
    vgprs: int | None
    spills: int
    hash: str
    grid: tuple[int, ...] = ()

    @property
    def same_as(self) -> tuple[object, ...]:
        """Equal for candidates that start the same machine code alike. One of them is measured."""
        return self.hash, self.grid


class KernelSource(Protocol):
    """A family of kernels that can be searched.

    A source is small, plain data: each process of the search has a copy and calls `enter` first. The tuner's process
    asks for the space and jobs; compile processes compile; the measuring process, which alone uses the
    GPU, makes operands and launches.
    """

    def enter(self, target: Target | None) -> None:
        """Import the kernels into this process; calling it again does nothing.

        With a target, kernels are only compiled for it here, and no GPU is touched. None: the GPU's driver answers.
        Raises UnavailableError.
        """

    def space(self, problem: Any, target: Target) -> Space:
        """The configs of a problem, with their estimated times."""

    def job(self, problem: Any, candidate: Any) -> Any:
        """The candidate's compile job: plain data. Jobs of the same `repr` compile the same kernel."""

    def compile(self, job: Any, target: Target) -> CompileFacts:
        """Compile into Triton's disk cache. Raises UnsupportedError, and what the compiler raises."""

    def needed_bytes(self, problem: Any) -> int:
        """The least memory that the problem takes: operands, output and reference."""

    def inputs(self, problem: Any, device: torch.device, seed: int, draw: int) -> Any:
        """Draw the operands by (seed, problem, draw), before a kernel wants them in its own order. Raises
        UnsupportedError.

        They have what `worker.tuners.common.inputs.Inputs` has: `bytes`, the memory that they take; `copy`, the same
        values in other memory; `output`, a tensor of the problem's form, filled with NaN; `reference`, the right
        answer in float32, whose last dimension is the output's. If a call makes several products, `reference` gives a
        tuple of those, which lie in the output one behind the other: each has to be right.
        """

    def operands(self, inputs: Any) -> Any:
        """The operands as the kernels want them (shuffled, padded). This is not timed. Raises UnsupportedError."""

    def launch(self, problem: Any, candidate: Any, operands: Sequence[Any], out: torch.Tensor) -> Sequence[Call]:
        """One call on each of the operands. A call writes `out` and can be captured in a graph."""
