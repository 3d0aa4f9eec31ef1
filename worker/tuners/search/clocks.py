"""Throttling of a GPU's clock: NVML through ctypes, amdsmi where ROCm's Python module is; else unknown.

A sample taken while the clock was slowed for heat, by the board, or by a power brake is no measure of a kernel.
The power cap is another matter: a large GEMM runs into it all the time, so that is its true speed; it is not counted.

NVML: nvmlDeviceGetCurrentClocksThrottleReasons and the nvmlClocksThrottleReason* bits of nvml.h. amdsmi:
`throttle_status` of amdsmi_get_gpu_metrics_info, in the driver's common bits (SMU_THROTTLER_*, amdgpu_smu.h): 0 to 15
are power limits, 16 to 31 currents, 32 to 55 temperatures, 56 and up others such as PROCHOT.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable
from typing import Any, Protocol

THROTTLE_BITS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""nvmlClocksThrottleReasonHwSlowdown, SwThermalSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown."""
AMD_THROTTLE_BITS = ~0xFFFF
"""All of SMU_THROTTLER_* but the power limits."""
TRIES, PAUSE_S = 5, 0.05
_NVML = ("libnvidia-ml.so.1", "libnvidia-ml.so")


class GpuClock(Protocol):
    """One GPU's clock: whether it is throttled."""

    source: str

    def throttle_reason(self) -> str:
        """Reason of the throttling, "" where there is none."""


class UnknownClock:
    """A clock that cannot be read: never throttled; `source` has the reason for the device record."""

    def __init__(self, why: str) -> None:
        self.source = f"unknown: {why}"

    def throttle_reason(self) -> str:
        return ""


class NvmlClock:
    """One NVIDIA GPU by its PCI address. Raises OSError where NVML or the device is not there."""

    source = "nvml"

    def __init__(self, pci: str) -> None:
        self._lib = _load()
        if self._lib.nvmlInit_v2() != 0:
            raise OSError("nvmlInit failed")
        self._device = ctypes.c_void_p()
        if self._lib.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), ctypes.byref(self._device)) != 0:
            raise OSError(f"NVML knows no device {pci}")
        if self._reasons() is None:
            raise OSError("NVML reports no throttle reasons")

    def throttle_reason(self) -> str:
        reasons = self._reasons() or 0
        return ", ".join(word for bit, word in THROTTLE_BITS.items() if reasons & bit)

    def _reasons(self) -> int | None:
        reasons = ctypes.c_ulonglong()
        status = self._lib.nvmlDeviceGetCurrentClocksThrottleReasons(self._device, ctypes.byref(reasons))
        return reasons.value if status == 0 else None


class AmdSmiClock:
    """One AMD GPU by its PCI address through ROCm's `amdsmi`. Raises OSError where it reports no throttle status."""

    source = "amdsmi"

    def __init__(self, pci: str, module: Any) -> None:
        self._smi = module
        try:
            module.amdsmi_init()
            found = {str(module.amdsmi_get_gpu_device_bdf(h)).lower(): h for h in module.amdsmi_get_processor_handles()}
        except Exception as e:  # the module has exceptions of its own
            raise OSError(f"amdsmi: {e}") from e
        handle = found.get(pci.lower())
        if handle is None:
            raise OSError(f"amdsmi knows no device {pci}")
        self._handle = handle
        if self._status() is None:
            raise OSError("amdsmi reports no throttle status")

    def throttle_reason(self) -> str:
        status = (self._status() or 0) & AMD_THROTTLE_BITS
        return f"throttle status {status:#x}" if status else ""

    def _status(self) -> int | None:
        try:
            status = self._smi.amdsmi_get_gpu_metrics_info(self._handle).get("throttle_status")
        except Exception:  # noqa: BLE001 - as above
            return None
        return status if isinstance(status, int) else None


def _load() -> ctypes.CDLL:
    for name in _NVML:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("no NVML library")


def clock_of(backend: str, pci: str) -> GpuClock:
    """The clock of the GPU at a PCI address (`0000:1b:00.0`), `backend` being cuda or hip."""
    try:
        if backend == "cuda":
            return NvmlClock(pci)
        if backend == "hip":
            return AmdSmiClock(pci, importlib.import_module("amdsmi"))
    except (OSError, ImportError, AttributeError) as e:
        return UnknownClock(str(e))
    return UnknownClock(f"no GPU ({backend})")


class Unthrottled:
    """A timer that drops a sample taken while the clock was throttled and takes another, up to TRIES times in a row.

    After that the sample counts as it is, `kept` counts those, `dropped` the samples that were dropped.
    """

    def __init__(self, clock: GpuClock, pause: Callable[[float], None] = time.sleep) -> None:
        self._clock, self._pause = clock, pause
        self.dropped = self.kept = 0
        self.why = ""

    def around(self, timer: Callable[[int], float]) -> Callable[[int], float]:
        """`timer` with throttled samples taken again."""

        def timed(calls: int) -> float:
            for _ in range(TRIES):
                before = self._clock.throttle_reason()
                seconds = timer(calls)
                why = before or self._clock.throttle_reason()
                if not why:
                    return seconds
                self.dropped += 1
                self.why = why
                self._pause(PAUSE_S)
            self.dropped -= 1
            self.kept += 1
            return seconds

        return timed
