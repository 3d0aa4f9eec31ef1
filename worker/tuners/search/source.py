"""The contract between the search and a family of kernels: `KernelSource`, the plain data that it hands over,
the options that all tuners of the engine have, and where a search's time went.

Importing this module imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from worker.tuners.search.target import Target

if TYPE_CHECKING:
    import torch
from collections.abc import Iterable
from dataclasses import dataclass, field

from worker.registry import boolean, option, seconds, whole

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

    def job(self, problem: Any, candidate: Any) -> Any:
        """The candidate's compile job: plain data. Jobs of the same `repr` compile the same kernel."""

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


FAST, EXHAUSTIVE = "fast", "exhaustive"


def _search(value: Any) -> str:
    if value not in (FAST, EXHAUSTIVE):
        raise ValueError(f"neither {FAST} nor {EXHAUSTIVE}")
    return str(value)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Each option with its default; docs/reference/tuners.md explains them."""

    search: str = option(FAST, _search)
    # Seconds from a shape's start until no further candidate is begun; 0 means as long as the search takes.
    budget_s_per_shape: float = option(0.0, seconds(0, 86400))
    # Most candidates of a shape, the best by the model; 0 means all legal ones.
    max_candidates: int = option(0, whole(0, 1_000_000))
    # Compile processes; 0 means the slot's share of the usable cores less one, at least one.
    compilers: int = option(0, whole(0, 1024))
    min_samples: int = option(5, whole(1, 100_000))
    max_samples: int = option(31, whole(1, 100_000))
    seed: int = option(0, whole(0, 2**63))
    # Memory that the copies of the operands span: more than the last-level cache of MI300 and MI355X (256 MB).
    rotate_mb: int = option(512, whole(0, 65536))
    # The measuring process is ended when it sends nothing for so long while it has work.
    hang_s: float = option(30.0, seconds(0.5, 3600))
    hints: bool = option(default=True, rule=boolean)  # winners of earlier runs and of neighbouring shapes come first
    again: int = option(0, whole(0, 100))  # times that a ranking is repeated whose winner has a small margin


Span = tuple[float, float]


@dataclass(slots=True)
class TimeAccount:
    """Spans of one search in seconds of CLOCK_MONOTONIC, which all processes of a machine share."""

    start: float
    end: float = 0.0
    compiled: list[Span] = field(default_factory=list)  # intervals of the compile jobs in their processes
    measuring: list[Span] = field(default_factory=list)  # intervals in which the GPU's process checked, timed or ranked
    # Intervals from the end of a candidate's compile to the begin of its measuring.
    ready: list[Span] = field(default_factory=list)
    # Seconds of the GPU's process by kind (inputs, load, check, measure).
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, seconds: float) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    @property
    def wall_s(self) -> float:
        return max(0.0, self.end - self.start)

    @property
    def idle_s(self) -> float:
        """Seconds in which the GPU's process did nothing although a compiled candidate waited."""
        return length([*self.ready, *self.measuring]) - length(self.measuring)

    @property
    def starved_s(self) -> float:
        """Seconds in which it did nothing because nothing was compiled."""
        spans = [(max(a, self.start), min(b, self.end)) for a, b in (*self.ready, *self.measuring)]
        return max(0.0, self.wall_s - length(spans))

    def spent(self) -> dict[str, float]:
        """Wall seconds by kind: inputs, check, measure, compile (the GPU had nothing to measure), wait."""
        own = {k: self.seconds.get(k, 0.0) for k in ("inputs", "check", "measure")}
        return {**own, "compile": self.starved_s, "wait": self.idle_s}

    def summary(self) -> str:
        """One line for the log."""
        jobs = sum(b - a for a, b in self.compiled)
        return (
            f"{self.wall_s:.2f} s: {len(self.compiled)} compiled in {jobs:.1f} process seconds; "
            f"GPU idle beside a compiled candidate {self.idle_s:.3f} s "
            f"({100 * self.idle_s / max(self.wall_s, 1e-9):.1f} %), without one {self.starved_s:.2f} s; "
            f"loading took {self.seconds.get('load', 0.0):.2f} s beside that"
        )


def length(spans: Iterable[Span]) -> float:
    """Seconds of the union."""
    total, until = 0.0, float("-inf")
    for a, b in sorted(spans):
        if b > max(a, until):
            total += b - max(a, until)
            until = b
    return total
