"""The tuner `torch` as the worker sees it. Imports torch when it is opened, not before."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from worker.protocol import Spec, SpecShape
from worker.tuners.base import Emit
from worker.tuners.common.problem import Problem, UnsupportedError, parse
from worker.tuners.torch.spec import Options

if TYPE_CHECKING:
    from worker.tuners.common.device import Device
    from worker.tuners.torch.operands import Weights
    from worker.tuners.torch.search import StageTimes


class TorchTuner:
    """Measures ways to compute a GEMM in torch, on the first GPU or on the CPU."""

    def __init__(self) -> None:
        self._device: Device | None = None
        self._import_s = 0.0
        self._weights: Weights | None = None

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

        return canary(self._opened())

    timed_canary_s = 0.5

    def time_canary(self) -> tuple[float, float]:
        """Times of a product and of a copy, to compare GPUs."""
        from worker.tuners.common.device import timed_canary

        return timed_canary(self._opened())

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Tune the shapes of a spec; seconds by kind (import: only the first time). ValueError for bad options."""
        device, options = self._opened(), Options.parse(spec.options)
        import torch

        from worker.tuners.torch.search import StageTimes

        start = time.perf_counter()
        spent = StageTimes()
        try:
            with torch.inference_mode():
                for shape in spec.shapes:
                    self._tune_shape(shape, spec, options, device, emit, spent)
        finally:
            self._weights = None
            device.leave()
        seconds = {k: spent.seconds.get(k, 0.0) for k in ("inputs", "check", "measure")}
        seconds["other"] = max(0.0, time.perf_counter() - start - sum(seconds.values()))
        seconds["import"], self._import_s = self._import_s, 0.0
        return {k: round(v, 6) for k, v in seconds.items()}

    def _tune_shape(
        self, shape: SpecShape, spec: Spec, options: Options, device: Device, emit: Emit, spent: StageTimes
    ) -> None:
        from worker.tuners.torch.operands import Operands, needed_bytes
        from worker.tuners.torch.search import Search
        from worker.tuners.torch.variants import TooLargeError

        started = time.perf_counter()
        emit.started(shape.id)
        try:
            problem = parse(spec.family, shape.key)
            with spent.on("inputs"):
                weights = self._weights_of(problem, options, device)
                if weights is None:
                    need, free = needed_bytes(problem), device.available()
                    raise UnsupportedError(f"operands, output and reference need {need} bytes, {free} are available")
                operands = Operands.make(problem, weights)
        except (UnsupportedError, TooLargeError) as e:
            emit.failed(shape.id, "unsupported", str(e))
            return
        emit.alive()
        only = spec.only_of(shape.id)
        Search(shape, operands, device, options, spec.err_ratio, emit, spent, started, only=only).run()

    def _weights_of(self, p: Problem, options: Options, device: Device) -> Weights | None:
        """W for a problem, kept for the next shape of the group; None where even the operands do not fit."""
        from worker.tuners.torch.operands import Weights, needed_bytes, weight_key

        kept = self._weights
        if kept is not None and weight_key(kept.problem) != weight_key(p):
            self._weights = kept = None
        need = needed_bytes(p) - (p.w_bytes if kept is not None else 0)
        if need > 0.9 * device.available():
            return None
        rotate = options.rotate_mb << 20 or device.rotate_bytes
        if kept is None:
            kept = Weights.make(p, device.torch, rotate, device.available)
            self._weights = kept
        return kept

    def _opened(self) -> Device:
        if self._device is None:
            raise RuntimeError("the tuner torch was not opened")
        return self._device
