"""Backend `triton`: gemmfleet's own kernels (worker/tuners/triton)."""

from __future__ import annotations

from typing import Any

from worker.bench.backend import Bound
from worker.bench.case import Case, UnavailableError, UnsupportedError
from worker.bench.inputs import Inputs
from worker.bench.options import Options
from worker.tuners.torch.device import Device


class TritonBackend:
    def __init__(self, options: Options, device: Device) -> None:
        self._options, self._device = options, device

    def load(self) -> dict[str, Any]:
        raise UnavailableError("this version has no Triton kernels of its own yet")

    def bind(self, case: Case, first: Inputs) -> Bound:
        raise UnsupportedError("no")
