"""The tuner `torch`: opens the device, and tunes the shapes of a spec (search.py).

torch is imported in `open`, not with this module: its seconds are the tuner's start, not a shape's time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from worker.protocol import Spec
from worker.tuners.base import Emit
from worker.tuners.torch.spec import TorchOptions

if TYPE_CHECKING:
    from worker.tuners.common.device import Device


class TorchTuner:
    """Measures ways to compute a GEMM in torch, on the first GPU or on the CPU."""

    timed_canary_s = 0.5

    def __init__(self) -> None:
        self._device: Device  # since `open`
        self._import_s = 0.0

    def open(self) -> dict[str, Any]:
        """Import torch and pick the device: gfx, cu_num, device, torch, threads, and the GPU runtime's version."""
        start = time.perf_counter()
        from worker.tuners.common.device import Device

        self._device = Device()
        self._import_s = time.perf_counter() - start
        return self._device.info()

    def canary(self) -> tuple[bool, float, str]:
        """A product of Hadamard matrices, whose answer is known: every element must be exact."""
        from worker.tuners.common.device import canary

        return canary(self._device)

    def time_canary(self) -> tuple[float, float]:
        """Times of a product and of a copy, to compare GPUs."""
        from worker.tuners.common.device import timed_canary

        return timed_canary(self._device)

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Tune the shapes of a spec; seconds by kind (import: only the first time). ValueError for bad options."""
        from worker.tuners.torch.search import tune

        seconds = {**tune(spec, TorchOptions.parse(spec.options), self._device, emit), "import": self._import_s}
        self._import_s = 0.0
        return {kind: round(value, 6) for kind, value in seconds.items()}
