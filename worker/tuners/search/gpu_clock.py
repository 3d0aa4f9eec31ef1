"""The clock of the GPU in use: whether it is throttled, and samples that do not count therefore. Imports torch.

A sample does not count if the clock was slowed for heat, by the board, or by a power brake while it was taken.
The power cap is another matter: a large GEMM runs into it all the time, so that is its true speed; it is not counted.
`DeviceBench` asks `clock_of` once for its GPU, and wraps the timer of each candidate in an `Unthrottled`.
Without NVML (through ctypes) and amdsmi (ROCm's Python module) the clock is unknown.

NVML: nvmlDeviceGetCurrentClocksThrottleReasons and the nvmlClocksThrottleReason* bits of nvml.h. amdsmi:
`throttle_status` of amdsmi_get_gpu_metrics_info, in the driver's common bits (SMU_THROTTLER_*, amdgpu_smu.h): 0 to 15
are power limits, 16 to 31 currents, 32 to 55 temperatures, 56 and up others such as PROCHOT.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from worker.text import plural

THROTTLE_BITS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}  # nvmlClocksThrottleReasonHwSlowdown, SwThermalSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown
AMD_THROTTLE_BITS = ~0xFFFF  # all of SMU_THROTTLER_* but the power limits
TRIES = 5
"""Samples that are taken under a throttled clock, one after the other; the last of them counts."""
PAUSE_S = 0.05
"""Seconds from a sample that is dropped to the next."""


class SizedTimer(Protocol):
    """A Timer (worker/tuners/common/measure.py) that makes `size` calls at once."""

    size: int

    def __call__(self, calls: int) -> float: ...


class Clock(NamedTuple):
    """A GPU's clock."""

    source: str
    """The library that says whether it is throttled, or why that is unknown."""
    throttled: Callable[[], str] = lambda: ""
    """Gives the reason for which it is throttled now, "" if it is not."""


def clock_of(backend: str) -> Clock:
    """The clock of the GPU in use, `backend` being cuda or hip."""
    try:
        p: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        pci = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        if backend == "cuda":
            return Clock("nvml", _nvml(pci))
        return Clock("amdsmi", _amdsmi(pci, importlib.import_module("amdsmi")))
    except (OSError, ImportError, AttributeError) as e:  # an older torch names no PCI address
        return Clock(f"unknown: {e}")


def _nvml(pci: str) -> Callable[[], str]:
    """Throttling of an NVIDIA GPU. Raises OSError if NVML or the device is not there."""
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    if lib.nvmlInit_v2() != 0:
        raise OSError("nvmlInit failed")
    device = ctypes.c_void_p()
    reasons = ctypes.c_ulonglong()
    if lib.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), ctypes.byref(device)) != 0:
        raise OSError(f"NVML knows no device {pci}")

    def status() -> int:
        return int(lib.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(reasons)))

    if status() != 0:
        raise OSError("NVML reports no throttle reasons")

    def throttled() -> str:
        bits = reasons.value if status() == 0 else 0
        return ", ".join(words for bit, words in THROTTLE_BITS.items() if bits & bit)

    return throttled


def _amdsmi(pci: str, smi: Any) -> Callable[[], str]:
    """Throttling of an AMD GPU through ROCm's `amdsmi`. Raises OSError if it reports no throttle status."""
    try:
        smi.amdsmi_init()
        handles = {str(smi.amdsmi_get_gpu_device_bdf(h)).lower(): h for h in smi.amdsmi_get_processor_handles()}
    except Exception as e:  # the module has exceptions of its own
        raise OSError(f"amdsmi: {e}") from e
    if pci.lower() not in handles:
        raise OSError(f"amdsmi knows no device {pci}")

    def status() -> int | None:
        try:
            status = smi.amdsmi_get_gpu_metrics_info(handles[pci.lower()]).get("throttle_status")
        except Exception:  # noqa: BLE001 - as above
            return None
        return status if isinstance(status, int) else None

    if status() is None:
        raise OSError("amdsmi reports no throttle status")

    def throttled() -> str:
        bits = (status() or 0) & AMD_THROTTLE_BITS
        return f"throttle status {bits:#x}" if bits else ""

    return throttled


class Unthrottled:
    """A timer that drops a sample taken while the clock was throttled and takes another, up to TRIES times in a row.

    After that the sample counts as it is, and `remark` says so.
    """

    def __init__(self, clock: Clock, timer: SizedTimer, pause: Callable[[float], None] = time.sleep) -> None:
        self.size = timer.size
        self.remark = ""
        self._clock = clock
        self._timer = timer
        self._pause = pause
        self._kept = 0

    def __call__(self, calls: int) -> float:
        for _ in range(TRIES):
            before = self._clock.throttled()
            seconds = self._timer(calls)
            why = before or self._clock.throttled()
            if not why:
                return seconds
            self._pause(PAUSE_S)
        self._kept += 1
        self.remark = f"{plural(self._kept, 'sample')} while the clock was throttled ({why})"
        return seconds
