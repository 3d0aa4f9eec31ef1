"""What a backend is, and which there are. A backend lives in a child process of its own (child.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from worker.bench.case import Case
from worker.bench.options import OWN, Options

if TYPE_CHECKING:
    import torch

    from worker.bench.backends.inputs import Inputs
    from worker.tuners.common.device import Device

Call = Callable[[], "torch.Tensor"]


@dataclass(slots=True)
class Bound:
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
    """One way to multiply."""

    def load(self) -> dict[str, Any]:
        """Import what is needed, once; what is worth recording. Raises UnavailableError with the reason."""
        ...

    def bind(self, case: Case, first: Inputs) -> Bound:
        """The case's call; `first` is a set of operands to try candidates on. Raises UnsupportedError."""
        ...


def make(name: str, options: Options, device: Device) -> Backend:
    """The backend of that name (options.BACKENDS)."""
    if name == "torch":
        from worker.bench.backends.with_torch import TorchBackend

        return TorchBackend()
    if name == OWN:
        from worker.bench.backends.with_triton import TritonBackend

        return TritonBackend(options, device)
    if name == "aiter":
        from worker.bench.backends.with_aiter import Dispatch

        return Dispatch()
    if name == "aiter-gluon":
        from worker.bench.backends.gluon import GluonBackend

        return GluonBackend(options, device)
    from worker.bench.backends.with_aiter import AiterTriton

    return AiterTriton(name)
