"""Interface of the backends: a case bound to a call. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from worker.bench.case import Case

if TYPE_CHECKING:
    import torch

    from worker.bench.backends.inputs import Inputs

Call = Callable[[], "torch.Tensor"]


@dataclass(slots=True)
class BoundCase:
    """A case that a backend can run. `op` is what compares over dates and stacks, `kernel` what ran, as far as known.

    `make(inputs, out)` gives one call on one set of operands; what it prepares (shuffled weights) is not timed. The
    call returns the output, `out` or one of its own. `timed` False: the numbers would be no times (an interpreter).
    """

    op: str
    kernel: str
    make: Callable[[Inputs, torch.Tensor], Call]
    detail: str = ""
    timed: bool = True


class Backend(Protocol):
    """One implementation of a GEMM."""

    def load(self) -> dict[str, Any]:
        """Import what is needed, once; facts for the record. Raises UnavailableError with the reason."""
        ...

    def bind(self, case: Case, first: Inputs) -> BoundCase:
        """The case's call; `first` is a set of operands to try candidates on. Raises UnsupportedError."""
        ...
